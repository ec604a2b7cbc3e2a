"""Prints a report as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from nnxtrain.aot.cost import ProgramReport
from nnxtrain.aot.report import Report
from nnxtrain.host.text import bytes_text

WIDTH = 120  # of a table, if stdout is not a terminal


def show(report: Report) -> None:
    """Prints a report: memory and FLOPs by program, communication between devices, and whether it fits."""
    shape = " x ".join(f"{name} {size}" for name, size in report.mesh.items() if size > 1) or "one device"
    print(f"{report.topology}: {report.devices} x {report.device_kind}, mesh {shape}")
    lines = (
        ("lower, s", lambda one: _number(one.lower_s)),
        ("compile, s", lambda one: _number(one.compile_s)),
        ("arguments", lambda one: bytes_text(one.memory and one.memory.arguments)),
        ("temporaries", lambda one: bytes_text(one.memory and one.memory.temporaries)),
        ("outputs, not aliased", lambda one: bytes_text(one.memory and one.memory.outputs - one.memory.aliased)),
        ("code", lambda one: bytes_text(one.memory and one.memory.code)),
        ("peak", lambda one: bytes_text(one.memory and one.memory.peak)),
        ("host memory", lambda one: bytes_text(one.memory and one.memory.host)),
        ("matrix TFLOP, all devices", _products),
        ("TFLOP by the compiler", lambda one: _number(one.compiler_flops, 1e-12)),
        ("bytes accessed", lambda one: bytes_text(one.bytes_accessed)),
        ("compute / memory / network, ms", _times),
        ("binds", lambda one: one.roofline.binds if one.roofline else "-"),
        ("executions per step", lambda one: str(one.executions)),
        ("hash", lambda one: one.hlo_hash),
    )
    columns = ["per device", *(program.name for program in report.programs)]
    print_table(columns, [[label, *(line(program) for program in report.programs)] for label, line in lines])
    for program in report.programs:
        show_collectives(program)
    owners = vars(report.owners).items()
    print("memory   " + ", ".join(f"{name} {bytes_text(size)}" for name, size in owners if size is not None))
    print(f"model    {report.model_flops / 1e12:,.4g} TFLOP a step by formula")
    if report.step_s is not None:
        print(f"a step   at least {_number(report.step_s, 1e3)} ms: MFU at most {_number(report.mfu_ceiling, 100)} %")
    if names := dict.fromkeys(name for program in report.programs for name in program.unknown_flops):
        print(f"unknown  FLOPs of the kernels {', '.join(names)}: compute and step times are lower bounds")
    print(verdict(report))
    for line in report.suggestions:
        print(f"  try    {line}")


def show_collectives(program: ProgramReport) -> None:
    """Prints the communication between devices in one execution of a program."""
    if not program.collectives:
        return
    rows = [
        [
            total.kind,
            "+".join(total.axes) or "?",
            str(total.count),
            bytes_text(total.bytes_ / total.count),
            bytes_text(total.link_bytes),
        ]
        for total in program.collectives
    ]
    print_table([f"{program.name}: collective", "axes", "count", "bytes each", "sent by a device"], rows)


def verdict(report: Report) -> str:
    """Returns one line: whether device and host memory suffice."""
    problems = [f"{program.name}: {program.problem}" for program in report.programs if program.problem]
    if problems:
        return f"does not fit: {problems[0]}"
    what = "peak" if report.peak_bytes is not None else "the state alone"
    device = f"{what} {bytes_text(report.peak_bytes or report.state_bytes)}"
    if report.hbm_bytes is None or report.free_bytes is None:
        device += f"; the memory of {report.device_kind} is not known; set aot.hbm_gib"
    else:
        device += f" of {bytes_text(report.hbm_bytes)}"
        device += f", {bytes_text(-report.free_bytes)} too much" if report.free_bytes < 0 else ""
    words = [device]
    if report.host_bytes:
        host = f"host memory {bytes_text(report.host_bytes)}"
        if report.host_limit_bytes is None:
            words.append(f"{host} per process, of an unknown size; set aot.host_gib")
        else:
            over = report.host_bytes - report.host_limit_bytes
            words.append(f"{host} of {bytes_text(report.host_limit_bytes)} per process")
            words[-1] += f", {bytes_text(over)} too much" if over > 0 else ""
    return {True: "fits: ", False: "does not fit: ", None: ""}[report.fits] + "; ".join(words)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Prints a table; all columns but the first are right-aligned."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=WIDTH)).print(table)


def show_cells(cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints the cells of a grid in the order given."""
    rows = [
        [
            words,
            {True: "yes", False: "no", None: "?"}[cell.get("fits")],
            bytes_text(cell.get("peak_bytes")),
            bytes_text(cell.get("host_bytes")),
            _number(cell.get("step_s"), 1e3),
            _number(cell.get("mfu_ceiling"), 100),
            _number(cell.get("compile_s")),
        ]
        for words, cell in cells.items()
    ]
    print_table(["words", "fits", "peak", "host memory", "step, ms", "MFU at most, %", "compile, s"], rows)
    for words, cell in cells.items():
        if cell.get("problem"):
            print(f"{words}: {cell['problem']}")


def _products(program: ProgramReport) -> str:
    known = _number(program.product_flops / 1e12) if program.product_flops or not program.unknown_flops else ""
    return " + ".join(filter(None, [known, "unknown" if program.unknown_flops else ""]))


def _times(program: ProgramReport) -> str:
    if program.roofline is None:
        return "-"
    line = program.roofline
    return " / ".join(f"{seconds * 1e3:.3g}" for seconds in (line.compute_s, line.memory_s, line.network_s))


def _number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.4g}"
