"""Learning-rate schedules; updates are counted from 0.

With peak `p`, warm-up `w`, decay `d` and steps `n`, all in updates, and final fraction `f`:

    u < w    p * (u + 1) / (w + 1)
    u >= w   p * factor(u)

    constant       factor = 1
    cosine         factor = f + (1 - f) * (1 + cos(pi * t)) / 2,   t = (u - w) / d
    linear         factor = f + (1 - f) * (1 - t),                 t = (u - w) / d
    wsd            factor = f + (1 - f) * (1 - t),                 t = (u - s) / (n - 1 - s),  s = max(w, n - 1 - d)
    inverse_sqrt   factor = max(f, sqrt((w + 1) / (u + 1)))

where `t` is clipped to 0..1; in a phase of length 0 it is 0 at the first update and 1 after. So the first rate is not
0, the rate first reaches exactly `p` at `u = w`, and a decay ends at exactly `p * f`. `w` and `d` given as fractions
are rounded to integers, `w = floor(fraction * n + 1/2)`. If `d` is not given it is the rest of the run, `n - 1 - w`,
so that update `n - 1` has the last rate; for wsd it is a tenth of `n`, rounded likewise.

Sources: Loshchilov and Hutter 2017, arXiv:1608.03983 (cosine); Vaswani et al. 2017, arXiv:1706.03762 (inverse square
root); Hu et al. 2024, arXiv:2404.06395 (warm-up, stable, decay).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from nnxtrain.config.lookup import lookup
from nnxtrain.config.schedule import ScheduleConfig, share_of
from nnxtrain.types import Curve, Phases, Schedule

WSD_DECAY = 0.1  # fraction of the steps, if the decay of wsd is not given


def _constant(update: jax.Array, phases: Phases) -> jax.Array:
    return jnp.ones_like(update)


def _cosine(update: jax.Array, phases: Phases) -> jax.Array:
    return _scale_to_final(phases, (1 + jnp.cos(jnp.pi * _progress(update, phases.warmup, phases.decay))) / 2)


def _linear(update: jax.Array, phases: Phases) -> jax.Array:
    return _scale_to_final(phases, 1 - _progress(update, phases.warmup, phases.decay))


def _wsd(update: jax.Array, phases: Phases) -> jax.Array:
    last = phases.steps - 1
    start = max(phases.warmup, last - phases.decay)
    return _scale_to_final(phases, 1 - _progress(update, start, last - start))


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
        warmup = (update + 1) / (phases.warmup + 1)
        return peak * jnp.where(update < phases.warmup, warmup, curve(update, phases))

    return schedule


def _progress(update: jax.Array, start: int, length: int) -> jax.Array:
    """Returns the completed fraction of a phase, 0 to 1."""
    return jnp.clip((update - start) / max(length, 1), 0, 1)


def _scale_to_final(phases: Phases, curve: jax.Array) -> jax.Array:
    """Rescales a curve from 1 to 0 to one from 1 to the final fraction; both ends are exact."""
    return curve + phases.final * (1 - curve)
