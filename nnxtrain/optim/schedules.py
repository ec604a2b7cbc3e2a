"""Learning rate of each update, counted from 0.

With peak `p`, `w` warm-up steps, `d` decay steps and final fraction `f`:

    u < w    p * (u + 1) / (w + 1)
    u >= w   p * (f + (1 - f) * curve(t)),  t = min((u - w) / d, 1), or 1 where d is 0 and u > w

so that the first rate is not 0, the peak is met exactly once, at `u = w`, and the last of the decay is `p * f`.
`schedule.decay_steps=null` makes `d = steps - 1 - w`: update number `steps - 1` has the last rate.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from nnxtrain.config.schedule import ScheduleConfig
from nnxtrain.lookup import lookup
from nnxtrain.types import Schedule

# share of the way from peak to end, `t` in [0, 1] → 1 at the peak, 0 at the end
SCHEDULES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "constant": lambda t: jnp.ones_like(t),
    "cosine": lambda t: (1 + jnp.cos(jnp.pi * t)) / 2,
    "linear": lambda t: 1 - t,
}


def make_schedule(config: ScheduleConfig, *, peak: float, steps: int) -> Schedule:
    """Returns `update number [] -> learning rate [] float32`; `steps` is the length of the run."""
    curve = lookup(SCHEDULES, config.name, key="schedule.name")
    warmup = config.warmup_steps
    decay = max(steps - 1 - warmup, 0) if config.decay_steps is None else config.decay_steps
    final = config.final_fraction

    def schedule(update: jax.Array) -> jax.Array:
        beyond = jnp.asarray(update, jnp.float32) - warmup
        t = jnp.clip(beyond / max(decay, 1), 0, 1)
        rising = (beyond + warmup + 1) / (warmup + 1)
        return peak * jnp.where(beyond < 0, rising, final + (1 - final) * curve(t))

    return schedule
