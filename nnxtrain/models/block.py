"""One layer of the stack: attention and a feed-forward layer, each behind a norm and around a residual."""

import math
from dataclasses import dataclass

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnxtrain.axes import BATCH, HEAD_DIM, HEADS, KV_HEADS, SEQUENCE, WHOLE
from nnxtrain.config.lookup import lookup
from nnxtrain.config.model import LOCAL, ModelConfig
from nnxtrain.nn.attention import ATTENTIONS, Attention, HeadSizes, KvCache
from nnxtrain.nn.dropout import Dropout
from nnxtrain.nn.mlp import GatedMlp
from nnxtrain.nn.norm import RmsNorm
from nnxtrain.nn.param import Precision
from nnxtrain.nn.rope import Rotation
from nnxtrain.tags import LAYER_INPUT
from nnxtrain.types import Attend, Layout


@dataclass(frozen=True)
class AttendOn:
    """An attention kernel on a mesh: queries lie where their tokens do, beside keys and values of whole sequences."""

    layout: Layout
    attend: Attend

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, window: int | None
    ) -> jax.Array:
        """See `Attend`."""
        place = self.layout.activations
        q = place(q, BATCH, SEQUENCE, HEADS, HEAD_DIM)
        k, v = (place(x, BATCH, WHOLE, KV_HEADS, HEAD_DIM) for x in (k, v))
        return place(self.attend(q, k, v, segment_ids, window), BATCH, SEQUENCE, HEADS, HEAD_DIM)


class Block(nnx.Module):
    """Maps the residual stream `[b s d]` to `[b s d]`."""

    def __init__(self, config: ModelConfig, *, kind: str, layout: Layout, precision: Precision, rngs: nnx.Rngs):
        """Makes the layer; `kind` is one of `KINDS`."""
        out_scale = 1 / math.sqrt(2 * config.layers)  # the residual stream sums 2 * layers outputs
        window = config.window if kind == LOCAL else None
        sizes = HeadSizes(config.embed, config.heads, config.kv_heads, config.head_dim, window)
        self.attention_norm = RmsNorm(config.embed, eps=config.norm_eps)
        self.attention = Attention(
            sizes,
            attend=AttendOn(layout, lookup(ATTENTIONS, config.attention, key="model.attention")),
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            out_scale=out_scale,
            precision=precision,
            rngs=rngs,
        )
        self.mlp_norm = RmsNorm(config.embed, eps=config.norm_eps)
        self.mlp = GatedMlp(config.embed, config.mlp, out_scale=out_scale, precision=precision, rngs=rngs)

    @jax.named_scope("layer")
    def __call__(self, x: jax.Array, rotation: Rotation, segment_ids: jax.Array, drop: Dropout) -> jax.Array:
        """Maps `[b s d]` to `[b s d]`; `drop` is that of this layer."""
        x = checkpoint_name(x, LAYER_INPUT)
        x = x + drop.at(0)(self.attention(self.attention_norm(x), rotation, segment_ids))
        return x + drop.at(1)(self.mlp(self.mlp_norm(x)))

    @jax.named_scope("layer")
    def decode(
        self, x: jax.Array, rotation: Rotation, cache: KvCache, position: jax.Array
    ) -> tuple[jax.Array, KvCache]:
        """Maps one token `[b 1 d]` to `[b 1 d]` and returns the cache with it; see `Attention.decode`."""
        attended, cache = self.attention.decode(self.attention_norm(x), rotation, cache, position)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache
