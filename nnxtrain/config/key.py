"""How one configuration key is declared: default, doc, choices, range, and when it is read."""

from dataclasses import Field, field
from typing import Any

from nnxtrain.config.reads import Condition, show

LARGEST = 2**31 - 1  # counters on device are int32
SMALLEST = 2.0**-126  # a number nearer to 0 is 0 in float32

Problem = tuple[str, str]  # `(key, what is wrong and what would be right)`


def key(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    span: str = "",
    planned: bool = False,
    read: Condition | None = None,
) -> Any:
    """Declares a field of a section.

    Args:
        default: the value when the key is not set.
        doc: one line, for `--list-keys`; states the unit.
        choices: the valid names; empty allows any value of the type.
        span: the valid numbers, as an interval: `[0, 1)` contains 0 but not 1.
        planned: what reads the key does not exist yet: only the default is valid.
        read: the condition under which the key is read; None means always.
    """
    rules = {"doc": doc, "choices": choices, "span": span, "planned": planned, "read": read}
    return field(default=default, metadata=rules)


def problem_of(declared: Field, value: Any) -> str | None:
    """Returns what is wrong with `value` according to the declaration alone, or None."""
    if declared.metadata["planned"] and value != declared.default:
        return f"{show(value)} is not implemented yet; only the default, {show(declared.default)}, works"
    span = declared.metadata["span"]
    if value is None or not span:
        return None
    low, high = (float(end) for end in span[1:-1].split(","))
    if value < low or (value == low and span.startswith("(")):
        return f"{value} must be {'above' if span.startswith('(') else 'at least'} {low:.15g}"
    if value > high or (value == high and span.endswith(")")):
        return f"{value} must be {'below' if span.endswith(')') else 'at most'} {high:.15g}"
    if isinstance(value, int) and value > LARGEST:
        return f"{value} must be at most {LARGEST}"
    if 0 < abs(value) < SMALLEST:
        return f"{value} must be 0 or at least {SMALLEST:.3g}; smaller numbers are 0 in float32"
    return None
