"""FLOPs that are counted from a jaxpr are those that one counts by hand, or are said to be unknown."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from nnxtrain.aot.jaxpr import Products, products_of

ROWS, INNER, COLUMNS, GROUPS = 8, 4, 5, 3


def counted(function, *args) -> Products:
    """Returns what is counted of a function, traced for arguments like `args`."""
    return products_of(jax.make_jaxpr(function)(*args).jaxpr)


def kernel(x_ref, o_ref):
    """A product in a kernel, which a count that looks inside would find once instead of once a block."""
    o_ref[...] = x_ref[...] @ x_ref[...]


def pallas(x, **options):
    """Returns the product of a square matrix with itself."""
    return pl.pallas_call(kernel, out_shape=x, grid=(2,), name="square", **options)(x)


def test_ragged_products_and_both_their_gradients_count_each_row_once():
    """Experts of a mixture: 0 FLOPs, or those of every row with every group, make a roofline worth nothing."""
    left, right = jnp.ones((ROWS, INNER)), jnp.ones((GROUPS, INNER, COLUMNS))
    sizes = jnp.array([2, 3, 3])
    forward = lambda left, right: jax.lax.ragged_dot(left, right, sizes).sum()  # noqa: E731
    once = 2 * ROWS * INNER * COLUMNS
    assert counted(forward, left, right) == (once, ())
    assert counted(jax.grad(forward, argnums=(0, 1)), left, right) == (3 * once, ())


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, (0, ("square",))),
        ({"cost_estimate": pl.CostEstimate(flops=77, transcendentals=0, bytes_accessed=0)}, (77, ())),
    ],
)
def test_a_kernel_counts_what_it_says_or_is_unknown(options, want):
    """A kernel without an estimate that counts as 0 makes a step look faster than any chip."""
    x = jnp.ones((8, 8))
    assert counted(lambda x: pallas(x, **options), x) == want
    twice = lambda x: jax.lax.scan(lambda x, _: (pallas(x, **options), None), x, None, length=2)[0]  # noqa: E731
    assert counted(twice, x) == (2 * want[0], want[1])
