"""What is saved, and what a second start does."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saved weights under `checkpoints/STEP/`."""

    enabled: bool = key(True, "save the weights at the end of the run")
    every_steps: int = key(0, "steps between two saves; 0 = at the end only", planned=True)
    keep_last: int = key(2, "newest checkpoints that are kept", planned=True)
    background: bool = key(True, "write while the loop goes on", planned=True)
    resume: str = key(
        "auto", "a directory that was used before: say that it is finished, or refuse it", choices=("auto", "never")
    )
    init_from: str | None = key(None, "run directory whose weights the run starts from", planned=True)
