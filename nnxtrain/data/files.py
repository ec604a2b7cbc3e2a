"""Documents of files on disk: plain text and jsonl, each also gzipped."""

import glob
import gzip
import io
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from nnxtrain.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


def find_files(patterns: Iterable[str], *, key: str) -> list[Path]:
    """Returns the files that `patterns` name, sorted, each once.

    Raises:
        ConfigError: a pattern matches no file, or only folders, or only empty files; names `key` and the pattern.
    """
    found: dict[Path, Path] = {}
    for written in patterns:
        pattern = os.path.expanduser(written)
        matches = [Path(match) for match in _matches(pattern)] or [Path(pattern)]
        files = [match for match in matches if match.is_file()]
        if not files and any(match.is_dir() for match in matches):
            hint = f"a glob such as '{written.rstrip('/')}/**/*.txt' names files"
            raise ConfigError(f"{key}: {written!r} matches only folders; {hint}")
        if not files:
            raise ConfigError(f"{key}: {written!r} matches nothing")
        if not any(file.stat().st_size for file in files):
            raise ConfigError(f"{key}: {written!r} matches only empty files")
        found |= {file.resolve(): file for file in files}
    return sorted(found.values())


def _matches(pattern: str) -> Iterator[str]:
    """Yields what `glob.glob` does; its own walk along `**` would not end where links form loops."""
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    rest = "/".join(parts[at + 1 :]) or "*"
    for top in glob.iglob("/".join([*parts[:at], ""]) or "./"):
        for folder in _folders(top):
            yield from _matches(f"{glob.escape(folder)}/{rest}")


def _folders(top: str) -> Iterator[str]:
    """Yields `top` and the folders below it, also through links, each once; hidden ones are left out."""
    seen = set()
    for folder, below, _ in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        below[:] = [] if real in seen else sorted(name for name in below if not name.startswith("."))
        if real not in seen:
            seen.add(real)
            yield folder


def read_documents(file: Path, *, text_field: str, invalid_utf8: str) -> Iterator[str]:
    """Yields the documents of one file; empty ones too, so that the caller can count them.

    A `.jsonl` file holds one object a line with its text in `text_field`; any other file is one document. A byte-order
    mark at the start of a file is no part of its text.

    Args:
        file: a path; `.gz` at its end means gzip.
        text_field: field of a jsonl object that holds the text.
        invalid_utf8: `refuse` or `replace` bytes that are not UTF-8.

    Raises:
        DataError: names the file, the line or byte, and what was expected.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            if file.name.removesuffix(".gz").endswith(".jsonl"):
                yield from _jsonl(stream, file, text_field=text_field, invalid_utf8=invalid_utf8)
            else:
                yield _decode(stream.read(), file, 0, invalid_utf8=invalid_utf8)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file}: not a whole gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


def _jsonl(stream: BinaryIO | io.BufferedIOBase, file: Path, *, text_field: str, invalid_utf8: str) -> Iterator[str]:
    offset = 0
    for number, raw in enumerate(stream, 1):
        line = _decode(raw, file, offset, invalid_utf8=invalid_utf8)
        offset += len(raw)
        yield _text_of(line, f"{file}:{number}", text_field) if line.strip() else ""


def _text_of(line: str, place: str, text_field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not a JSON object: {error}") from error
    if not isinstance(record, dict) or text_field not in record:
        have = f"has the fields {', '.join(sorted(record)) or 'none'}" if isinstance(record, dict) else "is no object"
        raise DataError(f"{place}: {have}; data.text_field={text_field} is not there")
    text = record[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{place}: field {text_field!r} holds {type(text).__name__}, not text")
    return text.encode("utf-8", errors="replace").decode()  # JSON can spell half a surrogate pair; UTF-8 cannot


def _decode(raw: bytes, file: Path, offset: int, *, invalid_utf8: str) -> str:
    try:
        text = raw.decode("utf-8", errors="strict" if invalid_utf8 == "refuse" else "replace")
    except UnicodeDecodeError as error:
        where = f"{file}: byte {offset + error.start}"
        byte = f"0x{raw[error.start]:02x}"
        raise DataError(f"{where} ({byte}) is not UTF-8 text; data.invalid_utf8=replace reads it as U+FFFD") from error
    return text.removeprefix("\ufeff") if offset == 0 else text
