"""Cross-entropy in nats, summed over targets; the step divides once."""

import math
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.nn.dropout import Dropout, KeepAll, RowDropout
from nnxtrain.types import Batch, LossParts, LossSum, LossTerm, LossTerms, Pick, Spread


class LanguageModel(Protocol):
    """What a loss needs from a model."""

    def hidden(self, batch: Batch, drop: Dropout) -> tuple[jax.Array, LossTerms]:
        """Returns the activations `[b s d]` of a batch, and the loss terms of the layers."""
        ...

    def scorer(self) -> nnx.Module:
        """Returns the module that maps activations `[b s d]` to scores `[b s v]`, float32."""
        ...


def make_loss_sum(*, z_loss: float, dropout: float, chunks: int, spread: Spread, pick: Pick) -> LossSum:
    """Returns the loss of a microbatch.

    Args:
        z_loss: weight of the mean squared log-normaliser (Chowdhery et al. 2022, arXiv:2204.02311, section 5).
        dropout: probability that an activation is dropped.
        chunks: pieces that the sequence is split into; only one has its scores in memory, forward and backward.
        spread: runs a function per device on its rows, so that gradients of the head are reduced over devices once.
        pick: gathers the scores of the targets.
    """

    def loss_sum(model: LanguageModel, microbatch: Batch, key: jax.Array) -> tuple[jax.Array, LossParts]:
        drop = RowDropout.of_rows(dropout, key, microbatch["rows"]) if dropout else KeepAll()
        hidden, terms = model.hidden(microbatch, drop)
        graph, head = nnx.split(model.scorer())

        def sums_of(head: nnx.State, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            n_chunks = math.gcd(chunks, inputs[0].shape[1])  # a device may have a shard of the sequence

            def chunk_sums(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
                hidden, targets, mask = chunk
                return token_sums(nnx.merge(graph, head)(hidden), targets, mask, pick)

            if n_chunks == 1:
                return chunk_sums(inputs)
            split = jax.tree.map(lambda leaf: _split_sequence(leaf, n_chunks), inputs)
            return jax.tree.map(jnp.sum, jax.lax.map(jax.checkpoint(chunk_sums), split))

        inputs = (hidden, microbatch["targets"], microbatch["mask"])
        cross_entropy, square = spread(sums_of)(head, inputs)
        targets = jnp.sum(microbatch["mask"], dtype=jnp.float32)
        tokens = jnp.sum(microbatch["segment_ids"] != 0, dtype=jnp.float32)  # one dtype for all sums: one all-reduce
        if z_loss:
            terms = terms | {"z_loss": LossTerm(z_loss * square, z_loss * square, targets)}
        sums = {"loss": (cross_entropy, targets)} | {
            name: (term.total, term.denominator) for name, term in terms.items()
        }
        objective = sum((term.objective for term in terms.values()), cross_entropy)
        return objective, LossParts(targets, tokens, sums)

    return loss_sum


@jax.named_scope("loss")
def token_sums(scores: jax.Array, targets: jax.Array, mask: jax.Array, pick: Pick) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of cross-entropy and of the squared log-normaliser over the targets.

    Args:
        scores: `[b s v]` float32.
        targets: `[b s]` ids.
        mask: `[b s]`, true where a target counts.
        pick: gathers the scores of the targets.
    """
    normaliser = jax.nn.logsumexp(scores, axis=-1)
    cross_entropy = jnp.sum(jnp.where(mask, normaliser - pick(scores, targets), 0))
    return cross_entropy, jnp.sum(jnp.where(mask, jnp.square(normaliser), 0))


def _split_sequence(leaf: jax.Array, chunks: int) -> jax.Array:
    """Reshapes `[b s ...]` to `[chunks b s/chunks ...]`."""
    rows, sequence, *rest = leaf.shape
    return leaf.reshape(rows, chunks, sequence // chunks, *rest).swapaxes(0, 1)
