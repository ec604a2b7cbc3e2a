"""One run from start to end: its directory, its parts, its training, and what is said at the end."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from nnxtrain.build.feed import Data, open_data
from nnxtrain.build.program import make_program
from nnxtrain.build.registry import BUILT_IN, Registry
from nnxtrain.config.schema import Config
from nnxtrain.host.cluster import Cluster
from nnxtrain.host.compilation_cache import use_compilation_cache
from nnxtrain.host.console import Console
from nnxtrain.host.join import joined
from nnxtrain.profiling.session import OnTrace
from nnxtrain.run.context import Caller, RunContext, command_to_go_on, make_context
from nnxtrain.run.directory import locked
from nnxtrain.run.parts import open_run
from nnxtrain.run.training import Training


def execute(
    config: Config,
    folder: Path,
    *,
    began: float,
    registry: Registry = BUILT_IN,
    on_trace_ready: OnTrace = None,
    command: Sequence[str] | None = None,
) -> int:
    """Runs `config` in `folder`; returns the exit code.

    Args:
        config: of the run.
        folder: run directory; made here, once everything that was asked for is known to be possible.
        began: `time.monotonic()` at the start of the process.
        registry: what the names in `config` are looked up in.
        on_trace_ready: gets each trace after it was written; what it raises is said and ends nothing.
        command: words of the command line, shown again where it takes a stopped run further.

    Raises:
        UserError: what a user can cause; the summary says it too.
    """
    caller = Caller(began, command, on_trace_ready)
    with joined(config.distributed) as cluster:
        return _execute(config, folder, cluster, registry=registry, caller=caller)


def _execute(config: Config, folder: Path, cluster: Cluster, *, registry: Registry, caller: Caller) -> int:
    console = Console("quiet" if cluster.index else config.log.progress)
    package = logging.getLogger("nnxtrain")
    level = package.level
    package.addHandler(console)
    package.setLevel(logging.INFO)
    try:
        program = make_program(config, registry=registry)
        _ = program.saved  # refuses what aot.load names before anything is written
        use_compilation_cache(config)
        data = open_data(program)
        with cluster.folders(folder) as folders, locked(folders.own):
            return _train(data, make_context(config, folders=folders, cluster=cluster, console=console, caller=caller))
    finally:
        package.removeHandler(console)
        package.setLevel(level)
        console.close()


def _train(data: Data, context: RunContext) -> int:
    """Opens the parts and trains; whatever happens, summary and report say it."""
    summary, cluster, say = context.summary, context.cluster, context.console.say
    cluster.leave = summary.leave
    with summary.written_on_exit(), context.signals, context.watchdog, cluster.losses_named():
        if cluster.size > 1:
            context.signals.guard_unsaved()  # none ends alone: the others would wait for it
        with ExitStack() as stack:
            code = Training(open_run(data, context, stack), context).run()
            summary |= {"status": "preempted" if code else "done", "exit_code": code}
    if code:
        say(f"stopped  after step {summary['step']}; to go on:")
        say(f"         {command_to_go_on(data.program.config, context.folders.run, context.caller.command)}")
    else:
        say(f"done     {context.folders.own}/report.html")
    return code
