"""Stop-gradient factors [N T] on the advantage of each token; 0 off the mask.

The hook is one product: advantages · scale. `normalise_scale` gives any of them a mean of 1 over each sequence, so that
only the share of credit among its tokens changes; without it the step's size changes as well.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_lm import masked
from jaxrl_lm.algos.surrogate import segment_mean


def constant(x: Float[Array, "N T"], mask: Bool[Array, "N T"]) -> Float[Array, "N T"]:
    """x where the mask holds, 0 elsewhere, without a gradient."""
    return jax.lax.stop_gradient(masked.select(x, mask))


def normalise_scale(
    scale: Float[Array, "N T"], mask: Bool[Array, "N T"], segment_ids: Int[Array, "N T"] | None = None
) -> Float[Array, "N T"]:
    """The scale over its mean: scale_t / mean_t scale over the sequence's mask; 0 off the mask.

    A sequence whose mean is 0 gets 1 at every token. Ours; no paper.
    """
    mean = segment_mean(masked.select(scale, mask), mask, segment_ids)
    usable = mean != 0
    return constant(jnp.where(usable, masked.select(scale, mask) / jnp.where(usable, mean, 1.0), 1.0), mask)


def entropy_shaped_scale(
    entropy: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    alpha: float = 0.4,
    kappa: float = 2.0,
) -> Float[Array, "N T"]:
    """1 + min(α H, |A| / κ) / A, so that scale · A = A + min(α H, |A| / κ); 1 where A = 0.

    Between 1 − 1/κ and 1 + 1/κ; the sign of the advantage stays for κ > 1. Its mean is not 1.
    Source: Reasoning with exploration (Cheng et al., 2025), α = 0.4 and κ = 2. Raises ValueError for κ ≤ 1 or α < 0.
    """
    if alpha < 0 or kappa <= 1:
        raise ValueError(f"alpha={alpha}, kappa={kappa}: need alpha >= 0 and kappa > 1, or advantages change sign")
    advantages, entropy = masked.select(advantages, mask), masked.select(entropy, mask)
    size = jnp.maximum(jnp.abs(advantages), jnp.finfo(advantages.dtype).tiny)
    return constant(1.0 + jnp.sign(advantages) * jnp.minimum(alpha * entropy / size, 1.0 / kappa), mask)


def gtpo_scale(
    entropy: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    group_size: int,
    share: float = 0.1,
    eps: float = 1e-6,
) -> Float[Array, "N T"]:
    """(1 − share) + share · d_t w_nt / Σ_k w_kt over the rows k of the group with A of the same sign at column t.

    w is the entropy H where A > 0 (an uncertain token of a success earns more) and 1 / H where A < 0 (a confident token
    of a failure pays more), d_t the number of these rows: over them the scale has mean 1 at each column. 1 where A = 0.
    Source: GTPO (Tan et al., 2025), the weights of eq. 3 and 5 with share for α2 = 1 − α1.
    Departs from it: the paper shapes rewards and then normalises successes and failures apart; here the weights multiply
    advantages, whose sign stands for success. H is bounded below by eps. A position is a column, so no packed rows.
    Raises ValueError if group_size does not divide N, or share is outside [0, 1].
    """
    rows = mask.shape[0]
    if group_size < 1 or rows % group_size:
        raise ValueError(f"{rows} rows are not a multiple of group_size={group_size}")
    if not 0 <= share <= 1:
        raise ValueError(f"share={share}: the weighted part of an advantage is between 0 and 1")
    entropy, sign = jnp.maximum(masked.select(entropy, mask), eps), jnp.sign(masked.select(advantages, mask))
    scale = jnp.ones_like(entropy)
    for side, weight in ((1.0, entropy), (-1.0, 1.0 / entropy)):
        inside = mask & (sign == side)
        grouped = inside.reshape(-1, group_size, mask.shape[1])
        mean = masked.mean(weight.reshape(grouped.shape), grouped, axis=1)
        relative = weight / jnp.repeat(jnp.maximum(mean, jnp.finfo(mean.dtype).tiny), group_size, axis=0)
        scale = jnp.where(inside, 1.0 - share + share * relative, scale)
    return constant(scale, mask)


def planning_token_scale(
    tokens: Int[Array, "N T"], mask: Bool[Array, "N T"], *, token_ids: Sequence[int], weight: float
) -> Float[Array, "N T"]:
    """`weight` at the tokens whose id is among token_ids, 1 at the others.

    Source: planning tokens of HICRA (Wang et al., 2025). Departs from it: the paper finds them as n-grams of words
    ("strategic grams"); here they are ids, and advantages of both signs are multiplied.
    Raises ValueError for a negative weight.
    """
    if weight < 0:
        raise ValueError(f"weight={weight}: a scale is not negative")
    return constant(jnp.where(jnp.isin(tokens, jnp.asarray(token_ids, tokens.dtype)), float(weight), 1.0), mask)


def low_probability_scale(
    logprobs: Float[Array, "N T"], mask: Bool[Array, "N T"], *, alpha: float
) -> Float[Array, "N T"]:
    """α pi(token) + 1 − α: improbable tokens, whose gradients are the largest, count less.

    Source: Do not let low-probability tokens over-dominate (Yang et al., 2025), advantage reweighting.
    Raises ValueError for α outside [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}: need 0 <= alpha <= 1")
    return constant(alpha * jnp.exp(jnp.minimum(masked.select(logprobs, mask), 0.0)) + (1.0 - alpha), mask)


def critical_kl_weight(
    ref_logprobs: Float[Array, "N T"], mask: Bool[Array, "N T"], *, power: float
) -> Float[Array, "N T"]:
    """pi_ref(token)^power: a factor on the KL of each token, smaller where the reference is unsure.

    Source: Ignore the KL penalty! (Vassoyan et al., 2025), section 4.
    Departs from it: the paper raises the certainty of the reference's distribution, J = 1 − H / log V, to the power; give
    log J in place of ref_logprobs for that. Raises ValueError for a negative power.
    """
    if power < 0:
        raise ValueError(f"power={power}: a negative power would weigh the unsure tokens most")
    return constant(jnp.exp(power * jnp.minimum(masked.select(ref_logprobs, mask), 0.0)), mask)
