"""Stop signals in processes of their own, since the second one ends the process."""

import os
import signal
import subprocess
import sys
import time

import pytest

from nnxtrain.host.signals import SIGNALS, STOPPED, StopSignals
from tests.support import ROOT

BEGIN = """
import os, signal, sys, time
from nnxtrain.host.signals import StopSignals
def say(line): os.write(1, f"{line}\\n".encode())  # whole lines, from two threads
signals = StopSignals(say=say, leave=lambda code: say(f"left {code}"))
"""
BUSY = (
    BEGIN
    + """
with signals:
    if sys.argv[1] == "unsaved":
        signals.guard_unsaved()
    say("ready")
    if sys.argv[2] == "xla":  # python handlers do not run while this waits in C, as they do not in a compilation
        import ctypes
        ctypes.CDLL(None).sleep(30)
    while not signals.asked:
        time.sleep(0.01)
    say("asked")
    time.sleep(float(sys.argv[2]) if sys.argv[2] != "xla" else 0)
say("ended")
"""
)


def start(*words: str) -> subprocess.Popen:
    """Starts a process that listens, and waits until it does."""
    command = [sys.executable, "-c", BUSY, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", SIGNALS)
def test_a_first_signal_asks_and_lets_the_run_end_in_good_order(number):
    """A handler that raises would end the run in the middle of a save (B26)."""
    process = start("unsaved", "0")
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert signal.Signals(number).name in out
    assert "a second signal ends it at once" in out
    assert out.endswith("asked\nended\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_ends_the_process_at_once(number):
    """A save that hangs must not hold the machine; the code says which signal it was (B26)."""
    process = start("unsaved", "20")
    process.send_signal(signal.SIGTERM)
    while process.stdout.readline() != "asked\n":
        pass
    began = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert time.monotonic() - began < 5


def test_with_nothing_to_save_the_first_signal_ends_the_process():
    """A compilation of minutes would outlast the grace that a scheduler gives (B26)."""
    process = start("nothing", "xla")
    began = time.monotonic()
    process.terminate()
    out, _ = process.communicate(timeout=20)
    assert process.returncode == STOPPED
    assert time.monotonic() - began < 5
    assert "nothing to save" in out
    assert out.endswith(f"left {STOPPED}\n")


def test_other_signals_stay_what_they_were():
    """The wake-up socket carries every signal that Python handles, such as a child's end."""
    process = start("unsaved", "0")
    process.send_signal(signal.SIGWINCH)
    time.sleep(0.2)
    assert process.poll() is None
    process.terminate()
    out, _ = process.communicate(timeout=20)
    assert out.count("SIGTERM") == 1
    assert process.returncode == 0


def test_a_signal_of_another_handler_does_not_ask():
    """A program that embeds a run may handle SIGUSR1 for itself."""
    seen, said = [], []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with StopSignals(say=said.append, leave=lambda code: None) as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.2)
            assert not signals.asked
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]
    assert said == []


def test_what_was_there_before_comes_back():
    """A second run in one process, or pytest's own Ctrl-C, needs the handlers as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    said: list[str] = []
    for _ in range(3):
        with StopSignals(say=said.append, leave=lambda code: None) as signals:
            signals.guard_unsaved()
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 10
            while not signals.asked and time.monotonic() < deadline:
                time.sleep(0.01)
            assert signals.asked
    assert len(said) == 3
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    now = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(now)
    assert now == wakeup
