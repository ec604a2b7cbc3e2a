"""The decoder: embedding, stack of layers, final norm, head."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.axes import BATCH, EMBED, SEQUENCE, VOCAB
from nnxtrain.config.model import ModelConfig
from nnxtrain.models.block import Block
from nnxtrain.models.family import Family, ModelContext
from nnxtrain.models.stack import ScannedStack, Stack, UnrolledStack, no_wrap
from nnxtrain.nn.attention import KvCache
from nnxtrain.nn.dropout import Dropout
from nnxtrain.nn.embed import Embedding
from nnxtrain.nn.param import LayerInit
from nnxtrain.nn.rope import Rotation, rotation_at
from nnxtrain.types import Batch, Layout, LossTerm, LossTerms


class Scorer(nnx.Module):
    """The head: activations `[b s d]` to scores of the next token `[b s v]`."""

    def __init__(self, table: Embedding, *, vocab: int, softcap: float | None, layout: Layout):
        """Uses `table`; `vocab` is that of `ModelContext`, `softcap` is `model.logit_softcap`."""
        self.table = table
        self.vocab = vocab
        self.softcap = softcap
        self.layout = layout

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Maps `[b s d]` to `[b s v]`, float32."""
        scores = self.layout.activations(self.table.logits(hidden), BATCH, SEQUENCE, VOCAB)
        if (cap := self.softcap) is not None:
            scores = cap * jnp.tanh(scores / cap)
        if self.vocab == scores.shape[-1]:
            return scores  # a `where` that masks nothing still costs a pass over the scores
        return jnp.where(jnp.arange(scores.shape[-1]) < self.vocab, scores, jnp.finfo(scores.dtype).min)


class Carry(NamedTuple):
    """What passes from layer to layer, and from stage to stage.

    Attributes:
        x: the residual stream `[b s d]`.
        terms: loss terms of the layers so far.
    """

    x: jax.Array
    terms: LossTerms


class SideInputs(NamedTuple):
    """Inputs of every layer besides the residual stream; all leaves are `[b ...]`.

    Attributes:
        rotations: at the positions of the batch, by name.
        segment_ids: `[b s]`, 0 is padding.
        drop: dropout of the step, not yet of a layer.
    """

    rotations: dict[str, Rotation]
    segment_ids: jax.Array
    drop: Dropout


class Decoder(nnx.Module):
    """A language model: tokens `[b s]` to scores of the next token `[b s v]`.

    It computes `embed`, then `run_layers`, then `finish`. A model of some of the layers, such as a pipeline stage, has
    only the parts that it needs: with the first layer it can `embed`, with the last it can `finish` and score.
    """

    def __init__(
        self,
        family: Callable[[ModelConfig], Family],
        config: ModelConfig,
        context: ModelContext,
        *,
        layers: range | None = None,
    ):
        """Makes the model.

        Args:
            family: describes the layers.
            config: sizes and options.
            context: kernels, dtypes, random keys and placement.
            layers: global indices of the layers to make; None for all.
        """
        self.family = family
        self.config = config
        self.context = context
        self.layers = range(config.layers) if layers is None else layers
        parts = family(config)
        self.term_names = parts.loss_terms
        is_last = self.layers.stop == config.layers
        head_std = 1 / math.sqrt(config.embed)  # scores of unit variance from normalised activations

        def layer(index: jax.typing.ArrayLike, kind: str) -> Block:
            spec = parts.layers[kind]
            # the residual stream is the sum of 2 * layers outputs
            init = LayerInit(context.precision, context.rngs_at("stack", index), 1 / math.sqrt(2 * config.layers))
            return Block(spec, init, attend=context.make_attend(spec.sizes, spec.attention))

        if self.layers.start == 0 or (config.tied and is_last):
            self.embedding = self._table("embedding", head_std if config.tied else 1.0)
        self.stack: Stack = (
            ScannedStack(self.layers, layer, kinds=config.kinds, period=config.period, unroll=config.scan_unroll)
            if config.scan_layers
            else UnrolledStack(self.layers, layer, kinds=config.kinds)
        )
        if is_last:
            self.norm = parts.norm()
        if is_last and not config.tied:
            self.head = self._table("head", head_std)

    def _table(self, path: str, std: float) -> Embedding:
        layout, precision, rngs = self.context.layout, self.context.precision, self.context.rngs_at(path, 0)
        sizes = (self.config.padded_vocab, self.config.embed)
        return Embedding(*sizes, std=std, layout=layout, precision=precision, rngs=rngs)

    def hidden(self, batch: Batch, drop: Dropout) -> tuple[jax.Array, LossTerms]:
        """Returns the activations before the head `[b s d]`, and the loss terms of all layers."""
        side = self.side_inputs(batch, drop)
        return self.finish(self.run_layers(self.embed(batch["inputs"]), side))

    def embed(self, ids: jax.Array) -> Carry:
        """Returns the input of the first layer, for ids `[b s]`."""
        zero = jnp.zeros((), jnp.float32)
        terms = {name: LossTerm(zero, zero, zero) for name in self.term_names}
        return Carry(self._placed(self.embedding(ids)), terms)

    def side_inputs(self, batch: Batch, drop: Dropout) -> SideInputs:
        """Returns the inputs that all layers share, besides the residual stream."""
        return SideInputs(self._rotations(batch["positions"]), batch["segment_ids"], drop)

    def run_layers(self, carry: Carry, side: SideInputs) -> Carry:
        """Applies the layers of this model."""
        return self.stack.run(self._layer, carry, None, side, wrap=self.context.wrap)[0]

    def finish(self, carry: Carry) -> tuple[jax.Array, LossTerms]:
        """Returns the activations before the head `[b s d]` and the loss terms, from the output of the last layer."""
        return self.norm(carry.x), carry.terms

    def scorer(self) -> Scorer:
        """Returns the head, with its weights sharded as stored."""
        table = self.embedding if self.config.tied else self.head
        return Scorer(table, vocab=self.context.vocab, softcap=self.config.logit_softcap, layout=self.context.layout)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps activations `[b s d]` to scores `[b s v]`, float32."""
        return self.scorer()(hidden)

    def empty_cache(self, rows: int, slots: int) -> KvCache:
        """Returns an empty cache for the last `slots` tokens of each of `rows` texts, `[l b t k c]`."""
        shape = (len(self.layers), rows, slots, self.config.kv_heads, self.config.head_dim)
        compute = self.context.precision.compute
        return KvCache(jnp.zeros(shape, compute), jnp.zeros(shape, compute))

    def decode(self, ids: jax.Array, cache: KvCache, position: jax.Array) -> tuple[jax.Array, KvCache]:
        """Returns the scores `[b v]` of the token after `ids` `[b]`, and the updated cache.

        Args:
            ids: the newest token of each text.
            cache: keys and values of the tokens before it; see `empty_cache`.
            position: scalar, index of the token in the text.
        """

        def body(x: jax.Array, layer: Block, index: Any, item: KvCache, rotations: Any) -> tuple[jax.Array, KvCache]:
            return layer.decode(x, rotations[layer.rotation], item, position)

        rotations = self._rotations(jnp.broadcast_to(position, (ids.shape[0], 1)))
        x, cache = self.stack.run(body, self.embedding(ids[:, None]), cache, rotations, wrap=no_wrap)
        return self.logits(self.norm(x))[:, 0], cache

    def _layer(self, carry: Carry, layer: Block, index: Any, item: None, side: SideInputs) -> tuple[Carry, None]:
        """Applies one layer and adds its loss terms to those of the layers before."""
        rotation = side.rotations[layer.rotation]
        x, new = self.context.layout.weights(layer)(carry.x, rotation, side.segment_ids, side.drop.at(index))
        terms = carry.terms | {name: jax.tree.map(jnp.add, carry.terms[name], term) for name, term in new.items()}
        return Carry(self._placed(x), terms), None

    def _placed(self, x: jax.Array) -> jax.Array:
        return self.context.layout.activations(x, BATCH, SEQUENCE, EMBED)

    def _rotations(self, positions: jax.Array) -> dict[str, Rotation]:
        return {name: rotation_at(positions, radians) for name, radians in self.family(self.config).rotations.items()}
