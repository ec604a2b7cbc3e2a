"""A run that an error ends: the error is the one that is named, and what was done is saved."""

import json
import resource
import shutil
import signal
import subprocess
from contextlib import closing, contextmanager

import jax
import numpy as np
import pytest
from flax import nnx

from nnxtrain.build.program import make_program
from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.cli.command import guarded
from nnxtrain.config.load import load
from nnxtrain.engine.single import SingleEngine
from nnxtrain.errors import NonFiniteError
from nnxtrain.host.console import Console
from nnxtrain.loops.train_loop import run_loop
from nnxtrain.metrics.writers import RowWriter
from nnxtrain.train import main
from tests.support import TINY, rows_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = (str(TINY), "mesh.data=1", "model.layers=1", "model.embed=32", "batch.sequence=16", "generate.tokens=1")
SMALL += ("schedule.name=constant",)  # the horizon of the run that goes on is another
EXACT = ("step", "loss", "grad_norm", "learning_rate", "epoch")


def steps_saved(folder) -> list[int]:
    """Returns the steps of the checkpoints of a run."""
    place = folder / "checkpoints"
    return sorted(int(path.name) for path in place.iterdir() if path.name.isdecimal()) if place.exists() else []


def newest(folder) -> tuple[dict, list[bytes]]:
    """Returns the data position and the bytes of every array of the newest checkpoint."""
    config = load(folder / "config.yml")
    state = make_program(config, devices=jax.devices()[:1]).abstract_state()
    with closing(CheckpointStore(folder / "checkpoints", config.checkpoint)) as store:
        saved = store.read(store.newest())
        store.restore(saved, state)
    return saved.data, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nnx.state(state))]


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Returns the directory of a run of six steps that nothing disturbed."""
    place = tmp_path_factory.mktemp("six")
    assert guarded(main, [*SMALL, f"output_dir={place}", "steps=6"]) == 0
    return place / "tiny"


def assert_same_run(folder, want) -> None:
    """Asserts that rows, newest weights, moments and data position are those of another run, bit by bit."""
    got, wanted = rows_of(folder), rows_of(want)
    assert [[row[name] for name in EXACT] for row in got] == [[row[name] for name in EXACT] for row in wanted]
    assert newest(folder) == newest(want)


def fails_at(step: int, what: Exception, *, takes_state: bool):
    """Returns an engine's `step` that fails at a step, before or after it has consumed the state."""
    whole = SingleEngine.step

    def failing(engine, batch):
        engine.taken = getattr(engine, "taken", 0) + 1
        if engine.taken == step:
            if takes_state:
                for leaf in engine._leaves:
                    leaf.delete()
            raise what
        return whole(engine, batch)

    return failing


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("takes_state", [False, True])
def test_an_error_in_a_step_is_the_one_that_is_named(six, tmp_path, monkeypatch, capsys, step, takes_state):
    """Looking at the donated arrays raised another error in its place, and the step in flight was not recorded."""
    out_of_memory = RuntimeError("RESOURCE_EXHAUSTED: out of memory while allocating 7 bytes")
    words = (*SMALL, f"output_dir={tmp_path}", "steps=6")
    with monkeypatch.context() as patch:
        patch.setattr(SingleEngine, "step", fails_at(step, out_of_memory, takes_state=takes_state))
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            guarded(main, words)
    folder = tmp_path / "tiny"
    assert [row["step"] for row in rows_of(folder)] == list(range(1, step))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["step"]) == ("failed", 1, step - 1)
    assert "RESOURCE_EXHAUSTED" in summary["reason"]
    if takes_state:
        assert steps_saved(folder) == []
        assert "there is no checkpoint" in capsys.readouterr().out
        return
    assert steps_saved(folder) == ([step - 1] if step > 1 else [])
    if step > 1:
        assert guarded(main, words) == 0
        assert_same_run(folder, six)


@pytest.fixture
def small_disk(tmp_path):
    """Returns a run directory on a disk of 300 kB, half of it taken by a file, with its checkpoints elsewhere."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mount is not permitted here: {mounted.stderr.strip()}")
    (folder / "in_the_way").write_bytes(bytes(150_000))
    (tmp_path / "large").mkdir()
    (folder / "checkpoints").symlink_to(tmp_path / "large")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_metrics_fill_is_named_and_the_run_goes_on_exactly(small_disk, tmp_path, capsys):
    """The engine is a step ahead of the rows, so that nothing was saved, and no file was named (N10)."""
    words = (*SMALL, "log.every_steps=1000", "eval.max_batches=1")
    assert guarded(main, [*words, f"output_dir={tmp_path}", "steps=5000"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {small_disk}/")
    assert "No space left on device; make room there" in error
    assert error.count("\n") == 1
    (done,) = steps_saved(small_disk)
    summary = json.loads((small_disk / "summary.json").read_text())
    assert summary["status"] in ("failed", "running")  # there was no room for a new one, or there was
    (small_disk / "in_the_way").unlink()
    more = (*words, f"steps={done + 2}")
    assert guarded(main, [*more, f"output_dir={tmp_path}"]) == 0
    assert guarded(main, [*more, f"output_dir={tmp_path}/unbroken"]) == 0
    assert_same_run(small_disk, tmp_path / "unbroken" / "tiny")


@contextmanager
def no_file_grows_beyond(size: int):
    """Lets no file of this process grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_row_that_finds_no_room_waits_and_leaves_no_part_of_itself(tmp_path):
    """Half a row would glue itself to the next one that is written."""
    path = tmp_path / "metrics.jsonl"
    rows = RowWriter(path)
    rows.write({"step": 1})
    with no_file_grows_beyond(path.stat().st_size + 5):
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large") as caught:
                rows.write({"step": step})
            assert caught.value.filename == str(path)
    assert path.read_text() == '{"step": 1}\n'
    rows.write({"step": 4})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    rows.close()


def test_a_log_that_is_full_ends_no_run(tmp_path, capsys):
    """What people read is worth less than what the run computes."""
    console = Console("lines")
    console.open_log(tmp_path / "train.log")
    with no_file_grows_beyond(3):
        console.say("first")
        console.say("second")
    console.say("third")
    console.close()
    out = capsys.readouterr().out
    assert out.count("train.log: File too large") == 1
    assert (tmp_path / "train.log").read_text() == "third\n"


def test_an_error_after_a_bad_step_gives_way_to_it():
    """The step that was not finite came first, and what it says is what a rollback needs."""

    class Failing:
        def step(self, batch):
            if batch == 2:
                raise RuntimeError("late")
            return {"loss": np.float32(batch)}

    seen = []

    def record(step):
        seen.append(step.step)
        if step.step == 2:
            raise NonFiniteError("bad")

    steps = {"steps": range(4), "between": lambda done: None, "stops": lambda done: False}
    with pytest.raises(NonFiniteError):
        run_loop(Failing(), ((number, number) for number in range(4)), record=record, **steps)
    assert seen == [1, 2]


def test_recording_that_fails_finds_every_later_step_recorded():
    """Who saves after an error must know where the engine is: two steps on, where one row could not be written."""
    seen = []

    def record(step):
        seen.append(step.step)
        if step.step >= 2:
            raise OSError(f"no room for {step.step}")

    class Counting:
        def step(self, batch):
            return {"loss": np.float32(batch)}

    steps = {"steps": range(4), "between": lambda done: None, "stops": lambda done: False}
    with pytest.raises(OSError, match="no room for 2"):
        run_loop(Counting(), ((number, number) for number in range(4)), record=record, **steps)
    assert seen == [1, 2, 3]


def test_ruined_weights_come_with_the_way_back(tmp_path, capsys):
    """Finite weights of 1e30 are saved, and every start from them fails with the same advice (N19)."""
    words = (*SMALL, f"output_dir={tmp_path}", "checkpoint.keep_last=9")
    ruin = ("optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "steps=9")
    assert guarded(main, [*words, *ruin]) == 4
    error = capsys.readouterr().err
    assert "step 1 is the newest checkpoint" in error
    assert "start anew with another run_name" in error
    shutil.rmtree(tmp_path / "tiny")
    assert guarded(main, [*words, "steps=3"]) == 0
    assert guarded(main, [*words, *ruin]) == 4
    error = capsys.readouterr().err
    assert "checkpoint.resume=3" in error
    assert guarded(main, [*words, "steps=5"]) == 4, "the newest checkpoint is of ruined weights"
    assert "checkpoint.resume=3" in capsys.readouterr().err
    assert guarded(main, [*words, "steps=5", "checkpoint.resume=3"]) == 0
    assert [row["step"] for row in rows_of(tmp_path / "tiny")] == [1, 2, 3, 4, 5]
