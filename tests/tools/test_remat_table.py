"""The table of remat policies counts bytes and FLOPs as one would by hand."""

import json

import jax
import jax.numpy as jnp
import pytest

from nnxtrain.aot.jaxpr import product_flops
from nnxtrain.aot.remat import kept_bytes
from nnxtrain.build.registry import BUILT_IN
from nnxtrain.cli.command import guarded
from tests.support import TINY, tiny
from tools.remat_table import POLICIES, compare, gradient_flops, main

TOKENS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, SEQUENCE = 8 * 32, 64, 4, 2, 16, 192, 32
QKV = HEAD_DIM * (HEADS + 2 * KV_HEADS)
PRODUCTS = {  # FLOPs of one layer, forward
    "qkv": 2 * TOKENS * EMBED * QKV,
    "scores": 2 * TOKENS * SEQUENCE * HEADS * HEAD_DIM,
    "sums": 2 * TOKENS * SEQUENCE * HEADS * HEAD_DIM,
    "out": 2 * TOKENS * EMBED * HEADS * HEAD_DIM,
    "gate_up": 2 * 2 * TOKENS * EMBED * MLP,
}
AGAIN = {
    "none": (),
    "full": ("qkv", "scores", "sums", "out", "gate_up"),
    "dots": (),
    "dots_no_batch": ("scores", "sums"),
    "attention": ("qkv", "scores", "out", "gate_up"),
    "mlp": ("qkv", "scores", "sums", "out"),
    "qkv": ("scores", "sums", "out", "gate_up"),
    "attention_layer": ("scores", "gate_up"),
    "projections": ("scores", "sums"),
    "projections_attention": ("scores",),
    "qkv_offload": ("scores", "sums", "out", "gate_up"),
    "projections_offload": ("scores", "sums"),
}
KEPT = {  # float32 values of a token and layer, beside the input of the layer
    "full": 0,
    "dots": QKV + HEADS * SEQUENCE + HEADS * HEAD_DIM + EMBED + 2 * MLP,
    "dots_no_batch": QKV + EMBED + 2 * MLP,
    "attention": HEADS * HEAD_DIM,
    "mlp": 2 * MLP,
    "qkv": QKV,
    "attention_layer": QKV + HEADS * HEAD_DIM + EMBED,
    "projections": QKV + EMBED + 2 * MLP,
    "projections_attention": QKV + HEADS * HEAD_DIM + EMBED + 2 * MLP,
    "qkv_offload": QKV,
    "projections_offload": QKV + EMBED + 2 * MLP,
}


@pytest.mark.parametrize(
    ("words", "policies"), [((), POLICIES), (("model.scan_layers=false",), ("none", "full", "dots", "qkv_offload"))]
)
def test_bytes_and_flops_are_those_of_the_formulas(words, policies, monkeypatch):
    """A policy that keeps more or less than it says, or a count that misses the turns of a scan, differs here."""
    monkeypatch.setattr("tools.remat_table.POLICIES", policies)
    costs = compare(tiny("model.layers=2", *words), compiled=False)
    assert {name: cost.recomputed_flops for name, cost in costs.items()} == {
        name: 2 * sum(PRODUCTS[product] for product in AGAIN[name]) for name in policies
    }
    bytes_of = {name: 4 * TOKENS * (EMBED + KEPT[name]) for name in policies if name != "none"}
    assert {name: cost.layer_bytes for name, cost in costs.items() if name != "none"} == bytes_of
    assert costs["none"].layer_bytes > max(bytes_of.values())
    moved = {name: cost.host_bytes for name, cost in costs.items() if cost.host_bytes}
    assert moved == {name: 2 * (bytes_of[name] - bytes_of["full"]) for name in policies if name.endswith("_offload")}


def test_a_pattern_and_its_remainder_are_counted_whole():
    """Five layers in groups of two, and one that is left over."""
    words = ("model.layers=5", "model.pattern=local,global", "model.window=8")
    full, none = (tiny(*words, f"remat.policy={policy}") for policy in ("full", "none"))
    assert gradient_flops(full) - gradient_flops(none) == 5 * sum(PRODUCTS[product] for product in AGAIN["full"])
    deeper = tiny(*words, "model.layers=7", "remat.policy=full")
    assert sum(kept_bytes(deeper, BUILT_IN)) - sum(kept_bytes(full, BUILT_IN)) == 2 * 4 * TOKENS * EMBED


def test_flops_of_a_scan_are_counted_once_a_turn():
    """A product of [2 3] and [3 3], five times, and its gradient's."""
    power = lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0].sum()  # noqa: E731
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))
    assert product_flops(jax.make_jaxpr(power)(x, w).jaxpr) == 5 * 2 * 2 * 3 * 3
    assert product_flops(jax.make_jaxpr(jax.grad(power, argnums=1))(x, w).jaxpr) == 3 * 5 * 2 * 2 * 3 * 3


def test_the_report_has_the_policies_and_the_tags_of_custom(tmp_path, monkeypatch, capsys):
    """For people a table, for programs a file."""
    report = tmp_path / "report.json"
    assert set(POLICIES) == set(AGAIN)
    monkeypatch.setattr("tools.remat_table.POLICIES", ("none", "mlp"))
    custom = ("remat.policy=custom", "remat.tags=mlp_gate=save,mlp_up=offload")
    assert guarded(main, [str(TINY), "model.layers=1", *custom, f"report={report}"]) == 0
    policies = json.loads(report.read_text())["policies"]
    assert set(policies) == {"none", "mlp", "custom"}
    assert policies["custom"]["host_bytes"] == 4 * TOKENS * MLP
    assert policies["custom"]["recomputed_flops"] == policies["mlp"]["recomputed_flops"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in policies)


def test_temporaries_are_shown_where_they_are_asked_for(tmp_path, monkeypatch):
    """Compiling each policy is slow, so it is a choice; what offloads has no figure on CPU."""
    report = tmp_path / "report.json"
    monkeypatch.setattr("tools.remat_table.POLICIES", ("full", "qkv_offload"))
    assert guarded(main, [str(TINY), "model.layers=1", "mesh.data=1", "compiled=true", f"report={report}"]) == 0
    policies = json.loads(report.read_text())["policies"]
    assert policies["full"]["temp_bytes"] > 0
    assert policies["qkv_offload"]["temp_bytes"] is None


@pytest.mark.parametrize("words", [("compiled=yes",), ("remat.policy=x",), ("model.layer=3",)])
def test_what_it_does_not_know_is_refused(words, capsys):
    """One message, no traceback."""
    assert guarded(main, [str(TINY), *words]) == 2
    assert capsys.readouterr().err.startswith("error:")
