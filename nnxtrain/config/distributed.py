"""Several processes."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Who takes part in a run of several processes."""

    coordinator: str | None = key(None, "HOST:PORT of process 0", planned=True)
    processes: int = key(1, "processes of the run", planned=True)
    process: int = key(0, "number of this process", planned=True)
