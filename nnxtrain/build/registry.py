"""Every open point in one place, for code outside the package that adds an entry of its own."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from flax import nnx

from nnxtrain.config.model import ModelConfig
from nnxtrain.data.sources.table import DATASETS, SOURCE_TOKENIZERS
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
    MakeSourceTokenizer,
    MakeTokenizer,
    RematPolicy,
    Source,
    UpdateRule,
)

# here, since an engine and the base that all engines share cannot import each other
ENGINES: dict[str, type[Engine]] = {"single": SingleEngine, "split": SplitEngine}


class Registry(NamedTuple):
    """Name → entry for each key that names a part; `docs/extending.md` shows an entry of each.

    `source_tokenizers` are of the data sources, by their name, that bring a tokenizer of their own.
    """

    models: Mapping[str, Callable[[ModelConfig, ModelContext], nnx.Module]] = MODELS
    attentions: Mapping[str, AttentionKernel] = ATTENTIONS
    remat_policies: Mapping[str, RematPolicy] = REMAT_POLICIES
    accumulators: Mapping[str, Accumulate] = ACCUMULATORS
    optimizers: Mapping[str, UpdateRule] = OPTIMIZERS
    schedules: Mapping[str, Curve] = SCHEDULES
    datasets: Mapping[str, Source] = DATASETS
    tokenizers: Mapping[str, MakeTokenizer] = TOKENIZERS
    source_tokenizers: Mapping[str, MakeSourceTokenizer] = SOURCE_TOKENIZERS
    engines: Mapping[str, Callable[[Any], Engine]] = ENGINES

    def names(self) -> dict[str, Collection[str]]:
        """Returns the names that each key admits, as `load(..., extra=...)` takes them."""
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
