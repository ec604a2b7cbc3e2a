"""Scanned and unrolled layers are one model."""

import jax
import numpy as np
import pytest
from flax import nnx

from nnxtrain.axes import axes_of
from nnxtrain.nn.dropout import KeepAll
from tests.support import assert_trees_close, assert_trees_equal, pure_step, random_batch, tiny_program, weights


def state_of(*words: str):
    """Returns the initial state, made as the engine makes it: inside `jax.jit`."""
    return jax.jit(tiny_program(*words).make_state)()


def test_scanned_and_unrolled_models_start_from_equal_weights():
    """Weights drawn in order of construction differ between the layouts."""
    assert_trees_equal(weights(state_of()), weights(state_of("model.scan_layers=false")))


def test_initial_weights_do_not_depend_on_depth():
    """A layer's weights are a function of its own index: a deeper model begins with the same draws."""
    four, six = weights(state_of()), weights(state_of("model.layers=6"))
    for path, leaf in four.items():
        own = six[path][:4] if path.startswith("stack/") else six[path]
        scale = np.sqrt(6 / 4) if path.split("/")[-2] in ("out", "down") else 1  # residual outputs shrink with depth
        np.testing.assert_allclose(own * scale, leaf, rtol=1e-6, err_msg=path)


def test_initial_weights_depend_on_seed_path_and_layer():
    """One key for two parameters would make them equal."""
    one, other = weights(state_of()), weights(state_of("seed=1"))
    drawn = [path for path in one if not path.endswith("scale")]
    assert not any(np.array_equal(one[path], other[path]) for path in drawn)
    layers = [leaf for path in drawn if path.startswith("stack/") for leaf in one[path]]
    tables = [one[path] for path in drawn if not path.startswith("stack/")]
    values = [float(leaf.ravel()[0] / leaf.std()) for leaf in layers + tables]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("words", [(), ("model.qk_norm=true", "model.tied=true", "model.logit_softcap=5")])
def test_scanned_equals_unrolled(words):
    """Loss, gradients and the next weights agree from equal weights."""
    results = []
    for layout in ("true", "false"):
        program = tiny_program(*words, f"model.scan_layers={layout}", "optimizer.name=sgd")
        state, metrics = jax.jit(program.train_step)(jax.jit(program.make_state)(), random_batch())
        results.append((weights(state), jax.device_get(metrics)))
    (scanned, scanned_metrics), (unrolled, unrolled_metrics) = results
    assert_trees_close(unrolled_metrics, scanned_metrics, rtol=1e-6)
    assert_trees_close(unrolled, scanned, rtol=1e-5)


@pytest.mark.parametrize("policy", ["full", "dots"])
@pytest.mark.parametrize("layout", ["true", "false"])
def test_remat_is_in_the_program_and_changes_no_number(policy, layout):
    """Two equal programs would agree too, so the remat itself is looked for."""
    results = []
    for name in ("none", policy):
        program = tiny_program(f"remat.policy={name}", f"model.scan_layers={layout}", "optimizer.name=sgd")
        state, step = pure_step(program)
        jaxpr = str(jax.make_jaxpr(step)(state, random_batch()))
        assert ("remat" in jaxpr) == (name != "none")
        state, metrics = jax.jit(program.train_step)(program.make_state(), random_batch())
        results.append((weights(state), jax.device_get(metrics)))
    assert_trees_close(results[1], results[0], rtol=1e-5)


def test_every_parameter_carries_one_axis_name_a_dimension():
    """Sharding and weight decay read these names."""
    for layout in ("true", "false"):
        model = tiny_program(f"model.scan_layers={layout}", "model.qk_norm=true").make_state().model
        for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            axes = axes_of(parameter)
            assert len(axes) == parameter[...].ndim, path
            assert (axes[0] == "layer") == ("layer" in path), path


def test_a_scanned_program_does_not_grow_with_depth():
    """Counts the instructions of the lowered step; unrolled layers would multiply them."""

    def instructions(layers: int) -> int:
        state, step = pure_step(tiny_program(f"model.layers={layers}"))
        return len(jax.jit(step).lower(state, random_batch()).as_text().splitlines())

    assert instructions(4) == instructions(16)


def test_hidden_is_causal():
    """A later token must not reach an earlier activation."""
    model = tiny_program().make_state().model
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch())
    before = model.hidden(batch, KeepAll())
    changed = {**batch, "inputs": np.array(batch["inputs"])}
    changed["inputs"][:, 20] = (changed["inputs"][:, 20] + 1) % 256
    after = model.hidden(changed, KeepAll())
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert not np.array_equal(before[:, 20:], after[:, 20:])
