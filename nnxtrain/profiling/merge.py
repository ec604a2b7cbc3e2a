"""Merges the traces of all processes of a window into one session for viewers."""

import gzip
import json
import re
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nnxtrain.errors import ConfigError, DataError
from nnxtrain.profiling.timeline import TIMELINES, read_timeline, truncation_text
from nnxtrain.profiling.trace import trace_files

PROCESS = re.compile(r"(stage_\d+\.)?process_\d+")
PERFETTO = "perfetto.json.gz"
PIDS = 10_000  # reserved for each trace; those of the next start above


def merge(place: Path) -> list[Path]:
    """Merges the traces of each window at `place` into a folder `merged/` in it; returns these folders.

    A folder contains a session for xprof, with a host for each process, and one file for Perfetto.

    Args:
        place: a window, or a folder of windows, such as a run.

    Raises:
        ConfigError: there is no trace, or one is not in a window.
        DataError: a timeline is damaged; what was merged before is kept.
    """
    windows: dict[Path, list[Path]] = defaultdict(list)
    for file in trace_files(place.resolve()):
        if len(file.parents) < 5 or not PROCESS.fullmatch(file.parents[3].name):
            raise ConfigError(f"{file} is not in the folder of a process, such as process_0000")
        windows[file.parents[4]].append(file)
    for window, files in windows.items():
        timeline = json.dumps({"traceEvents": _timeline(files)})
        part, final = window / ".merged.part", window / "merged"
        session = part / "plugins" / "profile" / window.name
        shutil.rmtree(part, ignore_errors=True)
        session.mkdir(parents=True)
        for file in files:  # viewers use the file name as the host name
            shutil.copyfile(file, session / f"{file.parents[3].name}.xplane.pb")
        (part / PERFETTO).write_bytes(gzip.compress(timeline.encode()))
        shutil.rmtree(final, ignore_errors=True)
        part.replace(final)
    return [window / "merged" for window in windows]


def truncated_timelines(place: Path) -> Iterator[str]:
    """Yields a line for each timeline at `place` that jax truncated; it is truncated in `merged/` too."""
    for file in trace_files(place.resolve()):
        for path in file.parent.glob(TIMELINES):
            if (timeline := read_timeline(path)).is_cut:
                yield f"{path} {truncation_text(timeline)}"


def _timeline(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns the events of all timelines that jax wrote beside `files`, with the process in process names."""
    events: list[dict[str, Any]] = []
    for number, file in enumerate(files):
        for timeline in file.parent.glob(TIMELINES):
            raw = timeline.read_bytes()
            try:
                found = json.loads(gzip.decompress(raw))["traceEvents"]
            except (gzip.BadGzipFile, zlib.error, EOFError, ValueError, KeyError, TypeError) as error:
                raise DataError(f"{timeline} is not a timeline: {error}") from error
            for event in found:
                if "pid" not in event:
                    continue
                event["pid"] += number * PIDS
                if event.get("name") == "process_name":
                    event["args"]["name"] = f"{file.parents[3].name} {event['args']['name']}"
                events.append(event)
    return events
