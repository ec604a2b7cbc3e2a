"""The state of a model ↔ the states of its pipeline stages, each with consecutive layers.

Trees are flat, by path. The tree of a model has global layer indices; that of a stage counts its own layers from 0.
The tree of the model is what is saved, so that a checkpoint does not depend on the split into stages.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from nnxtrain.checkpoint.stacking import UNROLLED as LAYERS
from nnxtrain.checkpoint.stacking import Join, Path, Take, find_pair, period_of, scanned, unrolled


def stage_tree(model: Mapping[Path, Any], like: Mapping[Path, Any], *, first: int, take: Take, join: Join) -> dict:
    """Returns the tree of a stage, taken from that of its model.

    Args:
        model: tree of the model, layers scanned or unrolled.
        like: tree of the stage with abstract arrays: its paths, and whether its layers are scanned.
        first: global index of the first layer of the stage.
        take: `(stacked leaf, group) -> leaf of the group`.
        join: `leaves of all groups -> stacked leaf`.

    Raises:
        KeyError: the stage has a path that the model lacks.
    """
    layers = unrolled(model, take)
    found = {path: layers[_shifted(path, first)] for path in unrolled(like, lambda leaf, group: None)}
    period = period_of(like)
    return scanned(found, join, period=period) if period else found


def model_tree(
    stages: Iterable[tuple[int, Mapping[Path, Any]]], like: Mapping[Path, Any], *, take: Take, join: Join
) -> dict:
    """Returns the tree of a model, joined from those of its stages.

    Args:
        stages: (global index of the first layer, tree) of each; a path that several have, such as a tied table, is
            taken from the first.
        like: tree of the model with abstract arrays: whether its layers are scanned.
        take: see `stage_tree`.
        join: see `stage_tree`.
    """
    found: dict[Path, Any] = {}
    for first, tree in stages:
        for path, leaf in unrolled(tree, take).items():
            found.setdefault(_shifted(path, first), leaf)
    period = period_of(like)
    return scanned(found, join, period=period) if period else found


def _shifted(path: Path, by: int) -> Path:
    """Returns a path with its layer index increased by `by`; a path without a layer is unchanged."""
    if (start := find_pair(path, LAYERS)) is None:
        return path
    return (*path[: start + 2], str(int(path[start + 2]) + by), *path[start + 3 :])
