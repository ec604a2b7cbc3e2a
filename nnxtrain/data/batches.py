"""Rows → batches on their way to the devices, made ahead of the step by grain."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from grain import experimental

from nnxtrain.errors import DataError
from nnxtrain.types import Batch, Rows


class Cut(NamedTuple):
    """How many rows a batch holds: `microbatches * rows`, leaves `[m b ...]`.

    This is the one place where a batch is cut. It happens on the host, and a mesh then shares `b`, not `m`: each device
    gets its rows of every microbatch once, and no row goes from device to device.
    """

    microbatches: int
    rows: int

    @property
    def global_size(self) -> int:
        """Rows of all microbatches."""
        return self.microbatches * self.rows

    def __call__(self, batch: Batch) -> Batch:
        """Cuts leaves `[m*b ...]` to `[m b ...]`: microbatch `k` holds rows `k * b` to `(k + 1) * b`."""
        return {name: leaf.reshape(self.microbatches, self.rows, *leaf.shape[1:]) for name, leaf in batch.items()}


class Order(NamedTuple):
    """In which order rows are read, and how often; `epochs` None has no end."""

    seed: int
    shuffle: bool
    epochs: int | None
    drop_remainder: bool


class Position(NamedTuple):
    """Where a run is in its rows, epochs laid end to end.

    Attributes:
        row: rows that are behind.
        skipped: ranges `(first, end)` of rows that are never read, since they broke a step.
    """

    row: int = 0
    skipped: tuple[tuple[int, int], ...] = ()

    def without(self, first: int, end: int) -> "Position":
        """Returns the position with one more range that is not read."""
        return self._replace(skipped=(*self.skipped, (first, end)))


START = Position()


class TrainBatches:
    """Endless or finite batches whose whole position is a number of rows.

    Batch `i` holds rows `i * B` to `(i + 1) * B` of the epochs laid end to end; the row order of an epoch is a pure
    function of (seed, epoch). With `R` rows, `E` epochs and batches of `B` there are `ceil(R * E / B)` batches, the
    last one filled up with empty rows; `floor(R * E / B)` with `drop_remainder`.
    """

    def __init__(self, rows: Rows, cut: Cut, *, vocab: int, order: Order, own: Sequence[int] | None = None):
        """Reads nothing yet.

        Args:
            rows: of one epoch.
            cut: of a batch.
            vocab: ids that a row may hold.
            order: of the rows.
            own: which rows of each microbatch are read, rising; None for all. Another process reads the others.

        Raises:
            DataError: there is less than one batch.
        """
        if order.epochs is not None and order.drop_remainder and len(rows) * order.epochs < cut.global_size:
            have = f"{len(rows)} rows in {order.epochs} epochs are less than batch.global_size={cut.global_size}"
            raise DataError(f"{have}: not one step; give more epochs or data.drop_remainder=false")
        self._cut = cut
        self._own = range(cut.rows) if own is None else own
        self._rows_per_epoch = len(rows)
        self.end = None if order.epochs is None else len(rows) * order.epochs
        self._drops = order.drop_remainder
        read = grain.MapDataset.source(_Checked(rows, vocab))
        if order.shuffle:
            read = read.seed(order.seed).shuffle()
        self._rows = read.repeat(order.epochs)

    @property
    def global_size(self) -> int:
        """Rows of a batch."""
        return self._cut.global_size

    def start(
        self, position: Position, *, put: Callable[[Batch], Any], prefetch: int
    ) -> Generator[tuple[Any, Position], None, None]:
        """Yields the batches from `position` on, each with the position after it.

        Args:
            position: where to begin.
            put: brings a batch of numpy arrays to the devices, in a background thread.
            prefetch: batches that are ready ahead of the step.
        """
        size = self.global_size
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        for first, end in self._ranges(position):
            batches = grain.MapDataset.source(_Batches(self._rows[first:end], self._cut, self._own))
            ready = experimental.ThreadPrefetchIterDataset(
                batches.to_iter_dataset(options).map(put), prefetch_buffer_size=prefetch
            )
            with closing(iter(ready)) as iterator:
                for number, batch in enumerate(iterator, 1):
                    row = first + number * size
                    yield batch, position._replace(row=row if end is None else min(row, end))

    def count(self, position: Position) -> int | None:
        """Returns the batches from `position` on; None where there is no end."""
        if self.end is None:
            return None
        return sum(
            -(-(end - first) // self._cut.global_size) for first, end in self._ranges(position) if end is not None
        )

    def epochs(self, position: Position) -> float:
        """Returns the passes over the corpus that are behind a position."""
        return position.row / self._rows_per_epoch

    def _ranges(self, position: Position) -> Iterator[tuple[int, int | None]]:
        """Yields the ranges of rows that are still to be read."""
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
    """Yields every row once, `size` at a time, leaves `[b ...]`; the last batch is filled up with empty rows.

    With a `limit` of batches that is less than all, the rows read are spread evenly over the set.
    """
    checked = _Checked(rows, vocab)
    count = len(rows) if limit is None else min(limit * size, len(rows))
    chosen = np.arange(count) * len(rows) // count
    for first in range(0, count, size):
        group = [checked[int(index)] for index in chosen[first : first + size]]
        yield jax.tree.map(lambda leaf: leaf[0], stack_rows(group, Cut(1, size)))


def stack_rows(group: list[dict[str, np.ndarray]], cut: Cut) -> Batch:
    """Stacks rows `[s]` to `[m b s]`, fills up with empty ones, and numbers them in `rows` `[m b]`."""
    empty = jax.tree.map(np.zeros_like, group[0])
    return _stacked(group + [empty] * (cut.global_size - len(group)), range(cut.global_size), cut)


def _stacked(rows: list[dict[str, np.ndarray]], places: Sequence[int], cut: Cut) -> Batch:
    """Stacks rows `[s]`, the same number of each microbatch, to `[m b s]`, with their `places` in the global batch."""
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    batch["rows"] = np.array(places, np.int32)
    return cut(batch)


class _Batches:
    """Batches of rows, of which those are read that are `own` rows of their microbatch; empty rows fill up the last."""

    def __init__(self, rows: Rows, cut: Cut, own: Sequence[int]):
        self._rows = rows
        self._size = cut.global_size
        self._own = Cut(cut.microbatches, len(own))
        self._places = [microbatch * cut.rows + row for microbatch in range(cut.microbatches) for row in own]

    def __len__(self) -> int:
        return -(-len(self._rows) // self._size)

    def __getitem__(self, index: int) -> Batch:
        first, there = index * self._size, len(self._rows)
        group = [self._rows[first + place] for place in self._places if first + place < there]
        empty = jax.tree.map(np.zeros_like, (group or [self._rows[first]])[0])
        return _stacked([*group, *[empty] * (self._own.global_size - len(group))], self._places, self._own)


class _Checked:
    """Rows whose ids are looked at before any device clamps them."""

    def __init__(self, rows: Rows, vocab: int):
        self._rows = rows
        self._vocab = vocab

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self._rows[index]
        for name in ("inputs", "targets"):
            low, high = row[name].min(), row[name].max()
            if low < 0 or high >= self._vocab:
                bad = low if low < 0 else high
                admitted = f"the ids of this run (model.vocab) are 0 to {self._vocab - 1}"
                raise DataError(f"row {index} holds token id {bad}; {admitted}")
        return row
