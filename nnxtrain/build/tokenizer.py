"""The tokenizer of a run: that of its data source where the source brings one, else that of `data.tokenizer`."""

from nnxtrain.build.registry import Registry
from nnxtrain.config.lookup import lookup
from nnxtrain.config.schema import Config
from nnxtrain.errors import ConfigError
from nnxtrain.types import Tokenizer


def make_tokenizer(config: Config, registry: Registry) -> Tokenizer:
    """Returns the tokenizer of a run.

    Raises:
        ConfigError: the vocabulary of the model is too small for it.
    """
    source, vocab = config.data.source, config.model.vocab
    if source in registry.source_tokenizers:
        tokenizer, whose = registry.source_tokenizers[source](config.data, vocab), f"data.source={source}"
    else:
        name = config.data.tokenizer
        tokenizer = lookup(registry.tokenizers, name, key="data.tokenizer")(config.data)
        whose = f"data.tokenizer={name}"
    if vocab < tokenizer.size:
        rule = f"{vocab} is smaller than the {tokenizer.size} entries of {whose}"
        raise ConfigError(f"model.vocab: {rule}; the smallest that fits is {tokenizer.size}")
    return tokenizer


def tokenizer_name(config: Config, registry: Registry) -> str:
    """Returns the name of the tokenizer of a run: that of the source which brings it, or `data.tokenizer`."""
    return config.data.source if config.data.source in registry.source_tokenizers else config.data.tokenizer
