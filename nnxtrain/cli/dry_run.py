"""`--dry-run`: sizes of a run, by arithmetic alone; nothing is compiled, allocated or written."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from nnxtrain.axes import BATCH, SEQUENCE
from nnxtrain.build.program import Program, make_program, on_one_device
from nnxtrain.build.registry import Registry
from nnxtrain.config.schema import Config
from nnxtrain.data.sources.text import check_text
from nnxtrain.errors import ConfigError
from nnxtrain.host.text import bytes_text
from nnxtrain.profiling.windows import say_windows
from nnxtrain.sharding.audit import bytes_per_device, check_replication, shards_of
from nnxtrain.sharding.layout import MeshLayout


def dry_run(config: Config, registry: Registry) -> int:
    """Prints parameters, tokens per step and bytes per device; returns the exit code.

    The mesh may be larger than this machine; that is reported, not refused. Only the first MiB of text files is read.
    """
    files = check_text(config.data) if config.data.source == "text" else 0
    program, layout, mesh = _planned(config, registry)
    windows = say_windows(config.profile, start=0, total=config.steps) or "none (profile.enabled=false)"
    state = layout.state(nnx.state(nnx.eval_shape(program.make_state)))
    parts = shards_of(state["model"])
    count = sum(math.prod(part.shape) for part in parts)
    weights, moments = sum(part.bytes_ for part in parts), bytes_per_device(state["optimizer"])
    gradients = sum(part.bytes_ for part in parts) * 4 // jnp.dtype(config.model.param_dtype).itemsize
    batch = sum(leaf.size * leaf.dtype.itemsize for leaf in program.batch_spec().values())
    pieces = math.prod(layout.mesh.shape[name] for axis in (BATCH, SEQUENCE) for name in layout.axes(axis))
    tokens = config.batch.global_size * config.batch.sequence
    work = program.flops_per_token
    for name, text in (
        ("parameters", f"{count:,} ({_short(count)})"),
        ("mesh", mesh),
        ("tokens per step", f"{tokens:,} ({config.batch.global_size} rows of {config.batch.sequence})"),
        ("tokens of the run", f"{tokens * config.steps:,} in {config.steps:,} steps"),
        ("FLOPs per token", f"{work:.4g} ({work * tokens:.4g} a step)"),
        (
            "state per device",
            f"{bytes_text(weights + moments)}: weights {bytes_text(weights)}, optimizer {bytes_text(moments)}",
        ),
        ("gradients per device", bytes_text(gradients)),
        ("batch per device", bytes_text(batch / pieces)),
        ("profile windows", windows),
        ("data files", f"{files}; only the first MiB of each was read" if files else "not read"),
    ):
        print(f"{name:22}{text}")
    print("parameter, [shape], mesh axes that shard its dimensions, bytes per device:")
    for part in parts:
        print(f"  {part}")
    return 0


def _planned(config: Config, registry: Registry) -> tuple[Program, MeshLayout, str]:
    """Returns the program of a run, its layout, and its mesh as text; a mesh larger than this machine is abstract."""
    try:
        program = make_program(config, registry=registry)
    except ConfigError as error:
        sizes = {name: max(size, 1) for name, size in config.mesh.sizes().items()}
        if math.prod(sizes.values()) <= jax.device_count():
            raise
        program = make_program(on_one_device(config), registry=registry)
        layout = MeshLayout(AbstractMesh(tuple(sizes.values()), tuple(sizes)), config.mesh.rules)
        parameters = layout.state(nnx.state(nnx.eval_shape(program.make_state)))["model"]
        check_replication(parameters, layout, tolerance=config.mesh.replication_tolerance)
        return program, layout, f"{_named(sizes)}: not possible on this machine: {error}"
    here = f"{program.mesh.size} of {jax.device_count()} devices here"
    return program, program.layout, f"{_named(program.mesh.shape)}: {here}"


def _named(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"


def _short(count: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return str(count)
