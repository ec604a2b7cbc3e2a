"""Where tokens come from."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import Problem, key
from nnxtrain.config.reads import unless, when

FILES = when("data.source", "text")
TEXT = unless("data.source", "synthetic")  # synthetic rows are made as tokens, and have no end


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A source of documents, the tokenizer, and how often the documents are read."""

    source: str = key(
        "stdlib",
        "corpus: synthetic, Python's own standard library, or text files",
        choices=("stdlib", "synthetic", "text"),
    )
    path: tuple[str, ...] = key((), "text: files and globs, plain text or JSON lines, each also .gz", read=FILES)
    validation_path: tuple[str, ...] = key(
        (), "text: held-out files and globs; NAME=GLOB makes a set of that name", read=FILES
    )
    validation_fraction: float = key(
        0.05,
        "stdlib: share of files held out, chosen by hash of their path",
        span="[0, 1)",
        read=when("data.source", "stdlib"),
    )
    text_field: str = key("text", "JSON lines: field that contains the text", read=FILES)
    invalid_utf8: str = key("refuse", "bytes that are not UTF-8", choices=("refuse", "replace"), read=TEXT)
    tokenizer: str = key("byte", "text to ids and back", choices=("byte",), read=TEXT)
    epochs: int | None = key(
        None, "passes over the corpus before the data ends; null = no end", span="[1, 1000000]", read=TEXT
    )
    shuffle: bool = key(True, "read the rows of each epoch in an order made from (seed, epoch)")
    drop_remainder: bool = key(
        False, "leave out the last, incomplete batch; false pads it with empty rows", read=when("data.epochs") & TEXT
    )
    prefetch: int = key(2, "batches prepared ahead of the step", span="[1, 1024]")
    cache_dir: str | None = key(
        None, "folder of tokenised corpora; null = the user's cache directory", read=TEXT.mildly()
    )

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and what would be right."""
        return (self._path(),)

    def _path(self) -> Iterator[Problem]:
        if self.source == "text" and not self.path:
            yield "data.path", "data.source=text needs at least one file or glob, such as data.path='corpus/*.txt'"
