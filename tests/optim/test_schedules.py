"""Learning rates equal the documented closed form at every update."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxtrain.config.schedule import ScheduleConfig
from nnxtrain.optim.schedules import SCHEDULES, make_schedule
from tests.support import random_batch, tiny_program

CURVES = {"constant": lambda t: 1.0, "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2, "linear": lambda t: 1 - t}


def closed_form(update: int, name: str, *, warmup: int, decay: int, final: float) -> float:
    """Returns the share of the peak by the formulas of the module's docstring."""
    if update < warmup:
        return (update + 1) / (warmup + 1)
    beyond = update - warmup
    t = min(beyond / decay, 1) if decay else float(beyond > 0)
    return final + (1 - final) * CURVES[name](t)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("warmup", [0, 1, 3, 9, 10, 12])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_every_rate_is_the_closed_form(name, warmup, final):
    """Zero-length phases divide by zero, and first or last rates are off by one (B40)."""
    schedule = make_schedule(ScheduleConfig(name=name, warmup_steps=warmup, final_fraction=final), peak=2.0, steps=10)
    got = [float(schedule(jnp.array(update))) for update in range(10)]
    decay = max(10 - 1 - warmup, 0)
    want = [2 * closed_form(update, name, warmup=warmup, decay=decay, final=final) for update in range(10)]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert got[0] > 0
    if name != "constant" and final < 1 and warmup < 10:
        assert got.count(2.0) == 1
        assert got[warmup] == 2.0
    if name != "constant" and warmup < 9:
        assert got[-1] == pytest.approx(2 * final, abs=1e-6)


@pytest.mark.parametrize("decay", [0, 4, 100])
def test_decay_steps_end_the_decay_where_they_say(decay):
    """A decay shorter than the run stays at its end; a longer one is cut."""
    config = ScheduleConfig(name="linear", warmup_steps=2, decay_steps=decay, final_fraction=0.5)
    schedule = make_schedule(config, peak=1.0, steps=10)
    got = [float(schedule(jnp.array(update))) for update in range(10)]
    want = [closed_form(update, "linear", warmup=2, decay=decay, final=0.5) for update in range(10)]
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("accum_steps", [1, 4])
def test_the_schedule_counts_updates(accum_steps):
    """A schedule that advances by microbatches falls too fast; a skipped step does not advance it."""
    words = ("steps=10", "schedule.warmup_steps=3", "optimizer.learning_rate=1", f"batch.accum_steps={accum_steps}")
    program = tiny_program(*words)
    step, state = jax.jit(program.train_step), program.make_state()
    rates = []
    for update in range(5):
        targets = (0,) * 8 if update == 2 else (32,) * 8
        state, metrics = step(state, random_batch(targets=targets, accum_steps=accum_steps))
        rates.append(float(metrics["learning_rate"]))
    assert rates == pytest.approx([1 / 4, 2 / 4, 3 / 4, 3 / 4, 1.0])
