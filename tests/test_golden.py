"""The loss of twenty steps of `configs/tiny.yml`; changed only in a commit that says why."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from nnxtrain.build.feed import open_data
from nnxtrain.data.batches import START
from tests.support import tiny_program

GOLDEN = Path(__file__).parent / "golden" / "tiny_losses.json"


def test_losses_of_tiny_are_the_golden_ones():
    """Any change of weights, data, loss or update shows here."""
    line = ".".join(jax.__version__.split(".")[:2])
    golden = json.loads(GOLDEN.read_text())
    if line not in golden:
        pytest.skip(f"no golden losses for jax {line}; there are {sorted(golden)}")
    program = tiny_program()
    data, engine = open_data(program), program.make_engine()
    engine.initialise()
    batches = data.train.start(START, put=data.put_train, prefetch=1)
    losses = [float(engine.step(next(batches)[0])["loss"]) for _ in range(20)]
    batches.close()
    np.testing.assert_allclose(losses, golden[line], rtol=2e-6)
