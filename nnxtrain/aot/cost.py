"""Cost of one compiled program: memory, FLOPs, communication, and which of these limits it."""

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
        outputs: results; `aliased` bytes of them are in the memory of donated arguments.
        aliased: outputs in the memory of donated arguments.
        temporaries: what the program allocates while it runs.
        code: the program itself.
        peak: arguments (or what stays on the device, if more), outputs not aliased, temporaries and code; at least the
            peak that the compiler reports, since libtpu reports no temporaries for small programs.
        host: in host memory, such as offloaded activations; not included in the others.
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
    """Lower bounds on the seconds of one execution on one device, and what limits it.

    Attributes:
        compute_s: FLOPs of the matrix products, recomputation included, at the chip's peak rate.
        memory_s: bytes accessed, each loop body counted once, at the bandwidth of HBM.
        network_s: bytes that a device sends, at the bandwidth of all its links together.
        binds: the largest of the three: compute, memory or network.
        least_s: the largest of the three, which assumes that everything overlaps.
    """

    compute_s: float
    memory_s: float
    network_s: float
    binds: str
    least_s: float


@dataclass
class ProgramReport:
    """Figures of one execution of one program, lowered or compiled; None means not known."""

    name: str
    executions: int  # per step; 0 for the evaluation
    lower_s: float
    hlo_hash: str
    product_flops: float  # matrix products on all devices, from the jaxpr, recomputation included
    unknown_flops: list[str] = field(default_factory=list)  # kernels of unknown FLOPs, not in product_flops
    compile_s: float | None = None
    memory: Memory | None = None
    compiler_flops: float | None = None  # of one device; the compiler counts each loop body once
    bytes_accessed: float | None = None  # of one device, likewise
    collectives: list[Total] = field(default_factory=list)
    roofline: Roofline | None = None
    problem: str | None = None  # why compilation failed
    needed_bytes: float | None = None  # of one device, if the compiler reports it on failure

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON types."""
        return asdict(self) | {"collectives": [total._asdict() for total in self.collectives]}


def memory_of(stats: Any, *, resident: int) -> Memory:
    """Returns the memory of a program as the compiler reports it.

    Args:
        stats: jax's `CompiledMemoryStats` of a program.
        resident: bytes that stay on a device between programs; a program may take only some of them as arguments.
    """
    others = max(resident - stats.argument_size_in_bytes, 0)  # resident bytes that are not arguments
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
        chip: figures of the target, or None if they are not known.
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
