"""Byte-level tokenizer: one id per byte, no vocabulary file, no training."""

from pathlib import Path

import numpy as np

from nnxtrain.config.data import DataConfig


def byte(config: DataConfig) -> "ByteTokenizer":
    """Returns the tokenizer, which depends on no key."""
    return ByteTokenizer()


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8 text; three more are bos, eos and padding."""

    size = 259
    bos = 256
    eos = 257
    pad = 258
    fingerprint = "byte-1"
    token_bytes = np.repeat(np.array([1, 0], np.int32), [256, 3])

    def encode(self, text: str) -> np.ndarray:
        """Returns one id per byte, `[n]` uint16, without bos and eos; a lone surrogate becomes a question mark."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of `ids`; special tokens are left out, bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Writes nothing: the tokenizer has no files."""
