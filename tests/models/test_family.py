"""What a family may choose: the parts of a layer, where its norms stand, and what it adds to the loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxtrain.axes import EMBED
from nnxtrain.build.program import make_program
from nnxtrain.build.registry import BUILT_IN
from nnxtrain.engine.split import SplitEngine
from nnxtrain.models.decoder import Decoder
from nnxtrain.models.families.llama import llama
from nnxtrain.nn.dropout import KeepAll
from nnxtrain.nn.mlp import GatedMlp
from nnxtrain.types import LossTerm
from tests.support import initial_state, random_batch, tiny

pytestmark = pytest.mark.usefixtures("quick_compiles")

COEFFICIENT = 0.25
SMALL = ("model.layers=3", "model.embed=16", "model.heads=2", "model.kv_heads=1", "model.mlp=32")
PLAIN = (
    *SMALL,
    "optimizer.learning_rate=0.5",
    "optimizer.name=sgd",
    "schedule.name=constant",
    "optimizer.clip_norm=null",
    "optimizer.weight_decay=0",
)
PATTERN = ("model.pattern=local,global", "model.window=8")


class Gain(GatedMlp):
    """A feed-forward layer whose term is half the squared length of a vector of its own, once for each token."""

    def __init__(self, embed, mlp, init, *, coefficient):
        super().__init__(embed, mlp, init)
        self.gain = nnx.Param(jnp.arange(embed, dtype=jnp.float32), axes=(EMBED,))
        self.coefficient = coefficient

    def __call__(self, x, is_token):
        """Returns the term beside the activations."""
        out, _ = super().__call__(x, is_token)
        tokens = jnp.sum(is_token, dtype=jnp.float32)
        total = tokens * jnp.sum(self.gain[...] ** 2) / 2
        return out, {"gain": LossTerm(self.coefficient * total, total, 2 * tokens)}


def changed(**parts):
    """Returns the family of `tiny.yml` with other parts in each of its layers."""

    def family(config):
        made = llama(config)
        layers = {kind: dataclasses.replace(layer, **parts) for kind, layer in made.layers.items()}
        return dataclasses.replace(made, layers=layers)

    return family


def program_of(family, *words, devices=1):
    """Returns the program of a model of `family`."""
    registry = BUILT_IN._replace(models={"decoder": functools.partial(Decoder, family)})
    return make_program(tiny(*words), devices=jax.devices()[:devices], registry=registry)


def gains(*words, coefficient=COEFFICIENT, devices=1):
    """Returns the program of a model whose layers have the term `gain`."""
    config = tiny(*PLAIN, *words)
    mlp = functools.partial(Gain, config.model.embed, config.model.mlp, coefficient=coefficient)
    return program_of(changed(mlp=mlp, loss_terms=("gain",)), *PLAIN, *words, devices=devices)


def padded_batch(accum_steps):
    """Returns a batch of 8 rows with 100 targets and 120 tokens."""
    batch = random_batch()
    batch["segment_ids"] = (np.arange(32) < np.array([32, 8, 17, 2, 32, 2, 9, 18])[:, None]).astype(np.int32)[None]
    return {name: leaf.reshape(accum_steps, 8 // accum_steps, *leaf.shape[2:]) for name, leaf in batch.items()}


CASES = [
    (),
    pytest.param(("remat.policy=full",), marks=pytest.mark.slow),
    ("model.scan_layers=false", "remat.policy=dots"),
    pytest.param(("batch.accum_steps=4",), marks=pytest.mark.slow),
    (*PATTERN, "remat.policy=full", "batch.accum_steps=2"),
    ("mesh.data=4", "batch.accum_steps=2"),
    ("mesh.fsdp=2", "mesh.tensor=2", "remat.policy=full"),
]


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_a_term_has_its_value_and_its_gradient_however_the_step_is_computed(words):
    """A term that is lost in the loop, counted once a microbatch or a device, or divided by its own count fails."""
    devices = 4 if any(word.startswith("mesh") for word in words) else 1
    program = gains(*words, devices=devices)
    state = initial_state(program)
    before = gain_of(state)
    batch = padded_batch(program.config.batch.accum_steps)
    state, metrics = jax.jit(program.train_step)(state, batch)
    square = np.sum(np.arange(16.0) ** 2) / 2
    assert float(metrics["gain"]) == pytest.approx(3 * square / (3 * 2), rel=1e-6)
    tokens, targets = 120, 100
    rate = program.config.optimizer.learning_rate
    for one, other in zip(before, gain_of(state), strict=True):
        np.testing.assert_allclose(one - other, rate * COEFFICIENT * tokens / targets * np.arange(16), rtol=1e-4)


def gain_of(state):
    """Returns the vectors of all layers."""
    leaves = [leaf for path, leaf in nnx.to_flat_state(nnx.state(state.model)) if path[-1] == "gain"]
    return [row for leaf in leaves for row in np.asarray(leaf[...]).reshape(-1, 16)]


def test_the_loss_that_is_logged_is_cross_entropy_alone():
    """A term in the loss would make curves of different coefficients incomparable."""
    batch = padded_batch(1)
    found = [
        jax.jit(program.train_step)(initial_state(program), batch)[1] for program in (gains(), gains(coefficient=0))
    ]
    assert float(found[0]["loss"]) == float(found[1]["loss"])
    assert float(found[0]["gain"]) == float(found[1]["gain"])
    assert float(found[0]["grad_norm"]) != float(found[1]["grad_norm"])


def test_the_split_engine_has_the_terms_of_the_single_step():
    """Its sums wait on the devices between microbatches, terms too."""
    program = gains("batch.accum_steps=2", "engine.name=split")
    engine = program.make_engine()
    assert isinstance(engine, SplitEngine)
    engine.initialise()
    batch = jax.device_put(padded_batch(2))
    metrics = {name: value.item() for name, value in engine.step(batch).items()}
    _, want = jax.jit(program.train_step)(initial_state(program), batch)
    assert metrics["gain"] == pytest.approx(float(want["gain"]), rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(want["grad_norm"]), rel=1e-5)


def test_a_term_that_no_layer_announced_is_refused():
    """It has no place in what goes from layer to layer; a scan would fail with words about carries."""
    mlp = functools.partial(Gain, 16, 32, coefficient=1.0)
    program = program_of(changed(mlp=mlp), *PLAIN)
    with pytest.raises(KeyError, match="gain"):
        jax.eval_shape(lambda: program.train_step(program.make_state(), random_batch())[1])


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("before", {"attention_norm", "mlp_norm"}),
        ("after", {"attention_post_norm", "mlp_post_norm"}),
        ("both", {"attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"}),
    ],
)
def test_norms_stand_where_the_family_says(place, names):
    """The parameters are there, and each of them changes what the model computes."""
    program = program_of(changed(norm_place=place), *PLAIN, "model.scan_layers=false", "model.layers=1")
    model = initial_state(program).model
    layer = model.stack.layers[0]
    assert {name for name in vars(layer) if name.endswith("_norm")} == names
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch())
    x = jax.random.normal(jax.random.key(0), (8, 32, 16))

    def out():
        side = model.side_inputs(batch, KeepAll())
        return layer(x, side.rotations["rope"], side.segment_ids, side.drop)[0]

    plain = out()
    for name in names:
        scale = getattr(layer, name).scale
        scale[...] = 2 * scale[...]
        assert not np.allclose(out(), plain), name
        scale[...] = scale[...] / 2
    attended = {
        "before": lambda: layer.attention(layer.attention_norm(x), *_rotated(model, batch)),
        "after": lambda: layer.attention_post_norm(layer.attention(x, *_rotated(model, batch))),
        "both": lambda: layer.attention_post_norm(layer.attention(layer.attention_norm(x), *_rotated(model, batch))),
    }[place]()
    layer.mlp.down.kernel[...] = jnp.zeros_like(layer.mlp.down.kernel[...])
    np.testing.assert_allclose(out(), x + attended, atol=1e-6)


def _rotated(model, batch):
    side = model.side_inputs(batch, None)
    return side.rotations["rope"], side.segment_ids
