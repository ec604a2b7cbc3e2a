"""Patterns to files, files to documents (B30, B36)."""

import glob
import gzip
import json
from pathlib import Path

import pytest

from nnxtrain.data.files import find_files, read_documents
from nnxtrain.errors import ConfigError, DataError


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


@pytest.fixture
def tree(tmp_path):
    """Returns a folder of files and folders."""
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/er/d.txt", "deep/e.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "only" / "folders").mkdir(parents=True)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").touch()
    return tmp_path


@pytest.mark.parametrize(
    "pattern", ["nothing.txt", "*.parquet", "only", "only/*", "empty.txt", "[eb][ml]*.txt", "only/"]
)
def test_a_pattern_without_text_is_refused_by_key_and_pattern(tree, pattern):
    """An endless wait for data, or a division by zero rows, would come instead (B30)."""
    with pytest.raises(ConfigError) as caught:
        find_files([f"{tree}/a.txt", f"{tree}/{pattern}"], key="data.validation_path")
    assert "data.validation_path" in str(caught.value)
    assert f"{tree}/{pattern}" in str(caught.value)


def test_folders_get_a_hint_that_works(tree):
    """The hint is what people paste next."""
    with pytest.raises(ConfigError) as caught:
        find_files([f"{tree}/deep/"], key="data.path")
    hint = str(caught.value).split("such as '")[1].split("'")[0]
    assert "//" not in hint
    assert [file.name for file in find_files([hint], key="data.path")] == ["c.txt", "d.txt"]


def test_two_stars_go_down_all_folders(tree):
    """A glob that is not recursive sees one level."""
    found = find_files([f"{tree}/**/*.txt"], key="data.path")
    assert [file.relative_to(tree).as_posix() for file in found] == [
        "a.txt", "b.txt", "blank.txt", "deep/c.txt", "deep/er/d.txt", "empty.txt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "pattern", ["**/*.txt", "**/e*", "**", "deep/**/*.txt", "**/er/**", "d*/**/d.txt", "**/**/c.*"]
)
def test_two_stars_match_what_glob_matches(tree, pattern, monkeypatch):
    """The walk is our own, so that it ends; what it finds is not."""
    (tree / "there").symlink_to("deep")
    (tree / ".hidden").mkdir()
    (tree / ".hidden" / "f.txt").write_text("hidden")
    expected = {Path(match).resolve() for match in glob.glob(f"{tree}/{pattern}", recursive=True)}
    expected = {match for match in expected if match.is_file()}
    assert {file.resolve() for file in find_files([f"{tree}/{pattern}"], key="data.path")} == expected
    monkeypatch.chdir(tree)
    assert {file.resolve() for file in find_files([pattern], key="data.path")} == expected


def test_loops_of_links_end(tree):
    """Each step into a loop doubles the paths; a walk along all of them takes years."""
    for name in ("one", "two", "three"):
        (tree / name).symlink_to(tree)
    assert len(find_files([f"{tree}/**/*.txt"], key="data.path")) == 6


def test_files_are_sorted_whatever_the_order_of_the_patterns(tree):
    """The corpus, and with it every row, depends on this order."""
    one = find_files([f"{tree}/b.txt", f"{tree}/a.txt"], key="data.path")
    assert one == find_files([f"{tree}/a.txt", f"{tree}/b.txt"], key="data.path")
    assert [file.name for file in one] == ["a.txt", "b.txt"]


def test_a_file_that_is_named_twice_is_read_once(tree, monkeypatch):
    """Text read twice weighs twice; overlapping globs and other spellings of a path are easily written."""
    monkeypatch.chdir(tree)
    for again in ("*.txt", "./a.txt", "deep/../a.txt", f"{tree}/a.txt"):
        found = find_files(["a.txt", again], key="data.path")
        assert [file.name for file in found].count("a.txt") == 1, again


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path):
    """Downloaded files are called `corpus[1].txt`; the name in full must do."""
    file = written(tmp_path / "corpus[1].txt", b"x")
    assert find_files([str(file)], key="data.path") == [file]


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    """No shell expands the `~` of `data.path=~/corpus.txt`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = written(tmp_path / "corpus.txt", b"x")
    assert find_files(["~/corpus.txt"], key="data.path") == [file]


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
