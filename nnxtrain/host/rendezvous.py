"""The processes of a run check in with process 0 before jax connects them, so that what is wrong can be said.

Jax itself ends a process without an exception where the address is taken, or where two processes say the same number.
The check-in uses the coordinator's own address and lasts until jax's service takes it over.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator

from nnxtrain.errors import ConfigError, LostProcessError

GREETING = b"nnxtrain"
GO_ON = b"go on"
LONGEST = 1024  # bytes of a message
PAUSE_S = 0.2  # between two attempts to connect


def check_in(address: str, *, processes: int, process: int, timeout_s: float) -> dict[int, socket.socket]:
    """Returns when each process of the run is there once: the connections to the others, by their numbers.

    Process 0 has one to each, the others have one to process 0; they stay open beside jax's service on the same port.

    Args:
        address: `HOST:PORT` of process 0.
        processes: of the run.
        process: number of this one.
        timeout_s: seconds to wait for the others.

    Raises:
        ConfigError: the port is taken, or a number was given twice.
        LostProcessError: a process did not come, or something else answers at the address.
    """
    deadline = time.monotonic() + timeout_s
    if process == 0:
        return _Desk(address, processes=processes, deadline=deadline, timeout_s=timeout_s).wait()
    return {0: _report(address, processes=processes, process=process, deadline=deadline, timeout_s=timeout_s)}


class _Desk:
    """Where process 0 waits for the others."""

    def __init__(self, address: str, *, processes: int, deadline: float, timeout_s: float):
        self._address = address
        self._processes = processes
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._here: dict[int, socket.socket] = {}

    def wait(self) -> dict[int, socket.socket]:
        """Returns the connections by number when every process has come; tells each of them, or why not."""
        with self._listening() as server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            try:
                while len(self._here) < self._processes - 1:
                    if not (events := selector.select(max(0.0, self._deadline - time.monotonic()))):
                        raise LostProcessError(self._missing())
                    for key, _ in events:
                        if key.fileobj is server:
                            selector.register(server.accept()[0], selectors.EVENT_READ)
                        else:
                            self._hear(key.fileobj, selector)  # type: ignore[arg-type]
                self._tell(GO_ON)
            except (ConfigError, LostProcessError) as error:
                self._tell(str(error).encode())
                raise
        return self._here

    @contextlib.contextmanager
    def _listening(self) -> Iterator[socket.socket]:
        port = int(self._address.rpartition(":")[2])
        both = socket.has_dualstack_ipv6()
        try:
            family = socket.AF_INET6 if both else socket.AF_INET
            server = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=self._processes)
        except OSError as error:
            why = "another program listens there, or a process of this or another run that is number 0 too"
            message = f"distributed.coordinator={self._address}: port {port} cannot be opened ({error.strerror}); {why}"
            raise ConfigError(message) from error
        with server:
            yield server

    def _hear(self, peer: socket.socket, selector: selectors.BaseSelector) -> None:
        """Takes what a peer says; one that says nothing of this kind, or leaves, is forgotten."""
        words = _received(peer).split()
        if len(words) != 3 or words[0] != GREETING or not all(word.isdigit() for word in words[1:]):
            selector.unregister(peer)
            self._here = {number: each for number, each in self._here.items() if each is not peer}
            peer.close()
            return
        number, processes = int(words[1]), int(words[2])
        if processes != self._processes:
            what = f"process {number} says distributed.processes={processes}, and process 0 says {self._processes}"
            self._here[number] = peer
            raise ConfigError(what)
        if number in self._here:
            _send(peer, f"distributed.process={number} was given to two processes of the run".encode())
            raise ConfigError(f"distributed.process={number} was given to two processes of the run")
        self._here[number] = peer

    def _tell(self, message: bytes) -> None:
        for peer in self._here.values():
            _send(peer, message)

    def _missing(self) -> str:
        missing = [str(number) for number in range(1, self._processes) if number not in self._here]
        who = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing[:9])}"
        return f"{who} of {self._processes} did not come to {self._address} within {self._timeout_s:g} s"


def _report(address: str, *, processes: int, process: int, deadline: float, timeout_s: float) -> socket.socket:
    """Says to process 0 that this one is there; returns the connection when all are."""
    host, _, port = address.rpartition(":")
    late = f"process {process} of {processes} did not meet process 0 at {address} within {timeout_s:g} s"
    while (left := deadline - time.monotonic()) > 0:
        try:
            peer = socket.create_connection((host.strip("[]"), int(port)), timeout=left)
            peer.sendall(b"%s %d %d" % (GREETING, process, processes))
            answer = _received(peer)
        except TimeoutError as error:
            raise LostProcessError(late) from error
        except OSError:  # process 0 is not there yet
            time.sleep(min(PAUSE_S, left))
            continue
        if answer.startswith(GO_ON):
            peer.settimeout(None)
            return peer
        peer.close()
        if not answer:  # it left before it said anything
            time.sleep(min(PAUSE_S, left))
            continue
        text = answer.decode(errors="replace")
        if text.startswith("distributed."):
            raise ConfigError(text)
        known = text.startswith("process")
        raise LostProcessError(text if known else f"what answers at {address} is no process 0 of this run")
    raise LostProcessError(late)


def _received(peer: socket.socket) -> bytes:
    """Returns what a peer sends next; nothing if it has left."""
    try:
        return peer.recv(LONGEST)
    except TimeoutError:
        raise
    except OSError:
        return b""


def _send(peer: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):
        peer.sendall(message)
