"""Weights first: one weight a token from the masks of the global batch, so that a loss is Σ weight · term."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Over = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def token_weights(
    mask: Bool[Array, "N T"],
    *,
    over: Over = "token-mean",
    length: int | None = None,
    valid: Bool[Array, "N"] | None = None,
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """The weight of each token; 0 off the mask and in rows that are not valid.

    token-mean: 1 / tokens of the batch (DAPO). seq-mean-token-mean: 1 / (sequences · tokens of the sequence) (GRPO).
    seq-mean-token-sum: 1 / sequences. seq-mean-token-sum-norm: 1 / (sequences · length), a constant length (Dr. GRPO).

    Sequences without a token under the mask do not count. The batch is the global one: compute the weights before it is
    cut into microbatches. Raises ValueError for an unknown name, or a missing length.
    """
    if valid is not None:
        mask = mask & valid[:, None]
    one = mask.astype(jnp.float32)
    if over == "token-mean":
        return one / jnp.maximum(one.sum(), 1.0)
    if segment_ids is None:
        size = jnp.broadcast_to(one.sum(1, keepdims=True), one.shape)
    else:
        together = (segment_ids[:, :, None] == segment_ids[:, None, :]) & mask[:, None, :]
        size = together.sum(2).astype(jnp.float32)
    share = one / jnp.maximum(size, 1.0)
    sequences = jnp.maximum(share.sum(), 1.0)
    if over == "seq-mean-token-mean":
        return share / sequences
    if over == "seq-mean-token-sum":
        return one / sequences
    if over == "seq-mean-token-sum-norm":
        if length is None or length < 1:
            raise ValueError(f"length={length}: seq-mean-token-sum-norm divides by a constant length of at least 1")
        return one / (sequences * length)
    raise ValueError(f"over={over!r} is unknown: use {', '.join(Over.__args__)}")
