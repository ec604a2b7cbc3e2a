"""The timeline of a trace (`*.trace.json.gz`), which viewers show: jax's exporter may leave out its end."""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TIMELINES = "*.trace.json.gz"
MOST_EVENTS = 1_000_000  # jax's exporter writes the earliest ones, and drops the others without a word
EVENT = b'"ph":"X"'
STEP = re.compile(rb'"name":"train"[^{}]*\{[^{}]*"step_num":"(\d+)"')
START = re.compile(rb'"ts":([\d.]+)')
CHUNK_BYTES = 2**20


class Timeline(NamedTuple):
    """What is in a timeline.

    Attributes:
        events: how many.
        is_cut: whether the exporter left out those at the end.
        last_step: the last step that begins in it, by the steps done before; None where no step is marked.
        end_ms: milliseconds from the start of the trace to the start of the last event.
    """

    events: int
    is_cut: bool
    last_step: int | None
    end_ms: float


def read_timeline(file: Path) -> Timeline:
    """Returns what is in the timeline `file`; `*.xplane.pb` beside it is complete in any case."""
    events, last_step, end_us = 0, -1, 0.0
    for piece in _pieces(file):
        events += piece.count(EVENT)
        last_step = max([last_step, *map(int, STEP.findall(piece))])
        end_us = max([end_us, *map(float, START.findall(piece))])
    return Timeline(events, events >= MOST_EVENTS, None if last_step < 0 else last_step, end_us / 1e3)


def cut_text(timeline: Timeline) -> str:
    """Returns in words where a timeline that was cut ends."""
    where = f"in step {timeline.last_step}" if timeline.last_step is not None else f"after {timeline.end_ms:,.0f} ms"
    return f"ends {where}: jax writes no more than {MOST_EVENTS:,} events there; the *.xplane.pb beside it is complete"


def _pieces(file: Path) -> Iterator[bytes]:
    """Yields the text of a timeline in pieces that end between two events."""
    rest = b""
    with gzip.open(file) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            whole, mark, rest = (rest + chunk).rpartition(b"},{")
            yield whole + mark
    yield rest
