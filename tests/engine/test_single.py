"""The compiled step over flat arrays."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nnxtrain.engine.base import hash_of
from nnxtrain.optim.optimizers import OPTIMIZERS
from nnxtrain.run.recompiles import CompileLog
from tests.support import assert_trees_equal, initial_state, random_batch, started, tiny_program, weights

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def engine():
    """Returns an engine of `tiny.yml`."""
    return started()


def put(batch):
    """Returns a batch on the device of a one-device program."""
    return jax.device_put(batch, next(iter(tiny_program().batch_spec().values())).sharding)


def test_steps_equal_the_plain_function():
    """Taking the state apart and donating it must change no number."""
    engine, program = started(), tiny_program()
    step, state = jax.jit(program.train_step), initial_state(program)
    for seed in range(3):
        batch = put(random_batch(seed=seed))
        got = engine.step(batch)
        state, want = step(state, batch)
        assert_trees_equal(jax.device_get(got), jax.device_get(want))
    assert_trees_equal(weights(engine.state()), weights(state))


def test_an_abstract_state_is_the_callers_own():
    """It is traced once a program; what a restore writes into one must not be in the next."""
    program = tiny_program()
    one = program.abstract_state()
    one.model.norm.scale.set_value(jnp.ones(64))
    assert isinstance(program.abstract_state().model.norm.scale.get_value(), jax.ShapeDtypeStruct)


def test_the_state_is_donated():
    """A step that copies its state needs twice the memory."""
    engine = started()
    before = jax.tree.leaves(engine.state())
    engine.step(put(random_batch()))
    assert all(leaf.is_deleted() for leaf in before)


@pytest.mark.parametrize("scanned", ["true", "false"])
def test_an_update_needs_no_second_copy_of_the_state(scanned):
    """Beside the state there are gradients and clipped gradients; a choice between old and new values needs more."""
    sizes = ("model.vocab=8192", "model.layers=1", "batch.sequence=2", "batch.global_size=1", "eval.global_size=1")
    program = tiny_program(*sizes, f"model.scan_layers={scanned}")
    weights_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(nnx.state(program.abstract_state().model)))
    (memory,) = program.make_engine().memory().values()
    assert memory.alias_size_in_bytes == pytest.approx(3 * weights_bytes, rel=0.01)
    assert memory.temp_size_in_bytes < 2.1 * weights_bytes


OTHERS = {"lion", "sgd"}  # their state is a part of that of adamw; `-m slow` has them


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((f"optimizer.name={name}",), marks=[pytest.mark.slow] if name in OTHERS else [])
        for name in sorted(OPTIMIZERS)
    ]
    + [("optimizer.ema=0.9",)],
)
def test_every_optimizer_is_compiled_once_and_donated(words):
    """A weak type or a moment that changes its type compiles again; z that is the weights is given away twice (B48)."""
    log = CompileLog()
    engine = tiny_program(*words, "model.layers=1", "model.embed=32").make_engine()
    engine.initialise()
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.state())]
    assert len(set(places)) == len(places)
    kinds = [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(engine.state())]
    for seed in range(3):
        before = jax.tree.leaves(engine.state())
        engine.step(put(random_batch(seed=seed)))
        assert all(leaf.is_deleted() for leaf in before)
        assert [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(engine.state())] == kinds
    assert log.counts["jit(train_step)"] == 1
    assert log.repeats(engine.programs) == 0


def test_bound_functions_read_the_state_and_change_nothing(engine):
    """Evaluation must see the weights of the moment and must not consume them."""
    before = weights(engine.state())

    def touch(state, x):
        state.model.norm.scale[...] += 1
        return state.model.norm.scale[...].sum() + x

    bound = engine.bind(touch)
    assert float(bound(1.0)) == pytest.approx(before["norm/scale"].sum() + 64 + 1)
    assert_trees_equal(weights(engine.state()), before)


def test_hash_names_the_program_and_nothing_else(engine):
    """Two programs of one configuration agree; another one differs."""
    programs = [tiny_program(word) for word in ("seed=0", "log.every_steps=3", "model.embed=32")]
    traced = [dict(program.new_engine().trace(program.batch_spec())) for program in programs]
    one, same, other = (hash_of({name: each.lower() for name, each in programs.items()}) for programs in traced)
    assert one == same == engine.hlo_hash != other
