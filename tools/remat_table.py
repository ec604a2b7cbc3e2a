"""`python tools/remat_table.py CONFIG.yml [compiled=true] [report=FILE] [key=val ...]`: what each remat policy costs.

For each policy: the bytes saved for the backward pass, by one layer and by the whole model, for one microbatch, over
all devices; how many of these are in host memory; and the FLOPs of matrix products that a step recomputes, also as a
fraction of the FLOPs of a step without remat. These are read from the jaxpr: nothing is compiled and no array is
allocated. `compiled=true` also compiles the step for one device, and adds the bytes of its temporaries.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from nnxtrain.cli.command import parse, run  # noqa: E402
from nnxtrain.config.checks import LEAVES  # noqa: E402
from nnxtrain.config.load import load  # noqa: E402
from nnxtrain.config.remat import RematConfig  # noqa: E402
from nnxtrain.config.schema import Config  # noqa: E402
from nnxtrain.errors import ConfigError  # noqa: E402
from nnxtrain.host.files import write_whole  # noqa: E402
from nnxtrain.host.platform import choose_platform  # noqa: E402
from tools.words import split_words  # noqa: E402

POLICIES = tuple(name for name in LEAVES["remat.policy"].declared.metadata["choices"] if name != "custom")
SWITCH = {"true": True, "false": False}


@dataclass(frozen=True)
class Cost:
    """Cost of one policy; bytes of one microbatch, FLOPs of one step, both over all devices.

    Attributes:
        layer_bytes: saved for the backward pass by one layer.
        model_bytes: saved by all layers, embedding, head and loss.
        host_bytes: how many of the latter are in host memory.
        recomputed_flops: of the matrix products that the backward pass recomputes.
        recomputed_share: the same as a fraction of the FLOPs of a step without remat.
        temp_bytes: of the compiled step; None if it was not compiled, or if this backend cannot offload.
    """

    layer_bytes: float
    model_bytes: int
    host_bytes: int
    recomputed_flops: int
    recomputed_share: float
    temp_bytes: int | None


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/remat_table.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG.yml")
    parser.add_argument(
        "words", nargs="*", metavar="key=val", help="compiled=true, report=FILE, and keys of the configuration"
    )
    arguments = parse(argv, parser)
    own, rest = split_words(arguments.words, {"compiled": "false", "report": ""})
    if own["compiled"] not in SWITCH:
        raise ConfigError(f"compiled={own['compiled']}: expected true or false")
    config = load(arguments.config, rest)
    choose_platform(config)
    costs = compare(config, compiled=SWITCH[own["compiled"]])
    rows, sequence = config.batch.microbatch, config.batch.sequence
    print(f"{config.model.layers} layers of width {config.model.embed}, microbatch of {rows} rows of {sequence} tokens")
    Console(highlight=False, soft_wrap=True).print(table_of(costs))
    if own["report"]:
        report = {"rows": rows, "sequence": sequence, "policies": {name: asdict(cost) for name, cost in costs.items()}}
        write_whole(Path(own["report"]), json.dumps(report, indent=2) + "\n")
    return 0


def table_of(costs: Mapping[str, Cost]) -> Table:
    """Returns the costs as a table."""
    table = Table("policy", "layer\nMiB", "model\nMiB", "on host\nMiB", "again\nGFLOP", "again\nshare")
    compiled = any(cost.temp_bytes is not None for cost in costs.values())
    if compiled:
        table.add_column("temp\nMiB")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cost in costs.items():
        sizes = [f"{size / 2**20:,.3f}" for size in (cost.layer_bytes, cost.model_bytes, cost.host_bytes)]
        temp = "-" if cost.temp_bytes is None else f"{cost.temp_bytes / 2**20:,.3f}"
        work = [f"{cost.recomputed_flops / 1e9:,.3f}", f"{cost.recomputed_share:.1%}"]
        table.add_row(name, *sizes, *work, *([temp] if compiled else []))
    return table


def compare(config: Config, *, compiled: bool) -> dict[str, Cost]:
    """Returns the cost of each policy, and of the custom policy of `config`, if it has one."""
    remats = [RematConfig(policy=name) for name in POLICIES] + [config.remat] * (config.remat.policy == "custom")
    least = gradient_flops(replace(config, remat=RematConfig(policy="none")))
    return {remat.policy: cost_of(replace(config, remat=remat), least, compiled=compiled) for remat in remats}


def cost_of(config: Config, least: int, *, compiled: bool) -> Cost:
    """Returns the cost of the policy of `config`, whose step takes `least` FLOPs without remat."""
    from nnxtrain.aot.jaxpr import product_flops
    from nnxtrain.aot.remat import kept_bytes, residual_bytes, residuals, trace_loss
    from nnxtrain.build.program import make_program, on_one_device
    from nnxtrain.build.registry import BUILT_IN

    period = config.model.period
    deeper = replace(config, model=replace(config.model, layers=config.model.layers + period))
    kept, gradient = trace_loss(make_program(on_one_device(config)), residuals, gradients)
    device, host = residual_bytes(kept)
    more = config.batch.accum_steps * product_flops(gradient) - least
    return Cost(
        layer_bytes=(sum(kept_bytes(deeper, BUILT_IN)) - device - host) / period,
        model_bytes=device + host,
        host_bytes=host,
        recomputed_flops=more,
        recomputed_share=more / least,
        temp_bytes=temp_bytes(config) if compiled else None,
    )


def gradient_flops(config: Config) -> int:
    """Returns the FLOPs of all matrix products in loss and gradients of a step."""
    from nnxtrain.aot.jaxpr import product_flops
    from nnxtrain.aot.remat import trace_loss
    from nnxtrain.build.program import make_program, on_one_device

    (gradient,) = trace_loss(make_program(on_one_device(config)), gradients)
    return config.batch.accum_steps * product_flops(gradient)


def gradients(loss: Any, params: Any) -> Any:
    """Returns the loss and its gradients."""
    import jax

    return jax.value_and_grad(loss)(params)


def temp_bytes(config: Config) -> int | None:
    """Returns the temporaries of the compiled step, in bytes; None if the policy offloads and this backend cannot."""
    from nnxtrain.build.program import make_program, on_one_device
    from nnxtrain.models.remat import can_offload

    program = make_program(on_one_device(config))
    if program.offloaded and not can_offload(program.mesh.devices.flat[0]):
        return None
    (memory,) = program.make_engine().memory().values()
    return memory.temp_size_in_bytes


if __name__ == "__main__":
    run(main)
