"""What was written beyond the step that a run goes back to: rows and samples move aside, events are removed."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboardX.proto.event_pb2 import Event

from nnxtrain.host.files import write_whole

HEAD, TAIL = 12, 4  # bytes around a record: its length with a checksum, and a checksum


def rewind(folder: Path, *, beyond: int, unwritten: Sequence[dict[str, Any]] = ()) -> int:
    """Takes a run directory back to a step; returns the number of rows that were set aside.

    Args:
        folder: of the run.
        beyond: step of the checkpoint that the run goes on from.
        unwritten: rows up to that step that did not fit on the disk when the checkpoint was made.
    """
    dropped = set_aside_rows(folder, beyond=beyond)
    add_rows(folder / "metrics.jsonl", unwritten)
    set_aside_samples(folder, beyond=beyond)
    cut_events(folder / "tensorboard", beyond=beyond)
    return dropped


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
    if dropped:
        with (folder / "metrics.dropped.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(dropped)
    write_whole(path, "".join(kept))
    return len(dropped)


def add_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Appends those of `rows` that the file does not hold: a full disk had kept them out of it."""
    known = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() and rows else set()
    missing = [line for line in map(json.dumps, rows) if line not in known]
    if missing:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in missing)


def set_aside_samples(folder: Path, *, beyond: int) -> None:
    """Moves texts of steps above `beyond` to `samples.dropped/`, where they replace none that is there."""
    for path in sorted((folder / "samples").glob("step_*.txt")):
        step = path.stem.removeprefix("step_")
        if not step.isdecimal() or int(step) <= beyond:
            continue
        target = folder / "samples.dropped" / path.name
        number = 0
        while target.exists():
            number += 1
            target = target.with_name(f"{path.stem}.{number}.txt")
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
