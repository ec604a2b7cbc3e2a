"""`--dry-run`: what a run would be, by arithmetic alone; nothing is compiled, allocated or written."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from nnxtrain.build import make_program, on_one_device
from nnxtrain.config.schema import Config
from nnxtrain.data.sources import text_files
from nnxtrain.errors import ConfigError
from nnxtrain.models.flops import flops_per_token
from nnxtrain.profiling.schedule import say_windows
from nnxtrain.tables import Tables


def dry_run(config: Config, tables: Tables) -> int:
    """Prints parameters, tokens per step and bytes per device; returns the exit code.

    The mesh may be larger than this machine; that is said, not refused.
    """
    if config.data.source == "text":
        text_files(config.data)
    try:
        program = make_program(config, tables=tables)
        mesh = f"{program.mesh.size} of {jax.device_count()} devices here"
    except ConfigError as error:
        if config.mesh.data <= jax.device_count():
            raise
        program = make_program(on_one_device(config), tables=tables)
        mesh = f"not possible on this machine: {error}"
    windows = say_windows(config.profile, start=0, total=config.steps) or "none (profile.enabled=false)"
    state = program.abstract_state()
    weights, count = _size(nnx.state(state.model, nnx.Param))
    moments, _ = _size(nnx.state(state.optimizer))
    batch, _ = _size(program.batch_spec())
    tokens = config.batch.global_size * config.batch.sequence
    work = flops_per_token(config.model, config.batch.sequence)
    devices = max(config.mesh.data, program.mesh.size)
    for name, text in (
        ("parameters", f"{count:,} ({_short(count)})"),
        ("mesh", mesh),
        ("tokens per step", f"{tokens:,} ({config.batch.global_size} rows of {config.batch.sequence})"),
        ("tokens of the run", f"{tokens * config.steps:,} in {config.steps:,} steps"),
        ("FLOPs per token", f"{work:.4g} ({work * tokens:.4g} a step)"),
        ("state per device", f"{_bytes(weights + moments)}: weights {_bytes(weights)}, optimizer {_bytes(moments)}"),
        ("gradients per device", _bytes(4 * count)),
        ("batch per device", _bytes(batch / devices)),
        ("profile windows", windows),
    ):
        print(f"{name:22}{text}")
    return 0


def _size(tree: Any) -> tuple[int, int]:
    """Returns the bytes and the number of elements of a tree of arrays, which may be abstract."""
    counts = [(int(np.prod(leaf.shape)), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)]
    return sum(count * width for count, width in counts), sum(count for count, _ in counts)


def _short(count: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return str(count)


def _bytes(count: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"
