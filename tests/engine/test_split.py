"""Two programs that a host drives are one step."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxtrain.cli.command import guarded
from nnxtrain.engine.microbatch import EngineUseError
from nnxtrain.errors import CheckpointError
from nnxtrain.profiling.trace import digest_of, trace_files
from nnxtrain.run.recompiles import CompileLog
from nnxtrain.train import main as train
from nnxtrain.types import Batch
from tests.support import (
    TINY,
    assert_trees_close,
    assert_trees_equal,
    random_batch,
    rows_of,
    started,
    tiny_program,
    weights,
)

# dropout, so that masks must not depend on the microbatch; a binding clip, so that the norm must be of the whole step
WORDS = (
    "optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.clip_norm=0.5", "optimizer.learning_rate=0.1",
    "schedule.name=constant", "model.dropout=0.1", "model.layers=2",
)  # fmt: skip


def put(program, batch) -> Batch:
    """Returns a batch, leaves `[m b ...]`, where a program wants it."""
    spec = program.batch_spec()
    return {name: jax.device_put(leaf, spec[name].sharding) for name, leaf in batch.items()}


@functools.cache
def updated(*words: str, devices: int = 1):
    """Returns metrics of three updates on uneven masks, weights after them, and the engine."""
    engine = started(*WORDS, *words, devices=devices)
    program = tiny_program(*WORDS, *words, devices=devices)
    metrics = []
    for seed in range(3):
        batch = random_batch(seed=seed, accum_steps=program.cut.microbatches)
        metrics.append(jax.device_get(engine.step(put(program, batch))))
    return metrics, weights(engine.state()), engine


SHARED = {
    "one device": (1, "batch.accum_steps=4"),
    "fsdp 8": (8, "mesh.fsdp=8"),
    "data 4, zero1": (8, "mesh.preset=zero1", "mesh.data=4", "batch.accum_steps=2"),
    "data 2, fsdp 2, tensor 2": (8, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "batch.accum_steps=2"),
}
SLOW = {"data 2, fsdp 2, tensor 2"}
CASES = [pytest.param(case, marks=[pytest.mark.slow] * (name in SLOW), id=name) for name, case in SHARED.items()]


@pytest.mark.parametrize("case", CASES)
def test_the_split_engine_makes_the_updates_of_the_single_step(case):
    """Means of means, a lost microbatch, kernels outside the rules of the mesh, sums that leak: all show here (B47)."""
    devices, *words = case
    metrics, after, engine = updated(*words, "engine.name=split", devices=devices)
    want, want_after, single = updated(*words, devices=devices)
    for got, other in zip(metrics, want, strict=True):
        assert got.keys() == other.keys()
        assert_trees_close(got, other, rtol=1e-6)
    assert_trees_close(after, want_after, rtol=1e-5)
    places = [jax.tree.map(lambda leaf: leaf.sharding, nnx.state(each.state())) for each in (engine, single)]
    assert jax.tree.leaves(places[0]) == jax.tree.leaves(places[1])


SPLIT = (*WORDS, "batch.accum_steps=4", "engine.name=split")


@pytest.fixture
def engine():
    """Returns a split engine with its initial state, and the microbatches of a step."""
    engine = started(*SPLIT)
    batch = put(tiny_program(*SPLIT), random_batch(accum_steps=4))
    return engine, [{name: leaf[number] for name, leaf in batch.items()} for number in range(4)]


def test_microbatches_come_one_at_a_time_and_in_any_number(engine):
    """A handle tells of its microbatch alone; what was updated leaves nothing behind."""
    engine, microbatches = engine
    handles = [engine.fwd_bwd(microbatch) for microbatch in microbatches[:3]]
    assert [handle.number for handle in handles] == [0, 1, 2]
    assert engine.microbatches == 3
    parts, _ = engine.accumulated()
    sums = [float(handle.sums["loss"][0]) for handle in handles]
    assert float(parts.sums["loss"][0]) == pytest.approx(sum(sums), rel=1e-6)
    assert handles[1].metrics()["loss"] == pytest.approx(sums[1] / float(microbatches[1]["mask"].sum()), rel=1e-6)
    engine.update()
    assert engine.metrics()["targets"] == sum(int(each["mask"].sum()) for each in microbatches[:3])
    assert engine.microbatches == 0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(engine.accumulated()))


def test_sums_and_state_are_donated(engine):
    """An accumulator that is copied with every microbatch needs twice the memory (B47)."""
    engine, microbatches = engine
    sums, leaves = list(engine._sums), list(engine._leaves)
    engine.fwd_bwd(microbatches[0])
    assert all(leaf.is_deleted() for leaf in sums)
    assert not any(leaf.is_deleted() for leaf in leaves)
    engine.update()
    assert all(leaf.is_deleted() for leaf in leaves)


def test_what_cannot_be_done_is_said(engine):
    """An empty update would divide by nothing; a new shape would compile for minutes in the middle of a run (B47)."""
    engine, microbatches = engine
    with pytest.raises(EngineUseError, match="no update yet"):
        engine.metrics()
    with pytest.raises(EngineUseError, match="nothing is accumulated"):
        engine.update()
    with pytest.raises(EngineUseError, match=r"inputs is int32\[1, 32\], expected int32\[2, 32\]"):
        engine.fwd_bwd({name: leaf[:1] for name, leaf in microbatches[0].items()})
    with pytest.raises(EngineUseError, match="; expected "):
        engine.fwd_bwd({"inputs": microbatches[0]["inputs"]})
    assert engine.microbatches == 0
    engine.fwd_bwd(microbatches[0])
    engine.update()
    engine.fwd_bwd(microbatches[0])
    engine.close()  # with work in flight
    state = tiny_program(*WORDS).abstract_state()
    calls = (engine.update, engine.accumulated, engine.metrics, engine.initialise, lambda: engine.load(state))
    calls += (lambda: engine.fwd_bwd(microbatches[0]), lambda: engine.restore(Path("nowhere")))
    for call in calls:
        with pytest.raises(EngineUseError, match="closed"):
            call()
    with pytest.raises(EngineUseError, match="not compiled"):
        tiny_program(*WORDS, "engine.name=split").new_engine().initialise()


def test_a_microbatch_that_is_no_array_or_lies_elsewhere_is_refused():
    """Jax would say it in terms of arguments that the caller never wrote."""
    words = (*WORDS, "mesh.fsdp=8", "engine.name=split")
    engine = started(*words, devices=8)
    batch = put(tiny_program(*words, devices=8), random_batch())
    microbatch = {name: leaf[0] for name, leaf in batch.items()}
    with pytest.raises(EngineUseError, match="inputs is a list"):
        engine.fwd_bwd(microbatch | {"inputs": [[1]]})
    with pytest.raises(EngineUseError, match="inputs has sharding"):
        engine.fwd_bwd(microbatch | {"inputs": jax.device_put(microbatch["inputs"], jax.devices()[0])})
    assert engine.fwd_bwd(microbatch).number == 0


def test_no_more_updates_are_under_way_than_was_asked_for(monkeypatch):
    """A bound that is looked at after the start of an update admits one more."""
    engine = started(*SPLIT)
    engine._work = tiny_program(*SPLIT, "engine.max_inflight=1")
    events, update, wait = [], engine._compiled["update"], jax.block_until_ready
    engine._compiled = engine._compiled | {"update": lambda *args: (events.append("start"), update(*args))[1]}
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: (events.append("wait"), wait(tree))[1])
    for seed in range(3):
        engine.step(put(engine._work, random_batch(seed=seed, accum_steps=4)))
    assert events == ["start", "wait", "start", "wait", "start"]


def python_calls(*words: str) -> int:
    """Returns how many functions python calls for a step, once it runs as it will go on."""
    program = tiny_program("model.embed=8", "model.heads=2", "model.mlp=8", "model.scan_layers=false", *words)
    engine = program.make_engine()
    engine.load(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), program.abstract_state()))
    batch, calls = put(program, random_batch(accum_steps=program.cut.microbatches)), 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(3):
        engine.step(batch)
    sys.setprofile(count)
    try:
        engine.step(batch)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", ["single", "split"])
def test_python_does_the_same_work_for_a_step_however_deep_the_model_is(name):
    """A walk over the modules in each step grows with every layer (B49)."""
    own = (f"engine.name={name}", "batch.accum_steps=2")
    shallow, deep = (python_calls(*own, f"model.layers={layers}") for layers in (1, 2))
    assert 0 < deep == shallow


def test_an_accumulation_window_goes_on_where_it_was_saved(engine, tmp_path):
    """A window that is begun anew counts its first microbatches twice, or never."""
    engine, microbatches = engine
    engine.step(put(tiny_program(*SPLIT), random_batch(seed=5, accum_steps=4)))
    for microbatch in microbatches[:2]:
        engine.fwd_bwd(microbatch)
    engine.save(tmp_path / "window")
    other = started(*SPLIT)
    other.restore(tmp_path / "window")
    assert other.microbatches == 2
    for each in (engine, other):
        for microbatch in microbatches[2:]:
            each.fwd_bwd(microbatch)
        each.update()
    assert_trees_equal(weights(other.state()), weights(engine.state()))
    deeper = tiny_program(*SPLIT, "model.layers=3").new_engine()
    deeper.use(engine._compiled, tiny_program(*SPLIT).batch_spec(), hlo_hash="")
    with pytest.raises(CheckpointError, match="contains another state"):
        deeper.restore(tmp_path / "window")
    with pytest.raises(CheckpointError, match="cannot be read"):
        deeper.restore(tmp_path / "nowhere")


def test_each_program_is_compiled_once():
    """A type or a sharding that changes after the first step compiles again (B48)."""
    program = tiny_program(*SPLIT, "model.layers=1", "engine.max_inflight=1")
    compiles = CompileLog()
    engine = program.make_engine()
    engine.initialise()
    for seed in range(6):
        engine.step(put(program, random_batch(seed=seed, accum_steps=4)))
        assert len(engine._in_flight) <= 1
    assert sorted(engine.programs) == ["fwd_bwd", "update"]
    assert compiles.repeats(engine.programs) == 0


@pytest.mark.slow
def test_a_run_is_the_same_with_either_engine(tmp_path):
    """A trace tells the microbatches of a step apart; the rows of the metrics do not tell the engines apart."""
    window = ("profile.enabled=true", "profile.skip_first=1", "profile.warmup=1", "profile.active=3")
    own = ("steps=6", "model.layers=1", "batch.accum_steps=4", "mesh.data=1", "eval.max_batches=1", "generate.tokens=1")
    for name, more in (("single", ()), ("split", window)):
        words = (*own, f"output_dir={tmp_path}", f"engine.name={name}", f"run_name={name}", *more)
        assert guarded(train, [str(TINY), *words]) == 0
    rows = [[row["loss"] for row in rows_of(tmp_path / name)] for name in ("single", "split")]
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-6)
    (file,) = trace_files(tmp_path / "split")
    found = digest_of(file)
    calls = {total.name: total.calls for total in found.annotations}
    microsteps = {name: calls[name] for name in calls if name.startswith("fwd_bwd")}
    assert microsteps == {f"fwd_bwd_microstep_{number}": 3 for number in range(4)}
    assert calls["engine_update"] == calls["engine_cycle"] == 3
    assert [step.step for step in found.steps] == [2, 3, 4]
    assert found.operations


def test_evaluation_changes_nothing(engine):
    """An engine that has no evaluation cannot stand in for the single one."""
    engine, microbatches = engine
    before = weights(engine.state())
    loss, targets = engine.eval_step(microbatches[0])
    assert float(targets) == float(microbatches[0]["mask"].sum())
    assert 4 < float(loss) / float(targets) < 7
    assert_trees_equal(weights(engine.state()), before)
