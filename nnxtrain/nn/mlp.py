"""Feed-forward layers."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnxtrain.axes import EMBED, MLP
from nnxtrain.nn.param import Precision, projection
from nnxtrain.tags import MLP_DOWN, MLP_GATE, MLP_HIDDEN, MLP_UP


class GatedMlp(nnx.Module):
    """Feed-forward layer with a SiLU gate: `down(silu(gate(x)) * up(x))`.

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, embed: int, mlp: int, *, out_scale: float, precision: Precision, rngs: nnx.Rngs):
        wide = {EMBED: embed, MLP: mlp}
        self.gate = projection("bsd,df->bsf", wide, precision=precision, rngs=rngs)
        self.up = projection("bsd,df->bsf", wide, precision=precision, rngs=rngs)
        back = {MLP: mlp, EMBED: embed}
        self.down = projection("bsf,fd->bsd", back, precision=precision, rngs=rngs, scale=out_scale)

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps activations `[b s d]` to `[b s d]`."""
        gate, up = checkpoint_name(self.gate(x), MLP_GATE), checkpoint_name(self.up(x), MLP_UP)
        hidden = checkpoint_name(nnx.silu(gate) * up, MLP_HIDDEN)  # [b s f]
        return checkpoint_name(self.down(hidden), MLP_DOWN)
