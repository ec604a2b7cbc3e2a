"""Everything a run needs to go on, in one container."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class StepCount(nnx.Variable):
    """Batches consumed, int32 scalar."""


class TrainStateNNX(nnx.Module):
    """`model`, `optimizer` and `step`.

    `step` counts batches consumed, skipped ones too; the optimizer's own count counts updates and drives the learning
    rate.
    """

    def __init__(self, model: nnx.Module, transform: optax.GradientTransformation):
        self.model = model
        self.optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
        self.step = StepCount(jnp.zeros((), jnp.int32))

    def apply_gradients(self, grads: nnx.State, *, where: jax.Array) -> None:
        """Updates weights and moments where the scalar `where` holds, else leaves both; counts the step always."""
        parts = (self.model, self.optimizer)
        before = nnx.to_pure_dict(nnx.state(parts))  # `nnx.state` alone holds the live variables
        self.optimizer.update(self.model, grads)
        after = nnx.to_pure_dict(nnx.state(parts))
        nnx.update(parts, jax.tree.map(lambda new, old: jnp.where(where, new, old), after, before))
        self.step[...] += 1
