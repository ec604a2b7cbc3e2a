"""Named arrays on disk, without a run directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from nnxtrain.checkpoint.failures import different, reported
from nnxtrain.checkpoint.stacking import Leaf, differences, leaf_of


def write_arrays(folder: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Writes named arrays to the new folder `folder`; returns when they are on disk.

    Raises:
        CheckpointError: `folder` cannot be written.
    """
    with reported(f"{folder} cannot be written"), ocp.PyTreeCheckpointer() as writer:
        writer.save(folder.absolute(), dict(arrays))


def read_arrays(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns arrays that `write_arrays` wrote, with the shardings and in the order of `wanted`.

    Raises:
        CheckpointError: names, shapes or types differ, lists each difference; or `folder` cannot be read.
    """
    with reported(f"{folder} cannot be read"), ocp.PyTreeCheckpointer() as reader:
        saved = reader.metadata(folder.absolute()).item_metadata.tree
        if lines := differences(_leaves(saved), _leaves(wanted)):
            raise different(f"{folder} contains another state", lines)
        arguments = ocp.checkpoint_utils.construct_restore_args(dict(wanted))
        arrays = reader.restore(folder.absolute(), item=dict(wanted), restore_args=arguments)
        return {name: arrays[name] for name in wanted}


def _leaves(arrays: Mapping[str, Any]) -> dict[tuple[str, ...], Leaf]:
    return {(name,): leaf_of(leaf) for name, leaf in arrays.items()}
