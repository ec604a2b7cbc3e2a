"""The tokenizer in a run directory."""

from pathlib import Path

from nnxtrain.host.files import write_json
from nnxtrain.types import Tokenizer

RECORD = "tokenizer.json"


def keep_tokenizer(tokenizer: Tokenizer, run: Path, *, name: str) -> None:
    """Writes `tokenizer/` of a run directory: name, size, fingerprint, and the files that the tokenizer needs.

    Args:
        tokenizer: of the run.
        run: its directory.
        name: of the tokenizer in the configuration, or of the source that has its own.
    """
    folder = run / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    special = {"bos": tokenizer.bos, "eos": tokenizer.eos}
    record = {"name": name, "size": tokenizer.size, "fingerprint": tokenizer.fingerprint}
    write_json(folder / RECORD, record | {name: None if token < 0 else token for name, token in special.items()})
