"""The table of token vectors, for the embedding and the head."""

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.axes import EMBED, VOCAB
from nnxtrain.nn.param import Precision, truncated_normal
from nnxtrain.types import Layout


class Embedding(nnx.Module):
    """One vector per token id; the last of the `vocab` rows may be padding."""

    def __init__(self, vocab: int, embed: int, *, std: float, layout: Layout, precision: Precision, rngs: nnx.Rngs):
        draw = truncated_normal(std)
        self.table = nnx.Param(draw(rngs.params(), (vocab, embed), precision.weights), axes=(VOCAB, EMBED))
        self.dtype = precision.compute
        self.layout = layout

    @jax.named_scope("embedding")
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Maps ids `[b s]` to vectors `[b s d]`."""
        return self.layout.lookup(self.table[...], ids).astype(self.dtype)

    @jax.named_scope("head")
    def logits(self, x: jax.Array) -> jax.Array:
        """Maps activations `[b s d]` to scores `[b s v]`, float32."""
        return jnp.einsum("bsd,vd->bsv", x, self.table[...].astype(self.dtype), preferred_element_type=jnp.float32)
