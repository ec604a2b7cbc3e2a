"""Documents of any length → rows of fixed length."""

import numpy as np

from nnxtrain.data.corpus import Corpus


class PackedRows:
    """Splits a corpus of concatenated documents into rows of `sequence` tokens; only the last row is padded.

    Row `i` reads tokens `i * sequence` to `(i + 1) * sequence` and predicts each one's successor, so that every token
    of the corpus but the first of each document is a target exactly once. A document that spans rows continues in the
    next one as a new segment, with positions from 0. There are `ceil((tokens - 1) / sequence)` rows.
    """

    def __init__(self, corpus: Corpus, sequence: int):
        self.corpus = corpus
        self.sequence = sequence

    def __len__(self) -> int:
        """Returns the number of rows."""
        return -(-(len(self.corpus.tokens) - 1) // self.sequence)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Returns row `index`: `inputs targets positions segment_ids` int32 and `mask` bool, each `[s]`."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = index * self.sequence
        window = np.asarray(self.corpus.tokens[first : first + self.sequence + 1], np.int32)
        starts = self.corpus.starts
        places = np.arange(first, first + len(window))
        document = np.searchsorted(starts, places, side="right") - 1
        begin = np.maximum(starts[document], first)
        pad = self.sequence - (len(window) - 1)

        def padded(values: np.ndarray) -> np.ndarray:
            return np.pad(values, (0, pad))

        return {
            "inputs": padded(window[:-1]),
            "targets": padded(window[1:]),
            "positions": padded((places - begin)[:-1].astype(np.int32)),
            "segment_ids": padded((document - document[0] + 1)[:-1].astype(np.int32)),
            "mask": padded(document[1:] == document[:-1]),
        }
