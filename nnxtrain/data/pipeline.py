"""Rows → batches on their way to the devices, made ahead of the step by grain."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from grain import experimental

from nnxtrain.errors import DataError
from nnxtrain.types import Batch, Rows


class Cut(NamedTuple):
    """How many rows a batch holds: `microbatches * rows`, leaves `[m b ...]`."""

    microbatches: int
    rows: int

    @property
    def global_size(self) -> int:
        """Rows of all microbatches."""
        return self.microbatches * self.rows


class TrainBatches:
    """Endless or finite batches whose whole position is the number of batches read.

    Batch `i` holds rows `i * B` to `(i + 1) * B` of the epochs laid end to end; the row order of an epoch is a pure
    function of (seed, epoch). With `R` rows, `E` epochs and batches of `B` there are `ceil(R * E / B)` batches, the
    last one filled up with empty rows; `floor(R * E / B)` with `drop_remainder`.
    """

    def __init__(self, rows: Rows, cut: Cut, *, vocab: int, order: "Order"):
        if order.epochs is not None and order.drop_remainder and len(rows) * order.epochs < cut.global_size:
            have = f"{len(rows)} rows in {order.epochs} epochs are less than batch.global_size={cut.global_size}"
            raise DataError(f"{have}: not one step; give more epochs or data.drop_remainder=false")
        self.rows_per_epoch = len(rows)
        self._cut = cut
        read = grain.MapDataset.source(_Checked(rows, vocab))
        if order.shuffle:
            read = read.seed(order.seed).shuffle()
        self._batches = read.repeat(order.epochs).batch(
            cut.global_size, drop_remainder=order.drop_remainder, batch_fn=lambda group: stack_rows(group, cut)
        )
        self.length = None if order.epochs is None else len(self._batches)

    def start(self, first: int, *, put: Callable[[Batch], Any], prefetch: int) -> Generator[Any, None, None]:
        """Yields the batches from number `first` on, each passed through `put` in a background thread.

        Args:
            first: batches read before.
            put: brings a batch of numpy arrays to the devices.
            prefetch: batches that are ready ahead of the step.
        """
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        ready = self._batches[first:].to_iter_dataset(options).map(put)
        with closing(iter(experimental.ThreadPrefetchIterDataset(ready, prefetch_buffer_size=prefetch))) as batches:
            yield from batches

    def epochs_after(self, batches: int) -> float:
        """Returns the passes over the corpus that `batches` batches are."""
        return batches * self._cut.global_size / self.rows_per_epoch


class Order(NamedTuple):
    """In which order rows are read, and how often; `epochs` None has no end."""

    seed: int
    shuffle: bool
    epochs: int | None
    drop_remainder: bool


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
    """Stacks rows `[s]` to `[m b s]`, fills up with empty ones, and numbers them in `rows` `[m b]`.

    Microbatch `k` holds rows `k * b` to `(k + 1) * b` of the global batch.
    """
    empty = jax.tree.map(np.zeros_like, group[0])
    full = group + [empty] * (cut.global_size - len(group))
    batch = {name: np.stack([row[name] for row in full]) for name in group[0]}
    batch["rows"] = np.arange(cut.global_size, dtype=np.int32)
    return {name: leaf.reshape(cut.microbatches, cut.rows, *leaf.shape[1:]) for name, leaf in batch.items()}


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
                raise DataError(
                    f"row {index} holds token id {bad}; model.vocab={self._vocab} admits 0 to {self._vocab - 1}"
                )
        return row
