"""The timeline of a trace for viewers (`*.trace.json.gz`), which jax's exporter may truncate."""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TIMELINES = "*.trace.json.gz"
MOST_EVENTS = 1_000_000  # jax's exporter writes the earliest ones and silently drops the others
EVENT = b'"ph":"X"'
STEP = re.compile(rb'"name":"train"[^{}]*\{[^{}]*"step_num":"(\d+)"')
START = re.compile(rb'"ts":([\d.]+)')
CHUNK_BYTES = 2**20


class Timeline(NamedTuple):
    """Contents of a timeline.

    Attributes:
        events: their number.
        is_cut: whether the exporter dropped events at the end.
        last_step: the last step that begins in it, counted from 0; None if no step is annotated.
        end_ms: milliseconds from the start of the trace to the start of the last event.
    """

    events: int
    is_cut: bool
    last_step: int | None
    end_ms: float


def read_timeline(file: Path) -> Timeline:
    """Returns the contents of the timeline `file`; the `*.xplane.pb` beside it is always complete."""
    events, last_step, end_us = 0, -1, 0.0
    for piece in _pieces(file):
        events += piece.count(EVENT)
        last_step = max([last_step, *map(int, STEP.findall(piece))])
        end_us = max([end_us, *map(float, START.findall(piece))])
    return Timeline(events, events >= MOST_EVENTS, None if last_step < 0 else last_step, end_us / 1e3)


def truncation_text(timeline: Timeline) -> str:
    """Returns for a message where a truncated timeline ends."""
    where = f"in step {timeline.last_step}" if timeline.last_step is not None else f"after {timeline.end_ms:,.0f} ms"
    return f"ends {where}: jax writes at most {MOST_EVENTS:,} events to it; the *.xplane.pb beside it is complete"


def _pieces(file: Path) -> Iterator[bytes]:
    """Yields the text of a timeline in chunks that end between two events."""
    rest = b""
    with gzip.open(file) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            whole, mark, rest = (rest + chunk).rpartition(b"},{")
            yield whole + mark
    yield rest
