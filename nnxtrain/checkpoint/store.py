"""Checkpoints below `checkpoints/`: the one module, with `retention.py`, that knows orbax.

A checkpoint is a folder named by its step, with the items `model`, `optimizer` (moments and the number of updates),
`guard` (step count and non-finite guard), `data` (position) and `meta` (configuration, versions, shapes). Orbax writes
each under a temporary name and renames it, so a folder with the name of a step is whole.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from nnxtrain.checkpoint.failures import different, duplicates_silenced, reported
from nnxtrain.checkpoint.retention import goodness, preservation
from nnxtrain.checkpoint.stacking import (
    Leaf,
    cut_leaf,
    differences,
    in_layout_of,
    join_leaves,
    leaf_of,
    placed,
    targets,
)
from nnxtrain.checkpoint.tree import TreePath, flat, flattened, nested, put
from nnxtrain.config.checkpoint import CheckpointConfig
from nnxtrain.errors import CheckpointError
from nnxtrain.host.files import write_json
from nnxtrain.state import TrainStateNNX

logger = logging.getLogger(__name__)
FORMAT = 1
ARRAYS = ("model", "optimizer", "guard")
NOTES = ("data", "meta")


class Saved(NamedTuple):
    """What is known of a checkpoint before its arrays are read."""

    step: int
    data: dict[str, Any]
    meta: dict[str, Any]

    def leaves(self, item: str) -> dict[TreePath, Leaf]:
        """Returns shapes and types of the arrays of an item, by path."""
        return {
            tuple(path.split("/")): Leaf(tuple(shape), kind) for path, (shape, kind) in self.meta["index"][item].items()
        }


class CheckpointStore:
    """Checkpoints of one run, each whole or not there."""

    def __init__(self, folder: Path, config: CheckpointConfig, *, read_only: bool = True):
        """Opens a folder, which need not exist.

        Args:
            folder: of all checkpoints.
            config: what is kept, and how it is written.
            read_only: only the run that owns the folder may write; leftovers of saves that a crash cut short, which
                could be the live save of another process, are removed when it is opened for writing.
        """
        self._silenced = contextlib.ExitStack()
        self._silenced.enter_context(duplicates_silenced())
        self.folder = folder.resolve()
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=config.ocdbt, use_zarr3=config.zarr3)
        self._handlers = dict.fromkeys(ARRAYS, handler) | dict.fromkeys(NOTES, ocp.JsonCheckpointHandler())
        self._options = ocp.CheckpointManagerOptions(
            create=False,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=config.background,
            preservation_policy=preservation(config),
            best_fn=goodness,  # without it orbax keeps metrics in memory alone
        )
        self._saving: int | None = None
        self._open()

    def steps(self) -> list[int]:
        """Returns the steps of all whole checkpoints, rising."""
        return sorted(self._manager.all_steps())

    def newest(self) -> int:
        """Returns the step of the newest whole checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        if not (steps := self.steps()):
            raise CheckpointError(f"{self.folder} holds no checkpoint yet")
        return steps[-1]

    def save(
        self, step: int, state: TrainStateNNX, *, data: Mapping[str, Any], meta: Mapping[str, Any], loss: float | None
    ) -> None:
        """Saves the state after `step` steps; with a background writer, returns when its arrays were copied.

        Args:
            step: names the folder.
            state: to save.
            data: position of the data.
            meta: what else is known.
            loss: of the evaluation that `checkpoint.keep_best` names, if there was one at this step.

        Raises:
            CheckpointError: this save, or the one before it, failed; names the step.
        """
        self.wait()
        self._saving = step
        trees = {name: flat(state, name) for name in ARRAYS}
        index = {name: {"/".join(path): leaf_of(leaf) for path, leaf in tree.items()} for name, tree in trees.items()}
        items: dict[str, Any] = {name: ocp.args.PyTreeSave(nested(tree)) for name, tree in trees.items()}
        items["data"] = ocp.args.JsonSave(dict(data))
        items["meta"] = ocp.args.JsonSave({"format": FORMAT, "step": step, "index": index, **meta})
        with self._told("was not written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            metrics = None if loss is None else {"loss": loss}
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def add_loss(self, step: int, loss: float) -> None:
        """Adds the loss of a later evaluation to the checkpoint of `step`, unless it has one.

        Raises:
            CheckpointError: the save of that step failed, or the loss cannot be written.
        """
        self.wait()
        if self._manager.metrics(step) is not None:
            return
        ocp.multihost.sync_global_processes("nnxtrain: every process has seen that there is no loss")
        if ocp.multihost.is_primary_host(0):
            self._saving = step
            with self._told("did not get its loss"):
                write_json(self.folder / str(step) / "metrics" / "metrics", {"loss": loss})  # where orbax looks for it
        self._reopen()

    def wait(self) -> None:
        """Returns when no save is under way; raises CheckpointError if it failed."""
        with self._told("was not written"):
            self._manager.wait_until_finished()

    def check(self) -> None:
        """Raises CheckpointError if a save in the background has failed so far."""
        with self._told("was not written"):
            self._manager.check_for_errors()

    def read(self, step: int) -> Saved:
        """Returns what is known of the checkpoint of `step`.

        Raises:
            CheckpointError: it is not there, is of another format, or cannot be read.
        """
        if step not in self.steps():
            raise CheckpointError(
                f"{self.folder} holds no checkpoint of step {step}; there are {self.steps() or 'none'}"
            )
        self._saving = step
        with self._told("cannot be read"):
            found = self._manager.restore(
                step, args=ocp.args.Composite(**{name: ocp.args.JsonRestore() for name in NOTES})
            )
            saved = Saved(step, found["data"], found["meta"])
            if missing := {"format", "index", "config", "tokenizer"} - set(saved.meta):
                raise ValueError(f"its meta lacks {', '.join(sorted(missing))}")
            if saved.meta.get("step") != step or saved.data.keys() < {"row", "skipped"} or saved.data["row"] < 0:
                raise ValueError(f"it says that it is of step {saved.meta.get('step')}, at data {saved.data}")
        if saved.meta["format"] != FORMAT:
            raise CheckpointError(
                f"{self.folder}/{step} is of format {saved.meta['format']}; this version reads {FORMAT}"
            )
        return saved

    def restore(
        self,
        saved: Saved,
        state: TrainStateNNX,
        *,
        items: tuple[str, ...] = ARRAYS,
        wants: Callable[[str], bool] = lambda path: True,
    ) -> None:
        """Puts the arrays of a checkpoint into `state`, whose own may be abstract.

        Layers that were saved in the other layout are converted. Names, shapes and types are compared before anything
        is read; nothing is initialised or cast.

        Args:
            saved: the checkpoint.
            state: gets the arrays; each lies where the one that it replaces does, or is said to.
            items: what is restored.
            wants: tells by its path, joined with `/`, whether an array is restored.

        Raises:
            CheckpointError: the trees differ, or arrays cannot be read; lists what differs by path.
        """
        self._saving = saved.step
        for name in items:
            self.compare(saved, state, name, wants=wants)
            leaves, whole = saved.leaves(name), {path: placed(leaf) for path, leaf in flat(state, name).items()}
            with self._told("cannot be read"):
                tree = self._read_arrays(name, nested(targets(leaves, whole)))
            arrays = in_layout_of(whole, tree, take=lambda leaf, at: leaf[at], join=jnp.stack)
            wanted = {path: leaf for path, leaf in arrays.items() if wants("/".join(path))}
            put(state, name, {path: jax.device_put(leaf, whole[path].sharding) for path, leaf in wanted.items()})

    def compare(
        self, saved: Saved, state: TrainStateNNX, name: str, *, wants: Callable[[str], bool] = lambda path: True
    ) -> None:
        """Raises DifferentTreeError if the arrays of an item that `state` wants are not those of a checkpoint."""
        whole = {path: leaf_of(leaf) for path, leaf in flat(state, name).items()}
        there = in_layout_of(whole, saved.leaves(name), take=cut_leaf, join=join_leaves)
        asked = ({path: leaf for path, leaf in tree.items() if wants("/".join(path))} for tree in (there, whole))
        if lines := differences(*asked):
            raise different(f"{self.folder}/{saved.step}: {name} is not that of this configuration", lines)

    def set_aside(self, beyond: int) -> list[int]:
        """Moves checkpoints of later steps than `beyond` to `checkpoints.dropped/`; returns their steps."""
        later = [step for step in self.steps() if step > beyond]
        for step in later if ocp.multihost.is_primary_host(0) else ():
            target = self.folder.with_name("checkpoints.dropped") / str(step)
            number = 0
            while target.exists():
                number += 1
                target = target.with_name(f"{step}.{number}")
            target.parent.mkdir(exist_ok=True)
            (self.folder / str(step)).rename(target)
        if later:
            self._reopen()
        return later

    def is_preempted(self, step: int) -> bool:
        """Tells whether the platform gave notice, agreed on by all processes, that the machine is about to be taken."""
        return self._manager.reached_preemption(step)

    def close(self) -> None:
        """Ends orbax's threads; a save that fails here was waited for before, by whoever wanted to know."""
        try:
            self._manager.close()
        except Exception as error:  # as in `_told`
            logger.warning("closing %s: %s", self.folder, error)
        finally:
            self._silenced.close()

    def _reopen(self) -> None:
        """Reads the folder anew, in all processes, after process 0 has changed it."""
        ocp.multihost.sync_global_processes("nnxtrain: the folder of the checkpoints has changed")
        self._manager.close()
        self._open()

    def _open(self) -> None:
        self._manager = ocp.CheckpointManager(self.folder, options=self._options, item_handlers=self._handlers)

    def _read_arrays(self, name: str, abstract: Mapping[str, Any]) -> dict[TreePath, jax.Array]:
        arguments = ocp.checkpoint_utils.construct_restore_args(abstract)
        wanted = ocp.args.PyTreeRestore(item=abstract, restore_args=arguments)
        return flattened(self._manager.restore(self._saving, args=ocp.args.Composite(**{name: wanted}))[name])

    def _told(self, what: str) -> contextlib.AbstractContextManager[None]:
        return reported(f"step {self._saving}: the checkpoint in {self.folder} {what}")
