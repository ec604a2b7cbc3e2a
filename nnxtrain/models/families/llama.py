"""Llama: RMS pre-norm, grouped-query attention with rotary position embeddings, SiLU-gated MLP.

Source: Touvron et al. 2023, arXiv:2302.13971; windows, QK norm and llama3 scaling are options.
"""

import functools

from nnxtrain.config.model import KINDS, LOCAL, ModelConfig
from nnxtrain.models.family import ROPE, Family, LayerSpec
from nnxtrain.nn.mlp import GatedMlp
from nnxtrain.nn.norm import RmsNorm
from nnxtrain.nn.rope import frequencies, llama3_scaling
from nnxtrain.types import AttentionSpec, HeadSizes


def llama(config: ModelConfig) -> Family:
    """Returns the parts of the decoder that `config` describes."""
    norm = functools.partial(RmsNorm, eps=config.norm_eps)

    def layer(kind: str) -> LayerSpec:
        return LayerSpec(
            sizes=HeadSizes(config.embed, config.heads, config.kv_heads, config.head_dim),
            attention=AttentionSpec(window=config.window if kind == LOCAL else None),
            mlp=functools.partial(GatedMlp, config.embed, config.mlp),
            norm=norm,
            qk_norm=config.qk_norm,
        )

    radians = frequencies(config.head_dim, config.rope_theta)
    if config.rope_scaling == "llama3":
        radians = llama3_scaling(
            radians,
            factor=config.rope_factor,
            low=config.rope_low,
            high=config.rope_high,
            original=config.rope_original_sequence,
        )
    return Family({kind: layer(kind) for kind in KINDS}, {ROPE: radians}, functools.partial(norm, config.embed))
