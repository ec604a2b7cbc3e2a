"""The parts of one run, made in the one order that works."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass

import jax

from nnxtrain.build.evaluators import make_evaluators, make_writer
from nnxtrain.build.feed import Data, make_scale
from nnxtrain.build.tokenizer import tokenizer_name
from nnxtrain.checkpoint.saver import Saver
from nnxtrain.checkpoint.store import CheckpointStore
from nnxtrain.checkpoint.tree import all_finite
from nnxtrain.config.record import to_yaml
from nnxtrain.engine.base import Engine
from nnxtrain.host.cluster import CHECKPOINTS
from nnxtrain.host.files import write_json, write_whole
from nnxtrain.host.text import duration
from nnxtrain.loops.eval_loop import Evaluation
from nnxtrain.metrics.recorder import Recorder
from nnxtrain.metrics.report_html import run_curves, write_report
from nnxtrain.metrics.rewind import rewind
from nnxtrain.profiling.profiler import Profiler
from nnxtrain.profiling.session import Place
from nnxtrain.profiling.windows import say_windows
from nnxtrain.run.banner import checkpoint_meta, environment_of, first_lines, parameter_count
from nnxtrain.run.context import RunContext
from nnxtrain.run.recompiles import CompileLog
from nnxtrain.run.restore import Restored, Restorer
from nnxtrain.run.summary import figures
from nnxtrain.tokenizers.record import keep_tokenizer


@dataclass(frozen=True)
class RunParts:
    """What a run works with, ready for its first step.

    Attributes:
        data: of the run, and its program.
        engine: takes the steps; it has its state.
        store: of the checkpoints.
        restorer: gives the engine the state of a checkpoint.
        saver: decides when to save.
        recorder: writes what is known of each step.
        profiler: traces steps.
        evaluators: by held-out set, returns None where it was asked to stop.
        write_text: returns a sample.
        start: what the run starts from, without the state, which the engine has.
        total: steps of the whole run.
    """

    data: Data
    engine: Engine
    store: CheckpointStore
    restorer: Restorer
    saver: Saver
    recorder: Recorder
    profiler: Profiler
    evaluators: dict[str, Callable[[Callable[[], bool]], Evaluation | None]]
    write_text: Callable[[], str]
    start: Restored
    total: int


def open_run(data: Data, context: RunContext, stack: ExitStack) -> RunParts:
    """Makes the parts of a run; the stack closes what must be closed.

    The order is fixed by what each part needs:

    1. find and read the checkpoint: what it refuses, it refuses before minutes of compilation and before the directory
       is written to;
    2. take the directory over and set aside what lies beyond that checkpoint, before the recorder reads its rows;
    3. compile, then give the engine its state: compiled programs say where the arrays go, and the memory of both is
       not needed at once;
    4. bind evaluators and the test for finite weights, which take the engine's own programs and state;
    5. the recorder and the figures of the summary, before the saver, whose first save already writes a summary.
    """
    program, config, say = data.program, data.program.config, context.console.say
    compiles = CompileLog()
    stack.callback(compiles.close)
    store = stack.enter_context(
        closing(CheckpointStore(context.folders.own / CHECKPOINTS, config.checkpoint, read_only=False))
    )
    parameters = parameter_count(program)
    for line in [*first_lines(data, parameters=parameters), f"run      {context.folders.own}"]:
        say(line)
    restorer = Restorer(data, store, say=say, falls_back=context.cluster.size == 1)
    start = restorer.find(config.checkpoint.resume)
    total = data.steps(start.step, start.position)
    if windows := say_windows(config.profile, start=start.step, total=total):
        say(f"profile  {windows}")

    _take_over(data, context, start)

    engine = program.make_engine()
    say(f"compiled in {duration(engine.compile_s)}")
    restorer.load(engine, start.state)

    is_finite = engine.bind(all_finite)
    evaluators = make_evaluators(data, engine.bind_model)
    write_text = make_writer(config, program.tokenizer, engine.bind_model)

    scale = make_scale(data, steps=total)
    recorder = stack.enter_context(closing(Recorder(context.folders.own, context.console, scale=scale, log=config.log)))
    context.summary.values |= {
        "parameters": parameters,
        "model_flops_per_token": scale.flops_per_token,
        "compile_s": engine.compile_s,
        "hlo_hash": engine.hlo_hash,
    }
    _show_figures(data, context, recorder, lambda: compiles.repeats(engine.programs))
    saver = Saver(
        store,
        config.checkpoint,
        meta=checkpoint_meta(data),
        is_finite=lambda: bool(is_finite()),
        last=None if start.state is None else start.step,
        now=context.cluster.now,
    )
    profiler = _make_profiler(data, context, engine)
    start = start._replace(state=None)  # it is the engine's now, and a second reference would keep its memory
    return RunParts(
        data, engine, store, restorer, saver, recorder, profiler, evaluators, write_text, start=start, total=total
    )


def _take_over(data: Data, context: RunContext, start: Restored) -> None:
    """Writes what is known before the first step, and sets aside what lies beyond the step that the run starts from."""
    own = context.folders.own
    context.summary.values |= {"step": start.step, "resumed_from": None if start.state is None else start.step}
    context.summary.begin()
    context.console.open_log(own / "train.log")
    write_whole(own / "config.yml", to_yaml(data.program.config))
    write_json(own / "env.json", environment_of(data.program))
    program = data.program
    keep_tokenizer(program.tokenizer, own, name=tokenizer_name(program.config, program.registry))
    if dropped := rewind(own, beyond=start.step, unwritten=start.unwritten):
        context.console.say(f"         {dropped} rows beyond step {start.step} are in metrics.dropped.jsonl")


def _show_figures(data: Data, context: RunContext, recorder: Recorder, recompiles: Callable[[], int]) -> None:
    """From now on summary and report show the figures of the steps so far."""
    summary, own = context.summary, context.folders.own
    device, config = data.program.mesh.local_devices[0], to_yaml(data.program.config)

    drawn: tuple[object, ...] = ()  # what the picture shows; drawing takes longer than all else in the report

    def report(with_picture: bool) -> None:
        nonlocal drawn
        known = len(recorder.steps["step"]), *recorder.steps["loss"][-1:], len(recorder.evaluations)
        is_new, drawn = with_picture and known != drawn, known if with_picture else drawn
        curves = run_curves(recorder.steps, recorder.evaluations)
        write_report(own, curves=curves, summary=summary.values, config=config, with_picture=is_new)

    summary.figures = lambda: figures(recorder, device=device) | {"recompiles": recompiles()}
    summary.report = report
    summary.write()


def _make_profiler(data: Data, context: RunContext, engine: Engine) -> Profiler:
    return Profiler(
        data.program.config.profile,
        Place(context.folders.run / "profile", process=context.cluster.index),
        drain=lambda: jax.block_until_ready(engine.state()),
        say=context.console.say,
        alive=context.watchdog.beat,
        on_trace_ready=context.caller.on_trace,
    )
