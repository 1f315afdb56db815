"""Weights first: one weight a token from the masks of the global batch, so that a loss is Σ weight · term."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_lm.algos import actions

Over = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def token_weights(
    mask: Bool[Array, "N T"],
    *,
    over: Over = "token-mean",
    length: int | None = None,
    valid: Bool[Array, "N"] | None = None,
    segment_ids: Int[Array, "N T"] | None = None,
    action_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """The weight of each token; 0 off the mask and in rows that are not valid.

    token-mean: 1 / tokens of the batch (DAPO). seq-mean-token-mean: 1 / (sequences · tokens of the sequence) (GRPO).
    seq-mean-token-sum: 1 / sequences. seq-mean-token-sum-norm: 1 / (sequences · length), a constant length (Dr. GRPO).
    With action_ids read action for token: an action is one term, and its weight is spread equally over its tokens. Ids
    that count the tokens change nothing, bit for bit.

    Sequences without a token under the mask do not count. The batch is the global one: compute the weights before it is
    cut into microbatches. Raises ValueError for an unknown name, or a missing length.
    """
    if valid is not None:
        mask = mask & valid[:, None]
    # Counts are whole numbers, exact in float32 up to 16.7 million.
    starts = actions.action_starts(mask, action_ids, segment_ids)
    term = mask.astype(jnp.float32) / jnp.maximum(actions.action_sizes(mask, action_ids, segment_ids), 1.0)
    if over == "token-mean":
        return term / jnp.maximum(starts.sum().astype(jnp.float32), 1.0)
    whole = actions.sequence_ids(mask, segment_ids)
    sequences = jnp.maximum(actions.action_starts(mask, whole).sum().astype(jnp.float32), 1.0)
    if over == "seq-mean-token-mean":
        terms = actions.action_sum(starts.astype(jnp.float32), mask, whole)
        return term / jnp.maximum(terms, 1.0) / sequences
    if over == "seq-mean-token-sum":
        return term / sequences
    if over == "seq-mean-token-sum-norm":
        if length is None or length < 1:
            raise ValueError(f"length={length}: seq-mean-token-sum-norm divides by a constant length of at least 1")
        return term / (sequences * length)
    raise ValueError(f"over={over!r} is unknown: use {', '.join(Over.__args__)}")
