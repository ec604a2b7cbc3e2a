"""Dropout masks belong to rows."""

import jax
import jax.numpy as jnp
import numpy as np

from nnxtrain.nn.dropout import RowDropout

KEY = jax.random.key(3)
X = jnp.ones((4, 64, 32))


def drop(rows) -> np.ndarray:
    """Returns ones after dropout at layer 2, place 1."""
    rows = jnp.array(rows)
    return np.asarray(RowDropout.of_rows(0.25, KEY, rows).at(2).at(1)(X[: len(rows)]))


def test_a_row_has_its_mask_wherever_it_lies():
    """Masks drawn for the batch as a whole move with the row's place in the microbatch."""
    whole, alone = drop([0, 1, 2, 3]), drop([2])
    np.testing.assert_array_equal(whole[2], alone[0])
    assert not np.array_equal(whole[0], whole[1])


def test_rate_and_scale_keep_the_mean():
    """What is kept grows by 1 / (1 - rate)."""
    dropped = drop([0, 1, 2, 3])
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(dropped.mean() - 1) < 0.02


def test_layers_and_places_differ():
    """One mask for attention and feed-forward would correlate them."""
    base = RowDropout.of_rows(0.5, KEY, jnp.arange(4))
    masks = [np.asarray(base.at(layer).at(place)(X)) for layer in (0, 1) for place in (0, 1)]
    assert len({mask.tobytes() for mask in masks}) == 4
