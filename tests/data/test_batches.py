"""Rows to batches: which rows, in which order, how many (B30, B35, B51)."""

import itertools
import threading
import time

import numpy as np
import pytest

from nnxtrain.data.batches import START, BatchShape, Order, Position, TrainBatches, eval_batches
from nnxtrain.data.corpus import Corpus
from nnxtrain.data.packing import PackedRows
from nnxtrain.errors import DataError
from tests.support import assert_trees_equal

VOCAB = 1000


class NumberedRows:
    """Rows that hold their own number plus 1 in every token; row `i` has `i % 4 + 1` targets."""

    def __init__(self, count: int, *, bad: dict[int, int] | None = None):
        self.count = count
        self.bad = bad or {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        assert 0 <= index < self.count
        tokens = np.full(4, index + 1, np.int32)
        if index in self.bad:
            tokens[2] = self.bad[index]
        mask = np.arange(4) < index % 4 + 1
        positions = np.arange(4, dtype=np.int32)
        return {
            "inputs": tokens,
            "targets": tokens,
            "positions": positions,
            "segment_ids": np.ones(4, np.int32),
            "mask": mask,
        }


def batches_of(rows, *, cut=(1, 4), seed=0, shuffle=True, epochs: int | None = 1, drop_remainder=False, vocab=VOCAB):
    """Returns the batches of `rows`."""
    return TrainBatches(rows, BatchShape(*cut), vocab=vocab, order=Order(seed, shuffle, epochs, drop_remainder))


def read(batches: TrainBatches, first: int = 0, count: int | None = None) -> list:
    """Returns up to `count` batches as numpy arrays, from number `first` on."""
    stream = batches.start(Position(first * batches.global_size), put=lambda batch: batch, prefetch=2)
    try:
        return [batch for batch, _ in itertools.islice(stream, count)]
    finally:
        stream.close()


def numbers(batches: list) -> list[int]:
    """Returns the numbers of the rows in the order read, without empty rows."""
    found = np.concatenate([batch["inputs"][..., 0].ravel() for batch in batches])
    return (found[found > 0] - 1).tolist()


@pytest.mark.parametrize("count", [1, 7, 12, 40])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_row_once(count, shuffle):
    """Drawing rows at random leaves some out (B51)."""
    order = numbers(read(batches_of(NumberedRows(count), epochs=3, shuffle=shuffle)))
    for epoch in range(3):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))
    if not shuffle:
        assert order == [*range(count)] * 3


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    """Batch size, microbatches, number of epochs and earlier reading must not move a row."""
    rows = NumberedRows(40)
    want = numbers(read(batches_of(rows, epochs=3)))
    assert numbers(read(batches_of(rows, epochs=3))) == want
    assert numbers(read(batches_of(rows, epochs=1))) == want[:40]
    assert numbers(read(batches_of(rows, epochs=3, cut=(3, 2)))) == want
    assert numbers(read(batches_of(rows, epochs=None, cut=(1, 8)), count=15)) == want


def test_every_epoch_has_an_order_of_its_own():
    """The same order each time would show the model the same neighbours."""
    order = numbers(read(batches_of(NumberedRows(40), epochs=3)))
    epochs = {tuple(order[start : start + 40]) for start in (0, 40, 80)}
    assert len(epochs) == 3
    assert tuple(range(40)) not in epochs


def test_another_seed_is_another_order_of_the_same_rows():
    """A seed that reaches only the weights would leave the order (B51)."""
    orders = [numbers(read(batches_of(NumberedRows(40), seed=seed))) for seed in (0, 1, 2**32, 2**40)]
    assert len(set(map(tuple, orders))) == 4
    assert all(sorted(order) == list(range(40)) for order in orders)


@pytest.mark.parametrize("first", [0, 1, 9, 10, 17, 25])
def test_starting_at_a_batch_gives_what_reading_from_the_first_gives(first):
    """A resumed run must see what an unbroken one would, also in a later epoch and across its border."""
    batches = batches_of(NumberedRows(37), cut=(2, 2), epochs=3)
    assert batches.count(START) == 28
    assert_trees_equal(read(batches, first), read(batches)[first:])


def test_starting_far_on_in_endless_data_reads_nothing_before():
    """Reading and throwing away what came before would take hours."""
    rows = CountedRows(37)
    (batch,) = read(batches_of(rows, epochs=None, shuffle=False), 10**9, 1)
    first = 4 * 10**9 % 37
    assert numbers([batch]) == [(first + place) % 37 for place in range(4)]
    assert len(rows.read) < 37


def test_starting_at_the_end_gives_nothing():
    """A finished run that is started again must not begin anew."""
    batches = batches_of(NumberedRows(8))
    assert read(batches, 2) == read(batches, 3) == []


def packed(tokens: int, sequence: int = 8) -> PackedRows:
    """Returns the rows of one document of `tokens` tokens."""
    return PackedRows(Corpus(np.arange(tokens, dtype=np.uint16), np.array([0, tokens]), 0, ""), sequence)


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("epochs", [1, 3, None])
@pytest.mark.parametrize("corpus", ["20 tokens", "exactly 1.5 batches", "many"])
def test_the_number_of_batches_is_the_documented_formula(corpus, epochs, drop_remainder):
    """`ceil(R E / B)`, or `floor` with drop_remainder; never a batch without a target, never a wait (B30)."""
    rows = {"20 tokens": packed(20, 32), "exactly 1.5 batches": packed(6 * 8 + 1), "many": packed(1000)}[corpus]
    count = {"20 tokens": 1, "exactly 1.5 batches": 6, "many": 125}[corpus]
    assert len(rows) == count

    def make() -> TrainBatches:
        return batches_of(rows, epochs=epochs, drop_remainder=drop_remainder)

    if epochs is None:
        got = read(make(), count=20)
        assert make().count(START) is None
        assert len(got) == 20
    elif drop_remainder and count * epochs < 4:
        with pytest.raises(DataError) as caught:
            make()
        for word in (f"{count} rows", "batch.global_size=4", "data.drop_remainder"):
            assert word in str(caught.value)
        return
    else:
        got = read(make())
        assert len(got) == make().count(START) == (count * epochs // 4 if drop_remainder else -(-count * epochs // 4))
    assert all(batch["mask"].any() for batch in got)
    assert {batch["inputs"].shape[:2] for batch in got} == {(1, 4)}
    empty = sum((batch["segment_ids"].max(-1) == 0).sum() for batch in got)
    assert empty == (0 if epochs is None or drop_remainder else -count * epochs % 4)


def test_the_last_batch_is_filled_up_with_empty_rows():
    """A smaller batch would compile another program; a repeated row would count twice (B32)."""
    *full, last = read(batches_of(NumberedRows(10), cut=(2, 2)))
    assert all((batch["segment_ids"] == 1).all() for batch in full)
    assert last["inputs"].shape == (2, 2, 4)
    for name in ("inputs", "targets", "positions", "segment_ids", "mask"):
        assert not last[name][1].any()
        assert last[name][0].any()
    assert len(numbers([*full, last])) == 10


def test_epochs_count_passes_over_the_corpus():
    """The metric is read as a share of the data; the empty rows of the last batch are no data."""
    batches = batches_of(NumberedRows(10), epochs=3)
    positions = [position for _, position in batches.start(START, put=lambda batch: batch, prefetch=2)]
    assert batches.epochs(START) == 0
    assert batches.epochs(positions[4]) == 2
    assert batches.count(START) == 8
    assert batches.epochs(positions[-1]) == 3


def test_rows_are_numbered_across_microbatches():
    """Dropout follows the row of the global batch: numbers that begin anew would repeat masks."""
    rows = NumberedRows(12)
    cut = BatchShape(3, 4)
    assert cut.global_size == 12
    batch = cut.stack([rows[index] for index in range(12)])
    np.testing.assert_array_equal(batch["rows"], np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(batch["inputs"][..., 0] - 1, batch["rows"])
    assert batch["rows"].dtype == np.int32
    assert batch["mask"].dtype == bool


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 5])
@pytest.mark.parametrize("name", ["inputs", "targets"])
def test_an_id_out_of_the_vocabulary_is_an_error_and_no_clamp(token, name):
    """The embedding would clamp it without a word (B35); the error must come out of the background thread."""

    class OneSided(NumberedRows):
        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            row = super().__getitem__(index)
            return row | {name: np.where(np.arange(4) == 3, token, row[name]) if index == 9 else row[name]}

    stream = batches_of(OneSided(16), shuffle=False).start(START, put=lambda batch: batch, prefetch=2)
    assert numbers([next(stream)[0], next(stream)[0]]) == list(range(8))
    with pytest.raises(DataError) as caught:
        next(stream)
    assert f"id {token};" in str(caught.value)
    assert f"0 to {VOCAB - 1}" in str(caught.value)
    assert "row 9" in str(caught.value)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_an_id_out_of_the_vocabulary_is_an_error_in_a_held_out_set(token):
    """Evaluation reads its rows by another way (B35)."""
    with pytest.raises(DataError, match=f"id {token};.*0 to {VOCAB - 1}"):
        list(eval_batches(NumberedRows(10, bad={7: token}), 4, vocab=VOCAB, limit=None))


def test_the_largest_id_is_read():
    """A check that is off by one refuses good data."""
    assert read(batches_of(NumberedRows(4, bad={2: VOCAB - 1})))[0]["inputs"].max() == VOCAB - 1


@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_are_put_ahead_of_the_step_in_another_thread(prefetch):
    """Copies to the devices must run while the step does; unbounded prefetch would fill the memory."""
    threads = []

    def put(batch):
        threads.append(threading.current_thread())
        return batch

    stream = batches_of(NumberedRows(400)).start(START, put=put, prefetch=prefetch)
    next(stream)
    deadline = time.monotonic() + 20
    while len(threads) < 1 + prefetch and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert 1 + prefetch <= len(threads) <= 3 + 2 * prefetch
    assert threading.current_thread() not in threads
    stream.close()


def test_closing_ends_the_threads():
    """A thread that reads on after the run keeps the process alive, or its files open."""
    before = set(threading.enumerate())
    stream = batches_of(NumberedRows(400), epochs=None).start(START, put=lambda batch: batch, prefetch=2)
    next(stream)
    stream.close()
    deadline = time.monotonic() + 20
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_evaluation_reads_every_row_once_in_full_batches(size):
    """The last batch is filled up: dropping it would lose rows, shrinking it would compile again (B58)."""
    got = list(eval_batches(NumberedRows(10), size, vocab=VOCAB, limit=None))
    assert numbers(got) == list(range(10))
    assert {batch["inputs"].shape for batch in got} == {(size, 4)}
    assert {batch["rows"].shape for batch in got} == {(size,)}
    assert sum(batch["mask"].sum() for batch in got) == sum(index % 4 + 1 for index in range(10))


@pytest.mark.parametrize("count", [10, 64, 1000])
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_a_limit_spreads_the_rows_evenly(count, limit):
    """The first rows alone are one file or one author."""
    got = list(eval_batches(NumberedRows(count), 4, vocab=VOCAB + 1, limit=limit))
    chosen = numbers(got)
    assert len(got) == min(limit, -(-count // 4))
    assert len(chosen) == min(limit * 4, count)
    assert chosen[0] == 0
    gaps = np.diff([*chosen, count])
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


class CountedRows(NumberedRows):
    """Numbered rows that remember which of them were read."""

    def __init__(self, count: int):
        super().__init__(count)
        self.read: set[int] = set()

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.read.add(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("shares", [((0, 1), (2, 3)), ((0,), (1,), (2,), (3,)), ((0, 2), (1, 3)), ((0, 1, 2, 3),) * 2])
@pytest.mark.parametrize("skipped", [(), ((8, 11),)])
def test_processes_read_their_own_rows_of_the_same_batches(shares, skipped):
    """Processes that load the same rows train on a part of the corpus; one with none left would stop alone (B51)."""
    want, got, counted = [], [], []
    for share in ((0, 1, 2, 3), *shares):
        rows = CountedRows(21)
        batches = TrainBatches(rows, BatchShape(2, 4), vocab=VOCAB, order=Order(0, True, 1, False), own=share)
        stream = batches.start(Position(0, skipped), put=lambda batch: batch, prefetch=2)
        (want if not want else got).append([batch for batch, _ in stream])
        counted.append(rows.read)
    whole = want[0]
    assert [len(batches) for batches in got] == [len(whole)] * len(shares)
    for share, batches in zip(shares, got, strict=True):
        for batch, all_of_it in zip(batches, whole, strict=True):
            assert_trees_equal(batch, {name: leaf[:, list(share)] for name, leaf in all_of_it.items()})
    if shares[0] == (0, 1):
        first, *both = counted
        assert both[0] | both[1] == first
        assert len(both[0] & both[1]) <= 1  # the shape of an empty row is that of the batch's first


def test_own_rows_are_all_of_them_by_default():
    """One process has no one to leave rows to."""
    rows = CountedRows(12)
    batches = TrainBatches(rows, BatchShape(1, 4), vocab=VOCAB, order=Order(0, False, 1, False))
    assert numbers(read(batches)) == list(range(12)) == sorted(rows.read)
