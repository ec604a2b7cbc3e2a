"""Which part of the model an operation of a trace belongs to.

A trace holds the programs that ran, compiled: each instruction with the path of the scopes that it was traced in. The
reader of jax gives events only, so the few fields that matter are taken from the bytes, by their numbers in XLA's
`xplane.proto` and `hlo.proto`.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

# wrappers and control flow in a path, which are no part of a model
STRUCTURE = re.compile(
    r"while|body|cond|scan|closed_call|core_call|eval_jaxpr|checkpoint|remat\w*|rematted_computation|custom_[jv][jv]p\w*|pjit"
    r"|jit|shard_map|branch_\d+_fun"
)
WRAPPED = re.compile(r"(?:transpose|jvp|vmap)\((.*)\)")
SCOPE = re.compile(r"[A-Za-z_]\w*")


class Origin(NamedTuple):
    """Where an instruction comes from: scopes from the outermost in, and whether it is of the backward pass.

    Attributes:
        part: such as `layer/attention/attend`; empty outside all scopes.
        direction: `forward`, `backward`, `recomputed` (by remat, for the backward pass), or empty outside both.
    """

    part: str
    direction: str


def origins(xspace: bytes) -> dict[str, dict[str, Origin]]:
    """Returns program → instruction → origin; programs have the names that their events give, such as `jit_step`."""
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
    """Returns the origin from the path of an instruction, such as `jit(step)/transpose(jvp(loss))/mul`."""
    path = path.partition(";")[0]  # of several that were fused, the first
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
    """Yields the fields of a message that have bytes and the given number."""
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
            raise ValueError(f"no message: wire type {kind}")


def _only(message: memoryview, number: int) -> memoryview:
    """Returns the field of that number, empty if it is missing."""
    return next(_all(message, number), memoryview(b""))


def _text(message: memoryview, number: int) -> str:
    return bytes(_only(message, number)).decode(errors="replace")


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """Returns the number that starts at `place`, seven bits a byte, and the place after it."""
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
