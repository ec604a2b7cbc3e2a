"""Text from logits, through the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxtrain.models.sample import choose, make_sampler
from nnxtrain.nn.dropout import KeepAll
from tests.support import initial_state, tiny_program

pytestmark = pytest.mark.usefixtures("quick_compiles")


def sampler(model, **words):
    """Returns `(prompt, seed) -> ids` for a model."""
    settings = {"tokens": 20, "context": 32, "temperature": 0.0, "top_k": None, "eos": -1} | words
    compiled = jax.jit(lambda prompt, key: make_sampler(**settings)(model, prompt, key))

    def run(prompt, seed: int = 0) -> np.ndarray:
        ids, length = compiled(np.array(prompt, np.int32), jax.random.key(seed))
        return np.asarray(ids)[: int(length)]

    return run


@pytest.mark.parametrize("layout", ["true", "false"])
@pytest.mark.parametrize(
    ("words", "slots"),
    [
        pytest.param(("model.qk_norm=true", "model.tied=true"), 32, marks=pytest.mark.slow),
        (("model.layers=3", "model.pattern=local,global", "model.window=7"), 32),
        pytest.param(("model.pattern=local", "model.window=7"), 7, marks=pytest.mark.slow),
        (("model.pattern=local", "model.window=7"), 9),
    ],
)
def test_cached_decoding_gives_the_scores_of_a_full_pass(layout, words, slots):
    """A wrong position, slot or window shows at some token (B60); windows need no more slots than they are long."""
    unroll = ["model.scan_unroll=2"] if layout == "true" and slots == 9 else []
    model = initial_state(tiny_program("model.layers=2", f"model.scan_layers={layout}", *words, *unroll)).model
    ids = np.random.default_rng(0).integers(0, 256, (2, 32)).astype(np.int32)
    positions = np.tile(np.arange(32, dtype=np.int32), (2, 1))
    batch = {"inputs": ids, "positions": positions, "segment_ids": np.ones((2, 32), np.int32)}
    want = jax.jit(lambda: model.logits(model.hidden(batch, KeepAll())[0]))()
    decode = jax.jit(model.decode)
    cache = model.empty_cache(2, slots)
    for position in range(32):
        got, cache = decode(ids[:, position], cache, jnp.array(position))
        np.testing.assert_allclose(got, want[:, position], atol=1e-4)


def test_temperature_zero_takes_the_best_token_each_time():
    """Zero must not divide, and must not depend on the seed."""
    model = initial_state(tiny_program()).model
    run = sampler(model)
    text = run([1, 2, 3])
    np.testing.assert_array_equal(text, run([1, 2, 3], seed=5))
    batch = {
        "inputs": text[None, :-1],
        "positions": np.arange(len(text) - 1, dtype=np.int32)[None],
        "segment_ids": np.ones((1, len(text) - 1), np.int32),
    }
    best = model.logits(model.hidden(batch, KeepAll())[0])[0].argmax(-1)
    np.testing.assert_array_equal(best[2:], text[3:])


def test_draws_follow_the_seed_and_a_large_top_k_is_harmless():
    """A top_k above the vocabulary would fail in the selection."""
    model = initial_state(tiny_program()).model
    free, wide = sampler(model, temperature=1.0), sampler(model, temperature=1.0, top_k=1000)
    np.testing.assert_array_equal(free([7]), wide([7]))
    assert not np.array_equal(free([7]), free([7], seed=1))


def test_top_k_of_one_is_the_best_token():
    """Ties and masks must leave at least one id."""
    scores = jnp.array([0.1, 3.0, 2.0])
    assert int(choose(scores, jax.random.key(0), temperature=10.0, top_k=1)) == 1


def test_no_padded_id_is_ever_drawn():
    """4 000 tokens at temperature 5, far beyond the context, from a table with six unused rows (B60)."""
    model = initial_state(tiny_program("model.vocab=250", "model.layers=1", "model.embed=32")).model
    text = sampler(model, tokens=4_000, temperature=5.0)([0])
    assert len(text) == 4_001
    assert text.max() < 250
    assert len(set(text.tolist())) == 250


def test_a_prompt_longer_than_the_context_is_read_to_its_end():
    """The text keeps the whole prompt and goes on after it; the model sees the last tokens."""
    model = initial_state(tiny_program()).model
    prompt = list(range(100))
    text = sampler(model, tokens=5)(prompt)
    assert text[:100].tolist() == prompt
    assert len(text) == 105


def test_text_ends_with_the_end_mark():
    """Tokens after the end of a document belong to no text."""
    model = initial_state(tiny_program()).model
    free = sampler(model)([1, 2, 3])
    ended = sampler(model, eos=int(free[5]))([1, 2, 3])
    first = 3 + free[3:].tolist().index(free[5])
    np.testing.assert_array_equal(ended, free[: first + 1])


def test_no_tokens_returns_the_prompt():
    """Zero tokens is a length like any other."""
    assert sampler(initial_state(tiny_program()).model, tokens=0)([4, 5]).tolist() == [4, 5]
