"""One step's completions and their rewards: prompts drawn, sampled and judged until the batch is full.

Here is where dynamic sampling, oversampling, replay and the greedy baseline meet; the ways of choosing are functions in
`rollout/`. Next to read: `learn.py`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float64, Int32, Shaped

from jaxrl_lm.beside import Beside
from jaxrl_lm.clock import Clock
from jaxrl_lm.distributed import gather as gathered
from jaxrl_lm.evaluate import CORRECT, reward_table
from jaxrl_lm.host import Host
from jaxrl_lm.prepare import Setup
from jaxrl_lm.rewards import combine, reward_metrics
from jaxrl_lm.rollout import GREEDY, TRAIN, Group, Sampled, choose_rows, join, never_solved_share, unequal_groups
from jaxrl_lm.step_rewards import StepRewards, score_steps, step_metrics


class Judged(NamedTuple):
    """Completions with what the reward functions gave them; all but `sampled.rollout` holds the real rows only."""

    sampled: Sampled
    indices: list[int]  # of each group's prompt
    values: Float64[np.ndarray, "n F"]  # NaN: the function abstained
    returns: Float64[np.ndarray, " n"]  # scaled, as multi_objective_aggregation says
    valid: Bool[np.ndarray, " n"]
    plain: Float64[np.ndarray, " n"]  # the weighted sum as it is: what is right or wrong


class Collected(NamedTuple):
    """What a step learns from."""

    judged: Judged  # the rollout lies on the devices and has all N rows
    greedy_returns: Float64[np.ndarray, " n"] | None
    metrics: dict[str, float]
    generated: int  # tokens, those of dropped completions too
    prompt_tokens: int
    steps: StepRewards | None  # of the judged rows
    fresh: Sequence[Judged] = ()  # all that was sampled, until it is `settle`d


def collect(
    setup: Setup, host: Host, decode_params: Any, key: jax.Array, *, step: int, policy_step: int, clock: Clock
) -> Collected:
    """`draw`, settled at once."""
    return settle(setup, host, draw(setup, host, decode_params, key, step=step, policy_step=policy_step, clock=clock))


def settle(setup: Setup, host: Host, drawn: Collected) -> Collected:
    """What was drawn, with all metrics; the host remembers its outcomes, for the prompts of later steps."""
    _remember(setup, host, drawn.fresh)
    return drawn._replace(metrics=_metrics(setup, host, drawn.fresh) | drawn.metrics, fresh=[])


def draw(
    setup: Setup, host: Host, decode_params: Any, key: jax.Array, *, step: int, policy_step: int, clock: Clock
) -> Collected:
    """Samples until `prompts_per_step` groups are there to learn from, or the bound on batches is met.

    Of the host it moves only what says which prompts, calls and replayed groups come next.
    """
    config, dynamic = setup.config, setup.algorithm.dynamic_sampling
    replayed = host.replay.take(config.replay_groups, policy_step=policy_step) if host.replay else []
    missing = config.prompts_per_step - len(replayed)
    fresh: list[Judged] = []
    kept: list[tuple[Judged, np.ndarray]] = []
    for _ in range(config.dynamic_sampling_batches if dynamic else 1):
        count = config.prompts_per_step if dynamic else missing
        found, calls = _sample(setup, host, decode_params, key, count, step=step, policy_step=policy_step, clock=clock)
        differ = unequal_groups(found.returns, found.valid, config.num_generations) if dynamic else np.ones(count, bool)
        chosen = np.flatnonzero(differ)[:missing]
        fresh += calls
        kept.append((found, chosen))
        missing -= len(chosen)
        if missing == 0:
            break
    metrics = {}
    if dynamic:
        metrics["dynamic_sampling/batches"] = float(len(kept))
        metrics["dynamic_sampling/kept_share"] = sum(len(chosen) for _, chosen in kept) / (count * len(kept))
        metrics["dynamic_sampling/missing_groups"] = float(missing)
    if not replayed and missing == config.prompts_per_step:  # nothing to learn from: a step without advantages
        kept = [(kept[0][0], np.arange(config.prompts_per_step))]
    if host.replay is not None:
        metrics["replay/groups"] = float(len(replayed))
    judged, greedy, more = _batch(setup, kept, replayed), None, 0
    if setup.algorithm.advantage == "greedy":
        greedy, answered, more = _greedy(
            setup, host, decode_params, key, judged.indices, policy_step=policy_step, clock=clock
        )
        judged = judged._replace(valid=judged.valid & answered)
    steps = None
    if setup.step_reward is not None:  # of these rows alone: which ones they are, outcomes have decided
        with clock("reward"):
            steps = score_steps(
                setup.step_reward,
                judged.sampled,
                group_size=config.num_generations,
                tokenizer=setup.tokenizer,
                chances=config.step_credit == "product",
            )
            metrics |= step_metrics(steps, judged.plain, judged.valid)
    asked = [index for one in fresh for index in one.indices]
    return Collected(
        judged=judged,
        greedy_returns=greedy,
        metrics=metrics,
        generated=more + sum(len(ids) for one in fresh for ids in one.sampled.completion_ids),
        prompt_tokens=config.num_generations * sum(len(setup.prompts.ids[index]) for index in asked),
        steps=steps,
        fresh=fresh,
    )


def _sample(
    setup: Setup, host: Host, decode_params, key, count: int, *, step: int, policy_step: int, clock: Clock
) -> tuple[Judged, list[Judged]]:
    """G completions of each of the next `count` prompts, and all that were sampled: several times G with oversampling."""
    config, group = setup.config, setup.config.num_generations
    indices = host.prompts.draw(step, count)
    calls, tables = [], []
    for _ in range(config.oversample):
        host.calls += 1
        sampled, values = _sample_and_judge(
            setup, host, decode_params, key, indices, policy_step=policy_step, clock=clock
        )
        tables.append(values)
        calls.append(sampled)
    judged = lambda sampled, values: Judged(sampled, indices, values, *_combine(setup, values, group))
    every = [judged(sampled, values) for sampled, values in zip(calls, tables, strict=True)]
    if config.oversample == 1:
        return every[0], every
    # [count, times · G]: all completions of a prompt side by side.
    values = np.concatenate([table.reshape(count, group, -1) for table in tables], axis=1)
    wide = values.shape[1]
    returns, valid, _ = _combine(setup, values.reshape(count * wide, -1), wide)
    columns = choose_rows(returns.reshape(count, wide), valid.reshape(count, wide), group, how=config.oversample_select)
    parts = [
        (calls[column // group], [place * group + column % group])
        for place, chosen in enumerate(columns)
        for column in chosen.tolist()
    ]
    chosen = np.take_along_axis(values, columns[:, :, None], axis=1).reshape(count * group, -1)
    sampled = join(parts, rows=config.prompts_per_step * group, pad_token_id=setup.sampler.pad_token_id)
    return judged(_placed(setup, sampled), chosen), every


def _sample_and_judge(
    setup: Setup, host: Host, decode_params, key, indices: list[int], *, policy_step: int, clock: Clock
) -> tuple[Sampled, np.ndarray]:
    """G completions of each prompt and their rewards [n F]; the latter while others still decode, with decode_chunk."""
    config, group = setup.config, setup.config.num_generations
    options = {"temperature": config.temperature, "policy_step": policy_step}
    options |= {"purpose": TRAIN, "step": host.calls}
    options["earlier"] = () if host.earlier is None else host.earlier.of(indices, group)
    given = (decode_params, key, setup.prompts, indices)
    if config.decode_chunk is None:
        with clock("generate"):
            sampled = setup.sampler(*given, **options)
        with clock("reward"):
            return sampled, reward_table(setup.rewards, sampled, group)
    with Beside(setup.rewards, setup.prompts, indices, tokenizer=setup.tokenizer, group_size=group) as beside:
        with clock("generate"):
            sampled = setup.sampler(*given, beside=beside, **options)
        with clock("reward"):  # what is left of them
            values = beside.table(sampled)
    clock.beside["reward"] += beside.seconds
    return sampled, values


def _combine(setup: Setup, values: Float64[np.ndarray, "n F"], group: int):
    """Returns, valid, plain returns."""
    weights = [function.weight for function in setup.rewards]
    how = setup.config.multi_objective_aggregation
    plain, valid = combine(values, weights, group_size=group)
    scaled = plain if how == "sum_then_normalize" else combine(values, weights, group_size=group, aggregation=how)[0]
    return scaled, valid, plain


def _placed(setup: Setup, sampled: Sampled) -> Sampled:
    place = setup.steps.place
    return sampled._replace(rollout=place(sampled.rollout), temperature=place(sampled.temperature))


def _batch(setup: Setup, kept: Sequence[tuple[Judged, np.ndarray]], replayed: Sequence[Group]) -> Judged:
    """The kept groups and the replayed ones as one batch."""
    config, group = setup.config, setup.config.num_generations
    first, chosen = kept[0]
    if not replayed and len(chosen) == config.prompts_per_step == len(first.indices):
        return first  # as it was sampled, still on the devices
    rows = lambda groups: (groups[:, None] * group + np.arange(group)).reshape(-1).tolist()
    parts = [(one.sampled, rows(groups)) for one, groups in kept]
    parts += [(one.sampled, list(range(group))) for one in replayed]
    sampled = join(parts, rows=config.prompts_per_step * group, pad_token_id=setup.sampler.pad_token_id)
    indices = [one.indices[g] for one, groups in kept for g in groups] + [one.index for one in replayed]
    values = np.concatenate([one.values[rows(groups)] for one, groups in kept] + [one.rewards for one in replayed])
    return Judged(_placed(setup, sampled), indices, values, *_combine(setup, values, group))


def _greedy(
    setup: Setup, host: Host, decode_params, key, indices: list[int], *, policy_step: int, clock: Clock
) -> tuple[Float64[np.ndarray, " n"], Bool[np.ndarray, " n"], int]:
    """Each row's baseline, the return of the greedy answer to its prompt; whether it has one; the answers' tokens."""
    group = setup.config.num_generations
    with clock("generate"):
        sampled = setup.sampler(
            decode_params,
            key,
            setup.prompts,
            indices,
            purpose=GREEDY,
            step=host.calls,
            temperature=0.0,
            policy_step=policy_step,
            first_only=True,
        )
    with clock("reward"):
        rows = list(range(0, sampled.count, group))
        answers = join([(sampled, rows)], rows=len(rows), pad_token_id=setup.sampler.pad_token_id)
        returns, valid, _ = _combine(setup, reward_table(setup.rewards, answers, 1), 1)
    tokens = sum(map(len, answers.completion_ids))
    return np.repeat(returns, group), np.repeat(valid, group), tokens


def _remember(setup: Setup, host: Host, fresh: Sequence[Judged]) -> None:
    """What later steps draw by: solve rates, sizes of advantages, groups for replay."""
    group = setup.config.num_generations
    for one in fresh:
        inside = one.valid.reshape(-1, group)
        right = (one.plain >= CORRECT).reshape(-1, group) & inside
        judged = inside.sum(1)
        rates = np.where(judged > 0, right.sum(1) / np.maximum(judged, 1), np.nan)
        host.prompts.observe(one.indices, rates, _mean_abs_advantages(one, group))
        if getattr(host.prompts, "table", None) is not host.rates:
            host.rates.observe(one.indices, rates)
        if host.earlier is not None:
            host.earlier.put(one.indices, one.sampled.completion_ids)
        if host.replay is not None:
            host.replay.put(
                one.sampled, one.values, right.reshape(-1), one.valid, indices=one.indices, group_size=group
            )


def _mean_abs_advantages(one: Judged, group: int) -> Float64[np.ndarray, " P"]:
    """Mean |r − mean| / std of each group; 0 for equal returns, NaN without any."""
    out = []
    for returns, valid in zip(one.returns.reshape(-1, group), one.valid.reshape(-1, group), strict=True):
        given = returns[valid]
        if len(given) == 0:
            out.append(math.nan)
        else:
            out.append(0.0 if np.ptp(given) == 0 else float(np.abs(given - given.mean()).mean() / given.std()))
    return np.asarray(out)


def _metrics(setup: Setup, host: Host, fresh: Sequence[Judged]) -> dict[str, float]:
    """Rewards and lengths of everything that was sampled, in the names that dashboards have."""
    group = setup.config.num_generations
    gather = lambda name: np.concatenate([getattr(one, name) for one in fresh])
    values, returns, valid = gather("values"), gather("returns"), gather("valid")
    sources = [row.get("data_source") for one in fresh for row in one.sampled.rows]
    groups = [returns[g : g + group][valid[g : g + group]] for g in range(0, len(returns), group)]
    # Equality decides about zero spread: the rounding of a mean would leave a tiny std.
    spread = np.array([one.std(ddof=1) if np.ptp(one) > 0 else 0.0 for one in groups if len(one) > 1])
    # Of what was asked for, not of the scaled returns, whose mean is 0 under normalize_then_sum.
    plain = np.nansum(values * [function.weight for function in setup.rewards], axis=1)
    sizes = np.array([len(ids) for one in fresh for ids in one.sampled.completion_ids])
    truncated = np.concatenate([one.sampled.truncated for one in fresh])
    ended = sizes[~truncated]
    actions = {}
    if setup.sampler.forces:
        masks = gathered([one.sampled.rollout.action_mask for one in fresh])
        count = sum(int(mask[: one.sampled.count].sum()) for one, mask in zip(fresh, masks, strict=True))
        actions["completions/mean_actions"] = count / len(sizes)
    passes = [one.sampled.passes for one in fresh if one.sampled.passes is not None]
    return {
        **reward_metrics(setup.rewards, values, returns, sources if any(sources) else None, setup.config.true_reward),
        "reward": float(plain[valid].mean()) if valid.any() else float("nan"),
        "reward_std": float(spread.mean()) if len(spread) else float("nan"),
        "frac_reward_zero_std": float((spread == 0).mean()) if len(spread) else float("nan"),
        "frac_reward_abstained": float((~valid).mean()),
        "never_solved_share": never_solved_share(host.rates),
        "completions/mean_length": float(sizes.mean()),
        "completions/min_length": float(sizes.min()),
        "completions/max_length": float(sizes.max()),
        "completions/mean_terminated_length": float(ended.mean()) if len(ended) else float("nan"),
        "completions/clipped_ratio": float(truncated.mean()),
        **actions,
        **(speculation_metrics(np.concatenate(passes), sizes) if passes else {}),
    }


def speculation_metrics(passes: Int32[np.ndarray, " N"], sizes: Shaped[np.ndarray, " N"]) -> dict[str, float]:
    """How far guesses went: tokens kept of each pass of a row, of which the first needs no guess, and passes in all."""
    return {
        "speculation/passes": float(passes.sum()),
        "speculation/tokens_per_pass": float(sizes.sum() / passes.sum()),
    }
