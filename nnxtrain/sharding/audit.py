"""What each device holds of each parameter, and a refusal of weights that are whole where they were meant to be cut."""

import math
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from nnxtrain.axes import BATCH, KV_HEADS, SEQUENCE, axes_of
from nnxtrain.errors import ConfigError
from nnxtrain.sharding.layout import MeshLayout

LISTED = 20  # parameters that a refusal names


class Part(NamedTuple):
    """What a device holds of a parameter: path, whole shape, mesh axes that cut it, bytes on the device."""

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    bytes_: int

    def __str__(self) -> str:
        shape = " ".join(map(str, self.shape))
        return f"{self.path:44} [{shape}]  {_words(self.spec)}  {self.bytes_:,} B"


def parts_of(parameters: nnx.State) -> list[Part]:
    """Returns what a device holds of each parameter of an abstract state that knows its shardings."""
    return [
        Part("/".join(map(str, path)), leaf.shape, leaf.sharding.spec, bytes_per_device(leaf))
        for path, leaf in nnx.to_flat_state(parameters)
    ]


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes that one device holds of a tree of abstract arrays that know their shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def check_replication(parameters: nnx.State, layout: MeshLayout, *, tolerance: float) -> None:
    """Refuses weights that lie in fewer pieces than the mesh axes that cut weights allow.

    Grouped keys and values may be fewer than the devices that share a layer; they do not count.

    Args:
        parameters: abstract, with shardings.
        layout: they come from.
        tolerance: share of the bytes of all weights that may lie so.

    Raises:
        ConfigError: it is more; lists the parameters.
    """
    logical = [axis for axis in layout.table if axis not in (BATCH, SEQUENCE)]
    cutting = sorted({name for axis in logical for name in layout.axes(axis)})
    ways = math.prod(layout.mesh.shape[name] for name in cutting)
    leaves = nnx.to_flat_state(parameters)
    whole = [(path, leaf) for path, leaf in leaves if _pieces(leaf, layout) < ways]
    share = sum(map(_whole_bytes, whole)) / sum(map(_whole_bytes, leaves))
    if share <= tolerance:
        return
    keys = " x ".join(f"mesh.{name}={layout.mesh.shape[name]}" for name in cutting)
    rule = f"{100 * share:.1f} % of the weights lie in fewer pieces than {keys} allow"
    cure = "a size that is cut must be a multiple of the devices along the axis"
    lines = [str(part) for part in parts_of(nnx.from_flat_state(whole))]
    more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    raise ConfigError(
        "\n  ".join([f"mesh.replication_tolerance={tolerance:g}: {rule}; {cure}", *lines[:LISTED], *more])
    )


def _pieces(parameter: nnx.Variable, layout: MeshLayout) -> int:
    """Returns how many pieces a parameter lies in, as if keys and values of grouped heads were always cut."""
    held = parameter.sharding.shard_shape(parameter.shape)
    pieces = math.prod(parameter.shape) // math.prod(held)
    for axis, size, part in zip(axes_of(parameter), parameter.shape, held, strict=True):
        if axis == KV_HEADS and size == part:
            pieces *= math.prod(layout.mesh.shape[name] for name in layout.axes(axis))
    return pieces


def _whole_bytes(entry: tuple[Any, nnx.Variable]) -> int:
    return math.prod(entry[1].shape) * entry[1].dtype.itemsize


def _words(spec: PartitionSpec) -> str:
    """Returns a spec as people read it: `fsdp, -, tensor`; `whole` where nothing is cut."""
    entries = ["-" if entry is None else entry if isinstance(entry, str) else "+".join(entry) for entry in spec]
    return ", ".join(entries) or "whole"
