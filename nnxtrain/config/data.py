"""Training and held-out data."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import Problem, key
from nnxtrain.config.reads import unless, when

FILES = when("data.source", "text")
TEXT = unless("data.source", "synthetic")  # synthetic data is generated as tokens, without end


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source of documents, the tokenizer, and how the documents are read."""

    source: str = key(
        "stdlib",
        "where documents come from: Python's standard library, generated tokens, or text files",
        choices=("stdlib", "synthetic", "text"),
    )
    path: tuple[str, ...] = key((), "text: files and globs; plain text or JSON lines, optionally gzipped", read=FILES)
    validation_path: tuple[str, ...] = key(
        (), "text: held-out files and globs; NAME=GLOB defines a set of that name", read=FILES
    )
    validation_fraction: float = key(
        0.05,
        "stdlib: fraction of files held out, chosen by a hash of their path",
        span="[0, 1)",
        read=when("data.source", "stdlib"),
    )
    text_field: str = key("text", "JSON lines: the field that contains the text", read=FILES)
    invalid_utf8: str = key(
        "refuse",
        "what to do with text that is not UTF-8: stop, or insert replacement characters",
        choices=("refuse", "replace"),
        read=TEXT,
    )
    tokenizer: str = key("byte", "how text becomes token ids", choices=("byte",), read=TEXT)
    epochs: int | None = key(
        None, "passes over the corpus, after which the run ends; null = unlimited", span="[1, 1000000]", read=TEXT
    )
    shuffle: bool = key(True, "shuffle the rows of each epoch; the order depends on seed and epoch alone")
    drop_remainder: bool = key(
        False, "drop the last, incomplete batch; false pads it with empty rows", read=when("data.epochs") & TEXT
    )
    prefetch: int = key(2, "batches prepared in advance", span="[1, 1024]")
    cache_dir: str | None = key(
        None, "folder for tokenised corpora; null = the user's cache directory", read=TEXT.only_noted()
    )

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and how to fix it."""
        return (self._path(),)

    def _path(self) -> Iterator[Problem]:
        if self.source == "text" and not self.path:
            yield "data.path", "data.source=text needs at least one file or glob, such as data.path='corpus/*.txt'"
