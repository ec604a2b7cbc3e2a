"""Ids as decimal numbers, for tokens without text."""

import re
from pathlib import Path

import numpy as np


class IdTokenizer:
    """Encodes and decodes ids as numbers separated by spaces; there is no bos and no eos."""

    bos = -1
    eos = -1

    def __init__(self, size: int):
        self.size = size
        self.fingerprint = f"ids-{size}"
        self.token_bytes = np.zeros(size, np.int32)

    def encode(self, text: str) -> np.ndarray:
        """Returns the numbers in `text` that are ids, `[n]`; id 0 if there are none."""
        ids = [int(number) for number in re.findall(r"\d{1,9}", text) if int(number) < self.size]
        return np.array(ids or [0], np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Returns `ids` with spaces between them."""
        return " ".join(str(int(token)) for token in ids)

    def save(self, folder: Path) -> None:
        """Writes nothing: the tokenizer has no files."""
