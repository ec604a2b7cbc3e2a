"""The run directory: one writer, whole files."""

import json
import os
import subprocess
import sys

import pytest

from nnxtrain.errors import ConfigError
from nnxtrain.host.environment import environment
from nnxtrain.host.files import write_whole
from nnxtrain.metrics.rewind import set_aside_rows
from nnxtrain.run.directory import locked, read_summary
from tests.support import ROOT

HOLD = """
import sys
from pathlib import Path
from nnxtrain.run.directory import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_directory_has_one_writer(tmp_path):
    """Two live runs in one directory would interleave their rows (B19)."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"process {holder.pid}"), locked(tmp_path / "run"):
        pass
    holder.communicate("")
    with locked(tmp_path / "run"):
        assert (tmp_path / "run" / "run.lock").read_text() == str(os.getpid())
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_killed_owner_leaves_no_lock(tmp_path):
    """A lock by file name alone would have to be deleted by hand after `kill -9`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    assert (tmp_path / "run.lock").exists()
    with locked(tmp_path):
        pass


def test_files_appear_whole(tmp_path):
    """The old content stays until the new one is complete."""
    path = tmp_path / "deep" / "file.json"
    write_whole(path, "old")
    write_whole(path, b"new")
    assert path.read_text() == "new"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize("content", [None, "", '{"status": "do'])
def test_a_summary_that_is_no_json_counts_as_none(tmp_path, content):
    """A half summary must not stop a start."""
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    assert read_summary(tmp_path) is None


def test_rows_beyond_a_step_are_set_aside(tmp_path):
    """Rows rise strictly after a restart, and none is lost but the half one (B27)."""
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4')
    assert set_aside_rows(tmp_path, beyond=1) == 2
    assert (tmp_path / "metrics.jsonl").read_text() == lines[0]
    assert (tmp_path / "metrics.dropped.jsonl").read_text() == "".join(lines[1:])


def test_environment_names_versions():
    """A run that cannot be repeated for want of versions helps nobody."""
    assert set(environment()["versions"]) >= {"jax", "flax", "optax", "grain", "orbax-checkpoint"}
