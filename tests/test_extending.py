"""The programs of docs/extending.md: each adds one entry from outside the package, and it is the one that runs."""

import functools
import json
import re
import runpy
import sys

import pytest

from nnxtrain.build.registry import BUILT_IN, Registry
from nnxtrain.cli.command import guarded
from nnxtrain.evaluate import main as evaluate
from nnxtrain.generate import main as generate
from nnxtrain.models.decoder import Decoder
from nnxtrain.models.families.table import MODELS
from nnxtrain.train import main
from tests.support import ROOT, TINY, rows_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

PROGRAMS = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL))
SIZES = "model.vocab=384 model.layers=2 model.embed=32 batch.sequence=16 batch.accum_steps=2"
SMALL = f"{SIZES} steps=12 mesh.data=1 generate.tokens=2 eval.max_batches=1"
TEXT = f"data.source=text data.path={ROOT}/README.md"
MORE = {"data.tokenizer=letters": TEXT.split()}  # synthetic tokens have a tokenizer of their own
SAME = {"remat.policy", "batch.accumulator", "model.attention"}  # change how a step is computed, not what it computes


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Returns the losses of the small run without any entry from outside."""
    folder = tmp_path_factory.mktemp("plain")
    assert guarded(main, [str(TINY), f"output_dir={folder}", *SMALL.split()]) == 0
    return [row["loss"] for row in rows_of(folder / "tiny")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns what runs a program as python would, on the small configuration; it gives the exit code."""

    def started(source: str, *words: str) -> int:
        (tmp_path / "mine.py").write_text(source)
        monkeypatch.setattr(sys, "argv", ["mine.py", str(TINY), f"output_dir={tmp_path}", *SMALL.split(), *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
        return ended.value.code

    return started


def test_each_open_point_has_a_program():
    """An open point without an example is one that nobody tried from outside."""
    keys = {word.partition("=")[0] for word in PROGRAMS}
    assert keys == BUILT_IN.names().keys() - {"engine.name"}  # an engine is no part that one adds in an afternoon


@pytest.mark.parametrize("word", PROGRAMS)
def test_a_program_trains_with_its_own_entry(word, run, losses, tmp_path):
    """An entry that is looked up but not used would leave the losses of the plain run."""
    assert run(PROGRAMS[word], word, *MORE.get(word, ())) == 0
    key, name = word.split("=")
    assert f"{key.partition('.')[2]}: {name}" in (tmp_path / "tiny" / "config.yml").read_text()
    found = [row["loss"] for row in rows_of(tmp_path / "tiny")]
    assert (found == pytest.approx(losses, rel=1e-6)) is (key in SAME)


def test_an_entry_of_ones_own_does_what_it_says(run, tmp_path):
    """The schedule is the easiest to see from outside: its teeth are in the metrics."""
    words = ("schedule.name=sawtooth", "schedule.warmup_steps=0", "schedule.final_fraction=0.1")
    assert run(PROGRAMS[words[0]], *words) == 0
    rates = [row["learning_rate"] / 1e-3 for row in rows_of(tmp_path / "tiny")]
    assert rates == pytest.approx([*(1 - 0.1 * tooth for tooth in range(10)), 1, 0.9], rel=1e-5)


def test_a_run_with_an_entry_of_ones_own_is_known_when_it_is_started_again(run, tmp_path, capsys):
    """Its saved configuration holds the name, which the schema of the package alone refuses."""
    word = "optimizer.name=signs"
    assert run(PROGRAMS[word], word, "steps=1") == 0
    assert run(PROGRAMS[word], word, "steps=1") == 0
    assert "is finished" in capsys.readouterr().out
    assert guarded(main, [str(TINY), f"output_dir={tmp_path}", word]) == 2


def test_such_a_run_is_evaluated_and_written_from_with_the_same_tables(run, tmp_path, capsys):
    """The page says so; the built-in model has other scores."""
    word = "model.name=wide"
    assert run(PROGRAMS[word], word) == 0
    made = runpy.run_path(str(tmp_path / "mine.py"), run_name="mine")
    registry = Registry(models=MODELS | {"wide": functools.partial(Decoder, made["wide"])})
    folder = tmp_path / "tiny"
    capsys.readouterr()
    assert guarded(functools.partial(evaluate, registry=registry), [str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(rows_of(folder, "eval")[-1]["loss"], rel=1e-6)
    assert guarded(functools.partial(generate, registry=registry), [str(folder)]) == 0
    assert capsys.readouterr().out == next((folder / "samples").iterdir()).read_text()


def test_a_misspelt_name_is_refused_with_the_entries_of_ones_own(run, capsys):
    """A name from outside must be in the list that a refusal shows."""
    assert run(PROGRAMS["optimizer.name=signs"], "optimizer.name=sign") == 2
    assert "did you mean signs?" in capsys.readouterr().err


def test_the_term_of_a_layer_is_logged_by_its_name(run, tmp_path):
    """Somebody who adds a term wants to see it fall."""
    word = "model.name=calm"
    assert run(PROGRAMS[word], word, "steps=2") == 0
    assert all(row["calm"] > 0 for row in rows_of(tmp_path / "tiny"))


def test_the_tokenizer_of_ones_own_is_the_one_that_the_run_keeps(run, tmp_path):
    """The run directory must say how its text became ids."""
    word = "data.tokenizer=letters"
    assert run(PROGRAMS[word], word, *MORE[word], "steps=1") == 0
    kept = {path.name: path.read_text() for path in (tmp_path / "tiny" / "tokenizer").iterdir()}
    assert "letters-1" in "".join(kept.values())
    assert "abcdefghijklmnopqrstuvwxyz" in kept["letters.json"]


def test_a_kernel_of_ones_own_is_refused_where_it_lacks_something(run, capsys):
    """What the entry states decides, not a list elsewhere."""
    word = "model.attention=plain"
    assert run(PROGRAMS[word], word, "model.pattern=local", "model.window=8") == 2
    assert "plain does not support a sliding window; usable here: auto, blocked" in capsys.readouterr().err
