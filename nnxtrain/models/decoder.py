"""The decoder: embedding, stack of blocks, norm, head."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.axes import BATCH, EMBED, SEQUENCE, VOCAB
from nnxtrain.config.model import ModelConfig
from nnxtrain.models.block import Block
from nnxtrain.models.stack import ScannedStack, Stack, UnrolledStack, Wrap, no_wrap
from nnxtrain.nn.attention import KvCache
from nnxtrain.nn.dropout import Dropout
from nnxtrain.nn.embed import Embedding
from nnxtrain.nn.norm import RmsNorm
from nnxtrain.nn.param import Precision
from nnxtrain.nn.rope import Rotation, frequencies, llama3_scaling, rotation_at
from nnxtrain.types import Batch, Layout, RngsAt


class Scorer(nnx.Module):
    """The head: activations `[b s d]` to scores of the next token `[b s v]`."""

    def __init__(self, table: Embedding, *, vocab: int, softcap: float | None, layout: Layout):
        """Takes the table; see `Decoder` and `model.logit_softcap`."""
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


class Decoder(nnx.Module):
    """A language model: tokens `[b s]` to scores of the next token `[b s v]`.

    Source: Touvron et al. 2023, arXiv:2302.13971 (the arrangement of the parts).
    """

    scorer_type = Scorer  # of the head; a subclass may have its own

    def __init__(
        self, config: ModelConfig, *, vocab: int, wrap: Wrap, layout: Layout, precision: Precision, rngs_at: RngsAt
    ):
        """Makes the model.

        Args:
            config: sizes and parts.
            vocab: ids that have a meaning; scores of the table's other rows are never above any of theirs.
            wrap: put around each block, such as `jax.checkpoint` with a policy.
            layout: where weights and activations lie on the mesh.
            precision: types of computation and weights.
            rngs_at: where each layer draws its weights from, by path and global layer index.
        """
        self.config = config
        self.vocab = vocab
        self.wrap = wrap
        self.layout = layout
        self.precision = precision

        def block(index: jax.typing.ArrayLike, place: int) -> Block:
            kind, rngs = config.pattern[place], rngs_at("stack", index)
            return Block(config, kind=kind, layout=layout, precision=precision, rngs=rngs)

        def table(path: str, deviation: float) -> Embedding:
            sizes = (config.padded_vocab, config.embed)
            rngs = rngs_at(path, 0)
            return Embedding(*sizes, deviation=deviation, layout=layout, precision=precision, rngs=rngs)

        small = 1 / math.sqrt(config.embed)  # scores of unit variance from a normalised stream
        self.embedding = table("embedding", small if config.tied else 1.0)
        if config.scan_layers:
            self.stack: Stack = ScannedStack(config.layers, block, period=config.period, unroll=config.scan_unroll)
        else:
            self.stack = UnrolledStack(config.layers, block, period=config.period)
        self.norm = RmsNorm(config.embed, eps=config.norm_eps)
        if not config.tied:
            self.head = table("head", small)

    def hidden(self, batch: Batch, drop: Dropout) -> jax.Array:
        """Maps a batch to the activations before the head, `[b s d]`."""
        rotation = self._rotation(batch["positions"])
        weights = self.layout.weights
        segment_ids = batch["segment_ids"]

        def placed(x: jax.Array) -> jax.Array:
            return self.layout.activations(x, BATCH, SEQUENCE, EMBED)

        def body(x: jax.Array, layer: Block, index: jax.typing.ArrayLike, item: None) -> tuple[jax.Array, None]:
            return placed(weights(layer)(x, rotation, segment_ids, drop.at(index))), None

        x, _ = self.stack.run(body, placed(self.embedding(batch["inputs"])), None, wrap=self.wrap)
        return self.norm(x)

    def scorer(self) -> "Scorer":
        """Returns the head, its weights where they lie."""
        table = self.embedding if self.config.tied else self.head
        return self.scorer_type(table, vocab=self.vocab, softcap=self.config.logit_softcap, layout=self.layout)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps activations `[b s d]` to scores `[b s v]`, float32."""
        return self.scorer()(hidden)

    def empty_cache(self, rows: int, slots: int) -> KvCache:
        """Returns a cache for the last `slots` tokens of each of `rows` texts, all layers, `[l b t k c]`."""
        shape = (self.config.layers, rows, slots, self.config.kv_heads, self.config.head_dim)
        return KvCache(jnp.zeros(shape, self.precision.compute), jnp.zeros(shape, self.precision.compute))

    def decode(self, ids: jax.Array, cache: KvCache, position: jax.Array) -> tuple[jax.Array, KvCache]:
        """Returns the scores of the token after `ids` `[b]`, `[b v]`, and the cache with it.

        Args:
            ids: the newest token of each text.
            cache: of the tokens before it; see `empty_cache`.
            position: scalar, tokens before it.
        """
        rotation = self._rotation(jnp.broadcast_to(position, (ids.shape[0], 1)))

        def body(x: jax.Array, layer: Block, index: jax.typing.ArrayLike, item: KvCache) -> tuple[jax.Array, KvCache]:
            return layer.decode(x, rotation, item, position)

        x, cache = self.stack.run(body, self.embedding(ids[:, None]), cache, wrap=no_wrap)
        return self.logits(self.norm(x))[:, 0], cache

    def _rotation(self, positions: jax.Array) -> Rotation:
        config = self.config
        radians = frequencies(config.head_dim, config.rope_theta)
        if config.rope_scaling == "llama3":
            radians = llama3_scaling(
                radians,
                factor=config.rope_factor,
                low=config.rope_low,
                high=config.rope_high,
                original=config.rope_original_sequence,
            )
        return rotation_at(positions, radians)


MODELS: dict[str, type[Decoder]] = {"decoder": Decoder}
