"""Rotary position embeddings."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rotation(NamedTuple):
    """Sine and cosine of the angles of a batch of positions, `[b s 1 c/2]` float32."""

    sin: jax.Array
    cos: jax.Array


def frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Returns radians per position of each pair, `[c/2]` float32.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    return (theta ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


def llama3_scaling(radians: np.ndarray, *, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Returns frequencies for sequences `factor` times as long.

    Pairs that turn more than `high` times in `original` tokens keep their frequency; for those that turn less than
    `low` times it is divided by `factor`; in between it is interpolated.

    Args:
        radians: unscaled frequencies, radians per position `[c/2]`.
        factor: how much longer sequences may be.
        low: turns per original sequence, at or below which a frequency is divided by `factor`.
        high: turns per original sequence, at or above which a frequency is kept.
        original: tokens per sequence that the frequencies were chosen for.
    Source: Llama 3.1, arXiv:2407.21783, and its published reference code.
    """
    turns = original * radians / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (radians * (kept + (1 - kept) / factor)).astype(np.float32)


def rotation_at(positions: jax.Array, radians: np.ndarray) -> Rotation:
    """Returns the rotation at `positions` `[b s]` for frequencies `radians`, per position `[c/2]`."""
    angles = positions[..., None, None].astype(jnp.float32) * radians
    return Rotation(jnp.sin(angles), jnp.cos(angles))


@jax.named_scope("rotate")
def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates the pairs (i, i + c/2) of `x` `[b s h c]`; the result has the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * rotation.cos - second * rotation.sin, second * rotation.cos + first * rotation.sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
