"""Files that are whole or not there, and where a user keeps what can be made again."""

import contextlib
import errno
import json
import math
import os
from pathlib import Path
from typing import Any

from nnxtrain.config.echo import echo, visible
from nnxtrain.errors import ConfigError

LONGEST_NAME = 400  # characters of a file's name in a message
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # no room on the disk, in the quota, below the limit of a file


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file under a temporary name and renames it, so that no reader ever sees half of it.

    Raises:
        ConfigError: a folder stands in its place.
        OSError: it cannot be written; names `path`.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; a file is wanted")
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise named(error, path) from error


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file as `write_whole` does; numbers that JSON cannot hold become null."""
    write_whole(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def named(error: OSError, path: Path) -> OSError:
    """Returns `error` with the file that it is about; a write that fails does not know its file's name."""
    return error if error.filename is not None else OSError(error.errno, error.strerror or str(error), str(path))


def explain(error: OSError) -> str:
    """Returns in one line which file an error is about, what the system says, and what to do about a full disk."""
    cure = "; make room there and run the same command again" if error.errno in FULL else ""
    place = "system" if error.filename is None else echo(error.filename, longest=LONGEST_NAME)
    return f"{place}: {visible(error.strerror or error)}{cure}"


def finite(value: Any) -> Any:
    """Returns `value` with None for every number in it that is not finite."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def default_cache_dir() -> Path:
    """Returns the folder below the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nnxtrain"


class AppendFile:
    """A file that grows by whole records: one that cannot be written in full leaves no part of itself behind."""

    def __init__(self, path: Path):
        """Opens or creates the file; what it holds stays."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)

    def append(self, record: bytes) -> None:
        """Writes a record through to the system.

        Raises:
            OSError: it does not fit, and the file is what it was before; names the file.
        """
        begin = os.fstat(self._file.fileno()).st_size
        try:
            rest = record
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), begin)
            raise named(error, self._path) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
