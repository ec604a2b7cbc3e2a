"""The decoder: embedding, stack of blocks, norm, head."""

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
        """Takes the table; see `ModelContext.vocab` and `model.logit_softcap`."""
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
            return scores  # a choice that always falls alike still costs a pass over them
        return jnp.where(jnp.arange(scores.shape[-1]) < self.vocab, scores, jnp.finfo(scores.dtype).min)


class Carry(NamedTuple):
    """What goes from layer to layer, and from stage to stage.

    Attributes:
        x: the residual stream `[b s d]`.
        terms: what the layers so far add to the loss.
    """

    x: jax.Array
    terms: LossTerms


class SideInputs(NamedTuple):
    """What every layer gets beside the residual stream; all leaves are `[b ...]`.

    Attributes:
        rotations: of the positions, by name.
        segment_ids: `[b s]`, 0 is padding.
        drop: dropout, not narrowed to a layer yet.
    """

    rotations: dict[str, Rotation]
    segment_ids: jax.Array
    drop: Dropout


class Decoder(nnx.Module):
    """A language model: tokens `[b s]` to scores of the next token `[b s v]`.

    It is `embed`, then `run_layers`, then `finish`. A model of a run of layers has the parts that it needs: those with
    the first layer can `embed`, those with the last can `finish` and score.
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
            family: says what layers are made of.
            config: sizes.
            context: what it is built with.
            layers: indices of the layers to make; None for all.
        """
        self.family = family
        self.config = config
        self.context = context
        self.layers = range(config.layers) if layers is None else layers
        made = family(config)
        self.term_names = made.loss_terms
        is_last = self.layers.stop == config.layers
        small = 1 / math.sqrt(config.embed)  # scores of unit variance from a normalised stream

        def layer(index: jax.typing.ArrayLike, kind: str) -> Block:
            spec = made.layers[kind]
            # the residual stream sums 2 * layers outputs
            init = LayerInit(context.precision, context.rngs_at("stack", index), 1 / math.sqrt(2 * config.layers))
            return Block(spec, init, attend=context.make_attend(spec.sizes, spec.attention))

        if self.layers.start == 0 or (config.tied and is_last):
            self.embedding = self._table("embedding", small if config.tied else 1.0)
        self.stack: Stack = (
            ScannedStack(self.layers, layer, kinds=config.kinds, period=config.period, unroll=config.scan_unroll)
            if config.scan_layers
            else UnrolledStack(self.layers, layer, kinds=config.kinds)
        )
        if is_last:
            self.norm = made.norm()
        if is_last and not config.tied:
            self.head = self._table("head", small)

    def _table(self, path: str, deviation: float) -> Embedding:
        layout, precision, rngs = self.context.layout, self.context.precision, self.context.rngs_at(path, 0)
        sizes = (self.config.padded_vocab, self.config.embed)
        return Embedding(*sizes, deviation=deviation, layout=layout, precision=precision, rngs=rngs)

    def hidden(self, batch: Batch, drop: Dropout) -> tuple[jax.Array, LossTerms]:
        """Maps a batch to the activations before the head, `[b s d]`, and the terms that layers add to the loss."""
        side = self.side_inputs(batch, drop)
        return self.finish(self.run_layers(self.embed(batch["inputs"]), side))

    def embed(self, ids: jax.Array) -> Carry:
        """Returns what enters the first layer, for ids `[b s]`."""
        zero = jnp.zeros((), jnp.float32)
        terms = {name: LossTerm(zero, zero, zero) for name in self.term_names}
        return Carry(self._placed(self.embedding(ids)), terms)

    def side_inputs(self, batch: Batch, drop: Dropout) -> SideInputs:
        """Returns what all layers get of a batch, beside its tokens."""
        return SideInputs(self._rotations(batch["positions"]), batch["segment_ids"], drop)

    def run_layers(self, carry: Carry, side: SideInputs) -> Carry:
        """Runs the layers of this model."""
        return self.stack.run(self._layer, carry, None, side, wrap=self.context.wrap)[0]

    def finish(self, carry: Carry) -> tuple[jax.Array, LossTerms]:
        """Returns the activations before the head `[b s d]`, and the terms of all layers, for what left the last."""
        return self.norm(carry.x), carry.terms

    def scorer(self) -> Scorer:
        """Returns the head, its weights as they are sharded."""
        table = self.embedding if self.config.tied else self.head
        return Scorer(table, vocab=self.context.vocab, softcap=self.config.logit_softcap, layout=self.context.layout)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps activations `[b s d]` to scores `[b s v]`, float32."""
        return self.scorer()(hidden)

    def empty_cache(self, rows: int, slots: int) -> KvCache:
        """Returns a cache for the last `slots` tokens of each of `rows` texts, all layers, `[l b t k c]`."""
        shape = (len(self.layers), rows, slots, self.config.kv_heads, self.config.head_dim)
        compute = self.context.precision.compute
        return KvCache(jnp.zeros(shape, compute), jnp.zeros(shape, compute))

    def decode(self, ids: jax.Array, cache: KvCache, position: jax.Array) -> tuple[jax.Array, KvCache]:
        """Returns the scores of the token after `ids` `[b]`, `[b v]`, and the cache with it.

        Args:
            ids: the newest token of each text.
            cache: of the tokens before it; see `empty_cache`.
            position: scalar, tokens before it.
        """

        def body(x: jax.Array, layer: Block, index: Any, item: KvCache, rotations: Any) -> tuple[jax.Array, KvCache]:
            return layer.decode(x, rotations[layer.rotation], item, position)

        rotations = self._rotations(jnp.broadcast_to(position, (ids.shape[0], 1)))
        x, cache = self.stack.run(body, self.embedding(ids[:, None]), cache, rotations, wrap=no_wrap)
        return self.logits(self.norm(x))[:, 0], cache

    def _layer(self, carry: Carry, layer: Block, index: Any, item: None, side: SideInputs) -> tuple[Carry, None]:
        """Runs one layer; the terms that it returns are added to those of the layers before."""
        rotation = side.rotations[layer.rotation]
        x, new = self.context.layout.weights(layer)(carry.x, rotation, side.segment_ids, side.drop.at(index))
        terms = carry.terms | {name: jax.tree.map(jnp.add, carry.terms[name], term) for name, term in new.items()}
        return Carry(self._placed(x), terms), None

    def _placed(self, x: jax.Array) -> jax.Array:
        return self.context.layout.activations(x, BATCH, SEQUENCE, EMBED)

    def _rotations(self, positions: jax.Array) -> dict[str, Rotation]:
        return {name: rotation_at(positions, radians) for name, radians in self.family(self.config).rotations.items()}
