"""Logical axis names: what a dimension of a parameter or activation means. `sharding/` maps them to mesh axes."""

from flax import nnx

BATCH = "batch"
SEQUENCE = "sequence"
EMBED = "embed"
HEADS = "heads"
KV_HEADS = "kv_heads"
HEAD_DIM = "head_dim"
MLP = "mlp"
VOCAB = "vocab"
LAYER = "layer"
STAGE = "stage"
WHOLE = ""  # a dimension that no device shares

STACKED = (LAYER, STAGE)  # axes that count copies of a parameter; they say nothing about what it is


def axes_of(parameter: nnx.Variable) -> tuple[str, ...]:
    """Returns the logical axis names of a parameter, one a dimension."""
    return parameter.get_metadata("axes")
