"""Devices to compile for: those of a TPU slice, which this machine need not have, or CPU devices."""

import contextlib
import os
import sys
from collections.abc import Iterator

import jax
from jax.experimental import topologies

from nnxtrain.config.aot import SLICES
from nnxtrain.errors import ConfigError, UserError


def devices_of(topology: str) -> list[jax.Device]:
    """Returns the devices of `aot.topology`; TPU slices need libtpu, but no TPU.

    Raises:
        ConfigError: there is no such slice, or this process has fewer CPU devices.
        UserError: libtpu fails for another reason.
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
    except jax.errors.JaxRuntimeError as error:
        raise topology_error(topology, error) from error


def topology_error(topology: str, error: Exception) -> UserError:
    """Returns the error for a topology that libtpu cannot describe; a ConfigError only if its name is invalid."""
    reason = str(error).splitlines()[0]
    if not reason.startswith("INVALID_ARGUMENT"):
        return UserError(f"libtpu cannot describe {topology}: {reason}")
    family = topology.partition(":")[0]
    slices = ", ".join(f"{family}:{shape}" for shape in SLICES[family])
    return ConfigError(f"aot.topology={topology}: {reason}; slices of {family} are {slices}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences native libraries on stderr: libtpu prints many lines if there is no TPU."""
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
