"""The run directory: who may write to it, and files that are whole or not there."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnxtrain.errors import ConfigError

LOCK = "run.lock"


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Returns the `summary.json` of a run, or None if there is none."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and {"status", "step", "final_loss"} <= summary.keys() else None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the run directory and holds it for this process; `run.lock` is there while the run is alive.

    Raises:
        ConfigError: the folder cannot be made or written, or another live process holds it.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir: {folder} cannot be written: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino
        except OSError:
            is_current = False
        if not is_current:  # another run holds it, or was ending just now and has taken its name away
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise ConfigError(f"{folder} is in use by a live run (process {owner}); choose another run_name")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
