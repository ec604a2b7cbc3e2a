"""Where a run is in its data, in rows: any start, any batch size, and ranges that are never read again."""

import itertools

import numpy as np
import pytest

from nnxtrain.data.batches import START, BatchShape, Order, Position, TrainBatches

VOCAB = 1000


class NumberedRows:
    """Rows that hold their own number plus 1 in every token, and remember who was read."""

    def __init__(self, count: int):
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.read.append(int(index))
        tokens = np.full(4, index + 1, np.int32)
        ones = np.ones(4, np.int32)
        return {"inputs": tokens, "targets": tokens, "positions": ones, "segment_ids": ones, "mask": ones > 0}


def batches_of(rows, size: int, *, epochs: int | None = 3, shuffle=True, drop_remainder=False) -> TrainBatches:
    """Returns batches of `size` rows."""
    return TrainBatches(rows, BatchShape(1, size), vocab=VOCAB, order=Order(0, shuffle, epochs, drop_remainder))


def read(batches: TrainBatches, position: Position = START, count: int | None = None):
    """Returns the numbers of the rows of each batch, without empty rows, and the position after each."""
    stream = batches.start(position, put=lambda batch: batch, prefetch=2)
    found = list(itertools.islice(stream, count))
    stream.close()
    numbers = [batch["inputs"][..., 0].ravel() for batch, _ in found]
    return [(batch[batch > 0] - 1).tolist() for batch in numbers], [position for _, position in found]


def order_of(rows: int, epochs: int, **words) -> list[int]:
    """Returns the numbers of all rows in the order of reading, epochs laid end to end."""
    groups, _ = read(batches_of(NumberedRows(rows), 1, epochs=epochs, **words))
    return list(itertools.chain(*groups))


@pytest.mark.parametrize("size", [1, 3, 4, 8, 50])
@pytest.mark.parametrize("first", [0, 1, 7, 40, 41, 79, 119, 120, 130])
@pytest.mark.parametrize("shuffle", [True, False])
def test_reading_starts_at_any_row_with_any_batch_size(first, size, shuffle):
    """After a change of the batch size the position is no multiple of it: no row is skipped or repeated (B18)."""
    groups, positions = read(batches_of(NumberedRows(40), size, shuffle=shuffle), Position(first))
    assert list(itertools.chain(*groups)) == order_of(40, 3, shuffle=shuffle)[first:]
    assert all(len(group) == size for group in groups[:-1])
    assert [position.row for position in positions] == [
        min(first + size * number, 120) for number in range(1, len(groups) + 1)
    ]


@pytest.mark.parametrize("size", [4, 7])
def test_every_position_that_was_yielded_goes_on_with_the_next_batch(size):
    """A position of the prefetched batch, not of the one that was handed out, would lose rows (B15)."""
    groups, positions = read(batches_of(NumberedRows(10), size))
    for number, position in enumerate(positions, 1):
        assert read(batches_of(NumberedRows(10), size), position)[0] == groups[number:]


def test_a_changed_batch_size_goes_on_with_the_next_row():
    """Seven batches of 8, then batches of 16: together they are the order of one run (B18)."""
    head, positions = read(batches_of(NumberedRows(40), 8), count=7)
    tail, _ = read(batches_of(NumberedRows(40), 16), positions[-1])
    assert list(itertools.chain(*head, *tail)) == order_of(40, 3)


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize(
    "skipped",
    [
        ((8, 16),),
        ((0, 8),),
        ((16, 24), (8, 16)),
        ((8, 20), (10, 14)),
        ((8, 20), (14, 30)),
        ((3, 5), (50, 61), (118, 120)),
        ((0, 120),),
    ],
)
def test_skipped_ranges_are_never_read(size, skipped):
    """Rows that broke a step would break it again; overlapping ranges and those of two epochs count too (B11)."""
    rows = NumberedRows(40)
    groups, positions = read(batches_of(rows, size, shuffle=False), Position(0, skipped))
    left_out = set(itertools.chain(*(range(first, end) for first, end in skipped)))
    wanted = [row for row in range(120) if row not in left_out]
    assert list(itertools.chain(*groups)) == [row % 40 for row in wanted]
    assert sorted(rows.read) == sorted(row % 40 for row in wanted)
    assert all(position.skipped == skipped for position in positions)


@pytest.mark.parametrize("size", [4, 8])
def test_a_position_between_skipped_ranges_goes_on_as_an_unbroken_run(size):
    """A run that rolled back, and was then killed and resumed, must see what it would have seen (B15)."""
    start = Position(0, ((8, 16), (56, 60), (60, 61)))
    groups, positions = read(batches_of(NumberedRows(40), size), start)
    for number, position in enumerate(positions, 1):
        assert read(batches_of(NumberedRows(40), size), position)[0] == groups[number:]


def test_a_range_is_added_and_the_others_stay():
    """A second rollback must not forget the first."""
    position = Position(24).without(24, 32).without(40, 48)
    assert position == Position(24, ((24, 32), (40, 48)))
    assert Position(24).skipped == ()


def test_endless_data_with_skipped_ranges_goes_on():
    """Without an end the last range has none either."""
    batches = batches_of(NumberedRows(10), 4, epochs=None, shuffle=False)
    position = Position(2, ((6, 8), (0, 1)))
    groups, positions = read(batches, position, count=3)
    assert groups == [[2, 3, 4, 5], [8, 9, 0, 1], [2, 3, 4, 5]]
    assert [position.row for position in positions] == [6, 12, 16]
    assert batches.count(position) is None


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("row", [0, 5, 12, 29, 30, 31])
@pytest.mark.parametrize("skipped", [(), ((12, 16),), ((0, 3), (5, 6), (28, 30))])
def test_the_count_is_the_number_of_batches_that_are_read(size, row, skipped):
    """A count that is too high waits for batches that never come; too low loses rows (B30)."""
    position = Position(row, skipped)
    groups, _ = read(batches_of(NumberedRows(10), size), position)
    assert batches_of(NumberedRows(10), size).count(position) == len(groups)


@pytest.mark.parametrize("rows", [1, 6, 10, 16])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_the_count_of_a_fresh_run_is_the_documented_formula(rows, epochs, size):
    """`ceil(R E / B)`, and `floor(R E / B)` with drop_remainder (B30)."""
    assert batches_of(NumberedRows(rows), size, epochs=epochs).count(START) == -(-rows * epochs // size)
    if rows * epochs >= size:
        dropping = batches_of(NumberedRows(rows), size, epochs=epochs, drop_remainder=True)
        assert dropping.count(START) == rows * epochs // size == len(read(dropping)[0])


@pytest.mark.parametrize(("row", "size"), [(8, 16), (36, 16), (4, 8), (20, 6), (36, 4), (40, 4)])
def test_only_the_last_incomplete_batch_is_dropped_from_wherever_reading_starts(row, size):
    """A remainder reckoned from row 0 drops whole batches, or fills one up, after a change of the batch size (B18)."""
    batches = batches_of(NumberedRows(40), size, epochs=1, drop_remainder=True)
    groups, _ = read(batches, Position(row))
    assert [len(group) for group in groups] == [size] * ((40 - row) // size)
    assert batches.count(Position(row)) == len(groups)


def test_epochs_are_rows_over_the_rows_of_one():
    """The metric is read as a share of the data, whatever the batch size."""
    assert batches_of(NumberedRows(40), 8).epochs(Position(0)) == 0
    assert batches_of(NumberedRows(40), 8).epochs(Position(112)) == batches_of(NumberedRows(40), 3).epochs(
        Position(112)
    )
    assert batches_of(NumberedRows(40), 8).epochs(Position(112)) == pytest.approx(2.8)
