"""The declared type decides what a written value means, wherever it was written."""

import types
import typing

import pytest

from nnxtrain.config.checks import LEAVES, value_at
from nnxtrain.config.coerce import coerce, name_of
from nnxtrain.config.words import Word

SOURCES = ("yaml", "command line")


def kind_of(path: str):
    """Returns the type of a key without its `| None`."""
    kind = LEAVES[path].type
    if isinstance(kind, types.UnionType):
        kind = next(member for member in typing.get_args(kind) if member is not type(None))
    return kind


def keys_of(kind) -> list[str]:
    return [path for path in LEAVES if kind_of(path) == kind]


def is_open(path: str) -> bool:
    """Whether the key takes any text and is read by something that exists."""
    rule = LEAVES[path].declared.metadata
    return not rule["choices"] and not rule["planned"]


FLOATS, INTS, BOOLS = keys_of(float), keys_of(int), keys_of(bool)
TEXTS = [path for path in keys_of(str) if is_open(path)]
LISTS = keys_of(tuple[str, ...])
OPTIONAL = [path for path, leaf in LEAVES.items() if isinstance(leaf.type, types.UnionType)]


def given(source: str, path: str, text: str) -> tuple[str, ...]:
    """Returns the arguments of `loaded` and `refused` that give `path` the value `text`."""
    if source == "command line":
        return "", f"{path}={text}"
    section, _, name = path.rpartition(".")
    return (f"{section}:\n  {name}: {text}\n" if section else f"{name}: {text}\n",)


def exponent_within(path: str) -> str:
    """Returns a number with exponent and without dot that the range of `path` holds."""
    low = float(LEAVES[path].declared.metadata["span"][1:-1].split(",")[0])
    return "3e-4" if low <= 3e-4 else "3e4"


def test_every_type_has_keys_here():
    """A generated test over an empty list would pass."""
    assert len(FLOATS) > 10
    assert len(INTS) > 20
    assert len(BOOLS) > 5
    assert len(TEXTS) > 3
    assert len(LISTS) > 2
    assert len(OPTIONAL) > 5
    others = {path for path in keys_of(str) if not is_open(path)}
    assert {*FLOATS, *INTS, *BOOLS, *TEXTS, *LISTS, *others} == set(LEAVES)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("path", FLOATS)
def test_an_exponent_without_a_dot_is_a_number(loaded, path, source):
    """YAML 1.1 reads `3e-4` as text (B01)."""
    text = exponent_within(path)
    value = value_at(loaded(*given(source, path, text)), path)
    assert type(value) is float
    assert value == float(text)


@pytest.mark.parametrize("text", ["fast", "nan", "inf", "-inf", "1e999", "1e-4x", "0x10", "1,5", "'1e'", "[1]"])
@pytest.mark.parametrize("path", FLOATS)
def test_what_is_no_number_is_refused_with_key_and_value(refused, path, text):
    """Text in a float key would surface in the optimizer, and nan would train nothing (B01)."""
    for source in SOURCES:
        message = refused(*given(source, path, text))
        assert path in message
        assert text.strip("'") in message
        assert "number" in message or "one value" in message


@pytest.mark.parametrize("text", ["5", "+5", "-5", "5.", ".5", "5.0", "1E3", "1e+3", "1_000.5"])
def test_numbers_are_read_as_python_reads_them(text):
    """Signs, no_wrap dots and capital exponents are all in use."""
    assert coerce(Word("x", text, "here"), float, ()) == float(text)


@pytest.mark.parametrize("text", ["False", "false", "FALSE", "0", "no", "off"])
@pytest.mark.parametrize("path", BOOLS)
def test_every_way_to_say_false_is_false(loaded, refused, path, text):
    """A non-empty string that counts as true would switch the feature on (B02)."""
    for source in SOURCES:
        words = given(source, path, text)
        if LEAVES[path].declared.metadata["planned"] and LEAVES[path].default:
            assert f"{path}: false is not built yet" in refused(*words)
        else:
            assert value_at(loaded(*words), path) is False


@pytest.mark.parametrize("text", ["True", "true", "1", "yes", "on"])
@pytest.mark.parametrize("path", BOOLS)
def test_every_way_to_say_true_is_true(loaded, refused, path, text):
    """The twin of false: 1 must be a bool, not a number (B02)."""
    for source in SOURCES:
        words = given(source, path, text)
        if LEAVES[path].declared.metadata["planned"] and not LEAVES[path].default:
            assert f"{path}: true is not built yet" in refused(*words)
        else:
            assert value_at(loaded(*words), path) is True


@pytest.mark.parametrize("text", ["maybe", "2", "''", "None", "falsee", "[false]"])
@pytest.mark.parametrize("path", BOOLS)
def test_what_is_neither_true_nor_false_is_refused(refused, path, text):
    """Guessing would hide a slip of the pen (B02)."""
    for source in SOURCES:
        message = refused(*given(source, path, text))
        assert path in message
        assert "expected true or false" in message or "one value" in message


@pytest.mark.parametrize(("text", "value"), [("12", 12), ("1e3", 1000), ("1_000", 1000), ("8.0", 8), ("-1", -1)])
@pytest.mark.parametrize("path", INTS)
def test_whole_numbers_are_ints(path, text, value):
    """`steps=1e4` is ten thousand steps; a float would fail in a shape."""
    got = coerce(Word(path, text, "here"), LEAVES[path].type, ())
    assert type(got) is int
    assert got == value


@pytest.mark.parametrize("text", ["1.5", "many", "''", "0x10", "1e-1", "nan", "true", "1 2", "1e30", "2e9999"])
@pytest.mark.parametrize("path", INTS)
def test_what_is_no_whole_number_is_refused(refused, path, text):
    """Rounding without a word would change what was asked for."""
    for source in SOURCES:
        message = refused(*given(source, path, text))
        assert path in message
        assert "whole number" in message or "below 2^63" in message


UNLIKE_TEXT = ["1e-4", "no", "true", "2024-01-01", "0123", "1.50", "0x1F", "1:30"]


@pytest.mark.parametrize("text", UNLIKE_TEXT)
@pytest.mark.parametrize("path", ["run_name", "output_dir", "data.text_field", "data.cache_dir", "generate.prompt"])
def test_text_stays_as_it_was_written(loaded, path, text):
    """YAML's guess would turn a run called 2024-01-01 into a date and 0123 into 83."""
    for source in SOURCES:
        assert value_at(loaded(*given(source, path, text)), path) == text


@pytest.mark.parametrize("text", UNLIKE_TEXT)
@pytest.mark.parametrize("path", TEXTS)
def test_every_key_of_text_takes_text_as_it_is(path, text):
    """A key that guesses on its own would differ from its neighbours."""
    assert coerce(Word(path, text, "here"), LEAVES[path].type, ()) == text


@pytest.mark.parametrize("text", ["[a,b]", "a,b", "[a, b]", " a , b ", "['a',\"b\"]", "[a,b,]"])
@pytest.mark.parametrize("path", LISTS)
def test_lists_may_be_written_with_or_without_brackets(path, text):
    """On a command line brackets need quotes in some shells."""
    assert coerce(Word(path, text, "here"), LEAVES[path].type, ()) == ("a", "b")


@pytest.mark.parametrize(
    "text", ["[c/*.txt, d.txt]", "c/*.txt, d.txt", "\n  - c/*.txt\n  - d.txt", "['c/*.txt', d.txt]"]
)
def test_lists_in_a_file_may_be_flow_block_or_plain(loaded, text):
    """Only one of the four is what the command line takes."""
    assert loaded(f"data:\n  source: text\n  path: {text}\n").data.path == ("c/*.txt", "d.txt")


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize("text", ["[]", "", "none", "null"])
def test_a_list_is_emptied(path, text):
    """`data.validation_path=none` on top of a file must not look for a file of that name."""
    assert coerce(Word(path, text, "here"), LEAVES[path].type, ()) == ()


def test_a_list_holds_plain_values(refused):
    """A list in a list would become the text of a Python object."""
    assert "run.yml:1: data.path: a list holds plain values" in refused("data: {path: [a, [b]]}")


@pytest.mark.parametrize("text", ["null", "none", "None", "NULL", "~", ""])
@pytest.mark.parametrize("path", OPTIONAL)
def test_an_optional_key_is_cleared(path, text):
    """`none` as text would be a folder or a file of that name."""
    assert coerce(Word(path, text, "here"), LEAVES[path].type, ()) is None


def test_null_on_the_command_line_clears_what_the_file_gives(loaded):
    """The word must win although it holds nothing."""
    text = "optimizer: {clip_norm: 0.5}\ndata: {epochs: 3, cache_dir: here}\nmodel: {preset: llama2-7b}\n"
    words = ("optimizer.clip_norm=null", "data.epochs=none", "data.cache_dir=", "model.preset=~")
    config = loaded(text, *words)
    assert (config.optimizer.clip_norm, config.data.epochs, config.data.cache_dir) == (None, None, None)
    assert config.model.layers == LEAVES["model.layers"].default


def test_a_quoted_null_is_text(loaded):
    """Someone's folder may be called none."""
    assert loaded("data: {cache_dir: 'none'}").data.cache_dir == "none"
    assert loaded("data: {cache_dir: none}").data.cache_dir is None


@pytest.mark.parametrize("text", ["null", "none", "''"])
@pytest.mark.parametrize("path", ["steps", "model.dropout", "model.tied", "remat.policy"])
def test_a_key_that_is_not_optional_cannot_be_cleared(loaded, refused, path, text):
    """Null for a number would become the default, or zero; for remat, none is a name, however it is written."""
    if path == "remat.policy" and text != "''":
        assert loaded(*given("yaml", path, text)).remat.policy == "none"
    else:
        assert path in refused(*given("yaml", path, text))


def test_types_read_like_words():
    """`--list-keys` would print `typing.Optional[...]`."""
    kinds = {name_of(leaf.type) for leaf in LEAVES.values()}
    assert kinds == {"bool", "int", "float", "str", "list", "int or null", "float or null", "str or null"}
