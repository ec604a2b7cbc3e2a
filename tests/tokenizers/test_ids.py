"""Ids that stand for no text are written as numbers."""

import numpy as np

from nnxtrain.tokenizers.ids import IdTokenizer


def test_ids_come_back_as_they_went():
    """A sample of synthetic tokens is text that can be given as a prompt again."""
    ids = np.array([0, 7, 255, 10])
    tokenizer = IdTokenizer(256)
    assert tokenizer.decode(ids) == "0 7 255 10"
    np.testing.assert_array_equal(tokenizer.encode(tokenizer.decode(ids)), ids)


def test_only_numbers_that_are_ids_are_read():
    """An id out of the vocabulary would be clamped by the embedding."""
    tokenizer = IdTokenizer(256)
    assert tokenizer.encode("3, 256 and 99999999999999999999 or 255").max() < 256
    assert {3, 255} <= set(tokenizer.encode("3, 256 and 255").tolist())


def test_a_prompt_without_numbers_is_one_token():
    """An empty prompt gives a model nothing to continue."""
    assert IdTokenizer(256).encode("def ").tolist() == [0]


def test_ids_have_no_marks_and_no_bytes():
    """A mark inside the vocabulary would end samples early; a byte would make bits per byte of nothing."""
    tokenizer = IdTokenizer(16)
    assert tokenizer.bos == tokenizer.eos == -1
    assert tokenizer.token_bytes.shape == (16,)
    assert not tokenizer.token_bytes.any()


def test_fingerprints_tell_sizes_apart():
    """A checkpoint of another vocabulary must not pass for this one."""
    assert IdTokenizer(16).fingerprint != IdTokenizer(17).fingerprint
