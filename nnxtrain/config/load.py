"""YAML and `key=val` words → the frozen `Config`. All problems are reported at once."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict

from nnxtrain.config.coerce import coerce, name_of
from nnxtrain.config.key import none_of, problem_of, show
from nnxtrain.config.maxtext import MAXTEXT_KEYS
from nnxtrain.config.presets import MESH_PRESETS, PRESETS
from nnxtrain.config.schema import Config, Leaf, leaves, sections
from nnxtrain.config.words import NULLS, Word, words_of_command_line, words_of_file
from nnxtrain.errors import ConfigError

LEAVES = leaves()
SECTIONS = sections()
SHORT_NAMES = {"lr": "optimizer.learning_rate", "wd": "optimizer.weight_decay", "batch_size": "batch.global_size"}
PLACES = ("run_name", "output_dir", "checkpoint.resume", "distributed.")  # say where a run is, not what it is


def load(
    file: str | Path, overrides: Iterable[str] = (), *, extra: Mapping[str, Collection[str]] | None = None
) -> Config:
    """Returns the configuration of `file` with `overrides` on top.

    Weakest first: defaults, preset, file, command line. Sizes left at 0 are derived, `run_name` is filled in.

    Args:
        file: path of a YAML file.
        overrides: words `section.key=value`; a later one wins.
        extra: dotted key → names that it admits beside its choices (entries that come from outside the package).

    Raises:
        ConfigError: lists every problem with its place, the value and what would be right.
    """
    path = Path(file)
    file_words, problems = words_of_file(path)
    line_words, line_problems = words_of_command_line(overrides)
    problems += line_problems
    given: dict[str, Any] = {}
    places: dict[str, str] = {}
    for word in [*file_words, *line_words]:
        if problem := _take(word, given, extra or {}):
            problems.append(f"{word.place}: {problem}")
        places[word.path] = word.place
    merged = _merge(given)
    problems += [f"{places.get(key, path)}: {key}: {what}" for key, what in _problems_alone(merged)]
    if problems:
        raise ConfigError(_report(problems))
    config = _build(merged, run_name=path.stem)
    together = [f"{_place(key, what, places) or path}: {key}: {what}" for key, what in _problems_together(config)]
    if together:
        raise ConfigError(_report(together))
    return replace(config, model=config.model.derived(), optimizer=config.optimizer.derived())


def to_yaml(config: Config) -> str:
    """Returns YAML that `load` reads back into the same configuration."""
    values = _plain(asdict(config))
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be read back as null."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if text.lower() in NULLS else None)


_Dumper.add_representer(str, _text)


def as_mapping(config: Config) -> dict[str, Any]:
    """Returns the value of every key by its dotted path; JSON holds it."""
    values = {path: value_at(config, path) for path in LEAVES}
    return {path: list(value) if isinstance(value, tuple) else value for path, value in values.items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns a line `key: before → after` for each key of two runs' mappings that differs and matters to a run."""
    paths = [path for path in after if not path.startswith(PLACES)]
    return [
        f"{path}: {show(before.get(path))} → {show(after[path])}" for path in paths if before.get(path) != after[path]
    ]


def value_at(config: Config, path: str) -> Any:
    """Returns the value of the dotted key `path`."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _take(word: Word, given: dict[str, Any], extra: Mapping[str, Collection[str]]) -> str | None:
    """Puts the typed value of `word` into `given`, or returns the problem."""
    if word.path in SECTIONS:
        if word.is_null or word.text is None:
            return None
        return f"{word.path} is a section, not a key; write one of its keys, such as {_first_of(word.path)}"
    if word.path not in LEAVES:
        return f"unknown key {word.path}{_nearest(word.path)}"
    leaf = LEAVES[word.path]
    built_in = leaf.declared.metadata["choices"]
    choices = tuple(dict.fromkeys([*built_in, *extra.get(word.path, ())])) if built_in else ()
    try:
        given[word.path] = coerce(word, leaf.type, choices)
    except LookupError:
        return f"{word.path}: {none_of(str(word.text), choices)}"
    except ValueError as error:
        return f"{word.path}: {error}"
    return None


def _nearest(path: str) -> str:
    """Returns a hint: our name for a name of MaxText, the same leaf elsewhere, or a near spelling."""
    if path in MAXTEXT_KEYS:
        return f" (a name of MaxText); here it is {MAXTEXT_KEYS[path]}"
    path = path.replace("-", "_").lower()
    leaf = path.rpartition(".")[2]
    if path in LEAVES:
        near = [path]
    elif leaf in SHORT_NAMES:
        near = [SHORT_NAMES[leaf]]
    else:
        near = [known for known in LEAVES if known.rpartition(".")[2] == leaf]
        near = near or difflib.get_close_matches(path, LEAVES, n=1, cutoff=0.75)
    if not near:
        by_leaf = {known.rpartition(".")[2]: known for known in reversed(LEAVES)}
        near = [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)]
    return f"; did you mean {' or '.join(near[:3])}?" if near else "; --list-keys shows all keys"


def _first_of(section: str) -> str:
    return next(path for path in LEAVES if path.startswith(f"{section}."))


def _merge(given: Mapping[str, Any]) -> ConfigDict:
    defaults: dict[str, Any] = {name: {} for name in SECTIONS}
    for path, leaf in LEAVES.items():
        section, _, name = path.rpartition(".")
        (defaults[section] if section else defaults)[name] = leaf.default
    merged = ConfigDict(defaults, type_safe=False)
    for section, presets in (("model", PRESETS), ("mesh", MESH_PRESETS)):
        preset = presets.get(given.get(f"{section}.preset") or "", {})
        merged.update_from_flattened_dict({f"{section}.{name}": value for name, value in preset.items()})
    merged.update_from_flattened_dict(given)
    return merged


def _problems_alone(merged: ConfigDict) -> Iterable[tuple[str, str]]:
    """Yields what a key's own declaration forbids."""
    for path, leaf in LEAVES.items():
        section, _, name = path.rpartition(".")
        if problem := problem_of(leaf.declared, (merged[section] if section else merged)[name]):
            yield path, problem


def _build(merged: ConfigDict, *, run_name: str) -> Config:
    parts = {name: kind(**merged[name].to_dict()) for name, kind in SECTIONS.items()}
    top = {path: merged[path] for path in LEAVES if "." not in path}
    if top["run_name"] is None:
        top["run_name"] = run_name
    return Config(**top, **parts)


def _problems_together(config: Config) -> Iterable[tuple[str, str]]:
    """Yields what keys forbid each other, inside each section and across them."""
    for name in SECTIONS:
        section = getattr(config, name)
        if hasattr(section, "problems"):
            yield from section.problems()
    yield from config.problems()


def _place(key: str, what: str, places: Mapping[str, str]) -> str | None:
    """Returns where `key` was written, or else a key that the problem speaks of; None where neither was."""
    if key in places:
        return places[key]
    return next((place for path, place in places.items() if re.search(rf"\b{re.escape(path)}\b", what)), None)


def _report(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"{len(problems)} problems in the configuration:", *problems])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


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
        parts.append("(not built yet)")
    return " ".join(parts)
