"""Tokens without a corpus."""

import numpy as np

from nnxtrain.data.sources.synthetic import STEPS, RandomWalkRows


def rows(**changes) -> RandomWalkRows:
    """Returns rows of 16 tokens out of 10."""
    return RandomWalkRows(**{"sequence": 16, "vocab": 10, "seed": 0, "rows": 8} | changes)


def test_a_row_is_a_function_of_seed_and_index():
    """A generator that is shared by all rows would make them depend on the order of reading."""
    backwards = [rows()[index]["inputs"] for index in reversed(range(8))][::-1]
    for index in range(8):
        np.testing.assert_array_equal(rows()[index]["inputs"], backwards[index])
    assert len({rows()[index]["inputs"].tobytes() for index in range(8)}) == 8
    assert not np.array_equal(rows()[0]["inputs"], rows(seed=1)[0]["inputs"])


def test_targets_are_the_next_inputs_a_few_ids_on():
    """The task can be learnt down to ln 4 nats and no further."""
    for index in range(8):
        row = rows()[index]
        np.testing.assert_array_equal(row["inputs"][1:], row["targets"][:-1])
        moved = (row["targets"] - row["inputs"]) % 10
        assert moved.max() < STEPS
        assert 0 <= row["inputs"].min() <= row["targets"].max() < 10
        assert row["mask"].all()
        assert (row["segment_ids"] == 1).all()
