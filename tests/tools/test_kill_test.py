"""The tool that kills runs."""

import json
import subprocess
import sys

import pytest

from tests.support import ROOT, TINY
from tools import kill_test


def run(*words: str) -> subprocess.CompletedProcess:
    """Runs the tool in a process of its own."""
    command = [sys.executable, "tools/kill_test.py", str(TINY), *words, "model.layers=1", "model.dropout=0.1"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3600)


@pytest.mark.slow
def test_a_killed_run_equals_one_that_was_left_alone():
    """One round of the tool, with a seed of its own; the command of README does it in every run of the tests."""
    ended = run("rounds=1", "seed=4")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert "1 of 1 rounds equal" in ended.stdout


@pytest.mark.slow
def test_fifty_killed_runs_equal_one_that_was_left_alone():
    """Kills come between steps, inside saves, evaluations and at the end."""
    ended = run("rounds=50", "steps=40")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert "50 of 50 rounds equal" in ended.stdout


def test_a_curve_that_differs_is_seen(tmp_path):
    """A comparison that cannot fail would praise every trainer."""
    row = json.dumps(dict.fromkeys(kill_test.CURVE, 1) | {"kind": "train", "loss": -1.0}) + "\n"
    for name, loss in (("a", 1.0), ("b", 1.0000001), ("c", 1.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(row.replace("-1.0", str(loss)) + '{"kind": "tra')
    a, b, c = (kill_test._values(kill_test.curve(tmp_path / name)) for name in "abc")
    assert a == c != b
