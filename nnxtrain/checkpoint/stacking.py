"""Scanned and unrolled layers on disk: the same numbers under other names, and what differs between two trees."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")
Path = tuple[str, ...]
Take = Callable[[Any, int], Any]  # cuts one group out of a stacked leaf
Join = Callable[[list[Any]], Any]  # stacks the leaves of all groups
# `stack/layer/...` `[l ...]`, or `stack/layer/PLACE/...` `[groups ...]` for each place in a longer pattern
SCANNED = ("stack", "layer")
REST = ("stack", "rest")  # `stack/rest/NUMBER/...`: what the pattern leaves over
UNROLLED = ("stack", "layers")  # `stack/layers/INDEX/...`


class Leaf(NamedTuple):
    """Shape and type of an array."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def leaf_of(array: Any) -> Leaf:
    """Returns the shape and type of an array, which may be abstract."""
    return Leaf(tuple(array.shape), np.dtype(array.dtype).name)


def differences(saved: Mapping[Path, Leaf], wanted: Mapping[Path, Leaf]) -> list[str]:
    """Returns a line for each path that is missing, extra or different."""
    lines = [
        f"{'/'.join(path)}: missing in the checkpoint, wanted {wanted[path]}" for path in wanted if path not in saved
    ]
    lines += [f"{'/'.join(path)}: only in the checkpoint, {saved[path]}" for path in saved if path not in wanted]
    return lines + [
        f"{'/'.join(path)}: {saved[path]} in the checkpoint, wanted {wanted[path]}"
        for path in wanted
        if path in saved and saved[path] != wanted[path]
    ]


def in_layout_of(target: Mapping[Path, Any], tree: Mapping[Path, T], *, take: Take, join: Join) -> Mapping[Path, T]:
    """Returns `tree` with its layers stacked or apart, as they are in `target`."""
    wanted, found = period_of(target), period_of(tree)
    if wanted == found:
        return tree
    apart = unrolled(tree, take) if found else tree
    return scanned(apart, join, period=wanted) if wanted else apart


def cut_leaf(leaf: Leaf, index: int) -> Leaf:
    """Returns the shape and type of one layer of a stacked array."""
    return Leaf(leaf.shape[1:], leaf.dtype)


def join_leaves(leaves: list[Leaf]) -> Leaf:
    """Returns the shape and type of arrays of all layers when they are stacked."""
    return Leaf((len(leaves), *leaves[0].shape), leaves[0].dtype)


def placed(array: Any) -> jax.ShapeDtypeStruct:
    """Returns an array, which may be abstract, as shape, type and place: the first device if it is of no mesh."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        sharding = NamedSharding(Mesh(jax.devices()[:1], "data"), PartitionSpec())
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def targets(saved: Mapping[Path, Leaf], wanted: Mapping[Path, Any]) -> dict[Path, jax.ShapeDtypeStruct]:
    """Returns where each saved array is to lie, as those in `wanted` do; one that has no like there is not cut."""
    places = in_layout_of(saved, wanted, take=cut_placed, join=join_placed)
    whole = NamedSharding(next(iter(wanted.values())).sharding.mesh, PartitionSpec())

    def target(path: Path, leaf: Leaf) -> jax.ShapeDtypeStruct:
        like = places.get(path)
        sharding = like.sharding if like is not None and like.shape == leaf.shape else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return {path: target(path, leaf) for path, leaf in saved.items()}


def cut_placed(array: jax.ShapeDtypeStruct, index: int) -> jax.ShapeDtypeStruct:
    """Returns one layer of an abstract stacked array, lying as its layers do."""
    sharding = NamedSharding(array.sharding.mesh, PartitionSpec(*array.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=sharding)


def join_placed(arrays: list[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    """Returns the abstract arrays of all layers stacked; layers are not cut apart."""
    first = arrays[0]
    sharding = NamedSharding(first.sharding.mesh, PartitionSpec(None, *first.sharding.spec))
    return jax.ShapeDtypeStruct((len(arrays), *first.shape), first.dtype, sharding=sharding)


def period_of(paths: Iterable[Path]) -> int:
    """Returns the layers of a group of the scanned stack that `paths` belong to; 0 where no stack is scanned."""
    period = 0
    for path in paths:
        if (place := find_pair(path, SCANNED)) is not None:
            period = max(period, int(path[place + 2]) + 1 if path[place + 2].isdigit() else 1)
    return period


def unrolled(tree: Mapping[Path, Any], take: Take) -> dict[Path, Any]:
    """Returns `tree` with each leaf of a scanned stack as one leaf a layer; `take(leaf, group)` cuts one out."""
    period = period_of(tree)
    found: dict[Path, Any] = {}
    for path, leaf in tree.items():
        if (start := find_pair(path, SCANNED)) is not None:
            first, tail = (0, path[start + 2 :]) if period == 1 else (int(path[start + 2]), path[start + 3 :])
            for group in range(leaf.shape[0]):
                found[(*path[:start], *UNROLLED, str(group * period + first), *tail)] = take(leaf, group)
        elif (start := find_pair(path, REST)) is not None:
            groups = tree[(*path[:start], *SCANNED, *path[start + 2 :])].shape[0]
            index = groups * period + int(path[start + 2])
            found[(*path[:start], *UNROLLED, str(index), *path[start + 3 :])] = leaf
        else:
            found[path] = leaf
    return found


def scanned(tree: Mapping[Path, Any], join: Join, *, period: int) -> dict[Path, Any]:
    """Returns `tree` with its layers as a scanned stack has them, in groups of `period`; `join(leaves)` stacks them."""
    found: dict[Path, Any] = {}
    layers: dict[tuple[Path, Path], dict[int, Any]] = {}
    for path, leaf in tree.items():
        start = find_pair(path, UNROLLED)
        if start is None:
            found[path] = leaf
        else:
            layers.setdefault((path[:start], path[start + 3 :]), {})[int(path[start + 2])] = leaf
    depth = 1 + max((index for parts in layers.values() for index in parts), default=-1)
    in_groups = depth - depth % period
    for (head, tail), parts in layers.items():
        for place in range(period):
            number = () if period == 1 else (str(place),)
            if stacked := [parts[index] for index in range(place, in_groups, period) if index in parts]:
                found[(*head, *SCANNED, *number, *tail)] = join(stacked)
        for index in range(in_groups, depth):
            if index in parts:
                found[(*head, *REST, str(index - in_groups), *tail)] = parts[index]
    return found


def find_pair(path: Path, names: Path) -> int | None:
    """Returns where in `path` the two `names` stand one after the other, before a number if they hold a list."""
    for start in range(len(path) - 2):
        if path[start : start + 2] == names and (names == SCANNED or path[start + 2].isdigit()):
            return start
    return None
