"""Files to documents: formats, encodings, and what is none of them (B36)."""

import bz2
import gzip
import json
import logging
import lzma
import zipfile
from pathlib import Path

import pytest

from nnxtrain.data.documents import START_BYTES, check_start, read_documents
from nnxtrain.errors import DataError


def documents(file: Path, *, text_field: str = "text", invalid_utf8: str = "refuse") -> list[str]:
    """Returns the documents of a file."""
    return list(read_documents(file, text_field=text_field, invalid_utf8=invalid_utf8))


def written(file: Path, content: bytes) -> Path:
    """Returns `file`, which holds `content`, gzipped if its name says so."""
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def refusal(file: Path, **options: str) -> str:
    """Returns what is said of a file that cannot be read."""
    with pytest.raises(DataError) as caught:
        documents(file, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.py", "jsonl"])
def test_a_file_of_text_is_one_document_byte_for_byte(tmp_path, name):
    """Reading in text mode turns CRLF to LF; reading by lines makes a document of each."""
    text = "one\r\ntwo\n\n\tthree 🙂\x00\u2028\r"
    assert documents(written(tmp_path / name, text.encode())) == [text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_of_jsonl_is_one_document(tmp_path, name):
    """Characters that Python takes for line ends, and CRLF between lines, cut no document."""
    texts = ["one", "two\r\nlines", "🙂\u2028\x85\x0b", " padded "]
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    assert documents(written(tmp_path / name, "\r\n".join(lines).encode())) == texts


def test_another_field_may_hold_the_text(tmp_path):
    """`data.text_field` must reach the reader."""
    file = written(tmp_path / "a.jsonl", b'{"text": "no", "body": "yes"}\n')
    assert documents(file, text_field="body") == ["yes"]


def test_empty_documents_are_given_out_so_that_they_can_be_counted(tmp_path):
    """Empty text, null and blank lines are no error; each is one empty document (B36)."""
    lines = ['{"text": ""}', "", '{"text": null}', "   \t", '{"text": "x"}', ""]
    file = written(tmp_path / "a.jsonl", "\n".join(lines).encode() + b"\n")
    assert documents(file) == ["", "", "", "", "x", ""]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"txet": "x", "id": 1}', "txet"),
        ("{}", "data.text_field"),
        ("[1, 2]", "object"),
        ('"text"', "object"),
        ("null", "object"),
        ('{"text": 5}', "int"),
        ('{"text": ["x"]}', "list"),
        ('{"text": "x"', "JSON"),
        ("plain words", "JSON"),
        ("[" * 100_000, "JSON"),
        ('{"text": "x", "n": ' + "1" * 5000 + "}", "JSON"),
    ],
    ids=lambda value: value[:20],
)
def test_a_line_without_text_is_named_by_file_and_line(tmp_path, line, says):
    """A record that is skipped without a word hides a wrong field name (B36)."""
    file = written(tmp_path / "a.jsonl", b'{"text": "one"}\n\n' + line.encode() + b'\n{"text": "four"}\n')
    assert f"{file}:3" in refusal(file)
    assert says in refusal(file)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_bad_byte_is_named_by_file_and_offset(tmp_path, name):
    """C0 is never part of UTF-8 (B36)."""
    file = written(tmp_path / name, "\ufeffé".encode() + b"abc\xc0def")
    message = refusal(file)
    assert str(file) in message
    assert "byte 8 " in message
    assert "0xc0" in message
    assert "data.invalid_utf8" in message


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_the_offset_of_a_bad_byte_counts_from_the_start_of_the_file(tmp_path, name):
    """An offset into the line would be looked up at the wrong place (B36)."""
    head = '{"text": "é"}\r\n{"text": "two"}\n'.encode()
    content = head + b'{"text": "bad \xc0 byte"}\n'
    file = written(tmp_path / name, content)
    assert f"byte {content.index(0xC0)} " in refusal(file)
    assert content.index(0xC0) > len(head)


def test_a_character_that_is_cut_off_at_the_end_is_named(tmp_path):
    """The last bytes of a truncated download."""
    assert "byte 2 " in refusal(written(tmp_path / "a.txt", b"hi\xf0\x9f"))


def test_bad_bytes_can_be_replaced(tmp_path):
    """The documented alternative, in both formats; the words around them stay."""
    assert documents(written(tmp_path / "a.txt", b"x\xc0y"), invalid_utf8="replace") == ["x\ufffdy"]
    file = written(tmp_path / "a.jsonl", b'{"text": "x\xc0y"}')
    assert documents(file, invalid_utf8="replace") == ["x\ufffdy"]


@pytest.mark.parametrize("invalid_utf8", ["refuse", "replace"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path, name, invalid_utf8):
    """The mark would be a token at the start of the file, and no JSON; inside a text it is one (B36)."""
    body = '{"text": "a\ufeffb"}' if "jsonl" in name else "a\ufeffb"
    file = written(tmp_path / name, b"\xef\xbb\xbf" + body.encode())
    assert documents(file, invalid_utf8=invalid_utf8) == ["a\ufeffb"]


def test_half_a_surrogate_pair_in_json_becomes_text_that_utf8_can_hold(tmp_path):
    """Writing it to disk would end the run; whole pairs are one character."""
    (text,) = documents(written(tmp_path / "a.jsonl", rb'{"text": "a\ud83d\ude00b\ud800c"}'))
    assert text.encode().decode() == text
    assert text.startswith("a😀b")
    assert text.endswith("c")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_a_gzip_file_that_is_cut_off_or_is_none_is_named(tmp_path, name):
    """A truncated download must not count as the whole corpus."""
    file = tmp_path / name
    whole = gzip.compress(b'{"text": "' + bytes(range(65, 91)) * 1000 + b'"}\n')
    for content in (whole[: len(whole) // 2], whole[:-4], b"plain text", whole[:20] + b"\x00" * 20 + whole[40:]):
        file.write_bytes(content)
        assert str(file) in refusal(file)
        assert "gzip" in refusal(file)


def test_a_file_that_has_gone_is_named(tmp_path):
    """Files may vanish between the search and the reading."""
    assert str(tmp_path / "gone.txt") in refusal(tmp_path / "gone.txt")


LINES = [{"text": f"document {number}", "id": number} for number in range(200)]
AS_LINES = "".join(json.dumps(line) + "\n" for line in LINES).encode()
TEXTS = [line["text"] for line in LINES]


@pytest.mark.parametrize(
    "name",
    ["x.json", "X.JSONL", "x.ndjson", "x.jsonl.txt", "x.txt", "x", "x.JSON.gz", "x.ndjson.GZ", "x.jsonl.1", "x.jl"],
)
def test_json_lines_are_read_as_such_under_any_name(tmp_path, name):
    """Read as plain text they are one document of braces, and nothing says so (N06)."""
    file = tmp_path / name
    file.write_bytes(gzip.compress(AS_LINES) if name.lower().endswith(".gz") else AS_LINES)
    assert documents(file) == TEXTS


@pytest.mark.parametrize("head", [b"\xef\xbb\xbf", b"\n\n", b" \r\n"])
def test_json_lines_are_known_behind_a_mark_or_blank_lines(tmp_path, head):
    """An export begins with a byte-order mark, a file put together by hand with a blank line (N06)."""
    assert [text for text in documents(written(tmp_path / "x.json", head + AS_LINES)) if text] == TEXTS


def test_json_lines_under_another_name_need_the_field_too(tmp_path):
    """The wrong field is an error by file and line, not a document of braces (N06)."""
    file = written(tmp_path / "x.json", AS_LINES)
    assert f"{file}:1" in refusal(file, text_field="body")


def test_one_json_line_under_another_name_is_one_document(tmp_path):
    """There is no second line to know it by (N06)."""
    assert documents(written(tmp_path / "x.json", b'{"text": "alone"}')) == ["alone"]


@pytest.mark.parametrize(
    "content",
    [json.dumps(LINES), json.dumps(LINES, indent=2), json.dumps(LINES[0], indent=1), "".join(map(json.dumps, LINES))],
    ids=["list", "list over lines", "object over lines", "objects end to end"],
)
def test_records_that_are_not_one_a_line_are_refused(tmp_path, content):
    """They hold the text field, and would be trained on as one document of braces (N06)."""
    message = refusal(written(tmp_path / "x.json", content.encode()))
    assert "one object per line" in message
    assert ".jsonl" in message


def test_other_json_is_text_and_said_to_be(tmp_path, caplog):
    """Settings in a corpus of code are wanted as they stand; a wrong field in a list of records is not (N06)."""
    content = '{\n  "name": "package",\n  "version": 1\n}\n'
    with caplog.at_level(logging.WARNING, logger="nnxtrain"):
        assert documents(written(tmp_path / "package.json", content.encode())) == [content]
    assert "package.json" in caplog.text
    assert "data.text_field" in caplog.text


@pytest.mark.parametrize("content", ["{}", "{ x = 1 }\n", "[1] a note", "{{braces}}\n{{more}}", '{"text": "cut', "[]"])
def test_text_that_only_begins_like_json_is_text(tmp_path, caplog, content):
    """Code and notes begin with brackets too: no refusal, no warning."""
    assert documents(written(tmp_path / "a.txt", content.encode())) == [content]
    assert not caplog.records


TEXT = "Plain words, and then some more of them.\n" * 40
RUSSIAN = "Простые слова и ещё немного.\n" * 40


def in_zip(content: bytes, folder: Path) -> bytes:
    """Returns a zip archive of one file."""
    with zipfile.ZipFile(folder / "z", "w") as archive:
        archive.writestr("a.txt", content)
    return (folder / "z").read_bytes()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.bz2"])
@pytest.mark.parametrize("invalid_utf8", ["refuse", "replace"])
@pytest.mark.parametrize(
    ("pack", "says"),
    [
        (lambda raw, _: bz2.compress(raw), "bzip2"),
        (lambda raw, _: lzma.compress(raw), "xz"),
        (lambda raw, _: gzip.compress(raw), "gzip"),
        (in_zip, "zip"),
        (lambda raw, _: lzma.compress(raw, format=lzma.FORMAT_ALONE), "LZMA"),
        (lambda raw, _: b"\x28\xb5\x2f\xfd\x24\x05" + raw, "Zstandard"),
        (lambda raw, _: b"\x50\x2a\x4d\x18\x04\x00\x00\x00note\x28\xb5\x2f\xfd" + raw, "Zstandard"),
        (lambda raw, _: b"a.txt".ljust(257, b"\0") + b"ustar\x0000" + raw, "tar"),
        (lambda raw, _: b"PAR1\x15\x04" + raw + b"PAR1", "Parquet"),
    ],
)
def test_a_compressed_file_is_named_as_such(tmp_path, name, invalid_utf8, pack, says):
    """The advice to replace bytes that are not UTF-8 trains on noise; a tar of text is even valid UTF-8 (N04)."""
    file = tmp_path / name
    file.write_bytes(pack(TEXT.encode(), tmp_path))
    message = refusal(file, invalid_utf8=invalid_utf8)
    assert says in message
    assert str(file) in message
    assert "invalid_utf8" not in message


def test_what_is_compressed_twice_is_named(tmp_path):
    """`corpus.tar.gz` is the name of a download; decompressed it is no text (N04)."""
    assert "tar archive" in refusal(written(tmp_path / "a.tar.gz", b"a".ljust(257, b"\0") + b"ustar\x0000" + b"x" * 99))
    assert "bzip2" in refusal(written(tmp_path / "a.gz", bz2.compress(TEXT.encode())))


@pytest.mark.parametrize("invalid_utf8", ["refuse", "replace"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize(
    "text",
    [TEXT, RUSSIAN, "short text\n", "\n".join(json.dumps(line) for line in LINES)],
    ids=["English", "Russian", "short", "JSON lines"],
)
def test_a_wide_encoding_is_named(tmp_path, encoding, text, invalid_utf8):
    """Without a mark UTF-16 is valid UTF-8 with NUL between the letters, and would be trained on (N04)."""
    message = refusal(written(tmp_path / "a.txt", text.encode(encoding)), invalid_utf8=invalid_utf8)
    assert encoding[:6].upper() in message
    assert "iconv" in message
    assert "invalid_utf8" not in message


@pytest.mark.parametrize(
    "text", ["a\0b\0c\0d\0e", "one\0two words\0three\0", "a\0\0\0b\0\0\0\0c plain words", "BZh, PK, Rar"]
)
def test_text_with_a_few_nul_bytes_is_text(tmp_path, text):
    """Lists of names end with NUL: what is in a file that is UTF-8 is the user's choice."""
    text = text + " and then some more words of plain text" * 3
    assert documents(written(tmp_path / "a.txt", text.encode())) == [text]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1251", "shift-jis", "gb2312"])
def test_text_of_an_encoding_without_a_sign_is_advised_to_convert(tmp_path, encoding):
    """Replacing each letter that is not ASCII is not what one wants first (N04)."""
    text = {"latin-1": "déjà vu ", "cp1251": "слова ", "shift-jis": "日本語 ", "gb2312": "中文 "}[encoding] * 50
    message = refusal(written(tmp_path / "a.txt", text.encode(encoding)))
    assert message.index("iconv") < message.index("data.invalid_utf8")


def test_bytes_that_are_no_text_get_no_advice_to_replace_them(tmp_path):
    """An image or a program would be trained on as noise (N04)."""
    message = refusal(written(tmp_path / "a.txt", bytes(range(256)) * 8))
    assert "does not look like text" in message
    assert "invalid_utf8" not in message


def starts(file: Path, **options: str) -> None:
    """Reads the start of a file."""
    check_start(file, **{"text_field": "text", "invalid_utf8": "refuse"} | options)


@pytest.mark.parametrize("unit", ["é", "words\n", '{"text": "é"}\n'])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json.gz"])
def test_the_start_of_a_good_file_is_good_wherever_it_ends(tmp_path, name, unit):
    """The last line that is looked at, or its last character, is not all there (N20)."""
    if ".json" in name and "text" not in unit:
        unit = json.dumps({"text": unit}) + "\n"
    for count in (1, START_BYTES // len(unit.encode()) + 7):
        starts(written(tmp_path / name, (unit * count).encode()))


def test_the_start_of_one_enormous_line_is_good(tmp_path):
    """Its end is beyond what is read (N20)."""
    starts(written(tmp_path / "a.jsonl", b'{"text": "' + b"x" * 2 * START_BYTES + b'"}\n'))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt.gz", gzip.compress(TEXT.encode())[:-9], "gzip"),
        ("a.txt", bz2.compress(TEXT.encode()), "bzip2"),
        ("a.txt", TEXT.encode("utf-16"), "UTF-16"),
        ("a.txt", b"plain \xc0 words", "byte 6"),
        ("a.jsonl", b'{"text": "one"}\n{"txet": "two"}\n', ":2"),
        ("a.txt", b"\x28\xb5\x2f\xfd" + b"\xff" * 2 * START_BYTES, "Zstandard"),
    ],
    ids=["cut gzip", "bzip2", "UTF-16", "bad byte", "wrong field", "large"],
)
def test_what_is_wrong_at_the_start_of_a_file_is_found(tmp_path, name, content, says):
    """A check that does not look at the data says that all is well (N20)."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        starts(tmp_path / name)
