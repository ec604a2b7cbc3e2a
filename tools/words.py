"""Separates a tool's own words `name=value` from keys of the configuration."""

from collections.abc import Iterable, Mapping
from typing import Any

from nnxtrain.config.echo import echo
from nnxtrain.errors import ConfigError


def split_words(words: Iterable[str], own: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the tool's own words with their values, and the words that are left.

    Args:
        words: of the command line.
        own: name → default; the type of the default is that of the value.

    Raises:
        ConfigError: a value is not of the type.
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
