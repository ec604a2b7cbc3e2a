"""How a failure of orbax or its storage layer is told: once, in one line."""

import logging
import re
import sys
from typing import Any


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
