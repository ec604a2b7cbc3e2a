"""The training loop, on an engine and data that take the time they are told to."""

import time

import jax.numpy as jnp
import pytest

from nnxtrain.loops.train_loop import StepRecord, run_loop


class Instant:
    """An engine whose steps take no time."""

    def step(self, batch):
        """Returns the metrics of a step."""
        return {"loss": jnp.float32(batch)}


def slow_batches(waits):
    """Yields a batch, its number, after each wait in seconds."""
    for number, wait in enumerate(waits):
        time.sleep(wait)
        yield number, number


@pytest.mark.parametrize("due", [(), (2,)])
def test_a_wait_is_a_part_of_the_step_that_it_made_longer(due):
    """The batch of a step is waited for while the one before runs: told with its own step it would exceed that."""
    records: list[StepRecord] = []
    run_loop(
        Instant(),
        slow_batches([0.01, 0.2, 0.01, 0.3]),
        steps=range(4),
        record=records.append,
        between=lambda done: (lambda: None) if done in due else None,
        stops=lambda done: False,
    )
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert [record.metrics["loss"] for record in records] == [0, 1, 2, 3]
    assert all(0 <= record.data_wait_s <= record.step_time_s for record in records)
    long = [record.step for record in records if record.data_wait_s >= 0.2]
    assert long == [1, 3]
