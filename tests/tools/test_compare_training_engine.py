"""The tool that compares both engines finds an engine that is wrong, and says what the right one costs."""

import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from nnxtrain.build.registry import BUILT_IN
from nnxtrain.cli.command import guarded
from nnxtrain.engine.split import SplitEngine
from nnxtrain.types import Sums
from tests.support import TINY
from tools.compare_training_engine import main
from tools.engine_trial import worst

pytestmark = pytest.mark.usefixtures("quick_compiles")
SMALL = ("model.layers=1", "model.embed=32", "batch.sequence=16", "mesh.data=1", "batch.accum_steps=4")


def faulty(**parts):
    """Returns a registry whose split engine works with other functions; each is made of the right one."""

    class Faulty(SplitEngine):
        def __init__(self, work):
            wrong = {name: make(getattr(work.functions, name)) for name, make in parts.items()}
            super().__init__(replace(work, functions=work.functions._replace(**wrong)))

    return BUILT_IN._replace(engines=BUILT_IN.engines | {"split": Faulty})


def mean_of_means(forward_backward):
    """Divides the gradients of each microbatch by its own targets."""

    def of_mean(state, microbatch):
        parts, grads = forward_backward(state, microbatch)
        mean = 4.0 / jax.numpy.maximum(parts.targets.sum(), 1)
        return Sums(parts, jax.tree.map(lambda leaf: leaf * mean, grads))

    return of_mean


def dropped(forward_backward):
    """Loses the microbatch that begins with row 0."""

    def without_first(state, microbatch):
        sums = forward_backward(state, microbatch)
        return jax.tree.map(lambda leaf: leaf * (microbatch["rows"][0] > 0).astype(leaf.dtype), sums)

    return without_first


def stale(update):
    """Moves by the learning rate of the first step for good."""

    def as_first(state, sums):
        count = state.optimizer.step[...]
        state.optimizer.step[...] = count * 0
        state, metrics = update(state, sums)
        state.optimizer.step[...] += count
        return state, metrics

    return as_first


FAULTS = {
    "mean of means": (faulty(forward_backward=mean_of_means), "parity"),
    "dropped microbatch": (faulty(forward_backward=dropped), "metrics"),
    "stale learning rate": (faulty(update=stale), "metrics"),
}
CASES = [(fault, kind) for kind in ("bfloat16", "float32") for fault in FAULTS]  # float32 runs uncompiled too


@pytest.mark.parametrize(
    ("fault", "kind"), [pytest.param(*case, marks=[pytest.mark.slow] * bool(place)) for place, case in enumerate(CASES)]
)
def test_a_wrong_engine_is_caught(fault, kind, capsys):
    """A tool that cannot fail proves nothing, and limits wide enough for bfloat16 may be too wide."""
    registry, suite = FAULTS[fault]
    words = [str(TINY), *SMALL, f"suite={suite}", "m_steps=3", f"types={kind}"]
    assert guarded(lambda argv: main(argv, registry=registry), words) == 1
    assert f"DIFFERENT: {suite}" in capsys.readouterr().out


def test_the_cost_is_told_and_the_trace_is_read_back(tmp_path):
    """Figures with their spread, and a trace with an event for each microbatch of each cycle."""
    words = ("suite=benchmark", "n_iterations=3", "m_steps=2", "profile=true", f"profile_dir={tmp_path / 'trace'}")
    report = tmp_path / "report.json"
    assert guarded(main, [str(TINY), *SMALL, *words, f"report={report}"]) == 0
    found = json.loads(report.read_text())
    assert found["benchmark"]["ratio"].keys() == {"median", "p10", "p90"}
    assert found["benchmark"]["baseline"]["compiles"] == {"train_step": 1}
    assert found["benchmark"]["engine"]["compiles"] == {"fwd_bwd": 1, "update": 1}
    calls = {name: total["calls"] for name, total in found["annotations"].items()}
    steps = {f"fwd_bwd_microstep_{number}": 3 for number in range(2)}
    assert calls == steps | {"engine_update": 3, "engine_cycle": 3, "baseline_cycle": 3, "train": 6}


@pytest.mark.slow
def test_the_engine_is_equal(tmp_path, capsys):
    """Every comparison of every suite holds."""
    report = tmp_path / "report.json"
    assert guarded(main, [str(TINY), *SMALL, "n_iterations=2", "m_steps=2", f"report={report}"]) == 0
    checks = json.loads(report.read_text())["checks"]
    assert {check["suite"] for check in checks} == {"parity", "metrics", "accumulation"}
    assert all(check["holds"] for check in checks)
    assert "equal:" in capsys.readouterr().out


@pytest.mark.slow
def test_the_engine_is_equal_on_eight_devices():
    """As above, for weights that are shared; microbatches are of one row a device."""
    assert guarded(main, [str(TINY), "mesh.fsdp=8", "n_iterations=3"]) == 0


@pytest.mark.parametrize("broken", [math.nan, math.inf, 2.0])
def test_the_worst_leaf_is_found_wherever_it_is(broken):
    """A NaN compares as smaller than nothing and larger than nothing: a maximum passes over it."""
    good = {"a": np.ones(3), "b": np.ones(3), "c": np.ones(3)}
    for path in good:
        bad = good | {path: np.array([1.0, broken, 1.0])}
        assert worst(bad, good).path == path
        assert worst(bad, good).error >= 1
        assert worst(good, bad).error > 0.4
    assert worst(good, good).error == 0
    assert worst(good, {"a": good["a"]}).error == math.inf


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("profile=true", f"profile_dir={TINY}"), "is a file"),
        (("suite=speed",), "suite=speed is not one of"),
        (("m_steps=0",), "m_steps=0"),
        (("types=float32,float16",), "'float16' is not one of"),
        (("n_iterations=many",), "n_iterations=many"),
        (("profile=yes",), "profile=yes must be true or false"),
        (("suite=parity", "profile=true"), "profile=true traces"),
        (("model.layer=3",), "model.layers"),
    ],
)
def test_bad_words_are_refused(words, what, capsys):
    """Before anything is compiled, in one message."""
    assert guarded(main, [str(TINY), *words]) == 2
    assert what in capsys.readouterr().err
