"""Decides which steps update: never a non-finite one, and optionally no loss spike."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nnxtrain.state import Guard, Statistic

MAX_DISTANCE = 1e18  # from the mean; its square is still finite in float32
DECAY = 0.98  # of the running statistics: about the last 50 accepted steps


class Decision(NamedTuple):
    """What happens with a step; bool scalars.

    Attributes:
        updates: weights and moments are updated.
        counts: the batch counts as consumed.
        bad: the step halts the run until the host handles it.
        rejected: the update was skipped, since the step was non-finite or a spike.
    """

    updates: jax.Array
    counts: jax.Array
    bad: jax.Array
    rejected: jax.Array


# `(guard, step [], loss [], grad_norm [], has_targets []) -> Decision`; updates the guard
StepGuard = Callable[[Guard, jax.Array, jax.Array, jax.Array, jax.Array], Decision]


def make_step_guard(*, skips: bool, spike_deviations: float | None, spike_warmup: int, limit: int) -> StepGuard:
    """Returns the function that decides on a step, compiled into the step.

    Args:
        skips: a non-finite step is skipped and counted; otherwise it halts the run: later steps change nothing, not
            even the step count, until the host, which is notified one step late, handles it.
        spike_deviations: a finite step is skipped if its loss or gradient norm is more than this many standard
            deviations above the mean of accepted steps; None to skip none.
        spike_warmup: accepted steps before spikes are detected.
        limit: this many skipped steps in a row halt the run too.
    """

    @jax.named_scope("guard")
    def guard_step(guard: Guard, step: jax.Array, loss: jax.Array, norm: jax.Array, has_targets: jax.Array) -> Decision:
        running = guard.bad_step[...] < 0
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        spike = jnp.array(False)
        if spike_deviations is not None:
            high = _is_above(loss, guard.loss_mean, guard.loss_square, spike_deviations)
            high |= _is_above(norm, guard.norm_mean, guard.norm_square, spike_deviations)
            spike = finite & high & (guard.accepted[...] >= spike_warmup)
        anomalous = running & (spike | ~finite)
        bad = anomalous & ((~finite & (not skips)) | (guard.in_row[...] + 1 >= limit))
        rejected = anomalous & ~bad
        updates = running & finite & ~spike & has_targets
        guard.bad_step[...] = jnp.where(bad, step, guard.bad_step[...])
        guard.skipped[...] += rejected
        guard.in_row[...] = jnp.where(rejected, guard.in_row[...] + 1, jnp.where(updates, 0, guard.in_row[...]))
        _update_statistics(loss, guard.loss_mean, guard.loss_square, where=updates, count=guard.accepted[...])
        _update_statistics(norm, guard.norm_mean, guard.norm_square, where=updates, count=guard.accepted[...])
        guard.accepted[...] += updates
        return Decision(updates, running & ~bad, bad, rejected)

    return guard_step


def _is_above(value: jax.Array, mean: Statistic, square: Statistic, deviations: float) -> jax.Array:
    return value > mean[...] + deviations * jnp.sqrt(square[...])


def _update_statistics(
    value: jax.Array, mean: Statistic, square: Statistic, *, where: jax.Array, count: jax.Array
) -> None:
    """Updates a running mean and variance with `value`; the first values have equal weights."""
    weight = jnp.maximum(1 - DECAY, 1 / (count + 1.0))
    distance = jnp.clip(value - mean[...], -MAX_DISTANCE, MAX_DISTANCE)
    new_square = (1 - weight) * (square[...] + weight * distance**2)
    mean[...] = jnp.where(where, mean[...] + weight * distance, mean[...])
    square[...] = jnp.where(where, new_square, square[...])
