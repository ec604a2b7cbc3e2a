"""Weights on disk."""

import jax
import numpy as np
import pytest
from flax import nnx

from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.errors import CheckpointError
from tests.support import assert_trees_equal, tiny_program, weights


def test_weights_come_back_with_the_same_bytes(tmp_path):
    """Orbax casts and reshapes where it is let."""
    program = tiny_program("model.param_dtype=bfloat16")
    state = program.make_state()
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    store.save(7, state.model, {"step": 7})
    assert store.latest() == 7
    other = nnx.eval_shape(program.make_state)
    store.restore_weights(7, other.model)
    assert_trees_equal(weights(other), weights(state))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(other.model, nnx.Param))} >= {np.dtype("bfloat16")}
    store.close()


def test_weights_of_another_model_are_refused(tmp_path):
    """A partial load would train the rest from noise (B14)."""
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, tiny_program().make_state().model, {})
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.restore_weights(1, nnx.eval_shape(tiny_program("model.layers=6").make_state).model)
    store.close()


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_step(tmp_path):
    """A swallowed error would end the run as if its weights were safe (B25)."""
    (tmp_path / "checkpoints").write_text("in the way")
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="step 3"):
        store.save(3, tiny_program().make_state().model, {})
