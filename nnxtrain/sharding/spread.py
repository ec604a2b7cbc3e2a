"""Functions of weights and rows, each device on its own rows: what they return is added over devices once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from nnxtrain.axes import BATCH, SEQUENCE
from nnxtrain.sharding.layout import MeshLayout
from nnxtrain.types import Accumulate, Batch, LossOf, LossParts, Spread


def spread_microbatches(accumulate: Accumulate, layout: MeshLayout) -> Accumulate:
    """Returns `accumulate` for devices that share a batch `[m b ...]` and hold the same weights.

    Each adds up its own rows of all microbatches; what they have is added over devices once, at the end.
    """
    cut_weights = {name for axis, names in layout.table.items() if axis not in (BATCH, SEQUENCE) for name in names}
    copies = tuple(name for name in layout.axes(BATCH) if name not in cut_weights)

    def spread(loss_of: LossOf, params: nnx.State, batch: Batch) -> tuple[LossParts, nnx.State]:
        sums = functools.partial(accumulate, loss_of)
        return _spread(sums, layout, PartitionSpec(None, copies))(params, batch)

    return spread


def spread_rows(layout: MeshLayout) -> Spread:
    """Returns what makes of `function(weights, rows [b s ...])` one whose devices share the rows.

    The function finds its weights whole, and their gradients are added over devices outside of any loop in it.
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
        taken = {name for entry in rows for name in _names(entry)} - set(mesh.manual_axes)
        if not taken:
            return function(weights, leaves)
        own = PartitionSpec(*(tuple(name for name in _names(entry) if name in taken) or None for entry in rows))

        def local(weights: Any, leaves: Any) -> Any:
            return jax.lax.psum(function(weights, leaves), tuple(sorted(taken)))

        return jax.shard_map(
            local,
            mesh=mesh if mesh.manual_axes else layout.mesh,
            axis_names=taken,
            in_specs=(PartitionSpec(), own),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(weights, leaves)

    return spread


def _names(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
