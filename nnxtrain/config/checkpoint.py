"""What is saved, and what a second start does."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of the whole state under `checkpoints/STEP/`."""

    enabled: bool = key(True, "save at the end of the run, and as often as the keys below say")
    every_steps: int = key(0, "steps between two saves; 0 = at the end only", span="[0, inf)")
    every_minutes: float | None = key(None, "minutes between two saves; null = by steps alone", span="[0, inf)")
    keep_last: int = key(2, "newest checkpoints that are kept", span="[1, inf)")
    keep_every: int = key(0, "keep those of steps that are multiples of this for good; 0 = none", span="[0, inf)")
    keep_best: str | None = key(None, "held-out set whose lowest loss is kept for good; null = none")
    background: bool = key(True, "write while the loop goes on")
    resume: str = key(
        "auto", "a used directory: auto = go on if it can, never = refuse, must = go on, STEP = from there each time"
    )
    init_from: str | None = key(None, "run directory whose newest weights, as trained, a fresh run starts from")
    init_include: tuple[str, ...] = key(("*",), "patterns of the parameter paths that init_from reads")
    init_exclude: tuple[str, ...] = key((), "patterns of the parameter paths that init_from leaves alone")
    ocdbt: bool = key(True, "few files for many arrays")
    zarr3: bool = key(False, "zarr version 3 for the arrays")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields `(key, what is wrong and what would be right)`."""
        if self.resume not in ("auto", "must", "never") and not self.resume.isdecimal():
            yield "checkpoint.resume", f"{self.resume!r} is not auto, must, never, or the step of a checkpoint"
