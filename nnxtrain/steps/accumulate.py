"""Gradient accumulation: sums of losses, targets and gradients over the microbatches of a step."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.types import Accumulate, Batch, LossOf, Sums


def one_pass(loss_of: LossOf, params: nnx.State, batch: Batch) -> Sums:
    """Returns the sums of a batch of a single microbatch, leaves `[1 b ...]`."""
    return _sums(loss_of, params, jax.tree.map(lambda leaf: leaf[0], batch))


def scan(loss_of: LossOf, params: nnx.State, batch: Batch) -> Sums:
    """Returns the sums over microbatches, leaves `[m b ...]`; only one has its activations in memory at a time."""
    sums_of = functools.partial(_sums, loss_of, params)
    shapes = jax.eval_shape(sums_of, jax.tree.map(lambda leaf: leaf[0], batch))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(sums: Sums, microbatch: Batch) -> tuple[Sums, None]:
        more = sums_of(microbatch)
        with jax.named_scope("accumulate"):
            return jax.tree.map(jnp.add, sums, more), None

    return jax.lax.scan(add, zeros, batch)[0]


def _sums(loss_of: LossOf, params: nnx.State, microbatch: Batch) -> Sums:
    (_, parts), grads = jax.value_and_grad(loss_of, has_aux=True)(params, microbatch)
    return Sums(parts, jax.tree.map(lambda grad: grad.astype(jnp.float32), grads))


ACCUMULATORS: dict[str, Accumulate] = {"one_pass": one_pass, "scan": scan}
