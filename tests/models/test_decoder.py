"""Options of the decoder, and the formulas that describe it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxtrain.aot.jaxpr import product_flops
from nnxtrain.config.presets import PRESETS
from nnxtrain.models.flops import flops_per_token, matmul_parameters
from nnxtrain.nn.dropout import KeepAll
from nnxtrain.steps.loss import token_sums
from tests.support import initial_state, random_batch, tiny, tiny_program

pytestmark = pytest.mark.usefixtures("quick_compiles")


def scores_of(program):
    """Returns a model and its scores of a random batch, `[b s v]`."""
    model = initial_state(program).model
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch())
    return model, model.logits(model.hidden(batch, KeepAll())[0])


def count(model) -> int:
    """Returns the number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_loss_of_equal_scores_is_that_of_the_real_vocabulary():
    """Rows that pad the table must not win probability (B60)."""
    program = tiny_program("model.vocab=250")
    model, scores = scores_of(program)
    assert scores.shape[-1] == 256
    assert scores.argmax(-1).max() < 250
    equal = model.logits(jnp.zeros((1, 3, 64)))
    loss, _ = token_sums(equal, jnp.array([[0, 100, 249]]), jnp.ones((1, 3), bool), program.layout.pick)
    assert float(loss) / 3 == pytest.approx(np.log(250), rel=1e-6)


def test_a_tied_head_is_the_embedding():
    """A copy would double the parameters and drift apart."""
    tied, _ = scores_of(tiny_program("model.tied=true"))
    untied, _ = scores_of(tiny_program())
    assert count(untied) - count(tied) == 256 * 64
    assert not hasattr(tied, "head")


def test_soft_cap_bounds_the_scores():
    """The cap acts on what the loss sees."""
    _, free = scores_of(tiny_program())
    _, scores = scores_of(tiny_program("model.logit_softcap=2"))
    assert float(jnp.abs(scores).max()) < 2 < float(jnp.abs(free).max())


def test_bfloat16_computes_in_it_and_keeps_float32_weights_and_scores():
    """Weights or scores in bfloat16 would lose small updates."""
    program = tiny_program("model.dtype=bfloat16")
    model, scores = scores_of(program)
    assert scores.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch())
    assert model.hidden(batch, KeepAll())[0].dtype == jnp.bfloat16
    _, want = jax.jit(tiny_program().train_step)(initial_state(tiny_program()), random_batch())
    _, got = jax.jit(program.train_step)(initial_state(program), random_batch())
    assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-2)


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("llama2-7b", 6.738415616), ("llama2-70b", 68.976648192), ("llama3-8b", 8.030261248), ("llama3.2-1b", 1.23581440)],
)
def test_presets_have_the_published_number_of_parameters(preset, billions):
    """A wrong size in the table would show."""
    model = nnx.eval_shape(tiny_program(f"model.preset={preset}", *_clear(preset)).make_state).model
    assert count(model) == round(billions * 1e9)


@pytest.mark.parametrize("window", [1, 5, 32, 99])
def test_flops_per_token_count_what_a_window_sees(window):
    """A token sees itself by half, as in the whole past, and at most the window; compared token by token."""
    config = tiny("model.layers=8", "model.pattern=local,local,global", f"model.window={window}").model
    local, whole = (np.minimum(np.arange(32) + 0.5, width).mean() for width in (window, 32))
    seen = 6 * local + 2 * whole
    assert flops_per_token(config, 32, weights=1000) == pytest.approx(6 * 1000 + 12 * seen * 4 * 16)


def _clear(preset: str) -> list[str]:
    """Returns words that put the preset's sizes over those of `tiny.yml`."""
    sizes = {"kv_heads": 0} | PRESETS[preset]
    return [
        f"model.{name}={value}"
        for name, value in sizes.items()
        if name in ("layers", "embed", "heads", "kv_heads", "vocab")
    ]


def test_flops_per_token_are_three_times_the_products_of_the_forward_pass():
    """Counts the matrix products of the jaxpr, with the causal half of attention taken once."""
    program, config = tiny_program(), tiny().model
    model = initial_state(program).model
    weights = config.layers * (64 * 16 * 2 * (4 + 2) + 3 * 64 * 192) + 64 * 256
    assert matmul_parameters(nnx.state(model, nnx.Param)) == weights
    assert program.flops_per_token == 6 * (weights + config.layers * 32 * 4 * 16)
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch())
    jaxpr = jax.make_jaxpr(lambda batch: model.logits(model.hidden(batch, KeepAll())[0]))(batch)
    attention = config.layers * 2 * 2 * 8 * 32 * 32 * 4 * 16  # scores and sums, not halved
    assert 3 * (product_flops(jaxpr.jaxpr) - attention / 2) == pytest.approx(program.flops_per_token * 8 * 32)


@pytest.mark.parametrize("words", [(), ("model.tied=true",), ("model.scan_layers=false",), ("model.qk_norm=true",)])
def test_weights_of_products_are_counted_alike_in_every_arrangement(words):
    """A tied head is a product too; norms and the embedding are none; a stack of layers counts each."""
    params = nnx.state(nnx.eval_shape(tiny_program(*words).make_state).model, nnx.Param)
    assert matmul_parameters(params) == 4 * (64 * 16 * 2 * (4 + 2) + 3 * 64 * 192) + 64 * 256
