"""A run that stands still says where."""

import subprocess
import sys
import time

import pytest

from nnxtrain.host.watchdog import HUNG, Watchdog
from tests.support import ROOT

HANGS = """
import sys, time
from pathlib import Path
from nnxtrain.host.watchdog import Watchdog
def say(line): print(line, flush=True)
def stand_still(): time.sleep(60)
with Watchdog(0.3, folder=Path(sys.argv[1]), say=say, leave=lambda code: say(f"left {code}")) as watchdog:
    watchdog.beat()
    stand_still()
"""


def wait_for(found, seconds: float = 20) -> None:
    """Waits until `found()` holds."""
    deadline = time.monotonic() + seconds
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found()


def stand_still(said: list[str]) -> None:
    """Waits for the watchdog to speak."""
    wait_for(lambda: said)


def test_without_a_beat_all_stacks_are_written_and_the_run_says_so(tmp_path):
    """A run that hangs over night must leave a trace of where."""
    said: list[str] = []
    with Watchdog(0.2, folder=tmp_path, say=said.append, leave=None) as watchdog:
        watchdog.beat()
        stand_still(said)
    path = tmp_path / "stacks_001.txt"
    assert str(path) in said[0]
    assert "0.2 s" in said[0]
    assert "debug.hang_timeout_s" in said[0]
    text = path.read_text()
    assert "stand_still" in text
    assert text.count("hread 0x") >= 2  # the main thread and the watchdog itself


def test_it_goes_on_watching(tmp_path):
    """The second dump tells a run that stands still from one that is slow."""
    said: list[str] = []
    with Watchdog(0.1, folder=tmp_path, say=said.append, leave=None) as watchdog:
        watchdog.beat()
        wait_for(lambda: len(said) >= 2)
    assert {"stacks_001.txt", "stacks_002.txt"} <= {path.name for path in tmp_path.iterdir()}


def test_dumps_of_an_earlier_process_are_kept(tmp_path):
    """Started again, the run must not write over what tells why it was ended."""
    (tmp_path / "stacks_001.txt").write_text("the first hang")
    said: list[str] = []
    with Watchdog(0.1, folder=tmp_path, say=said.append, leave=None) as watchdog:
        watchdog.beat()
        stand_still(said)
    assert (tmp_path / "stacks_001.txt").read_text() == "the first hang"


def test_beats_keep_it_quiet(tmp_path):
    """A dump every step of a healthy run helps nobody."""
    said: list[str] = []
    with Watchdog(1.5, folder=tmp_path, say=said.append, leave=None) as watchdog:
        for _ in range(40):
            watchdog.beat()
            time.sleep(0.05)
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_before_the_first_beat_nothing_is_dumped(tmp_path):
    """A first compilation of many minutes is no hang."""
    said: list[str] = []
    with Watchdog(0.1, folder=tmp_path, say=said.append, leave=said.append):
        time.sleep(0.5)
    assert said == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("timeout_s", [None, 0.1])
def test_it_ends_with_the_run(tmp_path, timeout_s):
    """A thread that watches on reports a hang of a run that is over."""
    said: list[str] = []
    with Watchdog(timeout_s, folder=tmp_path, say=said.append, leave=said.append) as watchdog:
        watchdog.beat()
    time.sleep(0.5)
    assert said == []


def test_abort_ends_the_process_after_the_dump(tmp_path):
    """A scheduler starts a dead job again, and never one that stands still."""
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    began = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert ended.returncode == HUNG
    assert time.monotonic() - began < 20
    assert "stacks_001.txt" in ended.stdout
    assert ended.stdout.endswith(f"left {HUNG}\n")
    assert "stand_still" in (tmp_path / "stacks_001.txt").read_text()
