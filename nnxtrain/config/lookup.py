"""Looks up a name in a table of entries, with a helpful error."""

import difflib
from collections.abc import Collection, Mapping
from typing import TypeVar

from nnxtrain.config.echo import echo
from nnxtrain.errors import ConfigError

T = TypeVar("T")


def lookup(table: Mapping[str, T], name: str, *, key: str) -> T:
    """Returns `table[name]`; `key` is the config key whose value is `name`.

    Raises:
        ConfigError: names the key, the value, the choices and the likely fix.
    """
    if name in table:
        return table[name]
    raise ConfigError(f"{key}: {not_one_of(name, table)}")


def not_one_of(name: str, names: Collection[str]) -> str:
    """Returns the message that `name` is not one of `names`, with the most similar of them."""
    near = difflib.get_close_matches(name[:200].lower(), names, n=1)
    return f"'{echo(name)}' is not one of {', '.join(names)}{f'; did you mean {near[0]}?' if near else ''}"
