"""Grouped-query attention: over a full sequence, and one token at a time with a KV cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnxtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS
from nnxtrain.nn.kernels import masked_attention, within_window
from nnxtrain.nn.param import LayerInit, projection
from nnxtrain.nn.rope import Rotation, rotate
from nnxtrain.tags import ATTENTION_OUT, KEYS, OUT_PROJECTION, QUERIES, VALUES
from nnxtrain.types import Attend, AttentionSpec, HeadSizes


class KvCache(NamedTuple):
    """Keys and values of the last `t` tokens, `[b t k c]` each; token `p` is in slot `p % t`."""

    k: jax.Array
    v: jax.Array


class Attention(nnx.Module):
    """Projects to queries, keys and values, rotates, attends, projects back."""

    def __init__(
        self,
        sizes: HeadSizes,
        spec: AttentionSpec,
        init: LayerInit,
        *,
        attend: Attend,
        head_norm: Callable[..., nnx.Module] | None = None,
    ):
        """Makes the layer.

        Args:
            sizes: number and width of the heads.
            spec: window, scale and soft cap.
            init: precision, and the random keys of the weights.
            attend: the attention kernel.
            head_norm: makes the norm of each query and key, applied before rotation, from a width and the name of its
                axis; None for no norm.
        """
        self.spec = spec
        queries = {EMBED: sizes.embed, HEADS: sizes.heads, HEAD_DIM: sizes.head_dim}
        keys = {EMBED: sizes.embed, KV_HEADS: sizes.kv_heads, HEAD_DIM: sizes.head_dim}
        back = {HEADS: sizes.heads, HEAD_DIM: sizes.head_dim, EMBED: sizes.embed}
        self.q = projection("bsd,dhc->bshc", queries, init)
        self.k = projection("bsd,dkc->bskc", keys, init)
        self.v = projection("bsd,dkc->bskc", keys, init)
        self.out = projection("bshc,hcd->bsd", back, init, scale=init.out_scale)
        self.attend = attend
        self.has_qk_norm = head_norm is not None
        if head_norm is not None:
            self.q_norm = head_norm(sizes.head_dim, axis=HEAD_DIM)
            self.k_norm = head_norm(sizes.head_dim, axis=HEAD_DIM)

    @jax.named_scope("attention")
    def __call__(self, x: jax.Array, rotation: Rotation, segment_ids: jax.Array) -> jax.Array:
        """Maps activations `[b s d]` to `[b s d]`; tokens attend only within their segment, `segment_ids` `[b s]`."""
        q, k, v = self._project(x, rotation)
        q, k, v = (checkpoint_name(*each) for each in ((q, QUERIES), (k, KEYS), (v, VALUES)))
        attended = checkpoint_name(self.attend(q, k, v, segment_ids, self.spec), ATTENTION_OUT)
        return checkpoint_name(self.out(attended), OUT_PROJECTION)

    @jax.named_scope("attention")
    def decode(
        self, x: jax.Array, rotation: Rotation, cache: KvCache, position: jax.Array
    ) -> tuple[jax.Array, KvCache]:
        """Maps one token `[b 1 d]` to `[b 1 d]`, attending to itself and the cache; returns the cache with it added.

        Args:
            x: activations of the token.
            rotation: rotation at its position.
            cache: keys and values of earlier tokens.
            position: scalar, index of the token in the text.
        """
        q, k, v = self._project(x, rotation)
        slots = cache.k.shape[1]
        write = jax.lax.dynamic_update_slice_in_dim
        slot = position % slots
        cache = KvCache(
            write(cache.k, k.astype(cache.k.dtype), slot, 1), write(cache.v, v.astype(cache.v.dtype), slot, 1)
        )
        distances = (position - jnp.arange(slots)) % slots  # [t], back from the query to the token of each slot
        visible = within_window(distances, self.spec.window) & (distances <= position)  # other slots are still empty
        return self.out(masked_attention(q, cache.k, cache.v, visible[None, None, None], self.spec)), cache

    @jax.named_scope("project")
    def _project(self, x: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rotation), rotate(k, rotation), v
