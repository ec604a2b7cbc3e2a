"""Which steps update: a step that is not finite never does, and a spike need not."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nnxtrain.state import Guard, Statistic

LARGEST = 1e18  # distance to the mean whose square float32 still holds
MEMORY = 0.98  # of the running statistics: about the last 50 accepted steps


class Decision(NamedTuple):
    """What becomes of a step, each a bool scalar.

    Attributes:
        updates: weights and moments move.
        counts: the batch counts as consumed.
        bad: the step holds the run until the host has acted.
        rejected: the update was left out, since the step was not finite or a spike.
    """

    updates: jax.Array
    counts: jax.Array
    bad: jax.Array
    rejected: jax.Array


# `(guard, step [], loss [], grad_norm [], has_targets []) -> Decision`; updates the guard
StepGuard = Callable[[Guard, jax.Array, jax.Array, jax.Array, jax.Array], Decision]


def make_step_guard(*, skips: bool, spike_deviations: float | None, spike_warmup: int, limit: int) -> StepGuard:
    """Returns what decides about a step inside the step itself.

    Args:
        skips: a step that is not finite is left out and counted; else it holds the run: later steps leave everything as
            it is, their count too, until the host, who learns of it one step late, has acted.
        spike_deviations: a finite step whose loss or gradient norm is further than this many standard deviations above
            the mean of accepted steps is left out; None lets all pass.
        spike_warmup: accepted steps before a spike can be told.
        limit: the step that would be left out as this many in a row holds the run too.
    """

    @jax.named_scope("guard")
    def guard_step(guard: Guard, step: jax.Array, loss: jax.Array, norm: jax.Array, has_targets: jax.Array) -> Decision:
        alive = guard.bad_step[...] < 0
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        spike = jnp.array(False)
        if spike_deviations is not None:
            high = _is_above(loss, guard.loss_mean, guard.loss_square, spike_deviations)
            high |= _is_above(norm, guard.norm_mean, guard.norm_square, spike_deviations)
            spike = finite & high & (guard.accepted[...] >= spike_warmup)
        left_out = alive & (spike | ~finite)
        bad = left_out & ((~finite & (not skips)) | (guard.in_row[...] + 1 >= limit))
        rejected = left_out & ~bad
        updates = alive & finite & ~spike & has_targets
        guard.bad_step[...] = jnp.where(bad, step, guard.bad_step[...])
        guard.skipped[...] += rejected
        guard.in_row[...] = jnp.where(rejected, guard.in_row[...] + 1, jnp.where(updates, 0, guard.in_row[...]))
        _learn(loss, guard.loss_mean, guard.loss_square, where=updates, count=guard.accepted[...])
        _learn(norm, guard.norm_mean, guard.norm_square, where=updates, count=guard.accepted[...])
        guard.accepted[...] += updates
        return Decision(updates, alive & ~bad, bad, rejected)

    return guard_step


def _is_above(value: jax.Array, mean: Statistic, square: Statistic, deviations: float) -> jax.Array:
    return value > mean[...] + deviations * jnp.sqrt(square[...])


def _learn(value: jax.Array, mean: Statistic, square: Statistic, *, where: jax.Array, count: jax.Array) -> None:
    """Takes `value` into a running mean and a running mean squared distance; the first ones weigh alike."""
    weight = jnp.maximum(1 - MEMORY, 1 / (count + 1.0))
    distance = jnp.clip(value - mean[...], -LARGEST, LARGEST)
    new_square = (1 - weight) * (square[...] + weight * distance**2)
    mean[...] = jnp.where(where, mean[...] + weight * distance, mean[...])
    square[...] = jnp.where(where, new_square, square[...])
