"""Checks of a configuration; those that read an invalid key are skipped, so that all others can still be reported."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from nnxtrain.config.key import Problem
from nnxtrain.config.reads import Clause, show
from nnxtrain.config.schema import Config, leaves, sections

LEAVES = leaves()
SECTIONS = sections()
S = TypeVar("S")


class _InvalidKeyError(Exception):
    """A check reads a key whose value is invalid."""


def value_at(config: Config, path: str) -> Any:
    """Returns the value of the dotted key `path`."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def combined_problems(config: Config) -> Iterator[Problem]:
    """Yields the problems of keys in combination, within each section and across sections."""
    for section in (*(getattr(config, name) for name in SECTIONS), config):
        for check in _checks_of(section):
            with contextlib.suppress(_InvalidKeyError):
                yield from check


def _checks_of(section: Any) -> tuple[Iterator[Problem], ...]:
    """Returns the checks of a section; none if even listing them reads an invalid key."""
    with contextlib.suppress(_InvalidKeyError):
        return section.checks() if hasattr(section, "checks") else ()
    return ()


def unread(config: Config, path: str) -> str | None:
    """Returns why the key `path` has no effect in `config`, or None if it has one.

    An entry from outside the package may read any key.

    Args:
        config: of the run, `without` its invalid keys.
        path: of the key.
    """
    rule = LEAVES[path].declared.metadata["read"]
    if rule is None:
        return None

    def holds(clause: Clause) -> bool:
        there, choices = value_at(config, clause.path), LEAVES[clause.path].declared.metadata["choices"]
        is_foreign = bool(choices) and there is not None and there not in choices
        return is_foreign or clause.holds(there)

    with contextlib.suppress(_InvalidKeyError):
        if not rule.holds(holds):
            value = show(value_at(config, path))
            return f"{value} has no effect: it is read only if {rule.words(lambda other: value_at(config, other))}"
    return None


def without(config: Config, broken: Collection[str]) -> Config:
    """Returns `config` such that reading one of the keys `broken` raises `_InvalidKeyError`."""
    parts = {}
    for name in SECTIONS:
        if names := [path.partition(".")[2] for path in broken if path.startswith(f"{name}.")]:
            parts[name] = _with_invalid(getattr(config, name), names)
    return _with_invalid(replace(config, **parts), [path for path in broken if "." not in path and path in LEAVES])


def _with_invalid(section: S, names: Collection[str]) -> S:
    """Returns a copy whose attributes `names` raise, or the section itself if there are none."""
    if not names:
        return section

    def refuse(section: Any) -> NoReturn:
        raise _InvalidKeyError

    kind = type(type(section).__name__, (type(section),), {name: property(refuse) for name in names})
    copy: S = object.__new__(kind)
    vars(copy).update(vars(section))
    return copy


def dubious_settings(config: Config) -> Iterator[str]:
    """Yields a line for each setting that is allowed but probably not intended."""
    warmup = config.schedule.warmup(config.steps)
    if 0 < config.steps <= warmup:
        key = "warmup_steps" if config.schedule.warmup_fraction is None else "warmup_fraction"
        rule = f"the warm-up of {warmup} updates is not shorter than the run, steps={config.steps}"
        yield f"schedule.{key}: {rule}: optimizer.learning_rate={config.optimizer.learning_rate} is never reached"
