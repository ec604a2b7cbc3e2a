"""The training loop: batch → step → metrics, and between steps whatever is due. It knows no model and no mesh."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax

from nnxtrain.types import Batch, Metrics


class Engine(Protocol):
    """What the loop needs of an engine."""

    def step(self, batch: Batch) -> Metrics:
        """Consumes a batch; returns its metrics while the step still runs."""
        ...


class StepRecord(NamedTuple):
    """One finished step.

    Attributes:
        step: steps done after this one.
        metrics: python numbers.
        step_time_s: from the end of the step before to the end of this one, without what is done between steps.
        data_wait_s: the part of it that the loop waited for a batch.
    """

    step: int
    metrics: dict[str, Any]
    step_time_s: float
    data_wait_s: float


class _Clock:
    """Time from step to step, without what is done between steps."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        lap, self._last = now - self._last, now
        return lap

    def restart(self) -> None:
        self._last = time.perf_counter()


def run_loop(
    engine: Engine,
    batches: Iterator[Batch],
    *,
    steps: range,
    record: Callable[[StepRecord], None],
    between: Callable[[int], Callable[[], None] | None],
) -> int:
    """Takes a step for each number in `steps`, or until the data ends; returns the steps done.

    Metrics are fetched one step late, so that the device always has its next step.

    Args:
        engine: takes the steps.
        batches: one a step.
        steps: numbers of the steps, counted before each.
        record: told of each finished step, in order.
        between: `steps done -> what is due now`, or None; it finds every step before it recorded.
    """
    clock = _Clock()
    done = steps.start
    pending: tuple[int, Metrics, float] | None = None

    def flush() -> None:
        nonlocal pending
        if pending is not None:
            step, metrics, waited = pending
            pending = None
            values = {name: value.item() for name, value in jax.device_get(metrics).items()}
            record(StepRecord(step, values, clock.lap(), waited))

    for step in steps:
        began = time.perf_counter()
        batch = next(batches, None)
        waited = time.perf_counter() - began
        if batch is None:
            break
        metrics = engine.step(batch)
        flush()
        done = step + 1
        pending = (done, metrics, waited)
        if (due := between(done)) is not None:
            flush()
            due()
            clock.restart()
    flush()
    return done
