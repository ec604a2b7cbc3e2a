"""Who is decayed, and that the rules are those of their papers."""

import jax
import numpy as np
import pytest
from flax import nnx

from nnxtrain.axes import axes_of
from nnxtrain.optim.groups import is_decayed
from tests.support import random_batch, tiny_program, weights


def update(*words: str):
    """Returns the weights before and after one update."""
    program = tiny_program(*words, "optimizer.learning_rate=0.01", "schedule.name=constant")
    state = program.make_state()
    before = weights(state)
    state, _ = jax.jit(program.train_step)(state, random_batch())
    return before, weights(state)


@pytest.mark.parametrize("layout", ["true", "false"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_matrices_are_decayed_and_norms_are_not(layout, name):
    """Stacked norm scales have two dimensions, and a rule by dimensions decays them (B37)."""
    words = (f"optimizer.name={name}", f"model.scan_layers={layout}", "model.qk_norm=true", "model.tied=true")
    before, without = update(*words, "optimizer.weight_decay=0")
    _, with_decay = update(*words, "optimizer.weight_decay=0.1")
    for path, weight in before.items():
        want = np.zeros_like(weight) if path.endswith("scale") else 0.01 * 0.1 * weight
        np.testing.assert_allclose(without[path] - with_decay[path], want, atol=2e-7, err_msg=path)


@pytest.mark.parametrize(
    ("axes", "decayed"),
    [
        (("embed", "heads", "head_dim"), True),
        (("layer", "mlp", "embed"), True),
        (("vocab", "embed"), True),
        (("embed",), False),
        (("layer", "embed"), False),
        (("stage", "layer", "head_dim"), False),
        (("layer", "heads", "head_dim"), False),
    ],
)
def test_decay_follows_logical_axes(axes, decayed):
    """The last row is the bias of a stacked query projection: three dimensions, and no matrix."""
    assert is_decayed(axes) is decayed


def test_the_table_of_tokens_is_decayed():
    """Documented in `optimizer.weight_decay`."""
    model = tiny_program().make_state().model
    assert is_decayed(axes_of(model.embedding.table))


def test_adamw_is_the_published_rule():
    """The first update by hand, from the gradients that one long step of SGD shows."""
    words = ("optimizer.clip_norm=null", "schedule.name=constant", "optimizer.learning_rate=0.01")
    program = tiny_program(*words, "optimizer.name=sgd", "optimizer.learning_rate=100", "optimizer.weight_decay=0")
    state = program.make_state()
    before = weights(state)
    moved, _ = jax.jit(program.train_step)(state, random_batch())
    grads = {path: (before[path] - after) / 100 for path, after in weights(moved).items()}
    program = tiny_program(*words, "optimizer.eps=1e-4", "optimizer.weight_decay=0.1")
    adam, _ = jax.jit(program.train_step)(program.make_state(), random_batch())
    for path, after in weights(adam).items():
        step = grads[path] / (np.abs(grads[path]) + 1e-4)  # first update: both moments are bias-corrected to g and g²
        decay = 0 if path.endswith("scale") else 0.1 * before[path]
        np.testing.assert_allclose(after, before[path] - 0.01 * (step + decay), atol=3e-5, err_msg=path)


def test_moments_are_float32_for_weights_of_float32():
    """Moments in a smaller type lose the second moment of small gradients."""
    state = tiny_program("model.dtype=bfloat16").make_state()
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(state.optimizer))}
    assert kinds == {"float32", "int32", "uint32"}
