"""Compiles the programs of a run for devices that this machine need not have; nothing is allocated."""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.aot.cost import ProgramReport, add_compiled
from nnxtrain.aot.jaxpr import products_of
from nnxtrain.aot.remat import bytes_by_policy, lighter_than
from nnxtrain.aot.report import GIB, Owners, Report
from nnxtrain.build.program import Program, make_program, provenance_of
from nnxtrain.build.registry import Registry
from nnxtrain.config.schema import Config
from nnxtrain.engine.base import Engine, hash_of
from nnxtrain.engine.executable import Executables, serialize_executables
from nnxtrain.hardware.chips import chip_of
from nnxtrain.hardware.topology import devices_of, quiet
from nnxtrain.host.compilation_cache import without_compilation_cache
from nnxtrain.host.files import write_whole
from nnxtrain.sharding.audit import bytes_per_device
from nnxtrain.state import is_trained

EVALUATION = "eval_step"
PER_MICROBATCH = "fwd_bwd"  # runs once for each microbatch of a step
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
TOO_LARGE = "RESOURCE_EXHAUSTED"  # the status of the compiler if a program does not fit


def compile_ahead(config: Config, registry: Registry, *, say: Callable[[str], None]) -> Report:
    """Lowers, and unless `aot.lower_only` compiles, the programs of a run; returns a report of them.

    Args:
        config: of the run, with `aot.topology`.
        registry: tables in which names are looked up.
        say: prints a line before each compilation, which may take minutes.

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
        flops, unknown = products_of(traced.jaxpr.jaxpr)
        one = ProgramReport(name, times, seconds, hash_of({name: lowered[name]}), flops, list(unknown))
        report.programs.append(one)
        say(f"{name}: lowered in {seconds:.1f} s" + ("" if words.lower_only else ", compiling ..."))
        if not words.lower_only and (found := _compiled(one, lowered[name], words.options)) is not None:
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
        write_whole(Path(words.save).expanduser(), serialize_executables(steps, provenance=provenance_of(program)))
        say(f"saved    {words.save}, for train with aot.load={words.save}")
    if (memory := report.programs[0].memory) is not None:
        rest = max(memory.temporaries - report.owners.gradients, 0)
        report.owners = replace(report.owners, activations=rest)
    if report.fits is False:
        report.suggestions = suggestions(program, report)
    return report


def _empty_report(program: Program) -> Report:
    """Returns the report as it is before anything is lowered."""
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
        host_limit_bytes=words.host_gib and words.host_gib * GIB,
        process_devices=max(Counter(device.process_index for device in program.mesh.devices.flat).values()),
        peak_flops=chip and chip.peak_bf16_flops,
        owners=owners_of(program),
        compiler_options=dict(word.split("=", 1) for word in words.compiler_options),
    )


def programs_of(program: Program, engine: Engine) -> Iterator[tuple[str, jax.stages.Traced]]:
    """Yields the programs that a run compiles, traced: those of its engine, and its evaluation."""
    yield from engine.trace(program.batch_spec())
    yield EVALUATION, engine.trace_model(program.eval_step, program.eval_spec())


def owners_of(program: Program) -> Owners:
    """Returns the bytes of state and gradients on a device."""
    state = program.abstract_state()
    parameters = bytes_per_device(nnx.state(state.model))
    trained = nnx.state(state.model, is_trained)
    copies = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), trained)
    whole = bytes_per_device(nnx.state(state))
    return Owners(parameters, whole - parameters, bytes_per_device(copies), None)


def _compiled(
    one: ProgramReport, lowered: jax.stages.Lowered, options: dict[str, str | bool]
) -> jax.stages.Compiled | None:
    """Returns the compiled program, or None, with the problem in the report, if it does not fit into memory."""
    began = time.monotonic()
    try:
        with quiet(), without_compilation_cache():
            return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if TOO_LARGE not in str(error):
            raise
        one.problem = str(error).splitlines()[0].removeprefix(f"{TOO_LARGE}: ")[:200]
        if sizes := re.findall(r"([\d.]+)([KMG])\b", one.problem):
            one.needed_bytes = max(float(number) * UNITS[unit] for number, unit in sizes)
        return None
    finally:
        one.compile_s = time.monotonic() - began


def suggestions(program: Program, report: Report) -> list[str]:
    """Returns settings that should make a step fit, cheapest first, estimated from the figures of the report."""
    config = program.config
    if report.fits_device:  # host memory is too small
        return ["remat.policy=full", f"batch.accum_steps={2 * config.batch.accum_steps}"]
    room = 0.9 * (report.hbm_bytes or 0.0)  # the estimate may be too low
    fixed = report.state_bytes + report.owners.gradients
    found = []
    if fixed < room:
        lighter = lighter_than(config.remat.policy, bytes_by_policy(program))
        found += [f"remat.policy={lighter}"] if lighter else []
        rows = config.batch.microbatch // math.prod(report.mesh[name] for name in ("data", "fsdp", "expert"))
        needed = (report.peak_bytes or room) - fixed
        pieces = [piece for piece in range(2, rows + 1) if rows % piece == 0]
        enough = [piece for piece in pieces if needed / piece < room - fixed] or pieces[-1:]
        found += [f"batch.accum_steps={config.batch.accum_steps * enough[0]}"] if enough else []
    ways = math.ceil(1.25 * fixed * report.mesh["fsdp"] / room) if room else 0
    fsdp = 2 ** math.ceil(math.log2(max(ways, 2 * report.mesh["fsdp"])))
    return [*found, f"mesh.fsdp={fsdp}, on a topology with that many devices"]
