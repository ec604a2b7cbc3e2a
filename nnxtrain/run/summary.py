"""What `summary.json` and `report.html` say of a run, while it goes on and when it ends."""

import contextlib
import resource
import statistics
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from nnxtrain.errors import UserError
from nnxtrain.host.files import explain, write_json
from nnxtrain.host.watchdog import HUNG
from nnxtrain.metrics.recorder import Recorder
from nnxtrain.run.directory import LOCK


class Summary:
    """The summary of a run, and the report that shows it, written again and again until whatever ends the run.

    Attributes:
        values: what it says so far; its status is `running` until the end is known.
        figures: returns the figures of the steps so far; `dict` as long as there are none.
        report: writes the report that shows `values`; with or without its picture.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._has_begun = False
        self._lock = threading.RLock()  # a second signal, the watchdog or a lost process ends the run from a thread
        self.values: dict[str, Any] = {"status": "running", "exit_code": None, "step": 0, "reason": None}
        self.figures: Callable[[], dict[str, Any]] = dict
        self.report: Callable[[bool], None] = lambda with_picture: None

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __ior__(self, values: dict[str, Any]) -> "Summary":
        self.values |= values
        return self

    def begin(self) -> None:
        """Takes the directory over from the run before."""
        self._has_begun = True
        self.write()

    def write(self, *, with_picture: bool = False) -> None:
        """Writes summary and report, if the run got so far that the directory is its own."""
        if not self._has_begun:
            return
        with self._lock:
            self.values |= self.figures()
            self.values["peak_host_bytes"] = peak_host_bytes()
            write_json(self._folder / "summary.json", self.values)
            self.report(with_picture)

    def leave(self, code: int, reason: str | None = None) -> None:
        """Writes that the process ends now, and releases the directory; any thread may call it.

        Args:
            code: exit code.
            reason: why the run failed; None where a signal or the watchdog ends it.
        """
        if code == HUNG:
            reason = "no step for debug.hang_timeout_s"
        self.values |= {"status": "failed" if reason else "preempted", "exit_code": code, "reason": reason}
        with contextlib.suppress(Exception):  # the process ends whatever happens here
            self.write()
        (self._folder / LOCK).unlink(missing_ok=True)

    @contextlib.contextmanager
    def written_on_exit(self) -> Iterator[None]:
        """Writes summary and report at the end, with the error that ended the run, if one did."""
        try:
            yield
        except BaseException as error:
            self.values |= {"status": "failed", "reason": _reason(error)}
            self.values["exit_code"] = error.exit_code if isinstance(error, UserError) else 1
            if self._has_begun and not isinstance(error, UserError):
                with contextlib.suppress(OSError), (self._folder / "train.log").open("a", encoding="utf-8") as log:
                    traceback.print_exc(file=log)
            with contextlib.suppress(Exception):  # the error that ended the run is what people must see
                self.write()
            raise
        self.write(with_picture=True)


def _reason(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    return explain(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def figures(recorder: Recorder, *, device: jax.Device) -> dict[str, Any]:
    """Returns the figures of a run so far; rates are of the steps that this process took, untraced."""
    losses, times = recorder.steps["loss"], recorder.own_times
    memory = device.memory_stats() or {}
    return {
        "final_loss": losses[-1] if losses else None,
        "eval": recorder.latest(),
        "median_step_time_s": statistics.median(times) if times else None,
        "tokens_per_s": recorder.own_tokens / sum(times) if times else None,
        "peak_device_bytes": memory.get("peak_bytes_in_use"),
        "skipped_steps": recorder.skipped,
    }


def peak_host_bytes() -> int:
    """Returns the most memory that this process held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
