"""The floor computes what the package does, and the benchmarks that compare them run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import depth, dispatch, steps
from nnxtrain.cli.command import guarded
from tests.support import assert_trees_close, random_batch, tiny_program

NARROW = ("model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64", "batch.sequence=96")
UPDATE = ("optimizer.eps=1e-4", "schedule.warmup_steps=10", "optimizer.weight_decay=0.5", "optimizer.clip_norm=0.5")


@pytest.mark.parametrize(
    "words",
    [("model.scan_layers=true", "loss.chunks=4"), pytest.param(("model.scan_layers=false",), marks=pytest.mark.slow)],
)
def test_the_floor_makes_the_same_update(words):
    """A floor that computes less, or another model, would be no measure.

    Two documents a row, uneven targets, weight decay, warm-up and a clip that bites all have to be there.
    """
    program = tiny_program(*NARROW, *UPDATE, *words)
    engine = program.make_engine()
    engine.initialise()
    state = engine.state()
    floor = steps.floor_side(program.config, steps.floor_weights(state))
    start = jax.device_get(steps.floor_weights(state))
    batch = random_batch(targets=(90, 3, 17, 1, 96, 2, 9, 5), sequence=96)
    batch["segment_ids"] = batch["segment_ids"] + (np.arange(96) > 49)
    batch["positions"] = np.where(np.arange(96) < 50, batch["positions"], batch["positions"] - 50)
    batch = jax.device_put(batch, next(iter(program.batch_spec().values())).sharding)
    for _ in range(2):
        want, got = jax.device_get((engine.step(batch), floor.step(floor.own(batch))))
        assert want["grad_norm"] > 0.5
        assert_trees_close(got, {name: want[name] for name in got}, rtol=1e-6)
    want = jax.device_get(steps.floor_weights(engine.state()))
    assert_trees_close(jax.device_get(floor.weights()), want, rtol=1e-5)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max() > 1e-5, want, start)
    assert jax.tree.all(moved)


def test_a_floor_of_other_weights_is_refused():
    """Two models that are not the same must not be timed against each other."""
    sides = {
        name: steps.Side(lambda batch, loss=loss: {"loss": jnp.float32(loss)}, lambda batch: batch, None, 0.0, None)
        for name, loss in (("ours", 2.0), ("floor", 2.1))
    }
    with pytest.raises(RuntimeError, match="not the same model"):
        steps.alternate(sides, [{}])


@pytest.mark.slow
def test_steps_report_has_every_figure_with_its_spread(tmp_path, capsys):
    """Three pairs of a tiny model; no figure is judged here."""
    path = tmp_path / "report.json"
    assert (
        guarded(steps.main, ["size=tiny", "against=floor", "stack=scan", "pairs=3", "layers=none", f"report={path}"])
        == 0
    )
    report = json.loads(path.read_text())
    assert set(report) == {"machine", "size", "pairs", "stacks"}
    figures = report["stacks"]["scan"]
    for side in ("ours", "floor"):
        for name in ("step_s", "tokens_per_s", "mfu", "dispatch_s"):
            assert 0 < figures[side][name]["p10"] <= figures[side][name]["median"] <= figures[side][name]["p90"]
        assert figures[side]["compile_s"] > 0
        assert figures[side]["peak_bytes"] > figures[side]["temp_bytes"] > 0
    assert figures["ratio"]["median"] > 0
    assert "ratio of step times" in capsys.readouterr().out


@pytest.mark.slow
def test_dispatch_report_has_calls_and_steps_of_the_loop(tmp_path):
    """Two depths of one stack; no figure is judged here."""
    path = tmp_path / "report.json"
    assert guarded(dispatch.main, ["layers=1,2", "calls=30", f"report={path}"]) == 0
    report = json.loads(path.read_text())
    assert report["2"]["arrays"] > report["1"]["arrays"] > 20
    for row in report.values():
        assert row["loop_slowest_s"] >= row["loop_step_s"]["median"] > 0
        assert row["call_ratio"]["median"] > 0


@pytest.mark.slow
def test_depth_report_has_both_depths(tmp_path):
    """One round of a narrow model."""
    path = tmp_path / "report.json"
    words = ["layers=1,2", "rounds=1", "model.embed=16", "model.mlp=16", "model.vocab=128", "batch.sequence=8"]
    assert guarded(depth.main, [*words, f"report={path}"]) == 0
    report = json.loads(path.read_text())
    assert set(report["compile_s"]) == {"1", "2"}
    assert report["ratio"]["median"] > 0


@pytest.mark.parametrize(
    ("main", "word"),
    [
        (steps.main, "size=L"),
        (steps.main, "against=torch"),
        (steps.main, "pairs=0"),
        (steps.main, "model.embed=8"),
        (dispatch.main, "layers=four"),
        (dispatch.main, "calls=20"),
        (depth.main, "layers=4"),
    ],
)
def test_a_wrong_word_is_refused_at_once(main, word, capsys):
    """Not after minutes of compiling."""
    assert guarded(main, [word]) == 2
    assert word.split("=")[0] in capsys.readouterr().err
