"""Too little, no or awkward data, as a person meets it (B30, B36)."""

import bz2
import gzip
import json
import os
import random
import re
import subprocess
import sys

import pytest

from nnxtrain.cli.command import guarded
from nnxtrain.train import main
from tests.support import ROOT, TINY, rows_of

CAPPED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_DATA, (4 * 2**30, 4 * 2**30))
sys.argv = ["nnxtrain.train", *sys.argv[1:]]
runpy.run_module("nnxtrain.train", run_name="__main__", alter_sys=True)
"""


def files_in(place) -> tuple[str, str]:
    """Returns the words that name the training file and the held-out file of `place`."""
    return f"data.path={place}/a.txt", f"data.validation_path={place}/held.txt"


def words_for(place, *words: str) -> list[str]:
    """Returns the command line of a run on text that keeps everything in `place`."""
    own = (f"output_dir={place}/runs", f"data.cache_dir={place}/cache", "data.source=text", "model.vocab=384")
    return [str(TINY), "model.layers=1", "mesh.data=1", "generate.tokens=1", *own, *words]


@pytest.mark.parametrize(("pattern", "says"), [("*.txt", "matches nothing"), ("folder", "folders")])
@pytest.mark.parametrize("flag", [(), ("--dry-run",)])
def test_a_pattern_without_text_ends_the_run_before_it_begins(tmp_path, capsys, pattern, says, flag):
    """Exit code 2, one message with key and pattern, nothing written."""
    (tmp_path / "folder").mkdir()
    assert guarded(main, words_for(tmp_path, f"data.path={tmp_path}/{pattern}", *flag)) == 2
    message = capsys.readouterr().err
    for word in ("data.path", f"{tmp_path}/{pattern}", says):
        assert word in message
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def ended(quick_compiles, tmp_path_factory):
    """Returns the place of a run whose data ended: 20 tokens are 1 row of 32, in 3 epochs."""
    place = tmp_path_factory.mktemp("ended")
    for name in ("a.txt", "held.txt"):
        (place / name).write_text("x" * 18)
    assert guarded(main, words_for(place, *files_in(place), "steps=100", "data.epochs=3")) == 0
    return place


def test_a_small_corpus_ends_after_the_documented_number_of_steps(ended):
    """A wait for a batch that never fills, or a step on nothing, would come instead."""
    folder = ended / "runs" / "tiny"
    assert json.loads((folder / "summary.json").read_text())["step"] == 1
    (row,) = rows_of(folder)
    assert row["targets"] == 3 * 19
    assert row["epoch"] == 3


def test_a_run_keeps_a_record_of_its_tokenizer(ended):
    """Its ids can be read without the configuration that made it."""
    assert json.loads((ended / "runs" / "tiny" / "tokenizer" / "tokenizer.json").read_text())["name"] == "byte"


def test_a_resumed_run_tells_that_files_were_edited(ended, capsys):
    """Size and time are as before: the old tokens were used without a word (N03)."""
    for name in ("a.txt", "held.txt"):
        was = (ended / name).stat()
        (ended / name).write_text("y" * 18)
        os.utime(ended / name, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert guarded(main, words_for(ended, *files_in(ended), "steps=2", "data.epochs=null")) == 0
    told = capsys.readouterr().out
    assert "resumes  from step 1" in told
    for begin in ("corpus: ", "held-out set validation: "):
        before, after = re.search(rf"{begin}.*sha256 (\w+).*→.*sha256 (\w+)", told).groups()
        assert before != after


def test_a_corpus_that_is_less_than_one_step_ends_with_the_data_code(tmp_path, capsys):
    """With the remainder dropped nothing is left: exit code 5, and what to change."""
    (tmp_path / "a.txt").write_text("x" * 18)
    words = (f"data.path={tmp_path}/a.txt", "data.epochs=1", "data.drop_remainder=true")
    assert guarded(main, words_for(tmp_path, *words)) == 5
    assert "data.drop_remainder" in capsys.readouterr().err


WORDS = b"Plain words, and then some more of them.\n" * 40


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("bad.txt.gz", gzip.compress(WORDS)[:-9], "gzip"),
        ("bad.txt", bz2.compress(WORDS), "bzip2"),
        ("bad.txt", WORDS.decode().encode("utf-16"), "UTF-16"),
        ("bad.jsonl", WORDS, "JSON"),
    ],
    ids=["cut gzip", "bzip2", "UTF-16", "text as JSON lines"],
)
def test_a_dry_run_finds_files_that_are_no_text(tmp_path, capsys, name, content, says, held_out):
    """It said that all is well with data that the run then refuses (N20)."""
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_bytes(WORDS)
    words = (f"data.path={tmp_path}/good.txt", f"data.validation_path={tmp_path}/{name}")
    words = words if held_out else (f"data.path={tmp_path}/{name},{tmp_path}/good.txt",)
    assert guarded(main, words_for(tmp_path, *words, "--dry-run")) == 5
    message = capsys.readouterr().err
    assert f"{tmp_path}/{name}" in message
    assert says in message


def test_a_dry_run_says_how_much_of_the_data_it_read(tmp_path, capsys):
    """What lies beyond is not checked: nobody must think that it is (N20)."""
    (tmp_path / "good.txt").write_bytes(WORDS)
    assert guarded(main, words_for(tmp_path, f"data.path={tmp_path}/good.txt", "--dry-run")) == 0
    assert re.search(r"data files +1; only the first MiB of each was read", capsys.readouterr().out)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(SystemExit):
        guarded(main, ["--help"])
    assert "the first MiB" in " ".join(capsys.readouterr().out.split())


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
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=180)
    file.unlink()
    for part in (tmp_path / "cache").rglob("tokens.bin"):
        part.unlink()
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())["step"] == 2
