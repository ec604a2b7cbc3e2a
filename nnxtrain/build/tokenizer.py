"""The tokenizer of a run: that of its data source if it has its own, else `data.tokenizer`."""

from nnxtrain.build.registry import Registry
from nnxtrain.config.lookup import lookup
from nnxtrain.config.schema import Config
from nnxtrain.errors import ConfigError
from nnxtrain.types import SourceWithTokenizer, Tokenizer


def make_tokenizer(config: Config, registry: Registry) -> Tokenizer:
    """Returns the tokenizer of a run.

    Raises:
        ConfigError: the vocabulary of the model is smaller than that of the tokenizer.
    """
    source, vocab = lookup(registry.datasets, config.data.source, key="data.source"), config.model.vocab
    if isinstance(source, SourceWithTokenizer):
        tokenizer, whose = source.tokenizer(config.data, vocab), f"data.source={config.data.source}"
    else:
        name = config.data.tokenizer
        tokenizer = lookup(registry.tokenizers, name, key="data.tokenizer")(config.data)
        whose = f"data.tokenizer={name}"
    if vocab < tokenizer.size:
        rule = f"{vocab} is smaller than the {tokenizer.size} entries of {whose}"
        raise ConfigError(f"model.vocab: {rule}; the smallest that fits is {tokenizer.size}")
    return tokenizer


def tokenizer_name(config: Config, registry: Registry) -> str:
    """Returns `data.source` if the source has its own tokenizer, else `data.tokenizer`."""
    source = lookup(registry.datasets, config.data.source, key="data.source")
    return config.data.source if isinstance(source, SourceWithTokenizer) else config.data.tokenizer
