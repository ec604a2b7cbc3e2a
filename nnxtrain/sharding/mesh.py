"""Devices → mesh."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nnxtrain.config.mesh import MeshConfig
from nnxtrain.errors import ConfigError

DATA = "data"


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Returns a mesh over the first `mesh.data` of `devices`, or all of them for -1.

    Raises:
        ConfigError: there are fewer devices than that; holds both numbers.
    """
    wanted = len(devices) if config.data == -1 else config.data
    if wanted > len(devices):
        have = f"{len(devices)} {devices[0].platform} device{'s' if len(devices) > 1 else ''}"
        raise ConfigError(
            f"mesh.data={wanted} needs {wanted} devices and {have} are here; the largest that fits is {len(devices)}"
        )
    return jax.make_mesh((wanted,), (DATA,), axis_types=(AxisType.Auto,), devices=devices[:wanted])


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def rows_sharding(mesh: Mesh, *, row_axis: int) -> NamedSharding:
    """Returns the sharding of batch leaves whose axis `row_axis` counts rows."""
    return NamedSharding(mesh, PartitionSpec(*[None] * row_axis, DATA))
