"""Devices that need not be here: those of a TPU slice, or as many CPU devices as one asks for."""

import contextlib
import os
import sys
from collections.abc import Iterator

import jax
from jax.experimental import topologies

from nnxtrain.config.aot import SLICES
from nnxtrain.errors import ConfigError


def devices_of(topology: str) -> list[jax.Device]:
    """Returns the devices of `aot.topology`, to compile for; TPUs need libtpu, which need not find any.

    Raises:
        ConfigError: there is no such slice, or this process has fewer CPU devices.
    """
    family, _, shape = topology.partition(":")
    if family == "cpu":
        devices = jax.devices("cpu")
        if len(devices) < int(shape):
            raise ConfigError(f"aot.topology={topology}: this process has {len(devices)} CPU devices")
        return devices[: int(shape)]
    try:
        with quiet():
            return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except (RuntimeError, ValueError) as error:
        slices = ", ".join(f"{family}:{shape}" for shape in SLICES[family])
        what = f"{str(error).splitlines()[0]}; slices of {family} are {slices}"
        raise ConfigError(f"aot.topology={topology}: {what}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what native libraries write to the standard error: libtpu tells at length that it finds no TPU."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
