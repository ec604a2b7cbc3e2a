"""Loss on held-out sets: one sum, one division (B58)."""

import functools
import math

import jax
import numpy as np
import pytest

from nnxtrain.build.evaluators import bind_to, make_evaluators
from nnxtrain.build.feed import Data
from nnxtrain.data.batches import BatchShape, Order, TrainBatches
from nnxtrain.loops.eval_loop import evaluate
from nnxtrain.nn.dropout import KeepAll
from nnxtrain.tokenizers.byte import ByteTokenizer
from nnxtrain.types import Dataset
from tests.support import initial_state, random_batch, tiny_program

LENGTHS = (31, 3, 17, 1, 32, 0, 2, 9, 5, 12, 26)  # real tokens of ten rows and of one that is all padding


def fixed_step(nats: np.ndarray):
    """Returns an eval step that takes the loss of each id from a table."""
    return lambda batch: (np.float32((nats[batch["targets"]] * batch["mask"]).sum()), batch["mask"].sum())


def batch_of(targets: list[list[int]], mask: list[list[int]]) -> dict[str, np.ndarray]:
    """Returns a batch as far as evaluation looks at it."""
    return {"targets": np.array(targets), "mask": np.array(mask, bool)}


def evaluated(batches, *, nats=None, token_bytes=None):
    """Evaluates batches of ids up to 3; id `i` costs `i` nats and stands for one byte."""
    nats = np.arange(4.0) if nats is None else nats
    token_bytes = np.ones(4, int) if token_bytes is None else np.array(token_bytes)
    return evaluate(fixed_step(nats), batches, put=lambda batch: batch, token_bytes=token_bytes, stops=lambda: False)


def test_loss_is_the_sum_over_targets_divided_once():
    """A mean of batch means gives (1 + 3) / 2 here."""
    result = evaluated([batch_of([[1, 1, 1]], [[1, 1, 1]]), batch_of([[3, 0, 0]], [[1, 0, 0]])])
    assert result.loss == pytest.approx((1 + 1 + 1 + 3) / 4)
    assert result.targets == 4
    assert result.perplexity == pytest.approx(math.exp(1.5))


def test_bits_per_byte_are_bits_over_the_bytes_of_the_targets():
    """Marks cost bits and stand for no byte; what is not a target counts on neither side."""
    result = evaluated(
        [batch_of([[1, 2, 3]], [[1, 1, 1]]), batch_of([[2, 2, 2]], [[1, 0, 0]])], token_bytes=[9, 1, 3, 0]
    )
    assert result.bits_per_byte == pytest.approx((1 + 2 + 3 + 2) / math.log(2) / (1 + 3 + 0 + 3))


def test_ids_that_stand_for_no_text_have_no_bits_per_byte():
    """A division by zero bytes would be NaN."""
    assert evaluated([batch_of([[1, 2]], [[1, 1]])], token_bytes=[0] * 4).bits_per_byte is None


def test_a_batch_of_padding_weighs_nothing():
    """Its mean would be 0 / 0, or a zero that pulls the loss down."""
    real, empty = batch_of([[1, 3]], [[1, 1]]), batch_of([[0, 0]], [[0, 0]])
    assert evaluated([empty, real, empty]) == evaluated([real])


def test_an_absurd_loss_has_an_infinite_perplexity():
    """`exp` of 1000 is an OverflowError."""
    assert evaluated([batch_of([[1]], [[1]])], nats=np.full(4, 1000.0)).perplexity == math.inf


def test_many_small_sums_lose_nothing():
    """Adding up in float32 loses a target of every few once the sum is large."""
    batches = [batch_of([[1]], [[1]])] * 1000
    assert evaluated(batches, nats=np.full(4, 0.1)).loss == pytest.approx(float(np.float32(0.1)), rel=1e-12)


class UnevenRows:
    """Rows of random tokens with `LENGTHS` real ones; nothing of them lies on a border of any batch."""

    def __init__(self):
        batch = random_batch(targets=LENGTHS)
        self._rows = [
            {name: leaf[0, index] for name, leaf in batch.items() if name != "rows"} for index in range(len(LENGTHS))
        ]
        for row in self._rows:
            row["segment_ids"] = row["mask"].astype(np.int32)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._rows[index]


@functools.cache
def bind_on(devices: int):
    """Returns what compiles functions of a model with the initial weights on some devices."""
    program = tiny_program("model.vocab=384", devices=devices)
    places = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state().model)
    return bind_to(jax.device_put(initial_state(program).model, places))


def uneven_evaluation(size: int, devices: int):
    """Evaluates the uneven rows, `size` a batch, on some devices, by the parts a run uses."""
    program = tiny_program("model.vocab=384", f"eval.global_size={size}", devices=devices)
    train = TrainBatches(UnevenRows(), BatchShape(1, 8), vocab=384, order=Order(0, True, 1, False))
    data = Data(program, Dataset(UnevenRows(), {"validation": UnevenRows()}, ""), train)
    return make_evaluators(data, bind_on(devices))["validation"](lambda: False)


@functools.cache
def reference() -> float:
    """Returns the sum of token losses over the real tokens, each row computed alone, in float64 after the scores."""
    scores_of = bind_on(1)(lambda model, row: model.logits(model.hidden(row, KeepAll())[0])[0])
    rows = UnevenRows()
    total = 0.0
    for index in range(len(rows)):
        row = rows[index]
        scores = np.asarray(scores_of({name: leaf[None] for name, leaf in row.items()}), np.float64)
        losses = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, row["targets"][:, None], -1)[:, 0]
        total += losses[row["mask"]].sum()
    return total


@pytest.mark.parametrize(("size", "devices"), [(1, 1), (2, 1), (4, 1), (8, 1), (4, 4), (8, 4)])
def test_loss_does_not_depend_on_the_eval_batch_or_on_the_devices(size, devices):
    """Means of batches, or a last batch and an all-pad row that weigh like the others, fail here (B58)."""
    result = uneven_evaluation(size, devices)
    assert result.targets == sum(LENGTHS) == 138
    assert result.loss == pytest.approx(reference() / 138, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(reference() / 138), rel=1e-5)
    assert result.perplexity == math.exp(result.loss)


def test_bits_per_byte_of_a_model_count_the_bytes_of_its_tokenizer():
    """The table must be that of the run's tokenizer, here synthetic ids that stand for no text."""
    assert uneven_evaluation(8, 1).bits_per_byte is None
    table = ByteTokenizer.token_bytes
    assert table[:256].sum() == table.sum() == 256
