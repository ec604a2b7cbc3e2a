"""Whole runs, as a user starts them."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from nnxtrain.cli.command import guarded
from nnxtrain.generate import main as generate
from nnxtrain.train import main
from tests.support import TINY, rows_of, run_module

pytestmark = pytest.mark.usefixtures("quick_compiles")

# sizes for tests of what a run does, not of what it computes; a constant rate is one program for any number of steps
SMALL = ("mesh.data=1", "model.layers=1", "eval.max_batches=1", "generate.tokens=1", "schedule.name=constant")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the run directory of `tiny.yml` with evaluations, from a process of its own, and what it printed."""
    folder = tmp_path_factory.mktemp("runs")
    words = (str(TINY), f"output_dir={folder}", "eval.every_steps=8", "log.every_steps=5")
    ended = run_module("train", *words)
    assert ended.returncode == 0, ended.stderr
    return folder / "tiny", ended


def events_of(folder) -> dict[str, dict[int, float]]:
    """Returns tag → step → value of a run's TensorBoard events, read from the record format itself."""
    found: dict[str, dict[int, float]] = {}
    for file in (folder / "tensorboard").iterdir():
        raw, place = file.read_bytes(), 0
        while place < len(raw):
            length = int.from_bytes(raw[place : place + 8], "little")
            event = Event.FromString(raw[place + 12 : place + 12 + length])
            place += 12 + length + 4
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_a_run_leaves_what_the_design_promises(finished):
    """Every file of the run directory is there, and the lock is gone."""
    folder, _ = finished
    names = {path.name for path in folder.iterdir()}
    want = {
        "config.yml",
        "env.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "samples",
        "tokenizer",
        "train.log",
    }
    assert want | {"summary.json", "loss.png", "report.html"} == names
    assert sorted(path.name for path in (folder / "samples").iterdir()) == [
        "step_00000008.txt", "step_00000016.txt", "step_00000020.txt",
    ]  # fmt: skip
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["20"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_have_one_row_a_step_and_the_promised_fields(finished):
    """Rows at every `log.every_steps` alone would lose the curve."""
    folder, _ = finished
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 21))
    fields = {"kind", "step", "loss", "learning_rate", "grad_norm", "targets", "tokens", "step_time_s", "data_wait_s"}
    assert set(rows[0]) == fields | {"tokens_per_s", "mfu", "epoch"}
    assert {row["targets"] for row in rows} == {row["tokens"] for row in rows} == {8 * 32}
    evaluations = rows_of(folder, "eval")
    assert [row["step"] for row in evaluations] == [8, 16, 20]
    for row in evaluations:
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["targets"] == 64 * 32


def test_files_of_a_run_agree_with_each_other(finished):
    """Summary, metrics, TensorBoard and report come from the same numbers."""
    folder, _ = finished
    summary = json.loads((folder / "summary.json").read_text())
    rows, evaluations = rows_of(folder), rows_of(folder, "eval")
    assert summary["status"] == "done"
    assert summary["exit_code"] == summary["recompiles"] == summary["skipped_steps"] == 0
    assert summary["step"] == 20
    assert summary["final_loss"] == rows[-1]["loss"]
    assert summary["eval"]["validation"]["loss"] == evaluations[-1]["loss"]
    assert summary["median_step_time_s"] == pytest.approx(np.median([row["step_time_s"] for row in rows]))
    events = events_of(folder)
    assert sorted(events["train/loss"]) == [5, 10, 15, 20]
    for step, value in events["train/loss"].items():
        assert value == pytest.approx(rows[step - 1]["loss"], rel=1e-6)
    assert sorted(events["eval_validation/loss"]) == [8, 16, 20]
    report = (folder / "report.html").read_text()
    assert f"{summary['final_loss']:.6g}" in report
    assert "http" not in report.replace("http://www.w3.org", "")


def test_no_program_is_compiled_twice_with_a_pattern_remat_and_accumulation(tmp_path):
    """A type, shape or sharding that a step, an evaluation or a sample changes makes the next one compile (B48)."""
    stack = ("model.layers=3", "model.pattern=local,global", "model.window=8", "remat.policy=qkv", "generate.tokens=4")
    words = (f"output_dir={tmp_path}", "run_name=pattern", "steps=4", "batch.accum_steps=4", "eval.every_steps=2")
    assert guarded(main, [str(TINY), *stack, *words, "eval.max_batches=1", "mesh.data=1"]) == 0
    assert json.loads((tmp_path / "pattern" / "summary.json").read_text())["recompiles"] == 0


def test_a_run_learns(finished):
    """Twenty steps of the random walk lower the loss."""
    rows = rows_of(finished[0])
    assert rows[0]["loss"] == pytest.approx(math.log(256) + 0.5, rel=0.05)  # scores of unit variance cost half a nat
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1


def test_rates_and_times_are_those_of_steps(finished):
    """Rate times time is tokens; times add up to the time between the first and last row (B28)."""
    for row in rows_of(finished[0]):
        assert row["tokens_per_s"] * row["step_time_s"] == pytest.approx(row["tokens"], rel=1e-6)
        assert 0 <= row["data_wait_s"] <= row["step_time_s"]


def test_a_plain_console_says_what_matters_in_few_lines(finished):
    """The first screen fits in 15 lines, then a line every `log.every_steps`."""
    folder, ended = finished
    lines = ended.stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("step "))
    assert first <= 15
    assert sum(line.startswith("step ") for line in lines) == 1 + 20 // 5
    assert ended.stderr == ""
    assert (folder / "train.log").read_text() == ended.stdout


def test_a_second_start_says_that_the_run_is_finished(finished):
    """It must do nothing, exit 0 and tell how to go on."""
    folder, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    ended = run_module("train", str(TINY), f"output_dir={folder.parent}")
    assert ended.returncode == 0
    assert "is finished" in ended.stdout
    assert "run_name=" in ended.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    "name",
    [
        "tensorboard",
        "train.log",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("metrics.jsonl", "samples")),
    ],
)
def test_a_stranger_in_the_run_directory_is_named(tmp_path, name, capsys):
    """A file where a folder belongs, or the other way round, ends with its path, not with a traceback."""
    stranger = tmp_path / "tiny" / name
    stranger.parent.mkdir()
    stranger.mkdir() if "." in name else stranger.touch()
    words = [str(TINY), f"output_dir={tmp_path}", *SMALL, "steps=1"]
    assert guarded(main, words) == 1
    error = capsys.readouterr().err
    assert str(stranger) in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert guarded(main, [*words, "debug.traceback=true"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_resume_never_refuses_a_used_directory(finished, capsys):
    """A fresh start must not mix with what is there."""
    folder, _ = finished
    assert guarded(main, [str(TINY), f"output_dir={folder.parent}", "checkpoint.resume=never"]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_finished_run_generates_text(finished, capsys):
    """Words without a section stand for `generate.*`; temperature 0 is deterministic."""
    folder, _ = finished
    words = (str(folder), "prompt=5 6 7", "tokens=9", "temperature=0")
    texts = set()
    for seed in (0, 1):
        capsys.readouterr()
        assert guarded(generate, [*words, f"seed={seed}"]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1
    ids = texts.pop().split()
    assert ids[:3] == ["5", "6", "7"]
    assert len(ids) == 12
    assert all(0 <= int(token) < 256 for token in ids)


def test_the_resolved_configuration_starts_the_same_run(tmp_path):
    """`config.yml` of a run is a configuration like any other."""
    own, again = tmp_path / "own", tmp_path / "again"
    assert guarded(main, [str(TINY), f"output_dir={own}", *SMALL, "steps=3", "optimizer.learning_rate=2e-3"]) == 0
    assert guarded(main, [str(own / "tiny" / "config.yml"), f"output_dir={again}"]) == 0
    losses = [[row["loss"] for row in rows_of(place / "tiny")] for place in (own, again)]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def test_zero_steps_train_nothing(tmp_path):
    """Steps 0 exits 0 with no update (B40)."""
    assert guarded(main, [str(TINY), f"output_dir={tmp_path}", "steps=0", *SMALL]) == 0
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["step"] == 0
    assert rows_of(tmp_path / "tiny") == []


def test_a_non_finite_step_ends_the_run_with_4(tmp_path, capsys):
    """The message names the step; the rows up to it are on disk; the last good state is saved (B11)."""
    words = (f"output_dir={tmp_path}", "optimizer.learning_rate=1e30", "optimizer.clip_norm=null", *SMALL)
    assert guarded(main, [str(TINY), *words]) == 4
    folder = tmp_path / "tiny"
    rows = rows_of(folder)
    assert f"step {rows[-1]['step']}:" in capsys.readouterr().err
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(math.isfinite(row["loss"]) for row in rows[:-1])
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 4)
    assert "not finite" in summary["reason"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(len(rows) - 1)]


def test_an_unfinished_run_starts_anew_and_keeps_its_old_rows(tmp_path):
    """Steps in `metrics.jsonl` rise strictly; what is set aside is not lost (B27)."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 9.0}\n{"kind": "train", "st')
    assert guarded(main, [str(TINY), f"output_dir={tmp_path}", "steps=3", *SMALL]) == 0
    steps = [row["step"] for row in rows_of(folder)]
    assert all(one < other for one, other in pairwise(steps))
    assert json.loads((folder / "metrics.dropped.jsonl").read_text())["loss"] == 9.0


def test_a_mesh_that_the_devices_cannot_form_is_refused(tmp_path, capsys):
    """Both numbers are in the message, and nothing is written (B10)."""
    assert guarded(main, [str(TINY), f"output_dir={tmp_path}", "mesh.data=16", "batch.global_size=16"]) == 2
    error = capsys.readouterr().err
    assert "16" in error
    assert "8" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "fits"),
    [(("batch.global_size=6",), "8"), (("batch.accum_steps=2",), "16"), (("eval.global_size=3",), "8")],
)
def test_rows_that_devices_cannot_share_are_refused_with_the_next_that_fits(tmp_path, capsys, words, fits):
    """Eight devices: 6 rows, 2 microbatches of 4 rows, evaluation batches of 3 (B10)."""
    assert guarded(main, [str(TINY), f"output_dir={tmp_path}", *words]) == 2
    error = capsys.readouterr().err
    assert "8 devices" in error
    assert f"the next valid value is {fits}" in error
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    """A file in the place of the folder stands for every unwritable place."""
    (tmp_path / "file").write_text("")
    assert guarded(main, [str(TINY), f"output_dir={tmp_path / 'file'}", "mesh.data=1"]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("accum_steps", [1, 4])
def test_tokens_of_an_update_count_all_microbatches(tmp_path, accum_steps):
    """Throughput without the accumulation factor is too low (B28)."""
    words = (f"output_dir={tmp_path}", "steps=2", f"batch.accum_steps={accum_steps}", *SMALL)
    assert guarded(main, [str(TINY), *words]) == 0
    assert {row["tokens"] for row in rows_of(tmp_path / "tiny")} == {8 * 32}


def test_padding_is_no_token(tmp_path):
    """A corpus of 20 bytes fills one row in part; the rest must not count (B28, B30)."""
    (tmp_path / "corpus.txt").write_text("twenty bytes of text")
    words = ("data.source=text", f"data.path={tmp_path}/corpus.txt", "data.epochs=3", "model.vocab=384")
    assert guarded(main, [str(TINY), *SMALL, *words, f"output_dir={tmp_path}", f"data.cache_dir={tmp_path}/cache"]) == 0
    rows = rows_of(tmp_path / "tiny")
    assert len(rows) == 1  # three rows in three epochs: one batch, five of its rows empty
    assert rows[0]["tokens"] == rows[0]["targets"] == 3 * 21
    assert rows[0]["epoch"] == pytest.approx(3)
