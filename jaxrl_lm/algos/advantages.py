"""Advantages of whole completions within the group of one prompt. N rows, a group's rows adjacent."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from jaxrl_lm import masked


def group_advantages(
    returns: Shaped[Array, "N"],
    *,
    group_size: int,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    valid: Bool[Array, "N"] | None = None,
) -> Shaped[Array, "N"]:
    """Return minus its group's mean, over a standard deviation.

    A_i = (r_i − mean_group r) / (std r + eps), the std over the group, over the batch, or none (Dr. GRPO).

    A group without spread gets 0. Rows that are not valid (the reward abstained) leave mean and std, and get 0.
    Source: DeepSeekMath (Shao et al., 2024), eq. for outcome supervision; `scale="none"`: Dr. GRPO (Liu et al., 2025).
    The std is the unbiased one, as in TRL and verl; the paper does not say.

    Raises ValueError if group_size is below 2 or does not divide N.
    """
    rows = returns.shape[0]
    if group_size < 2:
        raise ValueError(f"group_size={group_size}: a group needs at least two completions of its prompt")
    if rows % group_size:
        raise ValueError(f"{rows} rows are not a multiple of group_size={group_size}")
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale={scale!r} is unknown: use group, batch or none")
    mask = jnp.ones(returns.shape, bool) if valid is None else valid
    grouped, inside = returns.reshape(-1, group_size), mask.reshape(-1, group_size)
    # Equality of the raw values decides about zero spread: a rounded mean would leave noise to be divided by eps. Asked
    # this way round, a NaN among the returns has spread, and shows.
    low, high = masked.select(grouped, inside, jnp.inf).min(1), masked.select(grouped, inside, -jnp.inf).max(1)
    spread = (inside & ~(high <= low)[:, None]).reshape(-1)
    centred = jnp.where(spread, masked.centre(grouped, inside, 1).reshape(-1), 0.0)
    if scale == "none":
        return centred
    if scale == "batch":
        below = jnp.broadcast_to(masked.std(returns, mask, ddof=ddof), returns.shape)
    else:
        below = jnp.repeat(masked.std(grouped, inside, axis=1, ddof=ddof), group_size)
    return jnp.where(spread, centred / (below + eps), 0.0)
