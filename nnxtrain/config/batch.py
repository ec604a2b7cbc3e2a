"""The size of a batch."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import Problem, key
from nnxtrain.config.reads import when


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch of one step and how it is split into microbatches."""

    global_size: int = key(8, "sequences per step, over all devices", span="[1, 16777216]")
    accum_steps: int = key(1, "microbatches per step, one after another", span="[1, 1048576]")
    sequence: int = key(512, "tokens per sequence", span="[2, 67108864]")
    accumulator: str = key(
        "auto",
        "how gradients of microbatches are accumulated; auto = one_pass for one microbatch, else scan",
        choices=("auto", "one_pass", "scan"),
        read=when("engine.name", "single").only_noted(),
    )

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and how to fix it."""
        return self._rows(), self._accumulator()

    def _rows(self) -> Iterator[Problem]:
        if short := -self.global_size % self.accum_steps:
            rule = f"{self.global_size} must be a multiple of batch.accum_steps={self.accum_steps}"
            yield "batch.global_size", f"{rule}; the next valid value is {self.global_size + short}"

    def _accumulator(self) -> Iterator[Problem]:
        if self.accumulator == "one_pass" and self.accum_steps > 1:
            yield (
                "batch.accumulator",
                f"one_pass takes one microbatch, not batch.accum_steps={self.accum_steps}; use scan",
            )

    @property
    def microbatch(self) -> int:
        """Sequences in one forward pass, over all devices."""
        return self.global_size // self.accum_steps
