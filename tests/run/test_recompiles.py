"""Compilations are counted as jax reports them."""

import jax
import jax.numpy as jnp

from nnxtrain.run.recompiles import CompileLog


def test_a_second_shape_is_a_repeat():
    """A count that cannot rise would call every run clean (B48)."""
    log = CompileLog()

    def program(x):
        return x + 1

    def other(x):
        return x * 2

    for size in (2, 3):
        jax.jit(program)(jnp.ones(size))
    jax.jit(other)(jnp.ones(2))
    assert log.counts["jit(program)"] == 2
    assert log.repeats(["program", "other"]) == 1
    assert log.repeats(["other"]) == 0


def test_a_log_that_is_closed_or_forgotten_counts_no_more():
    """Each run of a process left a listener behind, which jax called at each compilation for good."""
    closed, forgotten = CompileLog(), CompileLog()
    counts = forgotten.counts
    closed.close()
    closed.close()
    del forgotten
    jax.jit(lambda x: x - 1)(jnp.ones(5))
    assert not closed.counts
    assert not counts
