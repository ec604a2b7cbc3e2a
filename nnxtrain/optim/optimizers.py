"""Optax chains: clipping by global norm, an update rule with decay and learning rate, then weight averaging."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnxtrain.config.lookup import lookup
from nnxtrain.config.optimizer import OptimizerConfig
from nnxtrain.optim.averages import average_weights
from nnxtrain.optim.groups import Setting, settings_of
from nnxtrain.optim.matrices import per_matrix
from nnxtrain.optim.muon import scale_by_muon, stack_matrix
from nnxtrain.state import is_trained
from nnxtrain.types import Schedule, UpdateContext, UpdateRule


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps, mu_dtype=config.mu_dtype)


def _adamw(config: OptimizerConfig, context: UpdateContext) -> optax.GradientTransformation:
    """Source: Loshchilov and Hutter 2019, arXiv:1711.05101 (decoupled weight decay)."""
    return optax.chain(_adam(config), context.finish)


def _adafactor(config: OptimizerConfig, context: UpdateContext) -> optax.GradientTransformation:
    """Source: Shazeer and Stern 2018, arXiv:1804.04235; updates relative to the weights, no momentum."""
    rule = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())
    return optax.chain(per_matrix(rule, context.params), context.finish)


def _lion(config: OptimizerConfig, context: UpdateContext) -> optax.GradientTransformation:
    """Source: Chen et al. 2023, arXiv:2302.06675."""
    return optax.chain(optax.scale_by_lion(config.b1, config.b2, mu_dtype=config.mu_dtype), context.finish)


def _muon(config: OptimizerConfig, context: UpdateContext) -> optax.GradientTransformation:
    """Muon for the matrices of the stack, adamw for token tables, norms and biases."""

    def label(path: Sequence[object], parameter: nnx.Variable) -> str:
        return "adamw" if stack_matrix(parameter) is None else "muon"

    rules = {"muon": scale_by_muon(config, context.params), "adamw": _adam(config)}
    return optax.chain(optax.partition(rules, nnx.map_state(label, context.params)), context.finish)


def _sgd(config: OptimizerConfig, context: UpdateContext) -> optax.GradientTransformation:
    momentum = optax.trace(config.momentum, accumulator_dtype=config.mu_dtype)
    return optax.chain(momentum if config.momentum else optax.identity(), context.finish)


def _schedule_free_adamw(config: OptimizerConfig, context: UpdateContext) -> optax.GradientTransformation:
    """Takes gradients at an interpolation of iterate and average; source: Defazio et al. 2024, arXiv:2405.15682."""
    scale = optax.scale_by_rms(decay=config.b2, eps=config.eps, eps_in_sqrt=False, bias_correction=True)

    def rate(count: jax.Array) -> jax.Array:
        return context.schedule(count - 1)  # optax counts from 1 here, but from 0 where it applies the rate

    return optax.contrib.schedule_free(optax.chain(scale, context.finish), rate, b1=config.b1)


OPTIMIZERS: dict[str, UpdateRule] = {
    "adafactor": _adafactor,
    "adamw": _adamw,
    "lion": _lion,
    "muon": _muon,
    "schedule_free_adamw": _schedule_free_adamw,
    "sgd": _sgd,
}


def make_optimizer(
    config: OptimizerConfig, schedule: Schedule, *, model: nnx.Module, table: Mapping[str, UpdateRule] = OPTIMIZERS
) -> optax.GradientTransformation:
    """Returns the optimizer of `config` for the trained parameters of `model`, with learning rates from `schedule`.

    Raises:
        ConfigError: `optimizer.name` is not in `table`.
    """
    params = nnx.state(model, is_trained)
    finish = optax.chain(_decay_and_scale(settings_of(params, config)), optax.scale_by_learning_rate(schedule))
    rule = lookup(table, config.name, key="optimizer.name")(config, UpdateContext(params, schedule, finish))
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    average = optax.identity() if config.ema is None else average_weights(config.ema)
    chain = optax.chain(clip, rule, average)

    def init(params: optax.Params) -> optax.OptState:
        """Makes float32 moments, whatever the dtype of the weights, unless the rule has its own."""
        return chain.init(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))

    return optax.GradientTransformation(init, chain.update)


def _decay_and_scale(settings: nnx.State) -> optax.GradientTransformation:
    def one(setting: Setting, direction: jax.Array, weight: jax.Array) -> jax.Array:
        return setting.rate_scale * (direction + setting.decay * weight)

    return optax.stateless(lambda updates, params: jax.tree.map(one, settings, updates, params))
