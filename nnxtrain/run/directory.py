"""The run directory: who may write to it, and files that are whole or not there."""

import contextlib
import fcntl
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nnxtrain.errors import ConfigError

LOCK = "run.lock"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file under a temporary name and renames it, so that no reader ever sees half of it."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; a file is wanted")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file as `write_whole` does; numbers that JSON cannot hold become null."""
    write_whole(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Returns `value` with None for every number in it that is not finite."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def environment() -> dict[str, Any]:
    """Returns what `env.json` says of software: versions, platform, commit of the package's source tree."""
    return {
        "python": sys.version.split()[0],
        "platform": sys.platform,
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Returns the commit of the source tree that the package lies in, or None where it lies in no tree of its own."""
    package = Path(__file__).parents[1]
    command = ["git", "-C", str(package), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        top, commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.split("\n")[
            :2
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return commit if Path(top) == package.parent.resolve() else None


def set_aside_rows(folder: Path, *, beyond: int) -> int:
    """Moves rows of `metrics.jsonl` with a step above `beyond` to `metrics.dropped.jsonl`; returns their number."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    kept: list[str] = []
    dropped: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # the half line that a killed run left
        (kept if step <= beyond else dropped).append(line + "\n")
    with (folder / "metrics.dropped.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(dropped)
    write_whole(path, "".join(kept))
    return len(dropped)
