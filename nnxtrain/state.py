"""Everything a run needs to go on, in one container."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def is_trained(path: Sequence[object], value: object) -> bool:
    """Tells whether the variable at `path` is a parameter that the optimizer moves; a filter of `nnx.state`."""
    return isinstance(value, nnx.Param) and not value.get_metadata("frozen", False)


class Count(nnx.Variable):
    """A counter, int32 scalar."""


class Statistic(nnx.Variable):
    """A running statistic, float32 scalar."""


class Guard(nnx.Module):
    """What a run remembers of steps that went wrong; `steps/guard.py` says what it does with it.

    Attributes:
        bad_step: step that was not finite and holds the run until the host has acted; -1 for none.
        skipped: steps whose update was left out, since they were not finite or a spike.
        in_row: how many of these came one after another up to now.
        accepted: updates that the statistics below are made of.
        loss_mean: running mean of the loss, and so on for the gradient norm.
        loss_square: running mean of the squared distance to the mean.
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
        """Lets the run go on after a step that held it, if one did; the count of what was left out begins anew."""
        if self.bad_step[...] >= 0:
            self.bad_step[...] = jnp.full((), -1, jnp.int32)
            self.in_row[...] = jnp.zeros((), jnp.int32)


class TrainStateNNX(nnx.Module):
    """`model`, `optimizer`, `step` and `guard`.

    `step` counts batches consumed, skipped ones too; the optimizer's own count counts updates and drives the learning
    rate.
    """

    def __init__(self, model: nnx.Module, transform: optax.GradientTransformation):
        self.model = model
        self.begin_optimizer(transform)
        self.step = Count(jnp.zeros((), jnp.int32))
        self.guard = Guard()

    def begin_optimizer(self, transform: optax.GradientTransformation) -> None:
        """Makes the optimizer's state anew for the weights as they are: some rules keep weights of their own."""
        self.optimizer = nnx.Optimizer(self.model, transform, wrt=is_trained)

    @jax.named_scope("optimizer")
    def apply_gradients(self, grads: nnx.State, *, scale: jax.Array, where: jax.Array, counts: jax.Array) -> None:
        """Updates weights and moments where the scalar `where` holds, else leaves both; counts the step by `counts`.

        Args:
            grads: of the weights, summed over targets.
            scale: what they are multiplied by, scalar; in here, since a scaled copy of them would be written to memory.
            where: bool scalar. It is a branch: a choice of each value would hold old and new weights side by side.
            counts: 0 or 1, scalar.
        """
        graph, state = nnx.split((self.model, self.optimizer))

        def update(state: nnx.State, grads: nnx.State) -> nnx.State:
            model, optimizer = nnx.merge(graph, state)
            optimizer.update(model, jax.tree.map(lambda grad: grad * scale, grads))
            return nnx.state((model, optimizer))

        nnx.update((self.model, self.optimizer), jax.lax.cond(where, update, lambda state, grads: state, state, grads))
        self.step[...] += counts
