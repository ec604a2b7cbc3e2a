"""A run that is told to stop, or has to: signals at every moment, steps that are not finite, a run that hangs."""

import functools
import json
import math
import os
import random
import signal
import string
import subprocess
import sys
import threading
import time
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxtrain.build.program import make_program
from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.cli.command import guarded
from nnxtrain.config.load import load
from nnxtrain.metrics.rewind import records
from nnxtrain.models.decoder import Decoder
from nnxtrain.models.families.llama import llama
from nnxtrain.models.families.table import MODELS
from nnxtrain.train import main
from tests.support import ROOT, TINY, rows_of, run_module

SMALL = (str(TINY), "mesh.data=1", "model.layers=1", "model.embed=32", "batch.sequence=16", "generate.tokens=1")
CONSTANT = ("schedule.name=constant",)  # the horizon of the run that goes on is another
EXACT = ("step", "loss", "grad_norm", "learning_rate", "epoch")
POISON = "~"

pytestmark = [
    pytest.mark.slow,  # real processes that are stopped at every kind of moment
    pytest.mark.usefixtures("quick_compiles"),
]


def launch(*words: str) -> subprocess.Popen:
    """Starts a run in a process of its own, which compiles as this one does."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "NO_COLOR": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"],
    }
    command = [sys.executable, "-m", "nnxtrain.train", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def wait_until(found, seconds: float = 120) -> None:
    """Waits until `found()` holds."""
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def has_step(folder, step: int) -> bool:
    """Tells whether the row of a step is on disk."""
    path = folder / "metrics.jsonl"
    return path.exists() and f'"kind": "train", "step": {step},' in path.read_text()


def whole_steps(folder) -> list[int]:
    """Returns the steps of the checkpoints of a run."""
    place = folder / "checkpoints"
    return sorted(int(path.name) for path in place.iterdir() if path.name.isdecimal()) if place.exists() else []


def state_of(folder):
    """Returns the newest checkpoint of a run: what it says, and its state."""
    config = load(folder / "config.yml")
    program = make_program(config, devices=jax.devices()[:1])
    state = program.abstract_state()
    with closing(CheckpointStore(folder / "checkpoints", config.checkpoint)) as store:
        saved = store.read(store.newest())
        store.restore(saved, state)
    return saved, state


def weights_of(folder) -> list[bytes]:
    """Returns the bytes of every array of the newest checkpoint."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nnx.state(state_of(folder)[1]))]


def assert_goes_on_as_if_unbroken(words, place, tmp_path, *, more: int = 2) -> None:
    """Takes `more` steps after a stop, and as many as that in a run of its own: rows and state are bitwise equal."""
    done = max(whole_steps(place / "tiny"), default=0)
    last = (f"steps={done + more}", "eval.every_steps=0", "eval.max_batches=2")
    assert guarded(main, [*words, *last, f"output_dir={place}"]) == 0
    assert guarded(main, [*words, *last, f"output_dir={tmp_path}/unbroken"]) == 0
    got, want = rows_of(place / "tiny"), rows_of(tmp_path / "unbroken" / "tiny")
    assert [[row[name] for name in EXACT] for row in got] == [[row[name] for name in EXACT] for row in want]
    assert weights_of(place / "tiny") == weights_of(tmp_path / "unbroken" / "tiny")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> tuple[str, ...]:
    """Returns the words of a corpus with a held-out set that takes seconds to read."""
    place = tmp_path_factory.mktemp("held_out")
    draw = random.Random(0)
    for name, size in (("a", 2000), ("b", 120_000)):
        (place / f"{name}.txt").write_text("".join(draw.choices(string.ascii_letters, k=size)))
    paths = (f"data.path={place}/a.txt", f"data.validation_path={place}/b.txt", f"data.cache_dir={place}/cache")
    return (*paths, "data.source=text", "model.vocab=384", "eval.global_size=1")


BIG = ("model.embed=512", "model.layers=2", "checkpoint.every_steps=2", "steps=1000")


def in_compile(folder) -> bool:
    """Tells whether the run is past its first lines; what follows is the compilation of the step."""
    return (folder / "train.log").exists()


def in_save(folder) -> bool:
    """Tells whether a save has begun that is not whole yet."""
    place = folder / "checkpoints"
    return place.exists() and any(path.name.startswith("2.") for path in place.iterdir())


# moment → words of the run, what shows that it has come, seconds until the signal, whether it may be saved
MOMENTS = {
    "compile": (
        ("model.layers=24", "model.scan_layers=false", "debug.compilation_cache=null", "steps=1000"),
        in_compile,
        1.0,
    ),
    "step": (("steps=1000000",), lambda folder: has_step(folder, 50), 0.0),
    "evaluation": (("steps=1000000", "eval.every_steps=5"), lambda folder: has_step(folder, 5), 1.0),
    "save": ((*BIG, "checkpoint.background=false"), in_save, 0.0),
    "save in the background": (BIG, in_save, 0.0),
}
DEFAULT = {("compile", 1), ("evaluation", 2), ("save in the background", 2), ("step", 1)}
CASES = [
    pytest.param(moment, signals, marks=[] if (moment, signals) in DEFAULT else pytest.mark.slow)
    for moment in MOMENTS
    for signals in (1, 2)
]


@pytest.mark.parametrize(("moment", "signals"), CASES)
def test_sigterm_ends_the_run_in_good_order_at_every_moment(moment, signals, held_out, tmp_path):
    """A flag that is looked at between steps alone is swallowed by compile, evaluation and save (B26).

    One signal ends with 75; a second one 0.2 s later with 143, or with 75 if the run had ended before. The newest
    checkpoint is whole, no partial folder counts, and going on gives what an unbroken run gives.
    """
    own, has_come, delay_s = MOMENTS[moment]
    words = (*SMALL, *CONSTANT, *(held_out if moment == "evaluation" else ()), *own)
    place = tmp_path / "stopped"
    folder = place / "tiny"
    run = launch(*words, f"output_dir={place}")
    wait_until(lambda: has_come(folder))
    time.sleep(delay_s)
    began = time.monotonic()
    run.send_signal(signal.SIGTERM)
    if signals == 2:
        time.sleep(0.2)
        run.send_signal(signal.SIGTERM)
    out, error = run.communicate(timeout=60)
    took_s = time.monotonic() - began
    # a signal that meets the interpreter on its way out ends the process by itself, which a shell reports as 143 too
    assert run.returncode in ((75,) if signals == 1 else (75, 143, -signal.SIGTERM)), error
    assert error == "" or (signals == 2 and error == "SIGTERM: nothing to save; exiting\n")
    assert "SIGTERM" in out
    assert took_s < 20
    if signals == 1 and moment != "compile":
        assert whole_steps(folder)[-1] == rows_of(folder)[-1]["step"], "something was left unsaved"
    if moment == "compile":
        assert whole_steps(folder) == []
        assert took_s < 5
    if moment == "evaluation":
        assert rows_of(folder, "eval") == []
        assert len(rows_of(folder)) == 5
        assert took_s < 10
    if run.returncode == 75:
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["exit_code"]) == ("preempted", 75)
    if whole_steps(folder):
        saved, state = state_of(folder)
        assert saved.step == int(state.step[...]) == whole_steps(folder)[-1]
    if moment != "compile":
        assert_goes_on_as_if_unbroken(words, place, tmp_path)


def stop_when(found, number: int = signal.SIGTERM) -> threading.Thread:
    """Sends this process a signal once `found()` holds."""

    def stop():
        wait_until(found)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


def test_ctrl_c_is_a_stop_signal_too(tmp_path):
    """A traceback of KeyboardInterrupt in the middle of a step would lose it."""
    words = (*SMALL, *CONSTANT, f"output_dir={tmp_path}")
    thread = stop_when(lambda: has_step(tmp_path / "tiny", 5), signal.SIGINT)
    assert guarded(main, [*words, "steps=1000000"]) == 75
    thread.join()
    assert whole_steps(tmp_path / "tiny") == [rows_of(tmp_path / "tiny")[-1]["step"]]


def test_a_signal_in_the_last_evaluation_leaves_it_to_the_next_start(held_out, tmp_path):
    """The steps are saved, the evaluation is not done: a run that calls itself done would never do it (B26)."""
    words = (*SMALL, *held_out, f"output_dir={tmp_path}", "steps=3")
    folder = tmp_path / "tiny"

    def in_last_evaluation() -> bool:
        if not has_step(folder, 3):
            return False
        time.sleep(0.5)
        return True

    thread = stop_when(in_last_evaluation)
    code = guarded(main, [*words])
    thread.join()
    assert rows_of(folder, "eval") == [], "the signal came too late"
    assert whole_steps(folder) == [3]
    assert code == 75
    assert guarded(main, [*words, "eval.max_batches=2"]) == 0
    assert [row["step"] for row in rows_of(folder, "eval")] == [3]
    assert len(rows_of(folder)) == 3


def test_a_signal_between_two_held_out_sets_leaves_the_other_to_the_next_start(held_out, tmp_path):
    """One set of two is not the evaluation of that step."""
    path = next(word for word in held_out if word.startswith("data.validation_path=")).partition("=")[2]
    short = tmp_path / "short.txt"
    short.write_text("a few words that take no time")
    words = (*SMALL, *held_out, f"output_dir={tmp_path}", "steps=6", "eval.every_steps=3")
    words += (f"data.validation_path=[quick={short},slow={path}]",)
    folder = tmp_path / "tiny"
    thread = stop_when(lambda: (folder / "metrics.jsonl").exists() and bool(rows_of(folder, "eval")))
    assert guarded(main, [*words]) == 75
    thread.join()
    assert [(row["step"], row["name"]) for row in rows_of(folder, "eval")] == [(3, "quick")]
    assert guarded(main, [*words, "eval.max_batches=2"]) == 0
    found = [(row["step"], row["name"]) for row in rows_of(folder, "eval")]
    assert found.count((3, "slow")) == 1
    assert {(6, "quick"), (6, "slow")} <= set(found)


class Poisoned(Decoder):
    """A decoder that is not finite for a row that holds one letter."""

    def hidden(self, batch, drop):
        """Maps a batch to activations, NaN where the letter stands in the row."""
        is_bad = (batch["inputs"] == ord(POISON)).any(-1)[:, None, None]
        hidden, terms = super().hidden(batch, drop)
        return jnp.where(is_bad, jnp.nan, hidden), terms


@pytest.fixture
def poisoned(tmp_path, monkeypatch) -> tuple[str, ...]:
    """Returns the words of a run whose sixth batch, and no other of the first 12, is not finite."""
    monkeypatch.setitem(MODELS, "decoder", functools.partial(Poisoned, llama))
    letters = random.Random(0).choices(string.ascii_letters, k=100 * 16 - 1)
    letters[16 * 43 + 5] = POISON  # row 43 is of the batch of rows 40 to 48
    (tmp_path / "a.txt").write_text("".join(letters))
    data = ("data.source=text", f"data.path={tmp_path}/a.txt", f"data.cache_dir={tmp_path}/cache", "data.shuffle=false")
    return (*SMALL, *CONSTANT, *data, "model.vocab=384", f"output_dir={tmp_path}", "steps=12", "log.every_steps=1")


def test_abort_names_the_step_and_keeps_what_was_good(poisoned, tmp_path, capsys):
    """The weights before the bad step are saved though no save was due, and nothing later is (B11)."""
    assert guarded(main, [*poisoned, "checkpoint.every_steps=4"]) == 4
    error = capsys.readouterr().err
    assert "step 6:" in error
    assert "Traceback" not in error
    folder = tmp_path / "tiny"
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] is None for row in rows] == [False] * 5 + [True]
    assert whole_steps(folder) == [4, 5]
    saved, state = state_of(folder)
    assert saved.data == {"row": 40, "skipped": []}
    assert int(state.step[...]) == int(state.optimizer.step[...]) == 5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state((state.model, state.optimizer))))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["step"]) == ("failed", 4, 5)
    assert "step 6" in summary["reason"]


def test_an_aborted_run_meets_the_same_step_again(poisoned, tmp_path):
    """Neither the flag that was saved nor a row that was left out may change what happens on the next start."""
    assert guarded(main, [*poisoned]) == 4
    assert guarded(main, [*poisoned]) == 4
    folder = tmp_path / "tiny"
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4, 5, 6]
    assert whole_steps(folder) == [5]
    assert guarded(main, [*poisoned, "debug.on_nonfinite=skip"]) == 0
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 13))


def test_saving_every_step_never_rotates_the_good_ones_away(tmp_path, capsys):
    """One bad step, three saves of NaN, and auto-resume reloads them (B11)."""
    words = (*SMALL, *CONSTANT, f"output_dir={tmp_path}", "checkpoint.every_steps=1", "checkpoint.keep_last=3")
    assert guarded(main, [*words, "optimizer.learning_rate=1", "steps=5"]) == 0
    steep = ("optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "steps=15")
    capsys.readouterr()
    assert guarded(main, [*words, *steep]) == 4
    folder = tmp_path / "tiny"
    bad = rows_of(folder)[-1]["step"]
    assert f"step {bad}:" in capsys.readouterr().err
    assert whole_steps(folder)[-1] < bad
    _, state = state_of(folder)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state((state.model, state.optimizer))))


def test_skip_counts_and_goes_on(poisoned, tmp_path):
    """Weights stay, the batch is consumed, the optimizer's count is one behind; `null` is read back on resume (B11)."""
    words = (*poisoned, "debug.on_nonfinite=skip")
    assert guarded(main, [*words]) == 0
    folder = tmp_path / "tiny"
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if row.get("skipped")] == [6]
    saved, state = state_of(folder)
    assert saved.data == {"row": 96, "skipped": []}
    assert int(state.optimizer.step[...]) == 11
    assert int(state.guard.skipped[...]) == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["skipped_steps"]) == ("done", 1)
    for steps in (6, 8, 12):
        assert guarded(main, [*words, "run_name=parts", f"steps={steps}"]) == 0
    parts = rows_of(tmp_path / "parts")
    assert [[row[name] for name in EXACT] for row in parts] == [[row[name] for name in EXACT] for row in rows]
    assert weights_of(tmp_path / "parts") == weights_of(folder)
    assert json.loads((tmp_path / "parts" / "summary.json").read_text())["skipped_steps"] == 1


def test_a_run_that_ends_with_a_step_left_out_writes_json(poisoned, tmp_path):
    """`NaN` is no JSON: other readers refuse the whole file."""
    assert guarded(main, [*poisoned, "debug.on_nonfinite=skip", "steps=6"]) == 0

    def refuse(word: str):
        raise ValueError(word)

    for name in ("summary.json", "metrics.jsonl"):
        text = (tmp_path / "tiny" / name).read_text()
        for whole in text.splitlines() if name.endswith("l") else [text]:
            json.loads(whole, parse_constant=refuse)


def test_too_many_skips_in_a_row_end_the_run(tmp_path, capsys):
    """A run that skips for ever looks alive and learns nothing (B11)."""
    words = (*SMALL, *CONSTANT, f"output_dir={tmp_path}", "steps=40", "debug.on_nonfinite=skip")
    steep = ("optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "optimizer.name=sgd")
    assert guarded(main, [*words, *steep, "debug.nonfinite_limit=4"]) == 4
    rows = rows_of(tmp_path / "tiny")
    skipped = [row["step"] for row in rows if row.get("skipped")]
    assert skipped[-4:] == [row["step"] for row in rows[-4:]]
    error = capsys.readouterr().err
    assert f"step {rows[-1]['step']}:" in error
    assert "debug.nonfinite_limit" in error
    _, state = state_of(tmp_path / "tiny")
    assert int(state.guard.skipped[...]) == 3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state((state.model, state.optimizer))))


def test_a_run_whose_rates_are_absurd_still_gets_its_report(tmp_path):
    """Curves that are flat, huge or hold no number must not end the run with a traceback."""
    words = (*SMALL, *CONSTANT, f"output_dir={tmp_path}", "steps=6", "debug.on_nonfinite=skip")
    steep = ("optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "optimizer.name=sgd")
    assert guarded(main, [*words, *steep, "debug.nonfinite_limit=100"]) == 0
    assert (tmp_path / "tiny" / "report.html").exists()


@pytest.fixture
def rolled_back(poisoned, tmp_path, capsys):
    """Returns the words and the directory of a run that rolled back, and what it printed."""
    words = (*poisoned, "debug.on_nonfinite=rollback", "checkpoint.every_steps=2", "checkpoint.keep_last=9")
    assert guarded(main, [*words]) == 0
    return words, tmp_path / "tiny", capsys.readouterr().out


def test_rollback_goes_back_and_leaves_the_rows_out(rolled_back):
    """From the last good checkpoint, step 4, on: rows 32 to 40 again, 40 to 48 never, and steps rise strictly (B11)."""
    _, folder, out = rolled_back
    assert "rollback step 6:" in out
    assert "rows 40 to 48" in out
    assert "resumes  from step 4" in out
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert [row["epoch"] for row in rows] == [rows_done / 100 for rows_done in (8, 16, 24, 32, 40, *range(56, 105, 8))]
    dropped = [json.loads(line) for line in (folder / "metrics.dropped.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"] is None) for row in dropped] == [(5, False), (6, True)]
    saved, state = state_of(folder)
    assert saved.data == {"row": 104, "skipped": [[40, 48]]}
    assert int(state.step[...]) == int(state.optimizer.step[...]) == 12
    assert int(state.guard.bad_step[...]) == -1
    assert whole_steps(folder) == [2, 4, 6, 8, 10, 12]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["recompiles"], summary["resumed_from"]) == ("done", 0, None)


def test_curves_of_a_run_that_rolled_back_rise_strictly(rolled_back):
    """Points of the steps that were taken back, or none of those before, because one file replaced the other (B27)."""
    steps = [
        event.step
        for path in sorted((rolled_back[1] / "tensorboard").iterdir(), key=lambda path: path.name)
        for _, event in records(path)
        for value in event.summary.value
        if value.tag == "train/loss"
    ]
    assert steps == list(range(1, 13))


def test_a_rolled_back_run_goes_on_without_the_rows(rolled_back, tmp_path, capsys):
    """The ranges are part of the position: a restart must not read them again (B15)."""
    words, folder, _ = rolled_back
    for steps in (8, 12):
        assert guarded(main, [*words, "run_name=parts", f"steps={steps}"]) == 0
    assert "rollback" in capsys.readouterr().out
    assert guarded(main, [*words, "run_name=parts", "steps=12", "checkpoint.resume=4"]) == 0
    got, want = rows_of(tmp_path / "parts"), rows_of(folder)
    assert [[row[name] for name in EXACT] for row in got] == [[row[name] for name in EXACT] for row in want]
    assert weights_of(tmp_path / "parts") == weights_of(folder)


def test_rollback_reloads_the_newest_checkpoint_whatever_the_run_was_told_to_resume_from(poisoned, tmp_path, capsys):
    """`checkpoint.resume=STEP` is for the start alone; going back there again throws good steps away."""
    words = (*poisoned, "debug.on_nonfinite=rollback", "checkpoint.every_steps=2", "checkpoint.keep_last=9")
    assert guarded(main, [*words, "steps=3"]) == 0
    capsys.readouterr()
    assert guarded(main, [*words, "checkpoint.resume=2"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("resumes")] == [
        "resumes  from step 2",
        "resumes  from step 4",
    ]
    assert len(rows_of(tmp_path / "tiny")) == 12


def test_rollback_gives_up_without_a_checkpoint_or_when_it_helps_no_more(poisoned, tmp_path, capsys):
    """A run that is broken at its root must end, and say why."""
    assert guarded(main, [*poisoned, "debug.on_nonfinite=rollback"]) == 4
    error = capsys.readouterr().err
    assert "step 6" in error
    assert "no checkpoint to go back to" in error
    words = (*poisoned, "run_name=often", "data.epochs=5", "steps=60", "checkpoint.every_steps=2")
    assert guarded(main, [*words, "debug.on_nonfinite=rollback", "debug.nonfinite_limit=2"]) == 4
    assert "2 rollbacks before" in capsys.readouterr().err
    assert not (tmp_path / "often" / "checkpoints.dropped").exists()


def test_a_run_that_stands_still_is_told_and_ended(tmp_path):
    """The stacks of all threads are in the run directory; with `debug.hang_abort` a scheduler can start it again."""
    words = (*SMALL, f"output_dir={tmp_path}", "model.layers=24", "model.scan_layers=false", "eval.every_steps=2")
    words += ("debug.compilation_cache=null", "debug.hang_timeout_s=0.5", "debug.hang_abort=true")
    ended = run_module("train", *words)
    assert ended.returncode == 1
    assert "debug.hang_timeout_s" in ended.stdout
    stacks = (tmp_path / "tiny" / "stacks_001.txt").read_text()
    assert "eval_loop.py" in stacks  # the compilation of the evaluation takes longer than the limit
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert summary["reason"]
