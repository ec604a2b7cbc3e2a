"""Values of keys as text, with their location: from YAML and `key=val` words, before types are known."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from nnxtrain.config.echo import echo
from nnxtrain.errors import ConfigError

NULLS = ("", "~", "none", "null")
FILLED_IN = "# filled in"  # marks a key of a recorded configuration that was derived, not set
MERGE = "tag:yaml.org,2002:merge"
TEXT = "tag:yaml.org,2002:str"
TAGS = {f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "int", "map", "null", "seq", "str", "timestamp")}
LONGEST_PATH = 300  # characters of a file name in a message


@dataclass(frozen=True)
class Word:
    """A key and its value as text.

    Attributes:
        path: dotted key.
        text: a string, a tuple of strings for a written list, or None for a mapping where a value was expected.
        place: where it was set, for messages.
        quoted: `null` and the like are text.
        problem: what is wrong with its form.
        filled_in: it was derived, not set, when the configuration was recorded.
    """

    path: str
    text: str | tuple[str, ...] | None
    place: str
    quoted: bool = False
    problem: str = ""
    filled_in: bool = False

    @property
    def is_null(self) -> bool:
        """Whether this word sets an optional key to null."""
        return isinstance(self.text, str) and not self.quoted and self.text.lower() in NULLS


def words_of_command_line(pairs: Iterable[str]) -> tuple[list[Word], list[str]]:
    """Returns the words of `key=val` arguments, and the problems of malformed ones."""
    words, problems = [], []
    for pair in pairs:
        path, equals, text = pair.partition("=")
        place = f"command line '{echo(pair)}'"
        if equals and path:
            words.append(Word(path, text, place))
        else:
            problems.append(f"{place}: expected key=value, such as steps=100")
    return words, problems


def words_of_file(path: Path) -> tuple[list[Word], list[str]]:
    """Returns the words of a YAML file, and the problems of its structure.

    Scalars stay text: the type that the schema declares decides what they mean, not YAML's rules.

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    name = echo(path, longest=LONGEST_PATH)
    try:
        text = path.read_text(encoding="utf-8-sig")
        return _words_of(yaml.compose(text, Loader=yaml.SafeLoader), name, text)
    except RecursionError as error:
        raise ConfigError(f"{name}: nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text (byte {error.start})") from error
    except (OSError, UnicodeEncodeError, ValueError) as error:  # an impossible file name is a ValueError
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{name}: cannot be read: {echo(reason.lower())}") from error
    except yaml.YAMLError as error:
        _refuse(name, error)


def _words_of(root: yaml.Node | None, file: str, text: str) -> tuple[list[Word], list[str]]:
    if root is None or (isinstance(root, yaml.ScalarNode) and not root.value):
        return [], []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{file}:{root.start_mark.line + 1}: expected `key: value` lines at the top of the file")
    reader = _Reader(file, text)
    reader.mapping(root, "")
    return reader.words, reader.problems


def _refuse(file: str, error: yaml.YAMLError) -> NoReturn:
    """Raises a ConfigError that says in one line what is not valid YAML, and where."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    hint = next((hint for part, hint in HINTS.items() if part in what), "")
    line = f":{mark.line + 1}" if mark else ""
    raise ConfigError(f"{file}{line}: not valid YAML: {echo(what, longest=LONGEST_PATH)}{hint}") from error


# part of the parser's message → hint
HINTS = {
    "found another document": "; a configuration is one document, without lines of ---",
    "'\\t'": "; YAML indents with spaces, not with tabs",
    "found undefined alias": "; a value that begins with * must be quoted",
    "while scanning an anchor": "; a value that begins with & must be quoted",
}


class _Reader:
    """Walks a composed YAML tree and collects words and problems."""

    def __init__(self, file: str, text: str):
        self.file = file
        self.lines = text.splitlines()
        self.words: list[Word] = []
        self.problems: list[str] = []
        self.seen: dict[str, int] = {}

    def mapping(self, node: yaml.MappingNode, prefix: str) -> None:
        for name_node, value in node.value:
            line = name_node.start_mark.line + 1
            place = f"{self.file}:{line}"
            name = prefix + str(name_node.value)
            if name_node.tag == MERGE:
                self.problems.append(f"{place}: merge keys (<<) are not supported; write the merged keys out")
            elif not isinstance(name_node, yaml.ScalarNode):
                self.problems.append(f"{place}: a key must be a plain name")
            elif name in self.seen:
                self.words.append(Word(name, "", place, problem=f"already set in line {self.seen[name]}"))
            else:
                self.seen[name] = line
                self.value(name, value, place)

    def value(self, name: str, node: yaml.Node, place: str) -> None:
        if problem := _problem_of(node):
            self.words.append(Word(name, "", place, problem=problem))
        elif isinstance(node, yaml.ScalarNode):
            filled_in = self._line(node).rstrip().endswith(FILLED_IN)
            self.words.append(Word(name, node.value, place, quoted=_is_quoted(node), filled_in=filled_in))
        elif isinstance(node, yaml.SequenceNode):
            items = tuple(item.value for item in node.value)
            filled_in = self._line(node).rstrip().endswith(FILLED_IN)
            self.words.append(Word(name, items, place, filled_in=filled_in))
        elif isinstance(node, yaml.MappingNode) and node.value and "." not in name:
            self.mapping(node, f"{name}.")
        else:
            self.words.append(Word(name, None, place))

    def _line(self, node: yaml.Node) -> str:
        number = node.start_mark.line
        return self.lines[number] if number < len(self.lines) else ""


def _is_quoted(node: yaml.ScalarNode) -> bool:
    """Tells whether a scalar is marked as text: by quotes, or by the tag !!str."""
    return node.style is not None or (node.tag == TEXT and node.value.lower() in ("", "~", "null"))


def _problem_of(node: yaml.Node) -> str:
    """Returns what is wrong with the form of a value, or an empty string."""
    if node.tag not in TAGS and not (isinstance(node, yaml.ScalarNode) and node.value in ("<<", "=")):
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        return f"the YAML tag {echo(tag)} is not supported; write the value without it"
    for number, item in enumerate(node.value if isinstance(node, yaml.SequenceNode) else (), 1):
        if not isinstance(item, yaml.ScalarNode):
            return "a list may contain only plain values, not lists or mappings"
        if not _is_quoted(item) and item.value.lower() in NULLS:
            return f"item {number} of the list is null; leave it out, or quote it if it is text"
        if problem := _problem_of(item):
            return problem
    return ""
