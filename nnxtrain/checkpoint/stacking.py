"""Conversion between the trees of scanned and of unrolled layers, and the differences between two trees."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")
Path = tuple[str, ...]
Take = Callable[[Any, int], Any]  # slices one group from a stacked leaf
Join = Callable[[list[Any]], Any]  # stacks the leaves of all groups
# `stack/layer/...` `[l ...]`, or `stack/layer/PLACE/...` `[groups ...]` for each place in a pattern of several layers
SCANNED = ("stack", "layer")
REST = ("stack", "rest")  # `stack/rest/NUMBER/...`: remaining layers, fewer than a pattern
UNROLLED = ("stack", "layers")  # `stack/layers/INDEX/...`


class Leaf(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def leaf_of(array: Any) -> Leaf:
    """Returns the shape and dtype of an array, which may be abstract."""
    return Leaf(tuple(array.shape), np.dtype(array.dtype).name)


def differences(saved: Mapping[Path, Leaf], wanted: Mapping[Path, Leaf]) -> list[str]:
    """Returns a line for each path that is missing, extra or different."""
    lines = [
        f"{'/'.join(path)}: missing in the checkpoint, expected {wanted[path]}" for path in wanted if path not in saved
    ]
    lines += [f"{'/'.join(path)}: only in the checkpoint, {saved[path]}" for path in saved if path not in wanted]
    return lines + [
        f"{'/'.join(path)}: {saved[path]} in the checkpoint, expected {wanted[path]}"
        for path in wanted
        if path in saved and saved[path] != wanted[path]
    ]


def in_layout_of(target: Mapping[Path, Any], tree: Mapping[Path, T], *, take: Take, join: Join) -> Mapping[Path, T]:
    """Returns `tree` with its layers scanned or unrolled, as they are in `target`."""
    wanted, found = period_of(target), period_of(tree)
    if wanted == found:
        return tree
    layers = unrolled(tree, take) if found else tree
    return scanned(layers, join, period=wanted) if wanted else layers


def cut_leaf(leaf: Leaf, index: int) -> Leaf:
    """Returns the shape and dtype of one layer of a stacked array."""
    return Leaf(leaf.shape[1:], leaf.dtype)


def join_leaves(leaves: list[Leaf]) -> Leaf:
    """Returns the shape and dtype of the stacked arrays of all layers."""
    return Leaf((len(leaves), *leaves[0].shape), leaves[0].dtype)


def placed(array: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of an array, which may be abstract; without a mesh, the first device."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        sharding = NamedSharding(Mesh(jax.devices()[:1], "data"), PartitionSpec())
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def targets(saved: Mapping[Path, Leaf], wanted: Mapping[Path, Any]) -> dict[Path, jax.ShapeDtypeStruct]:
    """Returns each saved array with the sharding of its counterpart in `wanted`; replicated if it has none."""
    counterparts = in_layout_of(saved, wanted, take=take_placed, join=join_placed)
    replicated = NamedSharding(next(iter(wanted.values())).sharding.mesh, PartitionSpec())

    def target(path: Path, leaf: Leaf) -> jax.ShapeDtypeStruct:
        like = counterparts.get(path)
        sharding = like.sharding if like is not None and like.shape == leaf.shape else replicated
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return {path: target(path, leaf) for path, leaf in saved.items()}


def take_placed(array: jax.ShapeDtypeStruct, index: int) -> jax.ShapeDtypeStruct:
    """Returns one layer of an abstract stacked array, with the sharding of its other dimensions."""
    sharding = NamedSharding(array.sharding.mesh, PartitionSpec(*array.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=sharding)


def join_placed(arrays: list[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    """Returns the abstract arrays of all layers stacked; the layer dimension is not sharded."""
    first = arrays[0]
    sharding = NamedSharding(first.sharding.mesh, PartitionSpec(None, *first.sharding.spec))
    return jax.ShapeDtypeStruct((len(arrays), *first.shape), first.dtype, sharding=sharding)


def period_of(paths: Iterable[Path]) -> int:
    """Returns the number of layers in a group of the scanned stack in `paths`; 0 if no stack is scanned."""
    period = 0
    for path in paths:
        if (place := find_pair(path, SCANNED)) is not None:
            period = max(period, int(path[place + 2]) + 1 if path[place + 2].isdigit() else 1)
    return period


def unrolled(tree: Mapping[Path, Any], take: Take) -> dict[Path, Any]:
    """Returns `tree` with each stacked leaf as one leaf per layer; `take(leaf, group)` slices one."""
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
    """Returns `tree` with its layers as a scanned stack, in groups of `period`; `join(leaves)` stacks them."""
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
    """Returns the index in `path` of the two consecutive `names`; a number must follow unless they are `SCANNED`."""
    for start in range(len(path) - 2):
        if path[start : start + 2] == names and (names == SCANNED or path[start + 2].isdigit()):
            return start
    return None
