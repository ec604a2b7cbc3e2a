"""One layer of the stack: attention and a feed-forward layer, each with norms and a residual connection."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnxtrain.models.family import LayerSpec
from nnxtrain.nn.attention import KvCache
from nnxtrain.nn.dropout import Dropout
from nnxtrain.nn.param import LayerInit
from nnxtrain.nn.rope import Rotation
from nnxtrain.tags import LAYER_INPUT
from nnxtrain.types import Attend, LossTerms


class Block(nnx.Module):
    """Maps the residual stream `[b s d]` to `[b s d]`."""

    def __init__(self, spec: LayerSpec, init: LayerInit, *, attend: Attend):
        """Makes the layer that `spec` describes; `attend` is the attention kernel."""
        embed = spec.sizes.embed
        self.rotation = spec.rotation
        self.norms_inputs = spec.norm_place != "after"
        self.norms_outputs = spec.norm_place != "before"
        self.attention = spec.make_attention(init, attend)
        self.mlp = spec.mlp(init)
        if self.norms_inputs:
            self.attention_norm, self.mlp_norm = spec.norm(embed), spec.norm(embed)
        if self.norms_outputs:
            self.attention_post_norm, self.mlp_post_norm = spec.norm(embed), spec.norm(embed)

    @jax.named_scope("layer")
    def __call__(
        self, x: jax.Array, rotation: Rotation, segment_ids: jax.Array, drop: Dropout
    ) -> tuple[jax.Array, LossTerms]:
        """Maps `[b s d]` to `[b s d]`, and returns the loss terms of the layer.

        Args:
            x: the residual stream.
            rotation: applied to queries and keys.
            segment_ids: `[b s]`, 0 is padding.
            drop: dropout of this layer.
        """
        x = checkpoint_name(x, LAYER_INPUT)
        x = x + drop.at(0)(
            self._norm_output("attention", self.attention(self._norm_input("attention", x), rotation, segment_ids))
        )
        out, terms = self.mlp(self._norm_input("mlp", x), segment_ids != 0)
        return x + drop.at(1)(self._norm_output("mlp", out)), terms

    @jax.named_scope("layer")
    def decode(
        self, x: jax.Array, rotation: Rotation, cache: KvCache, position: jax.Array
    ) -> tuple[jax.Array, KvCache]:
        """Maps one token `[b 1 d]` to `[b 1 d]` and returns the updated cache; see `Attention.decode`."""
        attended, cache = self.attention.decode(self._norm_input("attention", x), rotation, cache, position)
        x = x + self._norm_output("attention", attended)
        out, _ = self.mlp(self._norm_input("mlp", x), jnp.ones(x.shape[:2], bool))
        return x + self._norm_output("mlp", out), cache

    def _norm_input(self, part: str, x: jax.Array) -> jax.Array:
        return getattr(self, f"{part}_norm")(x) if self.norms_inputs else x

    def _norm_output(self, part: str, x: jax.Array) -> jax.Array:
        return getattr(self, f"{part}_post_norm")(x) if self.norms_outputs else x
