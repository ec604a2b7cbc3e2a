"""Whole runs with traces: the same numbers, rows that say so, and endings that a trace does not change."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.annotations import NAMES
from nnxtrain.build.program import make_program
from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.config.load import load
from nnxtrain.profiling.origins import origins
from nnxtrain.profiling.trace import digest_of, trace_files
from nnxtrain.run.run import execute
from tests.support import TINY, rows_of, run_module

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = (
    "mesh.data=1", "model.layers=1", "model.embed=32", "batch.sequence=16", "generate.tokens=1", "batch.accum_steps=4",
    "eval.max_batches=1", "schedule.name=constant",
)  # fmt: skip
B44 = ("profile.enabled=true", "profile.skip_first=2", "profile.wait=1", "profile.active=2", "profile.repeat=2")
TIMES = ("step_time_s", "data_wait_s", "tokens_per_s", "profiled")
PARTS = {
    "embedding", "layer/norm", "layer/attention/project", "layer/attention/project/rotate", "layer/attention/attend",
    "layer/mlp", "norm", "head", "loss", "accumulate", "grad_norm", "guard", "optimizer",
}  # fmt: skip


def train(place, *words: str, code: int = 0, on_trace_ready=None) -> Path:
    """Runs the small model in `place`; returns the run directory."""
    config = load(TINY, [*SMALL, *words, f"output_dir={place}"])
    folder = place / "tiny"
    assert execute(config, folder, began=time.monotonic(), on_trace_ready=on_trace_ready) == code
    return folder


def windows_of(folder: Path) -> list[str]:
    """Returns the windows of a run."""
    return sorted(path.name for path in (folder / "profile").iterdir()) if (folder / "profile").exists() else []


def steps_of(folder: Path, window: str) -> list[int]:
    """Returns the steps in a trace of a run."""
    (file,) = trace_files(folder / "profile" / window)
    return [step.step for step in digest_of(file).steps]


def weights_of(folder: Path) -> list[bytes]:
    """Returns the bytes of every array of the newest checkpoint."""
    config = load(folder / "config.yml")
    program = make_program(config, devices=jax.devices()[:1])
    state = program.abstract_state()
    store = CheckpointStore(folder / "checkpoints", config.checkpoint)
    store.restore(store.read(store.newest()), state)
    store.close()
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nnx.state(state))]


def losses_of(folder: Path) -> list[dict]:
    """Returns the rows of a run without what takes time."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows_of(folder)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """Returns the directory of a run without traces."""
    return train(tmp_path_factory.mktemp("plain"), "steps=14")


@pytest.fixture(scope="module")
def infos() -> list:
    """What the hook of `traced` got; it raises each time."""
    return []


@pytest.fixture(scope="module")
def traced(tmp_path_factory, infos) -> Path:
    """Returns the directory of the same run with the windows of B44, and with saves and evaluations."""

    def hook(info):
        infos.append(info)
        raise LookupError("of the hook")

    saves = ("checkpoint.every_steps=6", "checkpoint.keep_last=3")
    words = ("steps=14", *saves, "eval.every_steps=9", "log.every_steps=1", *B44)
    return train(tmp_path_factory.mktemp("traced"), *words, on_trace_ready=hook)


def test_windows_cover_the_steps_that_were_asked_for(traced):
    """Two folders, steps 4 to 5 and 8 to 9, counted in updates and not in microbatches (B44)."""
    assert windows_of(traced) == ["step_00000004", "step_00000008"]
    assert [steps_of(traced, window) for window in windows_of(traced)] == [[4, 5], [8, 9]]


def test_numbers_are_those_of_an_untraced_run(traced, plain):
    """Losses and final weights, bit for bit; no folder where nothing is traced."""
    assert losses_of(traced) == losses_of(plain)
    assert weights_of(traced) == weights_of(plain)
    assert windows_of(plain) == []


def test_rows_of_traced_steps_say_so_and_no_rate_holds_them(traced):
    """Row `n` is step `n - 1`; the steps that warm up are traced too."""
    rows = rows_of(traced)
    assert [row["step"] - 1 for row in rows if row.get("profiled")] == [3, 4, 5, 7, 8, 9]
    summary = json.loads((traced / "summary.json").read_text())
    times = [row["step_time_s"] for row in rows if not row.get("profiled")]
    assert summary["median_step_time_s"] == pytest.approx(np.median(times))
    assert summary["tokens_per_s"] == pytest.approx(8 * 16 * len(times) / sum(times))
    lines = [line for line in (traced / "train.log").read_text().splitlines() if line.startswith("step ")]
    assert [number for number, line in enumerate(lines) if "traced" in line] == [3, 4, 5, 7, 8, 9]
    assert all("tok/s" in line for line in lines if "traced" not in line)


def test_a_hook_that_raises_ends_nothing(traced, infos):
    """It was told of both windows; the log says what it raised."""
    assert [(info.cycle, info.first_step, info.last_step, info.partial) for info in infos] == [
        (0, 4, 5, False),
        (1, 8, 9, False),
    ]
    assert infos[0].profile_data.find_plane_with_name("/host:CPU") is not None
    assert (traced / "train.log").read_text().count("on_trace_ready failed: of the hook") == 2
    assert json.loads((traced / "summary.json").read_text())["status"] == "done"


def test_annotations_name_what_the_host_does(traced):
    """One a step of what every step does; the evaluation after step 9 lies inside the second window."""
    (file,) = trace_files(traced / "profile" / "step_00000008")
    calls = {total.name: total.calls for total in digest_of(file).annotations}
    assert calls == {"train": 2, "data_wait": 2, "baseline_cycle": 2, "metrics_wait": 2, "log": 2, "eval": 1}
    assert set(calls) == {"train", "eval", *NAMES}  # the benchmark pays for what a step enters


def test_compiled_code_is_named_as_the_model(traced):
    """Every part is there, forward and backward, and the work of the device is in the trace."""
    (file,) = trace_files(traced / "profile" / "step_00000004")
    found = set(origins(file.read_bytes())["jit_train_step"].values())
    assert {origin.part for origin in found} >= PARTS
    # a trace knows every program of the process, such as a `train_step` with remat of another test
    assert {origin.direction for origin in found if origin.part == "layer/mlp"} >= {"forward", "backward"}
    digest = digest_of(file)
    assert {part.name for part in digest.parts} >= {"layer/mlp", "layer/attention/attend", "optimizer"}
    assert all(operation.calls % 2 == 0 for operation in digest.operations)


def test_a_run_that_goes_on_counts_anew(traced, tmp_path):
    """The rule for a resume at step 6: its first window is of its own steps 4 to 5, the run's 10 to 11."""
    shutil.copytree(traced, tmp_path / "tiny")
    folder = train(tmp_path, "steps=20", "checkpoint.resume=6", *B44)
    assert windows_of(folder) == ["step_00000004", "step_00000008", "step_00000010", "step_00000014"]
    assert steps_of(folder, "step_00000010") == [10, 11]


def test_a_resumed_run_without_a_window_says_so_and_trains(plain, tmp_path):
    """Case 6: one line, exit code 0, no folder."""
    shutil.copytree(plain, tmp_path / "tiny")
    folder = train(tmp_path, "steps=16", "profile.enabled=true", "profile.skip_first=10")
    assert "no window: its first step would be 25, and the run has 16" in (folder / "train.log").read_text()
    assert windows_of(folder) == []


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path, plain):
    """A file where `profile/` should be: exit code 0, one line, and the same numbers."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "profile").write_text("")
    folder = train(tmp_path, "steps=14", "profile.enabled=true", "profile.repeat=0")
    assert losses_of(folder) == losses_of(plain)
    assert (folder / "train.log").read_text().count("the run continues without traces") == 1
    assert (folder / "checkpoints" / "14").is_dir()


@pytest.mark.slow
def test_a_signal_while_a_window_is_open(tmp_path):
    """Case 12: the request inside the window is ignored; then the trace is partial, the step saved, the code 75."""
    folder = tmp_path / "tiny"

    def act() -> None:
        rows, request = folder / "metrics.jsonl", folder / "PROFILE_NOW"
        while not (rows.exists() and '"step": 3,' in rows.read_text()):
            time.sleep(0.002)
        request.touch()
        while request.exists():
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=act)
    thread.start()
    train(tmp_path, "steps=100000", "profile.enabled=true", "profile.warmup=0", "profile.active=90000", code=75)
    thread.join()
    log = (folder / "train.log").read_text()
    assert log.count("PROFILE_NOW is ignored: a window is open") == 1
    (window,) = windows_of(folder)
    manifest = json.loads((folder / "profile" / window / "manifest.json").read_text())
    done = rows_of(folder)[-1]["step"]
    assert manifest["partial"]
    assert (manifest["first_step"], manifest["last_step"]) == (1, done - 1)
    assert steps_of(folder, window) == list(range(1, done))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(done)]


@pytest.mark.slow
def test_three_steps_of_the_smallest_run_stay_small(tmp_path):
    """Less than 5 MB for `configs/tiny.yml`, in a process of its own: a trace holds all programs of its process."""
    words = ("steps=6", "profile.enabled=true", "generate.tokens=1", "eval.max_batches=1", "checkpoint.enabled=false")
    ended = run_module("train", str(TINY), f"output_dir={tmp_path}", *words)
    assert ended.returncode == 0, ended.stderr
    files = [path for path in (tmp_path / "tiny" / "profile").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 5e6
    names = {path.name for path in (tmp_path / "tiny" / "profile" / "step_00000002" / "process_0000").iterdir()}
    assert names == {"plugins", "summary.json", "summary.txt"}
