"""Written values and where they were written: YAML and `key=val` words, before any type is known."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from nnxtrain.errors import ConfigError

NULLS = ("", "~", "none", "null")


@dataclass(frozen=True)
class Word:
    """A value as written.

    `text` is a string, a tuple of strings for a written list, or None for a mapping where a value was expected.
    """

    path: str
    text: str | tuple[str, ...] | None
    place: str
    quoted: bool = False

    @property
    def is_null(self) -> bool:
        """Whether an optional key is cleared by this word."""
        return isinstance(self.text, str) and not self.quoted and self.text.lower() in NULLS


def words_of_command_line(pairs: Iterable[str]) -> tuple[list[Word], list[str]]:
    """Returns the words of `key=val` arguments, and the problems of arguments that are none."""
    words, problems = [], []
    for pair in pairs:
        path, equals, text = pair.partition("=")
        if equals and path:
            words.append(Word(path, text, f"command line '{pair}'"))
        else:
            problems.append(f"command line '{pair}': expected key=value, such as steps=100")
    return words, problems


def words_of_file(path: Path) -> tuple[list[Word], list[str]]:
    """Returns the words of a YAML file, and the problems of its structure.

    Scalars stay as written: the type that the schema declares decides what they mean, never YAML's guess.

    Raises:
        ConfigError: the file cannot be read or is no YAML.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
        return _words_of(root, path)
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_mark(error)}") from error


def _words_of(root: yaml.Node | None, path: Path) -> tuple[list[Word], list[str]]:
    if root is None or (isinstance(root, yaml.ScalarNode) and not root.value):
        return [], []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:{root.start_mark.line + 1}: expected `key: value` lines at the top of the file")
    reader = _Reader(str(path))
    reader.mapping(root, "")
    return reader.words, reader.problems


def _mark(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f":{mark.line + 1}: not valid YAML: {what}" if mark else f": not valid YAML: {what}"


class _Reader:
    """Walks a composed YAML tree and collects words and problems."""

    def __init__(self, file: str):
        self.file = file
        self.words: list[Word] = []
        self.problems: list[str] = []
        self.seen: dict[str, int] = {}

    def mapping(self, node: yaml.MappingNode, prefix: str) -> None:
        for name_node, value in node.value:
            line = name_node.start_mark.line + 1
            name = prefix + str(name_node.value)
            if not isinstance(name_node, yaml.ScalarNode):
                self.problems.append(f"{self.file}:{line}: a key must be a plain name")
            elif name in self.seen:
                self.problems.append(f"{self.file}:{line}: {name}: already given in line {self.seen[name]}")
            else:
                self.seen[name] = line
                self.value(name, value, f"{self.file}:{line}")

    def value(self, name: str, node: yaml.Node, place: str) -> None:
        if isinstance(node, yaml.ScalarNode):
            self.words.append(Word(name, node.value, place, quoted=node.style is not None))
        elif isinstance(node, yaml.SequenceNode):
            items = tuple(item.value for item in node.value if isinstance(item, yaml.ScalarNode))
            if len(items) < len(node.value):
                self.problems.append(f"{place}: {name}: a list holds plain values, no lists or mappings")
            else:
                self.words.append(Word(name, items, place))
        elif isinstance(node, yaml.MappingNode) and node.value and "." not in name:
            self.mapping(node, f"{name}.")
        else:
            self.words.append(Word(name, None, place))
