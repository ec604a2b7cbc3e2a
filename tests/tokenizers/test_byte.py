"""Every text goes to bytes and back unharmed."""

import numpy as np
import pytest

from nnxtrain.tokenizers.byte import ByteTokenizer

AWKWARD = {
    "empty": "",
    "spaces and tabs": "\tif x:\n\t\treturn  1 \t",
    "CRLF": "one\r\ntwo\rthree\n",
    "NUL": "a\x00b",
    "emoji": "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "scripts": "naïve Ελληνικά 漢字 العربية",
    "byte-order mark inside": "a\ufeffb",
    "not a character": "\uffff\U0010ffff",
    "composed and not": "é e\u0301",
}


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_text_comes_back_as_it_went(text):
    """Stripping, newline translation or Unicode normalisation would change it."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_byte_has_its_own_id_and_is_read_back():
    """A table that is off by one, or decodes as Latin-1, fails here."""
    tokenizer = ByteTokenizer()
    for byte in range(256):
        assert tokenizer.decode(np.array([byte])) == bytes([byte]).decode(errors="replace")
    every_two_bytes = "".join(map(chr, range(0x80, 0x800)))
    assert tokenizer.decode(tokenizer.encode(every_two_bytes)) == every_two_bytes


def test_bytes_that_are_no_text_become_replacement_characters():
    """A sample may stop in the middle of a character; it must still be shown."""
    assert ByteTokenizer().decode(np.array([104, 105, 0xF0, 0x9F])) == "hi\ufffd"


def test_marks_are_ids_of_their_own_and_stand_for_no_text():
    """A mark among the bytes would be text, and a mark beyond the size would be no id."""
    tokenizer = ByteTokenizer()
    marks = {tokenizer.bos, tokenizer.eos, tokenizer.pad}
    assert marks == set(range(256, tokenizer.size))
    assert tokenizer.decode(np.array([tokenizer.bos, 104, tokenizer.pad, 105, tokenizer.eos])) == "hi"


def test_token_bytes_add_up_to_the_bytes_of_the_text():
    """Bits per byte divide by them: a mark that counts as a byte makes the figure too good."""
    tokenizer = ByteTokenizer()
    assert tokenizer.token_bytes.shape == (tokenizer.size,)
    for text in AWKWARD.values():
        ids = np.concatenate([[tokenizer.bos], tokenizer.encode(text), [tokenizer.eos]]).astype(int)
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())


def test_half_a_surrogate_pair_is_encoded_as_something():
    """A prompt from a command line that is not UTF-8 holds such halves; they must not end the run."""
    assert len(ByteTokenizer().encode("a\udcffb")) >= 3
