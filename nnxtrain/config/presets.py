"""Sizes of published decoders, for `model.preset`, and common meshes, for `mesh.preset`.

Sources: Llama 2, arXiv:2307.09288; Llama 3, arXiv:2407.21783; GPT-2, Radford et al. 2019 (its sizes in our decoder:
rotary positions and a gated feed-forward layer of the same number of weights).
"""

from typing import Any

_LLAMA3 = {"vocab": 128256, "kv_heads": 8, "rope_theta": 500000.0}
_LLAMA31 = _LLAMA3 | {"rope_scaling": "llama3", "rope_factor": 8.0}
_LLAMA32 = _LLAMA31 | {"rope_factor": 32.0, "tied": True}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m-like": {"layers": 12, "embed": 768, "heads": 12, "mlp": 2048, "vocab": 50257, "tied": True},
    "llama2-7b": {"layers": 32, "embed": 4096, "heads": 32, "mlp": 11008, "vocab": 32000},
    "llama2-13b": {"layers": 40, "embed": 5120, "heads": 40, "mlp": 13824, "vocab": 32000},
    "llama2-70b": {"layers": 80, "embed": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672, "vocab": 32000},
    "llama3-8b": _LLAMA3 | {"layers": 32, "embed": 4096, "heads": 32, "mlp": 14336},
    "llama3-70b": _LLAMA3 | {"layers": 80, "embed": 8192, "heads": 64, "mlp": 28672},
    "llama3.1-8b": _LLAMA31 | {"layers": 32, "embed": 4096, "heads": 32, "mlp": 14336},
    "llama3.2-1b": _LLAMA32 | {"layers": 16, "embed": 2048, "heads": 32, "head_dim": 64, "mlp": 8192},
}

# data: weights replicated; zero1: optimizer state sharded; fsdp: weights sharded too; fsdp_tensor: and the matrices of
# a layer sharded over two neighbours; context: and the tokens of a row sharded over two neighbours
MESH_PRESETS: dict[str, dict[str, Any]] = {
    "data": {"data": -1},
    "zero1": {"data": -1, "rules": ("optimizer.embed=data+fsdp",)},
    "fsdp": {"fsdp": -1},
    "fsdp_tensor": {"fsdp": -1, "tensor": 2},
    "context": {"fsdp": -1, "context": 2},
}
