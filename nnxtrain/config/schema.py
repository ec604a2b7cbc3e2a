"""The whole configuration, and the checks that involve several sections."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from nnxtrain.config.aot import AotConfig
from nnxtrain.config.batch import BatchConfig
from nnxtrain.config.checkpoint import CheckpointConfig
from nnxtrain.config.data import DataConfig
from nnxtrain.config.debug import DebugConfig
from nnxtrain.config.distributed import DistributedConfig
from nnxtrain.config.echo import echo, has_surrogates
from nnxtrain.config.engine import EngineConfig
from nnxtrain.config.eval import EvalConfig
from nnxtrain.config.generate import GenerateConfig
from nnxtrain.config.key import Problem, key
from nnxtrain.config.log import LogConfig
from nnxtrain.config.loss import LossConfig
from nnxtrain.config.mesh import BATCH_AXES, CONTEXT_AXES, MeshConfig
from nnxtrain.config.model import ModelConfig
from nnxtrain.config.optimizer import OptimizerConfig
from nnxtrain.config.pipeline import PipelineConfig
from nnxtrain.config.profile import ProfileConfig
from nnxtrain.config.remat import RematConfig
from nnxtrain.config.schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every key of a run. Only `build/` and the entry points see all of it."""

    run_name: str | None = key(None, "name of the run's folder in output_dir; null = name of the YAML file")
    output_dir: str = key("runs", "folder that contains the runs")
    steps: int = key(1000, "training steps; 0 trains nothing", span="[0, inf)")
    seed: int = key(0, "seed of the initial weights, row order and dropout", span="[0, inf)")
    model: ModelConfig = field(default_factory=ModelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    aot: AotConfig = field(default_factory=AotConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # not a key: the keys that were set

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks that involve two sections; each yields what is wrong and how to fix it."""
        mesh = self._mesh_checks(lambda: {name: max(size, 1) for name, size in self.mesh.sizes().items()})
        return self._run_name(), self._chunks(), *mesh, self._first_trace(), self._traced_process()

    def _run_name(self) -> Iterator[Problem]:
        name = self.run_name
        if name is not None and has_surrogates(name):
            yield "run_name", f"'{echo(name)}' is not UTF-8 text; choose another, run_name=NAME"
        elif name is not None and (name in (".", "..") or {"/", "\\"} & set(name) or len(name.encode()) > 255):
            yield "run_name", f"'{echo(name)}' must be a folder name: at most 255 bytes, without slashes"

    def _chunks(self) -> Iterator[Problem]:
        chunks, tokens = self.loss.chunks, self.batch.sequence
        if chunks and tokens % chunks:
            fits = max(n for n in range(1, min(chunks, tokens) + 1) if tokens % n == 0)
            yield "loss.chunks", f"{chunks} must divide batch.sequence={tokens}; the next valid value is {fits}"

    def _first_trace(self) -> Iterator[Problem]:
        if self.profile.enabled and (first := self.profile.first_traced) >= self.steps:
            waits = f"profile.wait={self.profile.wait} and profile.warmup={self.profile.warmup}"
            rule = f"with {waits} the first traced step would be {first}, counted from 0"
            yield "profile.skip_first", f"{rule}; it must be below steps={self.steps}"

    def _traced_process(self) -> Iterator[Problem]:
        profile, there = self.profile, self.distributed.processes
        is_known = profile.enabled and not self.distributed.detect and profile.names_processes
        if is_known and not any(map(profile.is_traced, range(there))):
            rule = f"{profile.processes} matches none of the {there} processes of distributed.processes"
            yield "profile.processes", f"{rule}; processes are numbered from 0"

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Yields what is wrong with sharding batches over so many devices along each axis, and what would be right."""
        return itertools.chain.from_iterable(self._mesh_checks(lambda: sizes))

    def _mesh_checks(self, sizes: Callable[[], Mapping[str, int]]) -> tuple[Iterator[Problem], ...]:
        return self._train_rows(sizes), self._eval_rows(sizes), self._tokens(sizes)

    def _train_rows(self, sizes: Callable[[], Mapping[str, int]]) -> Iterator[Problem]:
        yield from self._rows("batch.global_size", self.batch.microbatch, self.batch.accum_steps, sizes=sizes())

    def _eval_rows(self, sizes: Callable[[], Mapping[str, int]]) -> Iterator[Problem]:
        yield from self._rows("eval.global_size", self.eval_rows, 1, sizes=sizes())

    def _rows(self, name: str, rows: int, microbatches: int, *, sizes: Mapping[str, int]) -> Iterator[Problem]:
        devices, keys = self.mesh.ways("batch", BATCH_AXES, sizes)
        if rows % devices and not self.batch.global_size % self.batch.accum_steps:
            fits = (rows + -rows % devices) * microbatches
            pieces = f" in {microbatches} microbatches" if microbatches > 1 else ""
            rule = f"{rows * microbatches} rows{pieces} cannot be split over {devices} devices ({keys})"
            yield name, f"{rule}; the next valid value is {fits}"

    def _tokens(self, sizes: Callable[[], Mapping[str, int]]) -> Iterator[Problem]:
        devices, keys = self.mesh.ways("sequence", CONTEXT_AXES, sizes())
        if short := -self.batch.sequence % devices:
            rule = f"{self.batch.sequence} tokens cannot be split over {devices} devices ({keys})"
            yield "batch.sequence", f"{rule}; the next valid value is {self.batch.sequence + short}"

    @property
    def loss_chunks(self) -> int:
        """Chunks of a sequence in the loss, with `loss.chunks=0` resolved."""
        if self.loss.chunks:
            return self.loss.chunks
        if self.model.vocab < 16384:
            return 1
        return max(n for n in range(1, 9) if self.batch.sequence % n == 0)

    @property
    def eval_rows(self) -> int:
        """Sequences of one evaluation batch, with `eval.global_size=0` resolved."""
        return self.eval.global_size or self.batch.microbatch


@dataclass(frozen=True)
class Leaf:
    """One key of the schema: dotted path, declaration, type."""

    path: str
    declared: Field
    type: Any

    @property
    def default(self) -> Any:
        """The value when the key is not set."""
        return self.declared.default


def leaves() -> dict[str, Leaf]:
    """Returns every key of the schema by its dotted path, in order of declaration."""
    found: dict[str, Leaf] = {}
    for declared, kind in _typed(Config):
        if is_dataclass(kind):
            found |= {
                path: Leaf(path, below, leaf_type)
                for below, leaf_type in _typed(kind)
                for path in [f"{declared.name}.{below.name}"]
            }
        elif declared.metadata:
            found[declared.name] = Leaf(declared.name, declared, kind)
    return found


def sections() -> dict[str, type]:
    """Returns the dataclass of each section by its name."""
    return {declared.name: kind for declared, kind in _typed(Config) if isinstance(kind, type) and is_dataclass(kind)}


def _typed(section: Any) -> Iterator[tuple[Field, Any]]:
    hints = get_type_hints(section)
    return ((declared, hints[declared.name]) for declared in fields(section))
