"""Every way to share the work gives the numbers of one device, and the programs talk no more than they must."""

import functools
import math
import re
from collections import defaultdict
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from nnxtrain.sharding.audit import bytes_per_device
from tests.support import assert_trees_close, random_batch, tiny_program, weights

# dropout, so that masks must not depend on the mesh; a binding clip, so that the norm must be of all devices
WORDS = (
    "optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.clip_norm=0.5", "optimizer.learning_rate=0.1",
    "schedule.name=constant", "model.dropout=0.1", "model.vocab=250",
)  # fmt: skip
ALONE = ("mesh.data=1",)
HARDER = ("remat.policy=full", "loss.chunks=4", "batch.accum_steps=2")
UPDATES = 5


class Outcome(NamedTuple):
    """Metrics of each update, gradients of the first, weights at the end, and the engine."""

    metrics: list
    gradients: dict
    weights: dict
    engine: object


@functools.cache
def run(*words: str) -> Outcome:
    """Takes updates on batches of uneven masks, on one device where `words` say so and else on eight."""
    program = tiny_program(*WORDS, *words, devices=1 if words[:1] == ALONE else 8)
    engine = program.make_engine()
    engine.initialise()
    spec = program.batch_spec()
    metrics, gradients = [], {}
    for seed in range(UPDATES):
        batch = random_batch(seed=seed, accum_steps=program.cut.microbatches, vocab=250)
        got = engine.step({name: jax.device_put(leaf, spec[name].sharding) for name, leaf in batch.items()})
        metrics.append([float(got[name]) for name in ("loss", "grad_norm", "targets", "tokens")])
        if seed == 0:
            trace = nnx.to_flat_state(nnx.state(engine.state().optimizer.opt_state))
            gradients = {path: np.asarray(leaf[...]) for path, leaf in trace if "trace" in map(str, path)}
    return Outcome(metrics, gradients, weights(engine.state()), engine)


SHARED = {
    "data 8": ("mesh.data=8",),
    "fsdp 8": ("mesh.fsdp=8",),
    "zero1, harder": ("mesh.preset=zero1", "mesh.data=4", *HARDER),
    "data 2, fsdp 2, tensor 2, harder": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", *HARDER),
    "context 2, fsdp 4": ("mesh.context=2", "mesh.fsdp=4"),
}
MORE = {
    "kv_heads fewer than tensor": ("mesh.data=2", "mesh.tensor=4"),
    "zero1": ("mesh.preset=zero1",),
    "data 2, fsdp 2, tensor 2": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    "context 2, data 4": ("mesh.context=2", "mesh.data=4"),
    "context 2, tensor 2, harder": ("mesh.context=2", "mesh.tensor=2", "mesh.fsdp=2", *HARDER),
    "expert 2, fsdp 4": ("mesh.expert=2", "mesh.fsdp=4"),
    "tensor 4, harder": ("mesh.data=2", "mesh.tensor=4", *HARDER),
    "fsdp 4, harder": ("mesh.fsdp=4", "mesh.data=1", *HARDER),
    "tied, unrolled": ("mesh.fsdp=4", "mesh.tensor=2", "model.scan_layers=false", "model.tied=true"),
    "vocabulary and rows over one axis": ("mesh.fsdp=4", "mesh.data=2", "mesh.rules=vocab=tensor+fsdp"),
    "embedding over rows and layers": ("mesh.fsdp=4", "mesh.tensor=2", "mesh.rules=embed=tensor+fsdp,vocab=none"),
    "batch over tensor": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "mesh.rules=batch=data+fsdp+tensor"),
    "weights over data too": ("mesh.data=2", "mesh.fsdp=4", "mesh.rules=embed=data+fsdp"),
}


def assert_like_one_device(words: tuple[str, ...]) -> None:
    """Losses to 1e-6, gradients and weights to 1e-5 of the largest of each leaf."""
    got, want = run(*words), run(*ALONE, *(word for word in words if word.startswith("model.")))
    assert 4 < want.metrics[0][0] < 7, "a loss that is no loss compares nothing"
    np.testing.assert_allclose(got.metrics, want.metrics, rtol=1e-6)
    assert len(want.gradients) == len(got.gradients) > 0
    assert_trees_close(got.gradients, want.gradients, rtol=1e-5)
    assert_trees_close(got.weights, want.weights, rtol=1e-5)


@pytest.mark.parametrize("words", SHARED.values(), ids=SHARED)
def test_every_way_to_share_gives_the_numbers_of_one_device(words):
    """Means of means, a norm of one shard, masks by device, or a lost row all show here (B05, B10)."""
    assert_like_one_device(words)


@pytest.mark.slow
@pytest.mark.parametrize("words", MORE.values(), ids=MORE)
def test_more_ways_to_share_give_the_numbers_of_one_device(words):
    """As above."""
    assert_like_one_device(words)


class Talk(NamedTuple):
    """An exchange between devices: its kind, the elements of its largest result, whether it is inside a loop."""

    kind: str
    elements: int
    in_loop: bool


def talks(engine) -> list[Talk]:
    """Returns the exchanges of a compiled step."""
    calls, found, name = defaultdict(set), [], ""
    text = engine._compiled["train_step"].as_text()
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = head[1]
        calls[name].update(re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line))
        if talk := re.search(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(", line):
            sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w\[([\d,]+)\]", talk[1])]
            found.append((name, talk[2], max(sizes, default=1)))
    loops = set(re.findall(r"body=%?([\w.\-]+)", text))
    while more := {inner for outer in loops for inner in calls[outer]} - loops:
        loops |= more
    return [Talk(kind, elements, name in loops) for name, kind, elements in found]


def test_gradients_of_shared_weights_are_added_over_devices_once():
    """A sum over devices for every microbatch, layer or piece of the loss multiplies the traffic."""
    found = talks(run(*SHARED["zero1, harder"]).engine)
    assert any(talk.elements >= 250 * 64 and talk.kind == "all-reduce" for talk in found)
    assert [talk for talk in found if talk.in_loop] == []


def test_a_sharded_layer_is_gathered_when_its_turn_comes():
    """All layers gathered at once are the memory that sharding was to save; none in the loop means no sharding."""
    outcome = run(*SHARED["fsdp 8"])
    gathers = [talk for talk in talks(outcome.engine) if talk.kind == "all-gather"]
    state = nnx.split(outcome.engine.state().model)[1]
    layer = max(leaf[0].size for leaf in jax.tree.leaves(state["stack"]))
    table = state["embedding"]["table"].get_value().size
    assert max(talk.elements for talk in gathers if talk.in_loop) == layer
    assert max(talk.elements for talk in gathers) <= max(layer, table)


@pytest.mark.parametrize("words", [SHARED["fsdp 8"], ("mesh.fsdp=4", "mesh.data=1", "batch.accum_steps=2")])
def test_gradients_of_a_sharded_table_are_never_added_up_whole(words):
    """Embedding and head are the largest arrays: each device takes its part of their gradients, and no more."""
    engine = run(*words).engine
    found = talks(engine)
    table = nnx.split(engine.state().model)[1]["embedding"]["table"].get_value().size
    assert max(talk.elements for talk in found if talk.kind == "all-reduce") < table
    assert max(talk.elements for talk in found if talk.kind == "all-reduce" and not talk.in_loop) <= 64  # of a norm
    assert {talk.kind for talk in found} >= {"all-gather", "reduce-scatter", "all-to-all"}


@pytest.mark.parametrize(("name", "pieces"), [("fsdp 8", 8), ("zero1, harder", 4)])
def test_a_device_holds_its_part_of_the_state(name, pieces):
    """Arguments of the compiled step, in bytes a device: all of the state cut, or its optimizer part."""
    engine = run(*SHARED[name]).engine
    state = nnx.split(engine.state())[1]
    whole = {part: sum(leaf.nbytes for leaf in jax.tree.leaves(state[part])) for part in ("model", "optimizer")}
    want = whole["optimizer"] / pieces + whole["model"] / (pieces if name == "fsdp 8" else 1)
    assert bytes_per_device(state) == pytest.approx(want, rel=0.05)
    batch = 8 * 32 * (4 * 4 + 1) / pieces
    assert engine.memory()["train_step"].argument_size_in_bytes - batch == pytest.approx(want, rel=0.05)
    for leaf in jax.tree.leaves(state):
        assert leaf.addressable_data(0).shape == leaf.sharding.shard_shape(leaf.shape)


def test_the_initial_state_appears_where_it_belongs():
    """Made whole and cut afterwards, the largest model is that of one device."""
    engine = run(*SHARED["fsdp 8"]).engine
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(nnx.state(engine.state()))]
    memory = engine._initial.lower().compile().memory_analysis()
    assert memory.output_size_in_bytes < 1.05 * sum(sizes) / 8
    assert memory.temp_size_in_bytes < max(sizes)
