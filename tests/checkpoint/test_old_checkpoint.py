"""A run that version 0.1 stopped goes on with this version.

The archive is of a run of `configs/tiny.yml` with three layers in a pattern of two, scanned, with dropout: its
directory as it was after step 4, and the rows of the four steps that followed. The digests are of the arrays as the
version that wrote them read them back.
"""

import hashlib
import json
import tarfile
from contextlib import closing

import jax
import numpy as np
import pytest

from nnxtrain.build.program import make_program
from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.checkpoint.tree import PARTS, flat
from nnxtrain.cli.command import guarded
from nnxtrain.config.load import load
from nnxtrain.train import main
from tests.support import ROOT, rows_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

DIGESTS = json.loads((ROOT / "tests" / "golden" / "run_of_0.1.json").read_text())
SAVED_STEP = 4


@pytest.fixture
def old(tmp_path):
    """Returns the directory of the run."""
    with tarfile.open(ROOT / "tests" / "golden" / "run_of_0.1.tar.gz") as archive:
        archive.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


def test_every_array_is_read_back_bit_for_bit(old):
    """A renamed part, a new leaf or another order of layers would change a name or a digest."""
    config = load(old / "config.yml")
    state = make_program(config, devices=jax.devices()[:1]).abstract_state()
    with closing(CheckpointStore(old / "checkpoints", config.checkpoint)) as store:
        store.restore(store.read(SAVED_STEP), state)
    found = {name: {"/".join(path): _digest(leaf) for path, leaf in flat(state, name).items()} for name in PARTS}
    assert found == DIGESTS


def test_the_run_goes_on_as_it_did(old):
    """Weights alone do not suffice: masks, rows and the learning rate must be those of the same steps."""
    want = [row["loss"] for row in rows_of(old)][SAVED_STEP:]
    assert guarded(main, [str(old / "config.yml"), f"output_dir={old.parent}", "run_name=old"]) == 0
    rows = rows_of(old)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["loss"] for row in rows][SAVED_STEP:] == pytest.approx(want, rel=1e-6)


def _digest(leaf) -> str:
    return hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()[:16]
