"""Loss on held-out sets, weighted by targets."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np

from nnxtrain.types import Batch


class Evaluation(NamedTuple):
    """What a model makes of one set; `bits_per_byte` is None where tokens stand for no text."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    targets: int


def evaluate(
    eval_step: Callable[[Batch], tuple[jax.Array, jax.Array]],
    batches: Iterable[Batch],
    *,
    put: Callable[[Batch], Batch],
    token_bytes: np.ndarray,
) -> Evaluation:
    """Returns the loss per target of all `batches` together, in nats.

    Args:
        eval_step: `batch [b ...] -> (sum of cross-entropy in nats, targets)`.
        batches: numpy arrays.
        put: brings a batch to the devices.
        token_bytes: bytes of text that each id stands for, `[size]`.
    """
    sums, targets, text_bytes = [], 0, 0
    for batch in batches:
        chosen = batch["targets"][batch["mask"]]
        targets += len(chosen)
        text_bytes += int(token_bytes[chosen].sum())
        sums.append(eval_step(put(batch))[0])
        if len(sums) > 2:
            sums[-3] = float(sums[-3])  # bounds the batches in flight
    nats = math.fsum(float(total) for total in sums)
    loss = nats / max(targets, 1)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Evaluation(loss, perplexity, nats / math.log(2) / text_bytes if text_bytes else None, targets)
