"""Estimates of KL(pi ‖ ref) from samples of pi, a value a token (Schulman, 2020, "Approximating KL divergence")."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

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

    Departs from the source: for g < −20 k3 goes on along its tangent, so that a gap of 100 nats leaves value and
    gradient finite (k3 e^20 ≈ 5e8 there, and the gradient's size stays at that of the bound).
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
