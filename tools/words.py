"""Separates a tool's own `name=value` options from keys of the configuration."""

from collections.abc import Iterable, Mapping
from typing import Any

from nnxtrain.config.echo import echo
from nnxtrain.errors import ConfigError


def split_words(words: Iterable[str], own: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of the tool's own options, and the remaining words.

    Args:
        words: of the command line.
        own: name → default, whose type is that of the option.

    Raises:
        ConfigError: a value does not have the type.
    """
    values: dict[str, Any] = dict(own)
    rest: list[str] = []
    for word in words:
        name, _, text = word.partition("=")
        if name not in own:
            rest.append(word)
            continue
        try:
            values[name] = type(own[name])(text)
        except ValueError as error:
            raise ConfigError(f"{echo(word)}: expected {type(own[name]).__name__}, got '{echo(text)}'") from error
    return values, rest
