"""Feed-forward layers."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnxtrain.axes import EMBED, MLP
from nnxtrain.nn.param import LayerInit, projection
from nnxtrain.tags import MLP_DOWN, MLP_GATE, MLP_HIDDEN, MLP_UP
from nnxtrain.types import LossTerms


class GatedMlp(nnx.Module):
    """Feed-forward layer with a SiLU gate: `down(silu(gate(x)) * up(x))`.

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, embed: int, mlp: int, init: LayerInit):
        sizes = {EMBED: embed, MLP: mlp}
        self.gate = projection("bsd,df->bsf", sizes, init)
        self.up = projection("bsd,df->bsf", sizes, init)
        self.down = projection("bsf,fd->bsd", {MLP: mlp, EMBED: embed}, init, scale=init.out_scale)

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array, is_token: jax.Array) -> tuple[jax.Array, LossTerms]:
        """Maps activations `[b s d]` to `[b s d]`, and adds no term to the loss; see `FeedForward`."""
        gate, up = checkpoint_name(self.gate(x), MLP_GATE), checkpoint_name(self.up(x), MLP_UP)
        hidden = checkpoint_name(nnx.silu(gate) * up, MLP_HIDDEN)
        return checkpoint_name(self.down(hidden), MLP_DOWN), {}
