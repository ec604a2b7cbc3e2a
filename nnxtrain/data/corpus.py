"""Tokenised documents on disk: made once, then memory-mapped."""

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nnxtrain.data.identity import check_unchanged, content_hashes, stamps
from nnxtrain.errors import ConfigError, DataError
from nnxtrain.types import Tokenizer

logger = logging.getLogger(__name__)
FORMAT = 2  # of the cache folder
REPORT_EVERY_S = 5.0
LEFTOVER_S = 7 * 86400.0


class Corpus(NamedTuple):
    """Concatenated documents, each as bos, its tokens, eos; a tokenizer may lack bos, eos, or both.

    Attributes:
        tokens: `[n]` ids.
        starts: `[documents + 1]` index of each document's first token; the last entry is `n`.
        empty_documents: documents left out because they contain no text.
        sha256: of the tokens.
    """

    tokens: np.ndarray
    starts: np.ndarray
    empty_documents: int
    sha256: str

    def __str__(self) -> str:
        documents = len(self.starts) - 1
        left_out = f", {self.empty_documents} empty left out" if self.empty_documents else ""
        count = f"{documents:,} document{'s' if documents > 1 else ''}"
        return f"{len(self.tokens):,} tokens in {count}{left_out} (sha256 {self.sha256[:12]})"


def cached_corpus(
    files: list[Path],
    read: Callable[[Path], Iterable[str]],
    *,
    tokenizer: Tokenizer,
    options: str,
    cache_dir: Path,
) -> Corpus:
    """Returns the tokenised documents of `files`, from the cache if they are in it.

    The cache identifies files by name and content, never by time: see `content_hashes`.

    Args:
        files: in the order of the corpus.
        read: yields the documents of a file.
        tokenizer: text to ids.
        options: everything else that `read` depends on.
        cache_dir: folder of all tokenised corpora; made if needed.

    Raises:
        DataError: there is no text, a file cannot be read, or a file changed while it was read.
        ConfigError: `cache_dir` cannot be written.
    """
    before = stamps(files)
    contents = content_hashes(files, before, cache=cache_dir / ".hashes")
    named = [(file.name, content) for file, content in zip(files, contents, strict=True)]
    identity = json.dumps([FORMAT, tokenizer.fingerprint, options, named])
    folder = cache_dir / hashlib.sha256(identity.encode()).hexdigest()[:24]
    if not folder.is_dir():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(cache_dir)
            with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".making-") as making:
                _write(Path(making), _progress(files, read), tokenizer)
                check_unchanged(files, before)
                _publish(Path(making), folder)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"data.cache_dir: {cache_dir} cannot be written: {reason}; choose another folder"
            ) from error
    return _open(folder, files)


def _remove_leftovers(cache_dir: Path) -> None:
    """Removes unfinished folders of killed processes, old enough that no live process can still be writing them."""
    for folder in cache_dir.glob(".making-*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it too
            if time.time() - folder.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(folder, ignore_errors=True)


def _publish(made: Path, folder: Path) -> None:
    """Renames a finished folder to its final name, atomically; if another process was first, keeps that one's."""
    ready = made / "ready"
    ready.mkdir()
    for part in ("tokens.bin", "starts.npy", "meta.json"):
        shutil.move(made / part, ready / part)
    try:
        ready.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _progress(files: list[Path], read: Callable[[Path], Iterable[str]]) -> Iterator[str]:
    """Yields the documents of all files; logs progress every `REPORT_EVERY_S`.

    Raises:
        DataError: a file cannot be read; a bare OSError would be blamed on the cache folder.
    """
    sizes = [stamp.size for stamp in stamps(files)]
    total = sum(sizes)
    start = reported = time.monotonic()
    done = 0
    for file, size in zip(files, sizes, strict=True):
        try:
            yield from read(file)
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
        done += size
        now = time.monotonic()
        if now - reported > REPORT_EVERY_S:
            reported = now
            left = (now - start) * (total - done) / max(done, 1)
            logger.info("tokenising: %.0f %% of %.1f MB, %.0f s left", 100 * done / total, total / 1e6, left)


def _write(folder: Path, documents: Iterable[str], tokenizer: Tokenizer) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
    digest = hashlib.sha256()
    starts, empty = [0], 0
    with (folder / "tokens.bin").open("wb") as file:
        for text in documents:
            ids = _marked(text, tokenizer, dtype) if text else np.zeros(0, dtype)
            if not len(ids):
                empty += 1
                continue
            digest.update(ids.data)
            ids.tofile(file)
            starts.append(starts[-1] + len(ids))
    np.save(folder / "starts.npy", np.array(starts, np.int64))
    meta = {"dtype": dtype.name, "empty_documents": empty, "sha256": digest.hexdigest(), "tokens": starts[-1]}
    (folder / "meta.json").write_text(json.dumps(meta))


def _marked(text: str, tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray:
    """Returns the ids of a document with bos and eos where the tokenizer has them; `[0]` if there are no tokens.

    Raises:
        DataError: an id is outside the tokenizer's own range.
    """
    ids = np.asarray(tokenizer.encode(text))
    if not ids.size:
        return np.zeros(0, dtype)
    begin, end = ([mark] if mark >= 0 else [] for mark in (tokenizer.bos, tokenizer.eos))
    low, high = min([ids.min(), *begin, *end]), max([ids.max(), *begin, *end])
    if low < 0 or high >= tokenizer.size:
        bad = low if low < 0 else high
        raise DataError(f"the tokenizer returned id {bad}, but its ids are 0 to {tokenizer.size - 1}")
    return np.concatenate([np.array(begin, dtype), ids.astype(dtype, copy=False), np.array(end, dtype)])


def _open(folder: Path, files: list[Path]) -> Corpus:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        starts = np.load(folder / "starts.npy")
        count, path = meta["tokens"], folder / "tokens.bin"
        if starts[0] != 0 or starts[-1] != count or path.stat().st_size != count * np.dtype(meta["dtype"]).itemsize:
            raise ValueError("its files are inconsistent")
        tokens = np.memmap(path, dtype=meta["dtype"], mode="r", shape=(count,)) if count else np.zeros(0, meta["dtype"])
        corpus = Corpus(tokens, starts, meta["empty_documents"], meta["sha256"])
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DataError(f"the tokenised corpus in {folder} is damaged ({error}); delete that folder") from error
    if not count:
        empty = f"{meta['empty_documents']} empty documents"
        raise DataError(f"no text: {files[0]} and {len(files) - 1} more files contain {empty}")
    if count == len(starts) - 1:
        raise DataError(f"nothing to predict: each document of {files[0]} and {len(files) - 1} more files is one token")
    return corpus
