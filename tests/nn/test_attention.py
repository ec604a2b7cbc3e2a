"""Attention kernels against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxtrain.nn.attention import ATTENTIONS


def reference(q, k, v, segment_ids, window):
    """Attends with float64 loops over query heads; `[b s h c]`."""
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, s, h in np.ndindex(q.shape[:3]):
        age = s - np.arange(q.shape[1])
        seen = (age >= 0) & (age < window) & (segment_ids[b] == segment_ids[b, s])
        scores = k[b, seen, h // group] @ q[b, s, h] / np.sqrt(q.shape[-1])
        shares = np.exp(scores - scores.max())
        out[b, s, h] = shares / shares.sum() @ v[b, seen, h // group]
    return out


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
@pytest.mark.parametrize("sequence", [12, 150])
@pytest.mark.parametrize(("kv_heads", "window"), [(1, None), (2, None), (4, None), (2, 1), (2, 3), (2, 12), (2, 90)])
def test_kernel_equals_the_formula(name, sequence, kv_heads, window):
    """Grouped heads in the wrong order, a leaking segment, a window off by one or a missing scale fail here."""
    draw = np.random.default_rng(0).normal
    q = draw(size=(2, sequence, 4, 8))
    k, v = draw(size=(2, 2, sequence, kv_heads, 8))
    segment_ids = np.array([[1] * 5 + [2] * (sequence - 8) + [0] * 3, [1] * sequence], np.int32)
    arrays = [jnp.array(array, jnp.float32) for array in (q, k, v)]
    got = jax.jit(ATTENTIONS[name], static_argnums=4)(*arrays, jnp.array(segment_ids), window)
    np.testing.assert_allclose(got, reference(q, k, v, segment_ids, window or sequence), atol=1e-5)


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_softmax_is_float32_for_bfloat16_inputs(name):
    """Statistics in bfloat16 lose the small shares of long sequences."""
    q = jnp.zeros((1, 1024, 1, 8), jnp.bfloat16)
    v = jnp.ones((1, 1024, 1, 8), jnp.bfloat16)
    got = jax.jit(ATTENTIONS[name], static_argnums=4)(q, q, v, jnp.ones((1, 1024), jnp.int32), None)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), 1, atol=1e-2)
