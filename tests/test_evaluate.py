"""`python -m nnxtrain.evaluate`: the loss of a run, from its files alone."""

import json
import shutil

import jax
import pytest

from nnxtrain.cli.command import guarded
from nnxtrain.evaluate import main as evaluate
from nnxtrain.train import main as train
from tests.support import TINY, rows_of, run_module

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = (str(TINY), "mesh.data=1", "model.layers=1", "model.embed=32", "batch.sequence=16", "generate.tokens=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the words and the directory of a finished run with two held-out sets."""
    place = tmp_path_factory.mktemp("evaluate")
    for name, size in (("a", 700), ("one", 300), ("two", 500)):
        (place / f"{name}.txt").write_text("".join(chr(97 + index * index % 23) for index in range(size)))
    data = ("data.source=text", f"data.path={place}/a.txt", f"data.cache_dir={place}/cache", "model.vocab=384")
    sets = f"data.validation_path=[one={place}/one.txt,two={place}/two.txt]"
    words = (*SMALL, *data, sets, f"output_dir={place}", "steps=6", "checkpoint.every_steps=3")
    assert guarded(train, [*words]) == 0
    return words, place / "tiny"


def results(out: str) -> dict[str, dict]:
    """Returns what was printed, by the name of the set."""
    rows = [json.loads(line) for line in out.splitlines()]
    return {row.pop("name"): row for row in rows}


def snapshot(folder) -> dict[str, tuple[int, bytes]]:
    """Returns time and content of every file, and the time of every folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted([folder, *folder.rglob("*")])
    }


def final_rows(folder) -> dict[str, dict]:
    """Returns the run's own evaluation of its last step, by the name of the set."""
    rows = [row for row in rows_of(folder, "eval") if row["step"] == 6]
    return {row["name"]: {key: row[key] for key in row if key not in ("kind", "name")} for row in rows}


def test_it_says_what_the_run_said_at_its_end(finished, capsys):
    """Other weights, other rows or another average would show here."""
    _, folder = finished
    capsys.readouterr()
    assert guarded(evaluate, [str(folder)]) == 0
    got, want = results(capsys.readouterr().out), final_rows(folder)
    assert got.keys() == want.keys() == {"one", "two"}
    for name, row in want.items():
        assert got[name].keys() == row.keys()
        assert got[name]["step"] == 6
        assert got[name]["targets"] == row["targets"]
        assert got[name]["loss"] == pytest.approx(row["loss"], rel=1e-6)
        assert got[name]["bits_per_byte"] == pytest.approx(row["bits_per_byte"], rel=1e-6)


def test_a_configuration_with_its_output_dir_names_the_same_run(finished, capsys):
    """`CONFIG.yml output_dir=...` is how the run was started."""
    words, folder = finished
    capsys.readouterr()
    assert guarded(evaluate, [*words]) == 0
    by_config = capsys.readouterr().out
    assert guarded(evaluate, [str(folder)]) == 0
    assert capsys.readouterr().out == by_config


@pytest.mark.parametrize("leftover", [False, True])
def test_nothing_in_the_run_directory_changes(finished, tmp_path, leftover):
    """Someone looks at a live run: its half-written save must stay, and no lock, log or row may appear."""
    _, folder = finished
    copy = tmp_path / "tiny"
    shutil.copytree(folder, copy)
    if leftover:
        (copy / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
        (copy / "checkpoints" / "9.orbax-checkpoint-tmp" / "part").write_text("half")
    before = snapshot(copy)
    assert guarded(evaluate, [str(copy)]) == 0
    assert snapshot(copy) == before


def test_keys_win_over_those_of_the_run(finished, capsys):
    """Fewer rows, another batch, the other layout: the loss of the same rows is the same."""
    _, folder = finished
    capsys.readouterr()
    assert guarded(evaluate, [str(folder), "eval.global_size=3", "model.scan_layers=false"]) == 0
    got, want = results(capsys.readouterr().out), final_rows(folder)
    for name in want:
        assert got[name]["loss"] == pytest.approx(want[name]["loss"], rel=1e-6)
    assert guarded(evaluate, [str(folder), "eval.global_size=2", "eval.max_batches=1"]) == 0
    assert {row["targets"] for row in results(capsys.readouterr().out).values()} == {32}


def test_standard_output_is_json_alone(finished):
    """A script reads it line by line; what jax or orbax have to say must not stand between."""
    ended = run_module("evaluate", str(finished[1]))
    assert ended.returncode == 0, ended.stderr
    assert results(ended.stdout).keys() == {"one", "two"}
    assert ended.stderr == ""


def test_a_model_of_another_size_is_refused(finished, capsys):
    """The message names path and shapes, as a resume does (B14)."""
    assert guarded(evaluate, [str(finished[1]), "model.mlp=64"]) == 6
    error = capsys.readouterr().err
    assert "stack/layer/mlp" in error
    assert "64" in error


def test_a_damaged_checkpoint_is_an_error_of_the_checkpoint(finished, tmp_path, capsys):
    """No loss of half a model."""
    copy = tmp_path / "tiny"
    shutil.copytree(finished[1], copy)
    shutil.rmtree(copy / "checkpoints" / "6" / "model")
    assert guarded(evaluate, [str(copy)]) == 6
    assert "step 6" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_or_without_a_held_out_set_is_refused(tmp_path, capsys):
    """Each message says what is missing."""
    assert guarded(evaluate, [*SMALL, f"output_dir={tmp_path}"]) == 6
    assert "no checkpoint" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.txt").write_text("text " * 100)
    data = ("data.source=text", f"data.path={tmp_path}/a.txt", f"data.cache_dir={tmp_path}/cache", "model.vocab=384")
    assert guarded(evaluate, [*SMALL, *data, f"output_dir={tmp_path}"]) == 2
    assert "data.validation_path" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    """The likeliest mistake is the folder above."""
    assert guarded(evaluate, [str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_evaluation_works_on_several_devices(finished, capsys):
    """A run of one device evaluated on eight gives the same loss."""
    assert jax.device_count() == 8
    assert guarded(evaluate, [str(finished[1]), "mesh.data=8"]) == 0
    got, want = results(capsys.readouterr().out), final_rows(finished[1])
    for name in want:
        assert got[name]["loss"] == pytest.approx(want[name]["loss"], rel=1e-6)
