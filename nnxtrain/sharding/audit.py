"""How each parameter is sharded, and an error if weights are replicated that were meant to be sharded."""

import math
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from nnxtrain.axes import BATCH, KV_HEADS, SEQUENCE, axes_of
from nnxtrain.errors import ConfigError
from nnxtrain.sharding.layout import MeshLayout

LISTED = 20  # parameters that an error message lists


class Shard(NamedTuple):
    """One device's part of a parameter.

    Attributes:
        path: of the parameter.
        shape: global shape.
        spec: mesh axes that shard each dimension.
        bytes_: size of the part on one device.
    """

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    bytes_: int

    def __str__(self) -> str:
        shape = " ".join(map(str, self.shape))
        return f"{self.path:44} [{shape}]  {_readable(self.spec)}  {self.bytes_:,} B"


def shards_of(parameters: nnx.State) -> list[Shard]:
    """Returns one device's shard of each parameter of an abstract state with shardings."""
    return [
        Shard("/".join(map(str, path)), leaf.shape, leaf.sharding.spec, bytes_per_device(leaf))
        for path, leaf in nnx.to_flat_state(parameters)
    ]


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes per device of a tree of abstract arrays with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def check_replication(parameters: nnx.State, layout: MeshLayout, *, tolerance: float) -> None:
    """Raises if too many weights are split into fewer shards than the mesh allows.

    There may be fewer key/value heads than tensor-parallel devices; their replication does not count.

    Args:
        parameters: abstract, with shardings.
        layout: that the shardings come from.
        tolerance: fraction of the bytes of all weights that may be replicated.

    Raises:
        ConfigError: the fraction is larger; lists the parameters.
    """
    logical = [axis for axis in layout.table if axis not in (BATCH, SEQUENCE)]
    sharding_axes = sorted({name for axis in logical for name in layout.axes(axis)})
    most_shards = math.prod(layout.mesh.shape[name] for name in sharding_axes)
    leaves = nnx.to_flat_state(parameters)
    replicated = [(path, leaf) for path, leaf in leaves if _shard_count(leaf, layout) < most_shards]
    share = sum(map(_global_bytes, replicated)) / sum(map(_global_bytes, leaves))
    if share <= tolerance:
        return
    keys = " x ".join(f"mesh.{name}={layout.mesh.shape[name]}" for name in sharding_axes)
    rule = f"{100 * share:.1f} % of the weights are replicated more than {keys} allows"
    cure = "a sharded dimension must be a multiple of the number of devices along its mesh axes"
    lines = [str(shard) for shard in shards_of(nnx.from_flat_state(replicated))]
    more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    raise ConfigError(
        "\n  ".join([f"mesh.replication_tolerance={tolerance:g}: {rule}; {cure}", *lines[:LISTED], *more])
    )


def _shard_count(parameter: nnx.Variable, layout: MeshLayout) -> int:
    """Returns the number of distinct shards of a parameter, counting replicated key/value heads as sharded."""
    shard_shape = parameter.sharding.shard_shape(parameter.shape)
    count = math.prod(parameter.shape) // math.prod(shard_shape)
    for axis, size, part in zip(axes_of(parameter), parameter.shape, shard_shape, strict=True):
        if axis == KV_HEADS and size == part:
            count *= math.prod(layout.mesh.shape[name] for name in layout.axes(axis))
    return count


def _global_bytes(entry: tuple[Any, nnx.Variable]) -> int:
    return math.prod(entry[1].shape) * entry[1].dtype.itemsize


def _readable(spec: PartitionSpec) -> str:
    """Returns a spec as text, such as `fsdp, -, tensor`; `replicated` if no axis shards it."""
    entries = ["-" if entry is None else entry if isinstance(entry, str) else "+".join(entry) for entry in spec]
    return ", ".join(entries) or "replicated"
