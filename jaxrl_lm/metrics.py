"""Metrics that add across microbatches and devices and divide once, at the end.

A step returns a dict of `Mean`, `Sum`, `Max`, `Min`, `Covariance`, `Correlation` and `CalibrationError`; `merge` adds two
such dicts, `result` turns one into floats.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

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


class Correlation(NamedTuple):
    """Pearson's correlation, from moments that are centred: a large common offset costs no precision."""

    count: Float[Array, ""]
    mean_x: Float[Array, ""]
    mean_y: Float[Array, ""]
    xx: Float[Array, ""]  # Σ (x − mean x)²
    yy: Float[Array, ""]
    xy: Float[Array, ""]


class CalibrationError(NamedTuple):
    """Σ_bins |Σ label − Σ probability| / count, from sums by bin of the predicted probability."""

    count: Float[Array, "B"]
    probability: Float[Array, "B"]
    label: Float[Array, "B"]


Metric = Mean | Sum | Max | Min | Covariance | Correlation | CalibrationError
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


def correlation_of(x: Shaped[Array, "*s"], y: Shaped[Array, "*s"], mask: Bool[Array, "*s"]) -> Correlation:
    """Correlation of x and y over the mask."""
    a, b = masked.centre(x, mask), masked.centre(y, mask)
    count = jnp.sum(mask).astype(a.dtype)
    return Correlation(
        count, masked.mean(x, mask), masked.mean(y, mask), jnp.sum(a * a), jnp.sum(b * b), jnp.sum(a * b)
    )


def merge(a: Metrics, b: Metrics) -> Metrics:
    """The metrics of both parts together. Raises KeyError when the parts measured different things."""
    different = {name for name in a.keys() | b.keys() if type(a.get(name)) is not type(b.get(name))}
    if different:
        raise KeyError(f"metrics differ between parts: {sorted(different)}")
    return {name: _merge_one(a[name], b[name]) for name in a}


def _merge_one(a: Metric, b: Metric) -> Metric:
    if isinstance(a, Correlation):
        return merge_correlations(a, b)
    if isinstance(a, Mean | Sum | Covariance | CalibrationError):
        return type(a)(*(one + other for one, other in zip(a, b, strict=True)))
    return type(a)((jnp.maximum if isinstance(a, Max) else jnp.minimum)(a.value, b.value))


def merge_correlations(a: Correlation, b: Correlation) -> Correlation:
    """The moments of both parts together. Source: Chan, Golub and LeVeque, 1983."""
    count = a.count + b.count
    share = b.count / jnp.maximum(count, 1.0)
    gap_x, gap_y, between = b.mean_x - a.mean_x, b.mean_y - a.mean_y, a.count * share
    return Correlation(
        count,
        a.mean_x + gap_x * share,
        a.mean_y + gap_y * share,
        a.xx + b.xx + gap_x * gap_x * between,
        a.yy + b.yy + gap_y * gap_y * between,
        a.xy + b.xy + gap_x * gap_y * between,
    )


def result(metrics: Metrics) -> dict[str, float]:
    """Plain floats; NaN where nothing was measured: a weight or count of 0, an empty Max or Min, no spread."""
    return {name: _value(metric) for name, metric in metrics.items()}


def _value(metric: Metric) -> float:
    if isinstance(metric, Mean):
        weight = float(metric.weight)
        return float(metric.total) / weight if weight else math.nan
    if isinstance(metric, Covariance):
        products, x, y, weight = map(float, metric)
        return products / weight - x / weight * (y / weight) if weight else math.nan
    if isinstance(metric, Correlation):
        *_, xx, yy, xy = map(float, metric)
        return xy / math.sqrt(xx) / math.sqrt(yy) if xx > 0 and yy > 0 else math.nan
    if isinstance(metric, CalibrationError):
        count, probability, label = (np.asarray(x, np.float64) for x in metric)
        return float(np.abs(label - probability).sum() / count.sum()) if count.sum() else math.nan
    if isinstance(metric, Sum):
        return float(metric.total)
    nothing = -math.inf if isinstance(metric, Max) else math.inf
    value = float(metric.value)
    return value if value != nothing else math.nan
