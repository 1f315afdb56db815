"""The critic's loss, and how much of the returns it explains."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jaxrl_lm import masked


def value_loss(
    values: Float[Array, "N T"],
    old_values: Float[Array, "N T"],
    returns: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    clip: float | None = None,
) -> Float[Array, "N T"]:
    """½ max((v − R)², (clip(v, v_old − clip, v_old + clip) − R)²) at each token, ½ (v − R)² without clip; 0 off the mask.

    Source: OpenAI baselines' ppo2 (Dhariwal et al., 2017), which PPO's paper does not have; TRL, verl: cliprange_value.
    """
    value, target = masked.select(values, mask), masked.select(returns, mask)
    loss = jnp.square(value - target)
    if clip is not None:
        old = masked.select(old_values, mask)
        loss = jnp.maximum(loss, jnp.square(jnp.clip(value, old - clip, old + clip) - target))
    return masked.select(0.5 * loss, mask)


def explained_variance(
    values: Shaped[Array, "N T"], returns: Shaped[Array, "N T"], mask: Bool[Array, "N T"]
) -> Float[Array, ""]:
    """1 − Var(R − V) / Var(R) over the mask; 0 where Var(R) is 0. 1 is a perfect critic, 0 one that knows the mean."""
    target = masked.select(returns, mask)
    error = masked.std(target - masked.select(values, mask), mask, ddof=0)
    std = masked.std(target, mask, ddof=0)
    some = jnp.squeeze(masked.has_spread(target, mask)) & (std != 0)
    return jnp.where(some, 1.0 - jnp.square(error / jnp.where(some, std, 1.0)), 0.0)


class VarianceSums(NamedTuple):
    """Sums that add over microbatches and devices, see `explained_variance_sums`."""

    count: Float[Array, ""]
    returns: Float[Array, ""]
    squared_returns: Float[Array, ""]
    errors: Float[Array, ""]
    squared_errors: Float[Array, ""]


def explained_variance_sums(
    values: Shaped[Array, "N T"], returns: Shaped[Array, "N T"], mask: Bool[Array, "N T"]
) -> VarianceSums:
    """What `explained_variance` of a batch in parts needs: add the sums of the parts, then `explained_variance_of`."""
    target = masked.select(returns, mask)
    error = target - masked.select(values, mask)
    total = lambda x: jnp.sum(masked.select(x, mask))
    return VarianceSums(total(mask), total(target), total(target**2), total(error), total(error**2))


def explained_variance_of(sums: VarianceSums) -> Float[Array, ""]:
    """1 − Var(R − V) / Var(R) from sums; 0 where Var(R) is within rounding of 0.

    A mean far larger than the spread of the returns costs precision here, and none in `explained_variance`.
    """
    count = jnp.maximum(sums.count, 1.0)
    variance = lambda total, squares: jnp.maximum(squares / count - jnp.square(total / count), 0.0)
    whole = variance(sums.returns, sums.squared_returns)
    some = whole > 8 * jnp.finfo(whole.dtype).eps * sums.squared_returns / count
    left = variance(sums.errors, sums.squared_errors)
    return jnp.where(some, 1.0 - left / jnp.where(some, whole, 1.0), 0.0)
