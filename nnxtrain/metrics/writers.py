"""Where rows go: `metrics.jsonl`, and TensorBoard's event files."""

import json
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from nnxtrain.host.files import AppendFile, finite


class RowWriter:
    """Appends rows to `metrics.jsonl`.

    Attributes:
        unwritten: rows that a full disk has kept out of the file so far, oldest first.
    """

    def __init__(self, path: Path):
        self._file = AppendFile(path)
        self.unwritten: list[dict[str, Any]] = []

    def write(self, row: dict[str, Any]) -> None:
        """Writes a row, after those that did not fit before.

        Raises:
            OSError: it does not fit; names the file.
        """
        self.unwritten.append(finite(row))
        self.flush()

    def flush(self) -> None:
        """Writes the rows that did not fit before; raises OSError as `write` does."""
        while self.unwritten:
            self._file.append(json.dumps(self.unwritten[0]).encode() + b"\n")
            self.unwritten.pop(0)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class BoardWriter:
    """Appends scalars to an event file of its own; every call is on disk, or raises, when it returns."""

    def __init__(self, folder: Path):
        """Creates the file; its name sorts after those of files that were created before."""
        seconds, rest = divmod(time.time_ns(), 10**9)
        self._file = AppendFile(folder / f"events.out.tfevents.{seconds:010}.{socket.gethostname()}.{rest:09}")
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Writes scalars by tag.

        Raises:
            OSError: they do not fit; names the file.
        """
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _append(self, event: Event) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        self._file.append(length + sums[0] + data + sums[1])
