"""Rows that come in turn: batches, and a position that goes on exactly where reading stopped."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import grain
import numpy as np
import pytest

from nnxtrain.build.feed import open_data
from nnxtrain.build.program import make_program
from nnxtrain.build.registry import Registry
from nnxtrain.cli.command import guarded
from nnxtrain.config.load import load
from nnxtrain.data.batches import START, BatchShape, Order, Position, TrainBatches
from nnxtrain.data.sources.table import DATASETS
from nnxtrain.data.stream import StreamBatches, as_json, from_json
from nnxtrain.errors import ConfigError, DataError
from nnxtrain.train import main
from nnxtrain.types import Dataset, RowStream
from tests.support import TINY, assert_trees_equal, rows_of

VOCAB = 1000


def row_of(number: int, sequence: int = 4) -> dict[str, np.ndarray]:
    """Returns a row that holds its number plus 1 in every token."""
    tokens = np.full(sequence, number + 1, np.int32)
    ones = np.ones(sequence, np.int32)
    return {
        "inputs": tokens,
        "targets": tokens,
        "positions": np.arange(sequence, dtype=np.int32),
        "segment_ids": ones,
        "mask": ones > 0,
    }


class Given:
    """Rows as they are given, and no state."""

    def __init__(self, rows: list):
        self.rows = iter(rows)

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self.rows)

    def get_state(self) -> None:
        """Has none."""


class Walk:
    """A walk over rows whose next step depends on all before it: no row can be found without its state."""

    def __init__(self, count: int):
        self.count, self.done, self.seed = count, 0, 1

    def __next__(self) -> dict[str, np.ndarray]:
        if self.done == self.count:
            raise StopIteration
        self.done += 1
        self.seed = self.seed * 75 % 65537
        return row_of(self.seed % 900)

    def get_state(self) -> dict:
        """Returns a state with bytes in it, as the loaders of grain have."""
        return {"done": np.int64(self.done), "seed": (self.seed.to_bytes(4, "big"),)}

    def set_state(self, state: dict) -> None:
        """Goes where `get_state` was called."""
        self.done, self.seed = state["done"], int.from_bytes(state["seed"][0], "big")


def shuffled(count: int) -> grain.IterDataset:
    """Returns a dataset of grain that shuffles in a window; its state is that of the window."""
    rows = grain.MapDataset.range(count).map(row_of).to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(rows, window_size=5, seed=3)


STREAMS = {
    "an iterator of one's own": lambda count: RowStream(lambda: Walk(count)),
    "a dataset of grain": lambda count: RowStream(shuffled(count).__iter__, rows_per_epoch=count),
}


def batches_of(stream: RowStream, size=(1, 4), *, epochs: int | None = 3, drop_remainder=False) -> StreamBatches:
    """Returns batches of a stream."""
    return StreamBatches(stream, BatchShape(*size), vocab=VOCAB, order=Order(0, False, epochs, drop_remainder))


def read(batches: StreamBatches | TrainBatches, position: Position = START, count: int | None = None):
    """Returns batches from a position on, and the position after each, as a checkpoint keeps it."""
    stream = batches.start(position, put=lambda batch: batch, prefetch=2)
    found = list(itertools.islice(stream, count))
    stream.close()
    return [batch for batch, _ in found], [json.loads(json.dumps(position.as_json())) for _, position in found]


def numbers(batches: list) -> list[int]:
    """Returns the numbers of the rows in the order read, without empty rows."""
    found = np.concatenate([batch["inputs"][..., 0].ravel() for batch in batches])
    return (found[found > 0] - 1).tolist()


@pytest.mark.parametrize("kind", STREAMS)
def test_every_position_goes_on_with_the_next_batch(kind):
    """A state that was read ahead, or that of the epoch before, loses rows or reads them twice (B15)."""
    make = STREAMS[kind]
    whole, positions = read(batches_of(make(10)))
    assert len(whole) == 8  # 30 rows in batches of 4, over both borders of epochs
    for number, position in enumerate(positions, 1):
        rest, _ = read(batches_of(make(10)), Position.from_json(position))
        assert_trees_equal(rest, whole[number:])


@pytest.mark.parametrize("kind", STREAMS)
def test_a_changed_batch_size_goes_on_with_the_next_row(kind):
    """The state counts rows, not batches (B18)."""
    make = STREAMS[kind]
    want = numbers(read(batches_of(make(10)))[0])
    head, positions = read(batches_of(make(10), (2, 2)), count=3)
    tail, _ = read(batches_of(make(10), (1, 7)), Position.from_json(positions[-1]))
    assert numbers(head) + numbers(tail) == want


def test_a_stream_is_batched_as_rows_with_random_access_are():
    """The same rows in the same order must be the same batches, with the same rows counted."""

    class Rows:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return row_of(index)

    stream = RowStream(grain.MapDataset.range(10).map(row_of).to_iter_dataset().__iter__, rows_per_epoch=10)
    for drops in (False, True):
        order = Order(0, False, 3, drops)
        want = TrainBatches(Rows(), BatchShape(2, 2), vocab=VOCAB, order=order)
        got = StreamBatches(stream, BatchShape(2, 2), vocab=VOCAB, order=order)
        (batches, positions), (others, at) = read(got), read(want)
        assert_trees_equal(batches, others)
        assert [position["row"] for position in positions] == [position["row"] for position in at]
        assert [got.epochs(Position.from_json(position)) for position in positions[:-1]] == [
            want.epochs(Position.from_json(position)) for position in at[:-1]
        ]


def test_rows_that_broke_a_step_are_thrown_away():
    """A rollback goes back to a state and must not read the same rows again (B11)."""
    make = STREAMS["an iterator of one's own"]
    want = numbers(read(batches_of(make(20), epochs=1))[0])
    _, positions = read(batches_of(make(20), epochs=1), count=2)
    position = Position.from_json(positions[0]).without(8, 12)
    rest, after = read(batches_of(make(20), epochs=1), position)
    assert numbers(rest) == want[4:8] + want[12:]
    assert after[-1]["row"] == 20
    assert after[-1]["skipped"] == [[8, 12]]


def test_endless_epochs_begin_anew():
    """Without `data.epochs` a stream that ends would end the run."""
    batches, positions = read(batches_of(STREAMS["an iterator of one's own"](3), epochs=None), count=5)
    assert len(numbers(batches)) == 20
    assert positions[-1]["stream"]["epoch"] == 6
    assert batches_of(STREAMS["an iterator of one's own"](3)).epochs(Position.from_json(positions[-1])) == 6


def test_a_stream_without_rows_is_refused():
    """Beginning it anew again and again would never end (B30)."""
    with pytest.raises(DataError, match="no rows"):
        read(batches_of(RowStream(lambda: Given([])), epochs=None))


def test_a_stream_of_less_than_one_step_is_refused_where_the_remainder_is_dropped():
    """A run of no step would be done, with exit code 0 (B30)."""
    with pytest.raises(DataError, match=r"batch\.global_size=4.*data\.drop_remainder"):
        read(batches_of(STREAMS["a dataset of grain"](3), epochs=1, drop_remainder=True))


def test_an_id_out_of_the_vocabulary_is_an_error():
    """The embedding would clamp it without a word (B35)."""
    with pytest.raises(DataError, match="row 5 contains token id 1000"):
        read(batches_of(RowStream(lambda: Given([*map(row_of, range(5)), row_of(999)]))))


def test_a_position_of_random_access_is_refused():
    """The source of a run was changed: reading from its start would repeat rows without a word."""
    with pytest.raises(DataError, match="row 8"):
        batches_of(STREAMS["a dataset of grain"](10)).count(Position(8))


def test_a_state_of_another_stream_is_refused():
    """What the source raises comes out of another thread, as a KeyError without a place."""
    _, positions = read(batches_of(STREAMS["a dataset of grain"](10)), count=1)
    with pytest.raises(DataError, match="cannot resume from the state"):
        read(batches_of(STREAMS["an iterator of one's own"](10)), Position.from_json(positions[0]))


def test_a_state_comes_back_from_json():
    """Checkpoints hold JSON; the loaders of grain give their state as bytes."""
    state = {"a": b"\x00\xff", "b": [1, None, {"c": b""}], "d": "text"}
    assert from_json(json.loads(json.dumps(as_json(state)))) == state
    assert as_json({"n": np.int32(3)}) == {"n": 3}


@pytest.mark.parametrize("state", [{1: 2}, {"a": {1, 2}}, np.zeros(3), {"base64": "x"}])
def test_a_state_that_json_cannot_hold_is_refused(state):
    """It would come back as something else, or fail at the first save (B15)."""
    with pytest.raises(DataError, match="JSON"):
        as_json(state)


@pytest.mark.parametrize("kept", [{"row": 8, "skipped": []}, {"row": 8, "skipped": [[0, 4], [4, 8]]}])
def test_positions_of_older_checkpoints_are_read(kept):
    """They know of no stream, and a run without one writes the same still."""
    position = Position.from_json(kept)
    assert position == Position(8, tuple(map(tuple, kept["skipped"])))
    assert json.loads(json.dumps(position.as_json())) == kept


def streamed(config, spec) -> Dataset:
    """A source from outside the package that can only be read in turn."""

    def row(number: int) -> dict[str, np.ndarray]:
        tokens = np.random.default_rng(number).integers(0, 250, spec.sequence).astype(np.int32)
        return row_of(0, spec.sequence) | {"inputs": tokens, "targets": tokens}

    rows = grain.MapDataset.range(50).map(row).to_iter_dataset()
    rows = grain.experimental.WindowShuffleIterDataset(rows, window_size=9, seed=1)
    return Dataset(RowStream(rows.__iter__), {}, "random rows in turn")


REGISTRY = Registry(datasets=DATASETS | {"streamed": streamed})
SMALL = "mesh.data=1 model.layers=1 model.embed=16 model.heads=1 model.kv_heads=1 model.vocab=259 batch.sequence=8"
WORDS = [str(TINY), *SMALL.split(), "generate.tokens=1", "data.source=streamed", "data.shuffle=false"]


def train(folder, *words: str) -> int:
    """Runs the command line in this process; returns the exit code."""
    return guarded(lambda argv: main(argv, registry=REGISTRY), [*WORDS, f"output_dir={folder}", *words])


@pytest.mark.usefixtures("quick_compiles")
def test_a_run_on_a_stream_goes_on_as_an_unbroken_one(tmp_path):
    """The state must reach the checkpoint and come back from it: 9 steps of 8 rows are over the end of an epoch."""
    words = ("steps=9", "checkpoint.every_steps=4", "checkpoint.keep_last=3")
    assert train(tmp_path, *words) == 0
    whole = rows_of(tmp_path / "tiny")
    assert train(tmp_path, *words, "checkpoint.resume=4") == 0
    again = rows_of(tmp_path / "tiny")
    assert [row["loss"] for row in again] == [row["loss"] for row in whole]
    assert [row["epoch"] for row in again] == [0] * 6 + [1] * 3
    assert len((tmp_path / "tiny" / "metrics.dropped.jsonl").read_text().splitlines()) == 5


def test_an_order_that_a_stream_does_not_have_is_refused_before_anything_is_written(tmp_path, capsys):
    """Shuffling that is asked for and not done changes the run without a word."""
    assert train(tmp_path / "runs", "steps=1", "data.shuffle=true") == 2
    assert "data.shuffle=false" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_several_processes_cannot_share_a_stream():
    """Each would read all of its rows, and train on them as many times (B51)."""
    words = ["data.source=streamed", "data.shuffle=false", "model.vocab=259"]
    program = make_program(load(TINY, words, extra=REGISTRY.names()), registry=REGISTRY)
    devices = [SimpleNamespace(process_index=number) for number in range(2)]
    program = dataclasses.replace(program, mesh=SimpleNamespace(devices=np.array(devices)))
    with pytest.raises(ConfigError, match=r"distributed\.processes.*one process"):
        open_data(program)
