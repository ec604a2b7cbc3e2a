"""One update is one update, however the batch is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxtrain.nn.dropout import KeepAll
from tests.support import (
    UNEVEN,
    assert_trees_close,
    assert_trees_equal,
    initial_state,
    random_batch,
    tiny_program,
    weights,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")

SGD = ("optimizer.name=sgd", "optimizer.learning_rate=0.5", "schedule.name=constant", "optimizer.weight_decay=0")


@functools.cache
def one_update(*words: str, targets: tuple[int, ...] = UNEVEN, accum_steps: int = 1):
    """Returns weights and metrics after one update on one batch."""
    program = tiny_program(*words, f"batch.accum_steps={accum_steps}")
    state, metrics = jax.jit(program.train_step)(
        initial_state(program), random_batch(accum_steps=accum_steps, targets=targets)
    )
    return weights(state), jax.device_get(metrics)


@pytest.mark.parametrize("accum_steps", [2, 8])
def test_update_does_not_depend_on_accum_steps(accum_steps):
    """Masks are uneven, so a mean of microbatch means fails here (B05)."""
    want, want_metrics = one_update(*SGD, "optimizer.clip_norm=null")
    got, metrics = one_update(*SGD, "optimizer.clip_norm=null", accum_steps=accum_steps)
    assert_trees_close(metrics, want_metrics, rtol=1e-6)
    assert_trees_close(got, want, rtol=1e-5)
    assert metrics["targets"] == sum(UNEVEN) == 100


def test_loss_is_the_sum_of_token_losses_over_the_targets():
    """Computes each token's loss apart, so a denominator of rows or positions fails here (B05)."""
    program = tiny_program()
    model = initial_state(program).model
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch())
    scores = np.asarray(model.logits(model.hidden(batch, KeepAll())[0]), np.float64)
    tokens = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, batch["targets"][..., None], -1)[..., 0]
    _, metrics = one_update(*SGD)
    assert metrics["loss"] == pytest.approx(tokens[batch["mask"]].sum() / 100, rel=1e-6)


def test_clipping_acts_once_on_the_whole_gradient():
    """Clipping each microbatch changes direction and size of the update (B09)."""
    words = (*SGD, "optimizer.clip_norm=0.05")
    want, want_metrics = one_update(*words)
    got, metrics = one_update(*words, accum_steps=4)
    assert_trees_close(got, want, rtol=1e-5)
    assert metrics["grad_norm"] == pytest.approx(want_metrics["grad_norm"], rel=1e-5)
    assert metrics["grad_norm"] > 0.05  # the norm before clipping is what is logged
    start = weights(initial_state(tiny_program(*words)))
    moved = np.sqrt(sum(np.sum((got[path] - start[path]) ** 2) for path in got))
    assert moved == pytest.approx(0.5 * 0.05, rel=1e-4)


@pytest.mark.parametrize("off", ["0", "null"])
def test_clip_norm_of_zero_or_null_is_off(off):
    """A clip at norm 0 would be an update of zero (B09)."""
    got, _ = one_update(*SGD, f"optimizer.clip_norm={off}")
    want, _ = one_update(*SGD, "optimizer.clip_norm=1e9")
    assert_trees_close(got, want, rtol=1e-6)


def test_an_empty_microbatch_changes_nothing():
    """A microbatch without targets must not divide by zero or weigh."""
    targets = (5, 9, 0, 0)
    words = (*SGD, "batch.global_size=4")
    want, want_metrics = one_update(*words, targets=targets)
    got, metrics = one_update(*words, accum_steps=2, targets=targets)
    assert metrics["targets"] == 14
    assert_trees_close(metrics, want_metrics, rtol=1e-6)
    assert_trees_close(got, want, rtol=1e-5)


def test_a_step_without_targets_moves_nothing_and_is_counted():
    """Weight decay alone would move the weights."""
    program = tiny_program("optimizer.weight_decay=0.5")
    state = initial_state(program)
    before = weights(state)
    state, metrics = jax.jit(program.train_step)(state, random_batch(targets=(0,) * 8))
    assert_trees_equal(weights(state), before)
    assert metrics["skipped"]
    assert not metrics["bad"]
    assert int(state.step[...]) == 1
    assert int(state.optimizer.step[...]) == 0


def test_a_step_that_is_not_finite_leaves_weights_and_moments():
    """NaN would reach every weight through the norm of the gradient."""
    program = tiny_program("optimizer.weight_decay=0.5")
    state = initial_state(program)
    state.model.norm.scale[...] = state.model.norm.scale[...].at[0].set(jnp.inf)
    before = weights(state)
    state, metrics = jax.jit(program.train_step)(state, random_batch())
    assert metrics["bad"]
    assert_trees_equal(weights(state), before)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.optimizer))


def test_dropout_draws_another_mask_each_step_and_row():
    """One key for all rows or all steps would repeat masks."""
    program = tiny_program("model.dropout=0.5", "optimizer.learning_rate=0", "optimizer.weight_decay=0")
    state = initial_state(program)
    step = jax.jit(program.train_step)
    batch = random_batch(targets=(32,) * 8)
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    moved = {**batch, "rows": batch["rows"] + 8}
    state, metrics = step(initial_state(program), moved)
    assert len({*losses, float(metrics["loss"])}) == 3


def test_chunked_loss_equals_the_whole():
    """Loss and gradients must not see where the sequence was cut."""
    want, want_metrics = one_update(*SGD, "loss.z_loss=1e-3")
    got, metrics = one_update(*SGD, "loss.z_loss=1e-3", "loss.chunks=4")
    assert_trees_close(metrics, want_metrics, rtol=1e-6)
    assert_trees_close(got, want, rtol=1e-5)


def test_z_loss_is_logged_apart_and_scales_with_its_weight():
    """A z-loss inside the logged loss makes perplexity wrong."""
    _, without = one_update(*SGD)
    _, small = one_update(*SGD, "loss.z_loss=1e-3")
    _, large = one_update(*SGD, "loss.z_loss=2e-3")
    assert small["loss"] == pytest.approx(float(without["loss"]), rel=1e-6)
    assert large["z_loss"] == pytest.approx(2 * float(small["z_loss"]), rel=1e-5)
    assert large["grad_norm"] != small["grad_norm"]
