"""What a program that was compiled for some devices needs of them: memory, work, exchange, and which of these binds."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from nnxtrain.aot.hlo import Total, collectives, totals
from nnxtrain.hardware.chips import Chip

GIB = 2**30
DERIVED = ("fits", "peak_bytes", "free_bytes", "step_s", "mfu_ceiling")  # properties of a report that JSON has too


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments: state and batch.
        outputs: of which `aliased` lie where arguments lay.
        aliased: arguments whose memory outputs take over.
        temporaries: what the program needs while it runs.
        code: of the program.
        peak: arguments, or what stays on a device if that is more; outputs not aliased, temporaries and code.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    peak: int


@dataclass(frozen=True)
class Roofline:
    """The least seconds that one execution takes one device, and what binds it.

    Attributes:
        compute_s: FLOPs of the matrix products, recomputation included, at the chip's peak.
        memory_s: bytes that the program reads and writes, each loop's body once, at the bandwidth of the chip's memory.
        network_s: bytes that a device sends, at the bandwidth of its links, all of them busy.
        binds: compute, memory or network: the longest.
        least_s: the longest; what overlaps costs nothing, what does not comes on top.
    """

    compute_s: float
    memory_s: float
    network_s: float
    binds: str
    least_s: float


@dataclass
class ProgramReport:
    """One program: what is known of one execution by how far it came, lowered or compiled; None is not known."""

    name: str
    executions: int  # in a step; 0 for the evaluation
    lower_s: float
    hlo_hash: str
    product_flops: float  # of all devices, from the jaxpr: matrix products, recomputation included
    compile_s: float | None = None
    memory: Memory | None = None
    compiler_flops: float | None = None  # of one device; the compiler counts each loop's body once
    bytes_accessed: float | None = None  # of one device, likewise
    collectives: list[Total] = field(default_factory=list)
    roofline: Roofline | None = None
    problem: str | None = None  # why the compiler gave up
    needed_bytes: float | None = None  # of one device, as far as the compiler says when it gives up

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON has them."""
        return asdict(self) | {"collectives": [total._asdict() for total in self.collectives]}


def memory_of(stats: Any, *, resident: int) -> Memory:
    """Returns what the compiler says of memory.

    Args:
        stats: jax's `CompiledMemoryStats` of a program.
        resident: bytes that stay on a device between programs; one that does not use all of them has fewer arguments.
    """
    held = max(stats.argument_size_in_bytes, resident)
    kept = held + stats.output_size_in_bytes - stats.alias_size_in_bytes
    code = max(stats.generated_code_size_in_bytes, 0)
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=code,
        peak=kept + stats.temp_size_in_bytes + code,
    )


def add_compiled(
    report: ProgramReport,
    compiled: jax.stages.Compiled,
    *,
    mesh: Mapping[str, int],
    chip: Chip | None,
    resident: int,
) -> None:
    """Adds to a report what a compiled program tells.

    Args:
        report: of the program, lowered.
        compiled: the program.
        mesh: devices by axis.
        chip: that it is for, or None where its figures are not known.
        resident: bytes that stay on a device between programs.
    """
    cost = compiled.cost_analysis() or {}
    report.memory = memory_of(compiled.memory_analysis(), resident=resident)
    report.compiler_flops = cost.get("flops")
    report.bytes_accessed = cost.get("bytes accessed")
    report.collectives = totals(collectives(compiled.as_text() or "", mesh))
    if chip is not None:
        report.roofline = _roofline(report, chip, devices=math.prod(mesh.values()))


def _roofline(report: ProgramReport, chip: Chip, *, devices: int) -> Roofline:
    seconds = {
        "compute": report.product_flops / devices / chip.peak_bf16_flops,
        "memory": (report.bytes_accessed or 0.0) / chip.memory_bandwidth,
        "network": sum(total.link_bytes for total in report.collectives) / chip.link_bandwidth,
    }
    binds = max(seconds, key=lambda name: seconds[name])
    return Roofline(seconds["compute"], seconds["memory"], seconds["network"], binds, seconds[binds])


@dataclass(frozen=True)
class Owners:
    """Bytes of one device by what they are for.

    Attributes:
        parameters: as they are stored, without padding.
        optimizer: moments, counters and guard.
        gradients: one float32 value for each trained value, where all of them exist at a time.
        activations: what is left of the temporaries: activations, gathered weights, work space.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int | None


@dataclass
class Report:
    """What a configuration needs of a topology.

    Attributes:
        topology: that it was compiled for.
        device_kind: jax's name of its devices.
        devices: how many.
        mesh: devices by axis.
        state_bytes: of one device, without padding.
        model_flops: of a step on all devices, by formula.
        hbm_bytes: memory of a device, or None where it is not known.
        peak_flops: of a device, or None where they are not known.
        programs: of a step and of an evaluation.
        owners: bytes of the training step by what they are for.
        hlo_hash: of the programs of a step together, as `summary.json` has it.
        compiler_options: that were given.
        suggestions: words that should make it fit.
    """

    topology: str
    device_kind: str
    devices: int
    mesh: dict[str, int]
    state_bytes: int
    model_flops: float
    hbm_bytes: float | None
    peak_flops: float | None
    owners: Owners
    hlo_hash: str = ""
    programs: list[ProgramReport] = field(default_factory=list)
    compiler_options: dict[str, str] = field(default_factory=dict)
    suggestions: list[str] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int | None:
        """The most that a program needs on a device, or None where nothing was compiled."""
        peaks = [program.memory.peak for program in self.programs if program.memory]
        needs = [int(program.needed_bytes) for program in self.programs if program.needed_bytes]
        return max([*peaks, *needs], default=None)

    @property
    def fits(self) -> bool | None:
        """Whether all programs fit into a device; None where its memory is not known."""
        if any(program.problem for program in self.programs):
            return False
        needed = self.peak_bytes or self.state_bytes
        return None if self.hbm_bytes is None else needed <= self.hbm_bytes

    @property
    def free_bytes(self) -> float | None:
        """Bytes of a device that are left over; negative where it does not fit."""
        return None if self.hbm_bytes is None else self.hbm_bytes - (self.peak_bytes or self.state_bytes)

    @property
    def step_s(self) -> float | None:
        """The least seconds that a step takes: all executions of its programs, one after another."""
        lines = [(one.executions, one.roofline) for one in self.programs if one.executions]
        known = [times * line.least_s for times, line in lines if line is not None]
        return sum(known) if len(known) == len(lines) else None

    @property
    def mfu_ceiling(self) -> float | None:
        """The share of the peak of all devices that the formula's FLOPs of the model reach in `step_s`."""
        if self.step_s is None or self.peak_flops is None:
            return None
        return self.model_flops / self.devices / self.peak_flops / self.step_s

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON has them."""
        programs = [program.as_json() for program in self.programs]
        found = {name: getattr(self, name) for name in DERIVED}
        return vars(self) | {"owners": asdict(self.owners), "programs": programs} | found
