"""Devices → mesh."""

import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from nnxtrain.config.mesh import AXES, MeshConfig
from nnxtrain.errors import ConfigError, UserError

# what jax's backends report if there is no device of their kind
NO_DEVICE_ERRORS = (
    *("not in the list of known backends", "Unknown backend", "No TPU", "no supported devices"),
    *("No visible", "NO_DEVICE", "NOT_FOUND", "Failed to open libtpu"),
)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Returns a mesh of all axes over `devices`, neighbours along the last axes; devices beyond its size stay unused.

    Raises:
        ConfigError: this number of devices cannot form it; states the numbers and the nearest shape that fits.
    """
    sizes = _resolved(config.sizes(), devices)
    used = devices[: math.prod(sizes.values())]
    if idle := {device.process_index for device in devices} - {device.process_index for device in used}:
        raise ConfigError(
            f"mesh: {_shape(sizes)} leaves process {min(idle)} without work; mesh.data=-1 uses all devices"
        )
    shape = tuple(sizes.values())
    grid = mesh_utils.create_device_mesh(shape, used) if config.slices == 1 else _hybrid_grid(config, sizes, used)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def available_devices(platform: str) -> list[jax.Device]:
    """Returns the devices of jax's default backend.

    Raises:
        ConfigError: there is no device of the kind that `platform` names, or `JAX_PLATFORMS` if `platform` is auto.
        UserError: there is one, but the backend does not start.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts that there is a GPU
        raise no_devices(platform, str(error)) from error


def no_devices(platform: str, text: str) -> UserError:
    """Returns the error for when jax finds no devices; it blames `platform` only if there are none of that kind.

    Args:
        platform: `debug.platform`.
        text: jax's error message; empty if it was asked for a GPU and there is none.
    """
    reason = text.splitlines()[0] if text else "there is no such device"
    if text and not any(word in text for word in NO_DEVICE_ERRORS):
        return UserError(f"the devices cannot be used: {reason}")
    key = f"JAX_PLATFORMS={jax.config.values['jax_platforms']}" if platform == "auto" else f"debug.platform={platform}"
    return ConfigError(f"{key}: {reason}")


def _resolved(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> dict[str, int]:
    """Returns `sizes` with -1 filled in."""
    given = {name: size for name, size in sizes.items() if size != -1}
    product = math.prod(given.values())
    takes_rest = len(given) < len(sizes)
    fits = product <= len(devices) and not (takes_rest and len(devices) % product)
    if not fits:
        have = f"{len(devices)} {devices[0].platform} device{'s' if len(devices) > 1 else ''}"
        rule = f"{_shape(given)} needs {'a multiple of ' if takes_rest else ''}{product} devices, got {have}"
        raise ConfigError(f"{rule}; the nearest that fits is {_shape(_nearest(given, len(devices), takes_rest))}")
    return {name: len(devices) // product if size == -1 else size for name, size in sizes.items()}


def _nearest(sizes: Mapping[str, int], devices: int, takes_rest: bool) -> dict[str, int]:
    """Returns the sizes that fit `devices` with the smallest change of their logarithms; ties use more devices."""
    names = [name for name, size in sizes.items() if size > 1]
    choices: list[list[int]] = [[size for size in range(1, devices + 1) if devices % size == 0]] * len(names)
    fitting: list[tuple[int, ...]] = [
        chosen
        for chosen in itertools.product(*choices)
        if math.prod(chosen) <= devices and not (takes_rest and devices % math.prod(chosen))
    ]

    def distance(chosen: tuple[int, ...]) -> tuple[float, int]:
        change = sum(abs(math.log(sizes[name] / size)) for name, size in zip(names, chosen, strict=True))
        return round(change, 9), -max(chosen)

    return dict(zip(names, sorted(fitting, key=distance)[0], strict=True))


def _hybrid_grid(config: MeshConfig, sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns a grid with the data axis across slices, or across processes if devices have no slice index."""
    slices = {getattr(device, "slice_index", 0) for device in devices}
    processes = {device.process_index for device in devices}
    by_process = len(slices) != config.slices
    if by_process and len(processes) != config.slices:
        have = f"the devices belong to {len(slices)} slice(s) and {len(processes)} process(es)"
        raise ConfigError(f"mesh.slices={config.slices}: {have}; one of these numbers must equal mesh.slices")
    if sizes["data"] % config.slices:
        raise ConfigError(f"mesh.data={sizes['data']} must be a multiple of mesh.slices={config.slices}")
    inner = [size // config.slices if name == "data" else size for name, size in sizes.items()]
    outer = [config.slices if name == "data" else 1 for name in sizes]
    try:
        return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, process_is_granule=by_process)
    except ValueError as error:
        raise ConfigError(f"mesh.slices={config.slices}: {error}") from error


def _shape(sizes: Mapping[str, int]) -> str:
    """Returns sizes as config words, without axes of size 1."""
    words = [f"mesh.{name}={size}" for name, size in sizes.items() if size > 1]
    return " ".join(words) or "mesh.data=1"
