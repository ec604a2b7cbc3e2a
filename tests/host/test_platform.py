"""The backend that jax is told to use."""

import os

import pytest

from nnxtrain.config.load import load
from nnxtrain.host import platform
from tests.support import TINY


@pytest.mark.parametrize(
    ("word", "device", "chosen"),
    [
        ("gpu", "kfd", "rocm"),
        ("gpu", "nvidia0", "cuda"),
        ("gpu", "null", "cuda"),
        ("tpu", "kfd", "tpu"),
        ("cpu", "nvidia0", "cpu"),
    ],
)
def test_a_gpu_is_that_of_the_maker_whose_device_is_here(word, device, chosen, tmp_path, monkeypatch):
    """On a machine with GPUs of AMD alone the backend of NVIDIA finds none, and the key looks wrong."""
    (tmp_path / device).touch()
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(platform, "DEVICES", tmp_path)
    platform.choose_platform(load(TINY, [f"debug.platform={word}"]))
    assert os.environ["JAX_PLATFORMS"] == chosen


def test_beside_a_gpu_of_nvidia_the_driver_of_amd_does_not_decide(tmp_path, monkeypatch):
    """The processor's own graphics bring that driver to machines whose GPUs are NVIDIA's."""
    for name in ("kfd", "nvidia0"):
        (tmp_path / name).touch()
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(platform, "DEVICES", tmp_path)
    platform.choose_platform(load(TINY, ["debug.platform=gpu"]))
    assert os.environ["JAX_PLATFORMS"] == "cuda"
