"""What a log-ratio is worth under an f-divergence from the reference, the score that preference losses compare."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_lm.algos.surrogate import MAX_LOG_RATIO

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


def divergence_score(
    log_ratio: Float[Array, "*s"], *, divergence: Divergence = "reverse_kl", alpha: float = 0.5
) -> Float[Array, "*s"]:
    """f′(u) at u = π/π_ref = exp(log_ratio), up to a constant: reward differences are β times differences of it.

    reverse_kl: log u (DPO). forward_kl: 1 − 1/u. js_divergence: log(2u / (1 + u)). alpha_divergence:
    (u^(α−1) − 1) / (α − 1), which is log u at α = 1, forward_kl's at α = 0.

    Source: f-DPO (Wang et al., 2023), theorem 1 and table 1. The names and the form of the last are TRL's; in the paper
    α-divergence has f′ = (1 − u^−α) / α, ours at 1 − α.
    Departs from it: an exponent goes on along its tangent above 20, so that values and gradients stay finite.
    Raises ValueError for an unknown divergence.
    """
    if divergence == "reverse_kl":
        return log_ratio
    if divergence == "forward_kl":
        return -_expm1(-log_ratio)
    if divergence == "js_divergence":
        return math.log(2.0) + jax.nn.log_sigmoid(log_ratio)
    if divergence == "alpha_divergence":
        return log_ratio if alpha == 1.0 else _expm1((alpha - 1.0) * log_ratio) / (alpha - 1.0)
    raise ValueError(f"f_divergence={divergence!r} is unknown: use {', '.join(Divergence.__args__)}")


def _expm1(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """e^x − 1, along its tangent above 20."""
    return jnp.expm1(jnp.minimum(x, MAX_LOG_RATIO)) + jnp.maximum(x - MAX_LOG_RATIO, 0.0) * math.exp(MAX_LOG_RATIO)
