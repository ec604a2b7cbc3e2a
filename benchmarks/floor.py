"""A handwritten decoder and training step: arrays in dicts, one optax chain, `jax.jit`. The baseline of benchmarks.

Nothing here is imported from the package or from flax. A model is `{"embedding": [v d], "head": [v d], "norm": [d],
"layers": ...}`; its layers are one dict of stacked arrays `[l ...]`, which are scanned, or a list of dicts, which are
unrolled.
Axis letters: `b` batch, `s` and `t` sequence, `d` embed, `h` heads, `k` kv_heads, `c` head_dim, `f` mlp, `v` vocab.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Batch = dict[str, jax.Array]  # `inputs targets positions segment_ids mask`, each `[b s]`
Weights = dict[str, Any]


class Model(NamedTuple):
    """Hyperparameters that are not in the shapes of the weights.

    Attributes:
        eps: added to the mean square in the norms.
        theta: base of the rotation periods.
        chunks: of the sequence, whose logits `[b s/chunks v]` are computed one after another.
    """

    eps: float
    theta: float
    chunks: int


class State(NamedTuple):
    """State of a step."""

    weights: Weights
    moments: optax.OptState


def norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divides `x` `[... d]` by the root of its mean square and scales it."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * scale


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + c/2) of `x` `[b s h c]` by angles `[b s 1 c/2]`."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attends with a quarter of the queries `[b s h c]` at a time to the keys up to its end; returns `[b s h c]`."""
    size = -(-q.shape[1] // 4)
    parts = []
    for first in range(0, q.shape[1], size):
        own, past = slice(first, first + size), slice(first + size)
        parts += [jax.nn.dot_product_attention(q[:, own], k[:, past], v[:, past], mask=mask[:, :, own, past])]
    return jnp.concatenate(parts, axis=1)


def layer(w: Weights, x: jax.Array, *, sin: jax.Array, cos: jax.Array, mask: jax.Array, eps: float) -> jax.Array:
    """Maps `x` `[b s d]` to `[b s d]`; `mask` `[b 1 s t]` says which keys a query sees."""
    y = norm(x, w["attention_norm"], eps)
    q = rotate(jnp.einsum("bsd,dhc->bshc", y, w["q"]), sin, cos)
    k = rotate(jnp.einsum("bsd,dkc->bskc", y, w["k"]), sin, cos)
    v = jnp.einsum("bsd,dkc->bskc", y, w["v"])
    x += jnp.einsum("bshc,hcd->bsd", attend(q, k, v, mask), w["out"])
    y = norm(x, w["mlp_norm"], eps)
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def hidden(model: Model, w: Weights, batch: Batch) -> jax.Array:
    """Returns the activations before the head, `[b s d]`."""
    segments, sequence = batch["segment_ids"], batch["inputs"].shape[1]
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    mask &= jnp.tril(jnp.ones((sequence, sequence), bool))
    layers = w["layers"]
    half = (layers if isinstance(layers, dict) else layers[0])["q"].shape[-1] // 2
    angles = batch["positions"][..., None, None] * model.theta ** (-jnp.arange(half) / half)
    one = functools.partial(layer, sin=jnp.sin(angles), cos=jnp.cos(angles), mask=mask, eps=model.eps)
    x = w["embedding"][batch["inputs"]]
    if isinstance(layers, dict):
        x, _ = jax.lax.scan(lambda x, weights: (one(weights, x), None), x, layers)
    else:
        for weights in layers:
            x = one(weights, x)
    return norm(x, w["norm"], model.eps)


def mean_loss(model: Model, w: Weights, batch: Batch) -> jax.Array:
    """Returns the loss in nats per target; `mask` marks the targets."""

    def piece(x: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        scores = jnp.einsum("bsd,vd->bsv", x, w["head"])
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(scores, targets), where=mask)

    parts = (hidden(model, w, batch), batch["targets"], batch["mask"])
    if model.chunks == 1:
        total = piece(*parts)
    else:  # the logits of a chunk are recomputed in the backward pass
        cut = [jnp.stack(jnp.split(part, model.chunks, axis=1)) for part in parts]
        again = jax.checkpoint(piece)
        total = jnp.sum(jax.lax.map(lambda part: again(*part), cut))
    return total / jnp.maximum(jnp.sum(batch["mask"]), 1)


def make_optimizer(
    learning_rate: optax.Schedule, *, b1: float, b2: float, eps: float, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Returns AdamW after clipping by the global norm; all parameters but the scales of norms are decayed."""

    def decayed(weights: Weights) -> Weights:
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in path[-1].key, weights)

    adamw = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw)


def make_step(
    model: Model, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """Returns the compiled step `(state, batch) -> (next state, metrics)`, which donates the state."""

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(lambda weights: mean_loss(model, weights, batch))(state.weights)
        updates, moments = optimizer.update(grads, state.moments, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        return State(weights, moments), {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return jax.jit(step, donate_argnums=0)
