"""One run from start to end: directory, engine, loop, evaluations, report, summary."""

import functools
import json
import logging
import resource
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnxtrain import __version__
from nnxtrain.build import Data, Program, make_evaluators, make_program, make_scale, make_writer, open_data
from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.config.load import to_yaml
from nnxtrain.config.schema import Config
from nnxtrain.data.corpus import default_cache_dir
from nnxtrain.errors import UserError
from nnxtrain.loop import StepRecord, run_loop
from nnxtrain.metrics import Recorder
from nnxtrain.report import Curve, loss_curves, write_report
from nnxtrain.run.compiles import CompileLog
from nnxtrain.run.console import Console, duration
from nnxtrain.run.directory import environment, locked, set_aside_rows, write_whole
from nnxtrain.state import TrainStateNNX


def execute(config: Config, folder: Path, *, began: float) -> int:
    """Runs `config` in `folder`; returns the exit code.

    Args:
        config: of the run.
        folder: run directory; made here, once everything that was asked for is known to be possible.
        began: `time.monotonic()` at the start of the process.

    Raises:
        UserError: what a user can cause; the summary says it too.
    """
    console = Console(config.log.progress)
    package = logging.getLogger("nnxtrain")
    package.addHandler(console)
    package.setLevel(logging.INFO)
    try:
        use_compilation_cache(config)
        program = make_program(config)
        data = open_data(program)
        with locked(folder):
            console.open_log(folder / "train.log")
            run = _Run(config, folder, console=console, data=data, began=began)
            return run.guarded()
    except UserError:
        if config.debug.traceback:
            traceback.print_exc()
        raise
    finally:
        package.removeHandler(console)
        console.close()


def use_compilation_cache(config: Config) -> None:
    """Lets jax keep compiled programs on disk where `debug.compilation_cache` says."""
    if (place := config.debug.compilation_cache) is not None:
        folder = default_cache_dir() / "xla" if place == "auto" else Path(place).expanduser()
        jax.config.update("jax_compilation_cache_dir", str(folder))


def parameter_count(module: nnx.Module) -> int:
    """Returns the number of weights of a model, whose arrays may be abstract."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))


def describe(program: Program, data: Data, *, parameters: int) -> list[str]:
    """Returns what the first lines of a run say."""
    config, mesh = program.config, program.mesh
    device = mesh.devices.flat[0]
    tokens = config.batch.global_size * config.batch.sequence
    pieces = f" in {config.batch.accum_steps} microbatches" if config.batch.accum_steps > 1 else ""
    idle = jax.device_count() - mesh.size
    epochs = data.train.epochs_after(data.steps())
    lines = [
        f"nnxtrain {__version__}, jax {jax.__version__}",
        f"devices  {mesh.size} {device.device_kind}" + (f" ({idle} more are not used)" if idle else ""),
        f"model    {parameters:,} parameters, {config.model.layers} layers of width {config.model.embed}",
        f"data     {data.dataset.description}",
        f"batch    {config.batch.global_size} rows of {config.batch.sequence} tokens{pieces}: {tokens:,} tokens a step",
        f"steps    {data.steps():,} ({epochs:.2f} epochs)",
    ]
    if data.steps() < config.steps:
        lines.append(f"         the data ends before steps={config.steps:,} (data.epochs={config.data.epochs})")
    return lines


class _Run:
    """The parts of one run and what happens to them in turn."""

    def __init__(self, config: Config, folder: Path, *, console: Console, data: Data, began: float):
        self.config = config
        self.folder = folder
        self.console = console
        self.data = data
        self.began = began
        self.compiles = CompileLog()
        self.summary: dict[str, Any] = {"status": "failed", "exit_code": 1, "step": 0, "reason": None}

    def guarded(self) -> int:
        """Trains; whatever happens, the summary tells it."""
        try:
            self.train()
            self.summary |= {"status": "done", "exit_code": 0}
        except UserError as error:
            self.summary |= {"exit_code": error.exit_code, "reason": str(error)}
            raise
        except BaseException as error:
            self.summary |= {"reason": f"{type(error).__name__}: {error}"}
            self.console.stop()
            with (self.folder / "train.log").open("a") as log:
                traceback.print_exc(file=log)
            raise
        finally:
            self.summary["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            write_whole(self.folder / "summary.json", json.dumps(self.summary, indent=2) + "\n")
        self.console.say(f"done     {self.folder}/report.html")
        return 0

    def train(self) -> None:
        """Compiles, trains, evaluates, saves."""
        self.open()
        steps = self.data.steps()
        with closing(self.recorder):
            batches = self.data.train.start(0, put=self.data.put_train, prefetch=self.config.data.prefetch)
            with closing(batches):
                self.console.start(done=0, total=steps)
                done = run_loop(self.engine, batches, steps=range(steps), record=self.record, between=self.between)
            self.console.stop()
            self.summary["step"] = done
            if not self.recorder.evaluations or self.recorder.evaluations[-1]["step"] < done:
                self.evaluate(done)
            self.finish(done)

    def open(self) -> None:
        """Writes what is known before the first step, and compiles it."""
        config, program = self.config, self.data.program
        dropped = set_aside_rows(self.folder, beyond=0)
        write_whole(self.folder / "config.yml", to_yaml(config))
        devices = [str(device) for device in program.mesh.devices.flat]
        where = {"devices": devices, "kind": program.mesh.devices.flat[0].device_kind, "mesh": dict(program.mesh.shape)}
        write_whole(self.folder / "env.json", json.dumps(environment() | where, indent=2) + "\n")
        parameters = parameter_count(nnx.eval_shape(program.make_state).model)
        for line in describe(program, self.data, parameters=parameters):
            self.console.say(line)
        self.console.say(f"run      {self.folder}")
        if dropped:
            self.console.say(f"         {dropped} rows of an earlier, unfinished run are in metrics.dropped.jsonl")
        self.engine = program.make_engine()
        self.console.say(f"compiled in {duration(self.engine.compile_s)}")
        scale = make_scale(self.data)
        self.recorder = Recorder(
            self.folder, self.console, scale=scale, log_every=config.log.every_steps, tensorboard=config.log.tensorboard
        )
        self.evaluators = make_evaluators(self.data, self.engine)
        self.write_text = make_writer(config, program.tokenizer, self.bind_to_model)
        self.summary |= {
            "parameters": parameters,
            "model_flops_per_token": scale.flops_per_token,
            "compile_s": self.engine.compile_s,
            "hlo_hash": self.engine.hlo_hash,
            "resumed_from": None,
        }

    def bind_to_model(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Turns `function(model, *args)` into a compiled `function(*args)` of the engine's model."""

        @functools.wraps(function)
        def of_state(state: TrainStateNNX, *args: Any) -> Any:
            return function(state.model, *args)

        return self.engine.bind(of_state)

    def record(self, record: StepRecord) -> None:
        """Takes a finished step."""
        self.summary["step"] = record.step
        self.summary.setdefault("start_to_first_step_s", time.monotonic() - self.began)
        self.recorder.train(record)

    def between(self, done: int) -> Callable[[], None] | None:
        """Returns what is due after `done` steps."""
        every = self.config.eval.every_steps
        return (lambda: self.evaluate(done)) if every and done % every == 0 else None

    def evaluate(self, step: int) -> None:
        """Evaluates every held-out set, writes a sample and the report."""
        for name, run in self.evaluators.items():
            self.recorder.evaluation(step, name, run())
        text = self.write_text()
        write_whole(self.folder / "samples" / f"step_{step:08}.txt", text + "\n")
        self.report()

    def report(self) -> None:
        """Writes the report of what is known so far."""
        rows = self.recorder.rows
        curves = {
            "Loss (nats per target)": loss_curves(rows, self.recorder.evaluations),
            "Learning rate": [Curve("learning rate", [(row["step"], row["learning_rate"]) for row in rows])],
            "Gradient norm, before clipping": [Curve("norm", [(row["step"], row["grad_norm"]) for row in rows])],
            "Tokens per second": [Curve("tokens/s", [(row["step"], row["tokens_per_s"]) for row in rows])],
        }
        if not rows:
            curves = {name: [] for name in curves}
        config = (self.folder / "config.yml").read_text()
        write_report(self.folder, curves=curves, summary=self.summary, config=config)

    def finish(self, done: int) -> None:
        """Saves the weights, completes the summary, shows a sample."""
        rows, times = self.recorder.rows, self.recorder.step_times_s
        memory = self.data.program.mesh.devices.flat[0].memory_stats() or {}
        last = [row for row in self.recorder.evaluations if row["step"] == done]
        self.summary |= {
            "final_loss": rows[-1]["loss"] if rows else None,
            "eval": {
                row["name"]: {key: row[key] for key in row if key not in ("kind", "name", "step")} for row in last
            },
            "median_step_time_s": statistics.median(times) if times else None,
            "tokens_per_s": sum(row["tokens"] for row in rows) / sum(times) if times else None,
            "peak_device_bytes": memory.get("peak_bytes_in_use"),
            "recompiles": self.compiles.repeats(self.engine.programs),
            "skipped_steps": self.recorder.skipped_steps,
        }
        if self.config.checkpoint.enabled and done:
            with closing(CheckpointStore(self.folder / "checkpoints")) as store:
                meta = {"step": done, "tokenizer": self.data.program.tokenizer.fingerprint, "format": 1}
                store.save(done, self.engine.state().model, meta)
        self.report()
        sample = (self.folder / "samples" / f"step_{done:08}.txt").read_text()
        self.console.say(f"sample   --------\n{sample.rstrip()}\n         --------")
