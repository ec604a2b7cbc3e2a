"""Watches the other processes of a run over the connections of their check-in, and says which one is lost.

Jax notices a lost process too, but from some version on it then aborts those that are left, without an exception: no
summary would say what happened.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

ALIVE, DONE = b".", b"!"  # lines of a process; any other line says which one is lost
SHARE = 0.9  # of the time after which jax ends this process


class PeerWatch:
    """Shows the others that this process is alive, and finds those that are not, while it is entered."""

    def __init__(self, peers: Mapping[int, socket.socket], *, timeout_s: float, lost: Callable[[str], None]):
        """Does nothing yet.

        Args:
            peers: connections by number of the process: process 0 has one to each, the others have one to process 0.
            timeout_s: seconds without a sign of life after which a process is lost.
            lost: called in a thread, once, with what happened.
        """
        self._peers = dict(peers)
        self._timeout_s = timeout_s
        self._lost = lost
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._rest = dict.fromkeys(peers, b"")
        self._is_done = False

    def __enter__(self) -> "PeerWatch":
        now = time.monotonic()
        self._heard = dict.fromkeys(self._peers, now)
        if self._peers:
            threading.Thread(target=self._watch, name="peer-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # a process that an error ends closes its connections, and is lost for the others
            self._is_done = True
            self._tell(DONE)

    def _watch(self) -> None:
        pause_s, last = self._timeout_s / 8, 0.0
        with selectors.DefaultSelector() as selector:
            for number, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, number)
            while self._peers and not self._is_done:
                if (now := time.monotonic()) - last >= pause_s:
                    last = now
                    self._tell(ALIVE)
                for key, _ in selector.select(pause_s):
                    if (what := self._hear(key.data)) is not None and not self._is_done:
                        return self._end(what)
                    if key.data not in self._peers:
                        selector.unregister(key.fileobj)
                for number in self._peers:
                    if time.monotonic() - self._heard[number] > SHARE * self._timeout_s and not self._is_done:
                        what = f"process {number} of the run gave no sign of life for {SHARE * self._timeout_s:g} s"
                        return self._end(what)
        return None

    def _hear(self, number: int) -> str | None:
        """Takes what a process says; returns what is lost, if anything is."""
        try:
            data = self._peers[number].recv(1024)
        except OSError:
            data = b""
        if not data:
            return f"process {number} of the run was lost: its connection is closed"
        self._heard[number] = time.monotonic()
        *lines, self._rest[number] = (self._rest[number] + data).split(b"\n")
        for line in lines:
            if line == DONE:
                del self._peers[number]
                return None
            if line != ALIVE:
                return line.decode(errors="replace")
        return None

    def _end(self, what: str) -> None:
        self._tell(what.encode())
        self._lost(what)

    def _tell(self, line: bytes) -> None:
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):
                peer.sendall(line + b"\n")
