"""Synthetic tokens: each row is a random walk over the vocabulary, a pure function of (seed, row)."""

import numpy as np

from nnxtrain.config.data import DataConfig
from nnxtrain.tokenizers.ids import IdTokenizer
from nnxtrain.types import Dataset, Rows, RowSpec, Tokenizer

ENDLESS = 2**31  # rows of an epoch, more than any run reads
HELD_OUT = 64
STEPS = 4  # each token has this many equally likely successors: the lowest possible loss is ln 4 nats


def synthetic(config: DataConfig, spec: RowSpec) -> Dataset:
    """Draws random walks; the held-out rows have another seed."""

    def rows(stream: int, count: int) -> Rows:
        vocab = spec.tokenizer.size
        return RandomWalkRows(sequence=spec.sequence, vocab=vocab, seed=2 * spec.seed + stream, rows=count)

    return Dataset(rows(0, ENDLESS), {"validation": rows(1, HELD_OUT)}, "synthetic random walks")


def synthetic_tokenizer(config: DataConfig, vocab: int) -> Tokenizer:
    """Returns a tokenizer of `vocab` ids, written as numbers."""
    return IdTokenizer(vocab)


class RandomWalkRows:
    """Rows whose next token is 0 to 3 ids further on, modulo the vocabulary."""

    def __init__(self, *, sequence: int, vocab: int, seed: int, rows: int):
        self.sequence = sequence
        self.vocab = vocab
        self.seed = seed
        self.rows = rows

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self.rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Returns row `index`: `inputs targets positions segment_ids` int32 and `mask` bool, each `[s]`."""
        draw = np.random.default_rng([self.seed, index])
        walk = np.cumsum(np.append(draw.integers(self.vocab), draw.integers(STEPS, size=self.sequence)))
        tokens = (walk % self.vocab).astype(np.int32)
        return {
            "inputs": tokens[:-1],
            "targets": tokens[1:],
            "positions": np.arange(self.sequence, dtype=np.int32),
            "segment_ids": np.ones(self.sequence, np.int32),
            "mask": np.ones(self.sequence, bool),
        }
