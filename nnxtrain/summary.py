"""What `summary.json` says when a run ends."""

import resource
import statistics
from typing import Any

import jax

from nnxtrain.metrics import Recorder


def figures(recorder: Recorder, *, step: int, device: jax.Device) -> dict[str, Any]:
    """Returns the figures of a run after `step` steps; rates and times are of the steps that this process took."""
    rows, own = recorder.rows, recorder.own_rows
    times = [row["step_time_s"] for row in own]
    last = [row for row in recorder.evaluations if row["step"] == step]
    memory = device.memory_stats() or {}
    return {
        "final_loss": rows[-1]["loss"] if rows else None,
        "eval": {row["name"]: {key: row[key] for key in row if key not in ("kind", "name", "step")} for row in last},
        "median_step_time_s": statistics.median(times) if times else None,
        "tokens_per_s": sum(row["tokens"] for row in own) / sum(times) if times else None,
        "peak_device_bytes": memory.get("peak_bytes_in_use"),
        "skipped_steps": sum(row.get("skipped", False) for row in rows),
    }


def peak_host_bytes() -> int:
    """Returns the most memory that this process held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
