"""Rows in groups of one prompt: normalising inside them, which of them teach, how hard their prompts are.

N rows, a group's rows adjacent. `valid[N]` False is a row whose rewards abstained: it leaves every statistic.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jaxrl_lm import masked

Scale = Literal["group", "batch", "none"]
Drop = Literal["none", "all-wrong", "all-right", "equal"]
Valid = Bool[Array, "N"] | None


def check_groups(rows: int, group_size: int, least: int = 1) -> None:
    """Raises ValueError if group_size is below `least` or does not divide the number of rows."""
    if group_size < least:
        words = "two completions" if least == 2 else "one completion"
        raise ValueError(f"group_size={group_size}: a group needs at least {words} of its prompt")
    if rows % group_size:
        raise ValueError(f"{rows} rows are not a multiple of group_size={group_size}")


def as_groups(
    x: Shaped[Array, "N"], *, group_size: int, valid: Valid = None, least: int = 1
) -> tuple[Shaped[Array, "P G"], Bool[Array, "P G"]]:
    """(x, valid) with a row a group. Raises ValueError if group_size is below `least` or does not divide N."""
    check_groups(x.shape[0], group_size, least)
    inside = jnp.ones(x.shape, bool) if valid is None else valid
    return x.reshape(-1, group_size), inside.reshape(-1, group_size)


def normalise(
    x: Shaped[Array, "P M"], inside: Bool[Array, "P M"], *, scale: str, ddof: int = 1, eps: float = 1e-6
) -> Float[Array, "P M"]:
    """Each value minus its row's mean, over a standard deviation: of the row, of all values, or none.

    A row without spread gets 0, and so does what is not inside. Raises ValueError for an unknown scale.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale={scale!r} is unknown: use group, batch or none")
    spread = inside & masked.has_spread(x, inside, 1)
    centred = jnp.where(spread, masked.centre(x, inside, 1), 0.0)
    if scale == "none":
        return centred
    below = masked.std(x, inside, axis=None if scale == "batch" else 1, keepdims=True, ddof=ddof)
    return centred / jnp.where(spread, jnp.broadcast_to(below, x.shape) + eps, 1.0)


def mixed_groups(
    returns: Shaped[Array, "N"], *, group_size: int, valid: Valid = None, drop: Drop = "equal", threshold: float = 0.5
) -> Bool[Array, "N"]:
    """True at the valid rows of the groups that stay, to be used as `valid` from there on.

    `drop` says which groups go: "equal": all valid returns are the same, so that no advantage can come of them;
    "all-wrong": none reaches the threshold; "all-right": all do; "none".
    Source: dynamic sampling of DAPO (Yu et al., 2025), eq. 11, which drops all-wrong and all-right groups; RAFT++ and
    Reinforce-Rej (Xiong et al., 2025) study the two apart. Departs: "equal" asks the raw returns, whatever their kind.

    Raises ValueError if group_size is below 1 or does not divide N, or for an unknown `drop`.
    """
    grouped, inside = as_groups(returns, group_size=group_size, valid=valid)
    right = grouped >= threshold
    stays = {
        "none": lambda: jnp.ones(grouped.shape, bool),
        "all-wrong": lambda: jnp.any(inside & right, axis=1, keepdims=True),
        "all-right": lambda: jnp.any(inside & ~right, axis=1, keepdims=True),
        "equal": lambda: masked.has_spread(grouped, inside, 1),
    }
    if drop not in stays:
        raise ValueError(f"drop={drop!r} is unknown: use {', '.join(stays)}")
    return (inside & stays[drop]()).reshape(-1)


def masked_median(x: Float[Array, "N"], mask: Bool[Array, "N"]) -> Float[Array, ""]:
    """The median of x over the mask; 0 where the mask is empty."""
    ordered, count = jnp.sort(masked.select(x, mask, jnp.inf)), jnp.sum(mask)
    low, high = ordered[jnp.maximum(count - 1, 0) // 2], ordered[count // 2]
    return jnp.where(count > 0, 0.5 * low + 0.5 * high, 0.0)


def outlier_rows(values: Shaped[Array, "N"], *, limit: float, valid: Valid = None) -> Bool[Array, "N"]:
    """True where |x − median| > limit · 1.4826 · MAD over the valid rows; nowhere if the MAD is 0.

    MAD is the median distance from the median, and 1.4826 of it the standard deviation of a normal distribution.
    Source: the Hampel identifier (Hampel, 1974); a limit of 3 is usual. Raises ValueError unless limit is above 0.
    """
    if not limit > 0:
        raise ValueError(f"limit={limit}: a distance above 0, in robust standard deviations")
    mask = jnp.ones(values.shape, bool) if valid is None else valid
    x = masked.select(values, mask)
    distance = jnp.abs(x - masked_median(x, mask))
    mad = masked_median(distance, mask)
    return mask & (mad > 0) & (distance > limit * 1.4826 * mad)
