"""Rewards of steps inside a run: computed once on the rows that are learned from, placed on tokens, and measured.

The protocol of the functions is `rewards/steps.py`, what becomes of the rewards `credit.py`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Shaped

from jaxrl_lm import algos
from jaxrl_lm.distributed import gather
from jaxrl_lm.evaluate import CORRECT, judge_groups
from jaxrl_lm.rewards import RewardFunction, RowSteps, compute_step_rewards, step_tokens
from jaxrl_lm.rollout import Sampled


class StepRewards(NamedTuple):
    """The steps of sampled rows. Rows that fill the batch have none."""

    steps: list[RowSteps]  # of each real row, by characters; None: the function does not apply
    rewards: Float32[np.ndarray, "N T"]  # at the last token of each step, 0 elsewhere
    ends: Bool[np.ndarray, "N T"]
    merged: int  # steps that ended on the token of a later one, which stands for both


def score_steps(
    function: RewardFunction, sampled: Sampled, *, group_size: int, tokenizer: Any, chances: bool
) -> StepRewards:
    """What the function gives the rows, on their tokens. Raises RewardError as `compute_step_rewards`."""
    judged = functools.partial(compute_step_rewards, function, chances=chances)
    steps = judge_groups(judged, sampled, group_size)
    return place_steps(steps, sampled, tokenizer)


def place_steps(steps: Sequence[RowSteps], sampled: Sampled, tokenizer: Any) -> StepRewards:
    """The steps on the tokens that they end with; of several on one token the last one counts.

    A step that ends with a token that the policy did not choose stands on the last one before it that it did.
    """
    mask, segments = gather((sampled.rollout.action_mask, sampled.rollout.segment_ids))
    rewards, ends, merged = np.zeros(mask.shape, np.float32), np.zeros(mask.shape, bool), 0
    for row, (found, ids, text) in enumerate(zip(steps, sampled.completion_ids, sampled.texts, strict=True)):
        if not found:
            continue
        tokens = step_tokens(ids, text, [end for end, _ in found], tokenizer)
        actions = np.flatnonzero(mask[row])
        if not len(actions):
            continue
        written = (
            actions if len(actions) == len(ids) else np.flatnonzero(segments[row])[-len(ids) :]
        )  # with forced ones
        place = np.maximum(np.searchsorted(actions, written[tokens], side="right") - 1, 0)
        paid = dict(zip(actions[place].tolist(), (value for _, value in found), strict=True))  # the later one stays
        columns = list(paid)
        rewards[row, columns], ends[row, columns] = list(paid.values()), True
        merged += len(found) - len(paid)
    return StepRewards(list(steps), rewards, ends, merged)


def step_metrics(
    found: StepRewards, returns: Shaped[np.ndarray, " n"], valid: Bool[np.ndarray, " n"], threshold: float = CORRECT
) -> dict[str, float]:
    """How many steps rows have, what they are paid, and whether their number rises with the return.

    Right rows are valid ones with a return of at least the threshold; a wrong step has a reward below it. NaN where
    there is nothing to divide by, or no spread to correlate. Rows that the function does not apply to are counted in
    `steps/abstained_share` alone.
    """
    applies = np.array([steps is not None for steps in found.steps], bool)
    counts = np.array([len(steps or ()) for steps in found.steps])
    values = [value for steps in found.steps for _, value in steps or ()]
    wrong = np.array([any(value < threshold for _, value in steps or ()) for steps in found.steps], bool)
    judged = applies & valid
    right = judged & (returns >= threshold)
    mean = lambda x, inside: float(x[inside].mean()) if inside.any() else math.nan
    sums = algos.moments(jnp.asarray(counts, jnp.float32), jnp.asarray(returns, jnp.float32), jnp.asarray(judged))
    return {
        "steps/mean_count": mean(counts, applies),
        "steps/mean_count_right": mean(counts, right),
        "steps/mean_count_wrong": mean(counts, judged & ~right),
        "steps/mean_reward": float(np.mean(values)) if values else math.nan,
        "steps/count_reward_correlation": float(algos.correlation(sums)),
        "steps/wrong_step_share_of_right": mean(wrong, right),
        "steps/abstained_share": float((~applies).mean()),
        "steps/merged_share": found.merged / len(values) if values else math.nan,
    }
