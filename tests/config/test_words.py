"""Configuration files and command-line words as they are written."""

import pytest

from nnxtrain.config.load import load
from nnxtrain.errors import ConfigError


@pytest.mark.parametrize("content", ["", "\n\n", "# nothing but a comment\n", "model:\ndata: {}\n"])
def test_an_empty_file_is_all_defaults(loaded, content):
    """Every key has a default, so a file may say nothing."""
    config = loaded(content)
    assert config.steps == 1000
    assert config.run_name == "run"


def test_the_run_is_called_like_its_file(write):
    """Only the last extension goes."""
    assert load(write("", "my run.v2.yml")).run_name == "my run.v2"
    assert load(write("run_name: other", "my run.v2.yml")).run_name == "other"


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfsteps: 7\n",
        b"steps: 7\r\nseed: 1\r\n",
        b"steps: 7",
        b"{steps: 7}",
        b"'steps': \"7\"",
        b"steps: !!int 7",
    ],
)
def test_files_of_every_editor_are_read(loaded, content):
    """A byte order mark, Windows line ends and quotes are no fault of the user."""
    assert loaded(content).steps == 7


def test_dotted_keys_in_a_file_mean_what_they_mean_on_the_command_line(loaded):
    """A line that was copied from a command must work."""
    assert loaded("model.layers: 3\noptimizer.eps: 1e-6\n").model.layers == 3


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("steps: 1\nseed: 2\nsteps: 3\n", "run.yml:3: steps: already set in line 1"),
        ("model: {layers: 2}\nmodel: {embed: 64}\n", "run.yml:2: model: already set in line 1"),
        ("model:\n  layers: 2\n  embed: 64\n  layers: 3\n", "run.yml:4: model.layers: already set in line 2"),
        ("model.layers: 2\nmodel.layers: 2\n", "run.yml:2: model.layers: already set in line 1"),
        ("model.layers: 2\nmodel:\n  layers: 3\n", "run.yml:3: model.layers: already set in line 1"),
        ("model:\n  layers: 3\nmodel.layers: 2\n", "run.yml:3: model.layers: already set in line 2"),
    ],
)
def test_a_key_given_twice_is_refused(refused, content, place):
    """YAML keeps the last one without a word."""
    assert place in refused(content)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("steps: 1\nmodel: {layers: 2\n", "run.yml:3"),
        ("steps: 1\n\tseed: 2\n", "run.yml:2"),
        ("steps: 1\n seed: 2\n", "run.yml:2"),
        ("data:\n  path: *.txt\n", "run.yml:2"),
        ("data:\n  text_field: 'open\n", "run.yml:"),
        ("steps: 1\n---\nsteps: 2\n", "run.yml:2"),
        ("steps: \x07\n", "run.yml"),
        ("steps: \x00\n", "run.yml"),
    ],
)
def test_broken_yaml_is_refused_with_its_line(refused, content, place):
    """The parser's own message runs over many lines and ends in a traceback."""
    message = refused(content)
    assert message.startswith(place)
    assert "not valid YAML" in message
    assert "\n" not in message


@pytest.mark.parametrize("content", ["[" * 1500, "{a: " * 1500, "- " * 1500])
def test_yaml_nested_without_end_is_refused(refused, content):
    """The parser recurses, and Python's limit is a traceback."""
    assert refused(content).startswith("run.yml")


@pytest.mark.parametrize("content", ["- steps: 1\n", "steps\n", "42\n", "[steps, seed]\n"])
def test_a_file_without_keys_is_refused(refused, content):
    """A list or a word at the top holds no key."""
    assert refused(content) == "run.yml:1: expected `key: value` lines at the top of the file"


@pytest.mark.parametrize("content", ["steps: 1\n? [a, b]\n: 2\n", "steps: 1\n? {a: b}\n: 2\n"])
def test_a_key_that_is_no_name_is_refused(refused, content):
    """YAML admits lists as keys."""
    assert refused(content) == "run.yml:2: a key must be a plain name"


@pytest.mark.parametrize(("content", "byte"), [(b"steps: \xe9", 7), (b"\xff\xfes\x00t\x00", 0), (b"a: 1\n# \x80", 7)])
def test_a_file_that_is_not_utf8_is_refused(refused, content, byte):
    """Latin-1 and UTF-16 files come from other machines."""
    assert refused(content) == f"run.yml: not UTF-8 text (byte {byte})"


def test_a_file_that_is_not_there_is_refused(tmp_path):
    """The message names the path as it was written."""
    with pytest.raises(ConfigError, match=r"missing\.yml: cannot be read: no such file or directory"):
        load(tmp_path / "missing.yml")


def test_a_folder_is_no_file(tmp_path):
    """`configs` instead of `configs/tiny.yml` is soon typed."""
    with pytest.raises(ConfigError, match="cannot be read: is a directory"):
        load(tmp_path)


def test_tags_of_yaml_run_nothing(refused, tmp_path):
    """A configuration from a stranger must not execute code."""
    message = refused(f"steps: !!python/object/apply:os.mkdir [{tmp_path}/made]\n")
    assert message.startswith("run.yml:1: steps: the YAML tag !!python/object/apply:os.mkdir is not supported")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "a: &a {layers: 2}\nmodel: {<<: *a}\n",
            "run.yml:2: merge keys (<<) are not supported; write the merged keys out",
        ),
        ("<<: {steps: 3}\n", "run.yml:1: merge keys (<<) are not supported"),
        ("model:\n  layers: 2\n  <<: [{embed: 64}]\n", "run.yml:3: merge keys (<<) are not supported"),
        ("steps: !mine 3\n", "run.yml:1: steps: the YAML tag !mine is not supported"),
        ("steps: !!binary aGk=\n", "run.yml:1: steps: the YAML tag !!binary is not supported"),
        (
            "data: {path: [a, !!python/name:os.system b]}\n",
            "run.yml:1: data.path: the YAML tag !!python/name:os.system",
        ),
        ("model: !!python/dict {layers: 2}\n", "run.yml:1: model: the YAML tag !!python/dict is not supported"),
        ("data: {path: !!set {a, b}}\n", "run.yml:1: data.path: the YAML tag !!set is not supported"),
        ("steps: 1\n---\nsteps: 2\n", "run.yml:2: not valid YAML: but found another document; a configuration is one"),
        (
            "model:\n\tlayers: 2\n",
            "run.yml:2: not valid YAML: found character '\\t' that cannot start any token; YAML ind",
        ),
        ("data:\n  path: *.txt\n", "run.yml:2: not valid YAML:"),
        ("1: 2\n", "run.yml:1: unknown key 1; "),
        ("~: 2\n", "run.yml:1: unknown key ~; "),
        ("true: 2\n", "run.yml:1: unknown key true; "),
        ("? [a]\n: 2\n", "run.yml:1: a key must be a plain name"),
        ("? |\n  a\n  b\n: 2\n", "run.yml:1: unknown key a\\nb\\n; "),
        ("steps: [1, [2]]\n", "run.yml:1: steps: a list may contain only plain values"),
        ("model: {layers: {a: {b: 1}}}\n", "run.yml:1: model.layers: expected a value, got a section"),
    ],
)
def test_what_yaml_can_and_a_configuration_cannot_is_refused_in_one_line(refused, content, says):
    """The parser takes much that has no meaning here; each of it names its line, and not what else it breaks."""
    lines = refused(content).splitlines()
    assert sum(says in line for line in lines) == 1, lines
    assert len(lines) == 1 or "a: &a" in content


def test_anchors_of_values_are_read(loaded):
    """One number in two places is a fair use; only merging mappings is not."""
    config = loaded("model: {layers: &n 3, heads: 4, kv_heads: 4}\neval: {every_steps: *n}\n")
    assert (config.model.layers, config.eval.every_steps) == (3, 3)


def test_an_alias_of_itself_ends(refused):
    """A walk over the tree would never return."""
    assert "run.yml:1: unknown key model.x" in refused("model: &a {x: *a}\n")


@pytest.mark.parametrize("word", ["run_name=caf\udce9", "data.path=\udcff,b", "generate.prompt=\udc80", "\udce9=1"])
def test_bytes_that_are_not_utf8_are_refused(refused, word):
    """A terminal of another encoding sends them, and the first use of the name ended in a traceback (N18)."""
    message = refused("", word)
    assert "\n" not in message
    assert message.isprintable()
    assert "is not UTF-8 text" in message or "unknown key \\udce9" in message


def test_the_name_of_a_file_that_is_not_utf8_is_no_name_of_a_run(write):
    """The run is called like its file unless it is told otherwise."""
    path = write("", "caf\udce9.yml")
    with pytest.raises(ConfigError, match=r"run_name: 'caf\\udce9' is not UTF-8 text; choose another, run_name=NAME"):
        load(path)
    assert load(path, ["run_name=cafe"]).run_name == "cafe"


@pytest.mark.parametrize("word", ["steps", "steps:5", "=5", "", "other.yml"])
def test_a_word_that_is_no_pair_is_refused(refused, word):
    """A second file, or a colon out of habit, would be ignored."""
    assert refused("", word) == f"command line '{word}': expected key=value, such as steps=100"


@pytest.mark.parametrize("text", ["a=b", "=", "x = y", "a,b", "[a]", "'q'", " lead", "-x", "é\n✓"])
def test_a_value_is_all_that_follows_the_first_equals_sign(loaded, text):
    """Prompts hold anything."""
    assert loaded("", f"generate.prompt={text}").generate.prompt == text


def test_the_last_word_wins(loaded):
    """Scripts put the user's words behind their own."""
    config = loaded("steps: 1\nmodel: {layers: 2}\n", "steps=2", "model.layers=3", "steps=4", "model.layers=5")
    assert (config.steps, config.model.layers) == (4, 5)
    assert loaded("steps: 1\n").steps == 1
