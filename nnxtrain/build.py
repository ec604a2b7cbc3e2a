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
import numpy as np
from flax import nnx

from nnxtrain.checkpoint.arrays import read_arrays, write_arrays
from nnxtrain.checkpoint.saver import Wanted
from nnxtrain.compile.chips import peak_flops
from nnxtrain.compile.executable import COMPILED_FROM, Executables, read_executables
from nnxtrain.config.debug import DebugConfig
from nnxtrain.config.load import as_mapping
from nnxtrain.config.mesh import MeshConfig
from nnxtrain.config.schema import Config
from nnxtrain.data.pipeline import START, Cut, Order, Position, TrainBatches, eval_batches
from nnxtrain.data.sources import RowSpec, make_tokenizer
from nnxtrain.engine.base import Engine, hash_of
from nnxtrain.errors import ConfigError
from nnxtrain.evaluation import Evaluation, evaluate
from nnxtrain.lookup import lookup
from nnxtrain.metrics import Scale
from nnxtrain.models.flops import flops_per_token
from nnxtrain.models.remat import can_offload, make_wrap, offloaded, policy_of
from nnxtrain.models.sample import make_sampler
from nnxtrain.nn.param import Precision
from nnxtrain.optim.groups import freeze
from nnxtrain.optim.optimizers import make_optimizer
from nnxtrain.optim.schedules import make_schedule
from nnxtrain.run.directory import environment
from nnxtrain.sharding.audit import check_replication
from nnxtrain.sharding.layout import MeshLayout
from nnxtrain.sharding.mesh import here, make_mesh
from nnxtrain.sharding.rows import own_rows, put_rows, rows_sharding
from nnxtrain.sharding.spread import copies_of, join, keep_apart, spread_microbatches, spread_rows
from nnxtrain.state import TrainStateNNX
from nnxtrain.steps.eval_step import make_eval_step
from nnxtrain.steps.guard import Judge, make_judge
from nnxtrain.steps.loss import make_loss_sum
from nnxtrain.steps.train_step import make_collect, make_train_step, make_update
from nnxtrain.tables import BUILT_IN, Tables
from nnxtrain.types import (
    PRNG,
    Batch,
    Bind,
    Collect,
    Dataset,
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
    tables: Tables
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
    def wanted(self) -> Wanted:
        """What this program asks of a checkpoint."""
        return Wanted(self.abstract_state, self.tokenizer.fingerprint, self.config.batch.sequence)

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
        return self.layout.sums(jax.eval_shape(collect, state, dict(microbatch)), copies=copies_of(self.layout))

    join = staticmethod(join)
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
        found = read_executables(file, marks=marks_of(self), devices=devices, key="aot.load")
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
        return lookup(self.tables.engines, self.config.engine.name, key="engine.name")(self)


def make_program(
    config: Config,
    *,
    devices: list[jax.Device] | None = None,
    tables: Tables = BUILT_IN,
) -> Program:
    """Returns the program of `config`; nothing is allocated or compiled.

    Args:
        config: of the run.
        devices: to work on; None for all of this process's backend.
        tables: what the names in `config` are looked up in.

    Raises:
        ConfigError: the devices cannot form the mesh, or share the rows of a microbatch.
    """
    mesh = make_mesh(config.mesh, devices or here(config.debug.platform))
    for key, problem in config.mesh_problems(mesh.shape):
        raise ConfigError(f"{key}: {problem}")
    layout = MeshLayout(mesh, config.mesh.rules)
    tokenizer = make_tokenizer(config.data, vocab=config.model.vocab)
    schedule = make_schedule(
        config.schedule, peak=config.optimizer.learning_rate, steps=config.steps, table=tables.schedules
    )
    policy = policy_of(config.remat, tables.remat_policies)
    make_model = functools.partial(
        lookup(tables.models, config.model.name, key="model.name"),
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
        return TrainStateNNX(model, make_optimizer(config.optimizer, schedule, model=model, table=tables.optimizers))

    if config.optimizer.groups:
        nnx.eval_shape(make_state)  # refuses patterns that match nothing, before a run writes anything
    auto = "one_pass" if config.batch.accum_steps == 1 else "scan"
    name = auto if config.batch.accumulator == "auto" else config.batch.accumulator
    accumulate = spread_microbatches(lookup(tables.accumulators, name, key="batch.accumulator"), layout)
    apart = keep_apart(tables.accumulators["one_pass"], layout)
    loss_sum = loss_sum_of(config, layout, z_loss=config.loss.z_loss, dropout=config.model.dropout)
    update = make_update(_judge(config.debug), schedule)
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
        tables=tables,
        offloaded=offloaded(policy),
    )
    weights = nnx.state(program.abstract_state().model, nnx.Param)
    check_replication(weights, layout, tolerance=config.mesh.replication_tolerance)
    return program


def _judge(config: DebugConfig) -> Judge:
    return make_judge(
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


@dataclass(frozen=True)
class Data:
    """Batches on their way to the devices of a program."""

    program: Program
    dataset: Dataset
    train: TrainBatches

    def put_train(self, batch: Batch) -> Batch:
        """Brings the rows of a batch that this process read, leaves `[m b ...]`, to the devices."""
        cut, layout = self.program.cut, self.program.layout
        return put_rows(batch, layout, own_rows(layout, cut.rows), rows=cut.rows, row_axis=1)

    def put_eval(self, batch: Batch) -> Batch:
        """Brings a batch, leaves `[b ...]`, to the devices."""
        rows = self.program.config.eval_rows
        return put_rows(batch, self.program.layout, range(rows), rows=rows, row_axis=0)

    def steps(self, done: int = 0, position: Position = START) -> int:
        """Returns the steps of the run: those asked for, or fewer where the data ends before.

        Args:
            done: steps that are behind.
            position: of the data after them.
        """
        asked, left = self.program.config.steps, self.train.count(position)
        return asked if left is None else min(asked, done + left)


def open_data(program: Program) -> Data:
    """Opens the corpora, tokenising them if that was not done before.

    Raises:
        ConfigError: a path or pattern names no data.
        DataError: the data is not what it should be.
    """
    config = program.config
    spec = RowSpec(config.batch.sequence, program.tokenizer, config.seed)
    dataset = lookup(program.tables.datasets, config.data.source, key="data.source")(config.data, spec)
    order = Order(config.seed, config.data.shuffle, config.data.epochs, config.data.drop_remainder)
    best = config.checkpoint.keep_best
    if best is not None and best not in dataset.held_out:
        there = ", ".join(dataset.held_out) or "none"
        raise ConfigError(f"checkpoint.keep_best={best} is no held-out set; there are: {there}")
    own = own_rows(program.layout, program.cut.rows)
    batches = TrainBatches(dataset.train, program.cut, vocab=program.tokenizer.size, order=order, own=own)
    return Data(program, dataset, batches)


def make_scale(data: Data, *, steps: int) -> Scale:
    """Returns what turns counts of this run of `steps` steps into rates and shares."""
    program = data.program
    peak = peak_flops(program.mesh.devices.flat[0].device_kind)
    work = flops_per_token(program.config.model, program.config.batch.sequence)
    return Scale(steps, work, peak and peak * program.mesh.size, data.train.epochs)


def make_evaluators(data: Data, bind: Bind) -> dict[str, Callable[[Callable[[], bool]], Evaluation | None]]:
    """Returns for each held-out set what evaluates the model of `bind` on it, or returns None if it `stops`."""
    program, config = data.program, data.program.config
    eval_step = bind(program.eval_step)

    def evaluator(name: str) -> Callable[[Callable[[], bool]], Evaluation | None]:
        def run(stops: Callable[[], bool]) -> Evaluation | None:
            rows, size = data.dataset.held_out[name], config.eval_rows
            batches = eval_batches(rows, size, vocab=program.tokenizer.size, limit=config.eval.max_batches)
            bytes_of = program.tokenizer.token_bytes
            return evaluate(eval_step, batches, put=data.put_eval, token_bytes=bytes_of, stops=stops)

        return run

    return {name: evaluator(name) for name in data.dataset.held_out}


def make_writer(config: Config, tokenizer: Tokenizer, bind: Bind) -> Callable[[], str]:
    """Returns what writes text after `generate.prompt` with the model of `bind`."""
    words = config.generate
    sample = bind(
        make_sampler(
            tokens=words.tokens,
            context=config.batch.sequence,
            temperature=words.temperature,
            top_k=words.top_k,
            eos=tokenizer.eos,
        )
    )

    def write() -> str:
        begin = [tokenizer.bos] if tokenizer.bos >= 0 else []
        prompt = np.concatenate([begin, tokenizer.encode(words.prompt)]).astype(np.int32)
        ids, length = sample(prompt, jax.random.key(words.seed, impl=PRNG))
        return tokenizer.decode(np.asarray(ids)[: int(length)])

    return write


def bind_to(model: nnx.Module) -> Bind:
    """Returns what compiles functions of `model`, whose arrays stay as they are."""
    graph, weights = nnx.split(model)

    def bind(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(lambda weights, *args: function(nnx.merge(graph, weights), *args))
        return lambda *args: compiled(weights, *args)

    return bind


def _compute_type(name: str, platform: str) -> jnp.dtype:
    if name == "auto":
        name = "bfloat16" if platform in ("tpu", "gpu") else "float32"
    return jnp.dtype(name)
