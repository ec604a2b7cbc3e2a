"""`--dry-run`: what a run would be, by arithmetic alone; nothing is compiled, allocated or written."""

import os

from nnxtrain.config.schema import Config


def dry_run(config: Config) -> int:
    """Prints parameters, tokens per step and bytes per device; returns the exit code."""
    import jax
    import numpy as np
    from flax import nnx

    from nnxtrain.build import make_program
    from nnxtrain.models.flops import flops_per_token

    return 0
