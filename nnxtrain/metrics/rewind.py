"""What metrics lie beyond the step that a run goes back to: rows move aside, TensorBoard's events are removed."""

import json
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboardX.proto.event_pb2 import Event

from nnxtrain.host.files import write_whole

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


def set_aside_rows(folder: Path, *, beyond: int) -> int:
    """Moves rows of `metrics.jsonl` with a step above `beyond` to `metrics.dropped.jsonl`; returns their number."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    kept: list[str] = []
    dropped: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # the half line that a killed run left
        (kept if step <= beyond else dropped).append(line + "\n")
    with (folder / "metrics.dropped.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(dropped)
    write_whole(path, "".join(kept))
    return len(dropped)
