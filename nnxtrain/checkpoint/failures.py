"""How a failure of orbax or its storage layer, or a checkpoint of another run, is told: once, for people."""

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
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


def tell_failures_once() -> None:
    """Silences what is printed beside the exception that a failed save or restore raises.

    Orbax logs each phase and each error, and the storage library's threads still report to an event loop that the
    failure closed, which python prints as a traceback each.
    """
    for name in ("absl", "asyncio", "concurrent.futures"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = _print_unless_late


def _print_unless_late(report: Any) -> None:
    if str(report.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(report)
