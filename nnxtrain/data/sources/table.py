"""Name → data source; a new source is one file and one line here."""

from nnxtrain.data.sources.stdlib import stdlib
from nnxtrain.data.sources.synthetic import synthetic, synthetic_tokenizer
from nnxtrain.data.sources.text import text
from nnxtrain.types import MakeSourceTokenizer, Source

DATASETS: dict[str, Source] = {"stdlib": stdlib, "synthetic": synthetic, "text": text}

# Sources that bring their own tokenizer, since their tokens stand for no text; the others read `data.tokenizer`.
SOURCE_TOKENIZERS: dict[str, MakeSourceTokenizer] = {"synthetic": synthetic_tokenizer}
