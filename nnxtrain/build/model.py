"""The state of a run: a model with its initial weights, and the optimizer of its parameters."""

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.build.registry import Registry
from nnxtrain.config.lookup import lookup
from nnxtrain.config.schema import Config
from nnxtrain.models.family import ModelContext
from nnxtrain.models.remat import make_wrap
from nnxtrain.nn.kernels import make_attend
from nnxtrain.nn.param import Precision
from nnxtrain.optim.groups import freeze
from nnxtrain.optim.optimizers import make_optimizer
from nnxtrain.sharding.layout import MeshLayout
from nnxtrain.state import TrainStateNNX
from nnxtrain.types import PRNG, RematPolicy, RngsAt, Schedule


def make_model_context(
    config: Config, layout: MeshLayout, *, vocab: int, platform: str, policy: RematPolicy | None, registry: Registry
) -> ModelContext:
    """Returns what the model of `config` is built with.

    Args:
        config: of the run.
        layout: of its mesh.
        vocab: ids of the tokenizer; the others of the model are padding.
        platform: of the devices.
        policy: which activations of a layer are saved for the backward pass; None for all.
        registry: tables that the names in `config` are looked up in.
    """
    return ModelContext(
        vocab=vocab,
        wrap=make_wrap(policy),
        layout=layout,
        precision=Precision(_compute_type(config.model.dtype, platform), jnp.dtype(config.model.param_dtype)),
        rngs_at=rngs_from(config.seed),
        make_attend=functools.partial(
            make_attend, name=config.model.attention, table=registry.attentions, platform=platform, layout=layout
        ),
    )


def make_state_of(
    config: Config, context: ModelContext, schedule: Schedule, *, registry: Registry
) -> Callable[[], TrainStateNNX]:
    """Returns a function that draws the initial state.

    Args:
        config: of the run.
        context: what its model is built with.
        schedule: learning rate by number of updates.
        registry: tables that the names in `config` are looked up in.
    """
    make_model = lookup(registry.models, config.model.name, key="model.name")

    def make_state() -> TrainStateNNX:
        model = make_model(config.model, context)
        freeze(model, config.optimizer)
        return TrainStateNNX(model, make_optimizer(config.optimizer, schedule, model=model, table=registry.optimizers))

    if config.optimizer.groups:
        nnx.eval_shape(make_state)  # raises on patterns that match nothing, before a run writes anything
    return make_state


def rngs_from(seed: int) -> RngsAt:
    """Returns `(path, global layer index) -> nnx.Rngs`: initial weights depend on these and on `seed` alone."""

    def rngs_at(path: str, layer: jax.typing.ArrayLike) -> nnx.Rngs:
        of_path = jax.random.fold_in(jax.random.key(seed, impl=PRNG), zlib.crc32(path.encode()))
        return nnx.Rngs(params=jax.random.fold_in(of_path, layer))

    return rngs_at


def _compute_type(name: str, platform: str) -> jnp.dtype:
    if name == "auto":
        name = "bfloat16" if platform in ("tpu", "gpu") else "float32"
    return jnp.dtype(name)
