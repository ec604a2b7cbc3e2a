"""Name → tokenizer; a new tokenizer is one file and one line here."""

from nnxtrain.tokenizers.byte import byte
from nnxtrain.types import MakeTokenizer

TOKENIZERS: dict[str, MakeTokenizer] = {"byte": byte}
