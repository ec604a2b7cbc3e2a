"""What one compiled program needs of its devices: memory, FLOPs, communication, and which of these limits it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from nnxtrain.aot.hlo import Total, collectives, totals
from nnxtrain.hardware.chips import Chip


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments: state and batch.
        outputs: of which `aliased` reuse the memory of arguments.
        aliased: arguments whose memory outputs reuse.
        temporaries: what the program needs while it runs.
        code: of the program.
        peak: arguments, or what stays on a device if that is more; outputs not aliased, temporaries and code. At least
            what the compiler itself gives as its peak: for small programs libtpu reports no temporaries.
        host: in the memory of the host, such as offloaded activations; not part of the others.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    peak: int
    host: int


@dataclass(frozen=True)
class Roofline:
    """The least seconds that one execution takes on one device, and what limits it.

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
    """One program: what is known of one execution, lowered or compiled; None is not known."""

    name: str
    executions: int  # in a step; 0 for the evaluation
    lower_s: float
    hlo_hash: str
    product_flops: float  # of all devices, from the jaxpr: matrix products, recomputation included
    unknown_flops: list[str] = field(default_factory=list)  # kernels whose FLOPs are unknown, and not in product_flops
    compile_s: float | None = None
    memory: Memory | None = None
    compiler_flops: float | None = None  # of one device; the compiler counts each loop's body once
    bytes_accessed: float | None = None  # of one device, likewise
    collectives: list[Total] = field(default_factory=list)
    roofline: Roofline | None = None
    problem: str | None = None  # why the compiler failed
    needed_bytes: float | None = None  # of one device, if the compiler reports it when it fails

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON has them."""
        return asdict(self) | {"collectives": [total._asdict() for total in self.collectives]}


def memory_of(stats: Any, *, resident: int) -> Memory:
    """Returns the memory of a program as the compiler reports it.

    Args:
        stats: jax's `CompiledMemoryStats` of a program.
        resident: bytes that stay on a device between programs; one that does not use all of them has fewer arguments.
    """
    others = max(resident - stats.argument_size_in_bytes, 0)  # what stays beside the arguments
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    code = max(stats.generated_code_size_in_bytes, 0)
    host = stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=code,
        peak=others + max(kept + stats.temp_size_in_bytes, stats.peak_memory_in_bytes) + code,
        host=host + stats.host_temp_size_in_bytes + stats.host_generated_code_size_in_bytes,
    )


def add_compiled(
    report: ProgramReport,
    compiled: jax.stages.Compiled,
    *,
    mesh: Mapping[str, int],
    chip: Chip | None,
    resident: int,
) -> None:
    """Adds the figures of a compiled program to its report.

    Args:
        report: of the lowered program.
        compiled: the program.
        mesh: devices by axis.
        chip: the chip that it is compiled for, or None where its figures are not known.
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
