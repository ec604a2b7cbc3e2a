"""When a key is read: conditions on other keys, from which messages can be made."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from nnxtrain.config.echo import echo


@dataclass(frozen=True)
class Clause:
    """A condition on one other key.

    Attributes:
        path: of the other key.
        values: it is one of these, or a list that contains one of them; empty: it is not null, 0, false or empty.
        is_not: it is not one of `values`.
    """

    path: str
    values: tuple[Any, ...] = ()
    is_not: bool = False

    def holds(self, value: Any) -> bool:
        """Tells whether the clause holds if the key is `value`."""
        if not self.values:
            return bool(value)
        found = any(item in self.values for item in (value if isinstance(value, tuple) else (value,)))
        return found != self.is_not

    def words(self, value: Any) -> str:
        """Returns the clause for a message; `value` is that of the key."""
        if not self.values and value:
            return f"{self.path} is set"
        if not self.values or self.is_not:
            return f"{self.path} is not {show(self.values[0] if self.values else value)}"
        joined = " or ".join(filter(None, [", ".join(map(show, self.values[:-1])), show(self.values[-1])]))
        return f"{self.path} contains {joined}" if isinstance(value, tuple) else f"{self.path}={joined}"


@dataclass(frozen=True)
class Condition:
    """Alternatives of clauses that must all hold; made by `when`, `unless`, `by`, combined by `&` and `|`.

    Attributes:
        ways: the alternatives.
        command: the only one that reads the key; empty for all.
        is_only_noted: a key that is not read is ignored with a note, never refused.
    """

    ways: tuple[tuple[Clause, ...], ...]
    command: str = ""
    is_only_noted: bool = False

    def __and__(self, other: "Condition") -> "Condition":
        """Returns the condition that both conditions hold."""
        ways = tuple(mine + its for mine, its in itertools.product(self.ways, other.ways))
        return Condition(ways, self.command or other.command)

    def __or__(self, other: "Condition") -> "Condition":
        """Returns the condition that at least one of both holds."""
        return Condition(self.ways + other.ways)

    def only_noted(self) -> "Condition":
        """Returns the condition of a key that is ignored with a note where it has no effect."""
        return replace(self, is_only_noted=True)

    def holds(self, test: Callable[[Clause], bool]) -> bool:
        """Tells whether the condition holds; `test` tells whether a clause does."""
        return any(all(map(test, way)) for way in self.ways)

    def words(self, value_of: Callable[[str], Any]) -> str:
        """Returns the condition for a message, with the actual values of its keys."""
        ways = [" and ".join(clause.words(value_of(clause.path)) for clause in way) for way in self.ways]
        now = [f"{path} is {show(value_of(path))}" for path in self.paths()]
        return f"{', or '.join(ways)}; but {' and '.join(now)}"

    def paths(self) -> Iterator[str]:
        """Yields each key that is part of the condition once."""
        yield from dict.fromkeys(clause.path for way in self.ways for clause in way)


def when(path: str, *values: Any) -> Condition:
    """Returns the condition that the key `path` is one of `values`, or a list with one; without values: it is set."""
    return Condition(((Clause(path, values),),))


def unless(path: str, value: Any) -> Condition:
    """Returns the condition that the key `path` is not `value`."""
    return Condition(((Clause(path, (value,), is_not=True),),))


def by(command: str) -> Condition:
    """Returns the condition that the command is `python -m nnxtrain.COMMAND`."""
    return Condition(((),), command)


def show(value: Any) -> str:
    """Returns `value` as in YAML, foreign text truncated."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return echo(f"[{', '.join(map(show, value))}]")
    return echo(value)
