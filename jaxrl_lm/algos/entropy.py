"""Entropy: what makes it fall, which tokens to hold back or to train, and how strong the bonus should be.

The entropy itself is in `Scores`; a bonus is −coefficient · entropy among the terms of a loss. What is taken "of the
batch" here is of the arrays that are given: call it on the whole batch, before it is cut into microbatches.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Shaped

from jaxrl_lm import masked

Scalar = Shaped[Array, ""] | float


def covariance(
    logprobs: Float[Array, "N T"], advantages: Float[Array, "N T"], mask: Bool[Array, "N T"]
) -> Float[Array, "N T"]:
    """(log pi − mean log pi)(A − mean A) at each token, means over the batch's mask; 0 off the mask, no gradient.

    Its mean over the mask is the covariance: under z ← z + η A the entropy of softmax(z) changes by −η Cov(log pi, A).
    Source: The entropy mechanism (Cui et al., 2025), the token-wise covariance of Clip-Cov and KL-Cov.
    """
    return jax.lax.stop_gradient(masked.centre(logprobs, mask) * masked.centre(advantages, mask))


def share_of(count: Shaped[Array, ""], share: float) -> Shaped[Array, ""]:
    """⌈share · count⌉ as an integer, without the token too many that float32's rounding would give."""
    if not 0 <= share <= 1:
        raise ValueError(f"share={share}: a share of the tokens is between 0 and 1")
    product = share * count.astype(jnp.float32)
    return jnp.ceil(product * (1.0 - 1e-6)).astype(jnp.int32)


def largest(x: Float[Array, "N T"], mask: Bool[Array, "N T"], number: Shaped[Array, ""]) -> Bool[Array, "N T"]:
    """True at the `number` largest x under the mask, or at all of them; the first of equals wins."""
    order = jnp.argsort(jnp.where(mask, -x, jnp.inf).reshape(-1), stable=True)
    # A value under the mask may itself be infinite, so that the mask is asked again.
    order = order[jnp.argsort(~mask.reshape(-1)[order], stable=True)]
    chosen = jnp.zeros(x.size, bool).at[order].set(jnp.arange(x.size) < number)
    return chosen.reshape(x.shape) & mask


def clip_cov_mask(
    logprobs: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    key: Key[Array, ""],
    *,
    low: float,
    high: float,
    share: float,
) -> Bool[Array, "N T"]:
    """True at tokens whose gradient is to be detached: a random ⌈share · tokens⌉ of those with covariance in [low, high].

    Fewer where fewer lie in the range. The share is of all tokens under the mask, not of those in the range.
    Source: Clip-Cov (Cui et al., 2025); verl's clip_cov_lb = 1, clip_cov_ub = 5, clip_cov_ratio = 0.0002.
    Departs from verl: bounds included, the share rounded up, and tokens that a ratio clip has stopped are not left out.
    Raises ValueError for low > high, or a share outside [0, 1].
    """
    if low > high:
        raise ValueError(f"low={low}, high={high}: the range of covariances is empty")
    value = covariance(logprobs, advantages, mask)
    eligible = mask & (value >= low) & (value <= high)
    return largest(jax.random.uniform(key, mask.shape), eligible, share_of(mask.sum(), share))


def kl_cov_mask(
    logprobs: Float[Array, "N T"], advantages: Float[Array, "N T"], mask: Bool[Array, "N T"], *, share: float
) -> Bool[Array, "N T"]:
    """True at the ⌈share · tokens⌉ tokens of the largest covariance, which get a KL term to the old policy.

    Source: KL-Cov (Cui et al., 2025); verl's kl_cov_ratio = 0.0002. Departs from verl: the share is rounded up.
    Raises ValueError for a share outside [0, 1].
    """
    return largest(covariance(logprobs, advantages, mask), mask, share_of(mask.sum(), share))


def top_entropy_mask(entropy: Float[Array, "N T"], mask: Bool[Array, "N T"], *, share: float) -> Bool[Array, "N T"]:
    """True at the ⌈share · tokens⌉ tokens of the highest entropy of the batch; the first of equals wins.

    Source: Beyond the 80/20 rule (Wang et al., 2025), share 0.2; TRL's `top_entropy_quantile`.
    Departs from TRL, which keeps all tokens at or above the quantile: here the number is exact.
    Raises ValueError for a share outside [0, 1].
    """
    return largest(jax.lax.stop_gradient(masked.select(entropy, mask)), mask, share_of(mask.sum(), share))


def adaptive_entropy_coefficient(
    coefficient: Scalar, observed: Scalar, *, target: float, step: float, maximum: float
) -> tuple[Shaped[Array, ""], Shaped[Array, ""]]:
    """(the next coefficient, the one to use now): + step below the target entropy, − step above it, within [0, maximum].

    The bonus is on only while the observed entropy is at or below the target: above it, the one to use now is 0.
    Source: Skywork-OR1 (He et al., 2025), adaptive entropy control; TRL's `use_adaptive_entropy`, `entropy_coef_delta`.
    Departs from it: exactly at the target the coefficient stays. Raises ValueError for a negative step or maximum.
    """
    if step < 0 or maximum < 0:
        raise ValueError(f"step={step}, maximum={maximum}: neither may be negative")
    coefficient, observed = jnp.asarray(coefficient, jnp.float32), jnp.asarray(observed, jnp.float32)
    moved = jnp.clip(coefficient + step * jnp.sign(target - observed), 0.0, maximum)
    return moved, jnp.where(observed <= target, coefficient, 0.0)
