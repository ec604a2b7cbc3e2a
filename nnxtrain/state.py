"""The training state: model, optimizer, step count and guard."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def is_trained(path: Sequence[object], value: object) -> bool:
    """Returns whether the variable at `path` is a parameter that the optimizer updates; a filter for `nnx.state`."""
    return isinstance(value, nnx.Param) and not value.get_metadata("frozen", False)


class Count(nnx.Variable):
    """A counter, int32 scalar."""


class Statistic(nnx.Variable):
    """A running statistic, float32 scalar."""


class Guard(nnx.Module):
    """Counts of bad steps, and running statistics to detect spikes; `steps/guard.py` uses them.

    Attributes:
        bad_step: step that halts the run until the host handles it; -1 for none.
        skipped: number of steps skipped as non-finite or a spike.
        in_row: number of consecutive skipped steps up to now.
        accepted: number of updates in the statistics below.
        loss_mean: running mean of the loss; `norm_mean` of the gradient norm.
        loss_square: running variance of the loss; `norm_square` of the gradient norm.
    """

    def __init__(self) -> None:
        self.bad_step = Count(jnp.full((), -1, jnp.int32))
        self.skipped = Count(jnp.zeros((), jnp.int32))
        self.in_row = Count(jnp.zeros((), jnp.int32))
        self.accepted = Count(jnp.zeros((), jnp.int32))
        self.loss_mean = Statistic(jnp.zeros((), jnp.float32))
        self.loss_square = Statistic(jnp.zeros((), jnp.float32))
        self.norm_mean = Statistic(jnp.zeros((), jnp.float32))
        self.norm_square = Statistic(jnp.zeros((), jnp.float32))

    def release(self) -> None:
        """Resumes the run after a step that halted it, if any; resets the count of consecutive skips."""
        if self.bad_step[...] >= 0:
            self.bad_step[...] = jnp.full((), -1, jnp.int32)
            self.in_row[...] = jnp.zeros((), jnp.int32)


class TrainStateNNX(nnx.Module):
    """`model`, `optimizer`, `step` and `guard`.

    `step` counts batches consumed, including skipped ones; the optimizer's own count counts updates and sets the
    learning rate.
    """

    def __init__(self, model: nnx.Module, transform: optax.GradientTransformation):
        self.model = model
        self.init_optimizer(transform)
        self.step = Count(jnp.zeros((), jnp.int32))
        self.guard = Guard()

    def init_optimizer(self, transform: optax.GradientTransformation) -> None:
        """Makes a new optimizer state for the current weights: some rules keep a copy of them."""
        self.optimizer = nnx.Optimizer(self.model, transform, wrt=is_trained)

    @jax.named_scope("optimizer")
    def apply_gradients(self, grads: nnx.State, *, scale: jax.Array, where: jax.Array, counts: jax.Array) -> None:
        """Updates weights and moments if the scalar `where` is true; adds `counts` to the step.

        Args:
            grads: gradients, summed over targets.
            scale: factor of the gradients, scalar; applied here to avoid a scaled copy in memory.
            where: bool scalar; a branch, since a `where` per value would keep old and new weights in memory.
            counts: 0 or 1, scalar.
        """
        graph, state = nnx.split((self.model, self.optimizer))

        def update(state: nnx.State, grads: nnx.State) -> nnx.State:
            model, optimizer = nnx.merge(graph, state)
            optimizer.update(model, jax.tree.map(lambda grad: grad * scale, grads))
            return nnx.state((model, optimizer))

        nnx.update((self.model, self.optimizer), jax.lax.cond(where, update, lambda state, grads: state, state, grads))
        self.step[...] += counts
