"""Which attention kernel a layer gets, and what is said of one that cannot serve it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nnxtrain.build.program import make_program
from nnxtrain.build.registry import Registry
from nnxtrain.config.load import load
from nnxtrain.errors import ConfigError
from nnxtrain.nn.attention import Attention, KvCache
from nnxtrain.nn.kernels import ATTENTIONS, FEATURES, AttentionKernel, blocked, dot_product, make_attend
from nnxtrain.nn.param import LayerInit, Precision
from nnxtrain.nn.rope import frequencies, rotation_at
from nnxtrain.sharding.layout import MeshLayout
from nnxtrain.types import AttentionSpec, HeadSizes
from tests.support import TINY, tiny_program

GROUPED = HeadSizes(embed=64, heads=4, kv_heads=2, head_dim=16)


def chosen(*words: str) -> set[object]:
    """Returns the kernels of the layers of `tiny.yml` with `words` on top, on all devices."""
    model = nnx.eval_shape(tiny_program(*words, devices=8).make_state).model
    return {module.attend.attend for _, module in nnx.iter_graph(model) if isinstance(module, Attention)}


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        ((), blocked),
        (("model.attention=dot_product",), dot_product),
        (("mesh.context=2",), dot_product),
        (("mesh.tensor=2", "mesh.rules=sequence=tensor,heads=none,kv_heads=none,mlp=none,vocab=none"), dot_product),
        (("mesh.context=2", "mesh.rules=sequence=none"), blocked),
    ],
)
def test_auto_takes_the_first_kernel_that_supports_the_layer_and_the_mesh(words, kernel):
    """A sequence is sharded by `mesh.rules` as well as by `mesh.context`, and `blocked` needs it whole."""
    assert chosen(*words) == {kernel}


def test_a_kernel_that_needs_whole_sequences_is_refused_where_they_are_sharded():
    """The message names the key, what is missing, and a kernel that has it."""
    with pytest.raises(ConfigError, match=r"model.attention=blocked: blocked does not support a sequence.*dot_product"):
        tiny_program("model.attention=blocked", "mesh.context=2", devices=8)


@pytest.mark.parametrize("missing", FEATURES)
def test_each_feature_that_a_kernel_lacks_is_named(missing):
    """The layer and the mesh ask for everything; what an entry states is the only list of what it supports."""
    layout = MeshLayout(tiny_program("mesh.context=2", devices=8).mesh, ())
    spec = AttentionSpec(window=3, softcap=5.0)
    make = functools.partial(make_attend, GROUPED, spec, platform="cpu", layout=layout)
    partial = {"mine": AttentionKernel(dot_product, [name for name in FEATURES if name != missing])}
    with pytest.raises(ConfigError, match=f"mine does not support {FEATURES[missing]}; no kernel can be used here"):
        make(name="mine", table=partial)
    with pytest.raises(ConfigError, match=f"model.attention=auto: mine does not support {FEATURES[missing]}"):
        make(name="auto", table=partial)
    assert make(name="auto", table=partial | ATTENTIONS).attend is dot_product


def test_a_kernel_of_another_platform_is_refused_and_left_out_by_auto():
    """A kernel for TPUs would fail in the compiler, with words that no user understands."""
    mine = {"mine": AttentionKernel(dot_product, tuple(FEATURES), platforms=("tpu",))}
    registry = Registry(attentions=mine | ATTENTIONS)
    config = load(TINY, ["model.attention=mine"], extra=registry.names())
    with pytest.raises(ConfigError, match="mine runs on tpu only, and the platform is cpu; usable here: auto, blocked"):
        make_program(config, devices=jax.devices()[:1], registry=registry)
    make_program(load(TINY), devices=jax.devices()[:1], registry=registry)


def test_decoding_has_the_soft_cap_of_the_layer():
    """A cap that training knows and sampling does not would give other text than the model has learnt."""

    def layer(spec):
        init = LayerInit(Precision(jnp.float32, jnp.float32), nnx.Rngs(0), 1.0)
        return Attention(GROUPED, spec, init, attend=dot_product)

    x = 3 * jax.random.normal(jax.random.key(0), (2, 5, 64))
    rotation = rotation_at(jnp.tile(jnp.arange(5), (2, 1)), frequencies(16, 1e4))
    capped = layer(AttentionSpec(softcap=0.3))
    want = capped(x, rotation, jnp.ones((2, 5), jnp.int32))
    cache = KvCache(*(jnp.zeros((2, 5, 2, 16)) for _ in "kv"))
    for place in range(5):
        at = jax.tree.map(lambda leaf: leaf[:, place : place + 1], rotation)
        got, cache = capped.decode(x[:, place : place + 1], at, cache, jnp.array(place))
        assert jnp.allclose(got[:, 0], want[:, place], atol=1e-5)
    assert not jnp.allclose(layer(AttentionSpec())(x, rotation, jnp.ones((2, 5), jnp.int32)), want, atol=1e-2)
