"""Groups by path: what is decayed, scaled and frozen, in either layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxtrain.axes import axes_of
from nnxtrain.errors import ConfigError
from nnxtrain.optim.groups import is_decayed
from tests.support import assert_trees_equal, initial_state, random_batch, tiny_program, weights

pytestmark = pytest.mark.usefixtures("quick_compiles")

PLAIN = ("optimizer.name=sgd", "schedule.name=constant", "optimizer.clip_norm=null", "model.layers=2")

SMALL = ("model.layers=1", "model.embed=32")


def update_of(*words: str):
    """Returns the weights before and after an update with gradients of 1, and the state."""
    program = tiny_program(*PLAIN, "optimizer.learning_rate=0.5", *words)
    state = initial_state(program)
    before = weights(state)
    grads = jax.tree.map(jnp.ones_like, nnx.state(state.model, state.optimizer.wrt))
    state.apply_gradients(grads, scale=jnp.array(1.0), where=jnp.array(True), counts=jnp.array(1))
    return before, weights(state), state


@pytest.mark.parametrize("layout", ["true", "false"])
def test_decay_and_rate_of_a_group_are_its_own(layout):
    """A later group wins; a decay that is asked for reaches norms too; a path is the same in both layouts."""
    groups = "* decay=0.1 rate_scale=0.5,stack/layer/attention/* decay=0,*/mlp/up/kernel rate_scale=0.25"
    before, after, _ = update_of(f"optimizer.groups={groups}", f"model.scan_layers={layout}")
    for path, weight in before.items():
        decay = 0 if "/attention/" in path else 0.1
        rate_scale = 0.25 if path == "stack/layer/mlp/up/kernel" else 0.5
        np.testing.assert_allclose(after[path], weight - 0.5 * rate_scale * (1 + decay * weight), rtol=1e-6)
    assert "stack/layer/mlp/up/kernel" in before


@pytest.mark.parametrize("layout", ["true", "false"])
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "schedule_free_adamw"])
def test_frozen_weights_keep_their_bytes_and_have_no_moments(layout, name):
    """Decay, an average or a step of size 0 that adds 0 to -0 would touch them."""
    words = (f"optimizer.name={name}", f"model.scan_layers={layout}", "optimizer.weight_decay=0.5")
    words = (*words, *SMALL, "optimizer.groups=stack/layer/attention/* freeze,embedding/* freeze")
    program = tiny_program(*words)
    state = initial_state(program)
    state.model.embedding.table[...] = state.model.embedding.table[...].at[0].set(-0.0)
    before = weights(state)
    grads = jax.tree.map(jnp.ones_like, nnx.state(state.model, state.optimizer.wrt))
    for _ in range(2):
        state.apply_gradients(grads, scale=jnp.array(1.0), where=jnp.array(True), counts=jnp.array(1))
    after = weights(state)
    frozen = {path for path in before if "/attention/" in path or path.startswith("embedding/")}
    assert_trees_equal({path: after[path] for path in frozen}, {path: before[path] for path in frozen})
    assert all(np.any(after[path] != before[path]) for path in before.keys() - frozen)
    moments = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(state.optimizer))}
    assert any("/mlp/" in path for path in moments)
    assert not any("/attention/" in path or "embedding/" in path for path in moments)


def test_the_norm_is_that_of_the_trained_gradients():
    """Frozen weights that count in the norm would shrink the updates of all others when it clips."""
    words = (*PLAIN, *SMALL, "optimizer.weight_decay=0", "optimizer.learning_rate=1")
    program = tiny_program(*words, "optimizer.groups=embedding/* freeze,stack/* freeze,norm/* freeze")
    state = initial_state(program)
    before = weights(state)
    state, metrics = jax.jit(program.train_step)(state, random_batch())
    moved = {path: before[path] - after for path, after in weights(state).items()}
    assert [path for path in moved if np.any(moved[path])] == ["head/table"]
    assert float(metrics["grad_norm"]) == pytest.approx(np.linalg.norm(moved["head/table"]), rel=1e-4)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (
            "stack/attention/q/kernel freeze",
            "'stack/attention/q/kernel' matches no parameter; close matches: stack/layer/",
        ),
        ("head/* decay=0,embeding/* decay=0", "'embeding/*' matches no parameter; close matches: embedding/table"),
        ("stack/layers/0/* freeze", "'stack/layers/0/*' matches no parameter"),
        ("* freeze", "nothing is left to train"),
    ],
)
@pytest.mark.parametrize("layout", ["true", "false"])
def test_a_group_that_means_nothing_is_refused_when_the_program_is_made(groups, says, layout):
    """A pattern with a slip in it would train what was to be frozen."""
    with pytest.raises(ConfigError, match=r"optimizer\.groups") as refused:
        tiny_program(f"optimizer.groups={groups}", f"model.scan_layers={layout}")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("axes", "decayed"),
    [
        (("embed", "heads", "head_dim"), True),
        (("layer", "mlp", "embed"), True),
        (("vocab", "embed"), True),
        (("embed",), False),
        (("layer", "embed"), False),
        (("stage", "layer", "head_dim"), False),
        (("layer", "heads", "head_dim"), False),
    ],
)
def test_decay_follows_logical_axes(axes, decayed):
    """The last row is the bias of a stacked query projection: three dimensions, and no matrix."""
    assert is_decayed(axes) is decayed


def test_the_table_of_tokens_is_decayed():
    """Documented in `optimizer.weight_decay`."""
    model = tiny_program().abstract_state().model
    assert is_decayed(axes_of(model.embedding.table))


def test_a_group_is_of_all_layers_whatever_the_pattern_and_the_stack():
    """Five layers in groups of two leave one over, at a path of its own; a pattern of paths must not miss it."""
    words = ("model.layers=5", "model.pattern=local,global", "model.window=8")
    groups = "optimizer.groups=stack/layer/mlp/* freeze,stack/layer/attention/q/* rate_scale=0.5"
    for scan in ("true", "false"):
        before, after, _ = update_of(*words, groups, f"model.scan_layers={scan}", "optimizer.weight_decay=0")
        moved = {path: np.unique(np.round(before[path] - after[path], 5)) for path in before}
        assert [moved[path].tolist() for path in moved if "/mlp/" in path] == [[0.0]] * 3
        assert moved["stack/layer/attention/q/kernel"].tolist() == [0.25]
        assert moved["stack/layer/attention/k/kernel"].tolist() == [0.5]
