"""Recognises file formats and encodings by name and first bytes."""

import re
from pathlib import Path

HEAD_BYTES = 4096  # of a file, enough for every check below
TAR_AT = 257  # bytes into an archive

_MAGIC = (
    (b"\x1f\x8b", "compressed with gzip"),
    (b"\xfd7zXZ\x00", "compressed with xz"),
    (b"\x28\xb5\x2f\xfd", "compressed with Zstandard"),
    (b"\x04\x22\x4d\x18", "compressed with LZ4"),
    (b"\x02\x21\x4c\x18", "compressed with LZ4"),
    (b"\xff\x06\x00\x00sNaPpY", "compressed with Snappy"),
    (b"\x5d\x00\x00", "compressed with LZMA"),
    (b"LZIP\x01", "compressed with lzip"),
    (b"\x89LZO\x00\r\n\x1a\n", "compressed with lzop"),
    (b"\x1f\x9d", "compressed with compress (.Z)"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PK\x05\x06", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a rar archive"),
    (b"PAR1\x15", "a Parquet file"),
    (b"ARROW1\x00\x00", "an Arrow file"),
    (b"Obj\x01", "an Avro file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"%PDF-1.", "a PDF file"),
    (b"%PDF-2.", "a PDF file"),
    (b"\x7fELF", "a program"),
)
_BZIP2 = re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")  # the second is an empty file
_ZSTD_NOTES = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame that may stand before the compressed one
_BYTE_ORDER_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
    (b"+/v8-", "UTF-7"),
    (b"\x84\x31\x95\x33", "GB 18030"),
)
_JSON_LINES = {".jsonl", ".jsonlines", ".ndjson", ".ldjson"}
_BINARY_SHARE = 0.1  # of control bytes
_FEW_NULS = 3
_ASCII_SHARE = 0.4  # of bytes that are NUL in UTF-16 text of mostly ASCII characters
_NULS_OF_UTF32 = ({0, 1, 2}, {1, 2, 3}, {0, 1}, {2, 3})  # places, modulo 4


def is_gzip_name(file: Path) -> bool:
    """Tells whether a file is gzip-compressed by its name."""
    return file.suffix.lower() in (".gz", ".gzip")


def is_json_lines_name(file: Path) -> bool:
    """Tells whether a file has JSON lines by one of the suffixes of its name, such as `a.jsonl.txt`."""
    return any(suffix.lower() in _JSON_LINES for suffix in file.suffixes)


def not_utf8(head: bytes) -> str | None:
    """Returns why a file that begins with `head` is certainly not UTF-8 text, and what to do; else None."""
    for magic, what in _MAGIC:
        if head.startswith(magic):
            return f"is {what}; {_cure(what)}"
    for pattern, what in ((_BZIP2, "bzip2"), (_ZSTD_NOTES, "Zstandard")):
        if pattern.match(head):
            return f"is compressed with {what}; {_cure('compressed')}"
    if head[TAR_AT : TAR_AT + 5] == b"ustar":
        return f"is a tar archive; {_cure('archive')}"
    for mark, encoding in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return _encoded(encoding)
    wide = _wide_encoding(head)
    return _encoded(wide) if wide else None


def is_binary(head: bytes) -> bool:
    """Tells whether `head`, which is not UTF-8, has too many control bytes to be text in another encoding."""
    odd = sum(byte < 9 or 13 < byte < 27 or 27 < byte < 32 or byte == 127 for byte in head)
    return odd > _BINARY_SHARE * len(head)


def _wide_encoding(head: bytes) -> str | None:
    """Returns the encoding of text in units of two or four bytes without a byte-order mark, if it looks like that.

    The spaces and line ends of such text contain NUL bytes, all of them at even or all at odd places.
    """
    places = [place for place, byte in enumerate(head) if not byte]
    if len(places) < _FEW_NULS:
        return None
    if 2 * len(places) >= len(head) and {place % 4 for place in places} in _NULS_OF_UTF32:
        return "UTF-32"
    whole = head[: len(head) - len(head) % 2]
    for parity, codec in ((1, "utf-16-le"), (0, "utf-16-be")):
        if all(place % 2 == parity for place in places):
            blanks = sum(char in " \n" for char in whole.decode(codec, errors="replace"))
            if blanks > 1 or len(places) > _ASCII_SHARE * len(head):
                return "UTF-16"
    return None


def _encoded(encoding: str) -> str:
    return f"is encoded in {encoding}, not UTF-8; convert it: iconv -f {encoding.replace(' ', '')} -t UTF-8"


def _cure(what: str) -> str:
    if what.endswith("gzip"):
        return "give it a name that ends in .gz, or decompress it"
    if what.startswith("compressed"):
        return "only gzip is read, by the suffix .gz: decompress it"
    return "unpack it" if "archive" in what else "only text and JSON lines are read: convert it"
