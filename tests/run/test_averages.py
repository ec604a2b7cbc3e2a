"""Runs evaluated with averages of their weights: in training, from the checkpoint, converted, resumed (B39)."""

import json
from contextlib import closing

import numpy as np
import pytest

from nnxtrain.build.program import make_program
from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.checkpoint.tree import PARTS, flat
from nnxtrain.cli.command import guarded
from nnxtrain.config.load import load
from nnxtrain.evaluate import main as evaluate
from nnxtrain.generate import main as generate
from nnxtrain.train import main as train
from tests.support import TINY, assert_trees_equal, rows_of
from tools.convert_checkpoint import main as convert

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = ("mesh.data=1", "model.layers=1", "model.embed=32", "batch.sequence=16", "generate.tokens=8")
OFTEN = ("schedule.name=constant", "optimizer.learning_rate=1e-2", "checkpoint.every_steps=10", "eval.max_batches=2")
AVERAGES = {"schedule_free": ("optimizer.name=schedule_free_adamw",), "ema": ("optimizer.ema=0.95",)}


@pytest.fixture(scope="module", params=AVERAGES)
def run(request, tmp_path_factory):
    """Returns the words of a run of 20 steps and its directory."""
    place = tmp_path_factory.mktemp(request.param)
    words = (str(TINY), *SMALL, *OFTEN, *AVERAGES[request.param], f"output_dir={place}")
    assert guarded(train, [*words, "steps=20"]) == 0
    return words, place / "tiny"


def loss_of(capsys, folder, *words: str) -> float:
    """Returns the loss that `nnxtrain.evaluate` prints."""
    capsys.readouterr()
    assert guarded(evaluate, [str(folder), *words]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["step"] == 20
    return row["loss"]


def test_the_three_losses_agree_and_are_those_of_the_average(run, tmp_path, capsys):
    """The trained weights, which `optimizer.name=adamw optimizer.ema=null` shows, have another loss."""
    _, folder = run
    in_training = rows_of(folder, "eval")[-1]
    assert in_training["step"] == 20
    converted = tmp_path / "unrolled"
    assert guarded(convert, [str(folder), str(converted), "layout=unrolled"]) == 0
    assert loss_of(capsys, folder) == pytest.approx(in_training["loss"], abs=1e-5)
    assert loss_of(capsys, converted) == pytest.approx(in_training["loss"], abs=1e-5)
    trained = loss_of(capsys, folder, "optimizer.name=adamw", "optimizer.ema=null")
    assert abs(trained - in_training["loss"]) > 1e-3


def test_text_is_written_with_the_average(run, capsys):
    """The sample of the run and that of `nnxtrain.generate` are of the same weights, and not of the trained ones."""
    _, folder = run
    words = ("temperature=0.5", "tokens=40")
    texts = []
    for more in ((), ("optimizer.name=adamw", "optimizer.ema=null")):
        capsys.readouterr()
        assert guarded(generate, [str(folder), *words, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]
    capsys.readouterr()
    assert guarded(generate, [str(folder)]) == 0
    assert capsys.readouterr().out.rstrip() == (folder / "samples" / "step_00000020.txt").read_text().rstrip()


def arrays(folder) -> dict[str, np.ndarray]:
    """Returns every array of the newest checkpoint, by path."""
    config = load(folder / "config.yml")
    program = make_program(config)
    state = program.abstract_state()
    with closing(CheckpointStore(folder / "checkpoints", config.checkpoint)) as store:
        store.restore(store.read(store.newest()), state)
    return {"/".join((name, *path)): np.asarray(leaf) for name in PARTS for path, leaf in flat(state, name).items()}


def test_ten_and_ten_are_twenty(run, tmp_path):
    """An average that begins anew, or weights that the average replaced, show in the bytes."""
    words, folder = run
    words = (*words, f"output_dir={tmp_path}")
    assert guarded(train, [*words, "steps=10"]) == 0
    assert guarded(train, [*words, "steps=20"]) == 0
    assert_trees_equal(arrays(tmp_path / "tiny"), arrays(folder))
    (got, want) = ([(row["step"], row["loss"]) for row in rows_of(place)] for place in (tmp_path / "tiny", folder))
    assert got == want
    assert rows_of(tmp_path / "tiny", "eval")[-1] == rows_of(folder, "eval")[-1]


def test_a_run_that_starts_from_the_weights_of_another_averages_those(run, tmp_path, capsys):
    """An average that still holds the first random weights, or a buffer that is given away twice, fails here."""
    words, folder = run
    start = loss_of(capsys, folder, "optimizer.name=adamw", "optimizer.ema=null")
    words = (*words, f"output_dir={tmp_path}", "optimizer.learning_rate=0", "steps=2")
    assert guarded(train, [*words, f"checkpoint.init_from={folder}"]) == 0
    assert rows_of(tmp_path / "tiny", "eval")[-1]["loss"] == pytest.approx(start, abs=1e-5)
