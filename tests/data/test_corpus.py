"""Tokenised documents on disk: made once, whole or not at all."""

import gzip
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from nnxtrain.data.corpus import LEFTOVER_S, Corpus, cached_corpus
from nnxtrain.errors import ConfigError, DataError
from nnxtrain.host.files import default_cache_dir
from nnxtrain.tokenizers.byte import ByteTokenizer
from tests.support import ROOT

OTHER_PROCESS = """
import os, sys, time
from pathlib import Path
from nnxtrain.data.corpus import cached_corpus
from nnxtrain.tokenizers.byte import ByteTokenizer

file, cache, expected, action = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

def read(file):
    yield "first"
    (cache.parent / f"reading-{os.getpid()}").touch()
    while len(list(cache.parent.glob("reading-*"))) < expected:
        time.sleep(0.01)
    if action == "die":
        os._exit(9)
    yield "second"

print(cached_corpus([file], read, tokenizer=ByteTokenizer(), options="", cache_dir=cache))
"""


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
    (place / "two").write_text("delta")  # of the same size
    os.utime(place / "two", ns=(0, 0))
    assert texts(corpus_of(place, read))[-1] == "delta"
    (place / "two").write_text("epsilon")
    os.utime(place / "two", ns=(0, 0))
    assert texts(corpus_of(place, read))[-1] == "epsilon"
    assert read.files == 10


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
    assert len(list((place / "cache").iterdir())) == 1


def start_process(place: Path, *, processes: int, action: str = "finish") -> subprocess.Popen:
    """Starts another process that makes the corpus of file `one`, once all `processes` are in the middle of it."""
    command = [sys.executable, "-c", OTHER_PROCESS, place / "one", place / "cache", str(processes), action]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_processes_that_race_leave_one_good_folder(place):
    """The one that comes second must neither fail nor disturb the first."""
    pair = [start_process(place, processes=2) for _ in range(2)]
    ends = [process.communicate(timeout=60) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], ends
    assert "2 documents" in ends[0][0]
    assert ends[0][0] == ends[1][0]
    assert len(list((place / "cache").iterdir())) == 1


def test_a_process_that_dies_leaves_nothing_that_counts(place):
    """Half a corpus must never be taken for a whole one."""
    process = start_process(place, processes=1, action="die")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 9, errors
    read = CountingReader()
    corpus = cached_corpus(
        [place / "one"], read, tokenizer=ByteTokenizer(), options="", cache_dir=place / "cache"
    )  # what the other process was making
    assert read.files == 1
    assert texts(corpus) == ["alpha", "beta"]


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
    assert list((place / "cache").iterdir()) == []
    assert texts(corpus_of(place)) == ["alpha", "beta", "gamma"]


@pytest.mark.parametrize("keep", [0, 0.5, None], ids=["empty", "half", "gone"])
@pytest.mark.parametrize("part", ["tokens.bin", "starts.npy", "meta.json"])
def test_a_damaged_cache_is_named_with_the_cure(place, part, keep):
    """A full disk or a lost machine leaves files that are empty or cut off."""
    corpus_of(place)
    (folder,) = (place / "cache").iterdir()
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
    (folder,) = (place / "cache").iterdir()
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
