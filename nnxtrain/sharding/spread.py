"""Functions of weights and rows, each device on its own rows: what they return is added over devices once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from nnxtrain.axes import BATCH, SEQUENCE
from nnxtrain.sharding.layout import MeshLayout
from nnxtrain.sharding.rules import names_of
from nnxtrain.types import Accumulate, Batch, LossOf, Spread, Sums


def spread_microbatches(accumulate: Accumulate, layout: MeshLayout) -> Accumulate:
    """Returns `accumulate` for devices that share a batch `[m b ...]` and hold the same weights.

    Each adds up its own rows of all microbatches; what they have is added over devices once, at the end.
    """

    def spread(loss_of: LossOf, params: nnx.State, batch: Batch) -> Sums:
        sums = functools.partial(accumulate, loss_of)
        return _spread(sums, layout, PartitionSpec(None, replica_axes(layout)))(params, batch)

    return spread


def per_replica(accumulate: Accumulate, layout: MeshLayout) -> Accumulate:
    """Returns `accumulate` whose sums stay apart: leaves `[c ...]`, one part for each copy of the model."""

    def apart(loss_of: LossOf, params: nnx.State, batch: Batch) -> Sums:
        def own(params: nnx.State, batch: Batch) -> Sums:
            return jax.tree.map(lambda leaf: leaf[None], accumulate(loss_of, params, batch))

        if not (copies := replica_axes(layout)):
            return own(params, batch)
        return jax.shard_map(
            own,
            mesh=layout.mesh,
            axis_names=set(copies),
            in_specs=(PartitionSpec(), PartitionSpec(None, copies)),
            out_specs=PartitionSpec(copies),
            check_vma=False,
        )(params, batch)

    return apart


def sum_replicas(sums: Any) -> Any:
    """Adds up what the copies of the model have: leaves `[c ...]` become `[...]`."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, dtype=leaf.dtype), sums)


def replica_axes(layout: MeshLayout) -> tuple[str, ...]:
    """Returns the mesh axes whose devices share a batch and hold the same weights."""
    cut_weights = {name for axis, names in layout.table.items() if axis not in (BATCH, SEQUENCE) for name in names}
    return tuple(name for name in layout.axes(BATCH) if name not in cut_weights)


def spread_rows(layout: MeshLayout) -> Spread:
    """Returns what makes of `function(weights, rows [b s ...])` one whose devices share the rows.

    The function finds its weights whole; outside of any loop in it they are gathered, and their gradients are added
    over devices, each of which keeps its part.
    """
    return lambda function: _spread(function, layout, PartitionSpec(layout.axes(BATCH), layout.axes(SEQUENCE)))


def _spread(function: Callable[[Any, Any], Any], layout: MeshLayout, rows: PartitionSpec) -> Callable[[Any, Any], Any]:
    """Returns `function(weights, rows)` run by each device on its own part; what it returns is added up.

    Args:
        function: returns a tree of sums over its rows.
        layout: of the devices.
        rows: mesh axes that cut the leading dimensions of every leaf of the rows.
    """

    def spread(weights: Any, leaves: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        taken = {name for entry in rows for name in names_of(entry)} - set(mesh.manual_axes)
        if not taken:
            return function(weights, leaves)
        own = PartitionSpec(*(tuple(name for name in names_of(entry) if name in taken) or None for entry in rows))
        cuts = layout.cuts(weights, taken)
        # Where gradients are taken through this, those of the weights are added over devices before the others go on:
        # XLA would keep them, whole and float32, until the backward pass of the layers is over.
        weights, leaves = jax.lax.optimization_barrier((weights, leaves))

        def local(weights: Any, leaves: Any) -> Any:
            whole = jax.tree.map(_gathered, cuts, weights)
            return jax.lax.psum(function(whole, leaves), tuple(sorted(taken)))

        return jax.shard_map(
            local,
            mesh=mesh if mesh.manual_axes else layout.mesh,
            axis_names=taken,
            in_specs=(cuts, own),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(weights, leaves)

    return spread


def _gathered(cut: PartitionSpec, variable: nnx.Variable) -> nnx.Variable:
    """Returns a variable whole, of which a device has a part."""
    array = variable[...]
    for axis, entry in enumerate(cut):
        if names := names_of(entry):
            array = jax.lax.all_gather(array, names, axis=axis, tiled=True)
    return variable.replace(array)
