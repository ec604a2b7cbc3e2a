"""Whose fault it is that compiled programs cannot be loaded."""

import jax
import pytest

from nnxtrain.engine import executable
from nnxtrain.engine.executable import Executables, load_executables, serialize_executables
from nnxtrain.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    """Returns a file of one small program."""
    program = jax.jit(lambda x: x + 1).lower(1.0).compile()
    path = tmp_path / "step.aot"
    path.write_bytes(serialize_executables(Executables({"step": program}, "hash"), provenance={"a": "1"}))
    return path


def load(path):
    """Loads the programs of a file for the first device."""
    return load_executables(path, provenance={"a": "1"}, devices=jax.devices()[:1], key="aot.load")


def test_a_device_without_room_is_not_the_fault_of_the_file(file, monkeypatch):
    """Compiling again, as the message for a damaged file says, would not help."""
    assert load(file).hlo_hash == "hash"

    def fails(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(executable, "deserialize_and_load", fails)
    text = "RESOURCE_EXHAUSTED: Failed to allocate 3 GiB"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        load(file)
    text = "INTERNAL: cannot parse the program"
    with pytest.raises(
        ConfigError, match="cannot be loaded here: INTERNAL: cannot parse the program; compile it again"
    ):
        load(file)


@pytest.mark.parametrize("name", ["nothing", ".", "step.aot/more"])
def test_a_path_without_a_file_is_the_fault_of_the_key(file, name):
    """Nothing there, a folder, or a file on the way."""
    with pytest.raises(ConfigError, match="not a file of compiled programs: "):
        load(file.parent / name)


def test_a_disk_that_cannot_be_read_is_not(file, monkeypatch):
    """The file may be whole; the system's own message says what is wrong."""

    def fails(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(type(file), "read_bytes", fails)
    with pytest.raises(OSError, match="Input/output error"):
        load(file)
