"""`python -m nnxtrain.aot CONFIG.yml aot.topology=v5e:4x4 [key=val ...]`: compiles without the devices."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nnxtrain.cli.command import answer_about_keys, exit_on_signals, load_config, make_parser, parse, run, traced
from nnxtrain.config.schema import Config
from nnxtrain.errors import ConfigError

if TYPE_CHECKING:
    from nnxtrain.build.registry import Registry

DOES_NOT_FIT = 3
EPILOG = """\
examples:
  python -m nnxtrain.aot configs/tiny.yml aot.topology=cpu:8 mesh.fsdp=8
  python -m nnxtrain.aot configs/llama2-7b.yml aot.topology=v5e:4x4 mesh.fsdp=16 aot.report=report.json
  python -m nnxtrain.aot configs/llama3-8b.yml aot.topology=v5p:2x2x4 mesh.fsdp=16 aot.lower_only=true
  python -m nnxtrain.aot configs/tiny.yml aot.topology=cpu:4 aot.sweep='remat.policy=none,full batch.accum_steps=1,2'

The programs are those that training would run; nothing is allocated, and no accelerator is needed. TPU topologies need
libtpu: pip install 'nnxtrain[tpu]'. docs/aot.md explains each figure.

exit codes: 0 fits, or the memory is not known, 2 configuration or usage, 3 does not fit
"""


def main(argv: Sequence[str] | None = None, *, registry: "Registry | None" = None) -> int:
    """Runs the command line; returns the exit code. `registry` contains entries from outside the package."""
    parser = make_parser(
        "aot",
        "Compiles the programs of a run for devices that this machine need not have: will it fit, and what limits it?",
        epilog=EPILOG,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.yml", help="configuration file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=val", help="keys that override the file")
    parser.add_argument(
        "--list-keys", nargs="?", const="aot", metavar="PREFIX", help="print keys: type, default, meaning"
    )
    arguments = parse(argv, parser)
    if answer_about_keys(arguments):
        return 0
    config = load_config(arguments, command="aot", extra=registry.names() if registry else None)
    prepare(config)
    exit_on_signals()
    with traced(config):
        from nnxtrain.build.registry import BUILT_IN

        if config.aot.sweep:
            from nnxtrain.aot.sweep import sweep

            return sweep(config, arguments.config, arguments.overrides, registry or BUILT_IN)
        return report_on(config, registry or BUILT_IN)


def report_on(config: Config, registry: "Registry") -> int:
    """Compiles, prints the report and writes it to `aot.report`; returns the exit code."""
    from nnxtrain.aot.programs import compile_ahead
    from nnxtrain.aot.show import show
    from nnxtrain.host.files import write_json

    report = compile_ahead(config, registry, say=lambda line: print(line, flush=True))
    show(report)
    if config.aot.report:
        write_json(Path(config.aot.report).expanduser(), report.as_json())
    return DOES_NOT_FIT if report.fits is False else 0


def prepare(config: Config) -> None:
    """Sets environment variables before jax is imported.

    With libtpu installed, jax would search for a TPU for a minute; and without ALLOW_MULTIPLE_LIBTPU_LOAD only one
    process at a time may load libtpu.

    Raises:
        ConfigError: `aot.topology` is not set or has no compiler here, or a path is a folder instead of a file.
    """
    topology = config.aot.topology
    for key, is_wrong in (("report", Path.is_dir), ("save", Path.is_dir), ("dump_hlo", Path.is_file)):
        path = getattr(config.aot, key)
        if path is not None and is_wrong(Path(path).expanduser()):
            raise ConfigError(f"aot.{key}={path} is a {'file' if key == 'dump_hlo' else 'folder'}")
    if topology is None:
        raise ConfigError("aot.topology is not set; for example v5e:4x4, or cpu:8; see --help")
    family, _, count = topology.partition(":")
    os.environ["JAX_PLATFORMS"] = "cpu"
    if family == "cpu":
        flags = [word for word in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in word]
        os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={count}"])
    elif find_spec("libtpu") is None:
        raise ConfigError(f"aot.topology={topology} needs the TPU compiler: pip install 'nnxtrain[tpu]'")
    else:
        quiet = {"TPU_SKIP_MDS_QUERY": "1", "TPU_MIN_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3"}
        os.environ.update(quiet | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"})


if __name__ == "__main__":
    run(main)
