"""Compiler options, and compiled programs as bytes with what they were compiled from."""

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxtrain.errors import ConfigError

FORMAT = 2

# keys of the configuration, and beginnings of keys, that the programs of a step depend on
SECTIONS = ("seed", "steps", "model.", "batch.", "loss.", "optimizer.", "schedule.", "mesh.", "remat.", "engine.")
COMPILED_FROM = (*SECTIONS, "debug.on_nonfinite", "debug.nonfinite_limit", "debug.spike_", "aot.compiler_options")


FOREIGN = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")  # not a file's fault


def check_options(options: Mapping[str, str | bool], devices: Iterable[jax.Device], *, key: str) -> None:
    """Compiles a trivial program with `options`; returns if the compiler of `devices` knows all of them.

    Args:
        options: of the compiler, by name.
        devices: that programs are compiled for, some of them of this process.
        key: of the configuration that holds the options.

    Raises:
        ConfigError: the compiler does not know an option, or the option does not take the value.
    """
    own = next(device for device in devices if device.process_index == jax.process_index())
    where = NamedSharding(Mesh([own], "device"), PartitionSpec())
    trivial = jax.jit(jnp.negative).lower(jax.ShapeDtypeStruct((), jnp.float32, sharding=where))
    try:
        trivial.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if not _line(error).startswith("INVALID_ARGUMENT"):
            raise
        given = ",".join(f"{name}={value}" for name, value in options.items())
        raise ConfigError(f"{key}={given}: {_line(error)}") from error


class Executables(NamedTuple):
    """Programs by name, ready to run, and the hash of all of them as they were lowered."""

    programs: Mapping[str, jax.stages.Compiled]
    hlo_hash: str


def serialize_executables(found: Executables, *, marks: Mapping[str, str]) -> bytes:
    """Returns programs as bytes.

    Args:
        found: the programs.
        marks: what they were compiled from, by name.
    """
    programs = {name: serialize(one) for name, one in found.programs.items()}
    return pickle.dumps({"format": FORMAT, "marks": dict(marks), "hlo_hash": found.hlo_hash, "programs": programs})


def load_executables(file: Path, *, marks: Mapping[str, str], devices: list[jax.Device], key: str) -> Executables:
    """Returns the programs of a file that `serialize_executables` made. It is a pickle: load only your own.

    Args:
        file: of the programs.
        marks: of the programs that are wanted.
        devices: to run on.
        key: of the configuration that names the file.

    Raises:
        ConfigError: there are no programs, or they were compiled from something else; names what differs first.
    """
    what = f"{key}={file}"
    try:
        raw = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(f"{what}: no compiled programs are there: {error.strerror}") from error
    try:
        found = pickle.loads(raw)
        form, saved, programs = found["format"], found["marks"], found["programs"]
    except Exception as error:  # a damaged pickle, or what is no pickle, raises anything
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
    except Exception as error:  # so do damaged programs
        if _line(error).startswith(FOREIGN):
            raise
        raise ConfigError(f"{what} cannot be loaded here: {_line(error)}; compile it again") from error


def _loaded(one: tuple[bytes, Any, Any], devices: list[jax.Device]) -> jax.stages.Compiled:
    payload, in_tree, out_tree = one
    return deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
