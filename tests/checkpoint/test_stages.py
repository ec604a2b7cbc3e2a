"""A model that was cut into stages, and their states put together again."""

from itertools import pairwise

import jax
import numpy as np
import pytest
from flax import nnx

from nnxtrain.checkpoint.stacking import in_layout_of, period_of, scanned, unrolled
from nnxtrain.checkpoint.stages import model_tree, stage_tree
from nnxtrain.checkpoint.tree import flat
from nnxtrain.models.decoder import Decoder
from nnxtrain.nn.dropout import RowDropout
from nnxtrain.state import TrainStateNNX
from tests.checkpoint.test_stacking import random_tree, take
from tests.support import assert_trees_close, assert_trees_equal, initial_state, random_batch, tiny_program

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = ("model.layers=4", "model.embed=16", "model.heads=2", "model.kv_heads=1", "model.mlp=32")
PATTERN = ("model.pattern=local,global", "model.window=8")
MODELS = [
    (),
    PATTERN,
    (*PATTERN, "model.scan_layers=false", "model.tied=true"),
    ("model.tied=true", "remat.policy=full"),
]


@pytest.mark.parametrize("seed", range(20))
def test_any_tree_is_cut_and_put_together_bit_for_bit(seed):
    """Moments lie deeper down than weights; groups of a pattern start elsewhere in a stage than in the model."""
    tree = random_tree(seed)
    draw = np.random.default_rng(seed)
    apart = unrolled(tree, take)
    depth = 1 + max(int(path[path.index("layers") + 1]) for path in apart if "attention" in path)
    bounds = sorted({0, depth, *draw.integers(0, depth, 2).tolist()})
    stages = []
    for first, end in pairwise(bounds):
        own = {path: leaf for path, leaf in apart.items() if "attention" not in path or first <= index_of(path) < end}
        own = {renumbered(path, first) if "attention" in path else path: leaf for path, leaf in own.items()}
        like = scanned(own, np.stack, period=min(end - first, max(period_of(tree), 1))) if seed % 2 else own
        stage = stage_tree(tree, like, first=first, take=take, join=np.stack)
        assert_trees_equal(stage, dict(like))
        stages.append((first, stage))
    assert_trees_equal(model_tree(stages, tree, take=take, join=np.stack), tree)


def index_of(path) -> int:
    return int(path[path.index("stack") + 2])


def renumbered(path, first):
    at = path.index("stack") + 2
    return (*path[:at], str(int(path[at]) - first), *path[at + 1 :])


@pytest.mark.parametrize(
    ("words", "bounds"),
    [
        (MODELS[1], (0, 1, 4)),
        (MODELS[2], (0, 1, 4)),
        pytest.param(MODELS[0], (0, 2, 4), marks=pytest.mark.slow),
        pytest.param(MODELS[3], (0, 1, 4), marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_stages_in_turn_are_the_model(words, bounds):
    """Layers that count from 0 in each stage draw other weights and masks; a stage must not have what it never uses."""
    program = tiny_program(*SMALL, *words)
    state = initial_state(program)
    whole = state.model
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch())
    drop = RowDropout.of_rows(0.1, jax.random.key(0), batch["rows"])
    spans = [range(first, end) for first, end in pairwise(bounds)]

    def make_stages():
        return [Decoder(whole.family, whole.config, whole.context, layers=span) for span in spans]

    @jax.jit
    def run(states):
        stages = [
            nnx.merge(nnx.graphdef(stage), one) for stage, one in zip(nnx.eval_shape(make_stages), states, strict=True)
        ]
        carry = stages[0].embed(batch["inputs"])
        for stage in stages:
            carry = stage.run_layers(carry, stage.side_inputs(batch, drop))
        return stages[-1].logits(stages[-1].finish(carry)[0])

    states = jax.jit(lambda: [nnx.state(stage) for stage in make_stages()])()
    logits = run(states)
    want = jax.jit(lambda: whole.logits(whole.hidden(batch, drop)[0]))()
    assert_trees_close(logits, want, rtol=1e-5)
    assert sum("embedding" in one for one in states) == 1 + (len(spans) > 1 and whole.config.tied)
    assert sum("head" in one for one in states) == (not whole.config.tied)
    trees = [flat_model(one) for one in states]
    whole_tree = flat(state, "model")
    for span, tree in zip(spans, trees, strict=True):
        assert_trees_equal(stage_tree(whole_tree, tree, first=span.start, take=take, join=jax.numpy.stack), tree)
    parts = [(span.start, tree) for span, tree in zip(spans, trees, strict=True)]
    assert_trees_equal(model_tree(parts, whole_tree, take=take, join=jax.numpy.stack), whole_tree)


def flat_model(state):
    """Returns the arrays of a model by path."""
    return {tuple(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}


def test_a_stage_has_the_moments_of_its_layers():
    """Its optimizer state is cut like its weights, and that of all stages is that of the whole."""
    program = tiny_program(*SMALL, *PATTERN)
    whole = nnx.eval_shape(program.make_state)
    wanted = flat(whole, "optimizer")
    model, parts = whole.model, []
    for span in (range(0, 1), range(1, 4)):
        state = nnx.eval_shape(
            lambda span=span: TrainStateNNX(
                Decoder(model.family, model.config, model.context, layers=span), whole.optimizer.tx
            )
        )
        parts.append((span.start, flat(state, "optimizer")))
    assert parts[0][1].keys() != parts[1][1].keys()
    found = model_tree(parts, wanted, take=cut, join=stacked)
    assert {path: leaf.shape for path, leaf in found.items()} == {path: leaf.shape for path, leaf in wanted.items()}
    assert in_layout_of(wanted, found, take=cut, join=stacked) is found


def cut(leaf, group):
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def stacked(leaves):
    return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
