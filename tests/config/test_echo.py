"""Foreign text in messages is escaped and cut, whichever way it came."""

import pytest

from nnxtrain.config.checks import LEAVES
from nnxtrain.config.echo import LONGEST_LINE, echo, visible
from nnxtrain.config.load import load
from nnxtrain.errors import ConfigError

ODD = {
    "escape": "a\x1b[31mred\x1b]0;title\x07",
    "lines": "a\nerror: b\r\nc",
    "endless": "x" * 5000,
    "bytes": "a\udce9b",
    "direction": "a\u202eb\u2028c",
    "delete": "a\x7f\x85\x00b",
}


def clean(message: str) -> bool:
    """Tells whether a message is lines of printable text, none of them endless."""
    return all(line.isprintable() and len(line) < LONGEST_LINE + 50 for line in message.split("\n"))


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_text_is_escaped_and_cut_once_for_all(text):
    """The one function that messages use."""
    assert clean(echo(text))
    assert "\n" not in echo(text)
    assert clean(visible(f"first\n  {text}"))
    assert visible("é 日 😀\n  two") == "é 日 😀\n  two"
    assert echo("x" * 5000).endswith("... (5,000 characters)")


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_text_is_echoed_safely_wherever_it_was_written(write, text):
    """A terminal obeys control characters, a log loses its lines, and half a character is a traceback."""
    quoted = '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
    words = [text, f"={text}", f"{text}=1", f"model.{text}=1", f"optimizer.name={text}", f"steps={text}"]
    words += [f"{path}={text},{text}=1" for path in ("mesh.rules", "remat.tags", "optimizer.groups", "model.pattern")]
    words += [f"profile.advanced={text}", f"profile.processes={text}", f"aot.topology={text}", f"aot.sweep={text}"]
    words += [f"checkpoint.resume={text}", f"distributed.coordinator={text}", f"run_name=/{text}", f"model={text}"]
    words += [f"model.scan_layers={text}", f"optimizer.eps={text}", f"aot.compiler_options={text}"]
    for word in words:
        with pytest.raises(ConfigError) as caught:
            load(write(""), ["remat.policy=custom", word])
        assert clean(str(caught.value)), word
    for content in (f"{quoted}: 1", f"model: {{{quoted}: 1}}", f"steps: {quoted}", f"steps: [{quoted}]", f"- {quoted}"):
        with pytest.raises(ConfigError) as caught:
            load(write(content))
        assert clean(str(caught.value)), content


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_names_of_files_are_echoed_safely(tmp_path, text):
    """The name of a file is foreign text as well."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / f"{text}.yml")
    assert clean(str(caught.value))
    if len(text) < 100 and "\0" not in text:
        (tmp_path / f"{text}.yml").write_text("steps: x\n")
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / f"{text}.yml")
        assert clean(str(caught.value))


def test_a_name_that_no_table_has_is_echoed_safely(write):
    """Each key with choices builds its message from what was written."""
    for path in [path for path in LEAVES if LEAVES[path].declared.metadata["choices"]]:
        for text in ODD.values():
            with pytest.raises(ConfigError) as caught:
                load(write(""), [f"{path}={text}"])
            assert clean(str(caught.value))
