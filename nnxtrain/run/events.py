"""TensorBoard's event files, cut back to what a restored run goes on from."""

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboardX.proto.event_pb2 import Event

from nnxtrain.run.directory import write_whole

HEAD, TAIL = 12, 4  # bytes around a record: its length with a checksum, and a checksum


def cut_events(folder: Path, *, beyond: int) -> None:
    """Removes events of steps above `beyond`, and the half record that a killed run left, from every file."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        kept = [record for record, event in records(path) if event.step <= beyond]
        write_whole(path, b"".join(kept))


def records(path: Path) -> Iterator[tuple[bytes, Event]]:
    """Yields the whole records of an event file, each with its event."""
    raw, place = path.read_bytes(), 0
    while place + HEAD <= len(raw):
        end = place + HEAD + int.from_bytes(raw[place : place + 8], "little") + TAIL
        if end > len(raw):
            return
        try:
            event = Event.FromString(raw[place + HEAD : end - TAIL])
        except DecodeError:
            return
        yield raw[place:end], event
        place = end
