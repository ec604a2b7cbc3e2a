"""Which mesh axes cut which dimension: one table for weights, optimizer state and activations."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from nnxtrain.axes import BATCH, EMBED, HEAD_DIM, HEADS, KV_HEADS, LAYER, MLP, SEQUENCE, STAGE, UNSHARDED, VOCAB
from nnxtrain.config.mesh import BATCH_AXES, CONTEXT_AXES, OPTIMIZER, parsed

Table = Mapping[str, tuple[str, ...]]

# A mesh axis cuts one dimension of an array, the first that asks for it; one that does not divide stays whole.
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
    """Returns the tables of weights and activations, and of optimizer state, with `mesh.rules` put into them."""
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
    """Returns how an array lies on the mesh.

    Args:
        shape: of the array.
        axes: logical names of its dimensions.
        table: logical axis → mesh axes.
        mesh: devices along each mesh axis.
        without: mesh axes that cut nothing here.
    """
    used = set(without)
    entries: list[Any] = []
    for size, axis in zip(shape, axes, strict=True):
        cutting = [name for name in table[axis] if name not in used and mesh[name] > 1]
        while size % math.prod(mesh[name] for name in cutting):
            cutting.pop()
        used.update(cutting)
        entries.append(tuple(cutting) if len(cutting) > 1 else cutting[0] if cutting else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def names_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
