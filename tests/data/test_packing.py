"""Documents to rows: properties that hold for any lengths."""

import numpy as np
import pytest

from nnxtrain.data.corpus import Corpus
from nnxtrain.data.packing import PackedRows

SEQUENCES = (2, 5, 32)


def numbered(lengths) -> Corpus:
    """Returns a corpus whose token `i` has id `i`, so that each shows where it came from."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Corpus(np.arange(starts[-1], dtype=np.uint32), starts, 0, "")


def corpora(seed: int, *, shortest: int):
    """Yields corpora of many shapes: short documents, long ones, one alone, and mixtures."""
    draw = np.random.default_rng(seed)
    for longest in (shortest, shortest + 1, 7, 40, 300):
        for documents in (1, 2, 3, 30):
            yield numbered(draw.integers(shortest, longest + 1, documents))


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("shortest", [1, 3])
def test_every_token_but_the_first_of_a_document_is_a_target_once(sequence, shortest):
    """Cutting rows without overlap loses one target a row; a target across documents counts a token too many."""
    for corpus in corpora(sequence, shortest=shortest):
        times = np.zeros(len(corpus.tokens), int)
        rows = PackedRows(corpus, sequence)
        for row in map(rows.__getitem__, range(len(rows))):
            np.add.at(times, row["targets"][row["mask"]], 1)
        want = np.ones(len(times), int)
        want[corpus.starts[:-1]] = 0
        np.testing.assert_array_equal(times, want)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_target_is_the_next_token_of_the_same_document(sequence):
    """The first token of a document is never predicted from the one before it (B33)."""
    for corpus in corpora(sequence, shortest=1):
        document = np.searchsorted(corpus.starts, np.arange(len(corpus.tokens)), side="right")
        rows = PackedRows(corpus, sequence)
        for row in map(rows.__getitem__, range(len(rows))):
            inputs, targets = row["inputs"][row["mask"]], row["targets"][row["mask"]]
            np.testing.assert_array_equal(targets, inputs + 1)
            np.testing.assert_array_equal(document[inputs], document[targets])


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_positions_and_segments_begin_anew_with_each_document_and_row(sequence):
    """Positions that run on, or one segment for two documents, let them see each other (B33)."""
    for corpus in corpora(sequence, shortest=1):
        rows = PackedRows(corpus, sequence)
        for index in range(len(rows)):
            row = rows[index]
            real = row["segment_ids"] > 0
            begins = np.isin(row["inputs"][real], corpus.starts[:-1])
            begins[0] = True
            np.testing.assert_array_equal(row["segment_ids"][real], np.cumsum(begins))
            first = np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))
            np.testing.assert_array_equal(row["positions"][real], np.arange(len(begins)) - first)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_only_the_end_of_the_last_row_is_padding(sequence):
    """Padding elsewhere wastes work; padding that has a segment or a target is trained on."""
    for corpus in corpora(sequence, shortest=1):
        rows = PackedRows(corpus, sequence)
        assert len(rows) == -(-(len(corpus.tokens) - 1) // sequence)
        for index in range(len(rows)):
            left = len(corpus.tokens) - 1 - index * sequence
            real = np.arange(sequence) < left
            row = rows[index]
            np.testing.assert_array_equal(row["segment_ids"] > 0, real)
            np.testing.assert_array_equal(row["inputs"][real], index * sequence + np.flatnonzero(real))
            assert not any(leaf[~real].any() for leaf in row.values())


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("shortest", [2, 3])
def test_no_row_is_without_a_target(sequence, shortest):
    """A document between its marks has three tokens or more; a step on rows without targets moves nothing (B30)."""
    for corpus in corpora(sequence, shortest=shortest):
        rows = PackedRows(corpus, sequence)
        assert len(rows) > 0
        assert all(rows[index]["mask"].any() for index in range(len(rows)))


def test_rows_have_the_types_of_a_batch():
    """A batch of uint16 or int64 would compile another program."""
    row = PackedRows(numbered([5, 9]), 4)[0]
    assert {name: leaf.dtype.name for name, leaf in row.items()} == {
        "inputs": "int32",
        "targets": "int32",
        "positions": "int32",
        "segment_ids": "int32",
        "mask": "bool",
    }
    assert {leaf.shape for leaf in row.values()} == {(4,)}


@pytest.mark.parametrize("index", [-1, 4])
def test_a_row_that_is_not_there_is_an_index_error(index):
    """A negative index would read tokens from nowhere."""
    rows = PackedRows(numbered([5, 9]), 4)
    assert len(rows) == 4
    with pytest.raises(IndexError):
        rows[index]
