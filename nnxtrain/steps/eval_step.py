"""Loss of one evaluation batch."""

import jax
from flax import nnx

from nnxtrain.types import Batch, EvalStep, LossSum


def make_eval_step(loss_sum: LossSum) -> EvalStep:
    """Returns the function that computes the loss of a batch and changes nothing."""

    def eval_step(model: nnx.Module, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns cross-entropy summed over the targets of `batch` `[b ...]`, in nats, and their number."""
        _, parts = loss_sum(model, batch, jax.random.key(0))
        return parts.sums["loss"]

    return eval_step
