"""Rewards made of lengths and probabilities, to be added to returns or put in their place before the advantages."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_lm import masked
from jaxrl_lm.algos.groups import Valid, as_groups


def overlong_penalty(lengths: Int[Array, "N"], *, max_length: int, cache: int) -> Float[Array, "N"]:
    """A penalty that falls from 0 at max_length − cache tokens to −1 at max_length, to be added to the return.

    min(0, max(−1, (max_length − cache − length) / cache)).
    Source: DAPO (Yu et al., 2025), eq. 13, soft overlong punishment. Raises ValueError unless 0 < cache ≤ max_length.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache={cache}: the last tokens of a completion, between 1 and max_length={max_length}")
    return jnp.clip((max_length - cache - lengths).astype(jnp.float32) / cache, -1.0, 0.0)


def length_penalty(
    returns: Shaped[Array, "N"],
    lengths: Int[Array, "N"],
    *,
    group_size: int,
    threshold: float = 0.5,
    valid: Valid = None,
) -> Float[Array, "N"]:
    """A reward for brevity within the group, in [−0.5, 0.5], to be added to the return with a weight.

    λ = 0.5 − (length − min) / (max − min) over the group's valid rows; a right row gets λ, a wrong one min(0, λ). All
    get 0 where the lengths are equal. Source: Kimi k1.5 (Kimi Team, 2025), section 2.3.3.

    Raises ValueError if group_size is below 1 or does not divide N.
    """
    grouped, inside = as_groups(lengths, group_size=group_size, valid=valid)
    right = as_groups(returns, group_size=group_size)[0] >= threshold
    low = masked.select(grouped, inside, jnp.inf).min(1, keepdims=True)
    high = masked.select(grouped, inside, -jnp.inf).max(1, keepdims=True)
    inside = inside & (high > low)
    share = masked.select(grouped - low, inside) / jnp.where(high > low, high - low, 1.0)
    return masked.select(jnp.where(right, 0.5 - share, jnp.minimum(0.0, 0.5 - share)), inside).reshape(-1)


def unlikeliness_rewards(
    returns: Shaped[Array, "N"],
    sequence_logprobs: Shaped[Array, "N"],
    *,
    group_size: int,
    beta: float,
    threshold: float = 0.5,
    valid: Valid = None,
) -> Float[Array, "N"]:
    """Returns with those of right rows lowered the more, the more probable the row: r_i (1 − β (G − rank_i) / G).

    rank 0 is the most probable valid row of the group, G their number; equal log-probs share their mean rank. The
    others keep their return, rows that are not valid get 0.
    Source: "Rewarding the Unlikely" (He, Fried and Welleck, 2025). Departs: ties. Their released code ranks by the mean
    log-prob of a token and takes (G − 1 − rank) / G: which log-probs to give is the caller's choice here.

    Raises ValueError if group_size is below 1 or does not divide N.
    """
    grouped, inside = as_groups(returns, group_size=group_size, valid=valid)
    logprobs = masked.select(as_groups(sequence_logprobs, group_size=group_size)[0], inside)
    pairs = inside[:, None, :] & inside[:, :, None]
    above = (pairs & (logprobs[:, None, :] > logprobs[:, :, None])).sum(2)
    ties = (pairs & (logprobs[:, None, :] == logprobs[:, :, None])).sum(2)  # itself among them
    count = inside.sum(1, keepdims=True)
    share = (count - above - 0.5 * (ties - 1)) / jnp.maximum(count, 1)
    r = masked.select(grouped, inside)
    return jnp.where(inside & (grouped >= threshold), r * (1.0 - beta * share), r).reshape(-1)
