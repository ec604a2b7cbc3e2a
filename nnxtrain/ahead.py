"""Compiles the programs of a run for devices that need not be here; nothing is allocated."""

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.build import Program, make_program, marks_of
from nnxtrain.cache import without_compilation_cache
from nnxtrain.compile.chips import chip_of
from nnxtrain.compile.executable import write_executables
from nnxtrain.compile.jaxpr import product_flops
from nnxtrain.compile.report import GIB, Owners, ProgramReport, Report, add_compiled
from nnxtrain.compile.topology import devices_of, quiet
from nnxtrain.config.schema import Config
from nnxtrain.engine.base import hash_of
from nnxtrain.errors import ConfigError
from nnxtrain.models.flops import flops_per_token
from nnxtrain.run.directory import write_whole
from nnxtrain.sharding.audit import bytes_per_device
from nnxtrain.state import is_trained
from nnxtrain.tables import Tables

EVALUATION = "eval_step"
BY_WEIGHT = ("full", "attention", "qkv", "attention_layer", "dots_no_batch", "dots", "none")  # least kept first
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
TOO_LARGE = "RESOURCE_EXHAUSTED"  # the status of a compiler that finds no room


def compile_ahead(config: Config, tables: Tables, *, say: Callable[[str], None]) -> Report:
    """Lowers, and unless `aot.lower_only` compiles, what a run of `config` compiles; returns what that tells.

    Args:
        config: of the run, with `aot.topology`.
        tables: what its names are looked up in.
        say: told of each program before it is compiled, which may take minutes.

    Raises:
        ConfigError: there are no such devices, or they cannot form the mesh.
    """
    words = config.aot
    devices = devices_of(str(words.topology))
    program = make_program(config, devices=devices, tables=tables)
    kind = devices[0].device_kind
    chip = chip_of(kind)
    hbm = words.hbm_gib * GIB if words.hbm_gib else chip and chip.memory_bytes
    work = flops_per_token(config.model, config.batch.sequence)
    tokens = config.batch.global_size * config.batch.sequence
    options = dict(word.split("=", 1) for word in words.compiler_options)
    report = Report(
        topology=str(words.topology),
        device_kind=kind,
        devices=program.mesh.size,
        mesh=dict(program.mesh.shape),
        state_bytes=bytes_per_device(nnx.state(program.abstract_state())),
        model_flops=work * tokens,
        hbm_bytes=hbm,
        owners=owners_of(program),
        compiler_options=options,
    )
    shares = {EVALUATION: work / 3 * config.eval_rows * config.batch.sequence}
    programs: dict[str, jax.stages.Compiled] = {}
    lowered_programs: dict[str, jax.stages.Lowered] = {}
    began = time.monotonic()
    for name, traced in programs_of(program):
        lowered = traced.lower()
        seconds = time.monotonic() - began
        one = ProgramReport(name, seconds, hash_of({name: lowered}), product_flops(traced.jaxpr.jaxpr))
        report.programs.append(one)
        say(f"{name}: lowered in {seconds:.1f} s" + ("" if words.lower_only else ", compiling ..."))
        compiled = None if words.lower_only else _compiled(one, lowered, options)
        if compiled is not None:
            flops = shares.get(name, report.model_flops)
            add_compiled(one, compiled, mesh=program.mesh.shape, chip=chip, model_flops=flops)
        if compiled is not None and name != EVALUATION:
            programs[name], lowered_programs[name] = compiled, lowered
        if words.dump_hlo:
            dump(Path(words.dump_hlo), name, traced, lowered, compiled)
        began = time.monotonic()
    if words.save and programs:
        file, whole = Path(words.save).expanduser(), hash_of(lowered_programs)
        write_executables(file, programs, hlo_hash=whole, marks=marks_of(program))
        say(f"saved    {words.save}, for train with aot.load={words.save}")
    report.owners = _with_activations(report)
    if report.fits is False:
        report.suggestions = suggestions(config, report)
    return report


def programs_of(program: Program) -> Iterator[tuple[str, jax.stages.Traced]]:
    """Yields the programs that a run compiles, traced: those of its engine, and its evaluation."""
    engine = program.new_engine()
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


def _with_activations(report: Report) -> Owners:
    memory = report.programs[0].memory
    held = report.owners
    rest = None if memory is None else max(memory.temporaries - held.gradients, 0)
    return Owners(held.parameters, held.optimizer, held.gradients, rest)


def _compiled(one: ProgramReport, lowered: jax.stages.Lowered, options: dict[str, str]) -> jax.stages.Compiled | None:
    """Returns the compiled program; None where the compiler finds no room for it, which the report then says."""
    began = time.monotonic()
    try:
        with quiet(), without_compilation_cache():
            return lowered.compile(compiler_options=dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        if options and "INVALID_ARGUMENT" in str(error):
            raise ConfigError(f"aot.compiler_options={','.join(options)}: {str(error).splitlines()[0]}") from error
        if TOO_LARGE not in str(error):
            raise
        one.problem = str(error).splitlines()[0].removeprefix(f"{TOO_LARGE}: ")[:200]
        if sizes := re.findall(r"([\d.]+)([KMG])\b", one.problem):
            one.needed_bytes = max(float(number) * UNITS[unit] for number, unit in sizes)
        return None
    finally:
        one.compile_s = time.monotonic() - began


def dump(
    folder: Path,
    name: str,
    traced: jax.stages.Traced,
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled | None,
) -> None:
    """Writes a program as it was traced, lowered and, if it was, compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"jaxpr": str(traced.jaxpr), "stablehlo": lowered.as_text(), "optimised": compiled and compiled.as_text()}
    for form, text in texts.items():
        if text:
            write_whole(folder / f"{name}.{form}.txt", text)


def suggestions(config: Config, report: Report) -> list[str]:
    """Returns words that should make a step fit, the cheapest first, by arithmetic on what is known."""
    room = 0.9 * (report.hbm_bytes or 0.0)  # what is estimated here may be less than what is needed
    fixed = report.state_bytes + report.owners.gradients
    found = []
    if fixed < room:
        lighter = BY_WEIGHT[: _place(config.remat.policy)]
        found += [f"remat.policy={lighter[-1]}"] if lighter else []
        rows = config.batch.microbatch // math.prod(report.mesh[name] for name in ("data", "fsdp", "expert"))
        needed = (report.peak_bytes or room) - fixed
        pieces = [piece for piece in range(2, rows + 1) if rows % piece == 0]
        enough = [piece for piece in pieces if needed / piece < room - fixed] or pieces[-1:]
        found += [f"batch.accum_steps={config.batch.accum_steps * enough[0]}"] if enough else []
    ways = math.ceil(1.25 * fixed * report.mesh["fsdp"] / room) if room else 0
    fsdp = 2 ** math.ceil(math.log2(max(ways, 2 * report.mesh["fsdp"])))
    return [*found, f"mesh.fsdp={fsdp}, on a topology of as many devices"]


def _place(policy: str) -> int:
    return BY_WEIGHT.index(policy) if policy in BY_WEIGHT else len(BY_WEIGHT)
