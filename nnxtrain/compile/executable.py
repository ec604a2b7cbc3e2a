"""Compiled programs in a file, with what they were compiled from: they run nowhere else."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from nnxtrain.errors import ConfigError

FORMAT = 1


class Executables(NamedTuple):
    """Programs as they lie in a file: name → what jax makes of one, and the hash of all as they were lowered."""

    programs: Mapping[str, tuple[bytes, Any, Any]]
    hlo_hash: str

    def load(self, devices: list[jax.Device]) -> dict[str, jax.stages.Compiled]:
        """Returns them ready to run on `devices`."""
        return {
            name: deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)
            for name, (payload, in_tree, out_tree) in self.programs.items()
        }


def write_executables(
    file: Path, compiled: Mapping[str, jax.stages.Compiled], *, hlo_hash: str, marks: Mapping[str, str]
) -> None:
    """Writes programs to `file`, whole or not at all.

    Args:
        file: to write; what was there is replaced.
        compiled: programs by name.
        hlo_hash: of all of them as they were lowered.
        marks: name → value of all that they were compiled from.
    """
    found = Executables({name: serialize(one) for name, one in compiled.items()}, hlo_hash)
    whole = {"format": FORMAT, "marks": dict(marks), **found._asdict()}
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(pickle.dumps(whole))
    part.replace(file)


def read_executables(file: Path, *, marks: Mapping[str, str], key: str) -> Executables:
    """Returns the programs that a file holds. It is a pickle: load only what you wrote.

    Args:
        file: that `write_executables` wrote.
        marks: of the program that is wanted.
        key: of the configuration that named the file.

    Raises:
        ConfigError: the file holds no programs, or those of something else; names the first thing that differs.
    """
    try:
        whole = pickle.loads(file.read_bytes())
        saved, programs, form, hashed = (whole[name] for name in ("marks", "programs", "format", "hlo_hash"))
    except (OSError, pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"{key}={file}: no compiled programs are there: {error}") from error
    if form != FORMAT:
        raise ConfigError(f"{key}={file} is of format {form}; this version reads {FORMAT}")
    for name in [*marks, *(saved.keys() - marks.keys())]:
        if saved.get(name) != marks.get(name):
            there, here = saved.get(name), marks.get(name)
            raise ConfigError(f"{key}={file} was compiled with {name}={there}, and here it is {here}; compile it again")
    return Executables(programs, hashed)
