"""Standard streams that are closed, full or without a reader: the exit code is that of the work (N02)."""

import os
import shlex
import signal
import subprocess
import sys
import time

import jax
import pytest

from tests.support import ROOT, TINY, rows_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = (str(TINY), "mesh.data=1", "model.layers=1", "model.embed=32", "batch.sequence=16", "generate.tokens=1")
STREAMS = {
    "no output": ">&-",
    "no errors": "2>&-",
    "none at all": "<&- >&- 2>&-",
    "full device": ">/dev/full 2>&1",
    "full errors": "2>/dev/full",
}
QUICK = {  # exit code → words of a command that ends with it at once
    0: ("train", "--list-keys"),
    2: ("train", "no.yml"),
}


def start(streams: str, module: str, *words: str) -> subprocess.Popen:
    """Starts a command with its streams as a shell redirects them; what they still say comes by the pipes."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    env["JAX_COMPILATION_CACHE_DIR"] = jax.config.values["jax_compilation_cache_dir"]
    line = shlex.join([sys.executable, "-m", f"nnxtrain.{module}", *words])
    command = ["bash", "-c", f"exec {line} {streams}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)


@pytest.mark.parametrize("code", QUICK)
@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
def test_a_quick_command_ends_with_its_own_code(streams, code):
    """A stream that cannot be written to is no fault of the command; `None.flush` is a traceback and a 1 or 120."""
    command = start(streams, *QUICK[code])
    out, error = command.communicate(timeout=60)
    assert command.returncode == code, error
    assert "Traceback" not in out + error


@pytest.mark.parametrize("module", ["evaluate", "generate", "aot", "launch", "profiling"])
def test_every_command_lives_without_streams(module):
    """One that ends its process in its own way is forgotten here."""
    command = start(STREAMS["none at all"], module, *(("--", "train", "no.yml") if module == "launch" else ("no.yml",)))
    command.communicate(timeout=60)
    assert command.returncode == 2


def test_a_reader_that_leaves_ends_no_command():
    """`| head` is how people look at long lists; the list is longer than the pipe holds."""
    line = shlex.join([sys.executable, "-m", "nnxtrain.train", "--list-keys"])
    script = f"for i in 1 2 3; do {line}; echo code=$? >&2; done | true"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.stderr.splitlines() == ["code=0"] * 3


def test_a_run_on_a_full_device_ends_with_0(tmp_path):
    """Progress that nobody can see is no reason to stop; the log has it."""
    run = start(STREAMS["full device"], "train", *SMALL, f"output_dir={tmp_path}", "steps=2")
    run.communicate(timeout=120)
    assert run.returncode == 0
    assert "done " in (tmp_path / "tiny" / "train.log").read_text()


def test_a_signal_without_streams_ends_with_75(tmp_path):
    """A scheduler that closes the streams of its jobs must still see that this one can go on.

    A file of the run that gets the number of a closed stream would fill with what libraries print.
    """
    run = start(STREAMS["none at all"], "train", *SMALL, f"output_dir={tmp_path}", "steps=1000000")
    rows = tmp_path / "tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (rows.exists() and rows.stat().st_size):
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert run.returncode == 75
    assert [row["step"] for row in rows_of(tmp_path / "tiny")][:3] == [1, 2, 3]
