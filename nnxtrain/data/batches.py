"""Rows → batches on the devices, prefetched by grain."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from grain import experimental

from nnxtrain.errors import DataError
from nnxtrain.types import Batch, Rows


class BatchShape(NamedTuple):
    """The shape of a batch: `microbatches * rows` rows, leaves `[m b ...]`.

    Batches are split into microbatches here only, on the host. A mesh then shards `b`, not `m`: each device gets its
    rows of every microbatch, and no row moves between devices.
    """

    microbatches: int
    rows: int

    @property
    def global_size(self) -> int:
        """Rows of all microbatches."""
        return self.microbatches * self.rows

    def __call__(self, batch: Batch) -> Batch:
        """Splits leaves `[m*b ...]` to `[m b ...]`: microbatch `k` has rows `k * b` to `(k + 1) * b`."""
        return {name: leaf.reshape(self.microbatches, self.rows, *leaf.shape[1:]) for name, leaf in batch.items()}

    def stack(self, rows: list[dict[str, np.ndarray]], places: Sequence[int] | None = None) -> Batch:
        """Stacks rows `[s]` to `[m b s]`, pads the batch with empty rows, and numbers them in `rows` `[m b]`.

        Args:
            rows: at least one.
            places: index of each row in the global batch, if this batch is a part of it.
        """
        empty = jax.tree.map(np.zeros_like, rows[0])
        full = rows + [empty] * (self.global_size - len(rows))
        batch = {name: np.stack([row[name] for row in full]) for name in empty}
        batch["rows"] = np.array(range(self.global_size) if places is None else places, np.int32)
        return self(batch)


class Order(NamedTuple):
    """The order in which rows are read, and how often; `epochs=None` is endless."""

    seed: int
    shuffle: bool
    epochs: int | None
    drop_remainder: bool


class Position(NamedTuple):
    """The position of a run in its data, counted across epochs.

    Attributes:
        row: rows already read.
        skipped: ranges `(first, end)` of rows that are never read again, since a step on them was not finite.
        stream: for a streaming source, its epoch and iterator state in JSON types; else None.
    """

    row: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
    stream: Any = None

    def without(self, first: int, end: int) -> "Position":
        """Returns the position with one more range to skip."""
        return self._replace(skipped=(*self.skipped, (first, end)))

    def as_json(self) -> dict[str, Any]:
        """Returns the position as a checkpoint stores it; `stream` is left out if it is None, as in older versions."""
        kept = {"row": self.row, "skipped": self.skipped}
        return kept if self.stream is None else kept | {"stream": self.stream}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> "Position":
        """Returns the position that a checkpoint stores."""
        skipped = tuple((first, end) for first, end in kept["skipped"])
        return cls(kept["row"], skipped, kept.get("stream"))


START = Position()


class TrainBatches:
    """Endless or finite batches of rows with random access; the position is a number of rows.

    Batch `i` has rows `i * B` to `(i + 1) * B` of the concatenated epochs; the row order of an epoch is a pure
    function of (seed, epoch). With `R` rows, `E` epochs and batches of `B` there are `ceil(R * E / B)` batches, the
    last one padded with empty rows; `floor(R * E / B)` with `drop_remainder`.
    """

    def __init__(self, rows: Rows, shape: BatchShape, *, vocab: int, order: Order, own: Sequence[int] | None = None):
        """Reads nothing yet.

        Args:
            rows: of one epoch.
            shape: of a batch.
            vocab: number of valid ids.
            order: of the rows.
            own: rows of each microbatch that this process reads, ascending; None for all.

        Raises:
            DataError: there are too few rows for one batch.
        """
        if order.epochs is not None and order.drop_remainder and len(rows) * order.epochs < shape.global_size:
            have = f"{len(rows)} rows in {order.epochs} epochs are fewer than batch.global_size={shape.global_size}"
            raise DataError(f"{have}: not enough for one step; increase data.epochs or data.drop_remainder=false")
        self._shape = shape
        self._own = range(shape.rows) if own is None else own
        self._rows_per_epoch = len(rows)
        self.end = None if order.epochs is None else len(rows) * order.epochs
        self._drops = order.drop_remainder
        read = grain.MapDataset.source(_CheckedRows(rows, vocab))
        if order.shuffle:
            read = read.seed(order.seed).shuffle()
        self._rows = read.repeat(order.epochs)

    @property
    def global_size(self) -> int:
        """Rows of a batch."""
        return self._shape.global_size

    def start(
        self, position: Position, *, put: Callable[[Batch], Any], prefetch: int
    ) -> Generator[tuple[Any, Position], None, None]:
        """Yields the batches from `position` on, each with the position after it.

        Args:
            position: where to begin.
            put: moves a batch of numpy arrays to the devices; runs in a background thread.
            prefetch: batches that are ready ahead of the step.
        """
        size = self.global_size
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        for first, end in self._ranges(position):
            batches = grain.MapDataset.source(_Batches(self._rows[first:end], self._shape, self._own))
            ready = experimental.ThreadPrefetchIterDataset(
                batches.to_iter_dataset(options).map(put), prefetch_buffer_size=prefetch
            )
            with closing(iter(ready)) as iterator:
                for number, batch in enumerate(iterator, 1):
                    row = first + number * size
                    yield batch, position._replace(row=row if end is None else min(row, end))

    def count(self, position: Position) -> int | None:
        """Returns the number of batches from `position` on; None if endless."""
        if self.end is None:
            return None
        return sum(
            -(-(end - first) // self._shape.global_size) for first, end in self._ranges(position) if end is not None
        )

    def epochs(self, position: Position) -> float:
        """Returns the number of epochs up to a position, with a fraction."""
        return position.row / self._rows_per_epoch

    def _ranges(self, position: Position) -> Iterator[tuple[int, int | None]]:
        """Yields the ranges of rows that remain to be read."""
        row = position.row
        for first, end in sorted(position.skipped):
            if first > row:
                yield row, first
            row = max(row, end)
        if self.end is None:
            yield row, None
            return
        end = self.end - ((self.end - row) % self.global_size if self._drops else 0)
        if row < end:
            yield row, end


def eval_batches(rows: Rows, size: int, *, vocab: int, limit: int | None) -> Iterator[Batch]:
    """Yields every row once, `size` at a time, leaves `[b ...]`; the last batch is padded with empty rows.

    If a `limit` of batches leaves out rows, those read are spaced evenly over the set.
    """
    checked = _CheckedRows(rows, vocab)
    count = len(rows) if limit is None else min(limit * size, len(rows))
    chosen = np.arange(count) * len(rows) // count
    for first in range(0, count, size):
        group = [checked[int(index)] for index in chosen[first : first + size]]
        yield jax.tree.map(lambda leaf: leaf[0], BatchShape(1, size).stack(group))


def check_ids(row: dict[str, np.ndarray], number: int, vocab: int) -> None:
    """Raises DataError if a row contains an id outside the vocabulary, which a device would clamp silently."""
    for name in ("inputs", "targets"):
        low, high = row[name].min(), row[name].max()
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            admitted = f"the ids of the tokenizer are 0 to {vocab - 1}"
            raise DataError(f"row {number} contains token id {bad}; {admitted}")


class _Batches:
    """Batches with random access, of the `own` rows of each microbatch; empty rows pad the last batch."""

    def __init__(self, rows: Rows, shape: BatchShape, own: Sequence[int]):
        self._rows = rows
        self._size = shape.global_size
        self._own = BatchShape(shape.microbatches, len(own))
        self._places = [microbatch * shape.rows + row for microbatch in range(shape.microbatches) for row in own]

    def __len__(self) -> int:
        return -(-len(self._rows) // self._size)

    def __getitem__(self, index: int) -> Batch:
        first, there = index * self._size, len(self._rows)
        group = [self._rows[first + place] for place in self._places if first + place < there]
        return self._own.stack(group or [jax.tree.map(np.zeros_like, self._rows[first])], self._places)


class _CheckedRows:
    """Rows that raise DataError for an id outside the vocabulary."""

    def __init__(self, rows: Rows, vocab: int):
        self._rows = rows
        self._vocab = vocab

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self._rows[index]
        check_ids(row, index, self._vocab)
        return row
