"""The state of a model ↔ the states of its stages, each of a run of its layers.

Trees are flat, by path. The tree of a whole model counts layers in their order; that of a stage counts its own from 0.
What is saved is the tree of the whole, so that a checkpoint does not depend on where the model was cut.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from nnxtrain.checkpoint.stacking import UNROLLED as LAYERS
from nnxtrain.checkpoint.stacking import Join, Path, Take, find_pair, period_of, scanned, unrolled


def stage_of(whole: Mapping[Path, Any], like: Mapping[Path, Any], *, first: int, take: Take, join: Join) -> dict:
    """Returns the part of a tree that a stage has.

    Args:
        whole: of the model, its layers scanned or unrolled.
        like: the tree of the stage, arrays of any kind that have a shape: says what it has, scanned or unrolled.
        first: index in the model of the first layer of the stage.
        take: `(stacked leaf, group) -> leaf of the group`.
        join: `leaves of all groups -> stacked leaf`.

    Raises:
        KeyError: the stage has something that the model lacks.
    """
    apart = unrolled(whole, take)
    found = {path: apart[_shifted(path, first)] for path in unrolled(like, lambda leaf, group: None)}
    period = period_of(like)
    return scanned(found, join, period=period) if period else found


def whole_of(
    stages: Iterable[tuple[int, Mapping[Path, Any]]], like: Mapping[Path, Any], *, take: Take, join: Join
) -> dict:
    """Returns the tree of a model whose stages have these trees.

    Args:
        stages: index of the first layer, and tree, of each; what several have, as a tied table, is taken of the first.
        like: a tree of the model: says whether its layers are scanned.
        take: see `stage_of`.
        join: see `stage_of`.
    """
    found: dict[Path, Any] = {}
    for first, tree in stages:
        for path, leaf in unrolled(tree, take).items():
            found.setdefault(_shifted(path, first), leaf)
    period = period_of(like)
    return scanned(found, join, period=period) if period else found


def _shifted(path: Path, by: int) -> Path:
    """Returns the path of the layer that is `by` layers further on; a path that is of no layer stays."""
    if (start := find_pair(path, LAYERS)) is None:
        return path
    return (*path[: start + 2], str(int(path[start + 2]) + by), *path[start + 3 :])
