"""Devices to compile for, and whose fault it is that there are none."""

import jax
import pytest

from nnxtrain.errors import ConfigError
from nnxtrain.hardware.topology import devices_of, topology_error


def test_a_slice_that_does_not_exist_is_the_fault_of_the_key():
    """The message has the slices that there are."""
    error = jax.errors.JaxRuntimeError('INVALID_ARGUMENT: Topology layout "v5e:3x5" is not divisible\nmore')
    said = topology_error("v5e:3x5", error)
    assert isinstance(said, ConfigError)
    assert str(said).startswith("aot.topology=v5e:3x5: INVALID_ARGUMENT: Topology layout")
    assert "slices of v5e are v5e:2x2," in str(said)
    assert "more" not in str(said)


@pytest.mark.parametrize(
    "text",
    [
        'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".',
        "UNAVAILABLE: the driver is not here",
        "INTERNAL: something in libtpu, with INVALID_ARGUMENT inside",
        "RESOURCE_EXHAUSTED: no memory left",
    ],
)
def test_a_failure_of_libtpu_is_not_the_fault_of_the_key(text):
    """A lock that another process has is no wrong topology; exit code 2 sends a person to the configuration."""
    said = topology_error("v5e:2x2", jax.errors.JaxRuntimeError(text))
    assert not isinstance(said, ConfigError)
    assert said.exit_code == 1
    assert str(said) == f"libtpu cannot describe v5e:2x2: {text}"


def test_cpu_devices_are_those_of_this_process():
    """As many as asked for, and no more than there are."""
    assert devices_of("cpu:3") == jax.devices()[:3]
    with pytest.raises(ConfigError, match="cpu:64: this process has 8 CPU devices"):
        devices_of("cpu:64")
