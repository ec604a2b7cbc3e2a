"""Loads YAML and `key=val` words into the frozen `Config`. All problems are reported at once."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from nnxtrain.config.checks import LEAVES, SECTIONS, combined_problems, unread, value_at, without
from nnxtrain.config.coerce import coerce
from nnxtrain.config.echo import echo, has_surrogates
from nnxtrain.config.key import problem_of
from nnxtrain.config.lookup import not_one_of
from nnxtrain.config.maxtext import MAXTEXT_KEYS
from nnxtrain.config.presets import MESH_PRESETS, PRESETS
from nnxtrain.config.schema import Config
from nnxtrain.config.words import Word, words_of_command_line, words_of_file
from nnxtrain.errors import ConfigError

SHORT_NAMES = {"lr": "optimizer.learning_rate", "wd": "optimizer.weight_decay", "batch_size": "batch.global_size"}
LONGEST_KEY = 100  # characters of an unknown key that are compared with the known ones
PRESETS_OF = {"model": PRESETS, "mesh": MESH_PRESETS}
# derived from a preset or another key unless set: a recorded configuration shows them, and they are derived again
DERIVABLE = {
    *(f"{section}.{name}" for section, presets in PRESETS_OF.items() for preset in presets.values() for name in preset),
    *("model.kv_heads", "model.head_dim", "model.mlp", "optimizer.b2", "optimizer.momentum"),
}
FREE_TEXT = ("generate.prompt",)  # may be empty, or contain NUL


def load(
    file: str | Path,
    overrides: Iterable[str] = (),
    *,
    extra: Mapping[str, Collection[str]] | None = None,
    say: Callable[[str], None] | None = None,
) -> Config:
    """Returns the configuration of `file` with `overrides` on top.

    Precedence, lowest first: defaults, preset, file, command line. Sizes of 0 are derived, `run_name` is filled in.
    A key that is set and has no effect is refused.

    Args:
        file: path of a YAML file.
        overrides: words `section.key=value`; later ones take precedence.
        extra: dotted key → further valid names (entries from outside the package).
        say: called with a line for each key that is ignored instead of refused: a key of the file that has no effect
            only because of `overrides`, and any key that is `only_noted`.

    Raises:
        ConfigError: lists every problem with its location, the value and how to fix it.
    """
    path = Path(file)
    file_words, file_problems = words_of_file(path)
    line_words, line_problems = words_of_command_line(overrides)
    file_words = _without_filled_in(file_words, extra or {})
    draft = _Draft.of([*file_words, *line_words], extra or {})
    config = draft.config(run_name=path.stem)
    sound = without(config, draft.broken)
    together = dict.fromkeys(combined_problems(sound))
    found = [f"{_place(key, what, draft.places) or echo(path)}: {key}: {what}" for key, what in together]
    blamed = {key for key, _ in together} | draft.broken
    idle = {key: f"{draft.places[key]}: {key}: {what}" for key, what in _unread(draft, sound) if key not in blamed}
    left_out = {key for key in idle if LEAVES[key].declared.metadata["read"].is_only_noted}
    if idle and say is not None:
        alone = _Draft.of(file_words, extra or {})
        of_file = dict(_unread(alone, without(alone.config(), alone.broken)))
        left_out |= idle.keys() - of_file.keys() - {word.path for word in line_words}
    found += [line for key, line in idle.items() if key not in left_out]
    if problems := [*file_problems, *line_problems, *draft.problems, *found]:
        raise ConfigError(_report(problems))
    if say is not None:
        for key in sorted(left_out):
            say(idle[key])
    return derived(draft.without(left_out).config(run_name=path.stem))


@dataclass
class _Draft:
    """Words that are being turned into a configuration.

    Attributes:
        given: typed value of each key that is set validly.
        places: where each key was set last.
        problems: of single keys.
        broken: keys with an invalid value, or that a misspelt key may mean: their value is unknown.
    """

    given: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    @staticmethod
    def of(words: Iterable[Word], extra: Mapping[str, Collection[str]]) -> "_Draft":
        """Returns the draft of `words`; later ones take precedence; `extra` is that of `load`."""
        draft = _Draft()
        for word in words:
            if problem := draft.take(word, extra):
                draft.problems.append(f"{word.place}: {problem}")
                draft.places.setdefault(word.path, word.place)
            else:
                draft.places[word.path] = word.place
        merged = _merge(draft.given)
        for path, leaf in LEAVES.items():
            if what := problem_of(leaf.declared, _value_in(merged, path)):
                draft.problems.append(f"{draft.places.get(path, 'a preset')}: {path}: {what}")
                draft.broken.add(path)
        return draft

    def take(self, word: Word, extra: Mapping[str, Collection[str]]) -> str | None:
        """Adds the typed value of a word to `given`, or returns the problem."""
        if word.path in SECTIONS:
            return self._section(word)
        if word.path not in LEAVES:
            near, what = _nearest(word.path)
            self.broken.update(near)
            return f"unknown key {echo(word.path)}{what}"
        try:
            self.given[word.path] = typed(word, extra)
        except ValueError as error:
            self.broken.add(word.path)
            return f"{word.path}: {error}"
        self.broken.discard(word.path)
        return None

    def _section(self, word: Word) -> str | None:
        keys = [path for path in LEAVES if path.startswith(f"{word.path}.")]
        if not word.problem and (word.is_null or word.text is None):
            return None
        self.broken.update(keys)
        if word.problem:
            return f"{word.path}: {word.problem}"
        return f"{word.path} is a section, not a key; set one of its keys, such as {keys[0]}"

    def config(self, *, run_name: str = "run") -> Config:
        """Returns the configuration, whatever its problems."""
        merged = _merge(self.given)
        parts = {name: kind(**merged[name].to_dict()) for name, kind in SECTIONS.items()}
        top = {path: merged[path] for path in LEAVES if "." not in path}
        if top["run_name"] is None:
            top["run_name"] = run_name
        return Config(**top, **parts, given=frozenset(self.given))

    def without(self, keys: Collection[str]) -> "_Draft":
        """Returns a draft in which `keys` are not set."""
        return replace(self, given={path: value for path, value in self.given.items() if path not in keys})


def typed(word: Word, extra: Mapping[str, Collection[str]]) -> Any:
    """Returns the value of a word as the type of its key; `extra` is that of `load`.

    Raises:
        ValueError: it has no valid value; says what is wrong and how to fix it.
    """
    leaf = LEAVES[word.path]
    built_in = leaf.declared.metadata["choices"]
    choices = tuple(dict.fromkeys([*built_in, *extra.get(word.path, ())])) if built_in else ()
    if word.problem:
        raise ValueError(word.problem)
    try:
        value = coerce(word, leaf.type, choices)
    except LookupError as error:
        raise ValueError(not_one_of(str(word.text), choices)) from error
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and (problem := _problem_of_text(text, is_free=word.path in FREE_TEXT)):
            raise ValueError(problem)
    return value


def _problem_of_text(text: str, *, is_free: bool) -> str | None:
    if has_surrogates(text):
        return f"'{echo(text)}' is not UTF-8 text"
    if not text and not is_free:
        return "'' is empty; leave the key out, or write null if it is optional"
    if "\0" in text and not is_free:
        return f"'{echo(text)}' contains a NUL byte"
    return None


def _without_filled_in(words: list[Word], extra: Mapping[str, Collection[str]]) -> list[Word]:
    """Drops the derived values of a recorded configuration, so that they are derived again.

    A value that differs from the derived one was edited by hand, and counts.
    """
    own = [word for word in words if not (word.filled_in and word.path in DERIVABLE)]
    if len(own) == len(words):
        return words
    config = derived(_Draft.of(own, extra).config())

    def is_derived(word: Word) -> bool:
        try:
            return word not in own and typed(word, extra) == value_at(config, word.path)
        except ValueError:
            return False

    return [word for word in words if not is_derived(word)]


def derived(config: Config) -> Config:
    """Returns `config` with derived values filled in."""
    return replace(config, model=config.model.derived(), optimizer=config.optimizer.derived())


def _unread(draft: _Draft, sound: Config) -> Iterator[tuple[str, str]]:
    """Yields each key that is set and never read, and why; `sound` is the draft's configuration."""
    for path, value in draft.given.items():
        leaf = LEAVES[path]
        if leaf.declared.metadata["read"] is not None and path not in draft.broken and value != leaf.default:
            unset = value_at(derived(draft.without((path,)).config()), path)
            if value != unset and (what := unread(sound, path)):
                yield path, what


def _merge(given: Mapping[str, Any]) -> ConfigDict:
    defaults: dict[str, Any] = {name: {} for name in SECTIONS}
    for path, leaf in LEAVES.items():
        section, _, name = path.rpartition(".")
        (defaults[section] if section else defaults)[name] = leaf.default
    merged = ConfigDict(defaults, type_safe=False)
    for section, presets in PRESETS_OF.items():
        preset = presets.get(given.get(f"{section}.preset") or "", {})
        merged.update_from_flattened_dict({f"{section}.{name}": value for name, value in preset.items()})
    merged.update_from_flattened_dict(given)
    return merged


def _value_in(merged: ConfigDict, path: str) -> Any:
    section, _, name = path.rpartition(".")
    return (merged[section] if section else merged)[name]


def _place(key: str, what: str, places: Mapping[str, str]) -> str | None:
    """Returns where `key` was set, or else a key that the problem mentions; None if neither was set."""
    if key in places:
        return places[key]
    return next((place for path, place in places.items() if re.search(rf"\b{re.escape(path)}\b", what)), None)


def _report(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"{len(problems)} problems in the configuration:", *problems])


def _nearest(path: str) -> tuple[list[str], str]:
    """Returns the keys that an unknown one may mean, and a hint: our name for MaxText's, or a similar spelling."""
    if path in MAXTEXT_KEYS:
        return [MAXTEXT_KEYS[path].split()[0]], f" (MaxText's name); here it is {MAXTEXT_KEYS[path]}"
    path = path[:LONGEST_KEY].replace("-", "_").lower()
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
    return near, f"; did you mean {' or '.join(near[:3])}?" if near else "; --list-keys shows all keys"
