"""Compile only."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import key, none_of

# families of TPU, and slices of each that one can rent
SLICES = {
    "v5e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    "v6e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}
TOPOLOGIES = (*(f"{family}:{shape}" for family, shapes in SLICES.items() for shape in shapes), "cpu:N")


@dataclass(frozen=True, kw_only=True)
class AotConfig:
    """Ahead-of-time compilation for a named topology."""

    topology: str | None = key(None, "devices to compile for: v5e:4x4, or cpu:8 for eight devices of this machine")
    report: str | None = key(None, "JSON file for the report")
    lower_only: bool = key(False, "stop before the compiler; bytes of the state and FLOPs are known by then")
    hbm_gib: float | None = key(None, "memory of a device, GiB; null = that of the chip", span="[0.001, inf)")
    host_gib: float | None = key(None, "host memory for offloaded activations, GiB a process", span="[0.001, inf)")
    compiler_options: tuple[str, ...] = key(
        (), "NAME=VALUE options of the compiler, for aot and training; jax's compiler_options"
    )
    dump_hlo: str | None = key(None, "folder for the lowered and the optimised programs and their jaxprs")
    sweep: str | None = key(None, "grid of KEY=VALUE,VALUE words to compile, one table at the end")
    save: str | None = key(None, "file for the compiled programs of a step, for aot.load")
    load: str | None = key(None, "file that aot.save wrote: training takes its programs and compiles none of the step")

    @property
    def options(self) -> dict[str, str | bool]:
        """The options of the compiler by name, as jax takes them."""
        pairs = (word.split("=", 1) for word in self.compiler_options)
        return {name: value == "true" if value in ("true", "false") else value for name, value in pairs}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields `(key, what is wrong and what would be right)`."""
        if self.topology is not None and not _is_topology(self.topology):
            yield "aot.topology", none_of(self.topology, TOPOLOGIES)
        for word in self.compiler_options:
            if "=" not in word:
                yield "aot.compiler_options", f"{word!r} must be NAME=VALUE"
        if self.sweep is not None and not self.sweep.split():
            yield "aot.sweep", f"{self.sweep!r} names no KEY=VALUE,VALUE"
        if self.save and (self.lower_only or self.sweep):
            other = "aot.lower_only=true compiles nothing" if self.lower_only else "aot.sweep compiles many steps"
            yield "aot.save", f"{self.save} is for one compiled step, and {other}"
        for word in (self.sweep or "").split():
            name, _, values = word.partition("=")
            if not name or not all(values.split(",")):
                yield "aot.sweep", f"{word!r} must be KEY=VALUE,VALUE; words are separated by spaces"


def _is_topology(name: str) -> bool:
    """Returns whether a name is of the form of a topology; the compiler knows whether such a slice exists."""
    family, _, shape = name.partition(":")
    if family == "cpu":
        return shape.isdecimal() and 0 < int(shape) <= 512
    return family in SLICES and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape) is not None
