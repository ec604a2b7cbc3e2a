"""What passes between the rooms: batches, metrics, and the signature of every open point."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax
from flax import nnx

from nnxtrain.config.data import DataConfig
from nnxtrain.config.optimizer import OptimizerConfig
from nnxtrain.state import TrainStateNNX

# `inputs targets positions segment_ids` int32 and `mask` bool, each `[b s]`, and `rows` int32 `[b]`; a train step
# gets a leading microbatch axis, `[m b s]`. Segment 0 is padding; `mask` is true where the target counts; `rows` is
# the index of a row in the global batch.
Batch = Mapping[str, Any]

# Draws must not depend on layout, also where another generator is the default of jax.
PRNG = "threefry2x32"

# Scalars of one step, on device until they are fetched.
Metrics = dict[str, jax.Array]


class LossParts(NamedTuple):
    """What a loss is made of.

    Attributes:
        targets: tokens that count, the one denominator of everything that carries a gradient.
        tokens: those that are no padding. All numbers are float32: sums of several types are exchanged between
            devices apart, and processes on CPU then mix them up (seen with jax 0.12).
        sums: metric name → (sum, count), divided once when the step is done.
    """

    targets: jax.Array
    tokens: jax.Array
    sums: dict[str, tuple[jax.Array, jax.Array]]


# `(model, microbatch, key) -> (loss summed over targets in nats, LossParts)`
LossSum = Callable[[nnx.Module, Batch, jax.Array], tuple[jax.Array, LossParts]]

# `(params, microbatch) -> (loss summed over targets in nats, LossParts)`
LossOf = Callable[[nnx.State, Batch], tuple[jax.Array, LossParts]]


class Sums(NamedTuple):
    """What microbatches leave behind, added up: all that an update needs to know of them.

    Attributes:
        parts: of the loss.
        grads: of the trained parameters, float32.
    """

    parts: LossParts
    grads: nnx.State


# `(loss_of, params, batch [m b ...]) -> Sums` over its microbatches
Accumulate = Callable[[LossOf, nnx.State, Batch], Sums]

# `(state, batch) -> Sums` of the batch, for the weights of a state that is only read
Collect = Callable[[TrainStateNNX, Batch], Sums]

# `(state, sums of a step) -> (state one step on, metrics)`; consumes its state
Update = Callable[[TrainStateNNX, Sums], tuple[TrainStateNNX, Metrics]]

# `(state, batch [m b ...]) -> (state one step on, metrics)`; consumes its state
TrainStep = Callable[[TrainStateNNX, Batch], tuple[TrainStateNNX, Metrics]]

# `(model, batch [b ...]) -> (cross-entropy summed over targets in nats, targets)`
EvalStep = Callable[[nnx.Module, Batch], tuple[jax.Array, jax.Array]]

# `update number -> learning rate`
Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


class Phases(NamedTuple):
    """Lengths of a schedule, in updates, and the last learning rate as a share of the peak."""

    warmup: int
    decay: int
    steps: int
    final: float


# `(update number [...] float32, Phases) -> share of the peak [...] float32`, from the end of the warm-up on
Curve = Callable[[jax.Array, Phases], jax.Array]


class UpdateContext(NamedTuple):
    """What an update rule works on.

    Attributes:
        params: the trained parameters, variables that know their logical axes; arrays may be abstract.
        schedule: learning rate by number of updates.
        finish: decays, scales by the learning rate and by groups, and turns a direction uphill into an update.
    """

    params: nnx.State
    schedule: Schedule
    finish: optax.GradientTransformation


# `(config, context) -> what turns clipped gradients into updates`
UpdateRule = Callable[[OptimizerConfig, UpdateContext], optax.GradientTransformation]


class HeadSizes(NamedTuple):
    """Sizes of an attention layer; `kv_heads` divides `heads`."""

    embed: int
    heads: int
    kv_heads: int
    head_dim: int


class AttentionSpec(NamedTuple):
    """What an attention layer computes, beside causal attention inside a document.

    Attributes:
        window: tokens that a token sees, itself and those right before it; None for all before it.
        scale: of the scores; None for one over the root of the width of a head.
        softcap: scores are squashed into (-softcap, softcap); None for no cap.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


# `(q [b s h c], k [b t k c], v [b t k c], segment_ids [b s], spec) -> [b s h c]`, causal
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, AttentionSpec], jax.Array]

# `(sizes, spec) -> the kernel of a layer`
MakeAttend = Callable[[HeadSizes, AttentionSpec], Attend]


class LossTerm(NamedTuple):
    """What a layer adds to the loss, beside cross-entropy; float32 scalars, sums over the rows that a device sees.

    Like everything that carries a gradient, `objective` is divided by the targets of the step.

    Attributes:
        objective: added to the loss that is minimised; a coefficient times a sum over tokens.
        total: `total / denominator` is the metric.
        denominator: of the metric alone.
    """

    objective: jax.Array
    total: jax.Array
    denominator: jax.Array


# by the name of the metric
LossTerms = dict[str, LossTerm]

# `(primitive, *types of its operands, **its parameters) -> whether its result is kept`, as `jax.checkpoint` asks
RematPolicy = Callable[..., Any]

# Where a layer draws its weights from: `(path of the layer, global layer index) -> nnx.Rngs`
RngsAt = Callable[[str, Any], nnx.Rngs]

# turns `function(weights, rows) -> sums` into one that each device runs on its own rows; the sums are added once
Spread = Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]]

# `(scores [b s v], ids [b s]) -> the score of each id [b s]`
Pick = Callable[[jax.Array, jax.Array], jax.Array]

# turns `function(model, *args)` into a compiled `function(*args)` of one model
Bind = Callable[[Callable[..., Any]], Callable[..., Any]]


class Layout(Protocol):
    """Where arrays lie on the mesh; they are named by the logical names of their dimensions."""

    def axes(self, logical: str) -> tuple[str, ...]:
        """Returns the mesh axes, of more than one device, that shard a logical axis."""
        ...

    def activations(self, x: jax.Array, *axes: str) -> jax.Array:
        """Returns `x` where these axes say that it lies; an empty name is a dimension that is whole everywhere."""
        ...

    def weights(self, module: Any) -> Any:
        """Returns a module with its weights where a computation needs them."""
        ...

    def lookup(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the rows `[b s d]` of a table `[v d]` that `ids` `[b s]` name."""
        ...


class Rows(Protocol):
    """Packed rows with random access; `rows[i]` holds `inputs targets positions segment_ids mask`, each `[s]`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


class RowIterator(Protocol):
    """Packed rows one after another, as `Rows` has them; an iterator of grain is one."""

    def __next__(self) -> dict[str, np.ndarray]: ...

    def get_state(self) -> Any:
        """Returns where the iterator is, as JSON holds it; bytes are admitted too."""
        ...

    def set_state(self, state: Any) -> None:
        """Goes to where `get_state` was called; the next row is the one that came next then."""
        ...


class RowStream(NamedTuple):
    """Rows that can only be read in turn.

    Attributes:
        start: returns an iterator at the first row of an epoch, such as `dataset.__iter__` of a `grain.IterDataset`.
        rows_per_epoch: where that is known; only the metric `epoch` needs it.
    """

    start: Callable[[], RowIterator]
    rows_per_epoch: int | None = None


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def size(self) -> int:
        """Number of ids."""
        ...

    @property
    def bos(self) -> int:
        """Id before the first token of a document; -1 if there is none."""
        ...

    @property
    def eos(self) -> int:
        """Id after the last token of a document; -1 if there is none."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when any id changes its meaning."""
        ...

    @property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text that each id stands for, `[size]`; 0 for ids that stand for none."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, without bos and eos."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of `ids`; ids that stand for no text are left out."""
        ...

    def save(self, folder: Path) -> None:
        """Writes to `folder` the files that the tokenizer is made from, such as a vocabulary; often there are none."""
        ...


# `data section -> Tokenizer`
MakeTokenizer = Callable[[DataConfig], Tokenizer]


class RowSpec(NamedTuple):
    """What a run asks of a data source: tokens per row, how text becomes ids, the seed of the run."""

    sequence: int
    tokenizer: Tokenizer
    seed: int


class Dataset(NamedTuple):
    """What a data source gives to a run.

    Attributes:
        train: `Rows` where any row can be read at once, so that the position in the data is a number and the order is
            shuffled; `RowStream` where rows come in turn, so that the position is the state of an iterator.
        held_out: rows to evaluate on, by name of the set.
        description: one line for people; a resumed run says so where it has changed.
        held_out_descriptions: likewise of held-out sets, by name, where there is something to say.
    """

    train: Rows | RowStream
    held_out: Mapping[str, Rows]
    description: str
    held_out_descriptions: Mapping[str, str] = MappingProxyType({})


# `(data section, RowSpec) -> Dataset`
Source = Callable[[DataConfig, RowSpec], Dataset]


@dataclass(frozen=True)
class SourceWithTokenizer:
    """A data source with a tokenizer of its own, used instead of `data.tokenizer`.

    Attributes:
        open: opens the data.
        tokenizer: `(data section, model.vocab) -> Tokenizer`.
    """

    open: Source
    tokenizer: Callable[[DataConfig, int], Tokenizer]

    def __call__(self, config: DataConfig, spec: RowSpec) -> Dataset:
        """Opens the data."""
        return self.open(config, spec)
