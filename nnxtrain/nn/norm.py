"""Normalisation layers."""

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.axes import EMBED


class RmsNorm(nnx.Module):
    """Divides by the root mean square and multiplies by a learned scale; computed in float32.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, width: int, *, eps: float, axis: str = EMBED):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), axes=(axis,))

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[... width]` to `[... width]` in the dtype of `x`."""
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        return (x32 * jax.lax.rsqrt(mean_square + self.eps) * self.scale[...]).astype(x.dtype)
