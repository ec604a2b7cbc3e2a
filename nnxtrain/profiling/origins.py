"""Which part of the model an operation of a trace belongs to.

A trace contains the compiled programs that ran: each instruction with its name stack. jax's reader gives events only,
so the few fields needed are parsed from the bytes, by their numbers in XLA's `xplane.proto` and `hlo.proto`.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

# wrappers and control flow in a name stack, which are not parts of a model
STRUCTURE = re.compile(
    r"while|body|cond|scan|closed_call|core_call|eval_jaxpr|checkpoint|remat\w*|rematted_computation|custom_[jv][jv]p\w*|pjit"
    r"|jit|shard_map|branch_\d+_fun"
)
WRAPPED = re.compile(r"(?:transpose|jvp|vmap)\((.*)\)")
SCOPE = re.compile(r"[A-Za-z_]\w*")


class Origin(NamedTuple):
    """Where an instruction comes from: its named scopes, outermost first, and the pass it belongs to.

    Attributes:
        part: scopes such as `layer/attention/attend`; empty outside all scopes.
        direction: `forward`, `backward`, `recomputed` (by remat, for the backward pass), or empty (neither).
    """

    part: str
    direction: str


def origins(xspace: bytes) -> dict[str, dict[str, Origin]]:
    """Returns program → instruction → origin; programs are named as in their events, such as `jit_step`."""
    found: dict[str, dict[str, Origin]] = {}
    for plane in _all(memoryview(xspace), 1):
        if _text(plane, 2) != "/host:metadata":
            continue
        for entry in _all(plane, 4):
            for stat in _all(_only(entry, 2), 5):
                for module in _all(_only(stat, 6), 1):
                    found.setdefault(_text(module, 1), {}).update(_instructions(module))
    return found


def origin_of(path: str) -> Origin:
    """Returns the origin from the name stack of an instruction, such as `jit(step)/transpose(jvp(loss))/mul`."""
    path = path.partition(";")[0]  # the first of several that were fused
    names = []
    for piece in path.split("/")[:-1]:  # the last is the primitive
        while inner := WRAPPED.fullmatch(piece):
            piece = inner[1]
        if SCOPE.fullmatch(piece) and not STRUCTURE.fullmatch(piece):
            names.append(piece)
    direction = "forward" if "jvp(" in path else ""
    if "transpose(" in path:
        direction = "recomputed" if "rematted_computation" in path else "backward"
    return Origin("/".join(names), direction)


def _instructions(module: memoryview) -> Iterator[tuple[str, Origin]]:
    for computation in _all(module, 3):
        for instruction in _all(computation, 2):
            yield _text(instruction, 1), origin_of(_text(_only(instruction, 7), 2))


def _all(message: memoryview, number: int) -> Iterator[memoryview]:
    """Yields the length-delimited fields of a message with the given number."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == 2:
            size, place = _varint(message, place)
            if tag >> 3 == number:
                yield message[place : place + size]
            place += size
        elif kind == 0:
            _, place = _varint(message, place)
        elif kind in (1, 5):
            place += 8 if kind == 1 else 4
        else:
            raise ValueError(f"not a protobuf message: wire type {kind}")


def _only(message: memoryview, number: int) -> memoryview:
    """Returns the first field with the given number, empty if there is none."""
    return next(_all(message, number), memoryview(b""))


def _text(message: memoryview, number: int) -> str:
    return bytes(_only(message, number)).decode(errors="replace")


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """Returns the varint at offset `place`, and the offset after it."""
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
