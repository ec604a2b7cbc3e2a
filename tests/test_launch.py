"""Several processes are one run: the same numbers, rows, files and end as one process has."""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from jax.profiler import ProfileData

from nnxtrain import launch
from nnxtrain.cli.command import guarded
from nnxtrain.launch import main as launch_main
from nnxtrain.profiling.__main__ import main as profiling_main
from nnxtrain.profiling.trace import digest_of, trace_files
from nnxtrain.train import main
from tests.support import ROOT, TINY, rows_of

SMALL = (str(TINY), "model.layers=1", "model.embed=32", "batch.sequence=16", "generate.tokens=1", "model.vocab=384")
SMALL += ("schedule.name=constant", "optimizer.eps=1e-4", "model.dropout=0.1", "log.every_steps=1")
CURVE = ("step", "loss", "grad_norm", "targets", "tokens", "epoch")


class Launched:
    """Processes of one run, started by `nnxtrain.launch`; their output is read as it comes."""

    def __init__(self, *words: str, processes: int = 2, devices: int = 4):
        own = (f"processes={processes}", f"devices_per_process={devices}", "grace_s=60")
        env = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}  # compiles as quickly as this process
        command = [sys.executable, "-m", "nnxtrain.launch", *own, "--", "train", *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env
        )
        self.lines: list[str] = []

    def until(self, pattern: str) -> None:
        """Reads on until a line matches."""
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"no line matches {pattern}:\n{''.join(self.lines)}")

    def member(self, index: int) -> int:
        """Returns the process id of a process of the run."""
        launcher = self.process.pid
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        words = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
        return next(pid for pid, line in words.items() if f"distributed.process={index}" in line)

    def end(self) -> int:
        """Reads to the end; returns the exit code."""
        self.lines += self.process.stdout
        return self.process.wait(timeout=300)

    @property
    def output(self) -> str:
        """What was said so far."""
        return "".join(self.lines)


def corpus_of(rows: int, place: Path) -> tuple[str, ...]:
    """Returns the words that choose a text of so many different rows of 16 tokens."""
    place.mkdir(exist_ok=True)
    letters = random.Random(0).choices(string.ascii_letters, k=rows * 16 - 1)
    (place / "a.txt").write_text("".join(letters))
    held_out = f"data.validation_path={place}/a.txt"
    return ("data.source=text", f"data.path={place}/a.txt", held_out, f"data.cache_dir={place}/cache")


def curve(folder: Path, *, after: int = 0) -> np.ndarray:
    """Returns what is compared of the training rows of a run, those after a step."""
    return np.array([[row[name] for name in CURVE] for row in rows_of(folder) if row["step"] > after])


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> tuple[str, ...]:
    """Returns the words of a run over two epochs of 21 rows, which end inside a batch: 6 steps, the last of 2 rows."""
    place = tmp_path_factory.mktemp("corpus")
    return (*SMALL, *corpus_of(21, place), "data.epochs=2", "steps=100", "checkpoint.every_steps=3")


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory) -> Path:
    """Returns the directory of the run by one process with eight devices."""
    place = tmp_path_factory.mktemp("alone")
    assert guarded(main, [*words, "mesh.data=2", "mesh.fsdp=4", f"output_dir={place}"]) == 0
    return place / "tiny"


def assert_goes_on(folder: Path, words: tuple[str, ...], alone: Path, copy: Path) -> None:
    """Asserts that a run goes on from its checkpoint of step 3 as if it had been another mesh all along."""
    shutil.copytree(folder, copy / "tiny")
    assert guarded(main, [*words, "checkpoint.resume=3", f"output_dir={copy}"]) == 0
    np.testing.assert_allclose(curve(copy / "tiny"), curve(alone), rtol=1e-5)


@pytest.fixture(scope="module")
def together(words, tmp_path_factory) -> Path:
    """Returns the directory of the run by two processes with four devices each, of which two steps are traced."""
    place = tmp_path_factory.mktemp("together")
    traced = ("profile.enabled=true", "profile.skip_first=1", "profile.active=2", "profile.repeat=1")
    run = Launched(*words, *traced, "mesh.data=2", "mesh.fsdp=4", f"output_dir={place}")
    assert run.end() == 0, run.output
    assert "[0] devices  8 cpu of 2 processes" in run.output
    assert "[1] step" not in run.output
    return place / "tiny"


def test_two_processes_are_one_run(together, alone):
    """Each reads half of each batch; both leave the loop at one step, where the data ends (B32, B51)."""
    got, want = curve(together), curve(alone)
    assert got[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got[-1, CURVE.index("tokens")] == 2 * 16
    (ours,), (theirs,) = rows_of(together, "eval"), rows_of(alone, "eval")
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["targets"] == theirs["targets"]
    summary = json.loads((together / "summary.json").read_text())
    assert (summary["status"], summary["recompiles"]) == ("done", 0)
    assert json.loads((together / "env.json").read_text())["processes"] == 2


def test_each_process_traces_itself(together, capsys):
    """The same window side by side, each with the events of its own process; merged, one session has both."""
    (window,) = (together / "profile").iterdir()
    names = [path.name for path in sorted(window.glob("process_*"))]
    assert names == ["process_0000", "process_0001"]
    digests = [digest_of(file) for file in trace_files(window)]
    assert [[step.step for step in digest.steps] for digest in digests] == [[2, 3], [2, 3]]
    traces = [ProfileData.from_file(str(file)) for file in trace_files(window)]
    threads = [{line.name for plane in trace.planes for line in plane.lines} for trace in traces]
    coordinates = [any("CoordinationService" in name for name in each) for each in threads]
    assert coordinates == [True, False], "process 0 alone runs the service where the processes meet"
    assert guarded(profiling_main, ["merge", str(together)]) == 0
    merged = {path.name for path in window.glob("merged/plugins/profile/*/*")}
    assert merged == {f"{name}.xplane.pb" for name in names}


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_goes_on_in_one(together, words, alone, tmp_path):
    """Files of process 1 that are left out, or a position of the data that counts rows of one process (B21)."""
    assert_goes_on(together, (*words, "mesh.fsdp=8"), alone, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [("mesh.data=1",), ("mesh.data=4", "mesh.tensor=2"), ("mesh.fsdp=4", "mesh.data=1")])
def test_a_checkpoint_goes_on_with_other_meshes(together, words, alone, tmp_path, mesh):
    """One device, four, and another shape (B21)."""
    assert_goes_on(together, (*words, *mesh), alone, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [("mesh.data=1",), ("mesh.preset=zero1",)])
def test_a_checkpoint_of_one_process_goes_on_in_two(words, alone, tmp_path, mesh):
    """The reverse direction: from one device, and from other pieces of the optimizer state (B21)."""
    assert guarded(main, [*words, *mesh, f"output_dir={tmp_path}"]) == 0
    run = Launched(*words, "mesh.fsdp=8", "checkpoint.resume=3", f"output_dir={tmp_path}")
    assert run.end() == 0, run.output
    np.testing.assert_allclose(curve(tmp_path / "tiny"), curve(alone), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [("mesh.data=2", "mesh.fsdp=4"), ("mesh.data=2", "mesh.context=4")])
def test_four_processes_are_one_run(words, alone, tmp_path, mesh):
    """With a shared sequence, several processes read the same rows (B51)."""
    run = Launched(*words, *mesh, f"output_dir={tmp_path}", processes=4, devices=2)
    assert run.end() == 0, run.output
    np.testing.assert_allclose(curve(tmp_path / "tiny"), curve(alone), rtol=1e-5)


@pytest.mark.slow
def test_two_processes_drive_microbatches(words, alone, tmp_path):
    """Copies of the model on both processes keep their own sums until the update (engine.name=split)."""
    split = ("engine.name=split", "batch.accum_steps=2", "mesh.data=2", "mesh.fsdp=2", f"output_dir={tmp_path}")
    run = Launched(*words, *split, devices=2)
    assert run.end() == 0, run.output
    np.testing.assert_allclose(curve(tmp_path / "tiny"), curve(alone), rtol=1e-5)


ENDLESS = ("data.epochs=null", "steps=1000", "checkpoint.every_steps=2", "eval.max_batches=1")


def test_a_lost_process_ends_the_others_and_the_run_goes_on(words, alone, tmp_path):
    """A survivor that waits for ever holds the machines; a half written checkpoint loses the run (exit code 7)."""
    own = ("mesh.fsdp=8", f"output_dir={tmp_path}", "checkpoint.every_steps=2")
    slowly = ("eval.every_steps=1", "distributed.heartbeat_timeout_s=10")  # a report after each step takes its time
    run = Launched(*words, *own, *slowly)
    run.until(r"\[0\] step +3/")
    began = time.monotonic()
    os.kill(run.member(1), signal.SIGKILL)
    assert run.end() == 7
    assert time.monotonic() - began < 30
    assert "process 1 of 2 was lost (SIGKILL)" in run.output
    assert len(rows_of(tmp_path / "tiny")) < 6
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 7)
    assert "lost" in summary["reason"]
    assert guarded(main, [*words, *own]) == 0
    np.testing.assert_allclose(curve(tmp_path / "tiny"), curve(alone), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("index", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_whichever_process_is_lost_ends_the_run(words, tmp_path, index, number):
    """The coordinator among them, and one that hangs: its heart stops too."""
    run = Launched(*words, *ENDLESS, "mesh.fsdp=8", f"output_dir={tmp_path}", "distributed.heartbeat_timeout_s=10")
    run.until(r"\[0\] step +3/")
    member = run.member(index)
    os.kill(member, number)
    assert run.end() == 7
    assert f"process {index} of 2 was lost" in run.output or f"process {index} of 2 had not ended" in run.output


def stopped(run: Launched, pattern: str, act: Callable[[], None]) -> int:
    """Acts when a line matches; returns the exit code."""
    run.until(pattern)
    act()
    return run.end()


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_at_one_step(words, tmp_path):
    """The others must learn of it, and save with it; then the run goes on as if it had never stopped (B26)."""
    place = ("mesh.fsdp=8", f"output_dir={tmp_path}")
    run = Launched(*words, *ENDLESS, *place)
    assert stopped(run, r"\[0\] step +5/", lambda: os.kill(run.member(1), signal.SIGTERM)) == 75, run.output
    (done,) = [row["step"] for row in rows_of(tmp_path / "tiny")][-1:]
    assert max(int(path.name) for path in (tmp_path / "tiny" / "checkpoints").iterdir()) == done
    assert json.loads((tmp_path / "tiny" / "summary.json").read_text())["status"] == "preempted"
    goal = (*words, *ENDLESS, f"steps={done + 3}", "mesh.fsdp=8", f"output_dir={tmp_path}")
    for name in ("tiny", "unbroken"):
        run = Launched(*goal, f"run_name={name}")
        assert run.end() == 0, run.output
    assert curve(tmp_path / "tiny").tolist() == curve(tmp_path / "unbroken").tolist()


@pytest.mark.slow
def test_a_signal_to_the_launcher_stops_all(words, tmp_path):
    """Also before the first step: while they compile, no process may end alone (B26)."""
    run = Launched(*words, *ENDLESS, "mesh.fsdp=8", f"output_dir={tmp_path}")
    assert stopped(run, r"\[0\] run ", run.process.terminate) == 75, run.output
    assert len(rows_of(tmp_path / "tiny")) <= 2  # they agree one step late


@pytest.mark.slow
def test_minutes_are_those_of_one_clock(words, tmp_path):
    """A process that saves by its own clock saves alone, and waits for the others for good."""
    run = Launched(
        *words, "mesh.fsdp=8", f"output_dir={tmp_path}", "checkpoint.every_steps=0", "checkpoint.every_minutes=1e-9"
    )
    assert run.end() == 0, run.output
    assert [int(path.name) for path in (tmp_path / "tiny" / "checkpoints").iterdir()]


@pytest.mark.slow
def test_an_error_of_one_process_ends_all(words, tmp_path):
    """A directory that another run holds is found by process 0 alone."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    with (folder / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = Launched(*words, "mesh.fsdp=8", f"output_dir={tmp_path}")
        assert run.end() == 2
    assert "in use by a live run" in run.output


@pytest.mark.slow
def test_a_process_that_never_comes_ends_the_others_in_time(words, tmp_path):
    """A coordinator that waits for ever holds a whole allocation."""
    meet = ("distributed.coordinator=127.0.0.1:9", "distributed.processes=2", "distributed.process=1")
    command = [sys.executable, "-m", "nnxtrain.train", *words, *meet, "distributed.connect_timeout_s=5"]
    began = time.monotonic()
    ended = subprocess.run([*command, f"output_dir={tmp_path}"], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.returncode == 7
    assert time.monotonic() - began < 60
    assert "process 1 of 2 did not meet process 0 at 127.0.0.1:9 within 5 s" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["processes=2"], "after --"),
        (["processes=2", "--", "evaluate"], "after --"),
        (["process=2", "--", "train"], "process is not one of"),
        (["processes=0", "--", "train"], "at least 1"),
    ],
)
def test_a_wrong_word_is_refused(words, says, capsys):
    """Nothing is started."""
    assert guarded(launch_main, words) == 2
    assert says in capsys.readouterr().err


def test_a_process_that_hangs_after_another_has_ended_is_killed_in_time(tmp_path, monkeypatch, capsys):
    """The clock started at a failure alone: one that ended with 0 while the other hung waited for ever."""
    package = tmp_path / "nnxtrain"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "hangs.py").write_text("import sys, time\nif 'distributed.process=1' in sys.argv: time.sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "MODULES", ("hangs",))
    monkeypatch.setattr(launch, "__file__", str(package / "launch.py"))
    assert guarded(launch_main, ["processes=2", "grace_s=1", "--", "hangs"]) == 7
    assert "process 1 of 2 had not ended grace_s=1 seconds after another one had" in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, 1])
def test_what_stands_in_the_way_of_a_meeting_is_said_in_a_line(tmp_path, number):
    """Jax ends with a segmentation fault at a port that is taken, and knows no other program from its own (N11)."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        meet = (f"distributed.coordinator={address}", "distributed.processes=2", f"distributed.process={number}")
        words = [sys.executable, "-m", "nnxtrain.train", *SMALL, *meet, "distributed.connect_timeout_s=3"]
        ended = subprocess.run(
            [*words, f"output_dir={tmp_path}"], capture_output=True, text=True, cwd=ROOT, timeout=120
        )
    assert ended.returncode == (7 if number else 2)
    waits, line = ended.stderr.splitlines()
    assert waits.startswith(f"process {number} of 2 waits")
    assert address in line
    assert list(tmp_path.iterdir()) == []
