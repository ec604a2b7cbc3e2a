"""Text files, plain or JSON lines: training files and held-out sets."""

import re
from pathlib import Path

from nnxtrain.config.data import DataConfig
from nnxtrain.data.documents import check_start
from nnxtrain.data.files import find_files
from nnxtrain.data.packing import PackedRows
from nnxtrain.data.tokenised import tokenised
from nnxtrain.types import Dataset, Rows, RowSpec


def text(config: DataConfig, spec: RowSpec) -> Dataset:
    """Reads files of text; held-out sets are those of `data.validation_path`."""
    corpora = {name: tokenised(files, config, spec.tokenizer) for name, files in text_files(config).items()}
    train = corpora.pop("")
    held_out: dict[str, Rows] = {name: PackedRows(corpus, spec.sequence) for name, corpus in corpora.items()}
    described = {name: str(corpus) for name, corpus in corpora.items()}
    return Dataset(PackedRows(train, spec.sequence), held_out, str(train), described)


def text_files(config: DataConfig) -> dict[str, list[Path]]:
    """Returns the files of `data.path` under the empty name, and those of each held-out set under its own.

    Raises:
        ConfigError: a pattern matches no file, or only empty ones.
    """
    patterns: dict[str, list[str]] = {}
    for entry in config.validation_path:
        name, equals, pattern = entry.partition("=")
        has_name = bool(equals) and re.fullmatch(r"[\w.-]+", name) is not None
        patterns.setdefault(name if has_name else "validation", []).append(pattern if has_name else entry)
    held_out = {name: find_files(words, key="data.validation_path") for name, words in patterns.items()}
    return {"": find_files(config.path, key="data.path")} | held_out


def check_text(config: DataConfig) -> int:
    """Reads the start of each file; returns the number of files.

    Raises:
        ConfigError: a pattern matches no file, or only empty ones.
        DataError: the start of a file is not text.
    """
    files = {file for found in text_files(config).values() for file in found}
    for file in sorted(files):
        check_start(file, text_field=config.text_field, invalid_utf8=config.invalid_utf8)
    return len(files)
