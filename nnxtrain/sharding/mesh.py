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

# what jax's backends say where there is no device of their kind
ABSENT = (
    *("not in the list of known backends", "Unknown backend", "No TPU", "no supported devices"),
    *("No visible", "NO_DEVICE", "NOT_FOUND"),
)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Returns a mesh of all axes over `devices`, neighbours along the last ones; idle devices are left over at the end.

    Raises:
        ConfigError: so many devices cannot form it; holds the numbers and the nearest shape that fits.
    """
    sizes = _whole(config.sizes(), devices)
    used = devices[: math.prod(sizes.values())]
    if idle := {device.process_index for device in devices} - {device.process_index for device in used}:
        raise ConfigError(f"mesh: {_shape(sizes)} leaves process {min(idle)} without work; mesh.data=-1 takes them all")
    shape = tuple(sizes.values())
    grid = mesh_utils.create_device_mesh(shape, used) if config.slices == 1 else _across(config, sizes, used)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def here(platform: str) -> list[jax.Device]:
    """Returns the devices of the backend that jax found.

    Raises:
        ConfigError: this machine has none of the kind that `platform`, or `JAX_PLATFORMS` where that is auto, names.
        UserError: it has, but the backend does not start.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts that there is a GPU
        raise no_devices(platform, str(error)) from error


def no_devices(platform: str, text: str) -> UserError:
    """Returns what to say when jax finds no devices; `platform` is to blame only if there are none of that kind.

    Args:
        platform: `debug.platform`.
        text: what jax says; it says nothing where it was asked for a GPU and there is none.
    """
    reason = text.splitlines()[0] if text else "no such device is here"
    if text and not any(word in text for word in ABSENT):
        return UserError(f"the devices cannot be used: {reason}")
    key = f"JAX_PLATFORMS={jax.config.values['jax_platforms']}" if platform == "auto" else f"debug.platform={platform}"
    return ConfigError(f"{key}: {reason}")


def _whole(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> dict[str, int]:
    """Returns `sizes` with -1 filled in."""
    given = {name: size for name, size in sizes.items() if size != -1}
    product = math.prod(given.values())
    takes_rest = len(given) < len(sizes)
    fits = product <= len(devices) and not (takes_rest and len(devices) % product)
    if not fits:
        have = f"{len(devices)} {devices[0].platform} device{'s' if len(devices) > 1 else ''}"
        rule = f"{_shape(given)} needs {'a multiple of ' if takes_rest else ''}{product} devices and {have} are here"
        raise ConfigError(f"{rule}; the nearest that fits is {_shape(_nearest(given, len(devices), takes_rest))}")
    return {name: len(devices) // product if size == -1 else size for name, size in sizes.items()}


def _nearest(sizes: Mapping[str, int], devices: int, takes_rest: bool) -> dict[str, int]:
    """Returns the sizes that fit so many with the smallest change of their logarithms; ties use more devices."""
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


def _across(config: MeshConfig, sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns devices so that the data axis goes across slices, or across processes where devices know of no slices."""
    slices = {getattr(device, "slice_index", 0) for device in devices}
    processes = {device.process_index for device in devices}
    by_process = len(slices) != config.slices
    if by_process and len(processes) != config.slices:
        have = f"the devices are of {len(slices)} slice(s) and {len(processes)} process(es)"
        raise ConfigError(f"mesh.slices={config.slices}: {have}; one of these numbers must be that of mesh.slices")
    if sizes["data"] % config.slices:
        raise ConfigError(f"mesh.data={sizes['data']} must be a multiple of mesh.slices={config.slices}")
    inner = [size // config.slices if name == "data" else size for name, size in sizes.items()]
    outer = [config.slices if name == "data" else 1 for name in sizes]
    try:
        return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, process_is_granule=by_process)
    except ValueError as error:
        raise ConfigError(f"mesh.slices={config.slices}: {error}") from error


def _shape(sizes: Mapping[str, int]) -> str:
    """Returns sizes as one writes them, without axes of one device."""
    words = [f"mesh.{name}={size}" for name, size in sizes.items() if size > 1]
    return " ".join(words) or "mesh.data=1"
