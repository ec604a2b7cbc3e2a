"""How the processes of one run find each other."""

import contextlib
import socket
import sys
from collections.abc import Iterator

import jax

from nnxtrain.config.distributed import DistributedConfig
from nnxtrain.errors import ConfigError, LostProcessError
from nnxtrain.host.cluster import Cluster, end_process
from nnxtrain.host.peers import PeerWatch
from nnxtrain.host.rendezvous import check_in


@contextlib.contextmanager
def joined(config: DistributedConfig) -> Iterator[Cluster]:
    """Meets the other processes of the run, if there are any, and parts from them when all are done.

    When something goes wrong here, this process ends at once, with the exit code of the error, and waits for nobody:
    the others, which would wait for it for good, find it lost.

    A process that never comes ends the others after `distributed.connect_timeout_s`.

    Raises:
        ConfigError: no cluster is found, or it does not say who takes part; the coordinator's port is taken, or a
            process number was given twice.
        LostProcessError: the processes did not meet.
    """
    if not config.is_joined:
        yield Cluster()
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    is_told = config.coordinator is not None
    who = f"process {config.process} of {config.processes} waits at {config.coordinator}" if is_told else "waiting"
    print(f"{who} for the others, at most {config.connect_timeout_s} s", file=sys.stderr, flush=True)
    peers: dict[int, socket.socket] = {}
    if config.coordinator is not None:
        peers = check_in(
            config.coordinator,
            processes=config.processes,
            process=config.process,
            timeout_s=config.connect_timeout_s,
        )
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.processes if is_told else None,
            config.process if is_told else None,
            cluster_detection_method=None if config.detect else "deactivate",
            initialization_timeout=config.connect_timeout_s,
            heartbeat_timeout_seconds=config.heartbeat_timeout_s,
        )
    except ValueError as error:
        raise ConfigError(f"distributed.detect={str(config.detect).lower()}: {str(error).splitlines()[0]}") from error
    except RuntimeError as error:
        raise LostProcessError(f"the processes did not meet: {str(error).splitlines()[0]}") from error
    cluster = Cluster()
    try:
        with PeerWatch(peers, timeout_s=config.heartbeat_timeout_s, lost=cluster.lose):
            yield cluster
    except BaseException as error:
        end_process(error)
    jax.distributed.shutdown()
