"""What is saved, and what a second start does."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.echo import echo
from nnxtrain.config.key import Problem, key
from nnxtrain.config.reads import when

LONGEST_STEP = 10  # digits
ENABLED = when("checkpoint.enabled", True)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of the whole state under `checkpoints/STEP/`."""

    enabled: bool = key(True, "save at the end of the run, and as often as the keys below say")
    every_steps: int = key(0, "steps between two saves; 0 = at the end only", span="[0, inf)", read=ENABLED)
    every_minutes: float | None = key(
        None, "minutes between two saves; null = by steps alone", span="[0, 1000000]", read=ENABLED
    )
    keep_last: int = key(2, "newest checkpoints that are kept", span="[1, inf)", read=ENABLED)
    keep_every: int = key(
        0, "keep those of steps that are multiples of this for good; 0 = none", span="[0, inf)", read=ENABLED
    )
    keep_best: str | None = key(None, "held-out set whose lowest loss is kept for good; null = none", read=ENABLED)
    background: bool = key(True, "write while the loop goes on", read=ENABLED)
    resume: str = key(
        "auto", "a used directory: auto = go on if it can, never = refuse, must = go on, STEP = from there each time"
    )
    init_from: str | None = key(None, "run directory whose newest weights, as trained, a fresh run starts from")
    init_include: tuple[str, ...] = key(
        ("*",), "patterns of the parameter paths that init_from reads", read=when("checkpoint.init_from")
    )
    init_exclude: tuple[str, ...] = key(
        (), "patterns of the parameter paths that init_from leaves alone", read=when("checkpoint.init_from")
    )
    ocdbt: bool = key(True, "few files for many arrays", read=ENABLED)
    zarr3: bool = key(False, "zarr version 3 for the arrays", read=ENABLED)

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and what would be right."""
        return (self._resume(),)

    def _resume(self) -> Iterator[Problem]:
        is_step = self.resume.isascii() and self.resume.isdecimal() and len(self.resume) <= LONGEST_STEP
        if self.resume not in ("auto", "must", "never") and not is_step:
            yield "checkpoint.resume", f"'{echo(self.resume)}' is not auto, must, never, or the step of a checkpoint"
