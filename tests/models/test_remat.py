"""Every remat policy computes the same update, keeps what its page says, and is really in the program."""

import contextlib
import functools
import io
import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import Saveable, print_saved_residuals

from nnxtrain.build.program import make_program
from nnxtrain.build.registry import Registry
from nnxtrain.checkpoint.tree import flat
from nnxtrain.config.load import load
from nnxtrain.config.remat import RematConfig
from nnxtrain.errors import ConfigError
from nnxtrain.models.remat import HOST, REMAT_POLICIES, by_tag, decision, offloaded, policy_of
from nnxtrain.nn.dropout import KeepAll
from nnxtrain.tags import TAGS
from tests.support import ROOT, TINY, assert_trees_close, random_batch, stacked, tiny, tiny_program, weights
from tools.remat_table import temp_bytes

PAGE = (ROOT / "docs" / "remat.md").read_text()
SIZES = {"layers": 2, "embed": 32, "mlp": 48, "vocab": 64, "heads": 2, "kv_heads": 1}
SGD = {"name": "sgd", "momentum": 0.9, "learning_rate": 0.1, "clip_norm": 0, "weight_decay": 0}
SMALL = [
    *(f"model.{name}={value}" for name, value in SIZES.items()),
    *(f"optimizer.{name}={value}" for name, value in SGD.items()),
    *("schedule.name=constant", "batch.sequence=16", "batch.global_size=4"),
]
CUSTOM = ("remat.policy=custom", "remat.tags=mlp_gate=save,queries=offload,keys=recompute")
POLICIES = {name: (f"remat.policy={name}",) for name in ("none", *REMAT_POLICIES)} | {"custom": CUSTOM}


class Case(NamedTuple):
    """One way to compute an update."""

    policy: str
    scan: bool
    accum_steps: int
    dropout: float


class Run(NamedTuple):
    """What came of it."""

    losses: list[float]
    grads: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


# one policy of each kind of program: no remat, no memory, products, tags that are saved, or moved, or both
KINDS = ("none", "full", "dots", "mlp", "qkv_offload", "custom")


def pairs(policies: Iterable[str]) -> list[Case]:
    """Returns each policy once scanned and once unrolled; of four or more, all pairs of values of any two columns."""
    cases = []
    for number, policy in enumerate(policies):
        accum_steps, dropout = (1, 4)[number % 2], (0, 0.2)[number // 2 % 2]
        cases += [Case(policy, True, accum_steps, dropout), Case(policy, False, 5 - accum_steps, 0.2 - dropout)]
    return cases


PAIRS = pairs(KINDS)
PRODUCT = [Case(*values) for values in itertools.product(KINDS, (True, False), (1, 4), (0, 0.2))]
OTHERS = pairs(name for name in POLICIES if name not in KINDS)


@pytest.fixture(scope="module")
def run_of():
    """Returns what runs a case: three updates of SGD with momentum, whose buffer holds the first gradient."""
    initial: dict[bool, nnx.State] = {}

    def run(case: Case) -> Run:
        layout, dropout = f"model.scan_layers={case.scan}", f"model.dropout={case.dropout}"
        program = tiny_program(*SMALL, *POLICIES[case.policy], layout, dropout, f"batch.accum_steps={case.accum_steps}")
        graph = nnx.graphdef(nnx.eval_shape(program.make_state))
        if case.scan not in initial:
            initial[case.scan] = jax.jit(lambda: nnx.state(program.make_state()))()
        batch = random_batch(accum_steps=case.accum_steps, targets=(15, 3, 9, 1), sequence=16, vocab=64)

        def step(state, batch):
            after, metrics = program.train_step(nnx.merge(graph, state), batch)
            return nnx.state(after), metrics["loss"]

        traced = jax.jit(step).trace(initial[case.scan], batch)
        assert ("remat" in str(traced.jaxpr)) == (case.policy != "none")
        compiled = traced.lower().compile()
        state, first = compiled(initial[case.scan], batch)
        moments = flat(nnx.merge(graph, state), "optimizer")
        grads = {path[path.index("trace") + 1 :]: leaf for path, leaf in moments.items() if "trace" in path}
        state, second = compiled(state, batch)
        state, third = compiled(state, batch)
        return Run([float(loss) for loss in (first, second, third)], stacked(grads), weights(nnx.merge(graph, state)))

    return run


@pytest.fixture(scope="module")
def plain(run_of):
    """Returns what the plain case gives with a dropout: no remat, scanned, one microbatch."""
    return functools.cache(lambda dropout: run_of(Case("none", True, 1, dropout)))


def assert_same(got: Run, want: Run) -> None:
    """Asserts parity: losses to 1e-6, gradients and weights to 1e-5 of the leaf's largest."""
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-6)
    assert_trees_close(got.grads, want.grads, rtol=1e-5)
    assert_trees_close(got.weights, want.weights, rtol=1e-5)


def test_the_pairs_are_all_there():
    """A column that is always the same beside another would leave a pair unproven."""
    for one, other in itertools.combinations(range(4), 2):
        assert {(case[one], case[other]) for case in PAIRS} == {(case[one], case[other]) for case in PRODUCT}


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_every_way_to_compute_an_update_gives_the_same(case, run_of, plain):
    """Dropout drawn in the order of execution, or a mean of microbatch means, differs here (B12)."""
    assert_same(run_of(case), plain(case.dropout))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*PRODUCT, *OTHERS], ids=str)
def test_the_full_product_gives_the_same(case, run_of, plain):
    """As above, each combination of each kind, and the other policies in both layouts."""
    assert_same(run_of(case), plain(case.dropout))


def test_parity_would_see_another_mask(plain):
    """Two runs that cannot differ would agree too."""
    assert abs(plain(0).losses[0] - plain(0.2).losses[0]) > 1e-3


def rows_of_table(title: str) -> dict[str, list[str]]:
    """Returns the cells of a table of the page, by the name in the first one."""
    table = PAGE.split(f"| {title} |")[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return {first.strip(" `"): cells for first, *cells in rows}


def named(cell: str) -> set[str]:
    """Returns the tags that a cell names."""
    return set(re.findall(r"`(\w+)`", cell))


def test_the_page_lists_every_policy_and_every_tag():
    """A policy without its row, or a row without its policy, misleads."""
    assert list(rows_of_table("policy")) == ["none", *REMAT_POLICIES, "custom"]
    described = {tag: cells[0].replace("`", "").split(";")[0].strip() for tag, cells in rows_of_table("tag").items()}
    assert described == TAGS


@pytest.mark.parametrize("name", REMAT_POLICIES)
def test_a_policy_keeps_the_tags_that_the_page_says(name):
    """Asks the policy itself, and then the backward pass of a model of one layer for what it holds."""
    saved, moved = map(named, rows_of_table("policy")[name][:2])
    policy = REMAT_POLICIES[name]
    assert set(offloaded(policy)) == moved
    assert {tag for tag in TAGS if decision(policy, tag) in (True, Saveable)} == saved
    held = residuals(f"remat.policy={name}")
    assert set(re.findall(r"named '(\w+)'", held)) == saved
    assert held.count("<host>") == len(moved)
    assert held.count("output of dot_general") == {"dots": 8, "dots_no_batch": 6}.get(name, 0)


def residuals(*words: str) -> str:
    """Returns what jax says of the arrays that wait for the backward pass of one unrolled layer."""
    program = tiny_program("model.layers=1", "model.scan_layers=false", *words)
    graph, params = nnx.split(program.abstract_state().model)
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch())
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print_saved_residuals(lambda held: nnx.merge(graph, held).hidden(batch, KeepAll())[0].sum(), params)
    return text.getvalue()


def test_custom_saves_offloads_and_recomputes_what_it_names():
    """Tags that are not named are recomputed; the input of a layer can be moved too."""
    tags = "mlp_up=save,attention_out=save,values=offload,layer_input=offload,keys=recompute"
    held = residuals("remat.policy=custom", f"remat.tags={tags}")
    assert set(re.findall(r"named '(\w+)'", held)) == {"mlp_up", "attention_out"}
    assert held.count("<host>") == 2
    assert policy_of(RematConfig(), REMAT_POLICIES) is None


def test_offloading_is_refused_before_the_compile_where_nothing_can():
    """The compiler of the CPU drops such moves; a run that asks for them and gets none was misled."""
    program = tiny_program("remat.policy=qkv_offload")
    with pytest.raises(ConfigError, match=r"remat.policy=qkv_offload offloads queries, keys, values .* platform cpu"):
        program.make_engine()


def test_evaluation_of_a_run_that_offloads_works_anywhere():
    """Only the step needs host memory; weights of a GPU run must be of use on a laptop."""
    program = tiny_program(*SMALL, "remat.policy=projections_offload")
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch(sequence=16, vocab=64))
    hidden = jax.jit(lambda batch: program.make_state().model.hidden(batch, KeepAll())[0])
    assert np.isfinite(hidden(batch)).all()


def test_offloaded_activations_are_put_into_host_memory():
    """The jaxpr names the memory; a policy that only recomputes would lack it."""
    program = tiny_program(*SMALL, "remat.policy=qkv_offload")
    graph, state = nnx.split(nnx.eval_shape(program.make_state))
    text = str(
        jax.make_jaxpr(lambda state, batch: program.train_step(nnx.merge(graph, state), batch)[1])(
            state, program.batch_spec()
        )
    )
    assert text.count("<host>") >= 3
    assert HOST == "pinned_host"


def test_a_policy_from_outside_the_package_is_used():
    """An entry of one's own beside the table, named in the configuration."""
    mine = REMAT_POLICIES | {"mine": by_tag(save=["mlp_hidden"])}
    config = load(TINY, ["remat.policy=mine", "model.layers=1"], extra={"remat.policy": ["mine"]})
    program = make_program(config, devices=jax.devices()[:1], registry=Registry(remat_policies=mine))
    graph, state = nnx.split(nnx.eval_shape(program.make_state))
    step = jax.make_jaxpr(lambda state, batch: program.train_step(nnx.merge(graph, state), batch)[1])
    assert "remat" in str(step(state, program.batch_spec()))


def test_temporaries_fall_from_none_to_full_by_the_factor_of_the_page():
    """Scanned layers on CPU, compiled as the page says; the recomputation must not be merged away."""
    words = re.search(r"With `configs/tiny\.yml ([^`]*)`", PAGE)[1].split()
    factor = float(re.search(r"factor of at least ([\d.]+\d|\d)", PAGE)[1])
    none, full = (temp_bytes(tiny(*words, f"remat.policy={policy}")) for policy in ("none", "full"))
    assert none / full >= factor >= 2
