"""Learning rate of each update, counted from 0.

With peak `p`, warm-up `w`, decay `d` and steps `n`, all in updates, and final fraction `f`:

    u < w    p * (u + 1) / (w + 1)
    u >= w   p * share(u)

    constant       share = 1
    cosine         share = f + (1 - f) * (1 + cos(pi * t)) / 2,   t = (u - w) / d
    linear         share = f + (1 - f) * (1 - t),                 t = (u - w) / d
    wsd            share = f + (1 - f) * (1 - t),                 t = (u - s) / (n - 1 - s),  s = max(w, n - 1 - d)
    inverse_sqrt   share = max(f, sqrt((w + 1) / (u + 1)))

where `t` stays within 0 and 1, and a phase of length 0 is over at once: its `t` is 0 at its first update and 1 after.
So the first rate is not 0, the peak is met exactly, for the first time at `u = w`, and the last of a decay is `p * f`.
`w` and `d` given as fractions are rounded to whole updates, `w = floor(fraction * n + 1/2)`. Without either, `d` is all
that is left, `n - 1 - w`, so that update `n - 1` has the last rate, and for wsd a tenth of `n`, rounded alike.

Sources: Loshchilov and Hutter 2017, arXiv:1608.03983 (cosine); Vaswani et al. 2017, arXiv:1706.03762 (inverse square
root); Hu et al. 2024, arXiv:2404.06395 (warm-up, stable, decay).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from nnxtrain.config.lookup import lookup
from nnxtrain.config.schedule import ScheduleConfig, share_of
from nnxtrain.types import Curve, Phases, Schedule

WSD_DECAY = 0.1  # share of the steps that wsd decays over unless it is told


def _constant(update: jax.Array, phases: Phases) -> jax.Array:
    return jnp.ones_like(update)


def _cosine(update: jax.Array, phases: Phases) -> jax.Array:
    return _ending(phases, (1 + jnp.cos(jnp.pi * _progress(update, phases.warmup, phases.decay))) / 2)


def _linear(update: jax.Array, phases: Phases) -> jax.Array:
    return _ending(phases, 1 - _progress(update, phases.warmup, phases.decay))


def _wsd(update: jax.Array, phases: Phases) -> jax.Array:
    last = phases.steps - 1
    start = max(phases.warmup, last - phases.decay)
    return _ending(phases, 1 - _progress(update, start, last - start))


def _inverse_sqrt(update: jax.Array, phases: Phases) -> jax.Array:
    return jnp.maximum(phases.final, jnp.sqrt((phases.warmup + 1) / (update + 1)))


SCHEDULES: dict[str, Curve] = {
    "constant": _constant,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
    "linear": _linear,
    "wsd": _wsd,
}


def phases_of(config: ScheduleConfig, steps: int) -> Phases:
    """Returns the phases of a run of `steps` steps, in updates."""
    warmup = config.warmup(steps)
    if config.decay_steps is not None:
        decay = config.decay_steps
    elif config.decay_fraction is not None:
        decay = share_of(config.decay_fraction, steps)
    else:
        decay = share_of(WSD_DECAY, steps) if config.name == "wsd" else max(steps - 1 - warmup, 0)
    return Phases(warmup, decay, steps, config.final_fraction)


def make_schedule(
    config: ScheduleConfig, *, peak: float, steps: int, table: Mapping[str, Curve] = SCHEDULES
) -> Schedule:
    """Returns `update number [...] -> learning rate [...] float32`; `steps` is the length of the run."""
    curve = lookup(table, config.name, key="schedule.name")
    phases = phases_of(config, steps)

    def schedule(update: jax.typing.ArrayLike) -> jax.Array:
        update = jnp.asarray(update, jnp.float32)
        rising = (update + 1) / (phases.warmup + 1)
        return peak * jnp.where(update < phases.warmup, rising, curve(update, phases))

    return schedule


def _progress(update: jax.Array, start: int, length: int) -> jax.Array:
    """Returns the part of a phase that is behind, 0 to 1."""
    return jnp.clip((update - start) / max(length, 1), 0, 1)


def _ending(phases: Phases, curve: jax.Array) -> jax.Array:
    """Returns a curve from 1 to 0 as one from 1 to the final fraction; both ends are met exactly."""
    return curve + phases.final * (1 - curve)
