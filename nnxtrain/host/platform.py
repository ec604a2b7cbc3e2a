"""Which backend jax is to use, chosen before jax is imported."""

import os
from importlib.util import find_spec
from pathlib import Path

from nnxtrain.config.schema import Config

DEVICES = Path("/dev")


def choose_platform(config: Config) -> None:
    """Tells jax, before it is imported, which backend `debug.platform` names.

    Where that is `auto` and the compiler of TPUs is installed on a machine without any accelerator, jax would look for
    a TPU for a minute.
    """
    if config.debug.platform != "auto":
        os.environ["JAX_PLATFORMS"] = config.debug.platform.replace("gpu", "cuda")
    elif not os.environ.get("JAX_PLATFORMS") and find_spec("libtpu") is not None and not _has_accelerator():
        os.environ["JAX_PLATFORMS"] = "cpu"


def _has_accelerator() -> bool:
    """Tells whether this machine has a TPU, or a GPU of NVIDIA or AMD."""
    return any(path for name in ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd") for path in DEVICES.glob(name))
