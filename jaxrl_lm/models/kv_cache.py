"""What generation keeps of a layer: keys and values of W rows as they were computed, or rounded to int8.

A rounded cache is never turned back into one of floats: attention multiplies by the int8 numbers as they are, and by the
scales where there is one number a position, in its logits and weights. Who writes and reads it: `decode.py`.

A few channels of the keys are much larger than the others, and the scale of all follows from them. So keys are rotated
before they are rounded, as in QuaRot (Ashkboos et al., 2024), and queries as they are read: products stay what they are,
and what one channel had is spread over all. The rotation is the cosine transform, which exists for every width.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Int32

from jaxrl_lm.models.cache_write import write_columns
from jaxrl_lm.sharding import Plan

DTYPES = (None, "int8")  # what `kv_cache_dtype` may be
LARGEST = 127


class Rounded(NamedTuple):
    """Keys or values as int8; each stands for itself times the scale of its row, head and position."""

    numbers: Int8[Array, "W c _ _"]  # [W c K S] of keys, which are rotated; [W c S K] of values
    scale: Float[Array, "W c 1 S"]  # float32: the largest magnitude of the position's K numbers / 127

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""
        return self.numbers.shape


Keys = Float[Array, "W c K S"] | Rounded
Values = Float[Array, "W c S K"] | Rounded


class Cache(NamedTuple):
    """Keys and values of W rows; column s holds position s, and the first `lengths` columns are filled."""

    layers: tuple[tuple[Keys, Values], ...]
    lengths: Int32[Array, "W"]

    @property
    def columns(self) -> int:
        """How many there are room for."""
        return self.layers[0][0].shape[3]

    @property
    def dtype(self) -> str | None:
        """As `kv_cache_dtype`: None where numbers stand as they were computed."""
        return "int8" if isinstance(self.layers[0][0], Rounded) else None


def rounded(x: Float[Array, "W c _ _"], axis: int) -> Rounded:
    """The nearest int8 multiples, symmetric, with a scale for all numbers along this axis; off by half a scale at most.

    Where a position holds zeros only its scale is 0. What is not finite makes its scale so, and is not finite when read.
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / LARGEST
    numbers = jnp.round(x / jnp.where(scale == 0, 1.0, scale)).astype(jnp.int8)
    return Rounded(numbers, scale.reshape(*x.shape[:2], 1, -1))


def stored(k: Float[Array, "W c K S"], v: Float[Array, "W c S K"], dtype: str | None) -> tuple[Keys, Values]:
    """Keys and values as a cache of this `kv_cache_dtype` holds them. Raises ValueError for a dtype that there is not."""
    if dtype not in DTYPES:
        raise ValueError(f"kv_cache_dtype={dtype!r} is unknown: use int8, or leave it out for the computation's own")
    return (k, v) if dtype is None else (rounded(spread(k, 2), 2), rounded(v, 3))


@functools.cache
def rotation(width: int) -> np.ndarray:
    """The orthonormal cosine transform (DCT-II) of so many numbers: [to, from]."""
    number = np.arange(width)
    found = np.cos(np.pi * number[:, None] * (2 * number[None] + 1) / (2 * width)) * np.sqrt(2 / width)
    found[0] /= np.sqrt(2)
    return found.astype(np.float32)


def spread(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """x rotated along this axis, in float32 whatever its dtype."""
    moved = jnp.moveaxis(x.astype(jnp.float32), axis, -1)
    found = jnp.einsum("...k,jk->...j", moved, rotation(x.shape[axis]), precision=jax.lax.Precision.HIGHEST)
    return jnp.moveaxis(found, -1, axis).astype(x.dtype)


def queries_for(q: Float[Array, "W c g T K"], k: Keys) -> Float[Array, "W c g T K"]:
    """The queries as `dot_keys` takes them."""
    return spread(q, 4) if isinstance(k, Rounded) else q


def column_axes(k: Keys, v: Values) -> tuple:
    """Which axis of each array has a layer's columns, in the shape of (k, v)."""
    return (Rounded(3, 3), Rounded(2, 3)) if isinstance(k, Rounded) else (3, 2)


def put(
    old: tuple[Keys, Values],
    k: Float[Array, "W c K T"],
    v: Float[Array, "W c T K"],
    starts: Int32[Array, "W"],
    plan: Plan | None = None,
    looped: bool = False,
) -> tuple[Keys, Values]:
    """A layer's cache with new keys and values in it, from a column of each row's own; `looped` as `write_columns`."""
    one = lambda old, new, axis: write_columns(old, new, starts, axis=axis, plan=plan, looped=looped)
    new = stored(k, v, "int8" if isinstance(old[0], Rounded) else None)
    return jax.tree.map(one, old, new, column_axes(*old))


def block(k: Keys, v: Values, start: Int32[Array, ""], size: int) -> tuple:
    """So many of a layer's columns."""
    part = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)
    return jax.tree.map(part, (k, v), column_axes(k, v))


def wider(k: Keys, v: Values, by: int) -> tuple:
    """A layer's cache with room for so many more columns."""
    more = lambda x, axis: jnp.pad(x, [(0, by if number == axis else 0) for number in range(x.ndim)])
    return jax.tree.map(more, (k, v), column_axes(k, v))


def dot_keys(q: Float[Array, "W c g T K"], k: Keys) -> Float[Array, "W c g T S"]:
    """Float32 products of keys and queries, which come from `queries_for`."""
    form = lambda k: jnp.einsum("wcks,wcgtk->wcgts", k, q, preferred_element_type=jnp.float32)
    return form(k.numbers.astype(q.dtype)) * k.scale[:, :, :, None] if isinstance(k, Rounded) else form(k)


def read_values(weights: Float[Array, "W c g T S"], v: Values, dtype: jnp.dtype) -> Float[Array, "W c g T K"]:
    """Float32 sums of values by weights; the product is that of numbers of this dtype."""
    form = lambda weights, v: jnp.einsum(
        "wcgts,wcsk->wcgtk", weights.astype(dtype), v, preferred_element_type=jnp.float32
    )
    return (
        form(weights * v.scale[:, :, :, None], v.numbers.astype(dtype)) if isinstance(v, Rounded) else form(weights, v)
    )
