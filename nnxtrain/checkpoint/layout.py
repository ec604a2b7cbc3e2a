"""Scanned and unrolled layers on disk: the same numbers under other names, and what differs between two trees."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")
Path = tuple[str, ...]
Take = Callable[[Any, int], Any]  # cuts one layer out of a stacked leaf
Join = Callable[[list[Any]], Any]  # stacks the leaves of all layers
SCANNED = ("stack", "layer")
UNROLLED = ("stack", "layers")


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
    if is_scanned(target) == is_scanned(tree):
        return tree
    return scanned(tree, join) if is_scanned(target) else unrolled(tree, take)


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


def is_scanned(paths: Mapping[Path, Any]) -> bool:
    """Tells whether any of `paths` is of a scanned stack."""
    return any(_at(path, SCANNED) is not None for path in paths)


def unrolled(tree: Mapping[Path, Any], take: Take) -> dict[Path, Any]:
    """Returns `tree` with each stacked leaf `[l ...]` as `l` leaves; `take(leaf, index)` cuts one out."""
    found: dict[Path, Any] = {}
    for path, leaf in tree.items():
        place = _at(path, SCANNED)
        if place is None:
            found[path] = leaf
            continue
        for index in range(leaf.shape[0]):
            found[(*path[:place], *UNROLLED, str(index), *path[place + 2 :])] = take(leaf, index)
    return found


def scanned(tree: Mapping[Path, Any], join: Join) -> dict[Path, Any]:
    """Returns `tree` with the leaves of all layers as one `[l ...]`; `join(leaves)` stacks them."""
    found: dict[Path, Any] = {}
    layers: dict[Path, dict[int, Any]] = {}
    for path, leaf in tree.items():
        place = _at(path, UNROLLED)
        if place is None:
            found[path] = leaf
        else:
            stacked = (*path[:place], *SCANNED, *path[place + 3 :])
            layers.setdefault(stacked, {})[int(path[place + 2])] = leaf
    return found | {path: join([parts[index] for index in sorted(parts)]) for path, parts in layers.items()}


def _at(path: Path, names: Path) -> int | None:
    """Returns where in `path` the two `names` stand one after the other, or None."""
    for place in range(len(path) - 1):
        if path[place : place + 2] == names and (names == SCANNED or re.fullmatch(r"\d+", path[place + 2])):
            return place
    return None
