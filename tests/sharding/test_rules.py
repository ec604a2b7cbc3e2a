"""One table says which axis cuts what; optimizer state follows the parameter that it belongs to."""

import inspect

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from nnxtrain import axes
from nnxtrain.config.mesh import AXES, LOGICAL
from nnxtrain.errors import ConfigError
from nnxtrain.sharding.audit import shards_of
from nnxtrain.sharding.layout import MeshLayout
from nnxtrain.sharding.rules import RULES, spec_of, tables
from tests.support import tiny, tiny_program

SIZES = dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 4, "tensor": 2, "context": 2}


def spec(shape, *names, **words):
    """Returns the spec of an array on a mesh of several axes."""
    return spec_of(shape, names, table=tables(())[0], mesh=SIZES, **words)


def test_the_table_is_short_and_of_names_that_the_configuration_knows():
    """A name that only one side knows is refused, or cuts nothing without a word."""
    assert len(RULES) <= 20
    assert {name for name in RULES if name} == set(LOGICAL)
    assert {name for cutting in RULES.values() for name in cutting} <= set(AXES)
    names = {value for name, value in inspect.getmembers(axes) if name.isupper() and isinstance(value, str)}
    assert names == set(RULES)


@pytest.mark.parametrize(
    ("shape", "names", "wanted"),
    [
        ((64, 4, 16), ("embed", "heads", "head_dim"), ("fsdp", "tensor")),
        ((3, 256, 64), ("layer", "vocab", "embed"), (None, "tensor", "fsdp")),
        ((8, 32, 64), ("batch", "sequence", "embed"), (("data", "fsdp"), "context")),
        ((2, 32, 64), ("batch", "sequence", "embed"), ("data", "context", "fsdp")),
        ((64, 3, 16), ("embed", "heads", "head_dim"), ("fsdp",)),
        ((62, 4, 16), ("embed", "heads", "head_dim"), (None, "tensor")),
        ((7,), ("embed",), ()),
    ],
)
def test_each_mesh_axis_cuts_the_first_dimension_that_asks_and_divides(shape, names, wanted):
    """Cutting twice is an error of jax; padding what does not divide costs memory that nobody asked for."""
    assert spec(shape, *names) == PartitionSpec(*wanted)


def test_rules_of_the_configuration_win():
    """For all arrays, or for optimizer state alone."""
    own, optimizer = tables(("vocab=none", "optimizer.embed=data+fsdp", "mlp=tensor+context"))
    assert (own["vocab"], optimizer["vocab"]) == ((), ())
    assert (own["embed"], optimizer["embed"]) == (("fsdp",), ("data", "fsdp"))
    assert own["mlp"] == ("tensor", "context")


@pytest.mark.parametrize(
    "rule",
    [
        "vocap=tensor", "vocab=tenser", "vocab", "vocab=tensor+tensor", "optimizer.=data",
        "batch=foo", "sequence=foo", "batch=", "batch", "sequence=data",
    ],
)  # fmt: skip
def test_a_rule_that_means_nothing_is_refused(rule):
    """It would leave the table as it was."""
    with pytest.raises(ConfigError, match=r"mesh\.rules"):
        tiny(f"mesh.rules={rule}")


class Bare(nnx.Module):
    """A parameter, and optimizer state of several shapes below its path."""

    def __init__(self):
        self.model = nnx.Dict(layer=nnx.Dict(kernel=nnx.Param(jnp.zeros((64, 32)), axes=("embed", "mlp"))))
        factors = nnx.Dict(layer=nnx.Dict(kernel=nnx.Variable(jnp.zeros(64))))
        same = nnx.Dict(layer=nnx.Dict(kernel=nnx.Variable(jnp.zeros((64, 32)))))
        other = nnx.Dict(layer=nnx.Dict(bias=nnx.Variable(jnp.zeros((64, 32)))))
        self.optimizer = nnx.Dict(count=nnx.Variable(jnp.zeros(())), rows=factors, mu=same, other=other)


def test_optimizer_state_is_sharded_like_the_parameter_of_its_path_and_shape():
    """Replicated moments need the memory that sharding should save; factors must not be sharded as a matrix is."""
    layout = MeshLayout(AbstractMesh(tuple(SIZES.values()), AXES), ("optimizer.embed=data+fsdp",))
    state = layout.state(nnx.state(nnx.eval_shape(Bare)))
    specs = {"/".join(map(str, path)): leaf.sharding.spec for path, leaf in nnx.to_flat_state(state)}
    assert specs == {
        "model/layer/kernel": PartitionSpec("fsdp", "tensor"),
        "optimizer/count": PartitionSpec(),
        "optimizer/mu/layer/kernel": PartitionSpec(("data", "fsdp"), "tensor"),
        "optimizer/other/layer/bias": PartitionSpec(),
        "optimizer/rows/layer/kernel": PartitionSpec(),
    }


@pytest.mark.parametrize("words", [("mesh.tensor=8",), ("mesh.fsdp=8", "model.embed=36", "model.heads=2")])
def test_weights_that_are_replicated_by_accident_are_refused(words):
    """Eight devices that store and compute the same are an expensive single one (B10)."""
    with pytest.raises(ConfigError) as error:
        tiny_program(*words, devices=8)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("mesh.replication_tolerance=0.02: ")
    assert "% of the weights are replicated more than" in lines[0]
    assert any("stack/layer/attention/q/kernel" in line and "replicated" in line for line in lines)
    tiny_program(*words, "mesh.replication_tolerance=1", devices=8)


def test_fewer_keys_than_devices_are_no_accident():
    """Two kv_heads over four devices: each computes those of its group."""
    shards = shards_of(nnx.state(tiny_program("mesh.tensor=4", devices=8).abstract_state().model))
    specs = {shard.path: shard.spec for shard in shards}
    assert specs["stack/layer/attention/k/kernel"] == PartitionSpec()
    assert specs["stack/layer/attention/q/kernel"] == PartitionSpec(None, None, "tensor")


def test_a_vocabulary_that_does_not_divide_is_padded_and_sharded():
    """250 ids are 256 rows (B10)."""
    program = tiny_program("model.vocab=250", "mesh.tensor=4", devices=8)
    assert program.abstract_state().model.embedding.table.sharding.spec == PartitionSpec("tensor")
