"""The copy of its tokenizer that a run keeps."""

from pathlib import Path

from nnxtrain.host.files import write_json
from nnxtrain.types import Tokenizer

RECORD = "tokenizer.json"


def keep_tokenizer(tokenizer: Tokenizer, run: Path, *, name: str) -> None:
    """Writes `tokenizer/` of a run directory: name, size and fingerprint, and the files that the tokenizer needs.

    Args:
        tokenizer: of the run.
        run: its directory.
        name: what the configuration calls the tokenizer, or the source that brings it.
    """
    folder = run / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    marks = {"bos": tokenizer.bos, "eos": tokenizer.eos}
    record = {"name": name, "size": tokenizer.size, "fingerprint": tokenizer.fingerprint}
    write_json(folder / RECORD, record | {mark: None if token < 0 else token for mark, token in marks.items()})
