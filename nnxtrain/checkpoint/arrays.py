"""Named arrays on disk, for who keeps no run directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from nnxtrain.checkpoint.failures import different, reported
from nnxtrain.checkpoint.stacking import Leaf, differences, leaf_of


def write_arrays(folder: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Writes named arrays below `folder`, which is made new; returns when they are on disk.

    Raises:
        CheckpointError: that was not possible.
    """
    with reported(f"{folder} cannot be written"), ocp.PyTreeCheckpointer() as writer:
        writer.save(folder.absolute(), dict(arrays))


def read_arrays(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns arrays that `write_arrays` wrote, each where `wanted` says, in its order.

    Raises:
        CheckpointError: there are others than those, lists what differs by name; or they cannot be read.
    """
    with reported(f"{folder} cannot be read"), ocp.PyTreeCheckpointer() as reader:
        there = reader.metadata(folder.absolute()).item_metadata.tree
        if lines := differences(_leaves(there), _leaves(wanted)):
            raise different(f"{folder} is of another state", lines)
        arguments = ocp.checkpoint_utils.construct_restore_args(dict(wanted))
        arrays = reader.restore(folder.absolute(), item=dict(wanted), restore_args=arguments)
        return {name: arrays[name] for name in wanted}


def _leaves(arrays: Mapping[str, Any]) -> dict[tuple[str, ...], Leaf]:
    return {(name,): leaf_of(leaf) for name, leaf in arrays.items()}
