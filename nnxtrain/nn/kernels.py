"""Attention kernels: what each computes, what it supports, and which one a layer uses."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from nnxtrain.axes import BATCH, HEAD_DIM, HEADS, KV_HEADS, SEQUENCE, UNSHARDED
from nnxtrain.config.lookup import lookup
from nnxtrain.errors import ConfigError
from nnxtrain.types import Attend, AttentionSpec, HeadSizes, Layout

QUERY_BLOCKS = 4
MIN_BLOCK = 64  # queries; smaller blocks cost more than they save

# what a layer, its rows or the mesh can require of a kernel
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
    SHARDED_SEQUENCE: "a sequence sharded over devices",
}


@dataclass(frozen=True)
class AttentionKernel:
    """An entry of `ATTENTIONS`.

    Attributes:
        attend: the computation.
        supports: names from `FEATURES`.
        platforms: jax platforms that it runs on; empty for all.
    """

    attend: Attend
    supports: Collection[str]
    platforms: Collection[str] = ()

    def obstacles(self, needs: Collection[str], platform: str) -> list[str]:
        """Returns the reasons why this kernel cannot be used; empty if it can."""
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
        segment_ids: `[b s]`, 0 is padding; tokens attend only within their segment.
        spec: window, scale and soft cap.
    Returns: `[b s h c]` in the dtype of `q`.
    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped queries); Beltagy et al. 2020, arXiv:2004.05150 (window).
    """
    return masked_attention(q, k, v, _attention_mask(segment_ids, spec.window), spec)


@jax.named_scope("attend")
def blocked(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Attends like `dot_product`, one block of queries at a time, each to the keys visible to it.

    Four blocks take 5/8 of the FLOPs and of the score memory. The sequence must not be sharded.
    """
    mask = _attention_mask(segment_ids, spec.window)
    sequence = q.shape[1]
    size = max(MIN_BLOCK, -(-sequence // QUERY_BLOCKS))

    def attend(first: int) -> jax.Array:
        first_key = 0 if spec.window is None else max(0, first + 1 - spec.window)
        queries, keys = slice(first, first + size), slice(first_key, first + size)
        return masked_attention(q[:, queries], k[:, keys], v[:, keys], mask[:, :, queries, keys], spec)

    return jnp.concatenate([attend(first) for first in range(0, sequence, size)], axis=1)


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Attends where `mask` `[b 1 s t]` is true; other arguments as in `dot_product`.

    Source: Bello et al. 2016, arXiv:1611.09940, and Gemma 2, arXiv:2408.00118 (soft cap).
    """
    if spec.softcap is None:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=spec.scale)
    batch, queries, heads, width = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], heads // k.shape[2], width)
    scores = jnp.einsum("bskgc,btkc->bkgst", grouped, k, preferred_element_type=jnp.float32)
    scores *= width**-0.5 if spec.scale is None else spec.scale
    scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("bkgst,btkc->bskgc", weights.astype(v.dtype), v).reshape(q.shape)


def within_window(distances: jax.Array, window: int | None) -> jax.Array:
    """Returns which keys are visible, by tokens back from the query: 0 is its own position, negative is the future."""
    return (distances >= 0) if window is None else (distances >= 0) & (distances < window)


def _attention_mask(segment_ids: jax.Array, window: int | None) -> jax.Array:
    """Returns the mask of visible keys, `[b 1 s t]`: causal, in the same segment, within the window."""
    same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    distances = jnp.arange(segment_ids.shape[1])[:, None] - jnp.arange(segment_ids.shape[1])  # [s t], back to the key
    return (same_segment & within_window(distances, window))[:, None]


# `model.attention=auto` takes the first that supports what the layer requires
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
    """Returns the kernel of one layer on the mesh: queries are sharded along the sequence, keys and values are not.

    Args:
        sizes: number and width of the heads.
        spec: window, scale and soft cap.
        name: `model.attention`: an entry of `table`, or `auto`.
        table: kernels by name.
        platform: jax platform of the devices.
        layout: placement on the mesh.

    Raises:
        ConfigError: the kernel does not support what this layer or the mesh requires; names the kernels that do.
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
        hint = f"usable here: {', '.join(['auto', *usable])}" if usable else "no kernel can be used here"
        raise ConfigError(f"model.attention={name}: {chosen} {' and '.join(obstacles)}; {hint}")
    return _OnMesh(kernel.attend, layout)


@dataclass(frozen=True)
class _OnMesh:
    """A kernel with its arrays placed on the mesh; equal for layers of the same kernel, as `nnx` graphs require."""

    attend: Attend
    layout: Layout

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, spec: AttentionSpec
    ) -> jax.Array:
        """See `Attend`."""
        place = self.layout.activations
        q = place(q, BATCH, SEQUENCE, HEADS, HEAD_DIM)
        k, v = (place(x, BATCH, UNSHARDED, KV_HEADS, HEAD_DIM) for x in (k, v))
        return place(self.attend(q, k, v, segment_ids, spec), BATCH, SEQUENCE, HEADS, HEAD_DIM)
