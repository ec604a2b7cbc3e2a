"""Compiles the programs of a run for devices that need not be here; nothing is allocated."""

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.aot.jaxpr import product_flops
from nnxtrain.aot.report import GIB, Owners, ProgramReport, Report, add_compiled
from nnxtrain.build.program import Program, make_program, marks_of
from nnxtrain.build.registry import Registry
from nnxtrain.config.schema import Config
from nnxtrain.engine.base import Engine, hash_of
from nnxtrain.engine.executable import Executables, serialize_executables
from nnxtrain.errors import ConfigError
from nnxtrain.hardware.chips import chip_of
from nnxtrain.hardware.topology import devices_of, quiet
from nnxtrain.host.compilation_cache import without_compilation_cache
from nnxtrain.host.files import write_whole
from nnxtrain.sharding.audit import bytes_per_device
from nnxtrain.state import is_trained

EVALUATION = "eval_step"
PER_MICROBATCH = "fwd_bwd"  # runs once for each microbatch of a step
# remat policies that keep all on the device, least kept first
BY_WEIGHT = (
    *("full", "attention", "qkv", "attention_layer", "mlp"),
    *("projections", "dots_no_batch", "projections_attention", "dots", "none"),
)
SWITCH = {"true": True, "false": False}
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
TOO_LARGE = "RESOURCE_EXHAUSTED"  # the status of a compiler that finds no room


def compile_ahead(config: Config, registry: Registry, *, say: Callable[[str], None]) -> Report:
    """Lowers, and unless `aot.lower_only` compiles, what a run of `config` compiles; returns what that tells.

    Args:
        config: of the run, with `aot.topology`.
        registry: what its names are looked up in.
        say: told of each program before it is compiled, which may take minutes.

    Raises:
        ConfigError: there are no such devices, or they cannot form the mesh.
    """
    words = config.aot
    program = make_program(config, devices=devices_of(str(words.topology)), registry=registry)
    engine = program.new_engine()
    report = _empty_report(program)
    compiled: dict[str, jax.stages.Compiled] = {}
    lowered: dict[str, jax.stages.Lowered] = {}
    began = time.monotonic()
    for name, traced in programs_of(program, engine):
        lowered[name] = traced.lower()
        seconds = time.monotonic() - began
        times = {EVALUATION: 0, PER_MICROBATCH: config.batch.accum_steps}.get(name, 1)
        one = ProgramReport(name, times, seconds, hash_of({name: lowered[name]}), product_flops(traced.jaxpr.jaxpr))
        report.programs.append(one)
        say(f"{name}: lowered in {seconds:.1f} s" + ("" if words.lower_only else ", compiling ..."))
        if not words.lower_only and (found := _compiled(one, lowered[name], report.compiler_options)) is not None:
            compiled[name] = found
            resident = report.state_bytes + engine.resident_bytes()
            add_compiled(one, found, mesh=report.mesh, chip=chip_of(report.device_kind), resident=resident)
        if words.dump_hlo:
            texts = {"jaxpr": str(traced.jaxpr), "stablehlo": lowered[name].as_text()}
            texts |= {"optimised": compiled[name].as_text() or ""} if name in compiled else {}
            for form, text in texts.items():
                write_whole(Path(words.dump_hlo).expanduser() / f"{name}.{form}.txt", text)
        began = time.monotonic()
    del lowered[EVALUATION]
    report.hlo_hash = hash_of(lowered)
    if words.save and lowered.keys() <= compiled.keys():
        steps = Executables({name: compiled[name] for name in lowered}, report.hlo_hash)
        write_whole(Path(words.save).expanduser(), serialize_executables(steps, marks=marks_of(program)))
        say(f"saved    {words.save}, for train with aot.load={words.save}")
    if (memory := report.programs[0].memory) is not None:
        rest = max(memory.temporaries - report.owners.gradients, 0)
        report.owners = replace(report.owners, activations=rest)
    if report.fits is False:
        report.suggestions = suggestions(config, report)
    return report


def _empty_report(program: Program) -> Report:
    """Returns what is known before anything is lowered."""
    config, kind = program.config, program.mesh.devices.flat[0].device_kind
    chip, words = chip_of(kind), config.aot
    tokens = config.batch.global_size * config.batch.sequence
    return Report(
        topology=str(words.topology),
        device_kind=kind,
        devices=program.mesh.size,
        mesh=dict(program.mesh.shape),
        state_bytes=bytes_per_device(nnx.state(program.abstract_state())),
        model_flops=program.flops_per_token * tokens,
        hbm_bytes=words.hbm_gib * GIB if words.hbm_gib else chip and chip.memory_bytes,
        peak_flops=chip and chip.peak_bf16_flops,
        owners=owners_of(program),
        compiler_options=dict(word.split("=", 1) for word in words.compiler_options),
    )


def programs_of(program: Program, engine: Engine) -> Iterator[tuple[str, jax.stages.Traced]]:
    """Yields the programs that a run compiles, traced: those of its engine, and its evaluation."""
    yield from engine.trace(program.batch_spec())
    yield EVALUATION, engine.trace_model(program.eval_step, program.eval_spec())


def owners_of(program: Program) -> Owners:
    """Returns the bytes of a device that hold the state and the gradients."""
    state = program.abstract_state()
    parameters = bytes_per_device(nnx.state(state.model))
    trained = nnx.state(state.model, is_trained)
    copies = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), trained)
    whole = bytes_per_device(nnx.state(state))
    return Owners(parameters, whole - parameters, bytes_per_device(copies), None)


def _compiled(one: ProgramReport, lowered: jax.stages.Lowered, options: dict[str, str]) -> jax.stages.Compiled | None:
    """Returns the compiled program; None where the compiler finds no room for it, which the report then says."""
    began = time.monotonic()
    try:
        with quiet(), without_compilation_cache():
            return lowered.compile(compiler_options={name: SWITCH.get(value, value) for name, value in options.items()})
    except jax.errors.JaxRuntimeError as error:
        if options and "INVALID_ARGUMENT" in str(error):
            given = ",".join(f"{name}={value}" for name, value in options.items())
            raise ConfigError(f"aot.compiler_options={given}: {str(error).splitlines()[0]}") from error
        if TOO_LARGE not in str(error):
            raise
        one.problem = str(error).splitlines()[0].removeprefix(f"{TOO_LARGE}: ")[:200]
        if sizes := re.findall(r"([\d.]+)([KMG])\b", one.problem):
            one.needed_bytes = max(float(number) * UNITS[unit] for number, unit in sizes)
        return None
    finally:
        one.compile_s = time.monotonic() - began


def suggestions(config: Config, report: Report) -> list[str]:
    """Returns words that should make a step fit, the cheapest first, by arithmetic on what is known."""
    room = 0.9 * (report.hbm_bytes or 0.0)  # what is estimated here may be less than what is needed
    fixed = report.state_bytes + report.owners.gradients
    found = []
    if fixed < room:
        found += [f"remat.policy={lighter}"] if (lighter := _lighter(config.remat.policy)) else []
        rows = config.batch.microbatch // math.prod(report.mesh[name] for name in ("data", "fsdp", "expert"))
        needed = (report.peak_bytes or room) - fixed
        pieces = [piece for piece in range(2, rows + 1) if rows % piece == 0]
        enough = [piece for piece in pieces if needed / piece < room - fixed] or pieces[-1:]
        found += [f"batch.accum_steps={config.batch.accum_steps * enough[0]}"] if enough else []
    ways = math.ceil(1.25 * fixed * report.mesh["fsdp"] / room) if room else 0
    fsdp = 2 ** math.ceil(math.log2(max(ways, 2 * report.mesh["fsdp"])))
    return [*found, f"mesh.fsdp={fsdp}, on a topology of as many devices"]


def _lighter(policy: str) -> str | None:
    """Returns the policy that keeps less than this one; the lightest where it is not known how much this one keeps."""
    if policy not in BY_WEIGHT:
        return BY_WEIGHT[0]
    place = BY_WEIGHT.index(policy)
    return BY_WEIGHT[place - 1] if place else None
