"""What a run writes of its steps: `metrics.jsonl`, TensorBoard, the console's progress, the figures of the summary."""

import json
import math
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tensorboardX import SummaryWriter

from nnxtrain.errors import NonFiniteError
from nnxtrain.evaluation import Evaluation
from nnxtrain.loop import StepRecord
from nnxtrain.run.console import Console, duration

RECENT = 32  # steps that the time left is reckoned from


class Scale(NamedTuple):
    """What turns counts into rates and shares.

    Attributes:
        steps: of the whole run.
        flops_per_token: of one training step.
        peak_flops: FLOP/s of all devices together, or None where it is not known.
        epochs_after: `steps done -> passes over the corpus`.
    """

    steps: int
    flops_per_token: float
    peak_flops: float | None
    epochs_after: Callable[[int], float]


class Recorder:
    """Takes finished steps and evaluations, in order, and writes them wherever they are read."""

    def __init__(self, folder: Path, console: Console, *, scale: Scale, log_every: int, tensorboard: bool):
        self._file = (folder / "metrics.jsonl").open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), write_to_disk=tensorboard)
        self._console = console
        self._scale = scale
        self._log_every = log_every
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.rows: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.step_times_s: list[float] = []
        self.skipped_steps = 0

    def train(self, record: StepRecord) -> None:
        """Writes a training step.

        Raises:
            NonFiniteError: its loss or gradients are not finite; the row is written first.
        """
        values = dict(record.metrics)
        finite, skipped = values.pop("finite"), values.pop("skipped")
        rate = values["tokens"] / record.step_time_s
        peak = self._scale.peak_flops
        row = {
            "kind": "train",
            "step": record.step,
            **values,
            "step_time_s": record.step_time_s,
            "data_wait_s": record.data_wait_s,
            "tokens_per_s": rate,
            "mfu": rate * self._scale.flops_per_token / peak if peak else None,
            "epoch": self._scale.epochs_after(record.step),
        }
        if skipped:
            row["skipped"] = True
            self.skipped_steps += 1
        self.rows.append(row)
        self.step_times_s.append(record.step_time_s)
        self._recent.append(record.step_time_s)
        self._write(row, to_board=record.step % self._log_every == 0 or record.step == self._scale.steps)
        self._show(row)
        if not finite:
            what = f"loss={values['loss']}, grad_norm={values['grad_norm']}"
            cure = "the weights were left as they were; try a lower optimizer.learning_rate or optimizer.clip_norm"
            raise NonFiniteError(f"step {record.step}: loss or gradients are not finite ({what}); {cure}")

    def evaluation(self, step: int, name: str, result: Evaluation) -> None:
        """Writes the evaluation of one set after `step` steps."""
        row = {"kind": "eval", "step": step, "name": name, **result._asdict()}
        self.evaluations.append(row)
        self._write(row, to_board=True)
        bits = "" if result.bits_per_byte is None else f"  bits/byte {result.bits_per_byte:.4f}"
        line = f"loss {result.loss:.4f}  perplexity {result.perplexity:.3f}{bits}"
        self._console.say(f"eval {name}: {line}  ({result.targets:,} targets)")

    def close(self) -> None:
        """Brings everything to disk."""
        self._file.close()
        self._board.close()

    def _write(self, row: dict[str, Any], *, to_board: bool) -> None:
        self._file.write(json.dumps({name: _finite(value) for name, value in row.items()}) + "\n")
        self._file.flush()
        if to_board:
            group = row.get("name", "train") if row["kind"] == "eval" else "train"
            numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
            for name, value in numbers.items():
                self._board.add_scalar(f"{group}/{name}", value, row["step"])
            self._board.flush()

    def _show(self, row: dict[str, Any]) -> None:
        step, total = row["step"], self._scale.steps
        mfu = "" if row["mfu"] is None else f"  MFU {100 * row['mfu']:.1f} %"
        left = duration((total - step) * statistics.median(self._recent))
        line = (
            f"loss {row['loss']:.4f}  lr {row['learning_rate']:.2e}  grad {row['grad_norm']:.2f}  "
            f"{row['tokens_per_s']:,.0f} tok/s{mfu}  {left} left"
        )
        self._console.progress(step, total, line, due=step % self._log_every == 0 or step in (1, total))


def _finite(value: Any) -> Any:
    """Returns `value`, or None for numbers that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
