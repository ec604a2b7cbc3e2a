"""Compiled programs as bytes, with what they were compiled from: they run nowhere else."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from nnxtrain.errors import ConfigError

FORMAT = 2

# keys of the configuration, and beginnings of keys, that the programs of a step depend on
SECTIONS = ("seed", "steps", "model.", "batch.", "loss.", "optimizer.", "schedule.", "mesh.", "remat.", "engine.")
COMPILED_FROM = (*SECTIONS, "debug.on_nonfinite", "debug.nonfinite_limit", "debug.spike_", "aot.compiler_options")


class Executables(NamedTuple):
    """Programs by name, ready to run, and the hash of all of them as they were lowered."""

    programs: Mapping[str, jax.stages.Compiled]
    hlo_hash: str


def serialize_executables(found: Executables, *, marks: Mapping[str, str]) -> bytes:
    """Returns programs as bytes.

    Args:
        found: the programs.
        marks: name → value of all that they were compiled from.
    """
    programs = {name: serialize(one) for name, one in found.programs.items()}
    return pickle.dumps({"format": FORMAT, "marks": dict(marks), "hlo_hash": found.hlo_hash, "programs": programs})


def load_executables(file: Path, *, marks: Mapping[str, str], devices: list[jax.Device], key: str) -> Executables:
    """Returns the programs of a file that `serialize_executables` made. It is a pickle: load only your own.

    Args:
        file: of the programs.
        marks: of those that are wanted.
        devices: to run on.
        key: of the configuration that named the file.

    Raises:
        ConfigError: there are no programs, or those of something else; names the first thing that differs.
    """
    what = f"{key}={file}"
    try:
        found = pickle.loads(file.read_bytes())
        form, saved, programs = found["format"], found["marks"], found["programs"]
    except Exception as error:  # a pickle that is torn, or none, raises anything
        raise ConfigError(f"{what}: no compiled programs are there: {_line(error)}") from error
    if form != FORMAT:
        raise ConfigError(f"{what} is of format {form}; this version reads {FORMAT}")
    for name in [*marks, *(saved.keys() - marks.keys())]:
        if saved.get(name) != marks.get(name):
            there, here = saved.get(name), marks.get(name)
            raise ConfigError(f"{what} was compiled with {name}={there}, and here it is {here}; compile it again")
    try:
        loaded = {name: _loaded(one, devices) for name, one in programs.items()}
        return Executables(loaded, found["hlo_hash"])
    except Exception as error:  # so does one whose programs are torn
        raise ConfigError(f"{what} cannot be loaded here: {_line(error)}; compile it again") from error


def _loaded(one: tuple[bytes, Any, Any], devices: list[jax.Device]) -> jax.stages.Compiled:
    payload, in_tree, out_tree = one
    return deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
