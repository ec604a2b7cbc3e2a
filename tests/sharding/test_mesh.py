"""Devices form the mesh that was asked for, or a message says what would do."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from nnxtrain.config.load import load
from nnxtrain.config.mesh import AXES
from nnxtrain.errors import ConfigError
from nnxtrain.sharding.mesh import make_mesh, no_devices
from tests.support import TINY


def mesh_of(*words: str, devices=None):
    """Returns the mesh of some keys, over eight devices by default."""
    rows = ("batch.global_size=1920", "batch.sequence=1920", "eval.global_size=1920")
    return make_mesh(load(TINY, [*rows, *words]).mesh, devices or jax.devices())


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ((), {"data": 8}),
        (("mesh.fsdp=4",), {"data": 2, "fsdp": 4}),
        (("mesh.fsdp=-1", "mesh.tensor=2"), {"fsdp": 4, "tensor": 2}),
        (("mesh.data=2", "mesh.context=-1"), {"data": 2, "context": 4}),
        (("mesh.data=2", "mesh.expert=2", "mesh.fsdp=2"), {"data": 2, "expert": 2, "fsdp": 2}),
        (("mesh.data=3",), {"data": 3}),
        (("mesh.preset=fsdp",), {"fsdp": 8}),
        (("mesh.preset=fsdp_tensor", "mesh.data=2"), {"data": 2, "fsdp": 2, "tensor": 2}),
        (("mesh.preset=context", "mesh.context=4"), {"fsdp": 2, "context": 4}),
        (("mesh.preset=data",), {"data": 8}),
    ],
)
def test_axes_take_what_they_are_given_and_what_is_left(words, sizes):
    """An axis of -1 that swallows or loses devices."""
    mesh = mesh_of(*words)
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | sizes
    assert mesh.axis_types == (AxisType.Auto,) * len(AXES)


def test_the_last_axis_joins_neighbours():
    """Tensor parallelism talks most; devices 0 and 1 are closest."""
    grid = mesh_of("mesh.tensor=2", "mesh.fsdp=2").devices.reshape(2, 2, 2)
    assert [[device.id for device in pair] for pair in grid[0]] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("words", "says", "fits"),
    [
        (("mesh.data=16",), "mesh.data=16 needs 16 devices, got 8 cpu devices", "mesh.data=8"),
        (("mesh.fsdp=3",), "mesh.fsdp=3 needs a multiple of 3 devices, got 8", "mesh.fsdp=4"),
        (("mesh.fsdp=5", "mesh.tensor=2"), "needs a multiple of 10 devices", "mesh.fsdp=4 mesh.tensor=2"),
        (("mesh.fsdp=6", "mesh.tensor=4", "mesh.data=1"), "needs 24 devices", "mesh.fsdp=2 mesh.tensor=4"),
    ],
)
def test_an_impossible_shape_is_explained_with_the_nearest_that_fits(words, says, fits):
    """A reshape error from inside jax names no key (B10)."""
    with pytest.raises(ConfigError) as error:
        mesh_of(*words)
    assert says in str(error.value)
    assert str(error.value).endswith(f"the nearest that fits is {fits}")


class Device(SimpleNamespace):
    """A device as jax's mesh utilities see it."""

    def __hash__(self):
        return self.id


def devices_of(slices: int, processes: int) -> list[Device]:
    """Returns eight devices, interleaved over slices and processes."""
    return [
        Device(id=i, slice_index=i % slices, process_index=i % processes, platform="gpu", device_kind="GPU")
        for i in range(8)
    ]


@pytest.mark.parametrize(("slices", "processes"), [(2, 4), (1, 2), (2, 2)])
def test_the_data_axis_goes_across_slices(monkeypatch, slices, processes):
    """Weights gathered over the slow network each layer; where devices know no slices, hosts are the slices."""
    monkeypatch.setattr("nnxtrain.sharding.mesh.Mesh", lambda grid, names, axis_types: grid)
    grid = mesh_of("mesh.slices=2", "mesh.fsdp=2", devices=devices_of(slices, processes)).reshape(4, 2)
    name = "slice_index" if slices == 2 else "process_index"
    assert np.vectorize(lambda device: getattr(device, name))(grid).tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_slices_that_are_not_there_are_refused():
    """Both numbers are in the message."""
    with pytest.raises(ConfigError, match=r"mesh\.slices=2: the devices belong to 1 slice\(s\) and 1 process\(es\)"):
        mesh_of("mesh.slices=2")


def test_no_process_is_left_without_devices():
    """It would leave the run, and the others would wait for it."""
    with pytest.raises(ConfigError, match=r"mesh\.data=4 leaves process 1 without work"):
        mesh_of("mesh.data=4", devices=sorted(devices_of(1, 2), key=lambda device: device.process_index))


@pytest.mark.parametrize(
    ("platform", "text", "said"),
    [
        ("gpu", "", "debug.platform=gpu: there is no such device"),
        ("gpu", "Backend 'cuda' is not in the list of known backends: ['cpu']", "debug.platform=gpu: Backend"),
        ("tpu", "NOT_FOUND: TPU initialization failed: No jellyfish device found.\nmore", "debug.platform=tpu: NOT"),
        ("tpu", "INTERNAL: Failed to open libtpu.so: cannot open shared object file", "debug.platform=tpu: INTERNAL"),
        ("auto", "Backend 'x' is not in the list of known backends: ['cpu']", "JAX_PLATFORMS=cpu: Backend"),
    ],
)
def test_devices_that_are_not_here_are_the_fault_of_who_asked_for_them(platform, text, said):
    """The key, or the variable of the environment where the key leaves the choice to jax."""
    error = no_devices(platform, text)
    assert isinstance(error, ConfigError)
    assert str(error).startswith(said)
    assert "more" not in str(error)


@pytest.mark.parametrize("platform", ["auto", "tpu"])
@pytest.mark.parametrize(
    "text", ["ABORTED: The TPU is already in use by process 7", "INTERNAL: no driver", "CUDA_ERROR"]
)
def test_devices_that_do_not_start_are_not_the_fault_of_a_key(platform, text):
    """Another process that has the TPU is no wrong configuration."""
    error = no_devices(platform, text)
    assert not isinstance(error, ConfigError)
    assert str(error) == f"the devices cannot be used: {text}"
