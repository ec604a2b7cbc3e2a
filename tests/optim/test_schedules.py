"""Learning rates equal the documented closed form at every update."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxtrain.config.schedule import ScheduleConfig
from nnxtrain.optim.schedules import SCHEDULES, make_schedule
from tests.support import initial_state, random_batch, tiny_program

pytestmark = pytest.mark.usefixtures("quick_compiles")

NAMES = sorted(SCHEDULES)
FALLING = [name for name in NAMES if name != "constant"]


def closed_form(update: int, name: str, *, steps: int, warmup: int, decay: int, final: float) -> float:
    """Returns the share of the peak by the formulas of the module's docstring, in Python's own floats."""
    if update < warmup:
        return (update + 1) / (warmup + 1)
    start, length = warmup, decay
    if name == "wsd":
        start = max(warmup, steps - 1 - decay)
        length = steps - 1 - start
    t = min(max((update - start) / length, 0), 1) if length > 0 else float(update > start)
    return {
        "constant": 1.0,
        "cosine": final + (1 - final) * (1 + math.cos(math.pi * t)) / 2,
        "linear": final + (1 - final) * (1 - t),
        "wsd": final + (1 - final) * (1 - t),
        "inverse_sqrt": max(final, math.sqrt((warmup + 1) / (update + 1))),
    }[name]


def rates(config: ScheduleConfig, *, steps: int) -> list[float]:
    """Returns the learning rate of each update of a run whose peak is 2."""
    schedule = make_schedule(config, peak=2.0, steps=steps)
    return [float(schedule(jnp.array(update))) for update in range(steps)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup", [0, 1, 3, 9, 10, 12])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_every_rate_is_the_closed_form(name, warmup, final):
    """Zero-length phases divide by zero, and first or last rates are off by one (B40)."""
    got = rates(ScheduleConfig(name=name, warmup_steps=warmup, final_fraction=final), steps=10)
    decay = 1 if name == "wsd" else max(10 - 1 - warmup, 0)
    form = {"steps": 10, "warmup": warmup, "decay": decay, "final": final}
    np.testing.assert_allclose(got, [2 * closed_form(u, name, **form) for u in range(10)], rtol=1e-6, atol=1e-7)
    assert got[0] > 0
    if warmup < 10:
        assert got[warmup] == 2.0
        assert max(got) == 2.0
        assert got.index(2.0) == warmup
    if name in ("cosine", "linear", "inverse_sqrt") and final < 1 and warmup < 10:
        assert got.count(2.0) == 1
    if name in ("cosine", "linear", "wsd") and warmup < 9:
        assert got[-1] == np.float32(2 * final)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decay", [0, 4, 7, 100])
def test_decay_steps_end_the_decay_where_they_say(name, decay):
    """A decay from the peak on stays at its end or is cut; that of wsd ends with the run, however long (B40)."""
    got = rates(ScheduleConfig(name=name, warmup_steps=2, decay_steps=decay, final_fraction=0.5), steps=10)
    form = {"steps": 10, "warmup": 2, "decay": decay, "final": 0.5}
    np.testing.assert_allclose(got, [2 * closed_form(u, name, **form) for u in range(10)], rtol=1e-6)
    if name == "wsd" and decay:
        assert got[-1] == 1.0


def test_the_decay_of_wsd_is_the_last_part():
    """Twenty updates: two of warm-up, the peak for twelve, then six down to a tenth."""
    got = rates(ScheduleConfig(name="wsd", warmup_steps=2, decay_steps=6), steps=20)
    assert got[2:14] == [2.0] * 12
    assert np.all(np.diff(got[13:]) < 0)
    assert got[-1] == np.float32(0.2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_shortest_runs_have_finite_rates(name, final, steps):
    """A run of one update takes the peak; one of none has no phase to divide by (B40)."""
    for warmup in (0, 1, 3):
        schedule = make_schedule(
            ScheduleConfig(name=name, warmup_steps=warmup, final_fraction=final), peak=2.0, steps=steps
        )
        assert np.isfinite([float(schedule(jnp.array(update))) for update in range(4)]).all()
        assert float(schedule(jnp.array(warmup))) == 2.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("steps", "warmup", "decay", "in_steps"),
    [(100, 0.1, 0.25, (10, 25)), (10, 0.25, 0.05, (3, 1)), (7, 0.0, 1.0, (0, 7)), (1, 0.4, 0.6, (0, 1))],
)
def test_fractions_are_rounded_to_whole_updates(name, steps, warmup, decay, in_steps):
    """A warm-up of 2.5 updates would meet the peak between two of them."""
    fractions = ScheduleConfig(name=name, warmup_fraction=warmup, decay_fraction=decay)
    whole = ScheduleConfig(name=name, warmup_steps=in_steps[0], decay_steps=in_steps[1])
    assert rates(fractions, steps=steps) == rates(whole, steps=steps)


@pytest.mark.parametrize("name", FALLING)
def test_a_curve_is_no_other_curve(name):
    """Two names for one curve would pass every comparison with a closed form that is wrong alike."""
    own = rates(ScheduleConfig(name=name, warmup_steps=2, decay_fraction=0.5), steps=12)
    others = [rates(ScheduleConfig(name=other, warmup_steps=2, decay_fraction=0.5), steps=12) for other in NAMES]
    assert others.count(own) == 1


@pytest.mark.parametrize("accum_steps", [1, 4])
def test_the_schedule_counts_updates(accum_steps):
    """A schedule that advances by microbatches falls too fast; a skipped step does not advance it (B40)."""
    words = ("steps=10", "schedule.warmup_steps=3", "optimizer.learning_rate=1", f"batch.accum_steps={accum_steps}")
    program = tiny_program(*words)
    step, state = jax.jit(program.train_step), initial_state(program)
    found = []
    for update in range(5):
        targets = (0,) * 8 if update == 2 else (32,) * 8
        state, metrics = step(state, random_batch(targets=targets, accum_steps=accum_steps))
        found.append(float(metrics["learning_rate"]))
    assert found == pytest.approx([1 / 4, 2 / 4, 3 / 4, 3 / 4, 1.0])
