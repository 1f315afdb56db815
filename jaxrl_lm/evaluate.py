"""Held-out evaluation and the probe before step 1. What evaluates never trains.

Both run the compiled programs of training: greedy and sampled rows differ by their temperature only, which is an array.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_lm.algos import pass_at_k, same_outcome_share
from jaxrl_lm.distributed import gather, spread
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.rewards import RewardError, RewardFunction, columns_of, compute_rewards
from jaxrl_lm.rollout import EVAL, PROBE, Sampled, Sampler

CORRECT = 0.5  # a completion is right from this reward up


class Evaluation(NamedTuple):
    metrics: dict[str, float]
    records: list[dict[str, Any]]  # one a prompt


def judge_groups(judge: Callable[..., list[Any]], sampled: Sampled, group_size: int) -> list[Any]:
    """judge(mine=rows, **what a reward function may ask for) for all rows; of several processes each judges its share of
    the groups and gets the whole. Values are JSON.
    """
    given = {
        "prompts": sampled.prompts,
        "completions": sampled.texts,
        "completion_ids": sampled.completion_ids,
        "columns": columns_of(sampled.rows),
        "group_ids": [row // group_size for row in range(sampled.count)],
    }
    rows = lambda groups: range(groups.start * group_size, min(groups.stop * group_size, sampled.count))
    return spread(-(-sampled.count // group_size), lambda own: judge(mine=rows(own), **given), raises=RewardError)


def reward_table(functions: Sequence[RewardFunction], sampled: Sampled, group_size: int) -> np.ndarray:
    """Rewards [count F]; NaN where a function abstains."""

    def judged(*, mine: range, **given: Any) -> list[list[float]]:
        return compute_rewards(functions, mine=mine, **given)[mine.start : mine.stop].tolist()

    values = judge_groups(judged, sampled, group_size)
    return np.array(values, np.float64).reshape(sampled.count, len(functions))


def judge(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each row is right, and whether it could be judged: by its first function that did not abstain."""
    judged = ~np.isnan(values).all(axis=1)
    first = np.argmax(~np.isnan(values), axis=1)
    chosen = np.take_along_axis(values, first[:, None], axis=1)[:, 0]
    return np.where(judged, chosen, 0.0) >= CORRECT, judged


def _sample_calls(sampler: Sampler, decode_params, key, prompts: EncodedPrompts, calls: int, *, limit: int, options):
    """Yields (indices, call, Sampled) over the first `limit` prompts, each prompt in every one of `calls` calls."""
    chosen = range(min(limit, len(prompts.ids)))
    for start in range(0, len(chosen), sampler.prompts_per_call):
        indices = list(chosen[start : start + sampler.prompts_per_call])
        for call in range(calls):
            # A number of its own for each (block of prompts, call), so that no key is drawn twice.
            number = start // sampler.prompts_per_call * calls + call
            yield indices, call, sampler(decode_params, key, prompts, indices, step=number, **options(call))


def _actions(sampled: Sampled) -> np.ndarray:
    """How many tokens of each real row the policy chose."""
    return gather(sampled.rollout.action_mask)[: sampled.count].sum(1)


def evaluate(
    sampler: Sampler,
    decode_params: Any,
    key: jax.Array,
    prompts: EncodedPrompts,
    functions: Sequence[RewardFunction],
    *,
    temperature: float,
    samples: int,
    limit: int,
    policy_step: int,
    name: str,
    purpose: int = EVAL,
) -> Evaluation:
    """Greedy accuracy, pass@k and lengths on the first `limit` prompts of a set.

    Each prompt gets one greedy completion and at least `samples` sampled ones. A completion is right where the first
    reward function that does not abstain on it gives at least 0.5; where all abstain it counts for nothing.
    pass@k = 1 − C(n−c, k)/C(n, k), averaged over prompts; pass@1 is the mean over
    samples and stands beside the greedy accuracy. Keys do not depend on the training step, so that two evaluations of
    the same weights are equal. `entropy` is the mean of −log-prob over sampled tokens, at the sampling temperature.
    """
    group = sampler.group_size
    calls = -(-(samples + 1) // group)
    rows = sampler.prompts_per_call * group

    def options(call: int) -> dict[str, Any]:
        greedy = (np.arange(rows) % group == 0) & (call == 0)
        heat = np.where(greedy, 0.0, temperature).astype(np.float32)
        return {"purpose": purpose, "temperature": heat, "policy_step": policy_step}

    records: dict[int, dict[str, Any]] = {}
    tables, lengths, cut, logprobs, tokens = [], [], [], 0.0, 0
    for indices, call, sampled in _sample_calls(
        sampler, decode_params, key, prompts, calls, limit=limit, options=options
    ):
        values = reward_table(functions, sampled, group)
        right, judged = judge(values)
        is_greedy = (np.arange(sampled.count) % group == 0) & (call == 0)
        tables.append(values[~is_greedy])
        size = np.array([len(ids) for ids in sampled.completion_ids])
        lengths.extend(size[~is_greedy].tolist())
        cut.extend(sampled.truncated[~is_greedy].tolist())
        logprobs += float(sampled.logprob_sums[~is_greedy].sum())
        tokens += int(_actions(sampled)[~is_greedy].sum())
        for place, index in enumerate(indices):
            mine = slice(place * group, (place + 1) * group)
            record = records.setdefault(index, {"prompt": prompts.texts[index], "samples": 0, "correct": 0})
            if call == 0:
                greedy = bool(right[mine][0]) if judged[mine][0] else None
                record |= {"greedy": greedy, "greedy_completion": sampled.texts[mine][0]}
            record["samples"] += int((judged & ~is_greedy)[mine].sum())
            record["correct"] += int((right & ~is_greedy)[mine].sum())
    greedy = [record["greedy"] for record in records.values() if record["greedy"] is not None]
    metrics = {"greedy_accuracy": float(np.mean(greedy)) if greedy else float("nan")}
    metrics |= _pass_metrics(list(records.values()), tokens=tokens, logprobs=logprobs, lengths=lengths, cut=cut)
    table = np.concatenate(tables)
    for column, function in enumerate(functions):
        given = table[~np.isnan(table[:, column]), column]
        metrics[f"rewards/{function.name}/mean"] = float(given.mean()) if len(given) else float("nan")
    return Evaluation({f"eval/{name}/{key}": value for key, value in metrics.items()}, list(records.values()))


def _pass_metrics(records, *, tokens: int, logprobs: float, lengths, cut) -> dict[str, float]:
    records = [record for record in records if record["samples"]]
    samples = min((record["samples"] for record in records), default=0)
    powers = [2**exponent for exponent in range(samples.bit_length()) if 2**exponent <= samples]
    at = lambda k: np.mean([pass_at_k(record["samples"], record["correct"], k) for record in records])
    return {
        **{f"pass@{k}": float(at(k)) for k in powers},
        "mean_length": float(np.mean(lengths)),
        "clipped_ratio": float(np.mean(cut)),
        "entropy": -logprobs / max(tokens, 1),
    }


def probe(
    sampler: Sampler,
    decode_params: Any,
    key: jax.Array,
    prompts: EncodedPrompts,
    functions: Sequence[RewardFunction],
    *,
    temperature: float,
    limit: int,
) -> dict[str, Any]:
    """How much there is to learn from: up to `limit` *training* prompts, G samples each.

    pass@1, pass@G, and the share of groups whose answers are all wrong or all right, which have no advantage; beside it
    the share that groups of the same mean would have, (1−p)^G + p^G at p = pass@1.
    """
    group = sampler.group_size
    options = lambda _: {"purpose": PROBE, "temperature": temperature, "policy_step": 0}
    correct, asked = [], 0
    for indices, _, sampled in _sample_calls(sampler, decode_params, key, prompts, 1, limit=limit, options=options):
        right, judged = (x.reshape(len(indices), group) for x in judge(reward_table(functions, sampled, group)))
        whole = judged.all(1)
        correct.extend(right[whole].sum(1).tolist())
        asked += len(indices)
    if not correct:
        raise ValueError(f"probe: every reward function abstained on all of {asked} prompts")
    solved = np.asarray(correct)
    rate = float(solved.mean() / group)
    return {
        "prompts": len(correct),
        "num_generations": group,
        "pass@1": rate,
        f"pass@{group}": float((solved > 0).mean()),
        "all_wrong": float((solved == 0).mean()),
        "all_right": float((solved == group).mean()),
        "same_outcome": float(((solved == 0) | (solved == group)).mean()),
        "expected_same_outcome": same_outcome_share(rate, group),
    }


def probe_message(found: dict[str, Any]) -> str:
    """The probe in words, with the remedies where more than half of the groups would teach nothing."""
    group = found["num_generations"]
    text = (
        f"probe of {found['prompts']} training prompts: pass@1 {found['pass@1']:.3f}, pass@{group} "
        f"{found[f'pass@{group}']:.3f}; {found['same_outcome']:.0%} of groups all wrong ({found['all_wrong']:.0%}) or "
        f"all right ({found['all_right']:.0%}); {found['expected_same_outcome']:.0%} if prompts were equally hard"
    )
    if found["same_outcome"] > 0.5:
        text += (
            "\nWARNING: more than half of the groups have no advantage and teach nothing. Remedies: easier prompts (or "
            "harder ones, if they are all right), a larger num_generations, a supervised start on worked examples."
        )
    return text
