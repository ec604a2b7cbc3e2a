"""Which backend jax is to use, chosen before jax is imported."""

import os
from importlib.util import find_spec
from pathlib import Path

from nnxtrain.config.schema import Config

DEVICES = Path("/dev")
NVIDIA, AMD = "nvidia[0-9]*", "kfd"  # device files of GPUs


def choose_platform(config: Config) -> None:
    """Sets `JAX_PLATFORMS`, before jax is imported, to the backend that `debug.platform` names.

    With `auto`, where the compiler of TPUs is installed on a machine without any accelerator, jax would look for a TPU
    for a minute.
    """
    if config.debug.platform == "gpu":
        os.environ["JAX_PLATFORMS"] = "rocm" if _is_amd() else "cuda"
    elif config.debug.platform != "auto":
        os.environ["JAX_PLATFORMS"] = config.debug.platform
    elif not os.environ.get("JAX_PLATFORMS") and find_spec("libtpu") is not None and not _has_accelerator():
        os.environ["JAX_PLATFORMS"] = "cpu"


def _has_accelerator() -> bool:
    """Returns whether this machine has a TPU, or a GPU of NVIDIA or AMD."""
    return any(path for name in ("accel*", "vfio/[0-9]*", NVIDIA, AMD) for path in DEVICES.glob(name))


def _is_amd() -> bool:
    """Returns whether the GPUs of this machine are AMD's; jax fails on its name `gpu` if it lacks either plugin."""
    return any(DEVICES.glob(AMD)) and not any(DEVICES.glob(NVIDIA))
