"""Which checkpoints orbax keeps, in its own terms."""

from collections.abc import Mapping

from orbax.checkpoint import checkpoint_managers as policies

from nnxtrain.config.checkpoint import CheckpointConfig


def goodness(metrics: Mapping[str, float]) -> float:
    """Returns what is largest for the best checkpoint."""
    return -metrics["loss"]


def preservation(config: CheckpointConfig) -> policies.PreservationPolicy:
    """Returns the policy that keeps what `config` says."""
    kept: list[policies.PreservationPolicy] = [policies.LatestN(config.keep_last)]
    if config.keep_every:
        kept.append(policies.EveryNSteps(config.keep_every))
    if config.keep_best is not None:
        kept.append(policies.BestN(get_metric_fn=goodness, n=1, keep_checkpoints_without_metrics=False))
    return policies.AnyPreservationPolicy(kept)
