"""Optax chains: clip by the global norm, then the rule, with weight decay where a parameter's axes call for it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnxtrain.axes import EMBED, STACKED, axes_of
from nnxtrain.config.optimizer import OptimizerConfig
from nnxtrain.lookup import lookup
from nnxtrain.types import Schedule


def is_decayed(axes: tuple[str, ...]) -> bool:
    """Tells whether a parameter of these logical axes is decayed: whether it maps the embedding axis to others.

    Matrices and the embedding table are; norm scales and biases are not, stacked over layers or not.
    """
    own = [axis for axis in axes if axis not in STACKED]
    return EMBED in own and len(own) > 1


def _adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)


def _sgd(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.trace(decay=config.momentum) if config.momentum else optax.identity()


# the rule alone; clipping, weight decay and the learning rate are the same for all
OPTIMIZERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {"adamw": _adamw, "sgd": _sgd}


def make_optimizer(config: OptimizerConfig, schedule: Schedule, *, model: nnx.Module) -> optax.GradientTransformation:
    """Returns the chain of `config` with the learning rates of `schedule` for the parameters of `model`.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101 (decay apart from the gradient).
    """
    rule = lookup(OPTIMIZERS, config.name, key="optimizer.name")(config)
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    decayed = nnx.map_state(lambda path, parameter: is_decayed(axes_of(parameter)), nnx.state(model, nnx.Param))
    decay = optax.add_decayed_weights(config.weight_decay, mask=decayed)
    chain = optax.chain(clip, rule, decay, optax.scale_by_learning_rate(schedule))

    def init(params: optax.Params) -> optax.OptState:
        """Makes float32 moments, whatever the type of the weights."""
        return chain.init(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))

    return optax.GradientTransformation(init, chain.update)
