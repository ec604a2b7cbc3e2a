"""What people see."""

import io
import logging

import pytest

from nnxtrain.host import console as module
from nnxtrain.host.console import Console
from nnxtrain.host.text import duration


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (190, "3 min 10 s"), (18120, "5 h 2 min")]
)
def test_durations_are_said_in_two_units(seconds, text):
    """Raw seconds are hard to read for long runs."""
    assert duration(seconds) == text


def test_plain_lines_go_to_console_and_log(tmp_path, capsys):
    """The log also holds what was said before it was opened, and log records of the package."""
    console = Console("lines")
    console.say("first [b]")
    console.open_log(tmp_path / "train.log")
    logging.getLogger("nnxtrain.test").addHandler(console)
    logging.getLogger("nnxtrain.test").warning("from the %s", "package")
    console.start(done=0, total=20)
    console.progress(1, 20, "loss 1", due=True)
    console.progress(2, 20, "loss 2", due=False)
    console.close()
    want = "first [b]\nfrom the package\nstep  1/20  loss 1\n"
    assert capsys.readouterr().out == want
    assert (tmp_path / "train.log").read_text() == want


def test_a_terminal_gets_a_live_bar(monkeypatch, tmp_path):
    """On a terminal one line moves; the log still has a line for each step that is due."""
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(module.sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    console = Console("auto")
    console.open_log(tmp_path / "train.log")
    console.start(done=0, total=3)
    for step in (1, 2, 3):
        console.progress(step, 3, f"loss {step}", due=step == 3)
    console.close()
    assert "3/3" in screen.getvalue()
    assert "loss 3" in screen.getvalue()
    assert (tmp_path / "train.log").read_text() == "step 3/3  loss 3\n"
