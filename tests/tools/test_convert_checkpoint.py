"""Layers stacked and separated on disk."""

import subprocess
import sys

import pytest

from nnxtrain.cli.command import guarded
from nnxtrain.train import main
from tests.support import ROOT, TINY, rows_of
from tools.convert_checkpoint import main as convert
from tools.kill_test import weights

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def run(tmp_path_factory, quick_compiles):
    """Returns a run of six steps, of three layers in groups of two kinds."""
    folder = tmp_path_factory.mktemp("runs")
    sizes = ("model.layers=3", "model.embed=32", "model.pattern=local,global", "model.window=8", "batch.sequence=16")
    words = (
        f"output_dir={folder}",
        "run_name=scanned",
        "steps=6",
        "mesh.data=1",
        "generate.tokens=1",
        "eval.max_batches=1",
        *sizes,
    )
    assert guarded(main, [str(TINY), *words]) == 0
    return folder / "scanned"


def test_there_and_back_is_the_same_bit_for_bit(run):
    """Weights, moments, guard and counters come back under their first names."""
    unrolled, back = run.with_name("unrolled"), run.with_name("back")
    assert guarded(convert, [str(run), str(unrolled), "layout=unrolled"]) == 0
    assert guarded(convert, [str(unrolled), str(back), "layout=scanned", "step=6"]) == 0
    assert any("layers/2" in path for path in weights(unrolled))
    assert any("rest/0" in path for path in weights(run))
    assert weights(back) == weights(run)


@pytest.mark.slow
def test_a_converted_run_goes_on_with_the_same_loss(run):
    """The next step must not see the layout (B14)."""
    unrolled = run.with_name("goes_on")
    assert guarded(convert, [str(run), str(unrolled), "layout=unrolled"]) == 0
    losses = []
    for place in (unrolled, run):
        assert guarded(main, [str(place / "config.yml"), "steps=7"]) == 0
        losses.append(rows_of(place)[-1]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    "words",
    [(), ("layout=stacked",), ("layout=scanned", "stp=3"), ("layout=scanned", "step=x"), ("layout=scanned", "step=9")],
)
def test_what_cannot_be_converted_is_refused(run, tmp_path, words, capsys):
    """Nothing is written, and one message says why."""
    assert guarded(convert, [str(run), str(tmp_path / "out"), *words]) in (2, 6)
    assert capsys.readouterr().err.startswith("error:")
    assert not (tmp_path / "out").exists()


def test_help_answers():
    """The first thing that a user tries."""
    command = [sys.executable, "tools/convert_checkpoint.py", "--help"]
    assert "RUN_DIR" in subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
