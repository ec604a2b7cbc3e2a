"""Cost of all programs of a run on a topology."""

from dataclasses import asdict, dataclass, field
from typing import Any

from nnxtrain.aot.cost import ProgramReport

GIB = 2**30
DERIVED = ("fits", "peak_bytes", "free_bytes", "host_bytes", "step_s", "mfu_ceiling")  # properties that JSON has too


@dataclass(frozen=True)
class Owners:
    """Bytes of one device by use.

    Attributes:
        parameters: as they are stored, without padding.
        optimizer: moments, counters and guard.
        gradients: a float32 value for each trained parameter, as if all existed at once.
        activations: the rest of the temporaries: activations, gathered weights, scratch.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int | None


@dataclass
class Report:
    """Cost of a configuration on a topology.

    Attributes:
        topology: that it was compiled for.
        device_kind: jax's name of its devices.
        devices: how many.
        mesh: devices by axis.
        state_bytes: of one device, without padding.
        model_flops: of a step on all devices, by formula.
        hbm_bytes: memory of a device, or None if it is not known.
        host_limit_bytes: available host memory of a process, or None if it is not known.
        process_devices: the largest number of devices of one process.
        peak_flops: of a device, or None if it is not known.
        programs: of a step and of an evaluation.
        owners: bytes of the training step by use.
        hlo_hash: of the programs of a step together, as `summary.json` has it.
        compiler_options: as set by `aot.compiler_options`.
        suggestions: settings that should make it fit.
    """

    topology: str
    device_kind: str
    devices: int
    mesh: dict[str, int]
    state_bytes: int
    model_flops: float
    hbm_bytes: float | None
    host_limit_bytes: float | None
    process_devices: int
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
    def host_bytes(self) -> int | None:
        """The most host memory that a program needs in one process, or None where nothing was compiled."""
        needs = [program.memory.host * self.process_devices for program in self.programs if program.memory]
        return max(needs, default=None)

    @property
    def fits_device(self) -> bool | None:
        """Whether all programs fit into device memory; None if its size is not known."""
        if any(program.problem for program in self.programs):
            return False
        return None if self.free_bytes is None else self.free_bytes >= 0

    @property
    def fits_host(self) -> bool | None:
        """Whether all programs fit into host memory; None if they need some and its size is not known."""
        if not self.host_bytes:
            return True
        return None if self.host_limit_bytes is None else self.host_bytes <= self.host_limit_bytes

    @property
    def fits(self) -> bool | None:
        """Whether all programs fit into device and host memory; None if the decisive size is not known."""
        both = self.fits_device, self.fits_host
        return False if False in both else None if None in both else True

    @property
    def free_bytes(self) -> float | None:
        """Bytes of a device that stay free; negative if it does not fit."""
        return None if self.hbm_bytes is None else self.hbm_bytes - (self.peak_bytes or self.state_bytes)

    @property
    def step_s(self) -> float | None:
        """Lower bound on the seconds of a step: all executions of its programs, one after another."""
        lines = [(one.executions, one.roofline) for one in self.programs if one.executions]
        known = [times * line.least_s for times, line in lines if line is not None]
        return sum(known) if len(known) == len(lines) else None

    @property
    def mfu_ceiling(self) -> float | None:
        """Upper bound on MFU: the model's FLOPs by formula in `step_s`, as a fraction of the peak of all devices."""
        if self.step_s is None or self.peak_flops is None:
            return None
        return self.model_flops / self.devices / self.peak_flops / self.step_s

    def as_json(self) -> dict[str, Any]:
        """Returns the fields and derived figures as JSON types."""
        programs = [program.as_json() for program in self.programs]
        found = {name: getattr(self, name) for name in DERIVED}
        return vars(self) | {"owners": asdict(self.owners), "programs": programs} | found
