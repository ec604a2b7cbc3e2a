"""Finds the collectives in optimised HLO (`compiled.as_text()`): along which axes, how often, how many bytes.

The compiler rewrites collectives. On TPU one that overlaps with matrix products appears in each of their fusions (only
the first counts here), a reduce-scatter may be an all-reduce in a fusion of that name, or a gather a loop of permutes.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)")
_CALLED = re.compile(r"\b(?:calls|to_apply|condition|body|\w+_computations?)=\{?((?:%[\w.-]+(?:, )?)+)")
_NAME = re.compile(r"%([\w.-]+)")
_COLLECTIVE = re.compile(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?")
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,<=]*)\]")  # bf16[8,128] of bf16[8,128]{1,0:T(8,128)(2,1)S(1)}
_MESH = re.compile(r"replica_groups=mesh\[([^]]*)\] \{([^}:]*)\}")  # mesh['a'=2,'b'=4] {'b'}, axes of the compiler
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")  # [4,2]<=[2,4]T(1,0)
_WRITTEN = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}")  # {{0,1},{2,3}}


class Collective(NamedTuple):
    """One collective of a program, as one device sees it."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute
    axes: tuple[str, ...]  # mesh axes of its groups; () if no set of axes forms them
    count: int  # type: ignore[assignment]  # executions in a run, all branches of conditionals taken; hides tuple.count
    bytes_: int  # of one execution: the whole array for all-gather and reduce-scatter, else the part of one device
    group: int  # devices in a group; all of the mesh if the groups cannot be parsed

    def link_bytes(self) -> float:
        """Returns the bytes that one device sends in one execution, assuming ring algorithms."""
        others = (self.group - 1) / self.group
        return self.bytes_ * {"all-reduce": 2 * others, "collective-permute": 1}.get(self.kind, others)


class Total(NamedTuple):
    """All collectives of one kind along the same axes in one execution: count, bytes, bytes sent by one device."""

    kind: str
    axes: tuple[str, ...]
    count: int  # type: ignore[assignment]  # hides tuple.count
    bytes_: int
    link_bytes: float


class _Instruction(NamedTuple):
    root: bool
    name: str
    shape: str
    code: str
    operands: list[str]
    called: list[str]  # computations that it runs; not those of `-done`, which `-start` ran
    words: str  # all that follows the code


class _Program(NamedTuple):
    computations: dict[str, list[_Instruction]]  # that of the program itself is "ENTRY"
    named: dict[str, _Instruction]  # names are unique in a program


def collectives(text: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Returns the collectives of a program in execution order.

    Args:
        text: of an optimised program. A loop whose trip count is not in the text counts once.
        mesh_shape: size by axis, in the order of the mesh that the program was compiled for.
    """
    program, found = _read(text), []
    begun = {name for op in program.named.values() if "AsyncCollectiveStart" in op.words for name in op.operands}
    for op, computation, count in _executions(program, "ENTRY", 1):
        goes_on = "chain_id=" in op.words and op.name not in begun
        if (match := _COLLECTIVE.fullmatch(op.code)) and not goes_on:
            kind = "reduce-scatter" if computation.startswith("all-reduce-scatter") else match[1]
            axes, group = _axes_and_group(op.words, mesh_shape)
            held = sum(_bytes(program.named[name].shape) for name in op.operands)  # `-start` returns more
            found.append(Collective(kind, axes, count, held * (group if kind == "all-gather" else 1), group))
    return found


def totals(found: Sequence[Collective]) -> list[Total]:
    """Returns a row for each kind and axes, sorted by bytes sent, most first."""
    rows = []
    for key in dict.fromkeys((one.kind, one.axes) for one in found):
        same = [one for one in found if (one.kind, one.axes) == key]
        count, size = sum(one.count for one in same), sum(one.count * one.bytes_ for one in same)
        rows.append(Total(*key, count, size, sum(one.count * one.link_bytes() for one in same)))
    return sorted(rows, key=lambda row: -row.link_bytes)


def _read(text: str) -> _Program:
    """Returns the instructions of a program."""
    program = _Program({}, {})
    for line in text.splitlines():
        if head := _HEAD.match(line):
            instructions = program.computations["ENTRY" if head[1] else head[2]] = []
        elif match := _INSTRUCTION.match(line):
            root, name, shape, code, words = match.groups()
            called = "" if code.endswith(("-update", "-done")) else " ".join(_CALLED.findall(words))
            operands = _NAME.findall(words.partition(")")[0])
            program.named[name] = _Instruction(bool(root), name, shape, code, operands, _NAME.findall(called), words)
            instructions.append(program.named[name])
    return program


def _executions(program: _Program, computation: str, count: int) -> Iterator[tuple[_Instruction, str, int]]:
    """Yields each instruction that runs, its computation and how often, when `computation` runs `count` times."""
    for op in program.computations[computation]:
        yield op, computation, count
        inner = count * _turns(op, program) if op.code == "while" else count
        for name in op.called:
            yield from _executions(program, name, inner)


def _turns(loop: _Instruction, program: _Program) -> int:
    """Returns the trip count of a loop, on TPU from start, step and end of its counter; 1 if it is not known."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.words):
        return int(known[1])
    condition, body = (next(op for op in program.computations[name] if op.root) for name in loop.called)
    packs = program.named[loop.operands[0]], body
    if condition.code != "compare" or any(pack.code != "tuple" for pack in packs):
        return 1
    counter, bound = (program.named[name] for name in condition.operands)
    index, end = re.search(r"index=(\d+)", counter.words), _constant(bound, program)
    if index is None or end is None:
        return 1
    start, after = (program.named[pack.operands[int(index[1])]] for pack in packs)
    step = next(filter(None, (_constant(program.named[name], program) for name in after.operands)), 1)
    return max(0, math.ceil((end - (_constant(start, program) or 0)) / step))


def _constant(op: _Instruction, program: _Program) -> int | None:
    """Returns the integer value of an instruction, or None if it is not a constant."""
    while op.code.startswith("copy"):
        op = program.named[op.operands[0]]
    number = re.match(r"(-?\d+)\)", op.words)
    return int(number[1]) if number and op.code == "constant" else None


def _bytes(shape: str) -> int:
    """Returns the bytes of an array, or of those in a tuple, without padding."""
    total = 0
    for kind, bits, sizes in _ARRAY.findall(shape):
        total += math.ceil(int(bits or 8 * (kind == "pred")) * math.prod(map(int, re.findall(r"\d+", sizes))) / 8)
    return total


def _axes_and_group(words: str, mesh_shape: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes along which the devices of a group differ, and how many devices are in one."""
    devices = math.prod(mesh_shape.values())
    if (groups := _groups(words, devices)) is None:
        return (), devices
    places = np.array(np.unravel_index(groups, tuple(mesh_shape.values())))  # [axes groups devices]
    axes = tuple(itertools.compress(mesh_shape, (places != places[:, :, :1]).any((1, 2))))
    whole = math.prod(mesh_shape[name] for name in axes)
    if "source_target_pairs" in words:  # each pair is a part of a group
        return axes, whole
    return axes if whole == groups.shape[1] else (), groups.shape[1]


def _groups(words: str, devices: int) -> np.ndarray | None:
    """Returns devices `[groups devices]`, numbered in mesh order, or None if they cannot be parsed."""
    if mesh := _MESH.search(words):
        sizes = {name: int(size) for name, size in re.findall(r"'(.+?)'=(\d+)", mesh[1])}
        taken = [list(sizes).index(name) for name in re.findall(r"'(.+?)'", mesh[2])]
        last = np.moveaxis(np.arange(devices).reshape(tuple(sizes.values())), taken, range(-len(taken), 0))
        return last.reshape(-1, math.prod(last.shape[-len(taken) :]))
    if iota := _IOTA.search(words):
        grid = np.arange(devices).reshape([int(size) for size in iota[2].split(",")])
        order = [int(place) for place in iota[3].split(",")] if iota[3] else None
        return grid.transpose(order).reshape(-1, int(iota[1]))
    if written := _WRITTEN.search(words):
        return np.array([[int(one) for one in ids.split(",")] for ids in written[1][1:-1].split("},{")])
    named = (
        "replica_groups=" in words and "replica_groups={}" not in words
    )  # an empty list means one group of all devices
    return None if named else np.arange(devices)[None]
