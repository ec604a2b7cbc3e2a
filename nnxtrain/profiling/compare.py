"""What got slower from one trace to another."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nnxtrain.profiling.page import Table
from nnxtrain.profiling.trace import Digest, Total


@dataclass(frozen=True)
class Change:
    """Milliseconds a step under one name, before and after; 0 where the name does not occur.

    Attributes:
        kind: `step`, `annotation`, `part` or `operation`.
        name: the name, with direction or program.
        before: in the first set of traces.
        after: in the second set.
    """

    kind: str
    name: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        """Milliseconds by which a step got slower."""
        return self.after - self.before


def changes(before: Sequence[Digest], after: Sequence[Digest]) -> list[Change]:
    """Returns the changes between two sets of traces, by kind, largest slowdown first.

    Times are per step, so windows of different lengths can be compared.
    """
    old, new = _per_step(before), _per_step(after)
    found = [Change(*key, old.get(key, 0.0), new.get(key, 0.0)) for key in dict.fromkeys([*old, *new])]
    kinds = list(dict.fromkeys(change.kind for change in found))
    return sorted(found, key=lambda change: (kinds.index(change.kind), -change.difference, change.name))


def change_tables(found: Iterable[Change], *, top: int = 10) -> list[Table]:
    """Returns a table per kind, each with the `top` largest slowdowns."""
    by_kind: dict[str, list[Change]] = defaultdict(list)
    for change in found:
        by_kind[change.kind].append(change)
    columns = ("name", "before, ms/step", "after, ms/step", "difference", "ratio")
    return [
        Table(
            f"{kind.capitalize()}: largest slowdown first",
            columns,
            [
                (one.name, one.before, one.after, one.difference, one.after / one.before if one.before else "new")
                for one in rows[:top]
            ],
        )
        for kind, rows in by_kind.items()
    ]


def _per_step(digests: Sequence[Digest]) -> dict[tuple[str, str], float]:
    """Returns (kind, name) → milliseconds a step."""
    steps = max(1, sum(len(digest.steps) for digest in digests))
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for digest in digests:
        sums["step", "whole step"] += sum(step.ms for step in digest.steps)
        kinds: dict[str, list[Total]] = {
            "annotation": digest.annotations,
            "part": digest.parts,
            "operation": digest.operations,
        }
        for kind, totals in kinds.items():
            for total in totals:
                sums[kind, f"{total.name} {total.detail}".strip()] += total.ms
    return {key: total / steps for key, total in sums.items()}
