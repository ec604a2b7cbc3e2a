"""Sums over microbatches: their type, and that nothing else depends on how many there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxtrain.data.pipeline import Cut
from nnxtrain.sharding.mesh import rows_sharding
from nnxtrain.steps.accumulate import ACCUMULATORS
from nnxtrain.steps.loss import make_loss_sum
from tests.support import QUICKLY, assert_trees_close, random_batch, tiny_program

BFLOAT16 = ("model.dtype=bfloat16", "model.param_dtype=bfloat16")


def initial(program):
    """Returns graph and initial state of a program, made apart: inside a step, weights could keep more bits."""
    graph = nnx.graphdef(nnx.eval_shape(program.make_state))
    return graph, jax.jit(lambda: nnx.state(program.make_state()), compiler_options=QUICKLY)()


def sums_of(program, name: str):
    """Returns `batch -> loss parts and gradient sums` of the initial model."""
    loss_sum = make_loss_sum(z_loss=0.0, dropout=0.0, chunks=1)
    graph, params, rest = nnx.split(nnx.merge(*initial(program)).model, nnx.Param, ...)

    def loss_of(params, one):
        return loss_sum(nnx.merge(graph, params, rest), one, jax.random.key(0))

    def sums(params, batch):
        parts, grads = ACCUMULATORS[name](loss_of, params, batch)
        return parts, nnx.to_pure_dict(grads)

    compiled = jax.jit(sums, compiler_options=QUICKLY)
    return lambda batch: compiled(params, batch)


def test_sums_are_float32_whatever_weights_and_computation_are():
    """A running sum in bfloat16 keeps eight bits, and loses what each further microbatch adds."""
    program = tiny_program(*BFLOAT16, "model.layers=1", "batch.accum_steps=8")
    batch = random_batch(accum_steps=8)
    parts, grads = sums_of(program, "scan")(batch)
    assert {leaf.dtype for leaf in jax.tree.leaves((parts, grads))} == {jnp.dtype("float32")}
    sums_of_one = sums_of(program, "one_pass")
    each = [sums_of_one({name: leaf[k : k + 1] for name, leaf in batch.items()}) for k in range(8)]
    want = jax.tree.map(lambda *leaves: np.sum(np.array(leaves, np.float64), axis=0), *each)
    assert_trees_close((parts, grads), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "norm"),
    [((), 1e-6), (("model.param_dtype=bfloat16",), 1e-4), (BFLOAT16, 1e-4)],
)
def test_metrics_do_not_depend_on_the_number_of_microbatches(words, norm):
    """Each gradient of weights in bfloat16 is rounded to it before it is summed; the loss is not."""
    found = []
    for accum_steps in (1, 4):
        program = tiny_program(*words, "model.layers=1", f"batch.accum_steps={accum_steps}")
        graph, state = initial(program)

        def step(state, batch, graph=graph, program=program):
            return program.train_step(nnx.merge(graph, state), batch)[1]

        found.append(jax.jit(step, compiler_options=QUICKLY)(state, random_batch(accum_steps=accum_steps)))
    one, four = found
    assert set(one) == set(four)
    for name in set(one) - {"loss", "grad_norm"}:
        assert one[name] == four[name], name
    np.testing.assert_allclose(four["loss"], one["loss"], rtol=1e-6)
    np.testing.assert_allclose(four["grad_norm"], one["grad_norm"], rtol=norm)


def test_the_cut_is_by_rows_in_their_order():
    """The rows of a microbatch stand one after another, so that the last ones are the empty ones."""
    batch = Cut(3, 4)({"rows": np.arange(12), "inputs": np.arange(24).reshape(12, 2)})
    np.testing.assert_array_equal(batch["rows"], np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(batch["inputs"][2, 1], [18, 19])


def test_no_row_goes_from_device_to_device():
    """A mesh that shared the microbatch axis would gather the batch; gradients alone are summed over devices."""
    program = tiny_program("mesh.data=2", "batch.accum_steps=4", "model.layers=1", devices=2)
    batch = jax.device_put(random_batch(accum_steps=4), rows_sharding(program.mesh, row_axis=1))
    for shard in batch["rows"].addressable_shards:
        assert shard.data.shape == (4, 1)
    graph, state = nnx.split(program.abstract_state())
    whole = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=program.state_sharding)  # noqa: E731
    step = jax.jit(lambda state, batch: program.train_step(nnx.merge(graph, state), batch)[1], compiler_options=QUICKLY)
    text = step.lower(jax.tree.map(whole, state), batch).compile().as_text()
    assert "all-reduce" in text
    for moves in ("all-gather", "all-to-all", "collective-permute"):
        assert f"{moves}(" not in text
