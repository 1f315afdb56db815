"""Metrics over groups: how hard the prompts were, where the advantage went, how many answers differ.

On the host, of one step's real rows. Not here: rewards' means (`rewards/aggregate.py`), the share of prompts never solved
(`rollout/prompts.py`).
"""

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from jaxtyping import Bool, Float64, Int64, Shaped

BUCKETS = ("0", "0-25", "25-50", "50-75", "75-100", "100")  # per cent of a group's completions that are right


def group_metrics(
    returns: Shaped[np.ndarray, " N"],
    valid: Bool[np.ndarray, " N"],
    advantages: Shaped[np.ndarray, " N"],
    texts: Sequence[str],
    group_size: int,
    threshold: float = 0.5,
    *,
    answer: Callable[[str], Hashable | None] | None = None,
) -> dict[str, float]:
    """The metrics of a step's groups, by name.

    `solve_rate/<bucket>`: share of groups whose part of right rows (return ≥ threshold) among the valid ones is 0, in
    (0, ¼], (¼, ½], (½, ¾], (¾, 1), or 1; groups without a valid row are left out. `advantage_share/<bucket>`: the
    bucket's part of ΣA²; `advantage_share_unscaled/<bucket>`: the same with A = r − mean r of the group, which shows
    what division by the std moves. `distinct_answers`: mean over groups of the number of different answer(text), None
    not counted (default: the whole text). `distinct_completions`: share of different texts among all of the batch.
    NaN where there is nothing to divide by.

    Raises ValueError if group_size does not divide N or the arrays and texts are not of one length.
    """
    count = len(returns)
    if not count or group_size < 1 or count % group_size:
        raise ValueError(f"{count} rows are not a whole number of groups of {group_size}")
    if len(texts) != count:
        raise ValueError(f"{len(texts)} texts for {count} rows")
    shape = (-1, group_size)
    inside = valid.reshape(shape)
    values = np.where(inside, np.asarray(returns, np.float64).reshape(shape), 0.0)
    scaled = np.where(inside, np.asarray(advantages, np.float64).reshape(shape), 0.0)
    bucket = _bucket(((values >= threshold) & inside).sum(1), inside.sum(1))
    per_bucket = lambda weights: np.bincount(bucket, weights, len(BUCKETS))  # 0 of a group without a valid row
    read = answer or (lambda text: text)
    answers = [{read(text) for text in texts[g : g + group_size]} - {None} for g in range(0, count, group_size)]
    return {
        **_shares("solve_rate", per_bucket(inside.any(1))),
        **_shares("advantage_share", per_bucket((scaled**2).sum(1))),
        **_shares("advantage_share_unscaled", per_bucket((_centred(values, inside) ** 2).sum(1))),
        "distinct_answers": float(np.mean([len(found) for found in answers])),
        "distinct_completions": len(set(texts)) / count,
    }


def _bucket(right: Int64[np.ndarray, " P"], count: Int64[np.ndarray, " P"]) -> Int64[np.ndarray, " P"]:
    """The number of each group's bucket, in whole numbers: ⌈4 · right / count⌉, and 5 where all are right."""
    return np.where(right == count, len(BUCKETS) - 1, -(-4 * right // np.maximum(count, 1)))


def _centred(values: Float64[np.ndarray, "P G"], inside: Bool[np.ndarray, "P G"]) -> Float64[np.ndarray, "P G"]:
    """r − mean r; exactly 0 where all are equal, as in `algos.group_advantages`."""
    mean = values.sum(1) / np.maximum(inside.sum(1), 1)
    low, high = np.where(inside, values, np.inf).min(1), np.where(inside, values, -np.inf).max(1)
    return np.where(inside & ~(high <= low)[:, None], values - mean[:, None], 0.0)


def _shares(name: str, totals: Float64[np.ndarray, " B"]) -> dict[str, float]:
    whole = totals.sum()
    return {f"{name}/{b}": float(t / whole) if whole > 0 else math.nan for b, t in zip(BUCKETS, totals, strict=True)}
