"""Microbatches of one step, one after another: sums of losses, targets and gradients."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.types import Accumulate, Batch, LossOf, Sums


def one_pass(loss_of: LossOf, params: nnx.State, batch: Batch) -> Sums:
    """Takes the batch as the single microbatch it is, leaves `[1 b ...]`."""
    return _sums(loss_of, params, jax.tree.map(lambda leaf: leaf[0], batch))


def scan(loss_of: LossOf, params: nnx.State, batch: Batch) -> Sums:
    """Scans over microbatches, leaves `[m b ...]`; activations of one of them live at a time."""
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
