"""Summary and report say what is true at any moment, and a run that was stopped says how to go on."""

import json
import shlex
import shutil
import signal

import jax
import pytest

from nnxtrain.cli.command import guarded
from nnxtrain.config.load import load
from nnxtrain.config.log import LogConfig
from nnxtrain.engine.single import SingleEngine
from nnxtrain.host.console import Console
from nnxtrain.loops.train_loop import StepRecord
from nnxtrain.metrics.recorder import Recorder, Scale
from nnxtrain.metrics.rewind import records
from nnxtrain.run.context import command_to_go_on
from nnxtrain.train import main
from tests.support import TINY, rows_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = (str(TINY), "mesh.data=1", "model.layers=1", "model.embed=32", "batch.sequence=16", "generate.tokens=1")
SMALL += ("schedule.name=constant", "eval.max_batches=1")


def shown(folder) -> dict[str, str]:
    """Returns what the table of a report says."""
    text = (folder / "report.html").read_text()
    table = text.partition("<h2>Summary</h2>")[2].partition("</table>")[0]
    rows = [row.partition("</th><td>") for row in table.split("<tr><th>")[1:]]
    return {name: value.partition("</td>")[0].replace("&quot;", '"') for name, _, value in rows}


def summary_of(folder) -> dict:
    """Returns the summary of a run, once its report was seen to say the same."""
    summary, report = json.loads((folder / "summary.json").read_text()), shown(folder)
    for name in ("status", "step", "exit_code", "reason"):
        value = summary[name]
        assert report[name] == (value if isinstance(value, str) else json.dumps(value)), name
    return summary


@pytest.fixture
def watched(monkeypatch):
    """Returns a function that looks at a run before each step, and what it saw; a signal is as real as any."""
    looks, seen = [], []
    whole = SingleEngine.step

    def step(engine, batch):
        jax.block_until_ready(engine._leaves)
        seen.append([look() for look in looks])
        return whole(engine, batch)

    monkeypatch.setattr(SingleEngine, "step", step)
    return looks.append, seen


def test_a_run_that_lives_says_so_and_how_far_it_came(tmp_path, watched):
    """Whoever looks at a long run sees its last save, and never the end of the run before it."""
    look, seen = watched
    words = (*SMALL, f"output_dir={tmp_path}", "checkpoint.every_steps=2")
    folder = tmp_path / "tiny"
    look(lambda: summary_of(folder))
    assert guarded(main, [*words, "steps=5"]) == 0
    states = [(summary["status"], summary["exit_code"], summary["step"]) for (summary,) in seen]
    assert states == [("running", None, step) for step in (0, 0, 2, 2, 4)]
    end = summary_of(folder)
    assert (end["status"], end["exit_code"], end["step"]) == ("done", 0, 5)
    seen.clear()
    assert guarded(main, [*words, "steps=6"]) == 0
    assert [(summary["status"], summary["step"]) for (summary,) in seen] == [("running", 5)]


def test_a_stopped_run_says_where_and_how_to_go_on(tmp_path, watched, capsys):
    """Its report was of the last evaluation, or of none; its summary had forgotten the evaluation that was made."""
    look, _ = watched
    folder = tmp_path / "tiny"
    words = (*SMALL, f"output_dir={tmp_path}", "steps=50", "eval.every_steps=2", "seed=3")

    sent = []

    def stop_once():
        if len(rows_of(folder)) >= 4 and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGTERM)

    look(stop_once)
    assert guarded(main, words) == 75
    summary = summary_of(folder)
    stopped = rows_of(folder)[-1]["step"]
    assert (summary["status"], summary["exit_code"], summary["step"]) == ("preempted", 75, stopped)
    (evaluation,) = summary["eval"].values()
    assert evaluation["step"] == rows_of(folder, "eval")[-1]["step"]
    assert evaluation["loss"] == rows_of(folder, "eval")[-1]["loss"]
    *_, said, command = capsys.readouterr().out.splitlines()
    assert said == f"stopped  after step {stopped}; to go on:"
    assert shlex.split(command)[-len(words) - 2 :] == ["-m", "nnxtrain.train", *words]


@pytest.mark.parametrize(("resume", "added"), [("auto", []), ("must", []), ("7", ["checkpoint.resume=auto"])])
def test_the_command_that_goes_on_does_not_go_back(tmp_path, resume, added):
    """`checkpoint.resume=7` would throw away everything since step 7, each time."""
    words = ["python", "-m", "nnxtrain.train", "my file.yml", f"checkpoint.resume={resume}"]
    config = load(TINY, [f"checkpoint.resume={resume}"])
    assert shlex.split(command_to_go_on(config, tmp_path, words)) == [*words, *added]


def test_a_run_that_fails_says_so_in_its_report(tmp_path):
    """A report that was written before the end was known says anything but the end."""
    words = (*SMALL, f"output_dir={tmp_path}", "optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "steps=9")
    assert guarded(main, [*words, "eval.every_steps=1"]) == 4
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    report = shown(tmp_path / "tiny")
    assert (report["status"], report["exit_code"]) == (summary["status"], str(summary["exit_code"])) == ("failed", "4")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Returns the directory of a run of four steps with a sample and a checkpoint at 2 and 4."""
    place = tmp_path_factory.mktemp("four")
    own = ("steps=4", "checkpoint.every_steps=2", "eval.every_steps=2", "generate.tokens=4")
    assert guarded(main, [*SMALL, *own, f"output_dir={place}"]) == 0
    return place / "tiny"


def test_samples_of_dropped_weights_are_set_aside(four, tmp_path):
    """Report and console showed the text of weights that are no longer those of the run."""
    shutil.copytree(four, tmp_path / "tiny")
    samples = tmp_path / "tiny" / "samples"
    old = {path.name: path.read_text() for path in samples.iterdir()}
    assert sorted(old) == ["step_00000002.txt", "step_00000004.txt"]
    (samples / "step_by_hand.txt").write_text("mine")
    (samples / "step_00000002.txt").write_text("kept")
    (samples / "step_00000004.txt").write_text("of dropped weights")
    back = ("steps=4", "checkpoint.resume=2", "generate.tokens=4", "optimizer.learning_rate=0.05")
    assert guarded(main, [*SMALL, *back, f"output_dir={tmp_path}"]) == 0
    assert (samples / "step_00000002.txt").read_text() == "kept"
    assert (samples / "step_00000004.txt").read_text() != "of dropped weights"
    dropped = tmp_path / "tiny" / "samples.dropped"
    assert [path.read_text() for path in dropped.iterdir()] == ["of dropped weights"]
    assert "of dropped weights" not in (tmp_path / "tiny" / "report.html").read_text()
    assert (samples / "step_by_hand.txt").exists()


def test_what_a_run_writes_stays_beside_a_checkpoint_folder_that_is_elsewhere(four, tmp_path):
    """`checkpoints -> /big/ck` is how people use a second disk; traces went to /big, requests there were not seen."""
    folder, large = tmp_path / "tiny", tmp_path / "big"
    shutil.copytree(four, folder)
    large.mkdir()
    (folder / "checkpoints").rename(large / "ck")
    (folder / "checkpoints").symlink_to(large / "ck")
    (folder / "PROFILE_NOW").touch()
    assert guarded(main, [*SMALL, "steps=6", "profile.active=1", f"output_dir={tmp_path}"]) == 0
    assert [path.name for path in large.iterdir()] == ["ck"]
    assert not (folder / "PROFILE_NOW").exists()
    assert len(list((folder / "profile").iterdir())) == 1


def test_a_resume_that_drops_nothing_leaves_no_empty_file(four, tmp_path):
    """An empty `metrics.dropped.jsonl` says that something was lost."""
    shutil.copytree(four, tmp_path / "tiny")
    assert guarded(main, [*SMALL, "steps=5", "generate.tokens=4", f"output_dir={tmp_path}"]) == 0
    assert not (tmp_path / "tiny" / "metrics.dropped.jsonl").exists()
    assert not (tmp_path / "tiny" / "samples.dropped").exists()


def test_every_save_is_a_candidate_for_the_best(tmp_path):
    """Saves between two evaluations carried no loss, and the best of them was never kept."""
    own = ("steps=7", "checkpoint.every_steps=2", "eval.every_steps=3", "checkpoint.keep_last=9")
    assert guarded(main, [*SMALL, *own, "checkpoint.keep_best=validation", f"output_dir={tmp_path}"]) == 0
    folder = tmp_path / "tiny"
    losses = {row["step"]: row["loss"] for row in rows_of(folder, "eval")}
    saved = sorted((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    assert [int(path.name) for path in saved] == [2, 4, 6, 7]
    for path in saved:
        assert json.loads((path / "metrics" / "metrics").read_text())["loss"] == pytest.approx(losses[int(path.name)])


def test_a_run_that_goes_back_counts_to_its_new_end(tmp_path, capsys):
    """Rows that a rollback leaves out end the data earlier: the last step was none for console and TensorBoard."""
    console = Console("lines")
    scale = Scale(12, 1.0, None, lambda position: 0.0)
    recorder = Recorder(tmp_path, console, scale=scale, log=LogConfig(every_steps=100))
    recorder.go_back(0, steps=5)
    metrics = {"loss": 1.0, "learning_rate": 1.0, "grad_norm": 1.0, "tokens": 8, "bad": False, "skipped": False}
    recorder.train(StepRecord(5, metrics, None, 1.0, 0.0))
    recorder.close()
    console.close()
    assert "step 5/5" in capsys.readouterr().out
    points = [event.step for path in sorted((tmp_path / "tensorboard").iterdir()) for _, event in records(path)]
    assert points[-1] == 5
