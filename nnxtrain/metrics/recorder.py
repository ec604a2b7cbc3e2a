"""What a run writes of its steps: `metrics.jsonl`, TensorBoard, the console's progress, the figures of the summary."""

import json
import math
import statistics
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nnxtrain.config.log import LogConfig
from nnxtrain.errors import NonFiniteError
from nnxtrain.host.console import Console
from nnxtrain.host.text import duration
from nnxtrain.loops.eval_loop import Evaluation
from nnxtrain.loops.train_loop import StepRecord
from nnxtrain.metrics.rewind import rewind
from nnxtrain.metrics.writers import BoardWriter, RowWriter

KEPT = ("step", "loss", "learning_rate", "grad_norm", "tokens_per_s")  # of each step, 8 bytes each: runs are long
RECENT = 32  # steps that the time left is reckoned from
TIMES = ("step_time_s", "data_wait_s", "tokens_per_s", "mfu")  # of a step; those of a traced one say nothing of others


class Scale(NamedTuple):
    """What turns counts into rates and shares.

    Attributes:
        steps: of the whole run.
        flops_per_token: of one training step.
        peak_flops: FLOP/s of all devices together, or None where it is not known.
        epochs: `position of the data -> passes over the corpus`.
    """

    steps: int
    flops_per_token: float
    peak_flops: float | None
    epochs: Callable[[Any], float]


class Recorder:
    """Takes finished steps and evaluations, in order, and writes them wherever they are read.

    Attributes:
        steps: field → its value at each training step, also at those before the run was restored.
        skipped: how many of these left their update out.
        own_times: seconds of the steps that this process took, traced ones left out.
        own_tokens: tokens of these.
        evaluations: rows of all evaluations.
    """

    def __init__(self, folder: Path, console: Console, *, scale: Scale, log: LogConfig):
        self._folder = folder
        self._console = console
        self._scale = scale
        self._log = log
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.own_times = array("d")
        self.own_tokens = 0
        self._open()

    def train(self, record: StepRecord, *, profiled: bool = False) -> None:
        """Writes a training step.

        Args:
            record: the step.
            profiled: a tracer was on, which takes time: the row says so, and no rate or time left is reckoned from it.

        Raises:
            NonFiniteError: the step holds the run; its row is written first.
            OSError: the row does not fit on the disk; it is among those that `unwritten` returns.
        """
        values = dict(record.metrics)
        bad, skipped = values.pop("bad"), values.pop("skipped")
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
            "epoch": self._scale.epochs(record.position),
        }
        if skipped:
            row["skipped"] = True
        if profiled:
            row["profiled"] = True
        else:
            self._recent.append(record.step_time_s)
            self.own_times.append(record.step_time_s)
            self.own_tokens += values["tokens"]
        self._keep(row)
        self._write(row, to_board=record.step % self._log.every_steps == 0 or record.step == self._scale.steps)
        self._show(row)
        if bad:
            raise NonFiniteError(_complaint(row))

    def evaluation(self, step: int, name: str, result: Evaluation) -> None:
        """Writes the evaluation of one set after `step` steps."""
        row = {"kind": "eval", "step": step, "name": name, **result._asdict()}
        self.evaluations.append(row)
        self._write(row, to_board=True)
        bits = "" if result.bits_per_byte is None else f"  bits/byte {result.bits_per_byte:.4f}"
        line = f"loss {result.loss:.4f}  perplexity {result.perplexity:.3f}{bits}"
        self._console.say(f"eval {name}: {line}  ({result.targets:,} targets)")

    def evaluated(self, step: int) -> set[str]:
        """Returns the held-out sets that the model was evaluated on after `step` steps."""
        return {row["name"] for row in self.evaluations if row["step"] == step}

    def loss_of(self, name: str | None, step: int) -> float | None:
        """Returns the loss of a held-out set after `step` steps, or None if it was not evaluated then."""
        return next((row["loss"] for row in self.evaluations if (row["name"], row["step"]) == (name, step)), None)

    def latest(self) -> dict[str, dict[str, Any]]:
        """Returns the newest evaluation of each held-out set by name, with its step."""
        rows = {row["name"]: row for row in self.evaluations}  # they are in order
        return {name: {key: row[key] for key in row if key not in ("kind", "name")} for name, row in rows.items()}

    @property
    def unwritten(self) -> list[dict[str, Any]]:
        """The rows that a full disk has kept out of `metrics.jsonl`."""
        return self._rows.unwritten

    def go_back(self, step: int, *, steps: int) -> None:
        """Sets aside what lies beyond `step`: the run goes on from there, to `steps` in all."""
        self.close()
        rewind(self._folder, beyond=step)
        self._scale = self._scale._replace(steps=steps)
        self._open()

    def close(self) -> None:
        """Ends writing."""
        self._rows.close()
        if self._board is not None:
            self._board.close()

    def _open(self) -> None:
        self.steps = {field: array("d") for field in KEPT}
        self.skipped = 0
        self.evaluations: list[dict[str, Any]] = []
        path = self._folder / "metrics.jsonl"
        self._rows = RowWriter(path)
        for line in path.read_text(encoding="utf-8").splitlines():
            row = {name: math.nan if value is None else value for name, value in json.loads(line).items()}
            if row["kind"] == "train":
                self._keep(row)
            else:
                self.evaluations.append(row)
        self._board = BoardWriter(self._folder / "tensorboard") if self._log.tensorboard else None

    def _keep(self, row: dict[str, Any]) -> None:
        for field, values in self.steps.items():
            values.append(row[field])
        self.skipped += row.get("skipped", False)

    def _write(self, row: dict[str, Any], *, to_board: bool) -> None:
        self._rows.write(row)
        if to_board and self._board is not None:
            group = f"eval_{row['name']}" if row["kind"] == "eval" else "train"
            left_out = ("step", "profiled", *TIMES) if row.get("profiled") else ("step",)
            numbers = {
                f"{group}/{name}": value
                for name, value in row.items()
                if isinstance(value, int | float) and name not in left_out
            }
            self._board.write(numbers, row["step"])

    def _show(self, row: dict[str, Any]) -> None:
        step, total = row["step"], self._scale.steps
        mfu = "" if row["mfu"] is None else f"  MFU {100 * row['mfu']:.1f} %"
        rate = "traced" if row.get("profiled") else f"{row['tokens_per_s']:,.0f} tok/s{mfu}"
        left = f"  {duration((total - step) * statistics.median(self._recent))} left" if self._recent else ""
        line = f"loss {row['loss']:.4f}  lr {row['learning_rate']:.2e}  grad {row['grad_norm']:.2f}  {rate}{left}"
        self._console.progress(step, total, line, due=step % self._log.every_steps == 0 or step in (1, total))


def _complaint(row: dict[str, Any]) -> str:
    what = f"loss={row['loss']}, grad_norm={row['grad_norm']}"
    kind = "loss or gradients are not finite"
    if math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]):
        kind = "the update is a spike"
    cure = "the weights were left as they were; try a lower optimizer.learning_rate or optimizer.clip_norm"
    return f"step {row['step']}: {kind} ({what}; see debug.on_nonfinite and debug.nonfinite_limit); {cure}"
