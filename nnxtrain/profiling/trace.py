"""Figures from a trace: steps, annotations, parts of the model, operations. Needs jax and no device."""

import re
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from nnxtrain.errors import ConfigError, DataError
from nnxtrain.profiling.origins import Origin, origins

# annotations of the loop and the engines; all other host events are the runtime's
ANNOTATIONS = re.compile(
    r"train|data_wait|metrics_wait|log|eval|checkpoint|baseline_cycle|engine_cycle|engine_update"
    r"|fwd_bwd_microstep_\d+|stage_\d+_(fwd|bwd)_\d+"
)
CONTAINERS = re.compile(r"(while|conditional|call)(\.\d+)?")  # the operations inside them have events of their own
NOWHERE = Origin("", "")


@dataclass(frozen=True)
class Step:
    """A step: milliseconds from the end of the step before to its own end, and those spent waiting for its batch."""

    step: int
    ms: float
    data_wait_ms: float


@dataclass(frozen=True)
class Total:
    """Calls and total milliseconds under one name.

    Attributes:
        name: of an annotation, a part of the model, or an operation.
        detail: direction of a part; program and part of an operation.
        calls: number of calls.
        ms: summed over calls, and over threads or devices that run in parallel.
    """

    name: str
    detail: str
    calls: int
    ms: float


@dataclass(frozen=True)
class Digest:
    """Totals of one trace, largest first; `parts` and `operations` sum the same operations."""

    steps: list[Step]
    annotations: list[Total]
    parts: list[Total]
    operations: list[Total]

    @property
    def step_ms(self) -> float | None:
        """Median milliseconds of a step, or None if there is none."""
        return statistics.median(step.ms for step in self.steps) if self.steps else None

    @property
    def data_wait_share(self) -> float | None:
        """The fraction of step time in which the loop waited for a batch."""
        whole = sum(step.ms for step in self.steps)
        return sum(step.data_wait_ms for step in self.steps) / whole if whole else None


class _Event(NamedTuple):
    """An event with its times in milliseconds and the `stats` of the tracer."""

    name: str
    start: float
    end: float
    stats: Mapping[str, Any]


def trace_files(place: Path) -> list[Path]:
    """Returns the traces at `place`, a file or a folder, sorted by name.

    Traces that are still being written, and copies made by `merge`, are left out.

    Raises:
        ConfigError: there is none.
    """
    found = [place] if place.is_file() else sorted(filter(Path.is_file, place.rglob("*.xplane.pb")))
    found = [
        path for path in found if not any(part == "merged" or part[0] == "." for part in path.relative_to(place).parts)
    ]
    if not found:
        raise ConfigError(f"{place}: contains no trace (*.xplane.pb)")
    return found


def digest_of(file: Path) -> Digest:
    """Returns the totals of one trace.

    Raises:
        DataError: the file is not a trace.
    """
    if not (raw := file.read_bytes()):
        raise DataError(f"{file} is not a trace: it is empty")
    try:
        data, programs = ProfileData.from_serialized_xspace(raw), origins(raw)
        named, operations = _read(data)
    except (RuntimeError, ValueError, IndexError) as error:
        raise DataError(f"{file} is not a trace: {error}") from error
    by_part: dict[tuple[str, str], list[float]] = defaultdict(list)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(list)
    for operation in operations:
        program = str(operation.stats.get("hlo_module", ""))
        origin = programs.get(program, {}).get(operation.name, NOWHERE)
        ms = operation.end - operation.start
        by_part[origin.part or "outside all parts", origin.direction].append(ms)
        by_name[operation.name, f"{program} {origin.part}".strip()].append(ms)
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in named:
        calls[event.name, ""].append(event.end - event.start)
    return Digest(list(_steps(named)), _totals(calls), _totals(by_part), _totals(by_name))


def _read(data: ProfileData) -> tuple[list[_Event], list[_Event]]:
    """Returns our annotations and the operations of all programs; times are relative to the start of the trace."""
    named: list[_Event] = []
    operations: list[_Event] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the binding of `stats`, on Python 3.13
        for plane in data.planes:
            lines = {line.name: line for line in plane.lines}
            # on TPU operations have a line of their own; elsewhere each operation is marked
            for line in [lines["XLA Ops"]] if "XLA Ops" in lines else plane.lines:
                for event in line.events:
                    name = event.name
                    is_named = ANNOTATIONS.fullmatch(name) is not None
                    if not is_named and plane.name == "/host:CPU" and name.startswith(("Threadpool", "end: ")):
                        continue  # most events of a CPU are these two, and reading `stats` is slow
                    stats = dict(event.stats)
                    end = event.start_ns + event.duration_ns
                    whole = _Event(name, event.start_ns / 1e6, end / 1e6, stats)
                    if "hlo_op" in stats or line.name == "XLA Ops":
                        operation = str(stats.get("hlo_op", name)).partition(" = ")[0].removeprefix("%")
                        if not CONTAINERS.fullmatch(operation):
                            operations.append(whole._replace(name=operation))
                    elif is_named:
                        named.append(whole)
    return named, operations


def _steps(named: list[_Event]) -> Iterator[Step]:
    """Yields the steps whose end is in the trace.

    A step is dispatched in its `train`; it ends when its `metrics_wait` does, inside the `train` of the next step.
    """
    numbered = [event for event in named if "step_num" in event.stats]  # other code may use an annotation `train` too
    begins = {event.stats["step_num"]: event for event in numbered if event.name == "train"}
    ends = {event.stats["step_num"]: event.end for event in numbered if event.name == "metrics_wait"}
    waits = [event for event in named if event.name == "data_wait"]
    before = 0.0
    for step, begin in sorted(begins.items()):
        if step not in ends:
            continue
        waited = sum(wait.end - wait.start for wait in waits if begin.start <= wait.start < begin.end)
        yield Step(step, ends[step] - max(before, begin.start), waited)
        before = ends[step]


def _totals(found: Mapping[tuple[str, str], list[float]]) -> list[Total]:
    totals = [Total(name, detail, len(times), sum(times)) for (name, detail), times in found.items()]
    return sorted(totals, key=lambda total: (-total.ms, total.name))
