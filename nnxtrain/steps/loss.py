"""Cross-entropy in nats, summed over targets, never averaged here."""

import math
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.nn.dropout import Dropout, KeepAll, RowDropout
from nnxtrain.types import Batch, LossParts, LossSum, LossTerm, LossTerms, Pick, Spread


class LanguageModel(Protocol):
    """What a loss needs of a model."""

    def hidden(self, batch: Batch, drop: Dropout) -> tuple[jax.Array, LossTerms]:
        """Maps a batch to activations `[b s d]`; returns the terms that layers add to the loss, too."""
        ...

    def scorer(self) -> nnx.Module:
        """Returns the module that maps activations `[b s d]` to scores `[b s v]`, float32."""
        ...


def make_loss_sum(*, z_loss: float, dropout: float, chunks: int, spread: Spread, pick: Pick) -> LossSum:
    """Returns the loss of a microbatch.

    Args:
        z_loss: weight of the mean squared log-normaliser (Chowdhery et al. 2022, arXiv:2204.02311, section 5).
        dropout: probability that an activation is dropped.
        chunks: pieces the sequence is cut into; scores exist for one piece at a time, forward and backward.
        spread: lets each device score its own rows, so that gradients of the head are added over devices once.
        pick: finds the scores of the targets.
    """

    def loss_sum(model: LanguageModel, microbatch: Batch, key: jax.Array) -> tuple[jax.Array, LossParts]:
        drop = RowDropout.of_rows(dropout, key, microbatch["rows"]) if dropout else KeepAll()
        hidden, terms = model.hidden(microbatch, drop)
        graph, head = nnx.split(model.scorer())

        def sums_of(head: nnx.State, whole: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            pieces = math.gcd(chunks, whole[0].shape[1])  # a device may hold a part of the sequence

            def piece(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
                hidden, targets, mask = chunk
                return token_sums(nnx.merge(graph, head)(hidden), targets, mask, pick)

            if pieces == 1:
                return piece(whole)
            cut = jax.tree.map(lambda leaf: _cut(leaf, pieces), whole)
            return jax.tree.map(jnp.sum, jax.lax.map(jax.checkpoint(piece), cut))

        whole = (hidden, microbatch["targets"], microbatch["mask"])
        cross_entropy, square = spread(sums_of)(head, whole)
        targets = jnp.sum(microbatch["mask"], dtype=jnp.float32)
        tokens = jnp.sum(microbatch["segment_ids"] != 0, dtype=jnp.float32)  # one type for all sums: one exchange
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
        pick: finds the scores of the targets.
    """
    normaliser = jax.nn.logsumexp(scores, axis=-1)
    cross_entropy = jnp.sum(jnp.where(mask, normaliser - pick(scores, targets), 0))
    return cross_entropy, jnp.sum(jnp.where(mask, jnp.square(normaliser), 0))


def _cut(leaf: jax.Array, chunks: int) -> jax.Array:
    """Turns `[b s ...]` into `[chunks b s/chunks ...]`."""
    rows, sequence, *rest = leaf.shape
    return leaf.reshape(rows, chunks, sequence // chunks, *rest).swapaxes(0, 1)
