"""The source code of Python's standard library: text that every machine has."""

import hashlib
import sysconfig
from pathlib import Path

from nnxtrain.config.data import DataConfig
from nnxtrain.data.packing import PackedRows
from nnxtrain.data.tokenised import tokenised
from nnxtrain.errors import ConfigError
from nnxtrain.types import Dataset, RowSpec

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
SMALLEST_BYTES = 1_000_000


def stdlib(config: DataConfig, spec: RowSpec) -> Dataset:
    """Reads Python's standard library; `validation_fraction` of its files are held out, by hash of their path.

    Raises:
        ConfigError: this Python is installed without its source code.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if not LEFT_OUT & set(file.relative_to(root).parts))
    size = sum(file.stat().st_size for file in files)
    if size < SMALLEST_BYTES:
        rule = f"this Python has only {size:,} bytes of source code in {root}"
        raise ConfigError(f"data.source=stdlib: {rule}; use text of your own: data.source=text data.path='*.txt'")
    held = {file for file in files if unit_hash(file.relative_to(root).as_posix()) < config.validation_fraction}
    corpus = tokenised([file for file in files if file not in held], config, spec.tokenizer)
    held_out = {"validation": tokenised(sorted(held), config, spec.tokenizer)} if held else {}
    return Dataset(
        PackedRows(corpus, spec.sequence),
        {name: PackedRows(found, spec.sequence) for name, found in held_out.items()},
        f"Python's standard library, {corpus}",
        {name: str(found) for name, found in held_out.items()},
    )


def unit_hash(name: str) -> float:
    """Returns a hash of `name` in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
