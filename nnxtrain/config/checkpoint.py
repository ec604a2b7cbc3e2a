"""When to save, what to keep, and what to do when a run is started again."""

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

    enabled: bool = key(True, "save at the end of the run, and as often as every_steps and every_minutes say")
    every_steps: int = key(0, "save every so many steps; 0 = at the end only", span="[0, inf)", read=ENABLED)
    every_minutes: float | None = key(
        None, "save every so many minutes; null = by steps alone", span="[0, 1000000]", read=ENABLED
    )
    keep_last: int = key(2, "how many of the newest checkpoints are kept", span="[1, inf)", read=ENABLED)
    keep_every: int = key(
        0, "checkpoints at multiples of this step are never deleted; 0 = none", span="[0, inf)", read=ENABLED
    )
    keep_best: str | None = key(
        None, "held-out set; the checkpoint with the lowest loss on it is never deleted; null = none", read=ENABLED
    )
    background: bool = key(True, "write checkpoints asynchronously, while training continues", read=ENABLED)
    resume: str = key(
        "auto",
        "auto = resume if there is a checkpoint, must = refuse to start without one, "
        "never = refuse a used directory, STEP = resume from that step",
    )
    init_from: str | None = key(None, "run directory whose newest weights (not their averages) a new run starts from")
    init_include: tuple[str, ...] = key(
        ("*",), "patterns of the parameter paths to read from init_from", read=when("checkpoint.init_from")
    )
    init_exclude: tuple[str, ...] = key(
        (), "patterns of the parameter paths not to read from init_from", read=when("checkpoint.init_from")
    )
    ocdbt: bool = key(True, "write OCDBT: few files for many arrays", read=ENABLED)
    zarr3: bool = key(False, "write arrays as zarr version 3", read=ENABLED)

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and how to fix it."""
        return (self._resume(),)

    def _resume(self) -> Iterator[Problem]:
        is_step = self.resume.isascii() and self.resume.isdecimal() and len(self.resume) <= LONGEST_STEP
        if self.resume not in ("auto", "must", "never") and not is_step:
            yield "checkpoint.resume", f"'{echo(self.resume)}' is not auto, must, never, or the step of a checkpoint"
