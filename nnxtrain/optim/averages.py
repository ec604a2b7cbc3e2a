"""Weights for evaluation: averages of the trained weights, if the optimizer keeps any."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnxtrain.state import TrainStateNNX, is_trained


class AverageState(NamedTuple):
    """A running weighted sum of weights, float32, and the sum of its coefficients, a scalar below 1."""

    total: Any
    mass: jax.Array


def average_weights(decay: float) -> optax.GradientTransformation:
    """Returns a transformation that averages the weights after each update; updates pass unchanged.

    After `n` updates the average is `sum_k decay^(n - k) w_k / sum_k decay^(n - k)`, `k = 1 .. n`: the initial
    weights do not count, as in the bias correction of Adam.

    Args:
        decay: of the average, below 1; about the last `1 / (1 - decay)` updates count.
    """

    def init(params: optax.Params) -> AverageState:
        return AverageState(optax.tree.zeros_like(params, dtype=jnp.float32), jnp.zeros((), jnp.float32))

    def update(updates: optax.Updates, state: AverageState, params: optax.Params) -> tuple[Any, AverageState]:
        weights = optax.tree.cast(optax.apply_updates(params, updates), jnp.float32)
        total = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state.total, weights)
        return updates, AverageState(total, decay * state.mass + (1 - decay))

    return optax.GradientTransformation(init, update)


def evaluation_weights(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """Returns the weights for evaluation: averages if the optimizer keeps any, else `params`.

    Args:
        opt_state: state of the optimizer.
        params: the trained weights.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=_is_average):
        if isinstance(node, optax.contrib.ScheduleFreeState):
            return optax.contrib.schedule_free_eval_params(node, params)
        if isinstance(node, AverageState):
            mass = node.mass  # 0 before the first update
            scaled = jax.tree.map(lambda total: total / jnp.where(mass > 0, mass, 1), node.total)
            return jax.tree.map(lambda average, now: jnp.where(mass > 0, average, now), scaled, params)
    return params


def evaluation_model(state: TrainStateNNX) -> nnx.Module:
    """Returns the model with the weights for evaluation; `state` is unchanged."""
    graph, params, rest = nnx.split(state.model, is_trained, ...)
    weights = evaluation_weights(nnx.as_pure(state.optimizer.opt_state), nnx.as_pure(params))
    return nnx.merge(graph, weights, rest)


def _is_average(node: Any) -> bool:
    return isinstance(node, AverageState | optax.contrib.ScheduleFreeState)
