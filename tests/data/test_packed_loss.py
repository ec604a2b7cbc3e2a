"""Packed documents do not see each other, and nothing sees padding, in a real model (B33)."""

import jax
import numpy as np
import pytest

from nnxtrain.data.corpus import Corpus
from nnxtrain.data.packing import PackedRows
from nnxtrain.nn.dropout import KeepAll
from nnxtrain.nn.kernels import ATTENTIONS
from tests.support import tiny_program

SEQUENCE = 32
BOUND = 1e-6  # of the largest token loss


def document(length: int, seed: int) -> np.ndarray:
    """Returns a document of random bytes between its marks."""
    return np.concatenate([[256], np.random.default_rng(seed).integers(0, 256, length - 2), [257]])


def row_of(*documents: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the one row that `documents` are packed to."""
    starts = np.cumsum([0, *map(len, documents)])
    rows = PackedRows(Corpus(np.concatenate(documents).astype(np.uint16), starts, 0, ""), SEQUENCE)
    assert len(rows) == 1
    return rows[0]


@pytest.fixture(scope="module", params=sorted(ATTENTIONS))
def token_losses(request):
    """Returns `row -> loss of each token`, `[s]` nats, for a model with each attention kernel."""
    program = tiny_program("model.vocab=384", f"model.attention={request.param}")
    model = jax.jit(program.make_state)().model

    @jax.jit
    def losses(batch):
        scores = jax.nn.log_softmax(model.logits(model.hidden(batch, KeepAll())[0]))
        return -np.take_along_axis(scores, batch["targets"][..., None], -1)[0, :, 0]

    def run(row: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(losses({name: leaf[None] for name, leaf in row.items()}))

    return run


A, OTHER_A, B = document(13, seed=1), document(13, seed=2), document(18, seed=3)
ON_A, ON_B = slice(0, 12), slice(13, 30)  # targets of each, packed one after the other


def test_a_document_does_not_see_the_one_before_it(token_losses):
    """A mask that is causal alone lets it through."""
    one, other = token_losses(row_of(A, B)), token_losses(row_of(OTHER_A, B))
    assert np.abs(one - other)[ON_A].max() > 0.01
    assert np.abs(one - other)[ON_B].max() <= BOUND * one.max()


def test_a_document_is_read_the_same_wherever_it_stands(token_losses):
    """Learned or running positions would tell the places apart."""
    packed, alone = token_losses(row_of(A, B)), token_losses(row_of(B))
    assert np.abs(packed[ON_B] - alone[: len(B) - 1]).max() <= BOUND * alone.max()


def test_padding_is_not_seen(token_losses):
    """Whatever ids lie in the empty slots, real tokens are read the same."""
    row = row_of(A, B)
    pad = row["segment_ids"] == 0
    assert pad.sum() == 2
    want = token_losses(row)
    for seed in range(3):
        noise = np.random.default_rng(seed).integers(0, 384, SEQUENCE).astype(np.int32)
        filled = row | {name: np.where(pad, noise, row[name]) for name in ("inputs", "targets", "positions")}
        got = token_losses(filled)
        assert np.abs(got - want)[row["mask"]].max() <= BOUND * want.max()


def test_documents_in_one_segment_would_be_seen(token_losses):
    """The positive control: with one segment for both, the two tests on documents must fail."""
    joined = [row | {"segment_ids": np.ones_like(row["segment_ids"])} for row in (row_of(A, B), row_of(OTHER_A, B))]
    one, other = map(token_losses, joined)
    assert np.abs(one - other)[ON_B].max() > 1e-3
