"""How many devices work along each axis."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The device mesh. Part of the axes exist: a batch is cut over `data`, everything else is whole on each device."""

    data: int = key(-1, "devices that share a batch; -1 = all that are left", span="[-1, inf)")
    fsdp: int = key(1, "devices that share weights and a batch", planned=True)
    tensor: int = key(1, "devices that share the matrices of a layer", planned=True)
    context: int = key(1, "devices that share a sequence", planned=True)
    stage: int = key(1, "devices that hold different layers", planned=True)
    expert: int = key(1, "devices that hold different experts", planned=True)
    rules: tuple[str, ...] = key((), "LOGICAL=MESH axis pairs that change the sharding table", planned=True)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields `(key, what is wrong and what would be right)`."""
        if self.data == 0:
            yield "mesh.data", "0 must be at least 1, or -1 for all devices that are left"
