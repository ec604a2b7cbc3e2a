"""Attention kernels: what each computes, what it supports, and which one a layer gets."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from nnxtrain.axes import BATCH, HEAD_DIM, HEADS, KV_HEADS, SEQUENCE, WHOLE
from nnxtrain.config.lookup import lookup
from nnxtrain.errors import ConfigError
from nnxtrain.types import Attend, AttentionSpec, HeadSizes, Layout

BLOCKS = 4  # of queries
SHORTEST_BLOCK = 64  # queries; shorter ones cost more than they save

# what a layer, its rows or the mesh can ask of a kernel
WINDOW = "window"
SEGMENTS = "segments"
GROUPED_HEADS = "grouped_heads"
SOFTCAP = "softcap"
SHARDED_SEQUENCE = "sharded_sequence"
FEATURES = {
    WINDOW: "a sliding window",
    SEGMENTS: "several documents in a row",
    GROUPED_HEADS: "fewer key and value heads than query heads",
    SOFTCAP: "a soft cap on the scores",
    SHARDED_SEQUENCE: "a sequence that is sharded over devices",
}


@dataclass(frozen=True)
class AttentionKernel:
    """An entry of `ATTENTIONS`.

    Attributes:
        attend: the computation.
        supports: names out of `FEATURES`.
        platforms: of jax, that it runs on; empty for all.
    """

    attend: Attend
    supports: Collection[str]
    platforms: Collection[str] = ()

    def obstacles(self, needs: Collection[str], platform: str) -> list[str]:
        """Returns in words why this kernel cannot be used; empty where it can."""
        missing = [f"does not support {FEATURES[name]}" for name in needs if name not in self.supports]
        if self.platforms and platform not in self.platforms:
            missing.append(f"runs on {', '.join(self.platforms)} only, and the platform is {platform}")
        return missing


@jax.named_scope("attend")
def dot_product(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Attends causally over one sequence.

    Args:
        q: queries `[b s h c]`, any float dtype; scores are float32.
        k: keys `[b t k c]`, `t = s`; `h` is a multiple of `k`.
        v: values `[b t k c]`.
        segment_ids: `[b s]`, 0 is padding; tokens see only their own segment.
        spec: window, scale and soft cap.
    Returns: `[b s h c]` in the dtype of `q`.
    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped queries); Beltagy et al. 2020, arXiv:2004.05150 (window).
    """
    return masked_attention(q, k, v, _visible(segment_ids, spec.window), spec)


@jax.named_scope("attend")
def blocked(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Attends like `dot_product`, one block of queries after another, each to the keys that it can see.

    Four blocks take 5/8 of the products and of the memory of the scores. The sequence must not be sharded.
    """
    mask = _visible(segment_ids, spec.window)
    sequence = q.shape[1]
    size = max(SHORTEST_BLOCK, -(-sequence // BLOCKS))

    def attend(first: int) -> jax.Array:
        oldest = 0 if spec.window is None else max(0, first + 1 - spec.window)
        block, past = slice(first, first + size), slice(oldest, first + size)
        return masked_attention(q[:, block], k[:, past], v[:, past], mask[:, :, block, past], spec)

    return jnp.concatenate([attend(first) for first in range(0, sequence, size)], axis=1)


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Attends where `mask` `[b 1 s t]` is true; arrays are those of `dot_product`.

    Source: Bello et al. 2016, arXiv:1611.09940, and Gemma 2, arXiv:2408.00118 (soft cap).
    """
    if spec.softcap is None:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=spec.scale)
    batch, queries, heads, width = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], heads // k.shape[2], width)
    scores = jnp.einsum("bskgc,btkc->bkgst", grouped, k, preferred_element_type=jnp.float32)
    scores *= width**-0.5 if spec.scale is None else spec.scale
    scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    shares = jax.nn.softmax(jnp.where(mask[:, :, None], scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("bkgst,btkc->bskgc", shares.astype(v.dtype), v).reshape(q.shape)


def within_window(ages: jax.Array, window: int | None) -> jax.Array:
    """Tells which keys a query may see, by the tokens between: 0 is its own, below 0 is in the future."""
    return (ages >= 0) if window is None else (ages >= 0) & (ages < window)


def _visible(segment_ids: jax.Array, window: int | None) -> jax.Array:
    """Tells which keys a query sees, `[b 1 s t]`."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    ages = jnp.arange(segment_ids.shape[1])[:, None] - jnp.arange(segment_ids.shape[1])  # [s t], tokens in between
    return (same & within_window(ages, window))[:, None]


# `model.attention=auto` takes the first that supports what a layer asks for
ATTENTIONS: dict[str, AttentionKernel] = {
    "blocked": AttentionKernel(blocked, (WINDOW, SEGMENTS, GROUPED_HEADS, SOFTCAP)),
    "dot_product": AttentionKernel(dot_product, tuple(FEATURES)),
}


def make_attend(
    sizes: HeadSizes,
    spec: AttentionSpec,
    *,
    name: str,
    table: Mapping[str, AttentionKernel],
    platform: str,
    layout: Layout,
) -> Attend:
    """Returns the kernel of one layer, on the mesh: queries are sharded as their tokens are, keys and values are not.

    Args:
        sizes: of the heads.
        spec: what the layer computes.
        name: `model.attention`: an entry of `table`, or `auto`.
        table: the kernels.
        platform: of the devices.
        layout: of the mesh.

    Raises:
        ConfigError: the kernel lacks something that this layer, or the mesh, asks for; names those that have it.
    """
    needs = [SEGMENTS]
    needs += [WINDOW] if spec.window is not None else []
    needs += [SOFTCAP] if spec.softcap is not None else []
    needs += [GROUPED_HEADS] if sizes.kv_heads != sizes.heads else []
    needs += [SHARDED_SEQUENCE] if layout.axes(SEQUENCE) else []
    usable = [entry for entry, kernel in table.items() if not kernel.obstacles(needs, platform)]
    chosen = next(iter([*usable, *table])) if name == "auto" else name
    kernel = lookup(table, chosen, key="model.attention")
    if obstacles := kernel.obstacles(needs, platform):
        there = f"usable here: {', '.join(['auto', *usable])}" if usable else "no kernel can be used here"
        raise ConfigError(f"model.attention={name}: {chosen} {' and '.join(obstacles)}; {there}")
    return _OnMesh(kernel.attend, layout)


@dataclass(frozen=True)
class _OnMesh:
    """A kernel whose arrays are placed on the mesh; equal for layers of the same kernel, as graphs of modules ask."""

    attend: Attend
    layout: Layout

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, spec: AttentionSpec
    ) -> jax.Array:
        """See `Attend`."""
        place = self.layout.activations
        q = place(q, BATCH, SEQUENCE, HEADS, HEAD_DIM)
        k, v = (place(x, BATCH, WHOLE, KV_HEADS, HEAD_DIM) for x in (k, v))
        return place(self.attend(q, k, v, segment_ids, spec), BATCH, SEQUENCE, HEADS, HEAD_DIM)
