"""Ratios of policies and the clipped surrogate: per-token losses [N T] to minimise, before any reduction."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_lm import masked

Level = Literal["token", "sequence", "sequence-token"]

MAX_LOG_RATIO = 20.0  # exp of it is about 5e8: past any clip, and finite in value and gradient


def bounded_exp(x: Shaped[Array, "*s"]) -> Shaped[Array, "*s"]:
    """exp(x) with x bounded to ±20: beyond, the value is constant and the gradient 0, never infinite or NaN."""
    return jnp.exp(jnp.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def segment_mean(
    x: Shaped[Array, "N T"], mask: Bool[Array, "N T"], segment_ids: Int[Array, "N T"] | None
) -> Shaped[Array, "N T"]:
    """At each token, the mean of x over the mask of its sequence: its row, or its segment of a packed row."""
    if segment_ids is None:
        return jnp.broadcast_to(masked.mean(x, mask, 1, True), x.shape)
    together = (segment_ids[:, :, None] == segment_ids[:, None, :]) & mask[:, None, :]
    total = jnp.sum(jnp.where(together, masked.select(x, mask)[:, None, :], 0.0), axis=2)
    return total / jnp.maximum(together.sum(2), 1)


def importance_ratio(
    logprobs: Float[Array, "N T"],
    old_logprobs: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    level: Level = "token",
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """pi / pi_old at each token, 1 off the mask.

    token: exp(l_t − l_old_t) (PPO, Schulman et al., 2017). sequence: exp(mean_t (l_t − l_old_t)) at every token of the
    sequence (GSPO, Zheng et al., 2025, eq. 7). sequence-token: that value with token t's own gradient,
    sg[s] · exp(l_t − sg[l_t]) (GSPO-token, eq. 14).

    Departs from the papers: the log-ratio is bounded to ±20, beyond which the ratio is constant and its gradient 0.
    """
    gap = masked.select(logprobs, mask) - masked.select(old_logprobs, mask)
    if level != "token":
        mean = segment_mean(gap, mask, segment_ids)
        if level == "sequence-token":
            gap = jax.lax.stop_gradient(mean - gap) + gap
        elif level == "sequence":
            gap = mean
        else:
            raise ValueError(f"level={level!r} is unknown: use token, sequence or sequence-token")
    return jnp.where(mask, bounded_exp(gap), 1.0)


def clipped_surrogate(
    logprobs: Float[Array, "N T"],
    old_logprobs: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    delta: float | None = None,
    level: Level = "token",
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """−min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A) at each token, 0 off the mask.

    dual_clip c > 1 bounds the loss of negative advantages: max(·, c A) in the objective (Ye et al., 2020).
    delta bounds ρ itself before the unclipped term: min(ρ, delta) (INTELLECT-2, 2025).
    Source: PPO (Schulman et al., 2017), eq. 7; clip_high > clip_low is DAPO's clip-higher (Yu et al., 2025).
    """
    ratio = importance_ratio(logprobs, old_logprobs, mask, level=level, segment_ids=segment_ids)
    advantages = masked.select(advantages, mask)
    free = ratio if delta is None else jnp.minimum(ratio, delta)
    objective = jnp.minimum(free * advantages, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages)
    if dual_clip is not None:
        objective = jnp.where(advantages < 0, jnp.maximum(objective, dual_clip * advantages), objective)
    return jnp.where(mask, -objective, 0.0)


def clip_metrics(
    ratio: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Bool[Array, "N T"]]:
    """Where a clip decides: below (A < 0, ρ < 1 − low), above (A > 0, ρ > 1 + high), either."""
    low = mask & (masked.select(advantages, mask) < 0) & (ratio < 1.0 - clip_low)
    high = mask & (masked.select(advantages, mask) > 0) & (ratio > 1.0 + clip_high)
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
