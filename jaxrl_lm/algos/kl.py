"""Estimates of KL(pi ‖ ref) from samples of pi, a value a token (Schulman, 2020, "Approximating KL divergence").

What to do with them: in the reward or in the loss (`kl_estimate`), with a fixed or an adaptive coefficient, and how far
an update went (`mean_and_max_kl`).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jaxrl_lm import masked
from jaxrl_lm.algos.surrogate import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3", "k1+", "k3+"]


def kl_estimate(
    logprobs: Float[Array, "N T"],
    ref_logprobs: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    estimator: Estimator = "k3",
) -> Float[Array, "N T"]:
    """KL at each token with g = log pi − log ref; 0 off the mask.

    k1 = g (unbiased; in the reward its gradient is that of the KL, as a loss it is 0 on average). k2 = g²/2 (biased; its
    gradient is that of KL(pi ‖ ref), for one action). k3 = e^−g + g − 1 (unbiased, ≥ 0; as a loss its gradient is that
    of KL(ref ‖ pi)). A "+" keeps that value and takes k2's gradient.

    What each placement optimises, with β in front. k1 in the reward: E r − β KL(pi ‖ ref), for whole sequences too, with
    to-go or whole-sequence sums alike. k2, k1+ or k3+ as a loss: the same for one action; for sequences each token's term
    leaves out what that token does to the KL of later tokens, so that another policy is reached. k3 as a loss: for one
    action E r − β KL(ref ‖ pi). k1 as a loss: nothing, its mean gradient is 0.

    Departs from the source: for g < −20 k3 goes on along its tangent, so that a gap of 100 nats leaves value and
    gradient finite (k3 e^20 ≈ 5e8 there, and the gradient's size stays at that of the bound).
    Raises ValueError for an unknown estimator.
    """
    gap = masked.select(logprobs, mask) - masked.select(ref_logprobs, mask)
    k2 = 0.5 * gap * gap
    if estimator in ("k1", "k1+"):
        value = gap
    elif estimator == "k2":
        value = k2
    elif estimator in ("k3", "k3+"):
        bounded = jnp.clip(-gap, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        beyond = jnp.maximum(-gap - MAX_LOG_RATIO, 0.0)
        # expm1 keeps the small gaps, where exp(x) − 1 − x would be rounding noise.
        exponential = jnp.expm1(bounded) + beyond * jnp.exp(jnp.asarray(MAX_LOG_RATIO, gap.dtype))
        value = exponential + gap
    else:
        raise ValueError(f"estimator={estimator!r} is unknown: use k1, k2, k3, k1+ or k3+")
    if estimator.endswith("+"):
        value = k2 + jax.lax.stop_gradient(value - k2)
    return jnp.where(mask, value, 0.0)


def mean_and_max_kl(
    logprobs: Float[Array, "N T"], old_logprobs: Float[Array, "N T"], mask: Bool[Array, "N T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """KL(old ‖ current): its mean over tokens, and the largest mean of a row; 0 for an empty mask, no gradient.

    By k3 at tokens that the old policy sampled: ρ − 1 − log ρ with ρ = pi / pi_old, unbiased and never negative. A clip
    is not a bound: this says how far an update went. Source: Schulman, 2020 (`approx_kl`).
    """
    values = jax.lax.stop_gradient(kl_estimate(old_logprobs, logprobs, mask, estimator="k3"))
    return masked.mean(values, mask), jnp.max(masked.mean(values, mask, axis=1))


def adaptive_coefficient(
    coefficient: Shaped[Array, ""] | float,
    observed: Shaped[Array, ""] | float,
    *,
    target: float,
    horizon: float | int,
    steps: float | int,
) -> Shaped[Array, ""]:
    """The next KL coefficient: β (1 + e · steps / horizon) with e = clip(KL / target − 1, −0.2, 0.2).

    `steps` is what passed since the last call and `horizon` is in the same unit (completions in TRL and verl).
    Source: Ziegler et al., 2019, section 2.2, where steps / horizon is the constant 0.1.
    Raises ValueError for a target or horizon of 0 or below, or where a coefficient could turn negative.
    """
    if target <= 0 or horizon <= 0 or not 0 <= 0.2 * steps <= horizon:
        raise ValueError(
            f"target={target}, horizon={horizon}, steps={steps}: need target > 0, horizon > 0 and steps <= 5 · horizon"
        )
    observed = jnp.asarray(observed, jnp.float32)
    error = jnp.clip(observed / target - 1.0, -0.2, 0.2)
    return jnp.asarray(coefficient, jnp.float32) * (1.0 + error * (steps / horizon))
