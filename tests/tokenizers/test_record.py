"""The copy of its tokenizer that a run keeps."""

import json
from pathlib import Path

from nnxtrain.tokenizers.byte import ByteTokenizer
from nnxtrain.tokenizers.ids import IdTokenizer
from nnxtrain.tokenizers.record import keep_tokenizer


def test_the_record_says_which_tokenizer_it_is(tmp_path):
    """Without it the ids of an old run are numbers that nobody can read."""
    keep_tokenizer(ByteTokenizer(), tmp_path, name="byte")
    record = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    assert record == {"name": "byte", "size": 259, "fingerprint": "byte-1", "bos": 256, "eos": 257}
    keep_tokenizer(IdTokenizer(5), tmp_path, name="synthetic")
    record = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    assert record == {"name": "synthetic", "size": 5, "fingerprint": "ids-5", "bos": None, "eos": None}


def test_the_files_of_a_tokenizer_are_kept_too(tmp_path):
    """A vocabulary that is edited or deleted later must not take the run with it."""

    class FromFile(ByteTokenizer):
        def save(self, folder: Path) -> None:
            (folder / "vocabulary.txt").write_text("a b c")

    keep_tokenizer(FromFile(), tmp_path, name="mine")
    assert {file.name for file in (tmp_path / "tokenizer").iterdir()} == {"vocabulary.txt", "tokenizer.json"}
