"""Tokenizers by name; a new one is one file and one line here."""

from nnxtrain.tokenizers.byte import byte
from nnxtrain.types import MakeTokenizer

TOKENIZERS: dict[str, MakeTokenizer] = {"byte": byte}
