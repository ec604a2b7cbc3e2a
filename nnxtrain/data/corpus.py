"""Tokenised documents on disk, made once and memory-mapped from then on."""

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

from nnxtrain.errors import ConfigError, DataError
from nnxtrain.types import Tokenizer

logger = logging.getLogger(__name__)
FORMAT = 1  # of the cache folder
REPORT_EVERY_S = 5.0
LEFTOVER_S = 7 * 86400.0


class Corpus(NamedTuple):
    """Documents end to end, each as bos, its tokens, eos.

    Attributes:
        tokens: `[n]` ids.
        starts: `[documents + 1]` index of each document's first token; the last entry is `n`.
        empty_documents: documents left out, since they hold no text.
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
    """Returns the tokenised documents of `files`, from the cache where they are there.

    The cache knows files by path, size and time of change.

    Args:
        files: in the order of the corpus.
        read: yields the documents of a file.
        tokenizer: text to ids.
        options: whatever else `read` depends on.
        cache_dir: folder of all tokenised corpora; made if needed.

    Raises:
        DataError: no document holds text.
        ConfigError: `cache_dir` cannot be written.
    """
    stats = [(str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    identity = json.dumps([FORMAT, tokenizer.fingerprint, options, stats])
    folder = cache_dir / hashlib.sha256(identity.encode()).hexdigest()[:24]
    if not folder.is_dir():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(cache_dir)
            with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".making-") as making:
                _write(Path(making), _progress(files, read), tokenizer)
                _publish(Path(making), folder)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"data.cache_dir: {cache_dir} cannot be written: {reason}; choose another folder"
            ) from error
    return _open(folder, files)


def _remove_leftovers(cache_dir: Path) -> None:
    """Removes what processes that were killed had begun to make, so long ago that none can still be at it."""
    for folder in cache_dir.glob(".making-*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it too
            if time.time() - folder.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(folder, ignore_errors=True)


def _publish(made: Path, folder: Path) -> None:
    """Gives a finished folder its name at one stroke; if another process was first, keeps the other's."""
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
    """Yields the documents of all files; says how far it is when that takes long."""
    total = sum(file.stat().st_size for file in files)
    start = said = time.monotonic()
    done = 0
    for file in files:
        yield from read(file)
        done += file.stat().st_size
        now = time.monotonic()
        if now - said > REPORT_EVERY_S:
            said = now
            left = (now - start) * (total - done) / max(done, 1)
            logger.info("tokenising: %.0f %% of %.1f MB, %.0f s left", 100 * done / total, total / 1e6, left)


def _write(folder: Path, documents: Iterable[str], tokenizer: Tokenizer) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
    digest = hashlib.sha256()
    starts, empty = [0], 0
    with (folder / "tokens.bin").open("wb") as file:
        for text in documents:
            if not text:
                empty += 1
                continue
            marks = (np.array([mark], dtype) for mark in (tokenizer.bos, tokenizer.eos))
            ids = np.concatenate([next(marks), tokenizer.encode(text).astype(dtype, copy=False), next(marks)])
            digest.update(ids.data)
            ids.tofile(file)
            starts.append(starts[-1] + len(ids))
    np.save(folder / "starts.npy", np.array(starts, np.int64))
    meta = {"dtype": dtype.name, "empty_documents": empty, "sha256": digest.hexdigest(), "tokens": starts[-1]}
    (folder / "meta.json").write_text(json.dumps(meta))


def _open(folder: Path, files: list[Path]) -> Corpus:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        starts = np.load(folder / "starts.npy")
        count, path = meta["tokens"], folder / "tokens.bin"
        if starts[0] != 0 or starts[-1] != count or path.stat().st_size != count * np.dtype(meta["dtype"]).itemsize:
            raise ValueError("its parts do not fit together")
        tokens = np.memmap(path, dtype=meta["dtype"], mode="r", shape=(count,)) if count else np.zeros(0, meta["dtype"])
        corpus = Corpus(tokens, starts, meta["empty_documents"], meta["sha256"])
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DataError(f"the tokenised corpus in {folder} is damaged ({error}); delete that folder") from error
    if not count:
        empty = f"{meta['empty_documents']} empty documents"
        raise DataError(f"no text: {files[0]} and {len(files) - 1} more files hold {empty}")
    return corpus
