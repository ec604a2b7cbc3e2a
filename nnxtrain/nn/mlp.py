"""Feed-forward layers."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnxtrain.axes import EMBED, MLP
from nnxtrain.nn.param import Precision, projection


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
        hidden = nnx.silu(self.gate(x)) * self.up(x)  # [b s f]
        return self.down(checkpoint_name(hidden, "mlp_hidden"))
