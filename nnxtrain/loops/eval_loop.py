"""Loss on held-out sets, weighted by targets."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np

from nnxtrain.types import Batch

IN_FLIGHT = 2  # batches on the devices at a time


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
    stops: Callable[[], bool],
) -> Evaluation | None:
    """Returns the loss per target of all `batches` together, in nats, or None if it was stopped.

    Args:
        eval_step: `batch [b ...] -> (sum of cross-entropy in nats, targets)`.
        batches: numpy arrays.
        put: brings a batch to the devices.
        token_bytes: bytes of text that each id stands for, `[size]`.
        stops: asked before each batch whether to give up.
    """
    nats, targets, text_bytes = [], 0, 0
    pending: deque[jax.Array] = deque()
    for batch in batches:
        if stops():
            return None
        chosen = batch["targets"][batch["mask"]]
        targets += len(chosen)
        text_bytes += int(token_bytes[chosen].sum())
        pending.append(eval_step(put(batch))[0])
        if len(pending) > IN_FLIGHT:
            nats.append(float(pending.popleft()))
    total = math.fsum([*nats, *map(float, pending)])
    loss = total / targets if targets else math.nan
    perplexity = math.inf if loss > 700 else math.exp(loss)
    return Evaluation(loss, perplexity, total / math.log(2) / text_bytes if text_bytes else None, targets)
