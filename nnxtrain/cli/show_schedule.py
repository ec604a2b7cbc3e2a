"""`--show-schedule`: the learning rate over the run as a plot and a table; no step is compiled."""

import numpy as np

from nnxtrain.build.registry import Registry
from nnxtrain.config.schema import Config
from nnxtrain.optim.schedules import make_schedule, phases_of

WIDTH, HEIGHT = 64, 12  # of the plot, in characters


def show_schedule(config: Config, registry: Registry) -> int:
    """Prints the learning-rate schedule of a configuration; returns the exit code."""
    peak, phases = config.optimizer.learning_rate, phases_of(config.schedule, config.steps)
    updates = np.arange(config.steps)
    rates = np.asarray(make_schedule(config.schedule, peak=peak, steps=config.steps, table=registry.schedules)(updates))
    print(f"{config.schedule.name}: peak {peak:g}, {config.steps:,} updates, {phases.warmup:,} of them warm-up")
    if not config.steps:
        return 0
    for line in plot(rates):
        print(line)
    print(f"\n{'update':>10}  learning rate")
    turns = {0, phases.warmup, config.steps - 1 - phases.decay, config.steps - 1}
    even = np.linspace(0, config.steps - 1, 11).round().astype(int)
    for update in sorted(turns.intersection(updates).union(even.tolist())):
        print(f"{update:>10}  {rates[update]:.7g}")
    return 0


def plot(values: np.ndarray) -> list[str]:
    """Returns a plot of `values` `[n]`, not negative, as lines of text; a column shows the maximum of its values."""
    shares = np.array_split(values, min(len(values), WIDTH))
    top = values.max() or 1.0
    heights = [round(float(share.max() / top) * (HEIGHT - 1)) for share in shares]
    lines = []
    for level in reversed(range(HEIGHT)):
        label = f"{top * level / (HEIGHT - 1):10.3g}" if level in (0, HEIGHT - 1) else " " * 10
        lines.append(f"{label} |{''.join('*' if height == level else ' ' for height in heights)}".rstrip())
    return [*lines, f"{'':10} +{'-' * len(heights)}"]
