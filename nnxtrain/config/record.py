"""Writes configurations to YAML, reads recorded ones, lists keys and compares."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from nnxtrain.config.checks import LEAVES, SECTIONS, value_at
from nnxtrain.config.coerce import name_of
from nnxtrain.config.load import DERIVABLE, typed
from nnxtrain.config.reads import show
from nnxtrain.config.schema import Config, Leaf
from nnxtrain.config.words import FILLED_IN, NULLS, words_of_file
from nnxtrain.errors import ConfigError

PLACES = ("run_name", "output_dir", "checkpoint.resume", "distributed.")  # where a run is, not what it computes


def to_yaml(config: Config) -> str:
    """Returns YAML that `load` reads back into the same configuration.

    Values derived from a preset or another key are marked, so that they are derived again when those change.
    """
    values = {name: _plain(value) for name, value in asdict(config).items() if name in SECTIONS or name in LEAVES}
    text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)
    marked, section = [], ""
    for line in text.removesuffix("\n").split("\n"):
        name = line.strip().partition(":")[0]
        section = section if line.startswith(" ") else name
        is_filled_in = line.startswith("  ") and f"{section}.{name}" in DERIVABLE - config.given
        marked.append(f"{line}  {FILLED_IN}" if is_filled_in else line)
    return "\n".join([*marked, ""])


class _Dumper(yaml.SafeDumper):
    """Quotes text that would otherwise be read back as null."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if text.lower() in NULLS else None)


_Dumper.add_representer(str, _text)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def recorded(file: Path) -> dict[str, Any]:
    """Returns the keys of a run's recorded configuration by dotted path, as `as_mapping` gives them.

    It may be of another version: keys that this one lacks are left out, new ones have their default; a file that
    cannot be read gives no keys.
    """
    try:
        words, _ = words_of_file(file)
    except ConfigError:
        return {}
    if not words:
        return {}
    found = {path: leaf.default for path, leaf in LEAVES.items()}
    for word in words:
        if word.path in LEAVES:
            try:
                found[word.path] = typed(word, {word.path: (str(word.text),)})
            except ValueError:
                found[word.path] = word.text
    return {path: _plain(value) for path, value in found.items()}


def as_mapping(config: Config) -> dict[str, Any]:
    """Returns the value of every key by its dotted path, as JSON types."""
    return {path: _plain(value_at(config, path)) for path in LEAVES}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns a line `key: before → after` for each key that differs, except those that say where a run is."""
    paths = [path for path in after if not path.startswith(PLACES)]
    return [
        f"{path}: {show(before.get(path))} → {show(after[path])}" for path in paths if before.get(path) != after[path]
    ]


def list_keys(prefix: str) -> list[tuple[str, str, str, str]]:
    """Returns (key, type, default, doc) of every key that starts with `prefix`."""
    return [
        (path, name_of(leaf.type), show(leaf.default), _doc(leaf))
        for path, leaf in LEAVES.items()
        if path.startswith(prefix)
    ]


def _doc(leaf: Leaf) -> str:
    rule = leaf.declared.metadata
    parts = [rule["doc"]]
    if rule["choices"]:
        parts.append(f"({', '.join(rule['choices'])})")
    if rule["span"]:
        parts.append(f"in {rule['span']}")
    if rule["planned"]:
        parts.append("(not implemented yet)")
    return " ".join(parts)
