"""When a run saves, what it goes on from, and what it says when it cannot."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxtrain.build.program import make_program
from nnxtrain.checkpoint.saver import RestoreSpec, Saver, Snapshot, load_weights, restore_run
from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.cli.command import guarded
from nnxtrain.config.checkpoint import CheckpointConfig
from nnxtrain.config.load import load
from nnxtrain.errors import CheckpointError, ConfigError, NonFiniteError
from nnxtrain.train import main
from tests.checkpoint.test_store import (
    arrays_of,
    assert_same_arrays,
    open_store,
    save,
    small_state,
)
from tests.support import ROOT, TINY, rows_of, run_module, tiny_program, weights

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = (str(TINY), "mesh.data=1", "model.layers=1", "model.embed=32", "batch.sequence=16", "generate.tokens=1")


WANTED = RestoreSpec(lambda: nnx.eval_shape(small_state), "ids-3", None)


def start(*words: str) -> subprocess.Popen:
    """Starts a run in a process of its own."""
    env = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env["JAX_COMPILATION_CACHE_DIR"] = jax.config.values["jax_compilation_cache_dir"]  # compiles as this process does
    command = [sys.executable, "-m", "nnxtrain.train", *SMALL, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def ended(run: subprocess.Popen, seconds: float = 30) -> tuple[int, str, str]:
    """Returns exit code and output of a run, which must end in time: a thread that waits on keeps its process."""
    try:
        out, error = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        run.kill()
        out, error = run.communicate()
        pytest.fail(f"the process had not ended after {seconds} s; it said: {error}")
    return run.returncode, out, error


def saver_of(store, *, last: int | None = None, is_finite=lambda: True, **keys) -> Saver:
    """Returns a saver of small states."""
    config = CheckpointConfig(**keys)
    return Saver(store, config, meta={"tokenizer": "ids", "config": {}}, is_finite=is_finite, last=last)


def moment(step: int, loss: float | None = None) -> Snapshot:
    """Returns a moment after `step` steps."""
    return Snapshot(step, small_state(step=step), {"row": 8 * step, "skipped": []}, loss)


def stored(folder):
    """Returns what the newest checkpoint of a run knows, and its state."""
    config = load(folder / "config.yml")
    program = make_program(config, devices=jax.devices()[:1])
    state = program.abstract_state()
    with closing(CheckpointStore(folder / "checkpoints", config.checkpoint)) as store:
        saved = store.read(store.newest())
        store.restore(saved, state)
    return saved, state


def assert_restores(folder, step: int) -> None:
    """Asserts that the newest checkpoint is that of `step`, whole, and only holds finite numbers."""
    saved, state = stored(folder)
    assert saved.step == saved.meta["step"] == int(state.step[...]) == step
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state((state.model, state.optimizer))))


def test_a_step_is_saved_once(tmp_path):
    """The last step is often one of `every_steps` too; saving it twice was a crash elsewhere (B22)."""
    with closing(open_store(tmp_path / "checkpoints")) as store:
        saver = saver_of(store)
        saver.save(moment(2))
        store.wait()
        stamp = (tmp_path / "checkpoints" / "2").stat().st_mtime_ns
        saver.save(moment(2))
        store.wait()
        assert (tmp_path / "checkpoints" / "2").stat().st_mtime_ns == stamp
        again = saver_of(store, last=2)
        again.save(moment(2))
        again.save(moment(3))
        store.wait()
        assert store.steps() == [2, 3]
        assert (tmp_path / "checkpoints" / "2").stat().st_mtime_ns == stamp


def test_a_state_that_is_not_finite_is_never_saved(tmp_path):
    """It would be the newest, and rotation would take the last good one (B11)."""
    with closing(open_store(tmp_path / "checkpoints", keep_last=1)) as store:
        saver_of(store).save(moment(2))
        with pytest.raises(NonFiniteError, match=r"step 4: .*not saved"):
            saver_of(store, is_finite=lambda: False).save(moment(4))
        store.wait()
        assert store.steps() == [2]


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (7, [])])
def test_every_steps_counts_steps_of_the_run(tmp_path, every, due):
    """Counted from the start of the process, the saves of a resumed run would shift (B22)."""
    with closing(open_store(tmp_path / "checkpoints")) as store:
        saver = saver_of(store, every_steps=every)
        assert [step for step in range(1, 7) if saver.is_due(step)] == due
        assert not saver_of(store, every_steps=1, enabled=False).is_due(1)


def test_every_minutes_is_reckoned_from_the_last_save(tmp_path):
    """A slow step must not lead to a save at each step after it; both rules may hold at once."""
    with closing(open_store(tmp_path / "checkpoints")) as store:
        saver = saver_of(store, every_minutes=0.5 / 60, every_steps=4)
        assert not saver.is_due(1)
        assert saver.is_due(4)
        time.sleep(0.6)
        assert saver.is_due(1)
        saver.save(moment(1))
        assert not saver.is_due(2)
        assert saver_of(store, every_minutes=0.0).is_due(1)


def test_a_run_that_may_not_save_does_not(tmp_path):
    """`checkpoint.enabled=false` is for benchmarks."""
    with closing(open_store(tmp_path / "checkpoints")) as store:
        saver_of(store, enabled=False).save(moment(1))
        assert store.steps() == []
    assert not (tmp_path / "checkpoints").exists()


def restored(store, *, resume: str = "auto", said=None, make=small_state):
    """Returns the step that a run goes on from, or None."""
    found = restore_run(
        store,
        RestoreSpec(lambda: nnx.eval_shape(make), "ids-3", None),
        resume=resume,
        say=(said if said is not None else []).append,
    )
    return found and found[0].step


def test_resume_must_refuses_a_directory_without_a_checkpoint(tmp_path):
    """A typo in the run's name would start anew without a word."""
    with closing(open_store(tmp_path / "checkpoints")) as store:
        assert restored(store) is None
        with pytest.raises(CheckpointError, match=r"checkpoint\.resume=must"):
            restored(store, resume="must")
        save(store, 1)
        store.wait()
        assert restored(store, resume="must") == 1


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    """Going on from another one than was asked for is a surprise."""
    with closing(open_store(tmp_path / "checkpoints", keep_last=9)) as store:
        for step in (2, 4):
            save(store, step)
        store.wait()
        with pytest.raises(CheckpointError, match=r"step 3.*\[2, 4\]"):
            restored(store, resume="3")
        assert store.steps() == [2, 4]
        assert restored(store, resume="2") == 2
        assert store.steps() == [2]


@pytest.mark.parametrize(
    "damage", ["truncated array", "no metadata", "no data", "no model", "empty folder", "empty meta"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(tmp_path, damage):
    """The newest one may be what a full disk left; the run must not fail, and must not take it in part."""
    with closing(open_store(tmp_path / "checkpoints", keep_last=9)) as store:
        for step in (2, 4):
            save(store, step)
    broken = tmp_path / "checkpoints" / "4"
    if damage == "truncated array":
        largest = max(
            (path for path in (broken / "model").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
        )
        os.truncate(largest, largest.stat().st_size // 2)
        for path in (broken / "model" / "ocdbt.process_0" / "d").iterdir():
            os.truncate(path, path.stat().st_size // 2)
    elif damage == "empty folder":
        shutil.rmtree(broken)
        broken.mkdir()
    elif damage == "empty meta":
        (broken / "meta" / "metadata").write_text("")
    else:
        shutil.rmtree(broken / {"no metadata": "meta", "no data": "data", "no model": "model"}[damage])
    said: list[str] = []
    with closing(open_store(tmp_path / "checkpoints", keep_last=9)) as store:
        assert restored(store, said=said) == 2
        assert any(line.startswith("skipped") and "4" in line for line in said)
        assert store.steps() == [2]
        save(store, 4)
        store.wait()
        assert store.steps() == [2, 4]
    assert (tmp_path / "checkpoints.dropped" / "4").exists()


def test_nothing_is_moved_when_no_checkpoint_can_be_read(tmp_path):
    """A fresh start on top of a week of training is the worst that can happen."""
    with closing(open_store(tmp_path / "checkpoints", keep_last=9)) as store:
        for step in (2, 4):
            save(store, step)
    for step in (2, 4):
        shutil.rmtree(tmp_path / "checkpoints" / str(step) / "model")
    with closing(open_store(tmp_path / "checkpoints")) as store:
        with pytest.raises(CheckpointError, match="no checkpoint can be read") as caught:
            restored(store)
        assert "step 2" in str(caught.value)
        assert "step 4" in str(caught.value)
        assert store.steps() == [2, 4]


def test_another_tokenizer_is_refused(tmp_path):
    """Same shapes, other meanings: the loss would start at ln(vocab) again."""
    with closing(open_store(tmp_path / "checkpoints")) as store:
        save(store, 2)
        store.wait()
        with pytest.raises(CheckpointError, match="tokenizer"):
            restore_run(
                store,
                RestoreSpec(lambda: nnx.eval_shape(small_state), "byte-1", None),
                resume="auto",
                say=lambda line: None,
            )


@pytest.mark.parametrize(
    ("include", "exclude", "taken"),
    [
        (("*",), (), {"kernel", "table"}),
        (("kernel",), (), {"kernel"}),
        (("*",), ("tab*",), {"kernel"}),
        (("k*", "t*"), ("kernel", "nothing"), {"table"}),
    ],
)
def test_init_from_takes_the_weights_that_the_patterns_choose(tmp_path, include, exclude, taken):
    """Moments, counters and the weights left out stay as they were."""
    config = CheckpointConfig(init_include=include, init_exclude=exclude)
    source, state = small_state(seed=1, step=5), small_state(seed=2)
    before = arrays_of(state)
    with closing(open_store(tmp_path / "checkpoints")) as store:
        save(store, 5, source)
        store.wait()
        assert load_weights(store, state, config, wanted=WANTED) == 5
    want = {path: leaf for path, leaf in arrays_of(source).items() if path.removeprefix("model/") in taken}
    assert_same_arrays(arrays_of(state), before | want)


def test_init_from_refuses_weights_of_another_shape_unless_they_are_left_out(tmp_path):
    """Nothing is ever silently initialised or cast."""
    with closing(open_store(tmp_path / "checkpoints")) as store:
        save(store, 5, small_state(size=4))
        store.wait()
        with pytest.raises(
            CheckpointError, match=r"kernel: float32\[4, 2\] in the checkpoint, expected float32\[3, 2\]"
        ):
            load_weights(store, small_state(), CheckpointConfig(), wanted=WANTED)
        without = CheckpointConfig(init_exclude=("kernel",))
        assert load_weights(store, small_state(), without, wanted=WANTED) == 5


@pytest.mark.parametrize("include", ["kernl", "model/*"])
def test_a_pattern_of_init_from_that_matches_nothing_is_refused(tmp_path, include):
    """A typo would train from noise and say that it had the weights."""
    with closing(open_store(tmp_path / "checkpoints")) as store:
        save(store, 5)
        store.wait()
        with pytest.raises(ConfigError, match=f"init_include.*{include}"):
            load_weights(store, small_state(), CheckpointConfig(init_include=(include,)), wanted=WANTED)


@pytest.mark.parametrize("pattern", [pytest.param("stack/*", marks=pytest.mark.slow), "stack/layer/*"])
def test_init_from_can_leave_out_the_whole_stack(tmp_path, pattern):
    """Without its stack the target has no layout of its own; the patterns are those of the new run's paths."""
    words = ("model.layers=2", "model.embed=32")
    program = tiny_program(*words)
    source, state = jax.jit(program.make_state)(), jax.jit(tiny_program(*words, "seed=1").make_state)()
    before = weights(state)
    with closing(open_store(tmp_path / "checkpoints")) as store:
        save(store, 5, source)
        store.wait()
        config = CheckpointConfig(init_exclude=(pattern,))
        wanted = RestoreSpec(program.abstract_state, "ids-3", None)
        assert (
            load_weights(
                store,
                state,
                config,
                wanted=wanted,
            )
            == 5
        )
    for path, leaf in weights(state).items():
        np.testing.assert_array_equal(leaf, before[path] if path.startswith("stack") else weights(source)[path])


def test_a_run_starts_from_the_weights_of_another(tmp_path, capsys):
    """Steps 0 evaluates what was loaded: it is what the other run ended with, in the other layout too."""
    assert guarded(main, [*SMALL, f"output_dir={tmp_path}", "run_name=one", "steps=3"]) == 0
    words = (f"output_dir={tmp_path}", "run_name=two", f"checkpoint.init_from={tmp_path}/one", "steps=0")
    assert guarded(main, [*SMALL, *words, "model.scan_layers=false"]) == 0
    assert f"weights  of {tmp_path}/one, step 3" in capsys.readouterr().out
    one, two = (rows_of(tmp_path / name, "eval")[-1]["loss"] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-6)


def test_init_from_of_another_model_is_refused_before_anything_is_written(tmp_path, capsys):
    """Like every refusal: one message, in seconds, and no run directory that looks begun."""
    assert guarded(main, [*SMALL, f"output_dir={tmp_path}", "run_name=one", "steps=1"]) == 0
    words = (f"output_dir={tmp_path}", "run_name=two", f"checkpoint.init_from={tmp_path}/one", "model.mlp=64")
    assert guarded(main, [*SMALL, *words]) == 6
    error = capsys.readouterr().err
    assert "stack/layer/" in error
    assert "64" in error
    assert not (tmp_path / "two" / "config.yml").exists()


@pytest.mark.parametrize(
    ("steps", "period", "ends"),
    [
        (10, 4, 10),
        (1, 5, 1),
        (20, 5, 7),
        *(pytest.param(10, period, 10, marks=pytest.mark.slow) for period in (5, 0, 20)),
    ],
)
def test_the_last_executed_step_is_saved_once_under_its_number(tmp_path, steps, period, ends):
    """Saved twice, not at all, or under a number off by one; the last pair is data that ends at step 7 (B22)."""
    words = [f"steps={steps}", f"checkpoint.every_steps={period}", "checkpoint.keep_last=99"]
    if ends < steps:
        (tmp_path / "a.txt").write_text("x" * (26 * 16 - 1))  # 26 rows twice: 52, which are 7 batches
        words += ["data.source=text", f"data.path={tmp_path}/a.txt", f"data.cache_dir={tmp_path}/cache"]
        words += ["data.epochs=2", "model.vocab=384"]
    assert guarded(main, [*SMALL, f"output_dir={tmp_path}", *words]) == 0
    folder = tmp_path / "tiny"
    due = {step for step in range(1, ends + 1) if period and step % period == 0}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {str(step) for step in due | {ends}}
    assert_restores(folder, ends)
    saved, state = stored(folder)
    assert int(state.optimizer.step[...]) == len(rows_of(folder)) == ends
    assert saved.data == {"row": min(8 * ends, 52 if ends < steps else 8 * ends), "skipped": []}


def test_going_on_from_k_to_n_takes_n_minus_k_updates(tmp_path):
    """A checkpoint whose number is off by one would repeat or lose a step (B22)."""
    words = (f"output_dir={tmp_path}", "checkpoint.every_steps=4", "checkpoint.keep_last=9")
    assert guarded(main, [*SMALL, *words, "steps=10"]) == 0
    folder = tmp_path / "tiny"
    before = rows_of(folder)
    assert guarded(main, [*SMALL, *words, "steps=10", "checkpoint.resume=8"]) == 0
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["step_time_s"] == old["step_time_s"] for row, old in zip(rows, before, strict=True)] == [True] * 8 + [
        False
    ] * 2
    assert int(stored(folder)[1].optimizer.step[...]) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        ("model.embed=256", "model.layers=2"),
        pytest.param(("model.embed=768", "model.layers=2", "model.heads=12"), marks=pytest.mark.slow),
    ],
    ids=["20 MB", "200 MB"],
)
def test_the_last_save_is_complete_when_the_process_has_ended(tmp_path, sizes):
    """A writer thread that dies with the process loses what the run was for (B25)."""
    words = (*SMALL, *sizes, f"output_dir={tmp_path}", "steps=2", "checkpoint.background=true")
    ended = run_module("train", *words, XLA_FLAGS=os.environ["XLA_FLAGS"])
    assert ended.returncode == 0, ended.stderr
    files = [path for path in (tmp_path / "tiny" / "checkpoints" / "2").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) > 15e6
    assert [path.name for path in (tmp_path / "tiny" / "checkpoints").iterdir()] == ["2"]
    assert_restores(tmp_path / "tiny", 2)


@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_save_that_fails_ends_the_run_with_6_and_the_number_of_the_step(tmp_path, background):
    """An error in the background is caught and thrown away elsewhere; the run trains on for days (B25)."""
    words = (f"output_dir={tmp_path}", "steps=1000000", "checkpoint.every_steps=25")
    folder = tmp_path / "tiny"
    run = start(*words, f"checkpoint.background={background}")
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "50").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    (folder / "checkpoints").rename(folder / "away")
    (folder / "checkpoints").write_text("in the way")
    code, out, error = ended(run)
    assert code == 6, error
    assert "Traceback" not in error
    assert error.count("\n") == 1, error
    line = error
    failed = int(line.split("step ")[1].split(":")[0])
    assert failed % 25 == 0
    assert failed > 25
    assert "done " not in out
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 6)
    assert f"step {failed}" in summary["reason"]
    (folder / "checkpoints").unlink()
    (folder / "away").rename(folder / "checkpoints")
    whole = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())
    assert_restores(folder, whole)


@pytest.mark.parametrize("place", ["checkpoints", pytest.param(".", marks=pytest.mark.slow)])
def test_a_full_disk_ends_the_run_with_6_and_keeps_the_last_good_checkpoint(tmp_path, place):
    """The disk of a real cluster fills up; what was saved before must restore."""
    folder = tmp_path / "runs" / "tiny"
    disk = folder / place
    disk.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mount is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        words = (f"output_dir={tmp_path}/runs", "steps=200", "checkpoint.every_steps=1", "checkpoint.keep_last=99")
        code, _, error = ended(start(*words))
        assert code == 6, error
        assert "error: step " in error
        assert "No space left on device" in error
        assert "Traceback" not in error
        whole = [int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()]
        assert 0 < len(whole) < 20
        shutil.copytree(folder, tmp_path / "rescued")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    assert_restores(tmp_path / "rescued", max(whole))


def test_the_state_that_is_saved_holds_no_lasting_flag(tmp_path):
    """The step that held the run is saved with it before an abort, and must not hold the next start."""
    state = small_state(step=4)
    state.guard.bad_step[...] = jnp.int32(4)
    with closing(open_store(tmp_path / "checkpoints")) as store:
        save(store, 4, state)
        store.wait()
        found = restore_run(
            store,
            RestoreSpec(lambda: nnx.eval_shape(small_state), "ids-3", None),
            resume="auto",
            say=lambda line: None,
        )
    assert found is not None
    assert int(found[1].guard.bad_step[...]) == 4
    found[1].guard.release()
    assert int(found[1].guard.bad_step[...]) == -1


def test_a_restored_guard_keeps_its_count_of_steps_left_out_in_a_row():
    """A run at 9 of 10 that starts from 0 after each restart never reaches the limit, unlike an unbroken one (B15)."""
    state = small_state()
    state.guard.in_row[...] = jnp.int32(9)
    state.guard.release()
    assert int(state.guard.in_row[...]) == 9
