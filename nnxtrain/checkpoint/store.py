"""Checkpoints below `checkpoints/`, the one module that knows orbax."""

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from nnxtrain.errors import CheckpointError

MODEL = "model"
META = "meta"


class CheckpointStore:
    """Checkpoints of one run, one folder a step, each whole or not there."""

    def __init__(self, folder: Path):
        logging.getLogger("absl").setLevel(logging.WARNING)  # orbax tells each phase of each save
        self._folder = folder.resolve()
        self._manager = ocp.CheckpointManager(self._folder, options=ocp.CheckpointManagerOptions(create=False))

    def latest(self) -> int | None:
        """Returns the step of the newest checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, model: nnx.Module, meta: dict[str, Any]) -> None:
        """Saves the weights of `model` after `step` steps, and what is known about them.

        Raises:
            CheckpointError: they could not be written; names the step.
        """
        weights = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        items = {MODEL: ocp.args.StandardSave(weights), META: ocp.args.JsonSave(meta)}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._manager.save(step, args=ocp.args.Composite(**items))
            self._manager.wait_until_finished()
        except Exception as error:  # orbax and its storage layer raise many kinds
            raise CheckpointError(f"step {step}: the checkpoint in {self._folder} was not written: {error}") from error

    def restore_weights(self, step: int, model: nnx.Module) -> None:
        """Reads the weights of `step` into `model`, whose own may be abstract.

        Raises:
            CheckpointError: they cannot be read as weights of this model.
        """
        wanted = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), wanted)
        place = self._folder / str(step)
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(**{MODEL: ocp.args.StandardRestore(abstract)})
            )
        except Exception as error:  # as above
            raise CheckpointError(f"{place}: the weights cannot be read: {error}") from error
        nnx.update(model, restored[MODEL])

    def close(self) -> None:
        """Ends orbax's threads."""
        self._manager.close()
