"""Per-parameter settings: `optimizer.groups` applied by path."""

import difflib
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from flax import nnx

from nnxtrain.axes import axes_of
from nnxtrain.config.optimizer import Group, OptimizerConfig, group_of
from nnxtrain.errors import ConfigError
from nnxtrain.optim.matrices import matrix_dims
from nnxtrain.state import is_trained


@dataclass(frozen=True)
class Setting:
    """Weight decay of one parameter, and the factor of its learning rate."""

    decay: float
    rate_scale: float


def name_of(path: Sequence[object]) -> str:
    """Returns the path of a parameter, the same for every layer of the stack: `stack/layer/mlp/up/kernel`.

    In the model, unrolled layers are at `stack/layers/3`, scanned ones at `stack/layer`, those of a pattern of several
    kinds at `stack/layer/1`, and remaining ones at `stack/rest/0`.
    """
    return re.sub(r"\bstack/(layers|layer|rest)(/\d+)?(?=/)", "stack/layer", "/".join(map(str, path)))


def is_decayed(axes: tuple[str, ...]) -> bool:
    """Returns whether a parameter with these logical axes is decayed by default: matrices are."""
    return matrix_dims(axes) is not None


def settings_of(params: nnx.State, config: OptimizerConfig) -> nnx.State:
    """Returns the `Setting` of each parameter; later groups win."""

    def setting(path: Sequence[object], parameter: nnx.Variable) -> Setting:
        decay = config.weight_decay if is_decayed(axes_of(parameter)) else 0.0
        rate_scale = 1.0
        for group in _matching(path, config):
            decay = decay if group.decay is None else group.decay
            rate_scale = rate_scale if group.rate_scale is None else group.rate_scale
        return Setting(decay, rate_scale)

    return nnx.map_state(setting, params)


def freeze(model: nnx.Module, config: OptimizerConfig) -> None:
    """Marks frozen parameters, for `is_trained`.

    Raises:
        ConfigError: a pattern matches no parameter, or all parameters are frozen.
    """
    parameters = nnx.to_flat_state(nnx.state(model, nnx.Param))
    names = [name_of(path) for path, _ in parameters]
    for group in map(group_of, config.groups):
        if not fnmatch.filter(names, group.pattern):
            near = difflib.get_close_matches(group.pattern, names, n=3, cutoff=0.4) or names[:3]
            raise ConfigError(
                f"optimizer.groups: {group.pattern!r} matches no parameter; close matches: {', '.join(near)}"
            )
    for path, parameter in parameters:
        if any(group.freeze for group in _matching(path, config)):
            parameter.set_metadata(frozen=True)
    if not any(is_trained(path, parameter) for path, parameter in parameters):
        raise ConfigError(f"optimizer.groups={list(config.groups)} freezes every parameter; nothing is left to train")


def _matching(path: Sequence[object], config: OptimizerConfig) -> list[Group]:
    return [group for group in map(group_of, config.groups) if fnmatch.fnmatchcase(name_of(path), group.pattern)]
