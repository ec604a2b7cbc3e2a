"""Data sources by name; a new one is one file and one line here."""

from nnxtrain.data.sources.stdlib import stdlib
from nnxtrain.data.sources.synthetic import synthetic, synthetic_tokenizer
from nnxtrain.data.sources.text import text
from nnxtrain.types import Source, SourceWithTokenizer

DATASETS: dict[str, Source] = {
    "stdlib": stdlib,
    "synthetic": SourceWithTokenizer(synthetic, synthetic_tokenizer),
    "text": text,
}
