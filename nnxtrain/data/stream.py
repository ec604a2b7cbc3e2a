"""A stream of rows → batches; the position is the state of the row iterator."""

import base64
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import grain
import numpy as np
from grain import experimental

from nnxtrain.data.batches import BatchShape, Order, Position, check_ids
from nnxtrain.errors import DataError
from nnxtrain.types import Batch, RowIterator, RowStream

_BYTES = "base64"  # the only key of the JSON object that encodes bytes


class StreamBatches:
    """Endless or finite batches of a stream's rows, in its own order.

    The counterpart of `TrainBatches` without random access: an epoch ends when its iterator does, and the next one
    starts a new iterator. Rows in skipped ranges are read and dropped.
    """

    end = None  # the number of rows is not known before they are read

    def __init__(self, stream: RowStream, shape: BatchShape, *, vocab: int, order: Order):
        """Reads nothing yet.

        Args:
            stream: of the rows of one epoch.
            shape: of a batch.
            vocab: number of valid ids.
            order: uses `epochs` and `drop_remainder` alone.
        """
        self._stream = stream
        self._shape = shape
        self._vocab = vocab
        self._order = order

    @property
    def global_size(self) -> int:
        """Rows of a batch."""
        return self._shape.global_size

    def start(
        self, position: Position, *, put: Callable[[Batch], Any], prefetch: int
    ) -> Generator[tuple[Any, Position], None, None]:
        """Yields the batches from `position` on, each with the position after it; see `TrainBatches.start`."""
        self.count(position)
        reader = _Reader(self._stream, position, vocab=self._vocab, epochs=self._order.epochs)
        batches = _Batches(reader, self._shape, put=put, drops=self._order.drop_remainder)
        ready = experimental.ThreadPrefetchIterDataset(_Once(batches), prefetch_buffer_size=prefetch)
        with closing(iter(ready)) as iterator:
            yield from iterator

    def count(self, position: Position) -> None:
        """Returns None: the number of batches is not known in advance.

        Raises:
            DataError: the position was saved with a source with random access.
        """
        if position.stream is None and position.row:
            where = f"the checkpoint is at row {position.row} of a source with random access"
            raise DataError(f"{where}; this source is a stream, which cannot seek to a row; choose another run_name")

    def epochs(self, position: Position) -> float:
        """Returns the number of epochs up to a position; without a fraction if the rows of an epoch are not known."""
        if self._stream.rows_per_epoch:
            return position.row / self._stream.rows_per_epoch
        return float(position.stream["epoch"]) if position.stream else 0.0


class _Reader:
    """Rows of all epochs, one after another, from a position on."""

    def __init__(self, stream: RowStream, position: Position, *, vocab: int, epochs: int | None):
        self._stream = stream
        self._vocab = vocab
        self._epochs = epochs
        self._skipped = position.skipped
        self._row = position.row
        self._epoch = position.stream["epoch"] if position.stream else 0
        self._is_fresh = True  # whether this iterator has read no row yet
        self._iterator: RowIterator = stream.start()
        if position.stream:
            self._is_fresh = False
            self._go_to(position.stream["iterator"])

    def position(self) -> Position:
        """Returns the current position."""
        state = {"epoch": self._epoch, "iterator": as_json(self._iterator.get_state())}
        return Position(self._row, self._skipped, state)

    def is_less_than(self, rows: int) -> bool:
        """Tells whether fewer than `rows` rows were read in all epochs so far."""
        return self._row < rows

    def __next__(self) -> dict[str, np.ndarray]:
        while True:
            row = self._next_of_any_epoch()
            number, self._row = self._row, self._row + 1
            if not any(first <= number < end for first, end in self._skipped):
                check_ids(row, number, self._vocab)
                return row

    def _next_of_any_epoch(self) -> dict[str, np.ndarray]:
        while self._epochs is None or self._epoch < self._epochs:
            try:
                row = next(self._iterator)
            except StopIteration:
                if self._is_fresh:
                    raise DataError("the stream of the data source has no rows") from None
                self._epoch, self._iterator, self._is_fresh = self._epoch + 1, self._stream.start(), True
                continue
            self._is_fresh = False
            return row
        raise StopIteration

    def _go_to(self, state: Any) -> None:
        try:
            self._iterator.set_state(from_json(state))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"the data source cannot resume from the state in the checkpoint: {reason}") from error


class _Batches:
    """An iterator of `(batch on the devices, position after it)`."""

    def __init__(self, reader: _Reader, shape: BatchShape, *, put: Callable[[Batch], Any], drops: bool):
        self._reader = reader
        self._shape = shape
        self._put = put
        self._drops = drops

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> tuple[Any, Position]:
        group: list[dict[str, np.ndarray]] = []
        while len(group) < self._shape.global_size:
            try:
                group.append(next(self._reader))
            except StopIteration:
                if self._drops and self._reader.is_less_than(self._shape.global_size):
                    few = f"the stream has fewer rows than batch.global_size={self._shape.global_size}"
                    raise DataError(
                        f"{few}: not enough for one step; increase data.epochs or data.drop_remainder=false"
                    ) from None
                if not group or self._drops:
                    raise
                break
        return self._put(self._shape.stack(group)), self._reader.position()

    def get_state(self) -> dict[str, Any]:
        """Returns an empty state: each batch carries its own position."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Raises: grain never calls it here, since the reader starts at a position."""
        raise NotImplementedError


class _Once(grain.IterDataset):
    """A dataset over one existing iterator, which grain needs for prefetching."""

    def __init__(self, batches: _Batches):
        super().__init__()
        self._batches = batches

    def __iter__(self) -> Any:
        return self._batches


def as_json(state: Any) -> Any:
    """Returns an iterator state in JSON types: bytes as base64, tuples as lists, numpy scalars as numbers.

    Raises:
        DataError: it contains something that JSON cannot represent.
    """
    if isinstance(state, bytes):
        return {_BYTES: base64.b64encode(state).decode()}
    if isinstance(state, dict):
        if not all(isinstance(name, str) for name in state) or state.keys() == {_BYTES}:
            raise DataError(f"the state of the data source has keys that JSON cannot represent: {list(state)[:3]}")
        return {name: as_json(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [as_json(value) for value in state]
    if isinstance(state, np.generic):
        return as_json(state.item())
    if state is None or isinstance(state, str | bool | int | float):
        return state
    raise DataError(f"the state of the data source contains a {type(state).__name__}, which JSON cannot represent")


def from_json(kept: Any) -> Any:
    """Returns the state that `as_json` converted."""
    if isinstance(kept, dict):
        if kept.keys() == {_BYTES}:
            return base64.b64decode(kept[_BYTES])
        return {name: from_json(value) for name, value in kept.items()}
    return [from_json(value) for value in kept] if isinstance(kept, list) else kept
