"""How a failure of orbax or its storage layer, or a checkpoint of another run, is told: once, for people."""

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from nnxtrain.errors import CheckpointError

LISTED = 20  # differences that an error names


class DifferentTreeError(CheckpointError):
    """A checkpoint that can be read, but is of another model, optimizer or tokenizer."""


def different(what: str, lines: list[str]) -> DifferentTreeError:
    """Returns an error that says `what`, and how by the first of the lines."""
    more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return DifferentTreeError("\n  ".join([what, *lines[:LISTED], *more]))


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Raises CheckpointError that begins with `what` for the many kinds that orbax and its storage layer raise."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Returns in one line what went wrong; where the operating system had a word, that."""
    text = str(error).strip() or type(error).__name__
    system = re.search(r"([^:]+) \[os_error_code=", text)
    return system[1].strip() if system else text.splitlines()[0][:300]


class _Duplicates:
    """Silences what is printed beside an exception, as long as anybody asks for it; then all is as it was."""

    LOGGERS = ("absl", "asyncio", "concurrent.futures")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._levels: list[int] = []
        self._hook: Callable[[Any], Any] = sys.unraisablehook

    def silence(self) -> None:
        """Begins, or goes on, to be silent."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            loggers = [logging.getLogger(name) for name in self.LOGGERS]
            self._levels = [each.level for each in loggers]
            for each in loggers:
                each.setLevel(logging.CRITICAL + 1)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._print_unless_late

    def release(self) -> None:
        """Puts everything back when the last user is gone."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for name, level in zip(self.LOGGERS, self._levels, strict=True):
                logging.getLogger(name).setLevel(level)
            sys.unraisablehook = self._hook

    def _print_unless_late(self, report: Any) -> None:
        if str(report.exc_value) != "Event loop is closed":
            self._hook(report)


_duplicates = _Duplicates()


@contextlib.contextmanager
def duplicates_silenced() -> Iterator[None]:
    """Silences what is printed beside the exception that a failed save or restore raises.

    Orbax logs each phase and each error, and the storage library's threads still report to an event loop that the
    failure closed, which python prints as a traceback each.
    """
    _duplicates.silence()
    try:
        yield
    finally:
        _duplicates.release()
