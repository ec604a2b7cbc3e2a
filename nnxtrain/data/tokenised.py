"""Text files → a tokenised corpus, by the config section `data`."""

from functools import partial
from pathlib import Path

from nnxtrain.config.data import DataConfig
from nnxtrain.data.corpus import Corpus, cached_corpus
from nnxtrain.data.documents import read_documents
from nnxtrain.host.files import default_cache_dir
from nnxtrain.types import Tokenizer


def tokenised(files: list[Path], config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """Returns the tokenised documents of `files`, from the cache if they are in it."""
    return cached_corpus(
        files,
        partial(read_documents, text_field=config.text_field, invalid_utf8=config.invalid_utf8),
        tokenizer=tokenizer,
        options=f"{config.text_field} {config.invalid_utf8}",
        cache_dir=Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir() / "corpora",
    )
