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
        self.optimizer = nnx.Optimizer(model, transform, wrt=is_trained)
        self.step = Count(jnp.zeros((), jnp.int32))
        self.guard = Guard()

    def apply_gradients(self, grads: nnx.State, *, where: jax.Array, counts: jax.Array) -> None:
        """Updates weights and moments where the scalar `where` holds, else leaves both; counts the step by `counts`."""
        parts = (self.model, self.optimizer)
        before = nnx.to_pure_dict(nnx.state(parts))  # `nnx.state` alone holds the live variables
        self.optimizer.update(self.model, grads)
        after = nnx.to_pure_dict(nnx.state(parts))
        nnx.update(parts, jax.tree.map(lambda new, old: jnp.where(where, new, old), after, before))
        self.step[...] += counts
