"""Processes that check in with process 0: what is wrong is said in one line, in time (N11)."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from nnxtrain.errors import ConfigError, LostProcessError, UserError
from nnxtrain.host.rendezvous import check_in


@pytest.fixture
def address():
    """Returns an address that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def meet(address: str, *processes: tuple[int, int], timeout_s: float = 20) -> list[UserError | None]:
    """Lets processes, each its number and what it takes for their number, check in at once; returns how each fared."""

    def come(process: tuple[int, int]) -> UserError | None:
        try:
            check_in(address, process=process[0], processes=process[1], timeout_s=timeout_s)
        except UserError as error:
            return error
        return None

    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(come, processes))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_go_on_when_all_are_there(address, size):
    """Whichever comes first; and the port is free again for jax's own service."""
    assert meet(address, *((number, size) for number in reversed(range(size)))) == [None] * size
    assert meet(address, *((number, size) for number in range(size))) == [None] * size


@pytest.mark.parametrize("where", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_port_that_is_taken_is_named(address, where):
    """Jax ends with a segmentation fault."""
    port = int(address.partition(":")[2])
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    with socket.create_server((where, port), family=family):
        (error,) = meet(address, (0, 2))
    assert isinstance(error, ConfigError)
    assert f"distributed.coordinator={address}" in str(error)
    assert "\n" not in str(error)


def test_another_program_at_the_address_is_named(address):
    """The processes other than 0 find it there, and must not wait for its good will."""
    place = ("127.0.0.1", int(address.partition(":")[2]))
    with socket.create_server(place) as other, ThreadPoolExecutor(1) as thread:
        found = thread.submit(meet, address, (1, 2))
        peer, _ = other.accept()
        peer.recv(100)
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        (error,) = found.result()
        peer.close()
    assert isinstance(error, LostProcessError)
    assert address in str(error)


@pytest.mark.parametrize("number", [1, 2])
def test_a_number_that_was_given_twice_is_named(address, number):
    """Jax aborts with pages of C++ frames; all processes end here, and say why."""
    errors = meet(address, (0, 4), (number, 4), (number, 4))
    assert all(isinstance(error, ConfigError) for error in errors)
    assert {str(error) for error in errors} == {f"distributed.process={number} was given to two processes of the run"}


def test_two_processes_that_say_0_are_refused(address):
    """The second one finds the port taken; the first one misses the number that it should have had."""
    errors = meet(address, (0, 2), (0, 2), timeout_s=1)
    assert {type(error) for error in errors} == {ConfigError, LostProcessError}
    assert any("process 1 of 2 did not come" in str(error) for error in errors)


def test_processes_that_count_differently_are_refused(address):
    """Each would wait for others than the other one."""
    errors = meet(address, (0, 2), (1, 3))
    assert [type(error) for error in errors] == [ConfigError, LostProcessError]
    assert all("distributed.processes=3" in str(error) for error in errors)


def test_processes_that_do_not_come_are_named_in_time(address):
    """A coordinator that waits for ever holds a whole allocation."""
    first, second = meet(address, (0, 4), (2, 4), timeout_s=1)
    assert isinstance(first, LostProcessError)
    assert "processes 1, 3 of 4 did not come" in str(first)
    assert isinstance(second, LostProcessError)
    (alone,) = meet(address, (1, 2), timeout_s=1)
    assert isinstance(alone, LostProcessError)
    assert f"process 1 of 2 did not meet process 0 at {address} within 1 s" in str(alone)


def test_a_process_that_leaves_and_comes_again_is_no_duplicate(address):
    """Schedulers restart a process that failed before the others were there."""
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(meet, address, (0, 3))
        host, _, port = address.partition(":")
        for _ in range(3):
            while True:
                try:
                    peer = socket.create_connection((host, int(port)))
                    break
                except OSError:
                    continue
            peer.sendall(b"nnxtrain 1 3")
            peer.close()
        assert meet(address, (1, 3), (2, 3)) == [None, None]
        assert first.result() == [None]
