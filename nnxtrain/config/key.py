"""How one configuration key is declared: default, doc, choices, range."""

import difflib
from collections.abc import Collection
from dataclasses import Field, field
from typing import Any

LARGEST = 2**31 - 1  # counters on device are int32


def key(default: Any, doc: str, *, choices: tuple[str, ...] = (), span: str = "", planned: bool = False) -> Any:
    """Declares a field of a section.

    Args:
        default: the value when no one gives the key.
        doc: one line for people; says the unit.
        choices: the names that are admitted; empty admits any value of the type.
        span: the numbers that are admitted, as an interval: `[0, 1)` holds 0 but not 1, `(0, inf)` no 0 and has no end.
        planned: the part that reads the key does not exist yet: only the default is admitted.
    """
    return field(default=default, metadata={"doc": doc, "choices": choices, "span": span, "planned": planned})


def problem_of(declared: Field, value: Any) -> str | None:
    """Returns what is wrong with `value` by the declaration alone, or None."""
    if declared.metadata["planned"] and value != declared.default:
        return f"{show(value)} is not built yet; only the default, {show(declared.default)}, works"
    span = declared.metadata["span"]
    if value is None or not span:
        return None
    low, high = (float(end) for end in span[1:-1].split(","))
    if value < low or (value == low and span.startswith("(")):
        return f"{value} must be {'above' if span.startswith('(') else 'at least'} {low:g}"
    if value > high or (value == high and span.endswith(")")):
        return f"{value} must be {'below' if span.endswith(')') else 'at most'} {high:g}"
    if isinstance(value, int) and value > LARGEST:
        return f"{value} must be at most {LARGEST}"
    return None


def none_of(name: str, names: Collection[str]) -> str:
    """Returns that `name` is none of `names`, with the nearest of them."""
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"{name!r} is not one of {', '.join(names)}{f'; did you mean {near[0]}?' if near else ''}"


def show(value: Any) -> str:
    """Returns `value` as one would write it in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(show, value))}]"
    return str(value)
