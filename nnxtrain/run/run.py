"""One run from start to end: directory, restored or fresh state, loop, evaluations, saves, report, summary."""

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.profiler import annotate_function

from nnxtrain.build.evaluators import make_evaluators, make_writer
from nnxtrain.build.feed import Data, make_scale, open_data
from nnxtrain.build.program import make_program
from nnxtrain.build.registry import BUILT_IN, Registry
from nnxtrain.build.tokenizer import tokenizer_name
from nnxtrain.checkpoint.saver import Saver, Snapshot
from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.checkpoint.tree import all_finite
from nnxtrain.config.record import to_yaml
from nnxtrain.config.schema import Config
from nnxtrain.data.batches import Position
from nnxtrain.errors import STOPPED, CheckpointError, NonFiniteError, UserError
from nnxtrain.host.cluster import CHECKPOINTS, Cluster, joined
from nnxtrain.host.compilation_cache import use_compilation_cache
from nnxtrain.host.console import Console
from nnxtrain.host.files import write_json, write_whole
from nnxtrain.host.signals import StopSignals
from nnxtrain.host.text import duration
from nnxtrain.host.watchdog import Watchdog
from nnxtrain.loops.train_loop import StepRecord, run_loop
from nnxtrain.metrics.recorder import Recorder
from nnxtrain.metrics.report_html import run_curves, write_report
from nnxtrain.metrics.rewind import cut_events, set_aside_rows
from nnxtrain.profiling.profiler import Profiler
from nnxtrain.profiling.session import OnTrace, Place
from nnxtrain.profiling.windows import say_windows
from nnxtrain.run.banner import checkpoint_meta, environment_of, first_lines, parameter_count
from nnxtrain.run.directory import locked
from nnxtrain.run.recompiles import CompileLog
from nnxtrain.run.restore import Restorer
from nnxtrain.run.summary import Summary, figures
from nnxtrain.tokenizers.record import keep_tokenizer


def execute(
    config: Config, folder: Path, *, began: float, registry: Registry = BUILT_IN, on_trace_ready: OnTrace = None
) -> int:
    """Runs `config` in `folder`; returns the exit code.

    Args:
        config: of the run.
        folder: run directory; made here, once everything that was asked for is known to be possible.
        began: `time.monotonic()` at the start of the process.
        registry: what the names in `config` are looked up in.
        on_trace_ready: gets each trace after it was written; what it raises is said and ends nothing.

    Raises:
        UserError: what a user can cause; the summary says it too.
    """
    with joined(config.distributed) as cluster:
        return _execute(config, folder, cluster, began=began, registry=registry, on_trace=on_trace_ready)


def _execute(
    config: Config, folder: Path, cluster: Cluster, *, began: float, registry: Registry, on_trace: OnTrace
) -> int:
    console = Console("quiet" if cluster.index else config.log.progress)
    package = logging.getLogger("nnxtrain")
    package.addHandler(console)
    package.setLevel(logging.INFO)
    try:
        program = make_program(config, registry=registry)
        _ = program.saved  # refuses what aot.load names before anything is written
        use_compilation_cache(config)
        data = open_data(program)
        with cluster.folder(folder) as own, locked(own):
            return _Run(own, cluster, console=console, data=data, began=began, on_trace=on_trace).guarded()
    finally:
        package.removeHandler(console)
        console.close()


class _Run:
    """The parts of one run and what happens to them in turn."""

    def __init__(
        self, folder: Path, cluster: Cluster, *, console: Console, data: Data, began: float, on_trace: OnTrace
    ):
        self.config = config = data.program.config
        self.shared = (folder / CHECKPOINTS).resolve().parent  # the run directory, also where `folder` is a scratch one
        self.cluster = cluster
        self.folder = folder
        self.console = console
        self.data = data
        self.program = data.program
        self.began = began
        self.on_trace = on_trace
        self.compiles = CompileLog()
        self.summary = Summary(folder)
        self.signals = StopSignals(say=console.say, leave=self.summary.leave)
        hung = self.summary.leave if config.debug.hang_abort else None
        self.watchdog = Watchdog(
            config.debug.hang_timeout_s,
            folder=self.shared,
            name=f"stacks_of_{cluster.index}" if cluster.index else "stacks",
            say=console.say,
            leave=hung,
        )
        self.position = self.seen = Position()
        self.rollbacks = 0

    def guarded(self) -> int:
        """Trains; whatever happens, the summary tells it."""
        with self.summary.told(), self.signals, self.watchdog, self.cluster.losses_named():
            if self.cluster.size > 1:
                self.signals.guard_unsaved()  # none ends alone: the others would wait for it
            code = self.train()
            self.summary |= {"status": "preempted" if code else "done", "exit_code": code}
        self.console.say("stopped  start it again to go on" if code else f"done     {self.folder}/report.html")
        return code

    def figures(self) -> dict[str, Any]:
        """Returns the figures of the steps so far."""
        found = figures(self.recorder, step=self.summary["step"], device=self.program.mesh.local_devices[0])
        return found | {"recompiles": self.compiles.repeats(self.engine.programs)}

    def train(self) -> int:
        """Restores, compiles, trains, evaluates, saves; returns the exit code."""
        with ExitStack() as stack:
            done = self.open(stack)
            with self.rescued():
                if self.is_eval_due(done):
                    self.evaluate(done)
                while True:
                    try:
                        done = self.steps_from(done)
                        break
                    except NonFiniteError as error:
                        done = self.recover(error)
                self.console.stop()
                if self.config.checkpoint.keep_best is None:
                    self.save(done)  # before the evaluation, which may fail
                if (self.stops(done) and done < self.total) or not self.evaluate(done):
                    return self.stop(done)
                self.finish(done)
            return 0

    @contextmanager
    def rescued(self) -> Iterator[None]:
        """Saves the steps that are done when an error ends the run."""
        try:
            yield
        except (NonFiniteError, CheckpointError):
            raise  # what was good is saved, or cannot be
        except BaseException:
            if self.cluster.size > 1:
                raise  # a save takes all processes, and the others know nothing of this error
            self.console.stop()
            step = self.summary["step"]
            if int(self.engine.state().step[...]) == step:
                self.save(step)
                self.store.wait()
            raise

    def stop(self, done: int) -> int:
        """Saves because something asks to stop; returns the exit code.

        Raises:
            UserError: nothing could be saved.
        """
        if not self.save(done):
            raise UserError(f"stopped at step {done} by a signal, and nothing is saved: checkpoint.enabled=false")
        self.store.wait()
        return STOPPED

    def open(self, stack: ExitStack) -> int:
        """Makes the parts and gives the engine its state; returns the steps that are behind."""
        config, program = self.config, self.program
        self.store = stack.enter_context(
            closing(CheckpointStore(self.folder / CHECKPOINTS, config.checkpoint, read_only=False))
        )
        self.parameters = parameter_count(program)
        for line in first_lines(self.data, parameters=self.parameters):
            self.console.say(line)
        self.console.say(f"run      {self.folder}")
        alone = self.cluster.size == 1
        self.restorer = Restorer(self.data, self.store, say=self.console.say, falls_back=alone)
        state, done, self.position = self.restorer.find(config.checkpoint.resume)
        self.summary |= {"step": done, "resumed_from": done if state is not None else None}
        self.total = self.data.steps(done, self.position)
        if windows := say_windows(config.profile, start=done, total=self.total):
            self.console.say(f"profile  {windows}")
        self.begin(done)
        self.engine = program.make_engine()
        self.console.say(f"compiled in {duration(self.engine.compile_s)}")
        self.restorer.load(self.engine, state)
        self.is_finite = self.engine.bind(all_finite)
        self.evaluators = make_evaluators(self.data, self.engine.bind_model)
        self.write_text = make_writer(config, program.tokenizer, self.engine.bind_model)
        scale = make_scale(self.data, steps=self.total)
        self.recorder = stack.enter_context(closing(Recorder(self.folder, self.console, scale=scale, log=config.log)))
        self.summary.figures = self.figures
        self.saver = Saver(
            self.store,
            config.checkpoint,
            meta=checkpoint_meta(self.data),
            is_finite=lambda: bool(self.is_finite()),
            last=self.summary["resumed_from"],
            now=self.cluster.now,
        )
        self.profiler = Profiler(
            config.profile,
            Place(self.shared / "profile", process=self.cluster.index),
            drain=lambda: jax.block_until_ready(self.engine.state()),
            say=self.console.say,
            alive=self.watchdog.beat,
            on_trace_ready=self.on_trace,
        )
        self.summary |= {
            "parameters": self.parameters,
            "model_flops_per_token": scale.flops_per_token,
            "compile_s": self.engine.compile_s,
            "hlo_hash": self.engine.hlo_hash,
        }
        return done

    def begin(self, done: int) -> None:
        """Takes the directory over: writes what is known before the first step, cuts back what lies beyond `done`."""
        self.summary.begin()
        self.console.open_log(self.folder / "train.log")
        write_whole(self.folder / "config.yml", to_yaml(self.config))
        write_json(self.folder / "env.json", environment_of(self.program))
        keep_tokenizer(self.program.tokenizer, self.folder, name=tokenizer_name(self.config, self.program.registry))
        if dropped := set_aside_rows(self.folder, beyond=done):
            self.console.say(f"         {dropped} rows beyond step {done} are in metrics.dropped.jsonl")
        cut_events(self.folder / "tensorboard", beyond=done)

    def steps_from(self, done: int) -> int:
        """Takes steps to the end, or until something asks to stop; returns the steps done."""
        batches = self.data.train.start(self.position, put=self.data.put_train, prefetch=self.config.data.prefetch)
        with closing(batches), self.profiler.steps(done):
            self.console.start(done=done, total=self.total)
            steps = range(done, self.total)
            return run_loop(
                self.engine, batches, steps=steps, record=self.record, between=self.between, stops=self.stops
            )

    def stops(self, done: int) -> bool:
        """Tells whether a signal, or the platform, asks to stop."""
        return self.cluster.any_asks(self.signals.asked) or self.store.is_preempted(done)

    def is_interrupted(self) -> bool:
        """Tells long work between steps whether to give way to a signal; shows the watchdog that it goes on."""
        self.watchdog.beat()
        return self.cluster.any_asks(self.signals.asked)

    def record(self, record: StepRecord) -> None:
        """Takes a finished step."""
        self.watchdog.beat()
        self.signals.guard_unsaved()
        self.summary.values.setdefault("start_to_first_step_s", time.monotonic() - self.began)
        self.seen = record.position
        self.recorder.train(record, profiled=self.profiler.is_tracing)
        self.summary.values["step"] = record.step
        self.position = record.position
        self.store.check()

    def recover(self, error: NonFiniteError) -> int:
        """Goes back to the newest checkpoint and leaves out the rows that broke it, or saves what is good and gives up.

        Returns: the steps done at the checkpoint.
        """
        self.console.stop()
        self.store.wait()
        if self.config.debug.on_nonfinite != "rollback":
            self.save(self.summary["step"])
            self.store.wait()
            raise error
        if not self.store.steps() or self.rollbacks == self.config.debug.nonfinite_limit:
            why = f"{self.rollbacks} rollbacks before" if self.rollbacks else "no checkpoint to go back to"
            raise NonFiniteError(f"{error}; debug.on_nonfinite=rollback gives up: {why}") from error
        self.rollbacks += 1
        self.engine.drop()
        first, end = self.position.row, self.seen.row
        skipped = self.position.without(first, end).skipped
        self.console.say(f"rollback {error}")
        self.console.say(f"         rows {first} to {end} are left out from now on")
        state, done, position = self.restorer.find("must")
        self.position = position._replace(skipped=skipped)
        self.total = self.data.steps(done, self.position)
        self.restorer.load(self.engine, state)
        self.saver.last = done
        self.recorder.go_back(done)
        return done

    def between(self, done: int) -> Callable[[], None] | None:
        """Returns what is due after `done` steps: evaluation first, so that a save knows its loss."""
        evaluates, saves, turns = self.is_eval_due(done), self.saver.is_due(done), self.profiler.turns()

        def due() -> None:
            self.profiler.leave()
            if evaluates:
                self.evaluate(done)
            if saves:
                self.save(done)
            if done < self.total:
                self.profiler.enter()

        return due if evaluates or saves or turns else None

    def is_eval_due(self, done: int) -> bool:
        """Tells whether an evaluation is due between two steps."""
        every = self.config.eval.every_steps
        return every > 0 and done > 0 and done % every == 0

    @functools.partial(annotate_function, name="eval")
    def evaluate(self, step: int) -> bool:
        """Evaluates every held-out set that was not yet, writes a sample and the report.

        Returns: whether that is done; False if it gave way to a stop signal.
        """
        sample = self.sample_of(step)
        before = self.recorder.evaluated(step)
        *evaluated, sampled = self.cluster.of_first([*(name in before for name in self.evaluators), sample.exists()])
        missing = [name for name, is_done in zip(self.evaluators, evaluated, strict=True) if not is_done]
        if not missing and sampled:
            return True
        for name in missing:
            if (result := self.evaluators[name](self.is_interrupted)) is None:
                return False
            self.recorder.evaluation(step, name, result)
        write_whole(sample, self.write_text() + "\n")
        self.watchdog.beat()
        self.report()
        return True

    def sample_of(self, step: int) -> Path:
        """Returns the file of the text written after `step` steps."""
        return self.folder / "samples" / f"step_{step:08}.txt"

    @functools.partial(annotate_function, name="checkpoint")
    def save(self, step: int) -> bool:
        """Saves the state of the moment, unless that was done; tells whether it is saved.

        Raises:
            NonFiniteError: it is not finite, and is not saved.
        """
        if step == 0:
            return True
        data = self.position.as_json()
        (loss,) = self.cluster.of_first([self.recorder.loss_of(self.config.checkpoint.keep_best, step)])
        saved = self.saver.save(Snapshot(step, self.engine.state(), data, loss))
        self.watchdog.beat()
        return saved

    def report(self) -> None:
        """Writes the report of what is known so far."""
        curves = run_curves(self.recorder.steps, self.recorder.evaluations)
        write_report(self.folder, curves=curves, summary=self.summary.values, config=to_yaml(self.config))

    def finish(self, done: int) -> None:
        """Saves the last step, writes the report, shows a sample."""
        self.save(done)
        self.store.wait()
        self.summary.values["step"] = done
        self.summary.write()
        self.report()
        if self.cluster.index == 0:
            text = self.sample_of(done).read_text(encoding="utf-8").rstrip()
            self.console.say(f"sample   --------\n{text}\n         --------")
