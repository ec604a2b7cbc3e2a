"""Ahead-of-time compilation."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.echo import echo
from nnxtrain.config.key import Problem, key
from nnxtrain.config.lookup import not_one_of
from nnxtrain.config.reads import by, unless

# TPU families, and the slices of each that Google Cloud offers
SLICES = {
    "v5e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    "v6e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}
TOPOLOGIES = (*(f"{family}:{shape}" for family, shapes in SLICES.items() for shape in shapes), "cpu:N")


@dataclass(frozen=True, kw_only=True)
class AotConfig:
    """Ahead-of-time compilation for a topology, and compiled programs in files."""

    topology: str | None = key(
        None, "devices to compile for: a TPU slice such as v5e:4x4, or cpu:8 for eight CPU devices", read=by("aot")
    )
    report: str | None = key(None, "file to write the report to, as JSON", read=by("aot"))
    lower_only: bool = key(
        False,
        "lower the programs but do not compile them; bytes of the state and FLOPs are known by then",
        read=by("aot"),
    )
    hbm_gib: float | None = key(
        None, "memory of one device, GiB; null = that of the chip", span="[0.001, 1000000]", read=by("aot")
    )
    host_gib: float | None = key(
        None,
        "host memory of one process for offloaded activations, GiB; null = not known",
        span="[0.001, 1000000]",
        read=by("aot"),
    )
    compiler_options: tuple[str, ...] = key(
        (),
        "NAME=VALUE options for XLA, in aot and in training (compiler_options of jax.stages.Lowered.compile)",
        read=unless("aot.lower_only", True),
    )
    dump_hlo: str | None = key(
        None, "folder to write each program to: jaxpr, StableHLO and optimised HLO", read=by("aot")
    )
    sweep: str | None = key(None, "grid to compile: KEY=VALUE,VALUE words, separated by spaces", read=by("aot"))
    save: str | None = key(None, "file to write the compiled programs of a step to, for aot.load", read=by("aot"))
    load: str | None = key(
        None, "file written by aot.save: training uses its programs instead of compiling the step", read=by("train")
    )

    @property
    def options(self) -> dict[str, str | bool]:
        """The compiler options by name, as jax takes them."""
        pairs = (word.split("=", 1) for word in self.compiler_options)
        return {name: value == "true" if value in ("true", "false") else value for name, value in pairs}

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and how to fix it."""
        return self._topology(), self._options(), self._sweep(), self._save()

    def _topology(self) -> Iterator[Problem]:
        if self.topology is not None and not _is_topology(self.topology):
            yield "aot.topology", not_one_of(self.topology, TOPOLOGIES)

    def _options(self) -> Iterator[Problem]:
        for word in self.compiler_options:
            if not all(word.partition("=")[:2]):
                yield "aot.compiler_options", f"'{echo(word)}' must be NAME=VALUE"

    def _sweep(self) -> Iterator[Problem]:
        if self.sweep is not None and not self.sweep.split():
            yield "aot.sweep", f"'{echo(self.sweep)}' contains no KEY=VALUE,VALUE"
        for word in (self.sweep or "").split():
            name, _, values = word.partition("=")
            if not name or not all(values.split(",")):
                yield "aot.sweep", f"'{echo(word)}' must be KEY=VALUE,VALUE; words are separated by spaces"

    def _save(self) -> Iterator[Problem]:
        if self.save and (self.lower_only or self.sweep):
            other = "aot.lower_only=true compiles nothing" if self.lower_only else "aot.sweep compiles many steps"
            yield "aot.save", f"{echo(self.save)} needs exactly one compiled step, but {other}"


def _is_topology(name: str) -> bool:
    """Returns whether a name has the form of a topology; whether such a slice exists, only the compiler knows."""
    family, _, shape = name.partition(":")
    if family == "cpu":
        return shape.isascii() and shape.isdecimal() and len(shape) < 4 and 0 < int(shape) <= 512
    return family in SLICES and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape) is not None
