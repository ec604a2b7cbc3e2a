"""All tables of parts that a configuration selects by name, for code outside the package to extend."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from flax import nnx

from nnxtrain.config.model import ModelConfig
from nnxtrain.data.sources.table import DATASETS
from nnxtrain.engine.base import Engine
from nnxtrain.engine.single import SingleEngine
from nnxtrain.engine.split import SplitEngine
from nnxtrain.models.families.table import MODELS
from nnxtrain.models.family import ModelContext
from nnxtrain.models.remat import REMAT_POLICIES
from nnxtrain.nn.kernels import ATTENTIONS, AttentionKernel
from nnxtrain.optim.optimizers import OPTIMIZERS
from nnxtrain.optim.schedules import SCHEDULES
from nnxtrain.steps.accumulate import ACCUMULATORS
from nnxtrain.tokenizers.table import TOKENIZERS
from nnxtrain.types import (
    Accumulate,
    Curve,
    MakeTokenizer,
    RematPolicy,
    Source,
    UpdateRule,
)

# not in `engine/base.py`, which the engines import
ENGINES: dict[str, type[Engine]] = {"single": SingleEngine, "split": SplitEngine}


class Registry(NamedTuple):
    """Name → entry for each config key that selects a part; `docs/extending.md` has an example of each."""

    models: Mapping[str, Callable[[ModelConfig, ModelContext], nnx.Module]] = MODELS
    attentions: Mapping[str, AttentionKernel] = ATTENTIONS
    remat_policies: Mapping[str, RematPolicy] = REMAT_POLICIES
    accumulators: Mapping[str, Accumulate] = ACCUMULATORS
    optimizers: Mapping[str, UpdateRule] = OPTIMIZERS
    schedules: Mapping[str, Curve] = SCHEDULES
    datasets: Mapping[str, Source] = DATASETS
    tokenizers: Mapping[str, MakeTokenizer] = TOKENIZERS
    engines: Mapping[str, Callable[[Any], Engine]] = ENGINES

    def names(self) -> dict[str, Collection[str]]:
        """Returns the valid names of each key, for `load(..., extra=...)`."""
        return {
            "model.name": self.models.keys(),
            "model.attention": self.attentions.keys(),
            "remat.policy": self.remat_policies.keys(),
            "batch.accumulator": self.accumulators.keys(),
            "optimizer.name": self.optimizers.keys(),
            "schedule.name": self.schedules.keys(),
            "data.source": self.datasets.keys(),
            "data.tokenizer": self.tokenizers.keys(),
            "engine.name": self.engines.keys(),
        }


BUILT_IN = Registry()
