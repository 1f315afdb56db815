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
