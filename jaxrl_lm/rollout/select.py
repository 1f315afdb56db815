"""Which sampled groups and rows are trained on, and their joining into one batch. All of it on the host.

Decisions are made on raw returns, before a KL or a length penalty is taken off them: those are never equal. Which prompts
are drawn: `prompts.py`.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from jaxrl_lm.distributed import gather
from jaxrl_lm.rollout.sampler import Sampled
from jaxrl_lm.types import Rollout


def unequal_groups(
    returns: Shaped[np.ndarray, " N"], valid: Bool[np.ndarray, " N"], group_size: int
) -> Bool[np.ndarray, " P"]:
    """Whether each group's valid returns differ, so that it has an advantage to learn from.

    keep_p = max_i r_i > min_i r_i over the valid rows of group p; a group with fewer than two is dropped.

    Source: dynamic sampling, DAPO (Yu et al., 2025), section 3.2, there for right and wrong: 0 < number right < G. A NaN
    among the valid returns differs from everything. Raises ValueError if group_size does not divide N.
    """
    if group_size < 1 or len(returns) % group_size:
        raise ValueError(f"{len(returns)} rows are not a whole number of groups of {group_size}")
    values, inside = np.asarray(returns, np.float64).reshape(-1, group_size), valid.reshape(-1, group_size)
    low, high = np.where(inside, values, np.inf).min(1), np.where(inside, values, -np.inf).max(1)
    return (inside.sum(1) > 1) & ~(high <= low)


# --- rows of a group ------------------------------------------------------------------------------------------------


def choose_rows(
    returns: Shaped[np.ndarray, "P M"],
    valid: Bool[np.ndarray, "P M"],
    keep: int,
    *,
    how: Literal["max_variance", "balanced"] = "max_variance",
    threshold: float = 0.5,
) -> Int64[np.ndarray, "P keep"]:
    """The columns of the `keep` completions of each prompt that are trained on, out of M sampled, ascending.

    "max_variance": the subset whose returns have the largest variance, which is some i of the lowest and keep − i of the
    highest: argmax_i Var(lowest i ∪ highest keep − i), in O(M log M). Equal variances: the i nearest keep / 2, then the
    smaller. "balanced": as many right (return ≥ threshold) as wrong, or as near to it as there are; an odd one is right.
    Among equal candidates the first rows win. Rows that are not valid are taken only where there are too few.

    Source: "max_variance" is the max-variance down-sampling of PODS (Xu et al., 2025). As there, the group's mean and std
    are then those of the chosen rows: call the advantage function on them.

    Raises ValueError for keep outside 1 … M, an unknown `how`, or a valid return that is not finite.
    """
    columns = returns.shape[1]
    if not 1 <= keep <= columns:
        raise ValueError(f"keep={keep}: must be from 1 to the {columns} completions of a prompt")
    if how not in ("max_variance", "balanced"):
        raise ValueError(f"how={how!r} is unknown: use max_variance or balanced")
    if not np.isfinite(returns[valid]).all():
        raise ValueError("choose_rows: a return of a valid row is not finite")
    chosen = np.empty((len(returns), keep), np.int64)
    for p, (row, inside) in enumerate(zip(np.asarray(returns, np.float64), valid, strict=True)):
        given, rest = np.flatnonzero(inside), np.flatnonzero(~inside)
        if len(given) > keep:
            given = given[_spread(row[given], keep) if how == "max_variance" else _even(row[given] >= threshold, keep)]
        chosen[p] = np.sort(np.concatenate([given, rest[: keep - len(given)]]))
    return chosen


def _spread(values: Shaped[np.ndarray, " M"], keep: int) -> Int64[np.ndarray, " keep"]:
    """The places of the subset with the largest variance."""
    distinct, kind = np.unique(values, return_inverse=True)  # ascending
    order = np.argsort(kind, kind="stable")
    # From the middle one: a common offset would cost the variance its digits, and equal values shall give exactly 0.
    ascending = values[order] - values[order[len(order) // 2]]
    lowest = np.arange(keep + 1)
    highest = len(values) - (keep - lowest)
    sums = [np.concatenate([[0.0], np.cumsum(power)]) for power in (ascending, ascending**2)]
    first, second = (s[lowest] + s[-1] - s[highest] for s in sums)
    variance = second / keep - (first / keep) ** 2
    close = variance >= variance.max() - 1e-12 * (ascending**2).max()  # equal up to rounding
    best = min(np.flatnonzero(close).tolist(), key=lambda i: (abs(2 * i - keep), i))
    picked = np.bincount(kind[order[np.r_[:best, highest[best] : len(values)]]], minlength=len(distinct))
    place = np.empty(len(values), np.int64)  # of each row among those of its value
    place[order] = np.arange(len(values)) - np.searchsorted(kind[order], kind[order])
    return np.flatnonzero(place < picked[kind])


def _even(right: Bool[np.ndarray, " M"], keep: int) -> Int64[np.ndarray, " keep"]:
    """The first places of as many right as wrong rows."""
    good, bad = np.flatnonzero(right), np.flatnonzero(~right)
    wrong = min(len(bad), keep // 2)
    wrong = max(wrong, keep - len(good))
    return np.concatenate([good[: keep - wrong], bad[:wrong]])


# --- batches --------------------------------------------------------------------------------------------------------


def join(parts: Sequence[tuple[Sampled, Sequence[int]]], *, rows: int, pad_token_id: int) -> Sampled:
    """One Sampled of chosen rows of several, in the order given, with its arrays on the host.

    The caller keeps a prompt's rows adjacent, and takes returns and `valid` along by the same row numbers; a Sampled may
    stand in several parts. Prompts padded to different lengths get more padding on the left. Where there are fewer than
    `rows` chosen rows, the rest repeats the first ones' prompts without a completion, and `count` says how many are real.

    Raises ValueError for no chosen row, more than `rows`, a row that is not real in its Sampled, and parts that do not
    agree about having behaviour_logprobs.
    """
    parts = [(sampled, list(chosen)) for sampled, chosen in parts if len(chosen)]
    count = sum(len(chosen) for _, chosen in parts)
    if not 1 <= count <= rows:
        raise ValueError(f"join: {count} chosen rows for a batch of {rows}")
    for sampled, chosen in parts:
        outside = [n for n in chosen if not 0 <= n < sampled.count]
        if outside:
            raise ValueError(f"join: rows {outside} are not among the {sampled.count} real ones of their rollout")
    if len({sampled.rollout.behaviour_logprobs is None for sampled, _ in parts}) > 1:
        raise ValueError(
            "join: some rollouts have behaviour_logprobs and some do not: sample all with the same options"
        )
    sources = {id(sampled): sampled for sampled, _ in parts}
    host = {key: gather((one.rollout, one.temperature)) for key, one in sources.items()}
    width = max(rollout.tokens.shape[1] for rollout, _ in host.values())
    taken = [_take(host[id(sampled)][0], chosen, width, pad_token_id) for sampled, chosen in parts]
    temperature = np.concatenate([host[id(sampled)][1][chosen] for sampled, chosen in parts])
    rollout = Rollout(*(None if field[0] is None else np.concatenate(field) for field in zip(*taken, strict=True)))
    if count < rows:
        again = np.arange(rows - count) % count
        rollout = _with_fillers(rollout, again, pad_token_id)
        temperature = np.concatenate([temperature, temperature[again]])
    listed = lambda name: [getattr(sampled, name)[n] for sampled, chosen in parts for n in chosen]
    stacked = lambda name: np.concatenate([np.asarray(getattr(sampled, name))[chosen] for sampled, chosen in parts])
    return Sampled(
        rollout=rollout,
        temperature=temperature,
        count=count,
        rows=listed("rows"),
        prompts=listed("prompts"),
        texts=listed("texts"),
        completion_ids=listed("completion_ids"),
        logprob_sums=stacked("logprob_sums"),
        truncated=stacked("truncated"),
    )


def _take(rollout: Rollout, chosen: list[int], width: int, pad_token_id: int) -> Rollout:
    """Some rows, [n T] arrays filled on the left to `width` columns."""

    def one(name: str, array: np.ndarray | None) -> np.ndarray | None:
        if array is None or array.ndim == 1:
            return None if array is None else array[chosen]
        beside = ((0, 0), (width - array.shape[1], 0))
        return np.pad(array[chosen], beside, constant_values=pad_token_id if name == "tokens" else 0)

    return Rollout(**{name: one(name, array) for name, array in rollout._asdict().items()})


def _with_fillers(rollout: Rollout, again: np.ndarray, pad_token_id: int) -> Rollout:
    """The rollout, and below it the prompts of the rows `again` without completions, as the sampler fills a batch."""
    prompt = ~np.logical_or.accumulate(rollout.action_mask[again], axis=1)
    blank = {name: np.zeros_like(array[again]) for name, array in rollout._asdict().items() if array is not None}
    blank["tokens"] = np.where(prompt, rollout.tokens[again], blank["tokens"] + pad_token_id)
    blank["segment_ids"] = np.where(prompt, rollout.segment_ids[again], 0)
    return rollout._replace(**{name: np.concatenate([getattr(rollout, name), below]) for name, below in blank.items()})
