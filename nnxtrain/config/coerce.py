"""Converts text of a file or command line to the declared type of a key."""

import math
import re
import types
import typing
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from nnxtrain.config.echo import echo
from nnxtrain.config.reads import show
from nnxtrain.config.words import NULLS, Word

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d{1,4})?", re.ASCII)
LONGEST_NUMBER = 1000  # characters
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def coerce(word: Word, kind: Any, choices: tuple[str, ...]) -> Any:
    """Returns the value of `word` as `kind`: bool, int, float, str, `tuple[str, ...]`, or one of these `| None`.

    Raises:
        LookupError: the text is not one of `choices`.
        ValueError: the text is not such a value; says what was expected and what was written.
    """
    if isinstance(kind, types.UnionType):
        if word.is_null:
            return None
        kind = next(member for member in typing.get_args(kind) if member is not type(None))
    if word.text is None:
        raise ValueError("expected a value, got a section")
    if typing.get_origin(kind) is tuple:
        return () if word.is_null else _items(word.text)
    if not isinstance(word.text, str):
        raise ValueError(f"expected one value, got the list {show(word.text)}")
    if word.is_null and "none" in choices:
        return "none"
    value = _SCALARS[kind](word.text)
    if choices and value not in choices:
        raise LookupError(value)
    return value


def _items(text: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(text, tuple):
        return text
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    items = [item.strip() for item in inner.split(",") if item.strip()]
    for number, item in enumerate(items, 1):
        if item.lower() in NULLS:
            raise ValueError(f"item {number} of the list is null; leave it out, or quote it if it is text")
    return tuple(item.strip("'\"") for item in items)


def _bool(text: str) -> bool:
    if (value := _SWITCH.get(text.lower())) is None:
        raise ValueError(f"expected true or false, got '{echo(text)}'")
    return value


def _int(text: str) -> int:
    if not _is_number(text):
        raise ValueError(f"expected a whole number, got '{echo(text)}'")
    number = Decimal(text.replace("_", ""))
    if abs(number) > 2**63:
        raise ValueError(f"expected a number below 2^63, got '{echo(text)}'")
    if number != number.to_integral_value():
        raise ValueError(f"expected a whole number, got '{echo(text)}'")
    return int(number)


def _float(text: str) -> float:
    if not _is_number(text) or not math.isfinite(float(text.replace("_", ""))):
        raise ValueError(f"expected a finite number, got '{echo(text)}'")
    return float(text.replace("_", ""))


def _is_number(text: str) -> bool:
    return len(text) <= LONGEST_NUMBER and _NUMBER.fullmatch(text) is not None


_SCALARS: dict[type, Callable[[str], Any]] = {bool: _bool, int: _int, float: _float, str: str}


def name_of(kind: Any) -> str:
    """Returns the type for `--list-keys`: `int`, `float or null`, `list`."""
    if isinstance(kind, types.UnionType):
        members = [name_of(member) for member in typing.get_args(kind) if member is not type(None)]
        return " or ".join([*members, "null"])
    return "list" if typing.get_origin(kind) is tuple else kind.__name__
