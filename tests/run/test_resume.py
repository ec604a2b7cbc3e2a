"""A run that was stopped and started again is the run that was not."""

import json
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import pairwise

import jax
import numpy as np
import pytest

from nnxtrain.build.program import make_program
from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.checkpoint.tree import PARTS, flat
from nnxtrain.cli.command import guarded
from nnxtrain.config.load import load
from nnxtrain.metrics.rewind import records
from nnxtrain.run.recompiles import CompileLog
from nnxtrain.train import main
from tests.support import ROOT, TINY, rows_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = (str(TINY), "mesh.data=1", "model.layers=1", "model.embed=32", "batch.sequence=16", "generate.tokens=1")
EXACT = ("loss", "grad_norm", "learning_rate", "epoch", "targets", "tokens", "step")
SLOWLY = ("eval.every_steps=1",)  # a report after each step leaves time to hit a chosen one
# everything that a restart could disturb: dropout, a curve, shuffled text in several epochs, accumulation
HARD = ("model.dropout=0.1", "model.vocab=384", "batch.accum_steps=2", "data.source=text", "log.every_steps=1")
CURVE = ("schedule.name=cosine", "schedule.warmup_steps=3", "schedule.decay_steps=16")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[str, ...]:
    """Returns the words that choose a corpus of exactly 40 different rows of 16 tokens."""
    place = tmp_path_factory.mktemp("corpus")
    letters = random.Random(0).choices(string.ascii_letters, k=40 * 16 - 1)
    (place / "a.txt").write_text("".join(letters))
    return (f"data.path={place}/a.txt", f"data.validation_path={place}/a.txt", f"data.cache_dir={place}/cache")


@pytest.fixture(scope="module")
def hard(corpus) -> tuple[str, ...]:
    """Returns the words of a run that a restart could disturb in many ways."""
    return (*SMALL, *HARD, *CURVE, *corpus, "checkpoint.every_steps=3", "steps=20")


@pytest.fixture(scope="module")
def unbroken(hard, tmp_path_factory):
    """Returns the directory of that run when nothing disturbed it."""
    place = tmp_path_factory.mktemp("unbroken")
    assert guarded(main, [*hard, f"output_dir={place}"]) == 0
    return place / "tiny"


def launch(*words: str) -> subprocess.Popen:
    """Starts a run in a process of its own, which compiles as this one does."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    env["JAX_COMPILATION_CACHE_DIR"] = jax.config.values["jax_compilation_cache_dir"]
    command = [sys.executable, "-m", "nnxtrain.train", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def wait_for_step(folder, step: int, seconds: float = 120) -> None:
    """Waits until `metrics.jsonl` has the row of a step."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if f'"kind": "train", "step": {step},' in (folder / "metrics.jsonl").read_text():
                return
        except FileNotFoundError:
            pass
        time.sleep(0.002)
    raise AssertionError(f"step {step} did not come within {seconds} s")


def arrays(folder, step: int | None = None) -> tuple[dict, dict[str, np.ndarray]]:
    """Returns the data position of a checkpoint, the newest by default, and its arrays by item and path."""
    config = load(folder / "config.yml")
    program = make_program(config, devices=jax.devices()[:1])
    state = program.abstract_state()
    with closing(CheckpointStore(folder / "checkpoints", config.checkpoint)) as store:
        saved = store.read(step or store.newest())
        store.restore(saved, state)
    return saved.data, {
        f"{name}/{'/'.join(path)}": np.asarray(leaf) for name in PARTS for path, leaf in flat(state, name).items()
    }


def assert_same_run(folder, want) -> None:
    """Asserts rows, final weights, moments, counters and data position that are equal bit by bit."""
    got_rows, want_rows = rows_of(folder), rows_of(want)
    for name in EXACT:
        assert [row[name] for row in got_rows] == [row[name] for row in want_rows], name
    (got_data, got), (want_data, wanted) = arrays(folder), arrays(want)
    assert got_data == want_data
    assert got.keys() == wanted.keys()
    for path, leaf in wanted.items():
        assert (got[path].dtype, got[path].tobytes()) == (leaf.dtype, leaf.tobytes()), path


def contents(folder) -> dict[str, bytes]:
    """Returns every file of a run directory."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def board_steps(folder) -> dict[str, list[int]]:
    """Returns the steps of each TensorBoard curve in the order of files and records."""
    found: dict[str, list[int]] = {}
    for path in sorted((folder / "tensorboard").iterdir(), key=lambda path: path.name):
        for _, event in records(path):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(event.step)
    return found


def test_the_unbroken_run_is_worth_the_comparison(unbroken):
    """Four epochs, rates that differ at each step, losses that dropout and data move."""
    rows = rows_of(unbroken)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[-1]["epoch"] == 4.0
    assert len({row["learning_rate"] for row in rows}) >= 19
    assert len({row["loss"] for row in rows}) == 20


@pytest.mark.parametrize("first", [7, pytest.param(3, marks=pytest.mark.slow)])
def test_stopped_by_a_lower_number_of_steps(hard, unbroken, tmp_path, first):
    """Data, masks or rates that begin anew show in the next row (B15)."""
    assert guarded(main, [*hard, f"output_dir={tmp_path}", f"steps={first}"]) == 0
    assert guarded(main, [*hard, f"output_dir={tmp_path}"]) == 0
    assert_same_run(tmp_path / "tiny", unbroken)


def test_stopped_by_sigterm(hard, unbroken, tmp_path, capsys):
    """The step in flight is finished, recorded and saved; nothing of it happens twice (B15, B26)."""

    def stop():
        wait_for_step(tmp_path / "tiny", 4)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert guarded(main, [*hard, *SLOWLY, f"output_dir={tmp_path}", "checkpoint.every_steps=0"]) == 75
    thread.join()
    folder = tmp_path / "tiny"
    stopped = len(rows_of(folder))
    assert 4 <= stopped < 20
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(stopped)]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["step"]) == ("preempted", 75, stopped)
    capsys.readouterr()
    assert guarded(main, [*hard, f"output_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert f"resumes  from step {stopped}\n" in out
    assert "eval.every_steps: 1 → 0" in out
    assert_same_run(folder, unbroken)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["resumed_from"], summary["recompiles"]) == ("done", stopped, 0)


@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_stopped_by_kill_9(hard, unbroken, tmp_path, background):
    """Rows beyond the checkpoint give way, curves rise strictly, and the rest is bitwise what it would have been.

    A tear in `metrics.jsonl`, a point of TensorBoard that comes twice or data that begins anew fails here (B15, B27).
    """
    words = (*hard, f"output_dir={tmp_path}", f"checkpoint.background={background}")
    folder = tmp_path / "tiny"
    run = launch(*words, *SLOWLY)
    wait_for_step(folder, 8)
    run.kill()
    assert run.wait() == -signal.SIGKILL
    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    killed = len(rows_of(folder))
    assert 8 <= killed < 20
    saved = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())
    assert saved in (killed - killed % 3, killed - killed % 3 - 3)
    before = rows_of(folder)
    assert guarded(main, [*words]) == 0
    assert_same_run(folder, unbroken)
    rows = rows_of(folder)
    assert [row["step_time_s"] for row in rows[:saved]] == [row["step_time_s"] for row in before[:saved]]
    assert all(row["step_time_s"] != old["step_time_s"] for row, old in zip(rows[saved:], before[saved:], strict=False))
    dropped = [json.loads(line) for line in (folder / "metrics.dropped.jsonl").read_text().splitlines()]
    assert [row["step"] for row in dropped if row["kind"] == "train"] == list(range(saved + 1, killed + 1))
    curves = board_steps(folder)
    assert curves["train/loss"] == list(range(1, 21))
    assert all(one < other for steps in curves.values() for one, other in pairwise(steps))
    every = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert every == sorted(every)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Returns a run of 2 steps, and the loss of its third step when it is not interrupted."""
    place = tmp_path_factory.mktemp("two")
    for name, steps in (("short", 2), ("long", 3)):
        words = ("mesh.data=1", "batch.sequence=16", "schedule.name=constant", "generate.tokens=1")
        assert guarded(main, [str(TINY), *words, f"output_dir={place}", f"run_name={name}", f"steps={steps}"]) == 0
    return place / "short", rows_of(place / "long")[-1]["loss"]


def go_on(short, tmp_path, *words: str) -> int:
    """Copies the run of 2 steps and takes a third step with other words; returns the exit code."""
    shutil.copytree(short, tmp_path / "tiny")
    own = ("mesh.data=1", "batch.sequence=16", "schedule.name=constant", "generate.tokens=1", "steps=3")
    return guarded(main, [str(TINY), *own, f"output_dir={tmp_path}", *words])


def test_a_scanned_run_goes_on_unrolled(two_steps, tmp_path, capsys):
    """The same numbers under other names: the next loss is the same, and the change is told (B14)."""
    short, loss = two_steps
    assert go_on(short, tmp_path, "model.scan_layers=false") == 0
    assert rows_of(tmp_path / "tiny")[-1]["loss"] == pytest.approx(loss, rel=1e-6)
    assert "model.scan_layers: true → false" in capsys.readouterr().out
    assert guarded(main, [str(tmp_path / "tiny" / "config.yml"), "steps=4", "model.scan_layers=true"]) == 0
    assert [row["step"] for row in rows_of(tmp_path / "tiny")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("model.layers=2",), ("stack/layer/", "float32[4, ", "float32[2, ")),
        (("model.layers=6",), ("stack/layer/", "float32[4, ", "float32[6, ")),
        (("model.layers=2", "model.scan_layers=false"), ("stack/layers/2/", "only in the checkpoint")),
        (("model.embed=32",), ("embedding/", ", 64]", ", 32]")),
        (("optimizer.name=sgd",), ("optimizer", "/mu/", "only in the checkpoint")),
        (("model.param_dtype=bfloat16",), ("embedding/", "float32[", "bfloat16[")),
        (("model.tied=true",), ("head/", "only in the checkpoint")),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] else "",
)
def test_another_structure_is_refused_by_path_before_any_compile(two_steps, tmp_path, capsys, words, says):
    """A partial restore trains the rest from noise; a wall of tree text helps nobody (B14)."""
    compiled = CompileLog()
    before = contents(two_steps[0])
    assert go_on(two_steps[0], tmp_path, *words) == 6
    error = capsys.readouterr().err
    for word in (*says, "checkpoints/2"):
        assert word in error
    assert len(error.splitlines()) <= 25
    assert compiled.counts["jit(train_step)"] == 0
    assert contents(tmp_path / "tiny") == before


@pytest.fixture(scope="module")
def ten(corpus, tmp_path_factory):
    """Returns the words and the directory of a finished run of ten steps on the corpus of 40 rows."""
    place = tmp_path_factory.mktemp("ten")
    words = (*SMALL, "model.vocab=384", "data.source=text", *corpus, "schedule.name=cosine")
    assert guarded(main, [*words, f"output_dir={place}", "steps=10"]) == 0
    return words, place / "tiny"


def again(ten, tmp_path, *words: str) -> int:
    """Copies the finished run and starts it with other words; returns the exit code."""
    shutil.copytree(ten[1], tmp_path / "tiny", dirs_exist_ok=True)
    return guarded(main, [*ten[0], f"output_dir={tmp_path}", *words])


def rates(rows, *, steps: int, peak: float = 1e-3) -> list[float]:
    """Returns the documented learning rate of each row of a cosine run of `steps` steps without warm-up."""
    share = [min((row["step"] - 1) / (steps - 1), 1) for row in rows]
    return [peak * (0.1 + 0.9 * (1 + np.cos(np.pi * t)) / 2) for t in share]


def test_more_steps_follow_the_curve_of_the_new_horizon(ten, tmp_path):
    """The rate at each step is that of a run that had asked for 20 from the start (B18)."""
    assert again(ten, tmp_path, "steps=20") == 0
    rows = rows_of(tmp_path / "tiny")
    assert [row["step"] for row in rows] == list(range(1, 21))
    got = [row["learning_rate"] for row in rows]
    np.testing.assert_allclose(got[:10], rates(rows[:10], steps=10), rtol=1e-5)
    np.testing.assert_allclose(got[10:], rates(rows[10:], steps=20), rtol=1e-5)


@pytest.mark.parametrize("steps", [10, 5])
def test_no_more_steps_change_no_file(ten, tmp_path, capsys, steps):
    """Exit 0, no update, and an advice that would do something (B18)."""
    before = contents(ten[1])
    assert again(ten, tmp_path, f"steps={steps}") == 0
    assert contents(tmp_path / "tiny") == before
    out = capsys.readouterr().out
    assert "is finished" in out
    (advice,) = [line for line in out.splitlines() if line.strip().startswith("continue")]
    assert int(advice.split("steps=")[1].split(",")[0]) > 10


def test_another_learning_rate_is_used_and_told(ten, tmp_path, capsys):
    """The new peak holds from the next step on, and the announcement names it (B18)."""
    assert again(ten, tmp_path, "steps=12", "optimizer.learning_rate=2e-3") == 0
    rows = rows_of(tmp_path / "tiny")
    np.testing.assert_allclose(
        [row["learning_rate"] for row in rows[10:]], rates(rows[10:], steps=12, peak=2e-3), rtol=1e-5
    )
    assert "optimizer.learning_rate: 0.001 → 0.002" in capsys.readouterr().out


def test_another_batch_size_goes_on_with_the_next_row(ten, tmp_path):
    """The position is measured in rows: 10 batches of 8, then 16 at a time; none is skipped or repeated (B18)."""
    assert again(ten, tmp_path, "steps=12", "batch.global_size=16") == 0
    rows = rows_of(tmp_path / "tiny")
    assert [row["tokens"] for row in rows] == [8 * 16] * 10 + [16 * 16] * 2
    assert [row["epoch"] for row in rows[9:]] == [80 / 40, 96 / 40, 112 / 40]
    data, state = arrays(tmp_path / "tiny")
    assert data == {"row": 112, "skipped": []}
    assert state["guard/step"] == state["optimizer/step"] == 12


def test_another_seed_in_a_finished_directory_is_told(ten, tmp_path, capsys):
    """Neither a silent continuation of a stranger's run nor a silent nothing (B19)."""
    before = contents(ten[1])
    assert again(ten, tmp_path, "steps=10", "seed=1") == 0
    out = capsys.readouterr().out
    assert "is finished" in out
    assert "seed: 0 → 1" in out
    assert "run_name=" in out
    assert contents(tmp_path / "tiny") == before
    assert again(ten, tmp_path, "steps=11", "seed=1") == 0
    out = capsys.readouterr().out
    assert "resumes  from step 10" in out
    assert "seed: 0 → 1" in out
    assert again(ten, tmp_path, "steps=11", "checkpoint.resume=never") == 2


def test_an_explicit_step_goes_back_and_saves_again(tmp_path, capsys):
    """Saves below the newest step were skipped elsewhere; what was there before is set aside, not deleted (B19)."""
    words = (*SMALL, f"output_dir={tmp_path}", "checkpoint.keep_last=9", "checkpoint.every_steps=2")
    assert guarded(main, [*words, "steps=10"]) == 0
    folder = tmp_path / "tiny"
    old = {step: (folder / "checkpoints" / str(step)).stat().st_mtime_ns for step in (2, 4, 6, 8, 10)}
    assert guarded(main, [*words, "steps=8", "checkpoint.resume=4", "optimizer.learning_rate=2e-3"]) == 0
    assert "checkpoints of steps [6, 8, 10] are in checkpoints.dropped" in capsys.readouterr().out
    new = {int(path.name): path.stat().st_mtime_ns for path in (folder / "checkpoints").iterdir()}
    assert sorted(new) == [2, 4, 6, 8]
    assert [new[step] > old[step] for step in (2, 4, 6, 8)] == [False, False, True, True]
    assert sorted(path.name for path in (folder / "checkpoints.dropped").iterdir()) == ["10", "6", "8"]
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 9))
    assert guarded(main, [*words, "steps=9", "checkpoint.resume=7"]) == 6
    assert "[2, 4, 6, 8]" in capsys.readouterr().err


def test_must_refuses_a_directory_without_a_checkpoint(tmp_path, capsys):
    """Nothing is written where nothing was found."""
    assert guarded(main, [*SMALL, f"output_dir={tmp_path}", "checkpoint.resume=must"]) == 6
    assert "checkpoint.resume=must" in capsys.readouterr().err
    assert contents(tmp_path) == {}


def test_a_second_process_is_refused_and_the_first_goes_on(tmp_path, capsys):
    """Two live runs in one directory would interleave rows and checkpoints (B19)."""
    words = (*SMALL, f"output_dir={tmp_path}", "steps=1000000", "checkpoint.every_steps=500")
    first = launch(*words)
    wait_for_step(tmp_path / "tiny", 20)
    assert guarded(main, [*words]) == 2
    error = capsys.readouterr().err
    assert f"process {first.pid}" in error
    assert first.poll() is None
    done = len(rows_of(tmp_path / "tiny"))
    wait_for_step(tmp_path / "tiny", done + 20)
    first.terminate()
    assert first.wait(60) == 75, first.stderr.read()
    steps = [row["step"] for row in rows_of(tmp_path / "tiny")]
    assert steps == list(range(1, len(steps) + 1))
    _, state = arrays(tmp_path / "tiny")
    assert state["guard/step"] == len(steps)


@pytest.mark.parametrize("damage", ["truncated array", pytest.param("no metadata", marks=pytest.mark.slow)])
def test_a_run_names_the_damaged_checkpoint_and_goes_on_from_the_one_before(ten, tmp_path, capsys, damage):
    """The newest is what a crash or a full disk left; strays beside it are no checkpoints."""
    assert again(ten, tmp_path, "steps=12") == 0
    folder = tmp_path / "tiny"
    broken = folder / "checkpoints" / "12"
    if damage == "no metadata":
        shutil.rmtree(broken / "meta")
    else:
        for path in (broken / "model").rglob("*"):
            if path.is_file() and path.parent.name == "d":
                os.truncate(path, path.stat().st_size // 2)
    (folder / "checkpoints" / "notes.txt").write_text("mine")
    (folder / "checkpoints" / "99.orbax-checkpoint-tmp").mkdir()
    capsys.readouterr()
    assert guarded(main, [*ten[0], f"output_dir={tmp_path}", "steps=13"]) == 0
    out = capsys.readouterr().out
    assert "skipped  step 12" in out
    assert "resumes  from step 10" in out
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 14))
    assert [row["epoch"] for row in rows] == [step * 8 / 40 for step in range(1, 14)]
    assert arrays(folder)[1]["guard/step"] == 13
