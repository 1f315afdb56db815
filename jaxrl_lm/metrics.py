"""Metrics that add across microbatches and devices and divide once, at the end.

A step returns a dict of `Mean`, `Sum`, `Max`, `Min` and `Covariance`; `merge` adds two such dicts, `result` turns one
into floats.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from jaxrl_lm import masked


class Mean(NamedTuple):
    """total / weight; NaN where the weight is 0 (there was nothing to measure)."""

    total: Shaped[Array, ""]
    weight: Shaped[Array, ""]


class Sum(NamedTuple):
    """A total of which every part holds a share, such as a loss whose weights were divided beforehand."""

    total: Shaped[Array, ""]


class Max(NamedTuple):
    value: Shaped[Array, ""]


class Min(NamedTuple):
    value: Shaped[Array, ""]


class Covariance(NamedTuple):
    """E[xy] − E[x] E[y] from four sums."""

    products: Shaped[Array, ""]
    x: Shaped[Array, ""]
    y: Shaped[Array, ""]
    weight: Shaped[Array, ""]


Metric = Mean | Sum | Max | Min | Covariance
Metrics = dict[str, Metric]


def mean_of(x: Shaped[Array, "*s"], mask: Bool[Array, "*s"]) -> Mean:
    """Mean of x over the mask."""
    return Mean(masked.sum(x, mask), jnp.sum(mask, dtype=jnp.float32))


def max_of(x: Shaped[Array, "*s"], mask: Bool[Array, "*s"]) -> Max:
    """Largest x over the mask; −inf where the mask is empty."""
    return Max(jnp.max(masked.select(x, mask, -jnp.inf)))


def min_of(x: Shaped[Array, "*s"], mask: Bool[Array, "*s"]) -> Min:
    """Smallest x over the mask; +inf where the mask is empty."""
    return Min(jnp.min(masked.select(x, mask, jnp.inf)))


def covariance_of(x: Shaped[Array, "*s"], y: Shaped[Array, "*s"], mask: Bool[Array, "*s"]) -> Covariance:
    """Covariance of x and y over the mask."""
    x, y = masked.select(x, mask), masked.select(y, mask)
    return Covariance(jnp.sum(x * y), jnp.sum(x), jnp.sum(y), jnp.sum(mask, dtype=jnp.float32))


def merge(a: Metrics, b: Metrics) -> Metrics:
    """The metrics of both parts together. Raises KeyError when the parts measured different things."""
    different = {name for name in a.keys() | b.keys() if type(a.get(name)) is not type(b.get(name))}
    if different:
        raise KeyError(f"metrics differ between parts: {sorted(different)}")
    return {name: _merge_one(a[name], b[name]) for name in a}


def _merge_one(a: Metric, b: Metric) -> Metric:
    if isinstance(a, Mean | Sum | Covariance):
        return type(a)(*(one + other for one, other in zip(a, b, strict=True)))
    return type(a)((jnp.maximum if isinstance(a, Max) else jnp.minimum)(a.value, b.value))


def result(metrics: Metrics) -> dict[str, float]:
    """Plain floats; a Mean or Covariance of weight 0 is NaN, an empty Max or Min is NaN too."""
    out = {}
    for name, metric in metrics.items():
        if isinstance(metric, Mean):
            weight = float(metric.weight)
            out[name] = float(metric.total) / weight if weight else float("nan")
        elif isinstance(metric, Covariance):
            products, x, y, weight = map(float, metric)
            out[name] = products / weight - x / weight * (y / weight) if weight else float("nan")
        elif isinstance(metric, Sum):
            out[name] = float(metric.total)
        else:
            nothing = float("-inf") if isinstance(metric, Max) else float("inf")
            value = float(metric.value)
            out[name] = value if value != nothing else float("nan")
    return out
