"""Models by name."""

import functools
from collections.abc import Callable

from flax import nnx

from nnxtrain.config.model import ModelConfig
from nnxtrain.models.decoder import Decoder
from nnxtrain.models.families.llama import llama
from nnxtrain.models.family import ModelContext

# `(config, context) -> model`; one line per family
MODELS: dict[str, Callable[[ModelConfig, ModelContext], nnx.Module]] = {
    "decoder": functools.partial(Decoder, llama),
}
