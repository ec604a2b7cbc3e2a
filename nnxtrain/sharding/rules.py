"""Which mesh axes shard which dimension: one table for weights, optimizer state and activations."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from nnxtrain.axes import BATCH, EMBED, HEAD_DIM, HEADS, KV_HEADS, LAYER, MLP, SEQUENCE, STAGE, UNSHARDED, VOCAB
from nnxtrain.config.mesh import BATCH_AXES, CONTEXT_AXES, OPTIMIZER, parsed

Table = Mapping[str, tuple[str, ...]]

# A mesh axis shards one dimension of an array, the first that lists it, if its size is divisible.
RULES: Table = {
    BATCH: BATCH_AXES,
    SEQUENCE: CONTEXT_AXES,
    EMBED: ("fsdp",),
    HEADS: ("tensor",),
    KV_HEADS: ("tensor",),
    HEAD_DIM: (),
    MLP: ("tensor",),
    VOCAB: ("tensor",),
    LAYER: (),
    STAGE: ("stage",),
    UNSHARDED: (),
}


def tables(rules: Iterable[str]) -> tuple[Table, Table]:
    """Returns the tables of weights and activations, and of optimizer state, with `mesh.rules` applied."""
    pairs = dict(map(parsed, rules))
    own = {name: axes for name, axes in pairs.items() if not name.startswith(OPTIMIZER)}
    optimizer = {name.removeprefix(OPTIMIZER): axes for name, axes in pairs.items() if name.startswith(OPTIMIZER)}
    return {**RULES, **own}, {**RULES, **own, **optimizer}


def spec_of(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    *,
    table: Table,
    mesh: Mapping[str, int],
    without: Collection[str] = (),
) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array.

    Args:
        shape: of the array.
        axes: logical names of its dimensions.
        table: logical axis → mesh axes.
        mesh: devices along each mesh axis.
        without: mesh axes not to use.
    """
    used = set(without)
    entries: list[Any] = []
    for size, axis in zip(shape, axes, strict=True):
        chosen = [name for name in table[axis] if name not in used and mesh[name] > 1]
        while size % math.prod(mesh[name] for name in chosen):
            chosen.pop()
        used.update(chosen)
        entries.append(tuple(chosen) if len(chosen) > 1 else chosen[0] if chosen else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def names_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
