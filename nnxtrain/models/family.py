"""The description of a model family: the parts of its layers."""

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

ROPE = "rope"  # name of the rotation in families whose layers all share one


class FeedForward(Protocol):
    """The second half of a layer."""

    def __call__(self, x: jax.Array, is_token: jax.Array) -> tuple[jax.Array, LossTerms]:
        """Maps activations `[b s d]` to `[b s d]`; also returns its loss terms by name.

        Args:
            x: activations.
            is_token: `[b s]`, false for padding, which statistics must not count.
        """
        ...


@dataclass(frozen=True)
class LayerSpec:
    """The parts of one layer.

    Attributes:
        sizes: number and width of the heads.
        attention: window, scale and soft cap.
        mlp: makes the feed-forward layer.
        norm: makes a norm from a width; the keyword `axis` names its logical axis if not `embed`.
        norm_place: before attention and the feed-forward layer (pre-norm), after each (post-norm), or both.
        qk_norm: whether queries and keys are normalised per head.
        rotation: name of the rotation, out of those of the family.
        loss_terms: names of the terms that the feed-forward layer returns.
    """

    sizes: HeadSizes
    attention: AttentionSpec
    mlp: Callable[[LayerInit], FeedForward]
    norm: Callable[..., nnx.Module]
    norm_place: Literal["before", "after", "both"] = "before"
    qk_norm: bool = False
    rotation: str = ROPE
    loss_terms: tuple[str, ...] = ()

    def make_attention(self, init: LayerInit, attend: Attend) -> Attention:
        """Returns the attention layer."""
        head_norm = self.norm if self.qk_norm else None
        return Attention(self.sizes, self.attention, init, attend=attend, head_norm=head_norm)


@dataclass(frozen=True)
class Family:
    """The parts of a decoder, for one configuration.

    Attributes:
        layers: the parts of a layer, by its kind in `model.pattern`.
        rotations: radians per position of each pair `[c/2]`, by the name used in `LayerSpec.rotation`.
        norm: makes the norm before the head.
    """

    layers: Mapping[str, LayerSpec]
    rotations: Mapping[str, np.ndarray]
    norm: Callable[[], nnx.Module]

    @property
    def loss_terms(self) -> tuple[str, ...]:
        """Names of the loss terms of all layers."""
        return tuple(dict.fromkeys(name for layer in self.layers.values() for name in layer.loss_terms))


@dataclass(frozen=True)
class ModelContext:
    """What a model needs besides its configuration.

    Attributes:
        vocab: number of real token ids; the scores of padding rows of the table are masked to the lowest float.
        wrap: put around each layer, such as `jax.checkpoint` with a policy.
        layout: where weights and activations are placed on the mesh.
        precision: dtypes of computation and weights.
        rngs_at: random keys of each layer, by path and global layer index.
        make_attend: returns the attention kernel of a layer.
    """

    vocab: int
    wrap: Wrap
    layout: Layout
    precision: Precision
    rngs_at: RngsAt
    make_attend: MakeAttend
