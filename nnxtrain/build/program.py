"""The composition root: the whole `Config` → parts that know nothing of it."""

import functools
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.build.registry import BUILT_IN, Registry
from nnxtrain.checkpoint.arrays import read_arrays, write_arrays
from nnxtrain.checkpoint.saver import RestoreSpec
from nnxtrain.config.debug import DebugConfig
from nnxtrain.config.lookup import lookup
from nnxtrain.config.mesh import MeshConfig
from nnxtrain.config.record import as_mapping
from nnxtrain.config.schema import Config
from nnxtrain.data.batches import Cut
from nnxtrain.data.sources import make_tokenizer
from nnxtrain.engine.base import Engine, hash_of
from nnxtrain.engine.executable import COMPILED_FROM, Executables, load_executables
from nnxtrain.errors import ConfigError
from nnxtrain.host.environment import environment
from nnxtrain.models.remat import can_offload, make_wrap, offloaded, policy_of
from nnxtrain.nn.param import Precision
from nnxtrain.optim.groups import freeze
from nnxtrain.optim.optimizers import make_optimizer
from nnxtrain.optim.schedules import make_schedule
from nnxtrain.sharding.audit import check_replication
from nnxtrain.sharding.layout import MeshLayout
from nnxtrain.sharding.mesh import here, make_mesh
from nnxtrain.sharding.rows import rows_sharding
from nnxtrain.sharding.spread import per_replica, replica_axes, spread_microbatches, spread_rows, sum_replicas
from nnxtrain.state import TrainStateNNX
from nnxtrain.steps.eval_step import make_eval_step
from nnxtrain.steps.guard import StepGuard, make_step_guard
from nnxtrain.steps.loss import make_loss_sum
from nnxtrain.steps.train_step import make_collect, make_train_step, make_update
from nnxtrain.types import (
    PRNG,
    Batch,
    Collect,
    EvalStep,
    LossSum,
    RngsAt,
    Sums,
    Tokenizer,
    TrainStep,
    Update,
)


@dataclass(frozen=True)
class Program:
    """What is compiled, before any data or weight exists."""

    config: Config
    mesh: jax.sharding.Mesh
    tokenizer: Tokenizer
    layout: MeshLayout
    make_state: Callable[[], TrainStateNNX]
    collect: Collect
    forward_backward: Collect
    update: Update
    eval_step: EvalStep
    registry: Registry
    offloaded: list[str]  # tags of activations that wait for the backward pass in host memory

    @property
    def cut(self) -> Cut:
        """How a global batch becomes microbatches."""
        return Cut(self.config.batch.accum_steps, self.config.batch.microbatch)

    def batch_spec(self) -> Batch:
        """Returns shapes, types and shardings of a batch, leaves `[m b ...]`."""
        return self._spec(*self.cut)

    def eval_spec(self) -> Batch:
        """Returns shapes, types and shardings of a batch to evaluate, leaves `[b ...]`."""
        return self._spec(self.config.eval_rows)

    def _spec(self, *rows: int) -> Batch:
        tokens, row_axis = (*rows, self.config.batch.sequence), len(rows) - 1
        names = ("inputs", "targets", "positions", "segment_ids")
        leaves: dict[str, tuple[tuple[int, ...], Any]] = dict.fromkeys(names, (tokens, jnp.int32))
        leaves |= {"mask": (tokens, jnp.bool_), "rows": (rows, jnp.int32)}

        def sharding(name: str) -> jax.sharding.NamedSharding:
            return rows_sharding(self.layout, row_axis=row_axis, tokens=name != "rows")

        return {name: jax.ShapeDtypeStruct(*leaf, sharding=sharding(name)) for name, leaf in leaves.items()}

    def abstract_state(self) -> TrainStateNNX:
        """Returns the state as modules of shapes, types and shardings."""
        graph, state = nnx.split(nnx.eval_shape(self.make_state))
        return nnx.merge(graph, self.layout.state(state))

    @property
    def restore_spec(self) -> RestoreSpec:
        """What this program asks of a checkpoint."""
        return RestoreSpec(self.abstract_state, self.tokenizer.fingerprint, self.config.batch.sequence)

    @property
    def train_step(self) -> TrainStep:
        """The whole step: `update` by what `collect` finds."""
        return make_train_step(self.collect, self.update)

    @property
    def max_inflight(self) -> int:
        """Updates that may be under way at a time."""
        return self.config.engine.max_inflight

    def abstract_sums(self, microbatch: Batch) -> Sums:
        """Returns shapes, types and shardings of the sums of an abstract microbatch."""
        graph, state = nnx.split(self.abstract_state())
        collect = lambda state, microbatch: self.forward_backward(nnx.merge(graph, state), microbatch)  # noqa: E731
        return self.layout.sums(jax.eval_shape(collect, state, dict(microbatch)), copies=replica_axes(self.layout))

    sum_replicas = staticmethod(sum_replicas)
    write = staticmethod(write_arrays)
    read = staticmethod(read_arrays)

    def make_engine(self) -> Engine:
        """Compiles the step, or takes it from `aot.load`; `initialise` or `load` then gives the engine its state."""
        engine = self.new_engine()
        if self.saved is None:
            engine.compile(self.batch_spec())
        else:
            engine.use(self.saved.programs, self.batch_spec(), hlo_hash=self.saved.hlo_hash)
        return engine

    @functools.cached_property
    def saved(self) -> Executables | None:
        """The programs of `aot.load`, if it names any; the step is lowered, not compiled, to see that they are its own.

        Raises:
            ConfigError: they are not there, or are those of another configuration or machine.
        """
        if self.config.aot.load is None:
            return None
        file, devices = Path(self.config.aot.load).expanduser(), list(self.mesh.devices.flat)
        found = load_executables(file, marks=marks_of(self), devices=devices, key="aot.load")
        steps = self.new_engine().trace(self.batch_spec())
        if hash_of({name: traced.lower() for name, traced in steps}) != found.hlo_hash:
            raise ConfigError(f"aot.load={file} holds another step than this configuration makes; compile it again")
        return found

    def new_engine(self) -> Engine:
        """Returns the engine that `engine.name` names; it has compiled nothing yet.

        Raises:
            ConfigError: the remat policy moves activations to host memory, and these devices have none.
        """
        device = self.mesh.devices.flat[0]
        if self.offloaded and not can_offload(device):
            what = f"{', '.join(self.offloaded)} to pinned host memory, which platform {device.platform} does not have"
            raise ConfigError(f"remat.policy={self.config.remat.policy} moves {what}; save or recompute them")
        return lookup(self.registry.engines, self.config.engine.name, key="engine.name")(self)


def make_program(
    config: Config,
    *,
    devices: list[jax.Device] | None = None,
    registry: Registry = BUILT_IN,
) -> Program:
    """Returns the program of `config`; nothing is allocated or compiled.

    Args:
        config: of the run.
        devices: to work on; None for all of this process's backend.
        registry: what the names in `config` are looked up in.

    Raises:
        ConfigError: the devices cannot form the mesh, or share the rows of a microbatch.
    """
    mesh = make_mesh(config.mesh, devices or here(config.debug.platform))
    for key, problem in config.mesh_problems(mesh.shape):
        raise ConfigError(f"{key}: {problem}")
    layout = MeshLayout(mesh, config.mesh.rules)
    tokenizer = make_tokenizer(config.data, vocab=config.model.vocab)
    schedule = make_schedule(
        config.schedule, peak=config.optimizer.learning_rate, steps=config.steps, table=registry.schedules
    )
    policy = policy_of(config.remat, registry.remat_policies)
    make_model = functools.partial(
        lookup(registry.models, config.model.name, key="model.name"),
        replace(config.model, attention=config.attention),
        vocab=tokenizer.size,
        wrap=make_wrap(policy),
        layout=layout,
        precision=Precision(
            _compute_type(config.model.dtype, mesh.devices.flat[0].platform), jnp.dtype(config.model.param_dtype)
        ),
        rngs_at=rngs_from(config.seed),
    )

    def make_state() -> TrainStateNNX:
        model = make_model()
        freeze(model, config.optimizer)
        return TrainStateNNX(model, make_optimizer(config.optimizer, schedule, model=model, table=registry.optimizers))

    if config.optimizer.groups:
        nnx.eval_shape(make_state)  # refuses patterns that match nothing, before a run writes anything
    auto = "one_pass" if config.batch.accum_steps == 1 else "scan"
    name = auto if config.batch.accumulator == "auto" else config.batch.accumulator
    accumulate = spread_microbatches(lookup(registry.accumulators, name, key="batch.accumulator"), layout)
    apart = per_replica(registry.accumulators["one_pass"], layout)
    loss_sum = loss_sum_of(config, layout, z_loss=config.loss.z_loss, dropout=config.model.dropout)
    update = make_update(_step_guard(config.debug), schedule)
    collect, collect_apart = (make_collect(loss_sum, how, seed=config.seed) for how in (accumulate, apart))
    program = Program(
        config=config,
        mesh=mesh,
        tokenizer=tokenizer,
        layout=layout,
        make_state=make_state,
        collect=collect,
        forward_backward=lambda state, one: collect_apart(state, {name: leaf[None] for name, leaf in one.items()}),
        update=update,
        eval_step=make_eval_step(loss_sum_of(config, layout, z_loss=0.0, dropout=0.0)),
        registry=registry,
        offloaded=offloaded(policy),
    )
    weights = nnx.state(program.abstract_state().model, nnx.Param)
    check_replication(weights, layout, tolerance=config.mesh.replication_tolerance)
    return program


def _step_guard(config: DebugConfig) -> StepGuard:
    return make_step_guard(
        skips=config.on_nonfinite == "skip",
        spike_deviations=config.spike_deviations,
        spike_warmup=config.spike_warmup_steps,
        limit=config.nonfinite_limit,
    )


def loss_sum_of(config: Config, layout: MeshLayout, *, z_loss: float, dropout: float) -> LossSum:
    """Returns the loss of a microbatch, for training or, with 0 and 0, for evaluation."""
    chunks, spread = config.loss_chunks, spread_rows(layout)
    return make_loss_sum(z_loss=z_loss, dropout=dropout, chunks=chunks, spread=spread, pick=layout.pick)


def marks_of(program: Program) -> dict[str, str]:
    """Returns by name what the programs of a step are compiled from, as far as it has a name."""
    devices = program.mesh.devices.flat
    keys = {name: str(value) for name, value in as_mapping(program.config).items() if name.startswith(COMPILED_FROM)}
    machine = {
        "device_kind": devices[0].device_kind,
        "devices": str(program.mesh.size),
        "processes": str(len({device.process_index for device in devices})),
        "XLA_FLAGS": " ".join(word for word in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in word),
        "libtpu": version("libtpu") if find_spec("libtpu") else "",
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }
    return keys | machine | environment()["versions"]


def on_one_device(config: Config) -> Config:
    """Returns `config` for work that one device does, whatever the mesh of the run."""
    return replace(config, mesh=MeshConfig(data=1))


def rngs_from(seed: int) -> RngsAt:
    """Returns `(path, global layer index) -> nnx.Rngs`: initial weights depend on these and on `seed` alone."""

    def rngs_at(path: str, layer: jax.typing.ArrayLike) -> nnx.Rngs:
        of_path = jax.random.fold_in(jax.random.key(seed, impl=PRNG), zlib.crc32(path.encode()))
        return nnx.Rngs(params=jax.random.fold_in(of_path, layer))

    return rngs_at


def _compute_type(name: str, platform: str) -> jnp.dtype:
    if name == "auto":
        name = "bfloat16" if platform in ("tpu", "gpu") else "float32"
    return jnp.dtype(name)
