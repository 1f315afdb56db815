"""Weights for what the sampler's distribution was not: the importance weight of the old policy against the sampler."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_lm import masked
from jaxrl_lm.algos.surrogate import bounded_exp, segment_sum

Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def sampler_correction(
    old_logprobs: Float[Array, "N T"],
    behaviour_logprobs: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    mode: Correction = "token_truncate",
    cap: float | None = 2.0,
    floor: float = 0.0,
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """Stop-gradient weights to multiply the loss with: 1 where the two agree, 0 off the mask.

    ρ = exp(l_old − l_behaviour) at the token, or exp of the sum over the sequence. truncate: clip(ρ, floor, cap).
    mask: ρ where floor ≤ ρ ≤ cap, else 0. cap=None is no cap.

    Source: truncated weights, TIS (Yao et al., 2025): token_truncate; masked weights, IcePop (Ling team, 2025):
    token_mask with floor 0.5 and cap 5. The modes are TRL's `vllm_importance_sampling_mode`.
    Decoupled PPO (Hilton et al., 2022; AReaL, Fu et al., 2025) is token_truncate with cap=None times
    `clipped_surrogate` against the proximal policy, whose log-probs are then `old_logprobs` in both.
    Departs from the sources: the log of ρ is bounded to ±20. Raises ValueError for an unknown mode, or floor > cap.
    """
    if mode not in Correction.__args__:
        raise ValueError(f"mode={mode!r} is unknown: use {', '.join(Correction.__args__)}")
    if cap is not None and not 0 <= floor <= cap:
        raise ValueError(f"floor={floor}, cap={cap}: the bounds of a weight need 0 <= floor <= cap")
    gap = masked.select(old_logprobs, mask) - masked.select(behaviour_logprobs, mask)
    level, action = mode.split("_")
    if level == "sequence":
        gap = segment_sum(gap, mask, segment_ids)
    ratio = bounded_exp(gap)
    if action == "truncate":
        weight = jnp.clip(ratio, floor, cap)
    else:
        within = ratio >= floor if cap is None else (ratio >= floor) & (ratio <= cap)
        weight = jnp.where(within, ratio, 0.0)
    return jax.lax.stop_gradient(jnp.where(mask, weight, 0.0))
