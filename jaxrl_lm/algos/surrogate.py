"""Ratios of policies and the clipped surrogates: per-token losses [N T] to minimise, before any reduction.

Soft gates and masks of drifted sequences -> `gates.py`; weights against the sampler -> `corrections.py`.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_lm import masked
from jaxrl_lm.algos import actions

Level = Literal["token", "sequence", "sequence-token", "sequence-sum", "action"]

MAX_LOG_RATIO = 20.0  # exp of it is about 5e8: past any clip, and finite in value and gradient


def bounded_exp(x: Shaped[Array, "*s"]) -> Shaped[Array, "*s"]:
    """exp(x) with x bounded to ±20: beyond, the value is constant and the gradient 0, never infinite or NaN."""
    return jnp.exp(jnp.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def segment_sum(
    x: Shaped[Array, "N T"], mask: Bool[Array, "N T"], segment_ids: Int[Array, "N T"] | None
) -> Shaped[Array, "N T"]:
    """At each token, the sum of x over the mask of its sequence: its row, or its segment of a packed row."""
    if segment_ids is None:
        return jnp.broadcast_to(masked.sum(x, mask, 1, True), x.shape)
    return actions.action_sum(x, mask, segment_ids)


def segment_mean(
    x: Shaped[Array, "N T"], mask: Bool[Array, "N T"], segment_ids: Int[Array, "N T"] | None
) -> Shaped[Array, "N T"]:
    """At each token, the mean of x over the mask of its sequence: its row, or its segment of a packed row."""
    size = segment_sum(mask.astype(jnp.float32), mask, segment_ids)
    return segment_sum(x, mask, segment_ids) / jnp.maximum(size, 1.0)


def importance_ratio(
    logprobs: Float[Array, "N T"],
    old_logprobs: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    level: Level = "token",
    segment_ids: Int[Array, "N T"] | None = None,
    action_ids: Int[Array, "N T"] | None = None,
    log_ratio_clip: float | None = None,
) -> Float[Array, "N T"]:
    """pi / pi_old at each token, 1 off the mask.

    With g_t = l_t − l_old_t. token: exp(g_t) (PPO, Schulman et al., 2017). sequence: exp(mean_t g_t) at every token of
    the sequence (GSPO, Zheng et al., 2025, eq. 7). sequence-token: that value with token t's own gradient,
    sg[s] · exp(l_t − sg[l_t]) (GSPO-token, eq. 14). sequence-sum: exp(Σ_t g_t), the ratio of whole completions (RLOO,
    Ahmadian et al., 2024). action: exp of the sum over the token's action; ids that count the tokens give the level
    "token", bit for bit (MA-RLHF, Chai et al., 2024).

    Departs from the papers: the log-ratio is bounded to ±20, beyond which the ratio is constant and its gradient 0.
    `log_ratio_clip` bounds each token's g_t first, before any sum or mean; a bounded token has no gradient.
    Raises ValueError for an unknown level, level="action" without action_ids, or a log_ratio_clip of 0 or below.
    """
    gap = masked.select(logprobs, mask) - masked.select(old_logprobs, mask)
    if log_ratio_clip is not None:
        if log_ratio_clip <= 0:
            raise ValueError(f"log_ratio_clip={log_ratio_clip}: the bound of a token's log-ratio is above 0")
        gap = jnp.clip(gap, -log_ratio_clip, log_ratio_clip)
    if level == "sequence":
        gap = segment_mean(gap, mask, segment_ids)
    elif level == "sequence-token":
        gap = jax.lax.stop_gradient(segment_mean(gap, mask, segment_ids) - gap) + gap
    elif level == "sequence-sum":
        gap = segment_sum(gap, mask, segment_ids)
    elif level == "action":
        if action_ids is None:
            raise ValueError("level='action' needs action_ids: tokens that share an id are one action")
        gap = actions.action_sum(gap, mask, action_ids, segment_ids)
    elif level != "token":
        raise ValueError(f"level={level!r} is unknown: use token, sequence or sequence-token, sequence-sum, action")
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
    action_ids: Int[Array, "N T"] | None = None,
    log_ratio_clip: float | None = None,
) -> Float[Array, "N T"]:
    """−min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A) at each token, 0 off the mask.

    dual_clip c > 1 bounds the loss of negative advantages: max(·, c A) in the objective (Ye et al., 2020).
    delta bounds ρ itself before the unclipped term: min(ρ, delta) (INTELLECT-2, 2025).
    Source: PPO (Schulman et al., 2017), eq. 7; clip_high > clip_low is DAPO's clip-higher (Yu et al., 2025).
    ρ is `importance_ratio`. At level="action" every token of an action has the action's loss: reduce with weights of
    `token_weights(action_ids=…)`, so that an action counts once.
    """
    ratio = importance_ratio(
        logprobs, old_logprobs, mask,
        level=level, segment_ids=segment_ids, action_ids=action_ids, log_ratio_clip=log_ratio_clip,
    )  # fmt: skip
    advantages = masked.select(advantages, mask)
    free = ratio if delta is None else jnp.minimum(ratio, delta)
    objective = jnp.minimum(free * advantages, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages)
    if dual_clip is not None:
        objective = jnp.where(advantages < 0, jnp.maximum(objective, dual_clip * advantages), objective)
    return jnp.where(mask, -objective, 0.0)


def clipped_weight_surrogate(
    logprobs: Float[Array, "N T"],
    old_logprobs: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    clip_low: float | None,
    clip_high: float | None,
    level: Level = "token",
    segment_ids: Int[Array, "N T"] | None = None,
    action_ids: Int[Array, "N T"] | None = None,
    log_ratio_clip: float | None = None,
) -> Float[Array, "N T"]:
    """−sg[clip(ρ, 1 − clip_low, 1 + clip_high)] A log pi at each token, 0 off the mask; None is no bound on that side.

    A policy gradient with a clipped weight: clipping bounds a token's gradient and never removes it, and at every level
    the gradient goes to the token's own log-prob. Only the gradient means something, the value does not.
    Source: CISPO (MiniMax-M1, 2025), eq. 4 and 5; the paper bounds above only: clip_low=None.
    Departs from it in nothing but the bound of ±20 on the log-ratio.
    """
    ratio = importance_ratio(
        logprobs, old_logprobs, mask,
        level=level, segment_ids=segment_ids, action_ids=action_ids, log_ratio_clip=log_ratio_clip,
    )  # fmt: skip
    low = None if clip_low is None else 1.0 - clip_low
    high = None if clip_high is None else 1.0 + clip_high
    weight = jax.lax.stop_gradient(jnp.clip(ratio, low, high))
    whole = {"action_ids": action_ids, "segment_ids": segment_ids} if level == "action" else {}
    return weight * policy_gradient(logprobs, advantages, mask, **whole)


def policy_gradient(
    logprobs: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    action_ids: Int[Array, "N T"] | None = None,
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """−A log pi at each token, 0 off the mask: its gradient is the policy gradient of the policy that sampled.

    With action_ids, log pi is that of the token's action, the sum over its tokens, at each of them.

    Source: REINFORCE (Williams, 1992); GPG (Chu et al., 2025) is this with a group baseline and no clip. No ratio: a
    second update on the same batch is biased.
    """
    return -masked.select(advantages, mask) * actions.action_sum(logprobs, mask, action_ids, segment_ids)


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
