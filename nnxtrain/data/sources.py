"""Data sources: what `data.source` names."""

import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nnxtrain.config.data import DataConfig
from nnxtrain.config.lookup import lookup
from nnxtrain.data.corpus import Corpus, cached_corpus
from nnxtrain.data.files import find_files, read_documents
from nnxtrain.data.packing import PackedRows
from nnxtrain.data.synthetic import ENDLESS, HELD_OUT, RandomWalkRows
from nnxtrain.errors import ConfigError
from nnxtrain.host.files import default_cache_dir
from nnxtrain.tokenizers.byte import ByteTokenizer
from nnxtrain.tokenizers.ids import IdTokenizer
from nnxtrain.types import Dataset, Rows, Tokenizer

TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"byte": ByteTokenizer}
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
STDLIB_SMALLEST_BYTES = 1_000_000


class RowSpec(NamedTuple):
    """What a run asks of a source: tokens per row, how text becomes ids, seed."""

    sequence: int
    tokenizer: Tokenizer
    seed: int


def make_tokenizer(config: DataConfig, *, vocab: int) -> Tokenizer:
    """Returns the tokenizer of `config`; synthetic tokens, any of `vocab` ids, are read and written as numbers."""
    if config.source == "synthetic":
        return IdTokenizer(vocab)
    return lookup(TOKENIZERS, config.tokenizer, key="data.tokenizer")()


def synthetic(config: DataConfig, spec: RowSpec) -> Dataset:
    """Makes random walks; the held-out rows are drawn from another seed."""

    def rows(stream: int, count: int) -> Rows:
        vocab = spec.tokenizer.size
        return RandomWalkRows(sequence=spec.sequence, vocab=vocab, seed=2 * spec.seed + stream, rows=count)

    return Dataset(rows(0, ENDLESS), {"validation": rows(1, HELD_OUT)}, "synthetic random walks")


def text(config: DataConfig, spec: RowSpec) -> Dataset:
    """Reads files of text; held-out sets are those of `data.validation_path`."""
    named = text_files(config)
    corpora = {name: _tokenised(files, config, spec.tokenizer) for name, files in named.items()}
    train = corpora.pop("")
    held_out: dict[str, Rows] = {name: PackedRows(corpus, spec.sequence) for name, corpus in corpora.items()}
    return Dataset(PackedRows(train, spec.sequence), held_out, str(train))


def text_files(config: DataConfig) -> dict[str, list[Path]]:
    """Returns the files of `data.path` under the empty name, and those of each held-out set under its own.

    Raises:
        ConfigError: a pattern names no file that holds anything.
    """
    patterns: dict[str, list[str]] = {}
    for entry in config.validation_path:
        name, equals, pattern = entry.partition("=")
        has_name = bool(equals) and re.fullmatch(r"[\w.-]+", name) is not None
        patterns.setdefault(name if has_name else "validation", []).append(pattern if has_name else entry)
    held_out = {name: find_files(words, key="data.validation_path") for name, words in patterns.items()}
    return {"": find_files(config.path, key="data.path")} | held_out


def stdlib(config: DataConfig, spec: RowSpec) -> Dataset:
    """Reads the sources of Python's own standard library; whole files are held out, by hash of their path.

    Raises:
        ConfigError: the sources of this Python are not on disk.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if not STDLIB_LEFT_OUT & set(file.relative_to(root).parts))
    size = sum(file.stat().st_size for file in files)
    if size < STDLIB_SMALLEST_BYTES:
        rule = f"this Python keeps {size:,} bytes of sources in {root}"
        raise ConfigError(f"data.source=stdlib: {rule}; give text of your own: data.source=text data.path='*.txt'")
    held = {file for file in files if _share(file.relative_to(root).as_posix()) < config.validation_fraction}
    corpus = _tokenised([file for file in files if file not in held], config, spec.tokenizer)
    held_out: dict[str, Rows] = {}
    if held:
        held_out["validation"] = PackedRows(_tokenised(sorted(held), config, spec.tokenizer), spec.sequence)
    return Dataset(PackedRows(corpus, spec.sequence), held_out, f"Python's standard library, {corpus}")


def _share(name: str) -> float:
    """Returns a number in [0, 1) made from `name` alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32


def _tokenised(files: list[Path], config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    read: Callable[[Path], Iterable[str]] = partial(
        read_documents, text_field=config.text_field, invalid_utf8=config.invalid_utf8
    )
    return cached_corpus(
        files,
        read,
        tokenizer=tokenizer,
        options=f"{config.text_field} {config.invalid_utf8}",
        cache_dir=Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir() / "corpora",
    )


DATASETS: dict[str, Callable[[DataConfig, RowSpec], Dataset]] = {
    "stdlib": stdlib,
    "synthetic": synthetic,
    "text": text,
}
