"""What a family of models says of itself: the parts that its layers are made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import numpy as np
from flax import nnx

from nnxtrain.models.stack import Wrap
from nnxtrain.nn.attention import Attention
from nnxtrain.nn.param import LayerInit, Precision
from nnxtrain.types import Attend, AttentionSpec, HeadSizes, Layout, LossTerms, MakeAttend, RngsAt

ROPE = "rope"  # name of the rotation of a family that has one for all layers


class FeedForward(Protocol):
    """The second half of a layer."""

    def __call__(self, x: jax.Array, is_token: jax.Array) -> tuple[jax.Array, LossTerms]:
        """Maps activations `[b s d]` to `[b s d]`; returns the named terms that it adds to the loss, too.

        Args:
            x: activations.
            is_token: `[b s]`, false for padding, which no statistic may count.
        """
        ...


@dataclass(frozen=True)
class LayerSpec:
    """What one layer is made of.

    Attributes:
        sizes: of the heads.
        attention: what attention computes.
        mlp: makes the feed-forward layer.
        norm: makes a norm from a width; the keyword `axis` names another axis than that of the residual stream.
        norm_place: where norms stand: before attention and feed-forward layer, after them, or both.
        norms_heads: whether queries and keys have norms of their own.
        rotation: which of the family's rotations turns queries and keys.
        loss_terms: names of the terms that the feed-forward layer returns.
    """

    sizes: HeadSizes
    attention: AttentionSpec
    mlp: Callable[[LayerInit], FeedForward]
    norm: Callable[..., nnx.Module]
    norm_place: Literal["before", "after", "both"] = "before"
    norms_heads: bool = False
    rotation: str = ROPE
    loss_terms: tuple[str, ...] = ()

    def make_attention(self, init: LayerInit, attend: Attend) -> Attention:
        """Returns the attention layer."""
        head_norm = self.norm if self.norms_heads else None
        return Attention(self.sizes, self.attention, init, attend=attend, head_norm=head_norm)


@dataclass(frozen=True)
class Family:
    """What a decoder is made of, for one configuration.

    Attributes:
        layers: what the layers of each kind in `model.pattern` are made of, by kind.
        rotations: radians per position of each pair `[c/2]`, by the name that layers know them by.
        norm: makes the norm before the head.
    """

    layers: Mapping[str, LayerSpec]
    rotations: Mapping[str, np.ndarray]
    norm: Callable[[], nnx.Module]

    @property
    def loss_terms(self) -> tuple[str, ...]:
        """Names of the terms that any layer adds to the loss."""
        return tuple(dict.fromkeys(name for layer in self.layers.values() for name in layer.loss_terms))


@dataclass(frozen=True)
class ModelContext:
    """What a model is built with, beside its configuration.

    Attributes:
        vocab: ids that have a meaning; scores of the table's other rows are never above any of theirs.
        wrap: put around each layer, such as `jax.checkpoint` with a policy.
        layout: where weights and activations are placed on the mesh.
        precision: types of computation and weights.
        rngs_at: where each layer draws its weights from, by path and global layer index.
        make_attend: returns the attention kernel of a layer.
    """

    vocab: int
    wrap: Wrap
    layout: Layout
    precision: Precision
    rngs_at: RngsAt
    make_attend: MakeAttend
