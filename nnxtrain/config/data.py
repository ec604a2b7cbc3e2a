"""Where tokens come from."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import key

WITHOUT_FILES = ("stdlib", "synthetic")  # sources that read no path; a source from outside the package may read one


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A source of documents, the tokenizer, and how often the documents are read."""

    source: str = key(
        "stdlib",
        "corpus: synthetic, Python's own standard library, or text files",
        choices=("stdlib", "synthetic", "text"),
    )
    path: tuple[str, ...] = key((), "text: files and globs, plain text or JSON lines, each also .gz")
    validation_path: tuple[str, ...] = key((), "text: held-out files and globs; NAME=GLOB makes a set of that name")
    validation_fraction: float = key(
        0.05, "stdlib: share of files held out, chosen by hash of their path", span="[0, 1)"
    )
    text_field: str = key("text", "JSON lines: field that contains the text")
    invalid_utf8: str = key("refuse", "bytes that are not UTF-8", choices=("refuse", "replace"))
    tokenizer: str = key("byte", "text to ids and back", choices=("byte",))
    epochs: int | None = key(None, "passes over the corpus before the data ends; null = no end", span="[1, 1000000]")
    shuffle: bool = key(True, "read the rows of each epoch in an order made from (seed, epoch)")
    drop_remainder: bool = key(False, "leave out the last, incomplete batch; false pads it with empty rows")
    prefetch: int = key(2, "batches prepared ahead of the step", span="[1, 1024]")
    cache_dir: str | None = key(None, "folder of tokenised corpora; null = the user's cache directory")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields `(key, what is wrong and what would be right)`."""
        if self.source == "text" and not self.path:
            yield "data.path", "data.source=text needs at least one file or glob, such as data.path='corpus/*.txt'"
        for name in ("path", "validation_path"):
            if self.source in WITHOUT_FILES and getattr(self, name):
                yield f"data.{name}", f"is read by data.source=text, and data.source is {self.source}"
