"""Compiler options; serialized programs and the provenance that they are checked against."""

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

# config keys, and prefixes of keys, that the programs of a step depend on
SECTIONS = ("seed", "steps", "model.", "batch.", "loss.", "optimizer.", "schedule.", "mesh.", "remat.", "engine.")
COMPILED_FROM = (*SECTIONS, "debug.on_nonfinite", "debug.nonfinite_limit", "debug.spike_", "aot.compiler_options")

# errors of the runtime, not of the file
RUNTIME_ERRORS = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")


def check_options(options: Mapping[str, str | bool], devices: Iterable[jax.Device], *, key: str) -> None:
    """Checks `options` by compiling a trivial program with them.

    Args:
        options: compiler options by name.
        devices: to compile for, at least one of them of this process.
        key: config key of the options, for the message.

    Raises:
        ConfigError: the compiler does not know an option, or does not accept its value.
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
    """Compiled programs by name, and the hash of their lowered forms."""

    programs: Mapping[str, jax.stages.Compiled]
    hlo_hash: str


def serialize_executables(found: Executables, *, provenance: Mapping[str, str]) -> bytes:
    """Returns programs as bytes.

    Args:
        found: the programs.
        provenance: name → value of everything that they were compiled from.
    """
    programs = {name: serialize(one) for name, one in found.programs.items()}
    return pickle.dumps({"format": FORMAT, "marks": dict(provenance), "hlo_hash": found.hlo_hash, "programs": programs})


def load_executables(file: Path, *, provenance: Mapping[str, str], devices: list[jax.Device], key: str) -> Executables:
    """Returns the programs that `serialize_executables` wrote to a file. It is a pickle: load only files you trust.

    Args:
        file: to read.
        provenance: that the programs must have.
        devices: to run on.
        key: config key that names the file, for the message.

    Raises:
        ConfigError: the file contains no programs, or their provenance differs; names the first difference.
    """
    what = f"{key}={file}"
    try:
        raw = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(f"{what}: not a file of compiled programs: {error.strerror}") from error
    try:
        found = pickle.loads(raw)
        form, saved, programs = found["format"], found["marks"], found["programs"]
    except Exception as error:  # unpickling damaged or foreign bytes can raise anything
        raise ConfigError(f"{what}: not a file of compiled programs: {_line(error)}") from error
    if form != FORMAT:
        raise ConfigError(f"{what} has format {form}; this version reads format {FORMAT}")
    for name in [*provenance, *(saved.keys() - provenance.keys())]:
        before, now = saved.get(name), provenance.get(name)
        if before != now:
            raise ConfigError(f"{what} was compiled with {name}={before}, which is {now} now; compile it again")
    try:
        loaded = {name: _loaded(one, devices) for name, one in programs.items()}
        return Executables(loaded, found["hlo_hash"])
    except Exception as error:  # damaged programs can raise anything, too
        if _line(error).startswith(RUNTIME_ERRORS):
            raise
        raise ConfigError(f"{what} cannot be loaded here: {_line(error)}; compile it again") from error


def _loaded(one: tuple[bytes, Any, Any], devices: list[jax.Device]) -> jax.stages.Compiled:
    payload, in_tree, out_tree = one
    return deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
