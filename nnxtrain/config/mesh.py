"""The sizes of the mesh axes, and what each axis shards."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nnxtrain.config.echo import echo
from nnxtrain.config.key import Problem, key
from nnxtrain.config.presets import MESH_PRESETS
from nnxtrain.config.reads import unless, when

AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")  # of the device mesh, slowest links first
BATCH_AXES = ("data", "fsdp", "expert")  # shard the rows of a batch, unless mesh.rules says otherwise
CONTEXT_AXES = ("context",)  # shard the tokens of a row
LOGICAL = ("batch", "sequence", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layer", "stage")
OPTIMIZER = "optimizer."  # prefix of a logical axis: the rule is for optimizer state alone

SHARDED_WEIGHTS = unless("mesh.fsdp", 1) | unless("mesh.tensor", 1) | unless("mesh.expert", 1) | when("mesh.rules")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The device mesh, and which of its axes shard which dimension."""

    preset: str | None = key(
        None, "a common mesh; other keys of this section take precedence", choices=tuple(MESH_PRESETS)
    )
    data: int = key(-1, "data parallelism: devices along this axis; -1 = all remaining", span="[-1, 1048576]")
    fsdp: int = key(
        1, "fully sharded data parallelism: devices along this axis; -1 = all remaining", span="[-1, 1048576]"
    )
    tensor: int = key(1, "tensor parallelism: devices along this axis; -1 = all remaining", span="[-1, 1048576]")
    context: int = key(
        1,
        "context parallelism (sequences are sharded): devices along this axis; -1 = all remaining",
        span="[-1, 1048576]",
    )
    stage: int = key(1, "pipeline parallelism: devices along this axis", planned=True)
    expert: int = key(
        1,
        "expert parallelism (batches are sharded too): devices along this axis; -1 = all remaining",
        span="[-1, 1048576]",
    )
    slices: int = key(
        1, "groups of devices (TPU slices) joined by a slower network; mesh.data spans them", span="[1, 1048576]"
    )
    rules: tuple[str, ...] = key((), "LOGICAL=AXIS+AXIS or LOGICAL=none: changes to the sharding rules")
    replication_tolerance: float = key(
        0.02,
        "fraction of the weights that may be replicated although fsdp, tensor or expert could shard them",
        span="[0, 1]",
        read=SHARDED_WEIGHTS,
    )

    def sizes(self) -> dict[str, int]:
        """Returns the devices along each axis, slowest first; one may be -1.

        If another axis is -1, which takes all remaining devices, a `data` of -1 is 1.
        """
        sizes = {name: int(getattr(self, name)) for name in AXES}
        others = [size for name, size in sizes.items() if name != "data"]
        return sizes | {"data": 1} if sizes["data"] == -1 in others else sizes

    def ways(self, logical: str, usual: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[int, str]:
        """Returns the number of shards of a dimension by `mesh.rules`, or else by the axes `usual`, and their keys."""
        axes = dict(map(parsed, self.rules)).get(logical, usual)
        cutting = [axis for axis in axes if sizes.get(axis, 1) > 1]  # `checks` reports others
        return math.prod(sizes[axis] for axis in cutting), " x ".join(f"mesh.{axis}" for axis in cutting)

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and how to fix it."""
        return self._sizes(), self._slices(), self._rules()

    def _sizes(self) -> Iterator[Problem]:
        sizes = self.sizes()
        for name in (name for name, size in sizes.items() if size == 0):
            yield f"mesh.{name}", f"{sizes[name]} must be at least 1, or -1 for all remaining devices"
        free = [name for name, size in sizes.items() if size == -1]
        for name in free[1:]:
            yield f"mesh.{name}", f"mesh.{free[0]} is -1 too; only one axis can take all remaining devices"

    def _slices(self) -> Iterator[Problem]:
        data = self.sizes()["data"]
        if self.slices > 1 and data > 0 and data % self.slices:
            fits = math.ceil(data / self.slices) * self.slices
            yield (
                "mesh.data",
                f"{data} must be a multiple of mesh.slices={self.slices}; the next valid value is {fits}",
            )

    def _rules(self) -> Iterator[Problem]:
        for rule in self.rules:
            yield from (("mesh.rules", what) for what in _problems_of(rule))
        rules, sizes = dict(map(parsed, self.rules)), self.sizes()
        both = {*rules.get("batch", BATCH_AXES)} & {*rules.get("sequence", CONTEXT_AXES)}
        for axis in sorted(both):
            if sizes.get(axis, 1) != 1:
                yield "mesh.rules", f"{axis} shards both batch and sequence; use it for one of them, such as batch=fsdp"


def parsed(rule: str) -> tuple[str, tuple[str, ...]]:
    """Returns the logical axis of `LOGICAL=AXIS+AXIS` and the mesh axes that shard it."""
    logical, _, axes = rule.partition("=")
    return logical, () if axes == "none" else tuple(axes.split("+"))


def _problems_of(rule: str) -> Iterator[str]:
    logical, axes = parsed(rule)
    if logical.removeprefix(OPTIMIZER) not in LOGICAL:
        yield f"'{echo(rule)}': '{echo(logical)}' is not one of {', '.join(LOGICAL)}, optionally after {OPTIMIZER}"
    if unknown := [axis for axis in axes if axis not in AXES]:
        yield f"'{echo(rule)}': '{echo(unknown[0])}' is not one of {', '.join(AXES)}, joined by +, or none"
    if len(set(axes)) < len(axes):
        yield f"'{echo(rule)}': an axis occurs twice"
