"""Tokens without a corpus: each row is a random walk over the vocabulary, a pure function of (seed, row)."""

import numpy as np

ENDLESS = 2**31  # rows of an epoch that no run reaches the end of
HELD_OUT = 64
STEPS = 4  # a token is followed by one of this many, equally likely: no model gets below ln 4 nats


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
