"""The identity of files: a hash of their content, computed again only if a file may have changed.

SHA-256 reads 0.4 (without CPU instructions for it) to 2 GB/s on one core: 10 GB take 5 to 25 s, or as long as the disk
needs, next to many minutes of tokenising. A hash is cached by path, inode, size, mtime and ctime. Size and mtime can be
set back after an edit; ctime cannot.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nnxtrain.errors import DataError

SETTLED_S = 10.0  # a file that changed more recently may change again within one tick of its file system's clock


class Stamp(NamedTuple):
    """Metadata of a file; at least one field differs after any change of the file."""

    path: str
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def stamps(files: Sequence[Path]) -> list[Stamp]:
    """Returns the metadata of each file.

    Raises:
        DataError: a file is missing or not accessible.
    """
    return [_stamp(file) for file in files]


def _stamp(file: Path) -> Stamp:
    try:
        found = file.stat()
        path = str(file.resolve())
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    return Stamp(path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def check_unchanged(files: Sequence[Path], before: Sequence[Stamp]) -> None:
    """Raises DataError if a file changed since `before` was taken."""
    for file, stamp in zip(files, before, strict=True):
        if _stamp(file) != stamp:
            raise DataError(f"{file}: changed while it was read; start again when it is complete")


def content_hashes(files: Sequence[Path], found: Sequence[Stamp], *, cache: Path) -> list[str]:
    """Returns the SHA-256 of each file.

    Args:
        files: to hash.
        found: their stamps.
        cache: folder of cached hashes; if it cannot be written, files are hashed again next time.

    Raises:
        DataError: a file cannot be read, or changed while it was read.
    """
    key = hashlib.sha256(json.dumps(found).encode()).hexdigest()
    entry = cache / f"{key[:32]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(entry.read_text(encoding="utf-8"))
        if known["key"] == key and len(known["hashes"]) == len(files):
            return list(map(str, known["hashes"]))
    began = time.time()
    hashes = [_hash(file) for file in files]
    check_unchanged(files, found)
    newest = max((stamp.changed_ns for stamp in found), default=0) / 1e9
    if newest < began - SETTLED_S:
        with contextlib.suppress(OSError):
            _store(entry, {"key": key, "hashes": hashes})
    return hashes


def _hash(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


def _store(entry: Path, value: dict[str, object]) -> None:
    """Writes an entry of the cache atomically: several processes may write the same one."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
        json.dump(value, file)
    os.replace(file.name, entry)
