"""Rotary positions."""

import jax.numpy as jnp
import numpy as np

from nnxtrain.nn.rope import frequencies, llama3_scaling, rotate, rotation_at


def test_rotation_is_that_of_complex_numbers():
    """Pairs (i, i + c/2) turn by position times frequency."""
    radians = frequencies(8, 10000.0)
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 100, 0, 31, 5]], np.int32)
    got = rotate(jnp.array(x), rotation_at(jnp.array(positions), radians))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[..., None, None] * radians)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=1e-4)


def test_products_depend_on_the_distance_alone():
    """What attention sees must not change when a text is moved."""
    radians = frequencies(16, 10000.0)
    q, k = (np.random.default_rng(seed).normal(size=(1, 1, 1, 16)).astype(np.float32) for seed in (0, 1))

    def product(first: int, second: int) -> float:
        at = [rotation_at(jnp.array([[position]]), radians) for position in (first, second)]
        return float((rotate(jnp.array(q), at[0]) * rotate(jnp.array(k), at[1])).sum())

    np.testing.assert_allclose(product(3, 1), product(103, 101), rtol=1e-4)


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones():
    """Checks the two ends and one pair between them against the formula."""
    radians = frequencies(128, 500000.0)
    got = llama3_scaling(radians, factor=8, low=1, high=4, original=8192)
    turns = 8192 * radians / (2 * np.pi)
    np.testing.assert_array_equal(got[turns > 4], radians[turns > 4])
    np.testing.assert_allclose(got[turns < 1], radians[turns < 1] / 8, rtol=1e-6)
    between = np.flatnonzero((turns > 1) & (turns < 4))
    smooth = (turns[between] - 1) / 3
    np.testing.assert_allclose(got[between], (1 - smooth) * radians[between] / 8 + smooth * radians[between], rtol=1e-5)
    assert len(between)
