"""What becomes of a step that is not finite, or a spike, decided in the step itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnxtrain.state import Guard, TrainStateNNX
from nnxtrain.steps.accumulate import ACCUMULATORS
from nnxtrain.steps.guard import DECAY, make_step_guard
from nnxtrain.steps.train_step import make_collect, make_train_step, make_update
from nnxtrain.types import LossParts
from tests.support import assert_trees_equal

GOOD, INFINITE, SLOPE, EMPTY, STEEP = range(5)
RULES = {"skips": False, "spike_deviations": None, "spike_warmup": 2, "limit": 100}


class Line(nnx.Module):
    """One weight vector."""

    def __init__(self):
        self.w = nnx.Param(jnp.array([1.0, -2.0]))


def loss_sum(model: Line, microbatch, key):
    """Returns a loss whose kind stands in `inputs`: good, infinite, of an infinite slope, without a target, steep."""
    kind = microbatch["inputs"][0]
    loss = jnp.sum(model.w[...] ** 2) * jnp.where(kind == STEEP, 50, 1) * jnp.where(kind == INFINITE, jnp.inf, 1)
    gap = model.w[0] - jax.lax.stop_gradient(model.w[0])
    loss = loss + jnp.sqrt(jnp.where(kind == SLOPE, gap, 1)) - 1  # the slope of a root at 0 is infinite
    targets = jnp.where(kind == EMPTY, 0.0, 1.0)
    return loss * targets, LossParts(targets, targets, {"loss": (loss * targets, targets)})


def run(*kinds: int, **rules):
    """Takes a step of each kind; returns the states before the first and after each, and the metrics of each."""
    guard_step = make_step_guard(**(RULES | rules))
    schedule = lambda update: 0.01 * (update + 1.0)  # noqa: E731
    collect = make_collect(loss_sum, ACCUMULATORS["one_pass"], seed=0)
    step = jax.jit(make_train_step(collect, make_update(guard_step, schedule)))
    state = TrainStateNNX(Line(), optax.adam(schedule))
    states, metrics = [state], []
    for kind in kinds:
        batch = {"inputs": jnp.full((1, 1), kind), "segment_ids": jnp.ones((1, 1), jnp.int32)}
        state, values = step(state, batch)
        states.append(state)
        metrics.append(jax.device_get(values))
    return states, metrics


def moving(state: TrainStateNNX):
    """Returns weights, moments and the optimizer's count."""
    return nnx.to_pure_dict(nnx.state((state.model, state.optimizer)))


@pytest.mark.parametrize("kind", [INFINITE, SLOPE])
def test_a_bad_step_leaves_weights_moments_and_count(kind):
    """One bad step fills every weight with NaN (B11)."""
    (_, before, after), metrics = run(GOOD, kind)
    assert_trees_equal(moving(after), moving(before))
    assert int(after.step[...]) == int(before.step[...]) == 1
    assert int(after.guard.bad_step[...]) == 1
    assert metrics[1]["bad"]
    assert metrics[1]["skipped"]


@pytest.mark.parametrize("kind", [INFINITE, SLOPE])
def test_steps_after_a_bad_one_leave_everything_until_the_host_has_acted(kind):
    """The host learns of it one step late; a good step in between would use up rows that nobody counted (B11)."""
    states, metrics = run(GOOD, kind, GOOD, GOOD, INFINITE)
    held = nnx.to_pure_dict(nnx.state(states[2]))
    for state in states[3:]:
        assert_trees_equal(nnx.to_pure_dict(nnx.state(state)), held)
    assert [bool(values["bad"]) for values in metrics] == [False, True, False, False, False]
    assert all(values["skipped"] for values in metrics[1:])


def test_a_released_guard_lets_the_run_go_on():
    """A checkpoint may hold the flag; a run that goes on from it must not stand still."""
    (_, state, _), _ = run(GOOD, GOOD)
    guard = Guard()
    guard.bad_step[...] = jnp.int32(4)
    guard.release()
    assert int(guard.bad_step[...]) == -1
    assert guard.bad_step[...].dtype == state.guard.bad_step[...].dtype


def test_skip_leaves_the_update_out_and_goes_on():
    """The batch counts as consumed, and the optimizer's own count does not, since that drives the learning rate."""
    states, metrics = run(GOOD, INFINITE, SLOPE, GOOD, skips=True)
    assert_trees_equal(moving(states[3]), moving(states[1]))
    assert not np.array_equal(states[4].model.w[...], states[3].model.w[...])
    assert [int(state.step[...]) for state in states] == [0, 1, 2, 3, 4]
    assert [int(state.guard.skipped[...]) for state in states] == [0, 0, 1, 2, 2]
    assert [int(state.guard.in_row[...]) for state in states] == [0, 0, 1, 2, 0]
    assert [int(state.optimizer.step[...]) for state in states] == [0, 1, 1, 1, 2]
    np.testing.assert_allclose([values["learning_rate"] for values in metrics], [0.01, 0.02, 0.02, 0.02], rtol=1e-6)
    assert not any(values["bad"] for values in metrics)


def test_skipping_equals_never_having_seen_the_step():
    """What a skipped step leaves behind anywhere in weights, moments or statistics changes the rest of the run."""
    with_bad, _ = run(GOOD, INFINITE, GOOD, SLOPE, GOOD, skips=True)
    without, _ = run(GOOD, GOOD, GOOD, skips=True)
    assert_trees_equal(moving(with_bad[-1]), moving(without[-1]))
    for name in ("accepted", "loss_mean", "loss_square", "norm_mean", "norm_square"):
        assert getattr(with_bad[-1].guard, name)[...] == getattr(without[-1].guard, name)[...]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_too_many_in_a_row_hold_the_run(limit):
    """A run that skips for ever looks alive and learns nothing (B11)."""
    states, metrics = run(*[GOOD] * 2, *[INFINITE] * limit, GOOD, skips=True, limit=limit)
    assert [bool(values["bad"]) for values in metrics] == [False] * 2 + [False] * (limit - 1) + [True, False]
    assert int(states[-1].step[...]) == 2 + limit - 1
    assert int(states[-1].guard.bad_step[...]) == 2 + limit - 1
    assert_trees_equal(moving(states[-1]), moving(states[2]))


def test_an_accepted_step_ends_the_row():
    """Two bad steps with a good one between them are not two in a row."""
    _, metrics = run(GOOD, INFINITE, GOOD, INFINITE, GOOD, INFINITE, skips=True, limit=2)
    assert not any(values["bad"] for values in metrics)


def test_a_step_without_a_target_moves_nothing_and_is_no_fault():
    """0 / 0 is neither a bad step nor an accepted one."""
    (_, before, after), metrics = run(GOOD, EMPTY)
    assert_trees_equal(moving(after), moving(before))
    assert int(after.step[...]) == 2
    assert not metrics[1]["bad"]
    assert metrics[1]["skipped"]
    assert int(after.guard.accepted[...]) == int(before.guard.accepted[...])


@pytest.mark.parametrize("skips", [True, False])
def test_a_spike_is_left_out_whatever_becomes_of_steps_that_are_not_finite(skips):
    """A spike must not enter its own statistics either, or the next one passes."""
    kinds = (*[GOOD] * 6, STEEP, STEEP, GOOD)
    states, metrics = run(*kinds, skips=skips, spike_deviations=6.0, spike_warmup=4)
    assert [bool(values["skipped"]) for values in metrics] == [False] * 6 + [True, True, False]
    assert not any(values["bad"] for values in metrics)
    assert_trees_equal(moving(states[8]), moving(states[6]))
    assert states[8].guard.loss_mean[...] == states[6].guard.loss_mean[...]
    assert int(states[9].guard.accepted[...]) == 7
    assert int(states[9].step[...]) == 9


def test_spikes_pass_before_the_warm_up_and_when_they_are_not_asked_for():
    """The first losses of a run tell nothing yet."""
    _, early = run(GOOD, GOOD, STEEP, spike_deviations=6.0, spike_warmup=3)
    _, off = run(*[GOOD] * 6, STEEP)
    assert not any(values["skipped"] for values in (*early, *off))


def test_a_falling_loss_is_no_spike():
    """Both sides of the mean would stop a run that learns fast."""
    guard_step = jax.jit(_judged(spike_deviations=2.0, spike_warmup=2))
    guard = Guard()
    for loss in (5.0, 5.1, 4.9, 1.0):
        guard, decision = guard_step(guard, loss, 1.0)
        assert decision.updates


@pytest.mark.parametrize("which", ["loss", "norm"])
def test_loss_and_gradient_norm_can_each_be_the_spike(which):
    """Watching one of the two misses half of them."""
    guard_step = jax.jit(_judged(spike_deviations=3.0, spike_warmup=3))
    guard = Guard()
    for value in (1.0, 1.1, 0.9, 1.0):
        guard, _ = guard_step(guard, value, value)
    _, decision = guard_step(guard, 9.0 if which == "loss" else 1.0, 9.0 if which == "norm" else 1.0)
    assert decision.rejected
    assert not decision.updates
    assert decision.counts


def test_statistics_are_those_of_the_accepted_values():
    """While there are few, all weigh alike; later ones fade by the documented memory."""
    guard_step = jax.jit(_judged())
    draw = np.random.default_rng(0)
    losses, norms = draw.normal(3, 1, 40), draw.normal(1, 0.1, 40)
    guard = Guard()
    for loss, norm in zip(losses, norms, strict=True):
        guard, _ = guard_step(guard, loss, norm)
    assert 1 - DECAY < 1 / 40
    for values, mean, square in (
        (losses, guard.loss_mean, guard.loss_square),
        (norms, guard.norm_mean, guard.norm_square),
    ):
        assert float(mean[...]) == pytest.approx(values.mean(), rel=1e-4)
        assert float(square[...]) == pytest.approx(values.var(), rel=1e-4)
    for _ in range(1000):
        guard, _ = guard_step(guard, 7.0, 2.0)
    assert float(guard.loss_mean[...]) == pytest.approx(7, rel=1e-3)


def _judged(**rules):
    guard_step = make_step_guard(**(RULES | rules))

    def judged(guard: Guard, loss, norm):
        decision = guard_step(guard, jnp.int32(0), jnp.float32(loss), jnp.float32(norm), jnp.array(True))
        return guard, decision

    return judged
