"""Soft gates in place of a clip, and the mask of drifted sequences."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_lm import masked
from jaxrl_lm.algos.surrogate import Level, importance_ratio, segment_mean


def soft_gate_surrogate(
    logprobs: Float[Array, "N T"],
    old_logprobs: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
    level: Level = "token",
    segment_ids: Int[Array, "N T"] | None = None,
    action_ids: Int[Array, "N T"] | None = None,
    log_ratio_clip: float | None = None,
) -> Float[Array, "N T"]:
    """−f(ρ) A at each token with f(ρ) = (4 / τ) σ(τ (ρ − 1)), 0 off the mask.

    τ is temperature_positive where A > 0, else temperature_negative. f'(1) = 1: at ρ = 1 the gradient is the plain
    policy gradient; away from 1 it fades on both sides, for both signs of A. A larger τ fades sooner.
    Source: SAPO (Gao et al., 2025). Departs from it in nothing but the bound of ±20 on the log-ratio.
    Raises ValueError for a temperature of 0 or below.
    """
    for temperature in (temperature_positive, temperature_negative):
        if temperature <= 0:
            raise ValueError(f"temperature={temperature}: a gate's temperature is above 0")
    ratio = importance_ratio(
        logprobs, old_logprobs, mask,
        level=level, segment_ids=segment_ids, action_ids=action_ids, log_ratio_clip=log_ratio_clip,
    )  # fmt: skip
    advantages = masked.select(advantages, mask)
    temperature = jnp.where(advantages > 0, temperature_positive, temperature_negative).astype(ratio.dtype)
    # By its logarithm, whose derivative σ(−x) keeps its digits where 1 − σ(x) has none left.
    gate = 4.0 / temperature * jnp.exp(jax.nn.log_sigmoid(temperature * (ratio - 1.0)))
    return jnp.where(mask, -gate * advantages, 0.0)


def drift_mask(
    logprobs: Float[Array, "N T"],
    sampler_logprobs: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    limit: float,
    segment_ids: Int[Array, "N T"] | None = None,
) -> Bool[Array, "N T"]:
    """The mask without the tokens of A < 0 of drifted sequences; no gradient.

    A sequence has drifted when mean_t (l_sampler_t − l_t) > limit nats. Tokens of A ≥ 0 always stay.
    Select the loss with it and keep the weights: the denominators count masked tokens too, as in the paper.
    Source: off-policy sequence masking, DeepSeek-V3.2 (2025); TRL's `off_policy_mask_threshold`.
    Departs from it where advantages differ within a sequence: the sign is each token's own.
    """
    gap = masked.select(sampler_logprobs, mask) - masked.select(logprobs, mask)
    drift = jax.lax.stop_gradient(segment_mean(gap, mask, segment_ids))
    # Asked this way round, a NaN drift takes its sequence out.
    return mask & ((masked.select(advantages, mask) >= 0) | (drift <= limit))
