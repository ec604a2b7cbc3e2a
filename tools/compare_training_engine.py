"""`python tools/compare_training_engine.py CONFIG.yml [key=val ...]`: is the split engine correct, and how fast?

A cycle is `m_steps` microbatches of `batch.global_size / batch.accum_steps` rows. The tool's own options:

    suite=all|parity|metrics|accumulation|benchmark
        parity        weights, moments, counters and gradients, by path, against the single step and one large batch
        metrics       every metric of every step, including decisions to skip
        accumulation  what is in the accumulator before and after each update
        benchmark     time, host time and memory of both, in turn; does not affect the exit code
    types=float32,bfloat16  compute dtypes in which the suites run
    m_steps=5         microbatches per cycle
    n_iterations=10   timed cycles per side
    profile=false     whether to trace further cycles after the timed ones, and print figures of the trace
    profile_dir=DIR   folder for the trace
    report=FILE       write the figures as JSON

Exit codes: 0 equal within tolerance, 1 not equal, 2 configuration or usage.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from nnxtrain.cli.command import parse, run  # noqa: E402
from nnxtrain.config.echo import echo  # noqa: E402
from nnxtrain.config.load import load  # noqa: E402
from nnxtrain.errors import ConfigError  # noqa: E402
from nnxtrain.host.platform import choose_platform  # noqa: E402
from tools.words import split_words  # noqa: E402

if TYPE_CHECKING:
    from nnxtrain.build.registry import Registry
    from tools.engine_trial import Trial

OWN = {
    "suite": "all",
    "types": "float32,bfloat16",
    "m_steps": 5,
    "n_iterations": 10,
    "profile": "false",
    "profile_dir": "",
    "report": "",
}
PARITY = ("parity", "metrics", "accumulation")
SUITES = ("all", *PARITY, "benchmark")
MIB = 1 / 2**20


class Check(NamedTuple):
    """One comparison: what, the largest difference and where, the tolerance."""

    suite: str
    what: str
    where: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.error <= self.limit


def main(argv: Sequence[str] | None = None, *, registry: "Registry | None" = None) -> int:
    """Compares, measures, prints; returns the exit code. `registry` contains engines from outside the package."""
    form = argparse.RawDescriptionHelpFormatter
    name = "tools/compare_training_engine.py"
    parser = argparse.ArgumentParser(prog=name, description=__doc__, allow_abbrev=False, formatter_class=form)
    parser.add_argument("config", metavar="CONFIG.yml")
    parser.add_argument(
        "words", nargs="*", metavar="name=value", help="options of the tool, and keys that override the file"
    )
    arguments = parse(argv, parser)
    own, rest = split_words(arguments.words, OWN)
    config = load(arguments.config, rest)
    check_words(own)
    choose_platform(config)
    from benchmarks.figures import write_report
    from nnxtrain.build.registry import BUILT_IN

    registry = registry or BUILT_IN
    sizes = {"rows": config.batch.global_size // config.batch.accum_steps, "microbatches": own["m_steps"]}
    checks = list(compared(arguments.config, rest, own, registry=registry, **sizes))
    report: dict[str, Any] = {"m_steps": own["m_steps"], "n_iterations": own["n_iterations"], "words": rest}
    report["environment"] = {name: os.environ.get(name) for name in ("GLIBC_TUNABLES", "XLA_FLAGS")}
    if checks:
        print_checks(checks)
        report["checks"] = [check._asdict() | {"holds": check.holds} for check in checks]
    if own["suite"] in ("all", "benchmark"):
        report |= measured(arguments.config, rest, own, registry=registry, **sizes)
    write_report(report, own["report"])
    broken = [check for check in checks if not check.holds]
    for check in broken:
        print(f"DIFFERENT: {check.suite}, {check.what}: {check.where} by {check.error:.3g}, limit {check.limit:g}")
    if checks and not broken:
        print(f"equal: {len(checks)} comparisons hold")
    return 1 if broken else 0


def check_words(own: dict[str, Any]) -> None:
    """Raises ConfigError for invalid values of the tool's own options."""
    if own["suite"] not in SUITES:
        raise ConfigError(f"suite={echo(own['suite'])} is not one of {', '.join(SUITES)}")
    if unknown := set(own["types"].split(",")) - {"float32", "bfloat16"}:
        raise ConfigError(f"types={echo(own['types'])}: '{echo(min(unknown))}' is not one of float32, bfloat16")
    if own["profile"] not in ("true", "false"):
        raise ConfigError(f"profile={echo(own['profile'])} must be true or false")
    if own["m_steps"] < 1 or own["n_iterations"] < 1:
        raise ConfigError(f"m_steps={own['m_steps']} n_iterations={own['n_iterations']}: each must be at least 1")
    if own["profile_dir"] and Path(own["profile_dir"]).is_file():
        raise ConfigError(f"profile_dir={echo(own['profile_dir'])} is a file, not a folder")
    if own["profile"] == "true" and own["suite"] not in ("all", "benchmark"):
        raise ConfigError(f"profile=true traces the cycles of suite=benchmark, and suite={own['suite']} has none")


def compared(
    path: str, words: list[str], own: dict[str, Any], *, rows: int, microbatches: int, registry: "Registry"
) -> Iterator[Check]:
    """Yields the comparisons of a suite."""
    from tools.engine_trial import run_trial

    suites = [name for name in PARITY if own["suite"] in ("all", name)]
    for kind in own["types"].split(",") if suites else ():
        print(f"trial in {kind} ...", flush=True)
        sizes = {"rows": rows, "microbatches": microbatches}
        trial = run_trial(
            path, [*words, f"model.dtype={kind}"], not_compiled=kind == "float32", registry=registry, **sizes
        )
        for name in suites:
            yield from CHECKS[name](kind, trial, microbatches)


def parity(kind: str, trial: "Trial", microbatches: int) -> Iterator[Check]:
    """Compares weights, moments, counters and gradients."""
    from tools.engine_trial import TOLERANCES, worst

    limit = TOLERANCES[kind]["arrays"]
    for ours, theirs in pairs_of(trial):
        found = worst(trial.outcomes[ours].arrays, trial.outcomes[theirs].arrays)
        yield Check("parity", f"state, {kind}, {ours} against {theirs}", *found, limit)
    for theirs in ("single step", "large batch"):
        found = worst(trial.gradients["engine"], trial.gradients[theirs])
        yield Check("parity", f"gradients, {kind}, engine against {theirs}", *found, limit)


def metrics(kind: str, trial: "Trial", microbatches: int) -> Iterator[Check]:
    """Compares every metric of every step; counts, rates and decisions must be identical."""
    from tools.engine_trial import LOSSES, TOLERANCES, worst

    for ours, theirs in pairs_of(trial):
        sides = (trial.outcomes[ours].metrics, trial.outcomes[theirs].metrics)
        names = sorted(sides[0][0].keys() | sides[1][0].keys())
        for name in names:
            series = ({str(step): row[name] for step, row in enumerate(side) if name in row} for side in sides)
            found = worst(*series)
            limit = TOLERANCES[kind]["metrics"]
            if name in ("learning_rate", "targets", "tokens", "bad", "skipped"):
                limit = 0.0
            elif kind == "float32" and "loss" in name:
                limit = LOSSES
            yield Check("metrics", f"{name}, {kind}, {ours} against {theirs}", f"step {found.path}", found.error, limit)


def accumulation(kind: str, trial: "Trial", microbatches: int) -> Iterator[Check]:
    """Checks that the accumulator counts each microbatch and is empty after each update."""
    for step, (before, after, is_zero) in enumerate(trial.counts):
        error = abs(before - microbatches) + abs(after) + (not is_zero)
        yield Check("accumulation", f"count and sums, {kind}", f"step {step}", float(error), 0.0)


CHECKS = {"parity": parity, "metrics": metrics, "accumulation": accumulation}


def pairs_of(trial: "Trial") -> list[tuple[str, str]]:
    """Returns which sides are compared."""
    pairs = [("engine", "single step"), ("engine", "large batch"), ("first step", "not compiled")]
    return [pair for pair in pairs if pair[1] in trial.outcomes]


def measured(
    path: str, words: list[str], own: dict[str, Any], *, rows: int, microbatches: int, registry: "Registry"
) -> dict[str, Any]:
    """Returns figures of time and memory, and of the trace if there is one; prints them."""
    from nnxtrain.run.recompiles import CompileLog
    from tools.engine_cost import make_side, measure, trace
    from tools.engine_trial import program_of

    print(f"benchmark: compiling, then {own['n_iterations']} cycles of each side in turn ...", flush=True)
    compiles = CompileLog()
    engines = {"baseline": "single", "engine": "split"}
    sides = {
        name: make_side(
            program_of(path, [*words, f"engine.name={engine}"], rows=rows, microbatches=microbatches, registry=registry)
        )
        for name, engine in engines.items()
    }
    figures = measure(sides, own["n_iterations"], compiles=compiles)
    print_figures(figures)
    report: dict[str, Any] = {"benchmark": figures}
    if own["profile"] == "true":
        folder = Path(own["profile_dir"] or tempfile.mkdtemp(prefix="engine-trace-"))
        digest = trace(sides, own["n_iterations"], folder)
        print(f"trace    {folder}")
        for total in digest.annotations:
            print(f"  {total.name:26} {total.calls:6} calls  {total.ms:10.2f} ms")
        report["annotations"] = {total.name: {"calls": total.calls, "ms": total.ms} for total in digest.annotations}
        report["trace"] = str(folder)
    return report


def print_checks(checks: list[Check]) -> None:
    """Prints a line per comparison: the largest difference, the tolerance, what was compared, and where."""
    print(f"{'error':>9} {'limit':>7}")
    for check in checks:
        sign = " " if check.holds else "!"
        print(f"{check.error:9.2g} {check.limit:7g} {sign} {check.suite:12} {check.what}; {check.where}")


def print_figures(figures: dict[str, Any]) -> None:
    """Prints the figures of both sides, one column each."""
    from benchmarks.figures import shown
    from nnxtrain.aot.show import print_table

    lines = (
        ("cycle, ms", "cycle_s", 1e3),
        ("host dispatch, ms", "dispatch_s", 1e3),
        ("device after dispatch, ms", "device_s", 1e3),
        ("tokens/s", "tokens_per_s", 1.0),
        ("compile, s", "compile_s", 1.0),
        ("peak, MiB", "peak_bytes", MIB),
    )
    sides = ("baseline", "engine")
    rows = [(label, *(shown(figures[side][name], scale) for side in sides)) for label, name, scale in lines]
    counts = (figures[side]["compiles"] for side in sides)
    rows.append(("compilations", *(", ".join(f"{name} {count}" for name, count in each.items()) for each in counts)))
    rows.append(("ratio of cycles", "", shown(figures["ratio"])))
    rows.append(("ratio of peaks", "", shown(figures["peak_ratio"])))
    print_table(("", *sides), rows, title="single step and split engine: median (p10 to p90)")


def use_large_pages() -> None:
    """Restarts this process with huge pages, if the C library supports them; both sides then use them.

    On CPU XLA allocates the temporaries of a program anew for each execution, and page faults then cost more than the
    engine itself. The single step, whose microbatches are a loop inside one program, pays once.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    use_large_pages()
    run(main)
