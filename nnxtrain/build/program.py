"""The composition root: a complete `Config` → parts that do not know it."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.build.model import make_model_context, make_state_of
from nnxtrain.build.registry import BUILT_IN, Registry
from nnxtrain.build.step import StepFunctions, make_step_functions
from nnxtrain.build.tokenizer import make_tokenizer
from nnxtrain.checkpoint.arrays import read_arrays, write_arrays
from nnxtrain.checkpoint.saver import RestoreSpec
from nnxtrain.config.lookup import lookup
from nnxtrain.config.mesh import MeshConfig
from nnxtrain.config.record import as_mapping
from nnxtrain.config.schema import Config
from nnxtrain.data.batches import BatchShape
from nnxtrain.engine.base import Engine, hash_of
from nnxtrain.engine.executable import COMPILED_FROM, Executables, check_options, load_executables
from nnxtrain.errors import ConfigError
from nnxtrain.host.environment import environment
from nnxtrain.models.flops import flops_per_token, matmul_parameters
from nnxtrain.models.remat import can_offload, offloaded, policy_of
from nnxtrain.optim.schedules import make_schedule
from nnxtrain.sharding.audit import check_replication
from nnxtrain.sharding.data_parallel import replica_axes, sum_replicas
from nnxtrain.sharding.layout import MeshLayout
from nnxtrain.sharding.mesh import available_devices, make_mesh
from nnxtrain.sharding.rows import rows_sharding
from nnxtrain.state import TrainStateNNX
from nnxtrain.steps.train_step import make_train_step
from nnxtrain.types import (
    Batch,
    Collect,
    EvalStep,
    Sums,
    Tokenizer,
    TrainStep,
    Update,
)


@dataclass(frozen=True)
class Program:
    """Everything that is known before data is read and weights exist: mesh, shardings, functions to compile."""

    config: Config
    mesh: jax.sharding.Mesh
    tokenizer: Tokenizer
    layout: MeshLayout
    make_state: Callable[[], TrainStateNNX]
    functions: StepFunctions
    registry: Registry
    offloaded: list[str]  # tags of activations offloaded to host memory until the backward pass

    @property
    def cut(self) -> BatchShape:
        """The shape of a batch: its microbatches and their rows; called with a batch, splits it into them."""
        return BatchShape(self.config.batch.accum_steps, self.config.batch.microbatch)

    def batch_spec(self) -> Batch:
        """Returns shapes, types and shardings of a batch, leaves `[m b ...]`."""
        return self._spec(*self.cut)

    def eval_spec(self) -> Batch:
        """Returns shapes, types and shardings of an evaluation batch, leaves `[b ...]`."""
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
        """Returns the state as new modules of shapes, types and shardings."""
        graph, leaves, tree = self._abstract
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

    @functools.cached_property
    def _abstract(self) -> tuple[Any, list[Any], Any]:
        """Graph, leaves and tree structure of the abstract state; cached, since tracing it is slow."""
        graph, state = nnx.split(nnx.eval_shape(self.make_state))
        leaves, tree = jax.tree.flatten(self.layout.state(state))
        return graph, leaves, tree

    @property
    def restore_spec(self) -> RestoreSpec:
        """What this program needs from a checkpoint."""
        return RestoreSpec(self.abstract_state, self.tokenizer.fingerprint, self.config.batch.sequence)

    @property
    def train_step(self) -> TrainStep:
        """The complete training step: `collect`, then `update`."""
        return make_train_step(self.functions.collect, self.functions.update)

    @property
    def forward_backward(self) -> Collect:
        """Sums of one microbatch, one entry per replica of the model."""
        return self.functions.forward_backward

    @property
    def update(self) -> Update:
        """Updates the state by the sums of a step."""
        return self.functions.update

    @property
    def eval_step(self) -> EvalStep:
        """Returns the summed loss of a batch and its number of targets."""
        return self.functions.eval_step

    @functools.cached_property
    def flops_per_token(self) -> float:
        """FLOPs of one training step per token, forward and backward, without recomputation."""
        weights = matmul_parameters(nnx.state(self.abstract_state().model, nnx.Param))
        return flops_per_token(self.config.model, self.config.batch.sequence, weights=weights)

    @property
    def max_inflight(self) -> int:
        """Maximum number of updates in flight."""
        return self.config.engine.max_inflight

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """Compiler options by name."""
        return self.config.aot.options

    def abstract_sums(self, microbatch: Batch) -> Sums:
        """Returns shapes, types and shardings of the sums of an abstract microbatch."""
        graph, state = nnx.split(self.abstract_state())
        collect = lambda state, microbatch: self.forward_backward(nnx.merge(graph, state), microbatch)  # noqa: E731
        return self.layout.sums(
            jax.eval_shape(collect, state, dict(microbatch)), replica_axes=replica_axes(self.layout)
        )

    sum_replicas = staticmethod(sum_replicas)
    write = staticmethod(write_arrays)
    read = staticmethod(read_arrays)

    def make_engine(self) -> Engine:
        """Returns an engine whose step is compiled, or loaded from `aot.load`; it has no state yet."""
        engine = self.new_engine()
        if self.saved is None:
            engine.compile(self.batch_spec())
        else:
            engine.use(self.saved.programs, self.batch_spec(), hlo_hash=self.saved.hlo_hash)
        return engine

    @functools.cached_property
    def saved(self) -> Executables | None:
        """The programs in the file `aot.load`, if set; the step is lowered to verify that they match the config.

        Raises:
            ConfigError: there are none, or they are from another configuration or machine.
        """
        if self.config.aot.load is None:
            return None
        file, devices = Path(self.config.aot.load).expanduser(), list(self.mesh.devices.flat)
        found = load_executables(file, provenance=provenance_of(self), devices=devices, key="aot.load")
        steps = self.new_engine().trace(self.batch_spec())
        if hash_of({name: traced.lower() for name, traced in steps}) != found.hlo_hash:
            raise ConfigError(f"aot.load={file} contains a different step than this configuration; compile it again")
        return found

    def new_engine(self) -> Engine:
        """Returns the engine selected by `engine.name`, not compiled.

        Raises:
            ConfigError: the remat policy offloads activations to host memory, which these devices do not support.
        """
        device = self.mesh.devices.flat[0]
        if self.offloaded and not can_offload(device):
            what = f"{', '.join(self.offloaded)} to pinned host memory, which platform {device.platform} does not have"
            raise ConfigError(f"remat.policy={self.config.remat.policy} offloads {what}; save or recompute them")
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
        devices: of the mesh; None for all devices of the default backend.
        registry: tables that the names in `config` are looked up in.

    Raises:
        ConfigError: the devices cannot form the mesh, or it cannot shard the rows of a microbatch; or the vocabulary of
            the model is smaller than that of the tokenizer.
    """
    mesh = make_mesh(config.mesh, devices or available_devices(config.debug.platform))
    for key, problem in config.mesh_problems(mesh.shape):
        raise ConfigError(f"{key}: {problem}")
    layout, platform = MeshLayout(mesh, config.mesh.rules), mesh.devices.flat[0].platform
    tokenizer = make_tokenizer(config, registry)
    if options := config.aot.options:
        check_options(options, mesh.devices.flat, key="aot.compiler_options")
    schedule = make_schedule(
        config.schedule, peak=config.optimizer.learning_rate, steps=config.steps, table=registry.schedules
    )
    policy = policy_of(config.remat, registry.remat_policies)
    context = make_model_context(
        config, layout, vocab=tokenizer.size, platform=platform, policy=policy, registry=registry
    )
    program = Program(
        config=config,
        mesh=mesh,
        tokenizer=tokenizer,
        layout=layout,
        make_state=make_state_of(config, context, schedule, registry=registry),
        functions=make_step_functions(config, layout, schedule, registry=registry),
        registry=registry,
        offloaded=offloaded(policy),
    )
    weights = nnx.state(program.abstract_state().model, nnx.Param)
    check_replication(weights, layout, tolerance=config.mesh.replication_tolerance)
    return program


def provenance_of(program: Program) -> dict[str, str]:
    """Returns what the programs of a step depend on, by name: config keys, devices, flags and versions."""
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
    """Returns `config` with a mesh of one device."""
    return replace(config, mesh=MeshConfig(data=1))
