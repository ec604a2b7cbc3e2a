"""Logical axis names: the meaning of each dimension of an array. `sharding/` maps them to mesh axes."""

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
UNSHARDED = ""  # a dimension that is never sharded

STACKED = (LAYER, STAGE)  # axes along which parameters of the same kind are stacked


def axes_of(parameter: nnx.Variable) -> tuple[str, ...]:
    """Returns the logical axis names of a parameter, one per dimension."""
    return parameter.get_metadata("axes")
