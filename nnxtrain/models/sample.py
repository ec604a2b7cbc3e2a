"""Text from logits, one token at a time."""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from nnxtrain.nn.attention import KvCache

COLDEST = 1e-6  # a lower temperature takes the best id: scores divided by it leave float32


class CachedModel(Protocol):
    """What a sampler needs of a model."""

    def empty_cache(self, rows: int, slots: int) -> KvCache:
        """Returns a cache for the last `slots` tokens of `rows` texts."""
        ...

    def decode(self, ids: jax.Array, cache: KvCache, position: jax.Array) -> tuple[jax.Array, KvCache]:
        """Returns the scores `[b v]` of the token after `ids` `[b]`, and the cache with it."""
        ...


def make_sampler(
    *, tokens: int, context: int, temperature: float, top_k: int | None, eos: int
) -> Callable[[CachedModel, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns `(model, prompt [p], key) -> (ids [p + tokens], their number)`.

    The model sees the last `context` tokens, of a prompt too; a token falls out of sight as a new one comes. The text
    ends after `tokens` tokens or with `eos`.

    Args:
        tokens: written after the prompt at most.
        context: tokens that the model sees at once.
        temperature: scores are divided by this before a draw; 0 takes the best.
        top_k: a draw is among this many of the best; None for all.
        eos: id that ends the text; -1 for none.
    """

    def sample(model: CachedModel, prompt: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        start, end = prompt.shape[0], prompt.shape[0] + tokens
        text = jnp.zeros(end, jnp.int32).at[:start].set(prompt)

        def goes_on(carry: tuple[jax.Array, KvCache, jax.Array]) -> jax.Array:
            text, _, position = carry
            ended = (position >= start) & (text[position] == eos)
            return (position < end - 1) & ~ended

        def write(carry: tuple[jax.Array, KvCache, jax.Array]) -> tuple[jax.Array, KvCache, jax.Array]:
            text, cache, position = carry
            scores, cache = model.decode(text[position][None], cache, position)
            drawn = choose(scores[0], jax.random.fold_in(key, position), temperature=temperature, top_k=top_k)
            following = position + 1
            known = following < start
            return text.at[following].set(jnp.where(known, text[following], drawn)), cache, following

        cache = model.empty_cache(1, min(context, end))
        text, _, last = jax.lax.while_loop(goes_on, write, (text, cache, jnp.zeros((), jnp.int32)))
        return text, last + 1

    return sample


def choose(scores: jax.Array, key: jax.Array, *, temperature: float, top_k: int | None) -> jax.Array:
    """Returns an id drawn from `scores` `[v]`; the best one where `temperature` is 0."""
    if temperature < COLDEST:
        return jnp.argmax(scores).astype(jnp.int32)
    if top_k is not None:
        weakest = jax.lax.top_k(scores, min(top_k, scores.shape[0]))[0][-1]
        scores = jnp.where(scores < weakest, -jnp.inf, scores)
    return jax.random.categorical(key, scores / temperature).astype(jnp.int32)
