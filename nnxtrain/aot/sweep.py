"""Compiles a grid of configurations in one process; prints a table and the best cell that fits."""

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nnxtrain.aot.programs import compile_ahead
from nnxtrain.aot.report import Report
from nnxtrain.aot.show import show_cells
from nnxtrain.build.registry import Registry
from nnxtrain.config.load import load
from nnxtrain.config.record import as_mapping
from nnxtrain.config.schema import Config
from nnxtrain.errors import ConfigError, UserError
from nnxtrain.host.environment import environment
from nnxtrain.host.files import write_json
from nnxtrain.host.text import duration

NONE_FITS = 3


def sweep(config: Config, path: str, words: Sequence[str], registry: Registry) -> int:
    """Compiles every cell of the grid of `aot.sweep`, prints the table, names the best; returns the exit code.

    A cell that cannot be compiled becomes a row with the reason; an invalid configuration counts as not fitting, any
    other failure as not known. With `aot.report` each cell is written when it is done, and a grid that is started again
    skips the cells that are there.

    Args:
        config: the configuration without the settings of any cell.
        path: of the file that it was loaded from.
        words: the overrides of the file.
        registry: tables in which names are looked up.
    """
    file = Path(config.aot.report).expanduser() if config.aot.report else None
    base = [word for word in words if not word.startswith(("aot.sweep=", "aot.report="))]
    whole = {name: value for name, value in as_mapping(config).items() if name not in ("aot.sweep", "aot.report")}
    made_of = {"config": whole, "versions": environment()["versions"]}
    known = _read(file, made_of) if file else {}
    grid = [" ".join(cell) for cell in cells_of(str(config.aot.sweep))]
    began, new = time.monotonic(), 0
    for number, cell in enumerate(grid):
        if "compile_s" in known.get(cell, {}):  # cells that failed are tried again
            continue
        left = (time.monotonic() - began) / new * (len(grid) - number) if new else None
        rest = f", about {duration(left)} left" if left is not None else ""
        print(f"{number + 1}/{len(grid)}  {cell}{rest}", flush=True)
        known[cell] = _cell(path, [*base, *cell.split()], registry)
        new += 1
        if file:
            write_json(file, made_of | {"cells": known})
    found = {cell: known[cell] for cell in sorted(grid, key=lambda cell: _rank(known[cell]))}
    if not any("compile_s" in cell for cell in found.values()):
        raise _refusal(str(config.aot.sweep), found.values())
    show_cells(found)
    best, figures = next(iter(found.items()))
    if figures["fits"] is False:
        print("none fits")
        return NONE_FITS
    print(
        f"best  {best}"
        if figures["fits"]
        else f"least memory  {best}; set aot.hbm_gib, or aot.host_gib where it offloads"
    )
    return 0


def cells_of(words: str) -> Iterator[tuple[str, ...]]:
    """Yields the words of each cell of a grid `KEY=VALUE,VALUE KEY=VALUE`."""
    names, values = zip(*(word.split("=", 1) for word in words.split()), strict=True)
    for chosen in itertools.product(*(value.split(",") for value in values)):
        yield tuple(f"{name}={value}" for name, value in zip(names, chosen, strict=True))


def _cell(path: str, words: list[str], registry: Registry) -> dict[str, Any]:
    """Returns the figures of one cell."""
    try:
        config = load(
            path, words, extra=registry.names(), say=lambda line: None
        )  # a cell may make keys of the file irrelevant
        report = compile_ahead(config, registry, say=lambda line: None)
    except (UserError, RuntimeError, ValueError) as error:
        fits = False if isinstance(error, ConfigError) else None
        return {"fits": fits, "problem": " ".join(str(error).split())[:300]}
    return _figures(report)


def _refusal(grid: str, cells: Iterable[dict[str, Any]]) -> UserError:
    """Returns the error if no cell was compiled: a ConfigError only if every cell is an invalid configuration."""
    failed = [cell["problem"] for cell in cells if cell["fits"] is None]
    if failed:
        return UserError(f"no cell of the grid was compiled: {failed[0]}")
    return ConfigError(f"aot.sweep={grid}: no cell is a valid configuration: {next(cell['problem'] for cell in cells)}")


def _figures(report: Report) -> dict[str, Any]:
    problem = next((program.problem for program in report.programs if program.problem), None)
    return {
        "fits": report.fits,
        "peak_bytes": report.peak_bytes,
        "host_bytes": report.host_bytes,
        "step_s": report.step_s,
        "mfu_ceiling": report.mfu_ceiling,
        "compile_s": sum(program.lower_s + (program.compile_s or 0) for program in report.programs),
        "problem": problem,
    }


def _rank(cell: dict[str, Any]) -> tuple[bool, float, float]:
    """Returns the sort key of a cell: those that may fit first, then by predicted time, then by memory."""
    missing = float("inf")
    return cell["fits"] is False, cell.get("step_s") or missing, cell.get("peak_bytes") or missing


def _read(file: Path, made_of: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the cells of a report.

    Raises:
        ConfigError: the file is not a grid, or is one of another configuration or of other versions.
    """
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        cells, others = found.pop("cells"), found
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"aot.report={file} exists and is not a grid; choose another file") from error
    if others != made_of:
        raise ConfigError(f"aot.report={file} is the grid of another configuration; choose another file")
    return cells
