"""Rows of a batch → devices of all processes."""

from bisect import bisect_left
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from nnxtrain.axes import BATCH, SEQUENCE
from nnxtrain.sharding.layout import MeshLayout
from nnxtrain.types import Batch


def rows_sharding(layout: MeshLayout, *, row_axis: int, tokens: bool) -> NamedSharding:
    """Returns the sharding of batch leaves whose axis `row_axis` counts rows, and the next one `tokens`."""
    rows, sequence = layout.axes(BATCH) or None, layout.axes(SEQUENCE) or None
    is_sharded = tokens and sequence is not None
    return NamedSharding(layout.mesh, PartitionSpec(*[None] * row_axis, rows, *[sequence] * is_sharded))


def own_rows(layout: MeshLayout, count: int) -> list[int]:
    """Returns which of `count` rows the devices of this process work on, ascending."""
    places = rows_sharding(layout, row_axis=0, tokens=False).addressable_devices_indices_map((count,))
    return sorted({row for index in places.values() if index is not None for row in range(*index[0].indices(count))})


def put_rows(batch: Batch, layout: MeshLayout, own: Sequence[int], *, rows: int, row_axis: int) -> Batch:
    """Returns a batch as global arrays on the devices of all processes.

    Args:
        batch: numpy arrays of this process's rows alone.
        layout: of the devices.
        own: numbers of these rows, ascending.
        rows: of all processes.
        row_axis: which axis counts rows.
    """

    def put(name: str, leaf: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # None only for devices of other processes, which need no data
            first, end, _ = index[row_axis].indices(rows)
            here = slice(bisect_left(own, first), bisect_left(own, end))
            return leaf[(*index[:row_axis], here, *index[row_axis + 1 :])]

        sharding = rows_sharding(layout, row_axis=row_axis, tokens=name != "rows")
        return jax.make_array_from_callback((*leaf.shape[:row_axis], rows, *leaf.shape[row_axis + 1 :]), sharding, part)

    return {name: put(name, leaf) for name, leaf in batch.items()}
