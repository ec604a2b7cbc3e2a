"""What the backward pass keeps; all else it computes again."""

from collections.abc import Callable

from jax import checkpoint_policies as cp

# "none" is not here: no remat is no `jax.checkpoint` wrapper, which `build.py` decides.
REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    "full": cp.nothing_saveable,
    "dots": cp.dots_saveable,
}
