"""The step of a run: loss, accumulation and update on the devices of its mesh."""

from typing import NamedTuple

import jax

from nnxtrain.build.registry import Registry
from nnxtrain.config.debug import DebugConfig
from nnxtrain.config.lookup import lookup
from nnxtrain.config.schema import Config
from nnxtrain.sharding.data_parallel import per_replica, shard_microbatches, shard_rows
from nnxtrain.sharding.layout import MeshLayout
from nnxtrain.state import TrainStateNNX
from nnxtrain.steps.eval_step import make_eval_step
from nnxtrain.steps.guard import StepGuard, make_step_guard
from nnxtrain.steps.loss import make_loss_sum
from nnxtrain.steps.train_step import make_collect, make_update
from nnxtrain.types import Batch, Collect, EvalStep, LossSum, Schedule, Sums, Update


class StepFunctions(NamedTuple):
    """The functions that engines compile; they do not depend on the configuration.

    Attributes:
        collect: sums of a batch, reduced over replicas.
        forward_backward: sums of one microbatch, one entry per replica of the model.
        update: updates a state by the sums of a step.
        eval_step: summed loss and targets of a batch.
    """

    collect: Collect
    forward_backward: Collect
    update: Update
    eval_step: EvalStep


def make_step_functions(config: Config, layout: MeshLayout, schedule: Schedule, *, registry: Registry) -> StepFunctions:
    """Returns the functions of a step of `config`.

    Args:
        config: of the run.
        layout: of its mesh.
        schedule: learning rate by number of updates.
        registry: tables that the names in `config` are looked up in.
    """
    auto = "one_pass" if config.batch.accum_steps == 1 else "scan"
    name = auto if config.batch.accumulator == "auto" else config.batch.accumulator
    accumulate = shard_microbatches(lookup(registry.accumulators, name, key="batch.accumulator"), layout)
    unreduced = per_replica(registry.accumulators["one_pass"], layout)
    loss_sum = loss_sum_of(config, layout, z_loss=config.loss.z_loss, dropout=config.model.dropout)
    collect, collect_replicas = (make_collect(loss_sum, how, seed=config.seed) for how in (accumulate, unreduced))

    def forward_backward(state: TrainStateNNX, microbatch: Batch) -> Sums:
        return collect_replicas(state, jax.tree.map(lambda leaf: leaf[None], dict(microbatch)))

    return StepFunctions(
        collect,
        forward_backward,
        update=make_update(_step_guard(config.debug), schedule),
        eval_step=make_eval_step(loss_sum_of(config, layout, z_loss=0.0, dropout=0.0)),
    )


def _step_guard(config: DebugConfig) -> StepGuard:
    return make_step_guard(
        skips=config.on_nonfinite == "skip",
        spike_deviations=config.spike_deviations,
        spike_warmup=config.spike_warmup_steps,
        limit=config.nonfinite_limit,
    )


def loss_sum_of(config: Config, layout: MeshLayout, *, z_loss: float, dropout: float) -> LossSum:
    """Returns the loss of a microbatch, for training or for evaluation (both options 0)."""
    chunks, spread = config.loss_chunks, shard_rows(layout)
    return make_loss_sum(z_loss=z_loss, dropout=dropout, chunks=chunks, spread=spread, pick=layout.pick)
