"""The documents of a file: plain text or JSON lines, plain or gzipped."""

import contextlib
import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nnxtrain.data.formats import HEAD_BYTES, is_binary, is_gzip_name, is_json_lines_name, not_utf8
from nnxtrain.errors import DataError

logger = logging.getLogger(__name__)
START_BYTES = 2**20  # of each file, checked before a run
_FIRST_OBJECT = re.compile(r"\s*(?:\[\s*)?(?=\{)")


def read_documents(file: Path, *, text_field: str, invalid_utf8: str) -> Iterator[str]:
    """Yields the documents of one file; empty ones too, so that the caller can count them.

    A file of JSON lines has one object per line, with its text in `text_field`. It is recognised by its name, such as
    `a.jsonl` or `a.ndjson.gz`, or by its first lines. Any other file is one document. A byte-order mark at the start of
    a file is not part of its text.

    Args:
        file: a path; `.gz` at its end means gzip.
        text_field: field of a JSON object that contains the text.
        invalid_utf8: `refuse` or `replace` bytes that are not UTF-8.

    Raises:
        DataError: names the file, the line or byte, and what was expected.
    """
    with _opened(file) as stream:
        yield from _documents(stream, file, text_field=text_field, invalid_utf8=invalid_utf8)


def check_start(file: Path, *, text_field: str, invalid_utf8: str) -> None:
    """Reads the first `START_BYTES` of a file as `read_documents` would, up to the last complete line.

    Raises:
        DataError: as `read_documents` does.
    """
    with _opened(file) as stream:
        start = stream.read(START_BYTES)
    if len(start) == START_BYTES:
        start = start[: start.rfind(b"\n") + 1] or start[:HEAD_BYTES]
        if b"\n" not in start:
            _check_head(start, file)
            return
    for _ in _documents(io.BytesIO(start), file, text_field=text_field, invalid_utf8=invalid_utf8):
        pass


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """Opens a file, decompressing it if its name says so; errors while reading become a DataError."""
    try:
        with gzip.open(file) if is_gzip_name(file) else file.open("rb") as stream:
            yield stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file}: damaged or incomplete gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


def _documents(
    stream: BinaryIO | io.BufferedIOBase, file: Path, *, text_field: str, invalid_utf8: str
) -> Iterator[str]:
    head = stream.read(HEAD_BYTES)
    _check_head(head, file)
    stream.seek(0)
    is_lines = is_json_lines_name(file) or (_begins_as_object(head) and _has_json_lines(stream, text_field))
    stream.seek(0)
    if is_lines:
        yield from _json_lines(stream, file, text_field=text_field, invalid_utf8=invalid_utf8)
    else:
        text = _decode(stream.read(), file, 0, invalid_utf8=invalid_utf8)
        _check_records(text, file, text_field)
        yield text


def _check_head(head: bytes, file: Path) -> None:
    if problem := not_utf8(head):
        raise DataError(f"{file}: {'decompressed, it ' if is_gzip_name(file) else ''}{problem}")


def _begins_as_object(head: bytes) -> bool:
    return head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def _has_json_lines(stream: BinaryIO | io.BufferedIOBase, text_field: str) -> bool:
    """Tells whether the first line is a JSON object, with the text field or followed by another object."""
    lines = (line for line in stream if line.strip())
    first = _object(next(lines, b"").removeprefix(b"\xef\xbb\xbf"))
    return bool(first) and (text_field in first or bool(_object(next(lines, b""))))


def _object(line: bytes) -> dict[str, Any]:
    """Returns `line` as a JSON object; an empty one if it is not an object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _check_records(text: str, file: Path, text_field: str) -> None:
    """Raises on JSON records that are not one per line; warns if other JSON is read as plain text."""
    if not (begin := _FIRST_OBJECT.match(text)):
        return
    try:
        record, _ = json.JSONDecoder().raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        return
    if text_field in record:
        cure = "write one per line, as `jq -c .` does, or `jq -c '.[]'` for a list, to a file that ends in .jsonl"
        raise DataError(
            f"{file}: JSON with a field {text_field!r} (data.text_field), but not one object per line; {cure}"
        )
    if record:
        logger.warning("%s: JSON without a field %r (data.text_field) is read as plain text", file, text_field)


def _json_lines(
    stream: BinaryIO | io.BufferedIOBase, file: Path, *, text_field: str, invalid_utf8: str
) -> Iterator[str]:
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
        have = (
            f"has the fields {', '.join(sorted(record)) or 'none'}" if isinstance(record, dict) else "is not an object"
        )
        raise DataError(f"{place}: {have}; expected data.text_field={text_field}")
    text = record[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{place}: field {text_field!r} is {type(text).__name__}, not text")
    return text.encode("utf-8", errors="replace").decode()  # JSON can spell half a surrogate pair; UTF-8 cannot


def _decode(raw: bytes, file: Path, offset: int, *, invalid_utf8: str) -> str:
    try:
        text = raw.decode("utf-8", errors="strict" if invalid_utf8 == "refuse" else "replace")
    except UnicodeDecodeError as error:
        where = f"{file}: byte {offset + error.start} (0x{raw[error.start]:02x}) is not UTF-8 text"
        if is_binary(raw[:HEAD_BYTES]):
            raise DataError(f"{where}; the file does not look like text") from error
        cure = "convert text in another encoding first, such as: iconv -f LATIN1 -t UTF-8"
        raise DataError(f"{where}; {cure}; data.invalid_utf8=replace reads such a byte as U+FFFD") from error
    return text.removeprefix("\ufeff") if offset == 0 else text
