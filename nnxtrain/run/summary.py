"""What `summary.json` says when a run ends."""

import contextlib
import resource
import statistics
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from nnxtrain.errors import UserError
from nnxtrain.host.files import write_json
from nnxtrain.host.watchdog import HUNG
from nnxtrain.metrics.recorder import Recorder
from nnxtrain.run.directory import LOCK


class Summary:
    """The summary of a run in the making, written whatever ends it.

    Attributes:
        values: what it says so far.
        figures: returns the figures of the steps so far; `dict` as long as there are none.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._has_begun = False
        self.values: dict[str, Any] = {"status": "failed", "exit_code": 1, "step": 0, "reason": None}
        self.figures: Callable[[], dict[str, Any]] = dict

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __ior__(self, values: dict[str, Any]) -> "Summary":
        self.values |= values
        return self

    def begin(self) -> None:
        """Takes the directory over from the run before; there is a summary again when this one ends."""
        self._has_begun = True
        (self._folder / "summary.json").unlink(missing_ok=True)

    def write(self) -> None:
        """Writes the file, if the run got so far that the directory is its own."""
        if self._has_begun:
            self.values |= self.figures()
            self.values["peak_host_bytes"] = peak_host_bytes()
            write_json(self._folder / "summary.json", self.values)

    def leave(self, code: int) -> None:
        """Tells that a signal or the watchdog ends the process now with `code`, and gives the directory free."""
        self.values |= {"status": "preempted", "exit_code": code}
        if code == HUNG:
            self.values |= {"status": "failed", "reason": "no step for debug.hang_timeout_s"}
        self.write()
        (self._folder / LOCK).unlink(missing_ok=True)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Writes the summary at the end, with the error that ended the run, if one did."""
        try:
            yield
        except BaseException as error:
            is_known = isinstance(error, UserError)
            self.values |= {"reason": str(error) if is_known else f"{type(error).__name__}: {error}"}
            self.values["exit_code"] = error.exit_code if isinstance(error, UserError) else 1
            if self._has_begun and not is_known:
                with contextlib.suppress(OSError), (self._folder / "train.log").open("a", encoding="utf-8") as log:
                    traceback.print_exc(file=log)
            with contextlib.suppress(OSError):  # the error that ended the run is what people must see
                self.write()
            raise
        self.write()


def figures(recorder: Recorder, *, step: int, device: jax.Device) -> dict[str, Any]:
    """Returns the figures of a run after `step` steps; rates are of the steps that this process took, untraced."""
    losses, times = recorder.steps["loss"], recorder.own_times
    last = [row for row in recorder.evaluations if row["step"] == step]
    memory = device.memory_stats() or {}
    return {
        "final_loss": losses[-1] if losses else None,
        "eval": {row["name"]: {key: row[key] for key in row if key not in ("kind", "name", "step")} for row in last},
        "median_step_time_s": statistics.median(times) if times else None,
        "tokens_per_s": recorder.own_tokens / sum(times) if times else None,
        "peak_device_bytes": memory.get("peak_bytes_in_use"),
        "skipped_steps": recorder.skipped,
    }


def peak_host_bytes() -> int:
    """Returns the most memory that this process held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
