"""What a process makes of the end of another."""

import jax
import pytest

from nnxtrain.errors import LostProcessError
from nnxtrain.host.cluster import Cluster


@pytest.fixture
def two():
    """Returns what a process of two knows, without the other."""
    cluster = Cluster()
    cluster.size = 2
    return cluster


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("FAILED_PRECONDITION: Gloo all-reduce failed: Connection closed by peer"),
        ValueError("UNKNOWN: Gloo all-reduce failed: Read error: Connection reset by peer"),
    ],
)
def test_a_broken_collective_is_a_lost_process(two, error):
    """Jax says it with the step that failed, and in other words with the first array made of its results."""
    with pytest.raises(LostProcessError), two.losses_named():
        raise error


def test_other_errors_stay_what_they_are(two):
    """A fault of our own must not be blamed on the network."""
    with pytest.raises(ValueError, match="mine"), two.losses_named():
        raise ValueError("mine")
    alone = Cluster()
    with pytest.raises(ValueError, match="Gloo"), alone.losses_named():
        raise ValueError("Gloo: of no other process")
