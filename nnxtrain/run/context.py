"""What surrounds a run: its folders, the console, its summary, the signals and the other processes."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nnxtrain.config.schema import Config
from nnxtrain.host.cluster import Cluster, Folders
from nnxtrain.host.console import Console
from nnxtrain.host.signals import StopSignals
from nnxtrain.host.watchdog import Watchdog
from nnxtrain.profiling.session import OnTrace
from nnxtrain.run.summary import Summary


class Caller(NamedTuple):
    """What whoever starts a run says of itself.

    Attributes:
        began: `time.monotonic()` at the start of the process.
        command: words that started the run, or None where no command line did.
        on_trace: gets each trace after it was written, or None.
    """

    began: float
    command: Sequence[str] | None
    on_trace: OnTrace


@dataclass(frozen=True)
class RunContext:
    """The surroundings of one run, which last from before its first step until after its last."""

    folders: Folders
    cluster: Cluster
    console: Console
    caller: Caller
    summary: Summary
    signals: StopSignals
    watchdog: Watchdog


def make_context(config: Config, *, folders: Folders, cluster: Cluster, console: Console, caller: Caller) -> RunContext:
    """Returns the surroundings of a run; nothing listens or watches yet."""
    summary = Summary(folders.own)
    signals = StopSignals(say=console.say, leave=summary.leave)
    watchdog = Watchdog(
        config.debug.hang_timeout_s,
        folder=folders.run,
        name=f"stacks_of_{cluster.index}" if cluster.index else "stacks",
        say=console.say,
        leave=summary.leave if config.debug.hang_abort else None,
    )
    return RunContext(folders, cluster, console, caller, summary, signals, watchdog)


def command_to_go_on(config: Config, folder: Path, words: Sequence[str] | None) -> str:
    """Returns the command line that takes a stopped run further.

    Args:
        config: of the run.
        folder: its directory.
        words: of the command line that started it, or None where no command line did.
    """
    if words is None:
        words = (Path(sys.executable).name, "-m", "nnxtrain.train", str(folder / "config.yml"))
    is_safe = config.checkpoint.resume in ("auto", "must")
    return shlex.join([*words, *([] if is_safe else ["checkpoint.resume=auto"])])  # a step would be gone back to again
