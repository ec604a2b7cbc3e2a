"""The weights to evaluate with, by their closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxtrain.optim.averages import evaluation_model
from nnxtrain.optim.optimizers import OPTIMIZERS
from tests.support import assert_trees_equal, initial_state, random_batch, tiny_program, weights

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = ("model.layers=1", "model.embed=16", "model.heads=2", "model.mlp=16", "schedule.name=constant")


def average_of(state) -> dict[str, np.ndarray]:
    """Returns the weights to evaluate with, by path."""
    return weights(nnx.Dict(model=evaluation_model(state)))


def push(state, seed: int, *, where: bool = True) -> None:
    """Updates by random gradients, or leaves the update out."""
    numbers = np.random.default_rng(seed)
    params = nnx.state(state.model, state.optimizer.wrt)
    grads = jax.tree.map(lambda leaf: jnp.asarray(numbers.standard_normal(leaf.shape), jnp.float32), params)
    state.apply_gradients(grads, scale=jnp.array(1.0), where=jnp.array(where), counts=jnp.array(1))


@pytest.mark.parametrize("kind", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_average_is_the_documented_sum(kind):
    """The weights that the run starts from have no part; a step that is left out moves nothing."""
    program = tiny_program(*SMALL, "optimizer.ema=0.7", "optimizer.learning_rate=0.1", f"model.param_dtype={kind}")
    state = initial_state(program)
    start = weights(state)
    for path, weight in average_of(state).items():
        np.testing.assert_array_equal(weight, start[path].astype(np.float32))
    seen = []
    for update in range(4):
        push(state, update)
        seen.append(weights(state))
        held = average_of(state)
        push(state, 100 + update, where=False)
        assert_trees_equal(average_of(state), held)
        shares = [0.7 ** (update - k) for k in range(update + 1)]
        for path, got in held.items():
            want = sum(share * trained[path].astype(np.float64) for share, trained in zip(shares, seen, strict=True))
            np.testing.assert_allclose(got, want / sum(shares), rtol=2e-6, atol=1e-6, err_msg=path)
            assert np.any(got != start[path])
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.optimizer.opt_state)} <= {"float32", "int32"}


def test_training_does_not_see_the_average():
    """A model that is trained on with its averages is another run."""
    after = []
    for words in ((), ("optimizer.ema=0.9",)):
        state = initial_state(tiny_program(*SMALL, *words))
        for seed in range(3):
            push(state, seed)
            evaluation_model(state)
        after.append(weights(state))
    assert_trees_equal(*after)


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"schedule_free_adamw"}))
def test_without_an_average_the_weights_are_those_that_were_trained(name):
    """The same arrays, so that an evaluation costs no memory."""
    state = tiny_program(*SMALL, f"optimizer.name={name}").abstract_state()
    model = evaluation_model(state)
    for one, other in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(state.model)), strict=True):
        assert one is other


@pytest.mark.parametrize("words", [("optimizer.name=schedule_free_adamw",), ("optimizer.ema=0.9",)])
def test_a_spike_that_is_left_out_leaves_the_average(words):
    """The guard inside the step must hold for averages as for moments."""
    program = tiny_program(*SMALL, *words, "debug.on_nonfinite=skip")
    step = jax.jit(program.train_step)
    state, _ = step(initial_state(program), random_batch())
    before, opt_state = average_of(state), jax.device_get(jax.tree.leaves(nnx.state(state.optimizer)))
    state, metrics = step(state, random_batch(targets=(0,) * 8))
    assert metrics["skipped"]
    assert_trees_equal(average_of(state), before)
    assert_trees_equal(jax.device_get(jax.tree.leaves(nnx.state(state.optimizer))), opt_state)
