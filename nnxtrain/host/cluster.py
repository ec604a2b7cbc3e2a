"""What the processes of one run agree on, and how they end when one is lost."""

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nnxtrain.errors import LostProcessError, UserError

CHECKPOINTS = "checkpoints"
LOSSES = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "coordination service", "heartbeat", "closed by peer")


class Folders(NamedTuple):
    """Where a process writes.

    Attributes:
        own: what one process alone may write: rows, samples, summary, report.
        run: the run directory, where each process has files under names of its own: traces, stacks of a hang.
    """

    own: Path
    run: Path


class Cluster:
    """What this process knows of all processes of the run; a single process needs no agreement.

    Attributes:
        size: number of processes.
        index: of this one; process 0 writes the run directory.
        leave: writes what the run's end is to say, given exit code and reason, before a lost process ends this one.
    """

    def __init__(self) -> None:
        is_joined = jax.distributed.is_initialized()  # by us, or by whoever started this process
        self.size = jax.process_count() if is_joined else 1
        self.index = jax.process_index() if is_joined else 0
        self.leave: Callable[[int, str], None] = lambda code, reason: None
        self._clock = 0.0
        self._asked: jax.Array | None = None
        if self.size > 1:
            # On all devices: on CPU, programs of several devices of a process wait for one another, but one of a single
            # device runs beside them, and what both send to another process at a time is mixed up there.
            mesh = Mesh(np.array(jax.devices()), "device", axis_types=(AxisType.Auto,))
            self._own = NamedSharding(mesh, PartitionSpec("device"))
            self._began = time.monotonic()
            self._largest = jax.jit(lambda x: x.max(0), out_shardings=NamedSharding(mesh, PartitionSpec()))

    @contextlib.contextmanager
    def losses_named(self) -> Iterator[None]:
        """Raises LostProcessError where jax says in its own words that another process is gone."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # a new array of a failed one is a ValueError
            if self.size == 1 or not any(word in str(error) for word in LOSSES):
                raise
            what = str(error).splitlines()[0][:200]
            raise LostProcessError(f"another process of the run was lost: {what}") from error

    def lose(self, what: str) -> None:
        """Ends this process, from whichever thread it is called, because another one is lost."""
        error = LostProcessError(what)
        try:
            self.leave(error.exit_code, what)
        finally:
            end_process(error)

    @contextlib.contextmanager
    def folders(self, whole: Path) -> Iterator["Folders"]:
        """Gives the folders of this process: process 0 writes the run directory, others one that is gone at the end.

        So all processes do the same, and none has to ask which one it is. Checkpoints are those of the run for all.
        """
        if self.index == 0:
            yield Folders(whole, whole)
            return
        with tempfile.TemporaryDirectory(prefix="nnxtrain-") as scratch:
            own = Path(scratch) / whole.name
            own.mkdir()
            (own / CHECKPOINTS).symlink_to((whole / CHECKPOINTS).absolute())
            yield Folders(own, whole)

    def any_asks(self, asks: bool) -> bool:
        """Tells whether any process asked, as of the call before this one; all processes call this equally often.

        The answer travels to the device and back beside the steps, so nobody waits for it.
        """
        if self.size == 1:
            return asks
        before = self._asked
        own = np.array([[asks, time.monotonic() - self._began]], np.float32)
        shape = (self._own.mesh.size, 2)
        self._asked = self._largest(jax.make_array_from_callback(shape, self._own, lambda _: own))
        if before is None:
            return False
        asked, self._clock = np.asarray(before).tolist()
        return asked > 0

    def now(self) -> float:
        """Returns seconds on a clock that all processes read alike: it stands between two calls of `any_asks`."""
        return time.monotonic() if self.size == 1 else self._clock

    def of_first(self, values: list[Any]) -> list[Any]:
        """Returns the values, numbers or None, that process 0 has; all processes wait for it."""
        if self.size == 1:
            return values
        numbers = np.array([np.nan if value is None else value for value in values], np.float32)
        told = np.asarray(multihost_utils.broadcast_one_to_all(numbers)).tolist()
        return [None if np.isnan(value) else value for value in told]


def end_process(error: BaseException) -> NoReturn:
    """Ends this process at once because of an error, with its exit code, and waits for nobody."""
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, UserError) else 1)
