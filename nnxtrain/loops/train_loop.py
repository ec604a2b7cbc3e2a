"""The training loop: batch → step → metrics, and between steps whatever is due. It knows no model and no mesh."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
from jax.profiler import StepTraceAnnotation, TraceAnnotation

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
        position: of the data after this step's batch.
        step_time_s: from the end of the step before to the end of this one, without what is done between steps.
        data_wait_s: the part of it that the loop waited for a batch.
    """

    step: int
    metrics: dict[str, Any]
    position: Any
    step_time_s: float
    data_wait_s: float


class _Flight(NamedTuple):
    """A step that was started and is not recorded yet."""

    step: int
    metrics: Metrics
    position: Any


class _Recorder:
    """Records the step in flight when it is asked to, and measures from one to the next."""

    def __init__(self, record: Callable[[StepRecord], None]):
        self._record = record
        self.flight: _Flight | None = None
        self.waited = 0.0  # seconds for batches, since the last record
        self._last = time.perf_counter()

    def flush(self) -> None:
        """Waits for the step in flight and records it."""
        if self.flight is not None:
            step, metrics, position = self.flight
            self.flight = None
            with TraceAnnotation("metrics_wait", step_num=step - 1):
                values = {name: value.item() for name, value in jax.device_get(metrics).items()}
            now = time.perf_counter()
            with TraceAnnotation("log"):
                self._record(StepRecord(step, values, position, now - self._last, self.waited))
            self._last, self.waited = now, 0.0

    def restart(self) -> None:
        """Leaves out of the measure what happened since the last record."""
        self._last, self.waited = time.perf_counter(), 0.0


def run_loop(
    engine: Engine,
    batches: Iterator[tuple[Batch, Any]],
    *,
    steps: range,
    record: Callable[[StepRecord], None],
    between: Callable[[int], Callable[[], None] | None],
    stops: Callable[[int], bool],
) -> int:
    """Takes a step for each number in `steps`, until the data ends or `stops`; returns the steps done.

    Metrics are fetched one step late, so that the device always has its next step. A trace names the steps by the steps
    done before: `train` prepares and starts one, `metrics_wait` ends when one has ended.

    Args:
        engine: takes the steps.
        batches: one a step, each with the position of the data after it.
        steps: numbers of the steps, counted before each.
        record: told of each finished step, in order.
        between: `steps done -> what is due now`, or None; it finds every step before it recorded.
        stops: `steps done -> whether no further step is taken`.
    """
    recorder = _Recorder(record)
    done = steps.start
    for step in steps:
        if stops(done):
            break
        with StepTraceAnnotation("train", step_num=step):
            began = time.perf_counter()
            try:
                with TraceAnnotation("data_wait"):
                    batch, position = next(batches, (None, None))
            except Exception:
                recorder.flush()  # the step in flight is good; who saves after this finds it recorded
                raise
            recorder.waited += time.perf_counter() - began  # while the step before was running
            if batch is None:
                break
            metrics = engine.step(batch)
            recorder.flush()
        done = step + 1
        recorder.flight = _Flight(done, metrics, position)
        if (due := between(done)) is not None:
            recorder.flush()
            due()
            recorder.restart()
    recorder.flush()
    return done
