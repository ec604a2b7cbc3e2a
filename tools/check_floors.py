"""Fails on an upward import, an import cycle, a file without a floor, or a function or file that is too long.

The table is the layout of the package: each module is on a floor (a layer) and imports only from lower ones; on one
floor, only inside its own folder. All of floor 0 counts as one folder.
"""

import ast
import graphlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGE = "nnxtrain"


class Row(NamedTuple):
    """A file or folder of the layout: its floor, its purpose, its target in lines per file."""

    floor: int
    purpose: str
    target: int


FLOORS = {
    "train": Row(9, "command: train", 120),
    "launch": Row(9, "command: several processes on one machine", 140),
    "evaluate": Row(9, "command: evaluate only", 120),
    "generate": Row(9, "command: text generation", 120),
    "aot": Row(9, "command: compile only, and its reports", 160),
    "profiling.__main__": Row(9, "command: figures from traces", 120),
    "run": Row(8, "one run from start to end", 180),
    "run.run": Row(8, "sets up a run, runs it, cleans up", 270),
    "cli": Row(8, "command lines, and what they answer without a run", 120),
    "build": Row(7, "the composition root: the only room that sees the whole configuration", 200),
    "loops": Row(6, "the training loop and the evaluation loop", 120),
    "metrics": Row(6, "metrics, reports and samples of a run", 160),
    "checkpoint": Row(6, "orbax, when to save, stacking of layers", 180),
    "profiling": Row(6, "which steps are traced, figures from traces", 150),
    "engine": Row(5, "executes one step", 170),
    "steps": Row(4, "pure functions of state and batch", 80),
    "models": Row(3, "module trees, stacks, sampling", 130),
    "nn": Row(2, "leaf layers", 150),
    "optim": Row(2, "optax chains and schedules", 80),
    "data": Row(2, "sources, packing, batches", 170),
    "tokenizers": Row(2, "text to ids", 120),
    "sharding": Row(2, "devices to mesh, rules, layout, audit", 120),
    "host": Row(1, "streams, signals, files, other processes", 120),
    "hardware": Row(1, "figures of chips, topologies to compile for", 60),
    "config": Row(0, "schema and loader", 220),
    "state": Row(0, "TrainStateNNX", 60),
    "types": Row(0, "batch, metrics, open points", 220),
    "axes": Row(0, "logical axis names", 40),
    "tags": Row(0, "names of activations", 40),
    "errors": Row(0, "errors with exit codes", 50),
}
NEIGHBOURS = {
    ("data", "tokenizers"),
    ("loops", "metrics"),
    ("run", "cli"),
}  # rooms on one floor that may import each other
LAZY = 8  # from this floor up, functions may import, so that --help and configuration errors are instant
LONGEST_FILE, LONGEST_FUNCTION, MEDIAN_FUNCTION, MOST_PARAMETERS = 400, 60, 15, 6
SLACK = 1.5  # a file may be this many times its target


def main(root: Path) -> int:
    """Prints each violation below `root`; returns 1 if there is any."""
    problems: list[str] = []
    lengths: list[int] = []
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((root / PACKAGE).rglob("*.py"))}
    problems += cycles({_module(path.relative_to(root)): tree for path, tree in trees.items()})
    for path, tree in trees.items():
        name = path.relative_to(root / PACKAGE)
        room = room_of(name.with_suffix("").parts)
        if room == "__init__":
            continue
        if room not in FLOORS:
            problems.append(f"{path}: not in the table of tools/check_floors.py")
            continue
        problems += [f"{path}:{problem}" for problem in import_problems(tree, room)]
        problems += [f"{path}:{problem}" for problem in size_problems(path, tree, FLOORS[room])]
        lengths += [length(node) for node in functions(tree)]
    if (median := statistics.median(lengths)) >= MEDIAN_FUNCTION:
        problems.append(f"the median function has {median} lines; the limit is below {MEDIAN_FUNCTION}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def room_of(parts: Sequence[str]) -> str:
    """Returns the row that a module, as its path below the package, belongs to: its own, or that of its folder."""
    own = ".".join(parts)
    return own if own in FLOORS else parts[0]


def import_problems(tree: ast.Module, room: str) -> Iterator[str]:
    """Yields imports that are not allowed in `room`."""
    floor = FLOORS[room].floor
    for node, target in imports(tree):
        other = FLOORS.get(target)
        if (
            other is None
            or target == room
            or floor == other.floor == 0
            or {(room, target), (target, room)} & NEIGHBOURS
        ):
            continue
        alone = other.floor == floor and not _is_folder(target) and not _is_folder(room)
        if other.floor > floor or (other.floor == floor and not alone and _is_folder(room)):
            yield f"{node.lineno}: floor {floor} imports {PACKAGE}.{target} of floor {other.floor}"
    if floor < LAZY:
        top = set(map(id, tree.body))
        for inner in ast.walk(tree):
            if isinstance(inner, ast.Import | ast.ImportFrom) and id(inner) not in top and not _is_extra(inner):
                yield f"{inner.lineno}: an import inside a function below floor {LAZY}"


def imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Yields each import of the package with the room it names."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [f"{PACKAGE}.{name}" for name in names] if node.module == PACKAGE else [node.module or ""]
        for name in dict.fromkeys(names):
            parts = name.split(".")
            if parts[0] == PACKAGE and len(parts) > 1:
                yield node, room_of(parts[1:])


def cycles(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yields the first cycle of imports among modules, by dotted name."""
    graph = {
        module: {name for name in _imported(tree) if name in trees and name != module} for module, tree in trees.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"import cycle: {' → '.join(error.args[1][::-1])}"


def size_problems(path: Path, tree: ast.Module, row: Row) -> Iterator[str]:
    """Yields files and functions that are too long, and functions with too many parameters."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > min(LONGEST_FILE, SLACK * row.target):
        yield f"1: {lines} lines; the target is {row.target}"
    for node in functions(tree):
        if length(node) > LONGEST_FUNCTION:
            yield f"{node.lineno}: {node.name} has {length(node)} lines; the limit is {LONGEST_FUNCTION}"
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls") for argument in arguments)
        if count > MOST_PARAMETERS:
            yield f"{node.lineno}: {node.name} has {count} parameters; the limit is {MOST_PARAMETERS}"


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Returns every function of a file."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def length(node: ast.FunctionDef) -> int:
    """Returns the lines of a function, without its docstring."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yields the dotted names that a module imports; of `from a import b`, `a.b` too, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _is_folder(room: str) -> bool:
    return (Path(__file__).parents[1] / PACKAGE / room).is_dir()


def _is_extra(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith("matplotlib")


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
