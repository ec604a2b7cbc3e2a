"""Tokenised documents on disk: made once, whole or not at all."""

import gzip
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from nnxtrain.data import identity
from nnxtrain.data.corpus import LEFTOVER_S, Corpus, cached_corpus
from nnxtrain.errors import ConfigError, DataError
from nnxtrain.host.files import default_cache_dir
from nnxtrain.tokenizers.byte import ByteTokenizer


class CountingReader:
    """Yields the lines of a file as documents, and counts the files read."""

    def __init__(self):
        self.files = 0

    def __call__(self, file: Path):
        self.files += 1
        yield from file.read_text().split("\n")


@pytest.fixture
def place(tmp_path):
    """Returns a folder with two files in it, `one` and `two`."""
    (tmp_path / "one").write_text("alpha\n\nbeta")
    (tmp_path / "two").write_text("gamma")
    return tmp_path


def folders(place: Path) -> list[Path]:
    """Returns the folders of tokenised corpora in the cache."""
    return [folder for folder in (place / "cache").iterdir() if not folder.name.startswith(".hashes")]


def corpus_of(place: Path, read=None, *, options: str = "", tokenizer=None) -> Corpus:
    """Returns the corpus of both files, kept in `place/cache`."""
    return cached_corpus(
        [place / "one", place / "two"],
        read or CountingReader(),
        tokenizer=tokenizer or ByteTokenizer(),
        options=options,
        cache_dir=place / "cache",
    )


def texts(corpus: Corpus) -> list[str]:
    """Returns the documents of a corpus; fails where one is not between its marks."""
    pieces = [corpus.tokens[a:b] for a, b in zip(corpus.starts[:-1], corpus.starts[1:], strict=True)]
    for piece in pieces:
        assert (piece[0], piece[-1]) == (ByteTokenizer.bos, ByteTokenizer.eos)
    return [ByteTokenizer().decode(piece) for piece in pieces]


def test_documents_lie_end_to_end_each_between_its_marks(place):
    """A document without its marks runs into the next; an empty one would be two marks and no text."""
    corpus = corpus_of(place)
    assert texts(corpus) == ["alpha", "beta", "gamma"]
    assert corpus.empty_documents == 1
    assert corpus.starts[-1] == len(corpus.tokens) == 5 + 4 + 5 + 3 * 2


def test_the_description_counts_tokens_documents_and_those_left_out(place):
    """What was left out must be said, with an exact count (B36)."""
    corpus = corpus_of(place)
    words = str(corpus)
    assert "20 tokens" in words
    assert "3 documents" in words
    assert "1 empty" in words
    assert corpus.sha256[:12] in words


def test_the_second_call_reads_no_file(place):
    """Tokenising again at every start costs minutes."""
    read = CountingReader()
    first, second = corpus_of(place, read), corpus_of(place, read)
    assert read.files == 2
    assert texts(first) == texts(second)
    assert first.sha256 == second.sha256


def test_whatever_changes_the_tokens_makes_a_new_corpus(place):
    """A stale corpus would be trained on without a word."""
    read = CountingReader()
    corpus_of(place, read)
    corpus_of(place, read, options="other field")
    assert read.files == 4
    other = ByteTokenizer()
    other.fingerprint = "byte-2"
    corpus_of(place, read, tokenizer=other)
    assert read.files == 6
    (place / "two").write_text("epsilon")
    assert texts(corpus_of(place, read))[-1] == "epsilon"
    assert read.files == 8


@pytest.fixture
def settled(monkeypatch):
    """Makes files count as unchanged for long, so that hashes are remembered at once."""
    monkeypatch.setattr(identity, "SETTLED_S", -60.0)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("way", ["in place", "moved over", "copied over"])
def test_an_edit_that_keeps_size_and_time_makes_a_new_corpus(place, way):
    """Synchronising tools set the time back; the old tokens would be trained on without a word (N03)."""
    assert texts(corpus_of(place))[-1] == "gamma"
    was = (place / "two").stat()
    if way == "in place":
        (place / "two").write_text("delta")
    else:
        (place / "new").write_text("delta")
        os.utime(place / "new", ns=(was.st_atime_ns, was.st_mtime_ns))
        (place / "new").replace(place / "two") if way == "moved over" else shutil.copy2(place / "new", place / "two")
    os.utime(place / "two", ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (place / "two").stat().st_mtime_ns == was.st_mtime_ns
    read = CountingReader()
    assert texts(corpus_of(place, read))[-1] == "delta"
    assert read.files == 2


@pytest.mark.usefixtures("settled")
def test_files_whose_content_is_known_are_neither_tokenised_nor_hashed_again(place, monkeypatch):
    """Ten gigabytes take seconds to hash and minutes to tokenise; a touched file holds what it held (N03)."""
    first = corpus_of(place)
    os.utime(place / "one", ns=(0, 0))
    read = CountingReader()
    assert corpus_of(place, read).sha256 == first.sha256
    assert read.files == 0
    monkeypatch.setattr(identity, "_hash", None)  # calling it is an error
    assert corpus_of(place, read).sha256 == first.sha256


def test_the_hash_of_a_file_that_changed_just_now_is_not_remembered(place, monkeypatch):
    """A second change within one tick of the clock would not be seen."""
    corpus_of(place)
    monkeypatch.setattr(identity, "_hash", lambda file: "another")
    read = CountingReader()
    corpus_of(place, read)
    assert read.files == 2


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("content", ["", "{}", '{"key": 1, "hashes": []}', "[]"])
def test_a_damaged_memory_of_hashes_is_made_again(place, content):
    """It only saves time, and must not end a run."""
    first = corpus_of(place)
    (note,) = (place / "cache" / ".hashes").iterdir()
    note.write_text(content)
    assert corpus_of(place).sha256 == first.sha256
    assert note.read_text() != content


def test_a_file_that_sorts_first_makes_a_new_corpus(place):
    """All rows move; the hash in the line about the corpus is what a resumed run compares (N03)."""
    before = corpus_of(place)
    (place / "a").write_text("first")
    files = [place / name for name in ("a", "one", "two")]
    after = cached_corpus(files, CountingReader(), tokenizer=ByteTokenizer(), options="", cache_dir=place / "cache")
    assert texts(after)[0] == "first"
    assert str(after) != str(before)
    assert after.sha256 != before.sha256


def test_a_file_that_changes_while_it_is_tokenised_is_refused(place):
    """Its new text would be kept under the hash of the old one (N03)."""

    def read(file: Path):
        yield file.read_text()
        (place / "one").write_text("changed meanwhile")

    with pytest.raises(DataError, match="one: changed while it was read"):
        corpus_of(place, read)
    assert folders(place) == []


@pytest.mark.parametrize("when", ["before", "while reading"])
def test_a_file_that_cannot_be_read_is_not_blamed_on_the_cache(place, when):
    """The message sent people to `data.cache_dir`, where nothing was wrong."""

    def read(file: Path):
        if when == "before":
            raise AssertionError("never read")
        raise OSError(5, "Input/output error", str(file))

    if when == "before":
        (place / "one").unlink()
    with pytest.raises(DataError) as caught:
        corpus_of(place, read)
    assert str(place / "one") in str(caught.value)
    assert "cache" not in str(caught.value).replace(str(place), "")


class Marked(ByteTokenizer):
    """A byte tokenizer with other marks."""

    def __init__(self, bos: int, eos: int):
        self.bos, self.eos, self.fingerprint = bos, eos, f"marked {bos} {eos}"


@pytest.mark.parametrize(("bos", "eos"), [(-1, 257), (256, -1), (-1, -1)])
def test_a_tokenizer_may_have_no_marks(place, bos, eos):
    """-1 says that there is none; in 16 bits that is an error of numpy, or id 65535."""
    corpus = corpus_of(place, tokenizer=Marked(bos, eos))
    marks = [mark for mark in (bos, eos) if mark >= 0]
    pieces = [corpus.tokens[a:b] for a, b in zip(corpus.starts[:-1], corpus.starts[1:], strict=True)]
    assert [ByteTokenizer().decode(piece) for piece in pieces] == ["alpha", "beta", "gamma"]
    assert len(corpus.tokens) == 14 + 3 * len(marks)
    assert {*corpus.tokens.tolist()} - set(range(256)) == {*marks}


@pytest.mark.parametrize("bad", [-1, 259, 70_000])
def test_an_id_that_the_tokenizer_does_not_have_is_refused(place, bad):
    """In 16 bits -1 becomes 65535 and 70000 becomes 4464; both may be ids of the model."""

    class Wrong(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            return np.array([1, bad, 2])

    with pytest.raises(DataError, match=f"id {bad}, but its ids are 0 to 258"):
        corpus_of(place, tokenizer=Wrong())


def test_documents_without_a_token_are_counted_as_empty(place):
    """A tokenizer without marks may leave nothing of a text."""

    class Vowels(Marked):
        def encode(self, text: str) -> np.ndarray:
            return super().encode("".join(letter for letter in text if letter in "ae"))

    (place / "two").write_text("zzz")
    corpus = corpus_of(place, tokenizer=Vowels(-1, -1))
    assert corpus.empty_documents == 2
    assert np.diff(corpus.starts).tolist() == [2, 2]


def test_documents_of_one_token_each_are_refused(place):
    """Nothing is there to predict: no row would have a target (B30)."""

    class Words(Marked):
        def encode(self, text: str) -> np.ndarray:
            return np.array([7])

    with pytest.raises(DataError, match="nothing to predict"):
        corpus_of(place, tokenizer=Words(-1, -1))


def test_the_same_text_has_the_same_hash_wherever_it_lies(place):
    """The hash in the log tells two machines whether they train on the same tokens."""
    first = corpus_of(place)
    os.utime(place / "one", ns=(0, 0))
    assert corpus_of(place).sha256 == first.sha256
    (place / "two").write_text("gamme")
    assert corpus_of(place).sha256 != first.sha256


def test_a_vocabulary_beyond_16_bits_keeps_its_ids(place):
    """An id of 70 000 in 16 bits becomes 4464 without an error."""

    class Wide(ByteTokenizer):
        size = 70_001
        fingerprint = "wide"

        def encode(self, text: str) -> np.ndarray:
            return np.full(len(text), 70_000)

    assert corpus_of(place, tokenizer=Wide()).tokens.max() == 70_000


def test_threads_that_race_leave_one_good_folder(place):
    """Both are made to be in the middle of writing at once."""
    barrier = threading.Barrier(2, timeout=30)

    def read(file: Path):
        yield file.read_text()
        if file.name == "two":
            barrier.wait()

    found = []
    threads = [threading.Thread(target=lambda: found.append(texts(corpus_of(place, read)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["alpha\n\nbeta", "gamma"]] * 2
    assert len(folders(place)) == 1


def test_a_process_that_dies_leaves_nothing_that_counts(place, tmp_path_factory):
    """Half a corpus must never be taken for a whole one."""
    left = tmp_path_factory.mktemp("left") / "cache"

    def read(file: Path):
        yield file.read_text()
        if file.name == "two":
            shutil.copytree(place / "cache", left)  # what is on disk if the process ends here

    corpus_of(place, read)
    shutil.rmtree(place / "cache")
    left.rename(place / "cache")
    again = CountingReader()
    assert texts(corpus_of(place, again)) == ["alpha", "beta", "gamma"]
    assert again.files == 2


def test_what_a_killed_process_left_long_ago_is_removed(place):
    """Nobody else does it, and it may be large; what another process is making now must stay."""
    old, new = (place / "cache" / f".making-{age}" for age in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    long_ago = time.time() - LEFTOVER_S - 60
    os.utime(old, (long_ago, long_ago))
    corpus_of(place)
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, DataError])
def test_interrupted_writing_leaves_nothing(place, error):
    """Neither a folder that counts nor one that fills the disk."""

    def read(file: Path):
        yield "some text"
        raise error

    with pytest.raises(error):
        corpus_of(place, read)
    assert folders(place) == []
    assert texts(corpus_of(place)) == ["alpha", "beta", "gamma"]


@pytest.mark.parametrize("keep", [0, 0.5, None], ids=["empty", "half", "gone"])
@pytest.mark.parametrize("part", ["tokens.bin", "starts.npy", "meta.json"])
def test_a_damaged_cache_is_named_with_the_cure(place, part, keep):
    """A full disk or a lost machine leaves files that are empty or cut off."""
    corpus_of(place)
    (folder,) = folders(place)
    content = (folder / part).read_bytes()
    (folder / part).unlink()
    if keep is not None:
        (folder / part).write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(DataError) as caught:
        corpus_of(place)
    assert str(folder) in str(caught.value)
    assert "delete" in str(caught.value)


def test_parts_of_a_cache_that_do_not_fit_together_are_named(place):
    """Starts of another corpus would cut documents at random places without an error."""
    corpus_of(place)
    (folder,) = folders(place)
    np.save(folder / "starts.npy", np.array([0, 4]))
    with pytest.raises(DataError, match="delete"):
        corpus_of(place)


def test_a_corpus_without_text_is_refused_each_time(place):
    """Files with bytes in them may hold no text: the message counts what was looked at (B30)."""
    (place / "one").write_text("\n\n")
    (place / "two").write_bytes(gzip.compress(b""))
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            corpus_of(place, lambda file: ["", ""])
        assert "4 empty documents" in str(caught.value)
        assert str(place / "one") in str(caught.value)


@pytest.mark.parametrize("where", ["cache", "cache/below"])
def test_a_cache_that_cannot_be_written_is_named_with_its_key(place, where):
    """A file lies where the folder should be: no permission is asked, so this holds for root too."""
    (place / "cache").write_text("not a folder")
    with pytest.raises(ConfigError) as caught:
        cached_corpus([place / "one"], CountingReader(), tokenizer=ByteTokenizer(), options="", cache_dir=place / where)
    assert "data.cache_dir" in str(caught.value)
    assert str(place / where) in str(caught.value)


def test_the_cache_is_in_the_users_cache_directory(monkeypatch, tmp_path):
    """The working folder is not the place, and the directory can be moved."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "nnxtrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "nnxtrain"
