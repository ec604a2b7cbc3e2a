"""What a run says of itself before it starts: the first lines on the console, and what files keep of it."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from nnxtrain import __version__
from nnxtrain.build.feed import Data
from nnxtrain.build.program import Program
from nnxtrain.config.record import as_mapping
from nnxtrain.data.batches import Position
from nnxtrain.host.environment import environment
from nnxtrain.sharding.audit import shards_of


def parameter_count(program: Program) -> int:
    """Returns the number of weights of a program's model."""
    model = program.abstract_state().model
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def first_lines(data: Data, *, parameters: int) -> list[str]:
    """Returns what the first lines of a run say."""
    program = data.program
    config, mesh = program.config, program.mesh
    tokens = config.batch.global_size * config.batch.sequence
    pieces = f" in {config.batch.accum_steps} microbatches" if config.batch.accum_steps > 1 else ""
    idle = jax.device_count() - mesh.size
    steps = data.steps()
    epochs = data.train.epochs(Position(min(steps * config.batch.global_size, data.train.end or 2**62)))
    group = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    lines = [
        f"nnxtrain {__version__}, jax {jax.__version__}",
        f"devices  {mesh.size} {mesh.devices.flat[0].device_kind}{group}"
        + (f" ({idle} more are not used)" if idle else ""),
        f"model    {parameters:,} parameters, {config.model.layers} layers of width {config.model.embed}",
        f"data     {data.dataset.description}",
        f"batch    {config.batch.global_size} rows of {config.batch.sequence} tokens{pieces}: {tokens:,} tokens a step",
        f"steps    {steps:,}" + (f" ({epochs:.2f} epochs)" if epochs else ""),
    ]
    if steps < config.steps:
        lines.append(f"         the data ends before steps={config.steps:,} (data.epochs={config.data.epochs})")
    if config.debug.show_sharding:
        weights = nnx.state(program.abstract_state().model, nnx.Param)
        lines += [f"holds    {part}" for part in shards_of(weights)]
    return lines


def environment_of(program: Program) -> dict[str, Any]:
    """Returns what `env.json` holds: versions, platform, commit, devices, mesh."""
    devices = program.mesh.devices.flat
    names = [str(device) for device in devices]
    return environment() | {
        "devices": names,
        "kind": devices[0].device_kind,
        "mesh": dict(program.mesh.shape),
        "processes": jax.process_count(),
    }


def checkpoint_meta(data: Data) -> dict[str, Any]:
    """Returns what every checkpoint says of its run: configuration, versions, tokenizer, corpus, mesh."""
    program = data.program
    return {
        "corpus": data.dataset.description,
        "held_out": dict(data.dataset.held_out_descriptions),
        "config": as_mapping(program.config),
        "versions": environment()["versions"],
        "tokenizer": program.tokenizer.fingerprint,
        "mesh": dict(program.mesh.shape),
    }
