"""A thread that notices when nothing happens any more."""

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

HUNG = 1  # exit code of a run that the watchdog ended


class Watchdog:
    """Dumps the stacks of all threads when no beat came for `timeout_s` while it is entered."""

    def __init__(
        self,
        timeout_s: float | None,
        *,
        folder: Path,
        name: str = "stacks",
        say: Callable[[str], None],
        leave: Callable[[int], None] | None,
    ):
        """Does nothing yet.

        Args:
            timeout_s: seconds without a beat; None never dumps.
            folder: gets `NAME_NNN.txt`.
            name: of the files.
            say: tells people.
            leave: writes what the run's end is to say, and then the process ends; None lets it hang on.
        """
        self._timeout_s = timeout_s
        self._folder = folder
        self._name = name
        self._say = say
        self._leave = leave
        self._last: float | None = None
        self._end = threading.Event()

    def beat(self) -> None:
        """Tells that the run is alive; before the first beat, while it starts and compiles, nothing is dumped."""
        self._last = time.monotonic()

    def __enter__(self) -> "Watchdog":
        if self._timeout_s is not None:
            threading.Thread(target=self._watch, args=(self._timeout_s,), name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()

    def _watch(self, timeout_s: float) -> None:
        while not self._end.wait(min(timeout_s / 4, 1.0)):
            if self._last is None or time.monotonic() - self._last < timeout_s:
                continue
            number = len(list(self._folder.glob(f"{self._name}_*.txt"))) + 1
            path = self._folder / f"{self._name}_{number:03}.txt"
            with path.open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
            self._say(f"no step for {timeout_s:g} s (debug.hang_timeout_s); the stacks of all threads are in {path}")
            if self._leave is not None:
                try:
                    self._leave(HUNG)
                finally:
                    os._exit(HUNG)
            self.beat()
