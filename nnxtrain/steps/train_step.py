"""One optimizer step. Start reading here."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnxtrain.state import TrainStateNNX, is_trained
from nnxtrain.steps.guard import StepGuard
from nnxtrain.types import (
    PRNG,
    Accumulate,
    Batch,
    Collect,
    LossParts,
    LossSum,
    Metrics,
    Schedule,
    Sums,
    TrainStep,
    Update,
)


def make_train_step(collect: Collect, update: Update) -> TrainStep:
    """Returns the function that an engine compiles; it knows no config and no mesh.

    Args:
        collect: computes loss and gradient sums of a batch, leaves `[m b ...]`.
        update: applies them to a state.
    """

    def train_step(state: TrainStateNNX, batch: Batch) -> tuple[TrainStateNNX, Metrics]:
        """Consumes `state` and `batch` (leaves `[m b ...]`); returns the next state and the metrics."""
        return update(state, collect(state, batch))

    return train_step


def make_collect(loss_sum: LossSum, accumulate: Accumulate, *, seed: int) -> Collect:
    """Returns the function that runs forward and backward on a batch.

    Args:
        loss_sum: `(model, microbatch, key) -> (loss summed over targets, LossParts)`.
        accumulate: an entry of `ACCUMULATORS`; sums loss parts and gradients.
        seed: dropout seed; masks depend on it, the step and the row of the global batch.
    """

    def collect(state: TrainStateNNX, batch: Batch) -> Sums:
        """Returns the sums over `batch`, leaves `[m b ...]`, with the weights of `state`."""
        graph, params, rest = nnx.split(state.model, is_trained, ...)
        key = jax.random.fold_in(jax.random.key(seed, impl=PRNG), state.step[...])

        def loss_of(params: nnx.State, microbatch: Batch) -> tuple[jax.Array, LossParts]:
            return loss_sum(nnx.merge(graph, params, rest), microbatch, key)

        return accumulate(loss_of, params, batch)

    return collect


def make_update(guard_step: StepGuard, schedule: Schedule) -> Update:
    """Returns the function that ends a step: it divides sums by the targets of the step, and updates.

    Args:
        guard_step: decides which steps update.
        schedule: learning rate by update number, for the metrics; the optimizer has its own copy.
    """

    def update(state: TrainStateNNX, sums: Sums) -> tuple[TrainStateNNX, Metrics]:
        """Consumes `state`; returns the state updated with `sums`, and the metrics of the step."""
        parts, grads = sums
        scale = 1 / jnp.maximum(parts.targets, 1)
        with jax.named_scope("grad_norm"):
            grad_norm = optax.tree.norm(grads) * scale
        means = {name: total / jnp.maximum(count, 1) for name, (total, count) in parts.sums.items()}
        learning_rate = schedule(state.optimizer.step[...])
        decision = guard_step(state.guard, state.step[...], means["loss"], grad_norm, parts.targets > 0)
        state.apply_gradients(grads, scale=scale, where=decision.updates, counts=decision.counts)
        return state, means | {
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "targets": parts.targets.astype(jnp.int32),
            "tokens": parts.tokens.astype(jnp.int32),
            "bad": decision.bad,
            "skipped": ~decision.updates,
        }

    return update
