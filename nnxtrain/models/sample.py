"""Sampling: text from logits, one token at a time."""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from nnxtrain.nn.attention import KvCache

MIN_TEMPERATURE = 1e-6  # below it sampling is greedy: scores divided by it overflow float32


class CachedModel(Protocol):
    """What a sampler needs from a model."""

    def empty_cache(self, rows: int, slots: int) -> KvCache:
        """Returns an empty cache for the last `slots` tokens of `rows` texts."""
        ...

    def decode(self, ids: jax.Array, cache: KvCache, position: jax.Array) -> tuple[jax.Array, KvCache]:
        """Returns the scores `[b v]` of the token after `ids` `[b]`, and the updated cache."""
        ...


def make_sampler(
    *, tokens: int, context: int, temperature: float, top_k: int | None, eos: int
) -> Callable[[CachedModel, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns `(model, prompt [p], key) -> (ids [p + tokens], number of valid ids)`.

    The model attends to the last `context` tokens, prompt included. The text ends after `tokens` tokens or at `eos`.

    Args:
        tokens: most tokens generated after the prompt.
        context: tokens that the model attends to.
        temperature: divides the scores before sampling; 0 is greedy.
        top_k: samples from this many ids of the highest scores; None for all.
        eos: id that ends the text; -1 for none.
    """

    def sample(model: CachedModel, prompt: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        start, end = prompt.shape[0], prompt.shape[0] + tokens
        text = jnp.zeros(end, jnp.int32).at[:start].set(prompt)

        def unfinished(carry: tuple[jax.Array, KvCache, jax.Array]) -> jax.Array:
            text, _, position = carry
            ended = (position >= start) & (text[position] == eos)
            return (position < end - 1) & ~ended

        def step(carry: tuple[jax.Array, KvCache, jax.Array]) -> tuple[jax.Array, KvCache, jax.Array]:
            text, cache, position = carry
            scores, cache = model.decode(text[position][None], cache, position)
            drawn = choose(scores[0], jax.random.fold_in(key, position), temperature=temperature, top_k=top_k)
            after = position + 1
            in_prompt = after < start
            return text.at[after].set(jnp.where(in_prompt, text[after], drawn)), cache, after

        cache = model.empty_cache(1, min(context, end))
        text, _, last = jax.lax.while_loop(unfinished, step, (text, cache, jnp.zeros((), jnp.int32)))
        return text, last + 1

    return sample


def choose(scores: jax.Array, key: jax.Array, *, temperature: float, top_k: int | None) -> jax.Array:
    """Returns an id sampled from `scores` `[v]`; the highest if `temperature` is 0."""
    if temperature < MIN_TEMPERATURE:
        return jnp.argmax(scores).astype(jnp.int32)
    if top_k is not None:
        weakest = jax.lax.top_k(scores, min(top_k, scores.shape[0]))[0][-1]
        scores = jnp.where(scores < weakest, -jnp.inf, scores)
    return jax.random.categorical(key, scores / temperature).astype(jnp.int32)
