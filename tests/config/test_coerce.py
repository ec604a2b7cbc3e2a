"""The declared type decides what a written value means, wherever it was written."""

import pytest

from nnxtrain.config.checks import LEAVES, value_at
from nnxtrain.config.coerce import coerce, name_of
from nnxtrain.config.words import Word
from tests.config.values import kind_of

LIST = tuple[str, ...]
# a key of each type, optional or not, that any value of the type may have; `coerce` sees the type alone
KEYS = {
    bool: ["model.scan_layers"],
    int: ["seed", "generate.top_k"],
    float: ["optimizer.learning_rate", "optimizer.clip_norm"],
    str: ["output_dir", "run_name", "remat.policy"],
    LIST: ["mesh.rules"],
}
SOURCES = ("yaml", "command line")


def given(source: str, path: str, text: str) -> tuple[str, ...]:
    """Returns the arguments of `loaded` and `refused` that give `path` the value `text`."""
    if source == "command line":
        return "", f"{path}={text}"
    section, _, name = path.rpartition(".")
    return (f"{section}:\n  {name}: {text}\n" if section else f"{name}: {text}\n",)


def read(text, kind):
    """Returns what a word means as a type."""
    return coerce(Word("x", text, "here"), kind, ())


def test_every_key_has_one_of_the_types_that_are_tested_here():
    """The tests below try each type once, not each key: a new type needs cases of its own."""
    assert {kind_of(path) for path in LEAVES} == set(KEYS)
    kinds = {name_of(leaf.type) for leaf in LEAVES.values()}
    assert kinds == {"bool", "int", "float", "str", "list", "int or null", "float or null", "str or null"}
    assert all(kind_of(path) == kind for kind, paths in KEYS.items() for path in paths)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("path", KEYS[float])
def test_an_exponent_without_a_dot_is_a_number(loaded, path, source):
    """YAML 1.1 reads `3e-4` as text (B01)."""
    value = value_at(loaded(*given(source, path, "3e-4")), path)
    assert type(value) is float
    assert value == 3e-4


@pytest.mark.parametrize(
    "text", ["fast", "nan", "inf", "-inf", "1e999", "1e-4x", "0x10", "1,5", "'1e'", "[1]", "१", ""]
)
def test_what_is_no_number_is_refused_with_key_and_value(refused, text):
    """Text in a float key would surface in the optimizer, and nan would train nothing (B01)."""
    for source in SOURCES:
        message = refused(*given(source, KEYS[float][0], text))
        assert KEYS[float][0] in message
        assert text.strip("'") in message
        assert "number" in message or "one value" in message


@pytest.mark.parametrize("text", ["5", "+5", "-5", "5.", ".5", "5.0", "1E3", "1e+3", "1_000.5"])
def test_numbers_are_read_as_python_reads_them(text):
    """Signs, bare dots and capital exponents are all in use."""
    assert read(text, float) == float(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [(text, False) for text in ("False", "false", "FALSE", "0", "no", "off")]
    + [(text, True) for text in ("True", "true", "1", "yes", "on")],
)
def test_every_way_to_say_true_and_false_is_understood(loaded, text, value):
    """A non-empty string that counts as true would switch the feature on; 1 is a bool, not a number (B02)."""
    for source in SOURCES:
        assert loaded(*given(source, KEYS[bool][0], text)).model.scan_layers is value


@pytest.mark.parametrize("text", ["maybe", "2", "''", "None", "falsee", "[false]"])
def test_what_is_neither_true_nor_false_is_refused(refused, text):
    """Guessing would hide a slip of the pen (B02)."""
    for source in SOURCES:
        message = refused(*given(source, KEYS[bool][0], text))
        assert KEYS[bool][0] in message
        assert "expected true or false" in message or "one value" in message


@pytest.mark.parametrize(("text", "value"), [("12", 12), ("1e3", 1000), ("1_000", 1000), ("8.0", 8), ("-1", -1)])
def test_whole_numbers_are_ints(text, value):
    """`steps=1e4` is ten thousand steps; a float would fail in a shape."""
    for kind in (int, int | None):
        got = read(text, kind)
        assert type(got) is int
        assert got == value


@pytest.mark.parametrize(
    "text", ["1.5", "many", "''", "0x10", "1e-1", "nan", "true", "1 2", "1e30", "2e9999", "9" * 5000]
)
@pytest.mark.parametrize("path", KEYS[int])
def test_what_is_no_whole_number_is_refused(refused, path, text):
    """Rounding without a word would change what was asked for; Python itself fails on thousands of digits."""
    for source in SOURCES:
        message = refused(*given(source, path, text))
        assert path in message
        assert "whole number" in message or "below 2^63" in message


@pytest.mark.parametrize("text", ["1e-4", "no", "true", "2024-01-01", "0123", "1.50", "0x1F", "1:30"])
def test_text_stays_as_it_was_written(loaded, text):
    """YAML's guess would turn a run called 2024-01-01 into a date and 0123 into 83."""
    for source in SOURCES:
        for path in ("run_name", "output_dir", "generate.prompt", "checkpoint.init_from"):
            assert value_at(loaded(*given(source, path, text)), path) == text


@pytest.mark.parametrize("text", ["[a,b]", "a,b", "[a, b]", " a , b ", "['a',\"b\"]", "[a,b,]"])
def test_lists_may_be_written_with_or_without_brackets(text):
    """On a command line brackets need quotes in some shells."""
    assert read(text, LIST) == ("a", "b")


@pytest.mark.parametrize(
    "text", ["[c/*.txt, d.txt]", "c/*.txt, d.txt", "\n  - c/*.txt\n  - d.txt", "['c/*.txt', d.txt]"]
)
def test_lists_in_a_file_may_be_flow_block_or_plain(loaded, text):
    """Only one of the four is what the command line takes."""
    assert loaded(f"data:\n  source: text\n  path: {text}\n").data.path == ("c/*.txt", "d.txt")


@pytest.mark.parametrize("text", ["[]", "", "none", "null"])
def test_a_list_is_emptied(text):
    """`data.validation_path=none` on top of a file must not look for a file of that name."""
    assert read(text, LIST) == ()


@pytest.mark.parametrize("text", ["[a, [b]]", "[a, {b: c}]"])
def test_a_list_holds_plain_values(refused, text):
    """A list in a list would become the text of a Python object."""
    assert "run.yml:1: data.path: a list may contain only plain values" in refused(f"data: {{path: {text}}}")


@pytest.mark.parametrize("text", ["[a, null]", "[a, ~]", "[a, NULL, b]", "\n  - a\n  -\n"])
def test_null_in_a_list_is_named(refused, text):
    """A file called null would be looked for."""
    message = refused(f"data:\n  path: {text}\n")
    assert ": data.path: item 2 of the list is null" in message
    if "\n" not in text:
        assert "item 2 of the list is null" in refused("", f"data.path={text}")


def test_a_quoted_null_in_a_list_is_text(loaded):
    """Someone's file may be called none."""
    assert loaded("data: {source: text, path: [a, 'null', \"~\"]}").data.path == ("a", "null", "~")
    assert loaded("", "data.source=text", "data.path=a,'none'").data.path == ("a", "none")


@pytest.mark.parametrize("text", ["null", "none", "None", "NULL", "~", ""])
def test_an_optional_key_is_cleared(text):
    """`none` as text would be a folder or a file of that name."""
    assert read(text, str | None) is read(text, float | None) is None


def test_null_on_the_command_line_clears_what_the_file_gives(loaded):
    """The word must win although it holds nothing."""
    text = "optimizer: {clip_norm: 0.5}\ndata: {epochs: 3, cache_dir: here}\nmodel: {preset: llama2-7b}\n"
    words = ("optimizer.clip_norm=null", "data.epochs=none", "data.cache_dir=", "model.preset=~")
    config = loaded(text, *words)
    assert (config.optimizer.clip_norm, config.data.epochs, config.data.cache_dir) == (None, None, None)
    assert config.model.layers == LEAVES["model.layers"].default


def test_a_quoted_null_is_text(loaded):
    """Someone's folder may be called none; a tag says the same as quotes."""
    assert loaded("data: {cache_dir: 'none'}").data.cache_dir == "none"
    assert loaded("data: {cache_dir: !!str null}").data.cache_dir == "null"
    assert loaded("data: {cache_dir: none}").data.cache_dir is None


@pytest.mark.parametrize("text", ["null", "none", "''"])
@pytest.mark.parametrize("path", ["steps", "model.dropout", "model.tied", "remat.policy"])
def test_a_key_that_is_not_optional_cannot_be_cleared(loaded, refused, path, text):
    """Null for a number would become the default, or zero; for remat, none is a name, however it is written."""
    if path == "remat.policy" and text != "''":
        assert loaded(*given("yaml", path, text)).remat.policy == "none"
    else:
        assert path in refused(*given("yaml", path, text))


def test_text_that_no_file_system_takes_is_refused_for_every_key_of_text(refused, loaded):
    """An empty name, a NUL or half a character is a traceback in the first call that opens a file; prompts are free."""
    for path in (path for path in LEAVES if kind_of(path) in (str, LIST)):
        if LEAVES[path].declared.metadata["choices"] or LEAVES[path].declared.metadata["planned"]:
            continue
        section, _, name = path.rpartition(".")
        for text, says in (('""', "is empty"), ('"a\\0b"', "NUL"), ('"a\\udce9"', "not UTF-8")):
            written = f"[{text}]" if kind_of(path) is LIST or kind_of(path) == LIST else text
            content = f"{section}: {{{name}: {written}}}\n" if section else f"{name}: {written}\n"
            if path == "generate.prompt" and says != "not UTF-8":
                assert loaded(content)
            else:
                message = refused(content)
                assert f"run.yml:1: {path}: " in message
                assert says in message
