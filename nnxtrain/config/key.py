"""How one configuration key is declared: default, doc, choices, range."""

from dataclasses import Field, field
from typing import Any

LARGEST = 2**31 - 1  # counters on device are int32


def key(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    below: float | None = None,
    planned: bool = False,
) -> Any:
    """Declares a field of a section.

    Args:
        default: the value when no one gives the key.
        doc: one line for people; says the unit.
        choices: the names that are admitted; empty admits any value of the type.
        low: the smallest value admitted.
        high: the largest value admitted.
        below: the value must be smaller than this.
        planned: the part that reads the key does not exist yet: only the default is admitted.
    """
    metadata = {"doc": doc, "choices": choices, "low": low, "high": high, "below": below, "planned": planned}
    return field(default=default, metadata=metadata)


def problem_of(declared: Field, value: Any) -> str | None:
    """Returns what is wrong with `value` by the declaration alone, or None."""
    rule = declared.metadata
    if rule["planned"] and value != declared.default:
        return f"{show(value)} is not built yet; only the default, {show(declared.default)}, works"
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if rule["low"] is not None and value < rule["low"]:
            return f"{value} must be at least {rule['low']}"
        high = LARGEST if rule["high"] is None and isinstance(value, int) else rule["high"]
        if high is not None and value > high:
            return f"{value} must be at most {high}"
        if rule["below"] is not None and value >= rule["below"]:
            return f"{value} must be below {rule['below']}"
    return None


def show(value: Any) -> str:
    """Returns `value` as one would write it in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(show, value))}]"
    return str(value)
