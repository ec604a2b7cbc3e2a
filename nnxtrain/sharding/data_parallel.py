"""Data parallelism by `shard_map`: each device runs a function on its own rows; the results are summed once."""

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


def shard_microbatches(accumulate: Accumulate, layout: MeshLayout) -> Accumulate:
    """Returns `accumulate` with a batch `[m b ...]` sharded over the replicas of the model.

    Each replica sums over its rows of all microbatches; one all-reduce follows at the end.
    """

    def sharded(loss_of: LossOf, params: nnx.State, batch: Batch) -> Sums:
        sums = functools.partial(accumulate, loss_of)
        return _shard(sums, layout, PartitionSpec(None, replica_axes(layout)))(params, batch)

    return sharded


def per_replica(accumulate: Accumulate, layout: MeshLayout) -> Accumulate:
    """Returns `accumulate` without the sum over replicas: leaves `[c ...]`, one entry per replica of the model."""

    def unreduced(loss_of: LossOf, params: nnx.State, batch: Batch) -> Sums:
        def own(params: nnx.State, batch: Batch) -> Sums:
            return jax.tree.map(lambda leaf: leaf[None], accumulate(loss_of, params, batch))

        if not (axes := replica_axes(layout)):
            return own(params, batch)
        return jax.shard_map(
            own,
            mesh=layout.mesh,
            axis_names=set(axes),
            in_specs=(PartitionSpec(), PartitionSpec(None, axes)),
            out_specs=PartitionSpec(axes),
            check_vma=False,
        )(params, batch)

    return unreduced


def sum_replicas(sums: Any) -> Any:
    """Sums over replicas of the model: leaves `[c ...]` become `[...]`."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, dtype=leaf.dtype), sums)


def replica_axes(layout: MeshLayout) -> tuple[str, ...]:
    """Returns the mesh axes that shard the batch and no weight."""
    weight_axes = {name for axis, names in layout.table.items() if axis not in (BATCH, SEQUENCE) for name in names}
    return tuple(name for name in layout.axes(BATCH) if name not in weight_axes)


def shard_rows(layout: MeshLayout) -> Spread:
    """Returns a transform of `function(weights, rows [b s ...])` that shards the rows over devices.

    Weights are gathered and their gradients reduce-scattered, once, outside of any loop in the function.
    """
    return lambda function: _shard(function, layout, PartitionSpec(layout.axes(BATCH), layout.axes(SEQUENCE)))


def _shard(function: Callable[[Any, Any], Any], layout: MeshLayout, rows: PartitionSpec) -> Callable[[Any, Any], Any]:
    """Returns `function(weights, rows)` run by each device on its shard of the rows; its results are summed.

    Args:
        function: returns a tree of sums over its rows.
        layout: of the devices.
        rows: mesh axes that shard the leading dimensions of every leaf of the rows.
    """

    def sharded(weights: Any, leaves: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        axes = {name for entry in rows for name in names_of(entry)} - set(mesh.manual_axes)
        if not axes:
            return function(weights, leaves)
        own = PartitionSpec(*(tuple(name for name in names_of(entry) if name in axes) or None for entry in rows))
        specs = layout.specs_over(weights, axes)
        # In the backward pass this reduces the gradients of the weights before the others are used:
        # XLA would keep them, unsharded and float32, until the backward pass of the layers is over.
        weights, leaves = jax.lax.optimization_barrier((weights, leaves))

        def local(weights: Any, leaves: Any) -> Any:
            gathered = jax.tree.map(_gathered, specs, weights)
            return jax.lax.psum(function(gathered, leaves), tuple(sorted(axes)))

        return jax.shard_map(
            local,
            mesh=mesh if mesh.manual_axes else layout.mesh,
            axis_names=axes,
            in_specs=(specs, own),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(weights, leaves)

    return sharded


def _gathered(spec: PartitionSpec, variable: nnx.Variable) -> nnx.Variable:
    """Returns a variable gathered from its shards, inside `shard_map`."""
    array = variable[...]
    for axis, entry in enumerate(spec):
        if names := names_of(entry):
            array = jax.lax.all_gather(array, names, axis=axis, tiled=True)
    return variable.replace(array)
