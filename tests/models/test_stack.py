"""Scanned and unrolled layers are one model."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from nnxtrain.axes import axes_of
from nnxtrain.checkpoint.tree import flat
from nnxtrain.nn.dropout import KeepAll
from nnxtrain.optim.groups import is_decayed
from tests.support import (
    assert_trees_close,
    assert_trees_equal,
    initial_state,
    random_batch,
    tiny_program,
    weights,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")


def state_of(*words: str):
    """Returns the initial state, made as the engine makes it: inside `jax.jit`."""
    return jax.jit(tiny_program(*words).make_state)()


def hidden_of(*words: str):
    """Returns `batch -> activations [b s d]` of the initial model."""
    program = tiny_program(*words)
    return jax.jit(lambda batch: program.make_state().model.hidden(batch, KeepAll())[0])


# five layers in groups of two leave one, eight in groups of three leave two; a pattern longer than the stack is cut
PATTERNS = {
    "plain": (),
    "remainder": ("model.layers=5", "model.pattern=local,global", "model.window=8"),
    "two remain": ("model.layers=8", "model.pattern=local,local,global", "model.window=8"),
    "cut": ("model.layers=2", "model.pattern=local,global,local", "model.window=8"),
}


@pytest.mark.parametrize(
    "pattern", [pytest.param(name, marks=[pytest.mark.slow] if name == "two remain" else []) for name in PATTERNS]
)
def test_scanned_and_unrolled_models_start_from_equal_weights(pattern):
    """Weights drawn in order of construction, or by place in a group, differ between the layouts."""
    words = PATTERNS[pattern]
    assert_trees_equal(weights(state_of(*words)), weights(state_of(*words, "model.scan_layers=false")))


def test_names_of_stored_weights():
    """Checkpoints are read by these names."""
    names = {path[:3] for path in flat(nnx.eval_shape(tiny_program().make_state), "model") if path[0] == "stack"}
    assert names == {("stack", "layer", part) for part in ("attention", "attention_norm", "mlp", "mlp_norm")}
    state = nnx.eval_shape(tiny_program(*PATTERNS["two remain"]).make_state)
    shapes = {path[:3]: leaf.shape for path, leaf in flat(state, "model").items() if path[3:] == ("mlp_norm", "scale")}
    grouped = {("stack", "layer", place): (2, 64) for place in "012"}
    assert shapes == grouped | {("stack", "rest", number): (64,) for number in "01"}


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


@pytest.mark.parametrize(
    "words",
    [
        ("model.layers=2", "model.qk_norm=true", "model.tied=true", "model.logit_softcap=5"),
        pytest.param((*PATTERNS["remainder"], "model.dropout=0.2", "remat.policy=qkv"), marks=pytest.mark.slow),
        pytest.param((*PATTERNS["two remain"], "model.dropout=0.2", "remat.policy=qkv"), marks=pytest.mark.slow),
        pytest.param((*PATTERNS["cut"], "remat.policy=dots"), marks=pytest.mark.slow),
        pytest.param((*PATTERNS["two remain"], "model.scan_unroll=2", "remat.policy=full"), marks=pytest.mark.slow),
        pytest.param(("model.scan_unroll=3", "remat.policy=full"), marks=pytest.mark.slow),
    ],
)
def test_scanned_equals_unrolled(words):
    """Loss, gradients and the next weights agree from equal weights."""
    results = []
    for layout in ("true", "false"):
        program = tiny_program(*words, f"model.scan_layers={layout}", "optimizer.name=sgd")
        state, metrics = jax.jit(program.train_step)(initial_state(program), random_batch())
        results.append((weights(state), jax.device_get(metrics)))
    (scanned, scanned_metrics), (unrolled, unrolled_metrics) = results
    assert_trees_close(unrolled_metrics, scanned_metrics, rtol=1e-6)
    assert_trees_close(unrolled, scanned, rtol=1e-5)


@pytest.mark.parametrize("unroll", [3, 9])
def test_unroll_is_in_the_program_and_changes_no_number(unroll):
    """Four layers: one turn of three and one over, or all at once."""
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch())
    plain, taken = (hidden_of(f"model.scan_unroll={turns}") for turns in (1, unroll))
    np.testing.assert_allclose(taken(batch), plain(batch), atol=1e-5)
    assert f"unroll={unroll}" in str(jax.make_jaxpr(taken.__wrapped__)(batch))


@pytest.mark.parametrize(("layout", "unroll", "in_loop"), [("true", 1, True), ("true", 2, False), ("false", 1, False)])
def test_recomputation_outside_of_a_loop_is_kept_from_being_merged(layout, unroll, in_loop):
    """Without a barrier the compiler computes once what stands twice, and keeps it."""
    program = tiny_program("remat.policy=full", f"model.scan_layers={layout}", f"model.scan_unroll={unroll}")
    graph, state = nnx.split(program.abstract_state())
    step = jax.jit(lambda state, batch: program.train_step(nnx.merge(graph, state), batch)[1])
    barriers = step.lower(state, random_batch()).as_text().count("optimization_barrier")
    assert (barriers == 0) == in_loop


def test_every_parameter_carries_one_axis_name_a_dimension():
    """Sharding and weight decay read these names; stacked norms are no matrices (B37)."""
    for layout, pattern in itertools.product(("true", "false"), ("plain", "remainder")):
        program = tiny_program(f"model.scan_layers={layout}", "model.qk_norm=true", *PATTERNS[pattern])
        model = nnx.eval_shape(program.make_state).model
        for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            axes = axes_of(parameter)
            assert len(axes) == len(parameter.shape), path
            assert (axes[0] == "layer") == ("layer" in path), path
            assert is_decayed(axes) == (path[-1] != "scale"), path


@pytest.mark.parametrize(
    ("words", "depths"),
    [(("remat.policy=full",), (4, 64)), (("model.pattern=local,global", "model.window=8"), (5, 65))],
)
def test_a_scanned_program_does_not_grow_with_depth(words, depths):
    """Counts the instructions of the lowered step; unrolled layers would multiply them."""

    def instructions(layers: int) -> int:
        program = tiny_program(*words, f"model.layers={layers}")
        graph, state = nnx.split(program.abstract_state())
        step = jax.jit(lambda state, batch: program.train_step(nnx.merge(graph, state), batch)[1])
        return len(step.lower(state, random_batch()).as_text().splitlines())

    assert instructions(depths[0]) == instructions(depths[1])


def test_a_layer_is_of_the_kind_that_the_pattern_says():
    """A change of the first token reaches only as far as windows, one after another, let it."""
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch())
    changed = {**batch, "inputs": np.array(batch["inputs"])}
    changed["inputs"][:, 0] = (changed["inputs"][:, 0] + 1) % 256
    for pattern, reach in (("local", 2 * 3 + 1), ("local,global", 32)):
        hidden = hidden_of("model.layers=2", f"model.pattern={pattern}", "model.window=4")
        moved = np.any(hidden(changed) != hidden(batch), axis=(0, 2))
        assert np.flatnonzero(moved).max() + 1 == reach


def test_hidden_is_causal():
    """A later token must not reach an earlier activation."""
    model = initial_state(tiny_program()).model
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch())
    before = model.hidden(batch, KeepAll())[0]
    changed = {**batch, "inputs": np.array(batch["inputs"])}
    changed["inputs"][:, 20] = (changed["inputs"][:, 20] + 1) % 256
    after = model.hidden(changed, KeepAll())[0]
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert not np.array_equal(before[:, 20:], after[:, 20:])
