"""Too little, no or awkward data, as a person meets it (B30, B36)."""

import json
import os
import random
import subprocess
import sys
import time

import pytest

from tests.support import ROOT, rows_of, run_module

CAPPED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_DATA, (4 * 2**30, 4 * 2**30))
sys.argv = ["nnxtrain.train", *sys.argv[1:]]
runpy.run_module("nnxtrain.train", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Returns a folder of compiled programs that the runs of this file share."""
    return tmp_path_factory.mktemp("compiled")


def words_for(place, *words: str) -> list[str]:
    """Returns the command line of a run on text that keeps everything in `place`."""
    own = (f"output_dir={place}/runs", f"data.cache_dir={place}/cache", "data.source=text", "model.vocab=384")
    return ["configs/tiny.yml", "model.layers=1", *own, *words]


@pytest.mark.parametrize(("pattern", "says"), [("*.txt", "matches nothing"), ("folder", "folders")])
def test_a_pattern_without_text_ends_the_run_before_it_begins(tmp_path, pattern, says):
    """Exit code 2, one message with key and pattern, no traceback, nothing written."""
    (tmp_path / "folder").mkdir()
    run = run_module("train", *words_for(tmp_path, f"data.path={tmp_path}/{pattern}"))
    assert run.returncode == 2
    for word in ("data.path", f"{tmp_path}/{pattern}", says):
        assert word in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("letters", "words", "steps"),
    [
        (18, ("data.epochs=3",), 1),  # 20 tokens are 1 row; ceil(1 * 3 / 8)
        (12 * 32 - 1, ("data.epochs=3", "data.drop_remainder=true"), 4),  # 12 rows; floor(12 * 3 / 8)
    ],
    ids=["20 tokens", "exactly 1.5 batches"],
)
def test_a_small_corpus_ends_after_the_documented_number_of_steps(tmp_path, compiled, letters, words, steps):
    """A wait for a batch that never fills, or a step on nothing, would come instead."""
    (tmp_path / "a.txt").write_text("x" * letters)
    cache = f"debug.compilation_cache={compiled}"
    run = run_module("train", *words_for(tmp_path, f"data.path={tmp_path}/a.txt", "steps=100", cache, *words))
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "runs" / "tiny"
    assert json.loads((folder / "summary.json").read_text())["step"] == steps
    rows = rows_of(folder)
    assert len(rows) == steps
    assert all(row["targets"] > 0 for row in rows)
    assert rows[-1]["epoch"] <= 3


def test_a_corpus_that_is_less_than_one_step_ends_with_the_data_code(tmp_path):
    """With the remainder dropped nothing is left: exit code 5, and what to change."""
    (tmp_path / "a.txt").write_text("x" * 18)
    words = (f"data.path={tmp_path}/a.txt", "data.epochs=1", "data.drop_remainder=true")
    run = run_module("train", *words_for(tmp_path, *words))
    assert run.returncode == 5
    assert "data.drop_remainder" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain.txt", "wide.jsonl"])
def test_one_enormous_line_trains_under_a_memory_cap(tmp_path, kind):
    """200 MB without a line end, 2 steps, 4 GB, 3 minutes; a wide character quadruples a text in memory (B36)."""
    words = [random.Random(0).choice(["lorem", "ipsum", "dolor"]) for _ in range(1000)]
    paragraph = (" ".join(words) + " ").encode()
    line = paragraph * (200_000_000 // len(paragraph)) + ("🙂".encode() if kind.startswith("wide") else b"")
    file = tmp_path / kind
    file.write_bytes(b'{"text": "' + line + b'"}\n' if kind.endswith("jsonl") else line)
    command = [sys.executable, "-c", CAPPED, *words_for(tmp_path, f"data.path={file}", "steps=2")]
    env = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=400)
    took = time.monotonic() - began
    file.unlink()
    for part in (tmp_path / "cache").rglob("tokens.bin"):
        part.unlink()
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())["step"] == 2
    assert took < 180
