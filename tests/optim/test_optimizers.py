"""Each rule is that of its paper, and sees the same parameters whether layers are stacked or apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxtrain.config.load import load
from nnxtrain.optim.averages import evaluation_model
from nnxtrain.optim.optimizers import OPTIMIZERS, make_optimizer
from nnxtrain.state import TrainStateNNX
from tests.support import ROOT, initial_state, random_batch, tiny_program, weights

pytestmark = pytest.mark.usefixtures("quick_compiles")

UPDATES = 4
RATES = (0.01, 0.02, 0.005, 0.03)
# logical axes and sizes of one layer; 130 and 4 * 33 = 132 are large enough for adafactor to factor
LAYER = {
    "out": (("heads", "head_dim", "embed"), (4, 33, 130)),
    "q": (("embed", "heads", "head_dim"), (130, 4, 33)),
    "scale": (("embed",), (130,)),
}
TABLE = (("vocab", "embed"), (140, 130))
MATRICES = {"out": (132, 130), "q": (130, 132), "scale": (130,), "table": (140, 130)}


class Leaves(nnx.Module):
    """Parameters without a model around them."""

    def __init__(self, arrays, axes, kind):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(jnp.asarray(array, kind), axes=axes[name]))


class Stack(nnx.Module):
    """Two layers, stacked or apart, under the paths that a decoder gives them."""

    def __init__(self, layers, *, scanned: bool, kind: str):
        axes = {name: axes for name, (axes, _) in LAYER.items()}
        if scanned:
            arrays = {name: np.stack([layer[name] for layer in layers]) for name in LAYER}
            self.layer = Leaves(arrays, {name: ("layer", *axes[name]) for name in axes}, kind)
        else:
            self.layers = nnx.List([Leaves(layer, axes, kind) for layer in layers])


class Model(nnx.Module):
    """A table and a stack."""

    def __init__(self, table, layers, *, scanned: bool, kind: str = "float32"):
        self.embedding = Leaves({"table": table}, {"table": TABLE[0]}, kind)
        self.stack = Stack(layers, scanned=scanned, kind=kind)


def draw(seed: int):
    """Returns a table and two layers of random numbers of very different sizes."""
    numbers = np.random.default_rng(seed)
    layers = [
        {name: (scale * numbers.standard_normal(sizes)).astype(np.float32) for name, (_, sizes) in LAYER.items()}
        for scale in (0.02, 3.0)
    ]
    return numbers.standard_normal(TABLE[1]).astype(np.float32), layers


def by_name(model) -> dict[str, np.ndarray]:
    """Returns every parameter by `layer/name`, layers apart, as the matrix that it is, in float64."""
    found = {"table": model.embedding.table[...]}
    for index in range(2):
        for name in LAYER:
            stack = model.stack
            leaf = stack.layer if hasattr(stack, "layer") else stack.layers[index]
            array = getattr(leaf, name)[...]
            found[f"{index}/{name}"] = array[index] if hasattr(stack, "layer") else array
    return {
        name: np.asarray(leaf, np.float64).reshape(MATRICES[name.rpartition("/")[2]]) for name, leaf in found.items()
    }


def config_of(*words: str):
    """Returns the optimizer's section of `tiny.yml` with `words` on top."""
    return load(ROOT / "configs" / "tiny.yml", [f"optimizer.{word}" for word in words]).optimizer


def trained(*words: str, scanned: bool, kind: str = "float32"):
    """Returns a state after updates by random gradients, the same in both layouts."""
    rates = jnp.array(RATES)
    model = Model(*draw(0), scanned=scanned, kind=kind)
    state = TrainStateNNX(model, make_optimizer(config_of(*words), lambda count: rates[count], model=model))
    graph, arrays = nnx.split(state)

    @jax.jit
    def step(arrays, grads):
        state = nnx.merge(graph, arrays)
        state.apply_gradients(grads, scale=jnp.array(1.0), where=jnp.array(True), counts=jnp.array(1))
        return nnx.state(state)

    for seed in range(1, UPDATES + 1):
        arrays = step(arrays, nnx.state(Model(*draw(seed), scanned=scanned), nnx.Param))
    return nnx.merge(graph, arrays)


# the rules on plain arrays, from the papers: `(gradient, memory, update counted from 0, weight) -> direction uphill`


def adam(grad, memory, count, weight, *, b1=0.9, b2=0.95, eps=1e-8):
    memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * grad
    memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * grad**2
    return memory["m"] / (1 - b1 ** (count + 1)) / (np.sqrt(memory["v"] / (1 - b2 ** (count + 1))) + eps)


def lion(grad, memory, count, weight):
    direction = np.sign(0.9 * memory.get("m", 0) + 0.1 * grad)
    memory["m"] = 0.99 * memory.get("m", 0) + 0.01 * grad
    return direction


def sgd(grad, memory, count, weight):
    memory["m"] = 0.8 * memory.get("m", 0) + grad
    return memory["m"]


def adafactor(grad, memory, count, weight):
    keep = 1 - (count + 1.0) ** -0.8
    square = grad**2 + 1e-30
    if grad.ndim == 2:
        memory["rows"] = keep * memory.get("rows", 0) + (1 - keep) * square.mean(1)
        memory["columns"] = keep * memory.get("columns", 0) + (1 - keep) * square.mean(0)
        second = np.outer(memory["rows"], memory["columns"]) / memory["rows"].mean()
    else:
        second = memory["v"] = keep * memory.get("v", 0) + (1 - keep) * square
    direction = grad / np.sqrt(second)
    direction /= max(1, np.sqrt(np.mean(direction**2)))
    return direction * max(np.sqrt(np.mean(weight**2)), 1e-3)


def muon(grad, memory, count, weight):
    if grad.shape not in ((130, 132), (132, 130)):
        return adam(grad, memory, count, weight)
    memory["m"] = 0.95 * memory.get("m", 0) + 0.05 * grad
    ahead = 0.95 * memory["m"] / (1 - 0.95 ** (count + 2)) + 0.05 * grad / (1 - 0.95 ** (count + 1))
    x = ahead / np.linalg.norm(ahead)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return 0.2 * np.sqrt(132) * (x if x.shape == grad.shape else x.T)


def plain(rule, *, decay: float):
    """Returns the weights after the updates of a rule on plain arrays, in float64."""
    params = by_name(Model(*draw(0), scanned=False))
    memory = {name: {} for name in params}
    for count in range(UPDATES):
        grads = by_name(Model(*draw(count + 1), scanned=False))
        for name, weight in params.items():
            direction = rule(grads[name], memory[name], count, weight) + decay * weight * (weight.ndim == 2)
            params[name] = weight - RATES[count] * direction
    return params


def plain_schedule_free(*, decay: float):
    """Returns the trained weights and the average of schedule-free AdamW on plain arrays, in float64."""
    trained = by_name(Model(*draw(0), scanned=False))
    moving, average, second = dict(trained), dict(trained), dict.fromkeys(trained, 0.0)
    mass = 0.0
    for count in range(UPDATES):
        grads = by_name(Model(*draw(count + 1), scanned=False))
        share = max(RATES[: count + 1]) ** 2
        mass += share
        for name, grad in grads.items():
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            direction = grad / (np.sqrt(second[name] / (1 - 0.95 ** (count + 1))) + 1e-8)
            direction = direction + decay * trained[name] * (grad.ndim == 2)
            moving[name] = moving[name] - RATES[count] * direction
            average[name] = (1 - share / mass) * average[name] + share / mass * moving[name]
            trained[name] = 0.1 * moving[name] + 0.9 * average[name]
    return trained, average


RULES = {"adafactor": adafactor, "adamw": adam, "lion": lion, "muon": muon, "sgd": sgd}


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rule_is_the_published_one_for_each_layer_apart(name, scanned):
    """A factored moment, a norm or an orthogonal matrix over both layers, or over one head, fails here (B37).

    Gradients of the two layers differ by a factor of 150, rates from update to update.
    """
    words = ["clip_norm=null", "weight_decay=0.1", f"name={name}", *(["momentum=0.8"] if name == "sgd" else [])]
    state = trained(*words, scanned=scanned)
    if name == "schedule_free_adamw":
        want, average = plain_schedule_free(decay=0.1)
        assert_moved_alike(by_name(evaluation_model(state)), average)
    else:
        want = plain(RULES[name], decay=0.1)
    assert_moved_alike(by_name(state.model), want)


def assert_moved_alike(got, want) -> None:
    """Asserts that weights are those of the plain rule, to a part of the way that they went since the start."""
    start = by_name(Model(*draw(0), scanned=False))
    for path, weight in want.items():
        moved = np.abs(weight - start[path]).max()
        np.testing.assert_allclose(got[path], weight, rtol=0, atol=2e-5 * moved + 1e-6, err_msg=path)
        assert moved > 1e-4


def test_every_rule_has_a_plain_twin():
    """A rule that is added must be held against its paper too."""
    assert {*RULES, "schedule_free_adamw"} == set(OPTIMIZERS)


@pytest.mark.parametrize(("name", "words"), [("adamw", ()), ("lion", ()), ("muon", ()), ("sgd", ("momentum=0.9",))])
def test_the_first_moment_has_the_type_that_was_asked_for(name, words):
    """Everything else stays float32: a second moment in bfloat16 stops growing."""
    words = (f"name={name}", *words)
    narrow, wide = (trained(*words, f"mu_dtype={kind}", scanned=True) for kind in ("bfloat16", "float32"))
    for state, kind in ((narrow, "bfloat16"), (wide, "float32")):
        kinds = {}
        for path, leaf in nnx.to_flat_state(nnx.state(state.optimizer.opt_state)):
            group = "first" if {"mu", "trace"} & set(map(str, path)) else "other"
            kinds.setdefault(group, set()).add(leaf[...].dtype.name)
        assert kinds["first"] == {kind}
        assert kinds["other"] <= {"float32", "int32"}
    for path, weight in by_name(wide.model).items():
        difference = np.abs(by_name(narrow.model)[path] - weight).max()
        if name != "lion":  # whose signs flip where the moment was rounded
            assert difference <= 0.05 * np.abs(weight - by_name(Model(*draw(0), scanned=True))[path]).max()


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_of_narrow_weights_are_float32(name, scanned):
    """Moments in a smaller type lose the second moment of small gradients."""
    state = trained(f"name={name}", scanned=scanned, kind="bfloat16")
    moments = jax.tree.leaves(nnx.state(state.optimizer))
    assert {leaf.dtype.name for leaf in moments} <= {"float32", "int32", "uint32"}
    for leaf in moments:  # none was rounded on its way either
        assert leaf.size < 100 or np.any(leaf != leaf.astype(jnp.bfloat16))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(state.model))} == {"bfloat16"}


@pytest.mark.parametrize(("layout", "tied"), [("true", "false"), ("false", "true")])
def test_matrices_and_tables_are_decayed_and_norms_are_not(layout, tied):
    """Stacked norm scales have two dimensions, and a rule by dimensions decays them (B37); without gradients, alone."""
    words = (f"model.scan_layers={layout}", f"model.tied={tied}", "model.qk_norm=true", "model.layers=2")
    words = (*words, "optimizer.learning_rate=0.01", "schedule.name=constant", "optimizer.weight_decay=0.1")
    state = initial_state(tiny_program(*words))
    before = weights(state)
    grads = jax.tree.map(jnp.zeros_like, nnx.state(state.model, nnx.Param))
    state.apply_gradients(grads, scale=jnp.array(1.0), where=jnp.array(True), counts=jnp.array(1))
    after = weights(state)
    assert {path.rpartition("/")[2] for path in before} == {"kernel", "scale", "table"}
    for path, weight in before.items():
        want = np.zeros_like(weight) if path.endswith("scale") else 0.01 * 0.1 * weight
        np.testing.assert_allclose(weight - after[path], want, atol=2e-7, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_rules_that_see_shapes_train_a_scanned_model_as_an_unrolled_one(name):
    """Three updates of a whole model whose matrices are large enough to be factored (B37)."""
    words = (f"optimizer.name={name}", "model.embed=128", "model.layers=2", "model.mlp=128", "optimizer.eps=1e-4")
    after = []
    for layout in ("true", "false"):
        program = tiny_program(*words, f"model.scan_layers={layout}", "optimizer.learning_rate=0.01")
        state, step = initial_state(program), jax.jit(program.train_step)
        for seed in range(3):
            state, _ = step(state, random_batch(seed=seed))
        after.append(weights(state))
    for path, weight in after[0].items():
        np.testing.assert_allclose(after[1][path], weight, rtol=0, atol=1e-5 * np.abs(weight).max(), err_msg=path)
