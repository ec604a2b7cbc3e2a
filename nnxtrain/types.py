"""Types shared between packages: batches, metrics, and the signature of every extension point."""

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

# Random numbers must not depend on sharding, nor on jax's default generator.
PRNG = "threefry2x32"

# Scalars of one step, on device until fetched.
Metrics = dict[str, jax.Array]


class LossParts(NamedTuple):
    """The sums that make up a loss.

    Attributes:
        targets: number of targets, the only denominator of terms with a gradient.
        tokens: number of tokens without padding. All are float32: sums of several dtypes are all-reduced separately,
            and processes on CPU then mix them up (seen with jax 0.12).
        sums: metric name → (sum, count), divided once at the end of the step.
    """

    targets: jax.Array
    tokens: jax.Array
    sums: dict[str, tuple[jax.Array, jax.Array]]


# `(model, microbatch, key) -> (loss summed over targets in nats, LossParts)`
LossSum = Callable[[nnx.Module, Batch, jax.Array], tuple[jax.Array, LossParts]]

# `(params, microbatch) -> (loss summed over targets in nats, LossParts)`
LossOf = Callable[[nnx.State, Batch], tuple[jax.Array, LossParts]]


class Sums(NamedTuple):
    """Sums over the microbatches of a step: all that an update needs.

    Attributes:
        parts: sums of the loss.
        grads: gradients of the trained parameters, float32.
    """

    parts: LossParts
    grads: nnx.State


# `(loss_of, params, batch [m b ...]) -> Sums` over its microbatches
Accumulate = Callable[[LossOf, nnx.State, Batch], Sums]

# `(state, batch) -> Sums` of the batch; does not change the state
Collect = Callable[[TrainStateNNX, Batch], Sums]

# `(state, sums of a step) -> (next state, metrics)`; consumes its state
Update = Callable[[TrainStateNNX, Sums], tuple[TrainStateNNX, Metrics]]

# `(state, batch [m b ...]) -> (next state, metrics)`; consumes its state
TrainStep = Callable[[TrainStateNNX, Batch], tuple[TrainStateNNX, Metrics]]

# `(model, batch [b ...]) -> (cross-entropy summed over targets in nats, targets)`
EvalStep = Callable[[nnx.Module, Batch], tuple[jax.Array, jax.Array]]

# `update number -> learning rate`
Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


class Phases(NamedTuple):
    """Lengths of a schedule, in updates, and the last learning rate as a fraction of the peak."""

    warmup: int
    decay: int
    steps: int
    final: float


# `(update number [...] float32, Phases) -> fraction of the peak [...] float32`, after the warm-up
Curve = Callable[[jax.Array, Phases], jax.Array]


class UpdateContext(NamedTuple):
    """What an update rule needs besides its configuration.

    Attributes:
        params: the trained parameters, with logical axis names; arrays may be abstract.
        schedule: learning rate by update number.
        finish: adds weight decay, scales by the learning rate and by groups, and flips the sign for descent.
    """

    params: nnx.State
    schedule: Schedule
    finish: optax.GradientTransformation


# `(config, context) -> transformation of clipped gradients to updates`
UpdateRule = Callable[[OptimizerConfig, UpdateContext], optax.GradientTransformation]


class HeadSizes(NamedTuple):
    """Sizes of an attention layer; `kv_heads` divides `heads`."""

    embed: int
    heads: int
    kv_heads: int
    head_dim: int


class AttentionSpec(NamedTuple):
    """Options of an attention layer, which is always causal within a document.

    Attributes:
        window: number of tokens that a token attends to, itself and those right before it; None for all before it.
        scale: factor of the scores; None for `1 / sqrt(head_dim)`.
        softcap: scores are squashed into (-softcap, softcap) by tanh; None for no cap.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


# `(q [b s h c], k [b t k c], v [b t k c], segment_ids [b s], spec) -> [b s h c]`, causal
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, AttentionSpec], jax.Array]

# `(sizes, spec) -> the kernel of a layer`
MakeAttend = Callable[[HeadSizes, AttentionSpec], Attend]


class LossTerm(NamedTuple):
    """An auxiliary loss of a layer; float32 scalars, sums over the rows of a device.

    `objective` is divided by the targets of the step, like the cross-entropy.

    Attributes:
        objective: added to the minimised loss; a coefficient times a sum over tokens.
        total: `total / denominator` is the metric.
        denominator: used for the metric only.
    """

    objective: jax.Array
    total: jax.Array
    denominator: jax.Array


# by metric name
LossTerms = dict[str, LossTerm]

# `(primitive, *operand types, **parameters) -> whether to save the result`: a policy of `jax.checkpoint`
RematPolicy = Callable[..., Any]

# random keys of a layer: `(path of the layer, global layer index) -> nnx.Rngs`
RngsAt = Callable[[str, Any], nnx.Rngs]

# maps `function(weights, rows) -> sums` to one that each device runs on its rows; the sums are all-reduced once
Spread = Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]]

# `(scores [b s v], ids [b s]) -> the score of each id [b s]`
Pick = Callable[[jax.Array, jax.Array], jax.Array]

# maps `function(model, *args)` to a compiled `function(*args)` bound to one model
Bind = Callable[[Callable[..., Any]], Callable[..., Any]]


class Layout(Protocol):
    """Placement of arrays on the mesh, by the logical names of their dimensions."""

    def axes(self, logical: str) -> tuple[str, ...]:
        """Returns the mesh axes of size above 1 that shard a logical axis."""
        ...

    def activations(self, x: jax.Array, *axes: str) -> jax.Array:
        """Returns `x` sharded by these logical axes; an empty name is an unsharded dimension."""
        ...

    def weights(self, module: Any) -> Any:
        """Returns a module with its weights sharded as the computation needs them."""
        ...

    def lookup(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the rows `[b s d]` of `table` `[v d]` at `ids` `[b s]`."""
        ...


class Rows(Protocol):
    """Packed rows with random access; `rows[i]` contains `inputs targets positions segment_ids mask`, each `[s]`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


class RowIterator(Protocol):
    """Packed rows in sequence, each as in `Rows`; grain iterators fit."""

    def __next__(self) -> dict[str, np.ndarray]: ...

    def get_state(self) -> Any:
        """Returns the position of the iterator as JSON-serialisable data; bytes are allowed."""
        ...

    def set_state(self, state: Any) -> None:
        """Restores the position at which `get_state` returned `state`."""
        ...


class RowStream(NamedTuple):
    """Rows that can only be read sequentially.

    Attributes:
        start: returns an iterator at the first row of an epoch, such as `dataset.__iter__` of a `grain.IterDataset`.
        rows_per_epoch: None if unknown; needed only for the metric `epoch`.
    """

    start: Callable[[], RowIterator]
    rows_per_epoch: int | None = None


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def size(self) -> int:
        """Vocabulary size."""
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
        """Identifies the vocabulary; changes when the meaning of any id changes."""
        ...

    @property
    def token_bytes(self) -> np.ndarray:
        """Number of bytes of text of each id, `[size]`; 0 for special ids."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, without bos and eos."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of `ids`; special ids are skipped."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the files that the tokenizer loads, such as a vocabulary, to `folder`; often none."""
        ...


# `data section -> Tokenizer`
MakeTokenizer = Callable[[DataConfig], Tokenizer]


class RowSpec(NamedTuple):
    """What a run gives a data source: tokens per row, tokenizer, and the seed of the run."""

    sequence: int
    tokenizer: Tokenizer
    seed: int


class Dataset(NamedTuple):
    """What a data source gives a run.

    Attributes:
        train: `Rows` for random access: the position in the data is a row number, and the order is shuffled;
            `RowStream` for sequential access: the position is the state of an iterator.
        held_out: evaluation rows, by name of the set.
        description: one line for the user; a resumed run reports any change.
        held_out_descriptions: likewise for held-out sets, by name; optional.
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
