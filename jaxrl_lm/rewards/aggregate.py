"""From the values of reward functions to one return a row, and the metrics of both.

The values come from `protocol.compute_rewards`, NaN where a function abstained; the returns go to
`algos.group_advantages`.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64

from jaxrl_lm.rewards.protocol import RewardFunction


def combine(
    values: Float64[np.ndarray, "N F"],
    weights: Sequence[float],
    *,
    group_size: int,
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
) -> tuple[Float64[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Each row's return, and whether it has one.

    return_n = Σ_f weight_f · value_nf over the functions that did not abstain (NaN). A row on which all abstain has
    return 0 and valid False. A function of weight 0 counts for neither. With "normalize_then_sum" each value is first
    replaced by (value − mean) / std over its group's rows that have one (std with ddof 1; 0 where they are all equal or
    only one), so that a reward of scale 100 does not drown one of scale 1. A group is `group_size` adjacent rows.

    Raises ValueError where the shapes do not fit or every weight is 0.
    """
    count, functions = values.shape
    if len(weights) != functions:
        raise ValueError(f"reward_weights has {len(weights)} values for {functions} reward functions")
    if count % group_size:
        raise ValueError(f"{count} rows are not a whole number of groups of {group_size}")
    if aggregation not in ("sum_then_normalize", "normalize_then_sum"):
        raise ValueError(
            f"multi_objective_aggregation={aggregation!r} is unknown: use sum_then_normalize or normalize_then_sum"
        )
    trained = np.asarray(weights, np.float64) != 0
    if not trained.any():
        raise ValueError(f"reward_weights={tuple(weights)}: every weight is 0, so nothing would be trained")
    values, factors = values[:, trained], np.asarray(weights, np.float64)[trained]
    given = ~np.isnan(values)
    if aggregation == "normalize_then_sum":
        values = _normalize(values, given, group_size)
    terms = np.where(given, values, 0.0) * factors[None, :]
    return terms.sum(axis=1), given.any(axis=1)


def _normalize(
    values: Float64[np.ndarray, "N F"], given: Bool[np.ndarray, "N F"], group_size: int
) -> Float64[np.ndarray, "N F"]:
    groups = (-1, group_size, values.shape[1])
    x, m = np.where(given, values, 0.0).reshape(groups), given.reshape(groups)
    count = m.sum(axis=1, keepdims=True)
    centred = np.where(m, x - x.sum(axis=1, keepdims=True) / np.maximum(count, 1), 0.0)
    std = np.sqrt((centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
    # Equal values are told by comparing them: the rounding of their mean would leave a tiny spread to divide by.
    spread = np.where(m, x, -np.inf).max(axis=1, keepdims=True) > np.where(m, x, np.inf).min(axis=1, keepdims=True)
    return np.where(spread, centred / np.where(spread & (std > 0), std, 1.0), 0.0).reshape(values.shape)


def reward_metrics(
    functions: Sequence[RewardFunction],
    values: Float64[np.ndarray, "N F"],
    returns: Float64[np.ndarray, " N"],
    sources: Sequence[str | None] | None = None,
    true_reward: str | None = None,
) -> dict[str, float]:
    """Metrics of the rewards: `rewards/<name>/mean|std`, per source, and `reward_gap`.

    Mean and std (ddof 1, as in TRL) are over the rows that have a value; NaN where there are none, or fewer than two
    for the std. `sources`, the rows' `data_source` column, adds `rewards/<name>/<source>/mean` for each source that has
    a value. `reward_gap` is the mean return minus the mean of the function named `true_reward`, over the rows that have
    both. Raises ValueError for a `true_reward` that no function has.
    """
    metrics: dict[str, float] = {}
    for f, function in enumerate(functions):
        given = ~np.isnan(values[:, f])
        present = values[given, f]
        metrics[f"rewards/{function.name}/mean"] = float(present.mean()) if present.size else math.nan
        metrics[f"rewards/{function.name}/std"] = float(present.std(ddof=1)) if present.size > 1 else math.nan
        for source in dict.fromkeys(s for s in sources or () if s is not None):
            rows = given & np.array([s == source for s in sources])
            if rows.any():
                metrics[f"rewards/{function.name}/{source}/mean"] = float(values[rows, f].mean())
    if true_reward is not None:
        names = [function.name for function in functions]
        if true_reward not in names:
            raise ValueError(f"true_reward={true_reward!r} is none of the reward functions: {', '.join(names)}")
        truth = values[:, names.index(true_reward)]
        trained = values[:, [function.weight != 0 for function in functions]]
        both = ~np.isnan(truth) & ~np.isnan(trained).all(axis=1)
        metrics["reward_gap"] = float((returns[both] - truth[both]).mean()) if both.any() else math.nan
    return metrics
