"""The training loop: batch → step → metrics, and between steps whatever is due. It knows no model and no mesh."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
from jax.profiler import StepTraceAnnotation, TraceAnnotation

from nnxtrain.errors import NonFiniteError
from nnxtrain.types import Batch, Metrics

logger = logging.getLogger(__name__)


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
    """Records steps in flight, oldest first, and measures from one record to the next."""

    def __init__(self, record: Callable[[StepRecord], None]):
        self._record = record
        self._flights: deque[_Flight] = deque()
        self.waited = 0.0  # seconds for batches, since the last record
        self._last = time.perf_counter()

    def start(self, flight: _Flight) -> None:
        """Takes a step that was started, and records the one before it."""
        self._flights.append(flight)
        self.flush(keep=1)

    def flush(self, *, keep: int = 0) -> None:
        """Waits for the steps in flight and records all but the newest `keep`."""
        while len(self._flights) > keep:
            step, metrics, position = self._flights.popleft()
            with TraceAnnotation("metrics_wait", step_num=step - 1):
                values = {name: value.item() for name, value in jax.device_get(metrics).items()}
            now = time.perf_counter()
            took, waited = now - self._last, self.waited
            self._last, self.waited = now, 0.0
            with TraceAnnotation("log"):
                self._record(StepRecord(step, values, position, took, waited))

    def rescue(self) -> None:
        """Records what is still in flight, as far as that works, when an error ends the loop.

        Raises:
            NonFiniteError: a step in flight was not finite, which came before the error.
        """
        while self._flights:
            try:
                self.flush(keep=len(self._flights) - 1)
            except NonFiniteError:
                raise
            except Exception as late:  # the error that ended the loop is the one to report
                logger.debug("a step in flight was not recorded: %s", late)

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

    An error, wherever it comes from, finds every step recorded that was started before it; who saves then knows where
    the engine is.

    Args:
        engine: takes the steps.
        batches: one a step, each with the position of the data after it.
        steps: numbers of the steps, counted before each.
        record: gets each finished step, in order; what it knows of the step it keeps before it raises.
        between: `steps done -> what is due now`, or None; it finds every step before it recorded.
        stops: `steps done -> whether no further step is taken`.
    """
    recorder = _Recorder(record)
    done = steps.start
    try:
        for step in steps:
            if stops(done):
                break
            with StepTraceAnnotation("train", step_num=step):
                began = time.perf_counter()
                with TraceAnnotation("data_wait"):
                    batch, position = next(batches, (None, None))
                recorder.waited += time.perf_counter() - began  # while the step before was running
                if batch is None:
                    break
                recorder.start(_Flight(step + 1, engine.step(batch), position))
            done = step + 1
            if (due := between(done)) is not None:
                recorder.flush()
                due()
                recorder.restart()
        recorder.flush()
    except NonFiniteError:
        raise  # the guard holds the state where it was good; steps after it are none
    except Exception:
        recorder.rescue()
        raise
    return done
