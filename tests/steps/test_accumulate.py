"""Sums over microbatches: their type, and that nothing else depends on how many there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxtrain.data.batches import BatchShape
from nnxtrain.steps.accumulate import scan
from nnxtrain.types import LossParts
from tests.support import random_batch, tiny_program

BFLOAT16 = ("model.dtype=bfloat16", "model.param_dtype=bfloat16")


def initial(program):
    """Returns graph and initial state of a program, made apart: inside a step, weights could keep more bits."""
    graph = nnx.graphdef(nnx.eval_shape(program.make_state))
    return graph, jax.jit(lambda: nnx.state(program.make_state()))()


def test_sums_are_float32_whatever_weights_and_computation_are():
    """A running sum in bfloat16 keeps eight bits: 256 and then 1 seven times would stay 256."""
    parts = np.array([256, 1, 1, 1, 1, 1, 1, 1], np.float32)

    def loss_of(params, microbatch):
        loss = jnp.sum(params["weight"] * microbatch["part"].astype(jnp.bfloat16)).astype(jnp.float32)
        one = jnp.ones((), jnp.float32)
        return loss, LossParts(one, one, {"loss": (loss, one)})

    found, grads = scan(loss_of, {"weight": jnp.ones((), jnp.bfloat16)}, {"part": parts[:, None]})
    assert {leaf.dtype for leaf in jax.tree.leaves((found, grads))} == {jnp.dtype("float32")}
    assert grads["weight"] == found.sums["loss"][0] == 263
    assert found.targets == 8


@pytest.mark.parametrize(
    ("words", "norm"),
    [((), 1e-6), pytest.param(("model.param_dtype=bfloat16",), 1e-4, marks=pytest.mark.slow), (BFLOAT16, 1e-4)],
)
def test_metrics_do_not_depend_on_the_number_of_microbatches(words, norm):
    """Each gradient of weights in bfloat16 is rounded to it before it is summed; the loss is not."""
    found = []
    for accum_steps in (1, 4):
        program = tiny_program(*words, "model.layers=1", f"batch.accum_steps={accum_steps}")
        graph, state = initial(program)

        def step(state, batch, graph=graph, program=program):
            return program.train_step(nnx.merge(graph, state), batch)[1]

        found.append(jax.jit(step)(state, random_batch(accum_steps=accum_steps)))
    one, four = found
    assert set(one) == set(four)
    for name in set(one) - {"loss", "grad_norm"}:
        assert one[name] == four[name], name
    np.testing.assert_allclose(four["loss"], one["loss"], rtol=1e-6)
    np.testing.assert_allclose(four["grad_norm"], one["grad_norm"], rtol=norm)


def test_the_cut_is_by_rows_in_their_order():
    """The rows of a microbatch stand one after another, so that the last ones are the empty ones."""
    batch = BatchShape(3, 4)({"rows": np.arange(12), "inputs": np.arange(24).reshape(12, 2)})
    np.testing.assert_array_equal(batch["rows"], np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(batch["inputs"][2, 1], [18, 19])


def test_no_row_goes_from_device_to_device():
    """A mesh that shared the microbatch axis would gather the batch; gradients alone are summed over devices."""
    program = tiny_program("mesh.data=2", "batch.accum_steps=4", "model.layers=1", devices=2)
    batch = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, spec.sharding), random_batch(accum_steps=4), program.batch_spec()
    )
    for shard in batch["rows"].addressable_shards:
        assert shard.data.shape == (4, 1)
    graph, state = nnx.split(program.abstract_state())
    step = jax.jit(lambda state, batch: program.train_step(nnx.merge(graph, state), batch)[1])
    text = step.lower(state, batch).compile().as_text()
    assert "all-reduce" in text
    for moves in ("all-gather", "all-to-all", "collective-permute"):
        assert f"{moves}(" not in text
