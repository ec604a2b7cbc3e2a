"""Stop signals: the first asks the run to end in good order, the second ends the process at once."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from nnxtrain.errors import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Listens for SIGTERM, SIGINT and SIGHUP while it is entered.

    Python's own handlers do not run while the main thread is inside XLA, so a thread of its own reads the signals from
    the wake-up socket, which the C part of the interpreter writes at once.
    """

    def __init__(self, *, say: Callable[[str], None], leave: Callable[[int], None]):
        """Does nothing yet.

        Args:
            say: tells people.
            leave: called with the exit code before the process ends at once; writes what the run's end is to say.
        """
        self._say = say
        self._leave = leave
        self._asked = threading.Event()
        self._nothing_to_save = threading.Event()
        self._nothing_to_save.set()

    @property
    def asked(self) -> bool:
        """Whether a signal asked the run to stop."""
        return self._asked.is_set()

    def guard_unsaved(self) -> None:
        """From now on a first signal waits for the run to save what it has."""
        self._nothing_to_save.clear()

    def __enter__(self) -> "StopSignals":
        self._listens = threading.current_thread() is threading.main_thread()
        if not self._listens:
            return self  # signals are those of whoever started the thread
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # `nohup` ignores SIGHUP
        self._before = {number: signal.signal(number, _pass) for number in heard}
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stop-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._listens:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()

    def _watch(self) -> None:
        while received := self._reader.recv(1):
            number = received[0]
            if number not in SIGNALS:
                continue
            name = signal.Signals(number).name
            if self.asked:
                self._end(128 + number)
            self._asked.set()
            if self._nothing_to_save.is_set():
                self._say(f"{name}: nothing to save; exiting")
                self._end(STOPPED)
            self._say(f"{name}: the run ends after this step and saves; a second signal ends it at once")
        self._reader.close()

    def _end(self, code: int) -> NoReturn:
        try:
            self._leave(code)
        finally:
            os._exit(code)


def _pass(number: int, frame: FrameType | None) -> None:
    """Leaves the signal to the thread."""
