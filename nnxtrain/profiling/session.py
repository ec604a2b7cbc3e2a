"""One trace: where it is written, the files beside it, and its final name when it is complete."""

import contextlib
import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions

from nnxtrain.config.profile import ProfileConfig
from nnxtrain.profiling.page import digest_tables, text_of
from nnxtrain.profiling.timeline import TIMELINES, read_timeline, truncation_text
from nnxtrain.profiling.trace import digest_of, trace_files
from nnxtrain.profiling.windows import make_profile_schedule

LARGEST_BYTES = 32 * 2**20  # of a trace that is summarised during the run; `show` reads larger ones afterwards


class Place(NamedTuple):
    """Where a process writes its traces, its index, and the pipeline stages that it owns."""

    folder: Path
    process: int = 0
    stages: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The folder of this process inside that of a window."""
        own = f"process_{self.process:04}"
        return f"stage_{self.stages[0]:02}.{own}" if len(self.stages) == 1 else own


@dataclass(frozen=True)
class TraceInfo:
    """A written trace, for code outside the package.

    Attributes:
        dir: folder of the trace of this process.
        cycle: of the schedule; None for a window that a file requested.
        first_step: its first step, counted from 0.
        last_step: its last step, counted from 0.
        partial: whether the run ended before all of its steps.
        process: index of the process that wrote it.
        stages: of the pipeline that the process owns.
    """

    dir: Path
    cycle: int | None
    first_step: int
    last_step: int
    partial: bool
    process: int
    stages: tuple[int, ...]

    @functools.cached_property
    def profile_data(self) -> ProfileData:
        """The events, read from disk on first use."""
        return ProfileData.from_file(str(trace_files(self.dir)[0]))


# called with each trace after it is written
OnTrace = Callable[[TraceInfo], None] | None


class TraceRequest(NamedTuple):
    """The trace that a step belongs to: that of a cycle, kept or discarded, or that of a requested window."""

    is_kept: bool
    cycle: int | None = None
    until: int | None = None


class Session:
    """A trace in progress.

    Attributes:
        want: the window or warm-up that it is for.
        step: its first step, counted from 0.
    """

    def __init__(self, config: ProfileConfig, place: Place, *, want: TraceRequest, step: int):
        """Starts the tracer; a trace that is discarded is never written to the run directory."""
        self.want = want
        self.step = step
        self._config = config
        self._place = place
        self._part = self._make_part() if want.is_kept else Path(tempfile.mkdtemp(prefix="nnxtrain-profile-"))
        try:
            jax.profiler.start_trace(self._part, profiler_options=self._options())
        except Exception:
            self.clear()
            raise

    def stop(self) -> None:
        """Stops the tracer, which writes its files."""
        jax.profiler.stop_trace()

    def keep(self, count: int, *, say: Callable[[str], None]) -> TraceInfo:
        """Completes the trace of `count` steps and gives it its final name."""
        part, place = self._part, self._place
        final = part.with_name(place.name)
        last = self.step + count - 1
        partial = count < self._config.active
        info = TraceInfo(final, self.want.cycle, self.step, last, partial, place.process, place.stages)
        if self._config.memory == "each_window":
            jax.profiler.save_device_memory_profile(part / "memory.pprof.gz")
        self._sum_up(say)
        timeline = self._timeline(say)
        if place.process == 0:
            manifest = part / "manifest.json"
            manifest.write_text(
                json.dumps(self._manifest(info) | {"timeline": timeline}, indent=2) + "\n", encoding="utf-8"
            )
            manifest.replace(part.with_name(manifest.name))
        part.replace(final)
        say(f"profile  steps {self.step} to {last}{' (partial)' if partial else ''}: {final.parent}")
        return info

    def clear(self) -> None:
        """Removes the trace if it was not kept."""
        shutil.rmtree(self._part, ignore_errors=True)
        if self.want.is_kept:
            for folder in (self._part.parent, self._place.folder):
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()

    def _make_part(self) -> Path:
        """Makes the temporary folder of a trace, in the folder of a window in which this process has no trace yet."""
        names = (f"step_{self.step:08}{f'.{count}' if count else ''}" for count in itertools.count())
        windows = (self._place.folder / name for name in names)
        window = next(window for window in windows if not (window / self._place.name).exists())
        part = window / f".{self._place.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part

    def _options(self) -> ProfileOptions:
        options = ProfileOptions()
        # by default jax names sessions by the second, and one of two in a second would be overwritten
        options.session_id = self._part.parent.name if self.want.is_kept else "warmup"
        options.host_tracer_level = self._config.host_tracer_level
        options.python_tracer_level = self._config.python_tracer_level
        options.advanced_configuration = dict(map(_option, self._config.advanced))
        return options

    def _sum_up(self, say: Callable[[str], None]) -> None:
        """Writes the output of `show` beside the trace; a trace that cannot be read is kept all the same."""
        try:
            (file,) = trace_files(self._part)
            if file.stat().st_size > LARGEST_BYTES:
                say("profile  the trace is too large to be summarised now; use python -m nnxtrain.profiling show")
                return
            digest = digest_of(file)
            whole = json.dumps(asdict(digest), indent=2)
            (self._part / "summary.json").write_text(whole + "\n", encoding="utf-8")
            (self._part / "summary.txt").write_text(text_of(digest_tables(digest)), encoding="utf-8")
        except Exception as error:
            say(f"profile  the trace cannot be summarised: {first_line(error)}")

    def _timeline(self, say: Callable[[str], None]) -> dict[str, Any] | None:
        """Returns the contents of the timeline for viewers; None if there is none or it cannot be read."""
        try:
            (file,) = self._part.rglob(TIMELINES)
            timeline = read_timeline(file)
        except Exception as error:
            say(f"profile  the timeline for viewers cannot be read: {first_line(error)}")
            return None
        if timeline.is_cut:
            say(f"profile  {file.name} {truncation_text(timeline)}")
        return timeline._asdict() | {"file": file.name}

    def _manifest(self, info: TraceInfo) -> dict[str, Any]:
        """Returns what identifies a trace when it is copied elsewhere."""
        schedule = make_profile_schedule(self._config) if info.cycle is not None else None
        environment = self._place.folder.parent / "env.json"
        return {
            "first_step": info.first_step,
            "last_step": info.last_step,
            "partial": info.partial,
            "cycle": info.cycle,
            "schedule": schedule and asdict(schedule),
            "options": asdict(self._config),
            "environment": json.loads(environment.read_text(encoding="utf-8")) if environment.exists() else None,
        }


def first_line(error: BaseException) -> str:
    """Returns the first line of an error."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _option(word: str) -> tuple[str, int | bool | str]:
    """Returns name and value of `name=value`."""
    name, _, text = word.partition("=")
    if text in ("true", "false"):
        return name, text == "true"
    return name, int(text) if text.isdecimal() else text
