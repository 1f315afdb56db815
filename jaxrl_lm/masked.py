"""Masked reductions that select and never multiply: NaN or infinity under a mask reaches neither value nor gradient."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped


def select(x: Shaped[Array, "*s"], mask: Bool[Array, "*s"], fill: float = 0.0) -> Float[Array, "*s"]:
    """x where the mask holds, `fill` elsewhere; float32 at least."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.where(mask, x, jnp.asarray(fill, x.dtype))


def sum(x: Shaped[Array, "*s"], mask: Bool[Array, "*s"], axis=None, keepdims: bool = False):
    """Σ x over the mask."""
    return jnp.sum(select(x, mask), axis=axis, keepdims=keepdims)


def mean(x: Shaped[Array, "*s"], mask: Bool[Array, "*s"], axis=None, keepdims: bool = False):
    """Mean of x over the mask; 0 where the mask is empty."""
    count = jnp.sum(mask, axis=axis, keepdims=keepdims)
    return sum(x, mask, axis, keepdims) / jnp.maximum(count, 1)


def centre(x: Shaped[Array, "*s"], mask: Bool[Array, "*s"], axis=None) -> Float[Array, "*s"]:
    """x minus its mean over the mask; 0 elsewhere.

    Centred twice: the mean of large values is rounded to their precision, that of the remainder is not.
    """
    gap = select(x, mask) - mean(x, mask, axis, keepdims=True)
    return select(gap - mean(gap, mask, axis, keepdims=True), mask)


def std(x: Shaped[Array, "*s"], mask: Bool[Array, "*s"], axis=None, keepdims: bool = False, *, ddof: int = 1):
    """Standard deviation over the mask with n − ddof below; 0 where no more than ddof values stand. A large common
    offset costs no precision."""
    count = jnp.sum(mask, axis=axis, keepdims=True)
    gap = centre(x, mask, axis)
    variance = jnp.sum(gap * gap, axis=axis, keepdims=True) / jnp.maximum(count - ddof, 1)
    positive = (count > ddof) & (variance > 0)
    root = jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1.0)), 0.0)
    return root if keepdims else jnp.squeeze(root, axis=axis)


def has_spread(x: Shaped[Array, "*s"], mask: Bool[Array, "*s"], axis=None) -> Bool[Array, "..."]:
    """Whether the values over the mask differ, the reduced axes kept with size 1.

    Equality of the raw values decides: a rounded mean would leave noise to be divided by a small number. A NaN among
    them counts as spread, so that it shows.
    """
    low = jnp.min(select(x, mask, jnp.inf), axis=axis, keepdims=True)
    high = jnp.max(select(x, mask, -jnp.inf), axis=axis, keepdims=True)
    return ~(high <= low)


def whiten(
    x: Shaped[Array, "*s"],
    mask: Bool[Array, "*s"],
    axis=None,
    *,
    eps: float = 1e-8,
    ddof: int = 1,
    shift_mean: bool = True,
) -> Float[Array, "*s"]:
    """(x − mean) / (std + eps) over the mask; 0 elsewhere, and exactly 0 where the values are all equal.

    `shift_mean=False` adds the mean back, as in TRL and verl. Departs from them: eps stands beside the std, not beside
    the variance.
    """
    spread = mask & has_spread(x, mask, axis)
    below = jnp.where(spread, jnp.broadcast_to(std(x, mask, axis, True, ddof=ddof) + eps, x.shape), 1.0)
    white = jnp.where(spread, centre(x, mask, axis), 0.0) / below
    return white if shift_mean else select(white + mean(x, mask, axis, keepdims=True), mask)
