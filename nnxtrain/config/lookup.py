"""Name → entry of an open table, with an error that helps."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from nnxtrain.errors import ConfigError

T = TypeVar("T")


def lookup(table: Mapping[str, T], name: str, *, key: str) -> T:
    """Returns `table[name]`; `key` is the config key that held `name`.

    Raises:
        ConfigError: names the key, the value, the choices and the likely fix.
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{key}={name!r} is not one of {sorted(table)}.{hint}")
