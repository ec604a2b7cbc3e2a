"""How many tokens feed one step."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import Problem, key
from nnxtrain.config.reads import when


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch of one step and how it is cut into microbatches."""

    global_size: int = key(8, "sequences per step, all devices together", span="[1, 16777216]")
    accum_steps: int = key(1, "microbatches per step, one after another", span="[1, 1048576]")
    sequence: int = key(512, "tokens per sequence", span="[2, 67108864]")
    accumulator: str = key(
        "auto",
        "how microbatches are summed; auto = one_pass for a single one, else scan",
        choices=("auto", "one_pass", "scan"),
        read=when("engine.name", "single").mildly(),
    )

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and what would be right."""
        return self._rows(), self._accumulator()

    def _rows(self) -> Iterator[Problem]:
        if short := -self.global_size % self.accum_steps:
            rule = f"{self.global_size} must be a multiple of batch.accum_steps={self.accum_steps}"
            yield "batch.global_size", f"{rule}; the next that fits is {self.global_size + short}"

    def _accumulator(self) -> Iterator[Problem]:
        if self.accumulator == "one_pass" and self.accum_steps > 1:
            yield (
                "batch.accumulator",
                f"one_pass takes one microbatch, not batch.accum_steps={self.accum_steps}; use scan",
            )

    @property
    def microbatch(self) -> int:
        """Sequences that one forward pass sees, all devices together."""
        return self.global_size // self.accum_steps
