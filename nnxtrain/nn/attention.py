"""Grouped-query attention: over a whole sequence, and one token at a time against a cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnxtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS
from nnxtrain.nn.norm import RmsNorm
from nnxtrain.nn.param import Precision, projection
from nnxtrain.nn.rope import Rotation, rotate
from nnxtrain.tags import ATTENTION_OUT, KEYS, OUT_PROJECTION, QUERIES, VALUES
from nnxtrain.types import Attend

BLOCKS = 4  # of queries
SHORTEST_BLOCK = 64  # queries; shorter ones cost more than they save


@jax.named_scope("attend")
def dot_product(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, window: int | None) -> jax.Array:
    """Attends causally over one sequence.

    Args:
        q: queries `[b s h c]`, any float dtype; scores are float32.
        k: keys `[b t k c]`, `t = s`; `h` is a multiple of `k`.
        v: values `[b t k c]`.
        segment_ids: `[b s]`, 0 is padding; tokens see only their own segment.
        window: tokens that a token sees, itself and those right before it; None for all before it.
    Returns: `[b s h c]` in the dtype of `q`.
    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped queries); Beltagy et al. 2020, arXiv:2004.05150 (window).
    """
    return jax.nn.dot_product_attention(q, k, v, mask=_seen(segment_ids, window))


@jax.named_scope("attend")
def blocked(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, window: int | None) -> jax.Array:
    """Attends like `dot_product`, a block of queries after the other, each to the keys in its sight.

    Four blocks take 5/8 of the products and of the memory of the scores. The sequence must not be cut over devices.
    """
    mask = _seen(segment_ids, window)
    sequence = q.shape[1]
    size = max(SHORTEST_BLOCK, -(-sequence // BLOCKS))

    def attend(first: int) -> jax.Array:
        oldest = 0 if window is None else max(0, first + 1 - window)
        block, past = slice(first, first + size), slice(oldest, first + size)
        return jax.nn.dot_product_attention(q[:, block], k[:, past], v[:, past], mask=mask[:, :, block, past])

    return jnp.concatenate([attend(first) for first in range(0, sequence, size)], axis=1)


def _seen(segment_ids: jax.Array, window: int | None) -> jax.Array:
    """Tells which keys a query sees, `[b 1 s t]`."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    ages = jnp.arange(segment_ids.shape[1])[:, None] - jnp.arange(segment_ids.shape[1])  # [s t], tokens in between
    return (same & _in_sight(ages, window))[:, None]


def _in_sight(ages: jax.Array, window: int | None) -> jax.Array:
    """Tells which keys a query may see, by the tokens that lie between: 0 is its own, below 0 is in the future."""
    return (ages >= 0) if window is None else (ages >= 0) & (ages < window)


ATTENTIONS: dict[str, Attend] = {"blocked": blocked, "dot_product": dot_product}


class KvCache(NamedTuple):
    """Keys and values of the last `t` tokens, `[b t k c]` each; token `p` lies in slot `p % t`."""

    k: jax.Array
    v: jax.Array


class HeadSizes(NamedTuple):
    """Sizes of an attention layer; `kv_heads` divides `heads`; `window` is that of `Attend`, in tokens."""

    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None


class Attention(nnx.Module):
    """Projects to queries, keys and values, rotates, attends, projects back."""

    def __init__(
        self,
        sizes: HeadSizes,
        *,
        attend: Attend,
        qk_norm_eps: float | None,
        out_scale: float,
        precision: Precision,
        rngs: nnx.Rngs,
    ):
        """Makes the layer.

        Args:
            sizes: its axes.
            attend: an entry of `ATTENTIONS`.
            qk_norm_eps: of a norm over each query and key, before rotation; None leaves the norm out.
            out_scale: shrinks the initial output projection.
            precision: types of computation and weights.
            rngs: where the weights are drawn from.
        """
        embed, heads, kv_heads, head_dim, self.window = sizes
        queries = {EMBED: embed, HEADS: heads, HEAD_DIM: head_dim}
        keys = {EMBED: embed, KV_HEADS: kv_heads, HEAD_DIM: head_dim}
        back = {HEADS: heads, HEAD_DIM: head_dim, EMBED: embed}
        self.q = projection("bsd,dhc->bshc", queries, precision=precision, rngs=rngs)
        self.k = projection("bsd,dkc->bskc", keys, precision=precision, rngs=rngs)
        self.v = projection("bsd,dkc->bskc", keys, precision=precision, rngs=rngs)
        self.out = projection("bshc,hcd->bsd", back, precision=precision, rngs=rngs, scale=out_scale)
        self.attend = attend
        self.has_norm = qk_norm_eps is not None
        if qk_norm_eps is not None:
            self.q_norm = RmsNorm(head_dim, eps=qk_norm_eps, axis=HEAD_DIM)
            self.k_norm = RmsNorm(head_dim, eps=qk_norm_eps, axis=HEAD_DIM)

    @jax.named_scope("attention")
    def __call__(self, x: jax.Array, rotation: Rotation, segment_ids: jax.Array) -> jax.Array:
        """Maps activations `[b s d]` to `[b s d]`; tokens see only their own segment, `segment_ids` `[b s]`."""
        q, k, v = self._project(x, rotation)
        q, k, v = (checkpoint_name(*each) for each in ((q, QUERIES), (k, KEYS), (v, VALUES)))
        attended = checkpoint_name(self.attend(q, k, v, segment_ids, self.window), ATTENTION_OUT)
        return checkpoint_name(self.out(attended), OUT_PROJECTION)

    @jax.named_scope("attention")
    def decode(
        self, x: jax.Array, rotation: Rotation, cache: KvCache, position: jax.Array
    ) -> tuple[jax.Array, KvCache]:
        """Maps one token `[b 1 d]` to `[b 1 d]`, seeing itself and what the cache holds; returns the cache with it.

        Args:
            x: activations of the token.
            rotation: of its position.
            cache: keys and values of the tokens before it.
            position: scalar, tokens before it since the start of the text.
        """
        q, k, v = self._project(x, rotation)
        slots = cache.k.shape[1]
        put = jax.lax.dynamic_update_slice_in_dim
        slot = position % slots
        cache = KvCache(put(cache.k, k.astype(cache.k.dtype), slot, 1), put(cache.v, v.astype(cache.v.dtype), slot, 1))
        ages = (position - jnp.arange(slots)) % slots  # [t], of the token that each slot would hold
        seen = _in_sight(ages, self.window) & (ages <= position)  # the text began after the others
        return self.out(jax.nn.dot_product_attention(q, cache.k, cache.v, mask=seen[None, None, None])), cache

    @jax.named_scope("project")
    def _project(self, x: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.has_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rotation), rotate(k, rotation), v
