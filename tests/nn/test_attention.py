"""Attention kernels against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxtrain.nn.kernels import ATTENTIONS
from nnxtrain.types import AttentionSpec


def reference(q, k, v, segment_ids, spec):
    """Attends with float64 loops over query heads; `[b s h c]`."""
    window = spec.window or q.shape[1]
    scale = 1 / np.sqrt(q.shape[-1]) if spec.scale is None else spec.scale
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, s, h in np.ndindex(q.shape[:3]):
        age = s - np.arange(q.shape[1])
        seen = (age >= 0) & (age < window) & (segment_ids[b] == segment_ids[b, s])
        scores = k[b, seen, h // group] @ q[b, s, h] * scale
        scores = scores if spec.softcap is None else spec.softcap * np.tanh(scores / spec.softcap)
        shares = np.exp(scores - scores.max())
        out[b, s, h] = shares / shares.sum() @ v[b, seen, h // group]
    return out


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
@pytest.mark.parametrize("sequence", [12, 150])
@pytest.mark.parametrize(
    ("kv_heads", "spec"),
    [
        *((kv_heads, AttentionSpec()) for kv_heads in (1, 2, 4)),
        *((2, AttentionSpec(window=window)) for window in (1, 3, 12, 90)),
        (2, AttentionSpec(scale=0.2)),
        (2, AttentionSpec(softcap=0.5)),
        (1, AttentionSpec(window=3, scale=0.2, softcap=0.5)),
    ],
)
def test_kernel_equals_the_formula(name, sequence, kv_heads, spec):
    """Grouped heads in the wrong order, a leaking segment, a window off by one, a missing scale or cap fail here."""
    draw = np.random.default_rng(0).normal
    q = draw(size=(2, sequence, 4, 8))
    k, v = draw(size=(2, 2, sequence, kv_heads, 8))
    segment_ids = np.array([[1] * 5 + [2] * (sequence - 8) + [0] * 3, [1] * sequence], np.int32)
    arrays = [jnp.array(array, jnp.float32) for array in (q, k, v)]
    got = jax.jit(ATTENTIONS[name].attend, static_argnums=4)(*arrays, jnp.array(segment_ids), spec)
    np.testing.assert_allclose(got, reference(q, k, v, segment_ids, spec), atol=1e-5)


@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(softcap=1.0)])
@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_softmax_is_float32_for_bfloat16_inputs(name, spec):
    """Statistics in bfloat16 lose the small shares of long sequences."""
    q = jnp.zeros((1, 1024, 1, 8), jnp.bfloat16)
    v = jnp.ones((1, 1024, 1, 8), jnp.bfloat16)
    got = jax.jit(ATTENTIONS[name].attend, static_argnums=4)(q, q, v, jnp.ones((1, 1024), jnp.int32), spec)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), 1, atol=1e-2)
