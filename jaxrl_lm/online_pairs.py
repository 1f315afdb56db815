"""Pairs of the policy's own samples: n completions of each prompt, the best and the worst of which make a pair.

What ranks them is a reward (functions, reward models) or a judge, P(first is preferred), whose win rate within the group
is then the score. With refresh_steps=1 this is online DPO; with more, semi-online: pairs for several steps are sampled by
the policy as it was at the first of them. The sampling is that of reinforcement learning (`rollout/sampler.py`).
"""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Bool, Float32, Float64

from jaxrl_lm.assemble import lora_of
from jaxrl_lm.checks import check_held_out, check_routes
from jaxrl_lm.clock import Clock
from jaxrl_lm.data import batch_indices, load_function, read_rows
from jaxrl_lm.distributed import gather, spread
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.evaluate import evaluate, reward_table
from jaxrl_lm.example import Example, Examples
from jaxrl_lm.fit_config import DPOConfig
from jaxrl_lm.fit_prepare import Basis, Timing
from jaxrl_lm.given import Table, pad_sides
from jaxrl_lm.preferences import PairBatches
from jaxrl_lm.prepare import make_sampler, make_sampling, vocabulary_notes
from jaxrl_lm.prompt_sets import buckets_of, drop_notes, encode_with, fingerprint
from jaxrl_lm.reward_model import open_reward_models
from jaxrl_lm.rewards import RewardError, RewardFunction, columns_of, combine, resolve_all
from jaxrl_lm.rollout import EVAL, TRAIN, Sampled, Sampler
from jaxrl_lm.rule_tables import check_speculation
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.steps import Steps, compile_steps
from jaxrl_lm.types import Frozen, Params, TrainState

MOST_BATCHES = 4  # times the prompts needed that are sampled, where groups are all alike


class Online(NamedTuple):
    """What sampling pairs needs."""

    config: DPOConfig
    steps: Steps  # of the sampler
    sampler: Sampler
    prompts: EncodedPrompts
    eval_sets: dict[str, EncodedPrompts]
    rewards: tuple[RewardFunction, ...]  # none with a judge
    judge: Callable[..., Any] | None
    eval_rewards: tuple[RewardFunction, ...]
    table: Table  # shapes of the pairs
    fingerprint: str
    notes: Callable[[Any, Params | None, Timing], list[str]]


def _check(config: DPOConfig, ways: int) -> None:
    """What options alone say; `ways`: devices that rows are split over."""
    if config.num_generations < 2:
        raise ValueError(f"num_generations={config.num_generations}: a pair needs at least 2 samples of a prompt")
    for name in ("refresh_steps", "max_completion_length", "prompts_per_step", "eval_num_generations"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)}: must be at least 1")
    if config.prompts_per_step % ways:
        raise ValueError(
            f"prompts_per_step={config.prompts_per_step} is not divisible by the {ways} devices of the mesh's batch axes"
        )
    if config.temperature <= 0:
        raise ValueError(f"temperature={config.temperature}: pairs are of different samples, so it must be above 0")
    check_speculation(config)
    if config.num_speculative_tokens and config.speculative_source == "last_epoch":
        raise ValueError(
            "speculative_source='last_epoch': sampled pairs keep no completions of earlier epochs; use prompt_lookup"
        )
    if config.judge is not None and config.reward_weights:
        raise ValueError("reward_weights: belongs to reward, not to judge; leave it out")


def _read(
    config: DPOConfig,
    tokenizer: Any,
    dataset: Any,
    rewards: tuple[RewardFunction, ...],
    eval_rewards: tuple[RewardFunction, ...],
) -> tuple[EncodedPrompts, dict[str, EncodedPrompts]]:
    """The prompts of training and of each evaluation set, whose routes to rewards are checked."""
    rows = read_rows(dataset if dataset is not None else config.dataset, name="dataset")
    check_routes(rewards, rows, "dataset")
    prompts = encode_with(config, tokenizer, rows, "dataset")
    eval_sets = {}
    for name, source in config.eval_dataset.items():
        held = read_rows(source, name=f"eval_dataset {name!r}")
        check_routes(eval_rewards, held, f"eval_dataset {name!r}")
        eval_sets[name] = encode_with(config, tokenizer, held, f"eval_dataset {name!r}")
    if eval_sets and config.eval_steps and not eval_rewards:
        raise ValueError("eval_reward_functions: with a judge, the evaluation needs reward functions of its own")
    check_held_out(prompts, eval_sets)
    return prompts, eval_sets


def _sampling_of(config: DPOConfig, basis: Basis) -> SamplingConfig:
    sampling = make_sampling(config, basis.tokenizer, basis.generation)
    if sampling.forces:
        raise ValueError(
            "forced_tokens and max_thinking_tokens: sampled pairs are trained whole, with what the policy did not choose; "
            "leave them out"
        )
    return sampling


def open_online(config: DPOConfig, basis: Basis, dataset: Any, reward_functions) -> Online:
    """Prompts, sampler and rewards. Raises ValueError, naming option, file or row, for what does not fit."""
    _check(config, basis.plan.batch_ways)
    given = reward_functions if reward_functions is not None else config.reward
    given, eval_given = open_reward_models(given, config.eval_reward_functions, plan=basis.plan, dtype=config.dtype)
    rewards = resolve_all(given, config.reward_weights) if given else ()
    judge = load_function(config.judge, option="judge") if config.judge is not None else None
    eval_rewards = resolve_all(eval_given) if eval_given else rewards
    prompts, eval_sets = _read(config, basis.tokenizer, dataset, rewards, eval_rewards)
    buckets, start = buckets_of(config, (prompts, *eval_sets.values()))
    sampling, count = _sampling_of(config, basis), config.prompts_per_step * config.num_generations
    steps = compile_steps(basis.model, basis.plan, objective=None, tx=optax.identity(), rows=count, sampling=sampling,
                          lora=lora_of(config))  # fmt: skip
    table = Table(
        Examples([], [], 0, 0, 0, 0),
        start,
        False, (start + config.max_completion_length,), config.rows_per_step,
        basis.pad_token_id,
    )  # fmt: skip

    def notes(trained: Any, base: Params | None, time: Timing) -> list[str]:
        return [
            *drop_notes({"dataset": prompts, **eval_sets}, config.max_prompt_length),
            *vocabulary_notes(basis.model, basis.tokenizer),
            f"{len(prompts.ids)} training prompts, {time.total_steps} steps of {config.rows_per_step} pairs, sampled anew "
            f"every {config.refresh_steps} steps, mesh {dict(basis.plan.mesh.shape)}",
        ]

    return Online(
        config=config,
        steps=steps,
        sampler=make_sampler(
            steps, config, basis.tokenizer, sampling, buckets=buckets, prompts=config.prompts_per_step,
            vocab=basis.model.config.vocab_size,
        ),
        prompts=prompts,
        eval_sets=eval_sets,
        rewards=rewards,
        judge=judge,
        eval_rewards=eval_rewards,
        table=table,
        fingerprint=fingerprint(prompts),
        notes=notes,
    )  # fmt: skip


class Pair(NamedTuple):
    """Two completions of a prompt as tokens, the better one first, and the sampling policy's log-probs."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    logprobs: tuple[list[float], list[float]]


class OnlinePairs:
    """The source of a run whose pairs are sampled; see `fit.Source`."""

    def __init__(self, online: Online, make: PairBatches):
        self._online, self._make = online, make
        self._waiting: list[Pair] = []  # sampled for the steps until the next refresh
        self._drawn = 0  # prompts so far
        self._calls = 0  # of the sampler; no two share a key

    def take(self, step: int, state: TrainState, frozen: Frozen, clock: Clock) -> tuple[Any, dict[str, float]]:
        """The batch of a step, sampled first where a refresh is due."""
        config, online = self._online.config, self._online
        found: dict[str, float] = {}
        if (step - 1) % config.refresh_steps == 0:
            found = self._refresh(state, frozen, clock, config.rows_per_step * config.refresh_steps)
        left = config.refresh_steps - (step - 1) % config.refresh_steps
        share = -(-len(self._waiting) // left)  # fewer pairs than asked for are spread over the steps
        mine, self._waiting = self._waiting[:share], self._waiting[share:]
        found |= {"pairs/share": len(mine) / config.rows_per_step, "epoch": self._drawn / len(online.prompts.ids)}
        if not mine:
            return None, found | {"tokens": 0.0}
        with clock("score"):
            sides = [tuple(_example(pair.prompt, ids) for ids in (pair.chosen, pair.rejected)) for pair in mine]
            host = pad_sides(sides, list(range(len(mine))), online.table)
            old = self._old_logprobs(mine, host.tokens.shape) if "inpo" in config.loss_type else None
            batch = jax.block_until_ready(self._make.batch(host, online.table, state, frozen, old_logprobs=old))
        return batch, found | {"tokens": float((host.segment_ids[: len(mine)] > 0).sum())}

    def _old_logprobs(self, pairs: Sequence[Pair], shape: tuple[int, ...]) -> Float32[np.ndarray, "N 2 T"]:
        """Those of the policy that sampled, where the batch has the tokens."""
        old = np.zeros(shape, np.float32)
        for row, pair in enumerate(pairs):
            for side, values in enumerate(pair.logprobs):
                old[row, side, self._online.table.start :][: len(values)] = values
        return old

    def _refresh(self, state: TrainState, frozen: Frozen, clock: Clock, needed: int) -> dict[str, float]:
        """Samples until there are as many pairs as needed, or `MOST_BATCHES` times the prompts have been asked."""
        online, config = self._online, self._online.config
        with clock("generate"):
            decode_params = online.steps.prepare_decode(state.params["policy"], frozen.base)
        pairs: list[Pair] = []
        scores, lengths, asked, tokens, most = [], [], 0, 0, MOST_BATCHES * needed
        while len(pairs) < needed and asked < most:
            count = min(config.prompts_per_step, needed - len(pairs), most - asked)
            indices = batch_indices(
                len(online.prompts.ids), seed=config.seed, position=self._drawn, count=count
            ).tolist()
            self._drawn, self._calls, asked = self._drawn + count, self._calls + 1, asked + count
            with clock("generate"):
                sampled = online.sampler(
                    decode_params, state.key, online.prompts, indices, purpose=TRAIN, step=self._calls,
                    temperature=config.temperature, policy_step=int(state.step),
                )  # fmt: skip
            with clock("reward"):
                values, valid = self._rank(sampled)
            pairs += best_and_worst(online.prompts, indices, sampled, values, valid)
            scores.append(values[valid])
            lengths += map(len, sampled.completion_ids)
            tokens += sum(map(len, sampled.completion_ids))
        self._waiting = pairs
        given = np.concatenate(scores)
        return {
            "reward": float(given.mean()) if len(given) else math.nan,
            "pairs/kept_share": len(pairs) / asked,
            "completions/mean_length": float(np.mean(lengths)),
            "num_sampled_tokens": float(tokens),
            "tokens_per_second/generate": tokens / clock.seconds["generate"],
        }

    def _rank(self, sampled: Sampled) -> tuple[Float64[np.ndarray, "P n"], Bool[np.ndarray, "P n"]]:
        """A number of every sample, by which those of its prompt are ordered, and whether it has one."""
        online, group = self._online, self._online.config.num_generations
        if online.judge is not None:
            return win_rates(online.judge, sampled, group, name=online.config.judge)
        table = reward_table(online.rewards, sampled, group)
        values, valid = combine(table, [function.weight for function in online.rewards], group_size=group)
        return values.reshape(-1, group), valid.reshape(-1, group)

    def observe(self, found: Mapping[str, float]) -> None:
        """Sees the metrics of each step."""
        self._make.observe(found)

    def evaluate(self, state: TrainState, frozen: Frozen) -> dict[str, float]:
        """As in reinforcement learning: greedy accuracy and pass@k of every set."""
        online, config, values = self._online, self._online.config, {}
        if not online.eval_sets:
            return values
        decode_params = online.steps.prepare_decode(state.params["policy"], frozen.base)
        for number, (name, prompts) in enumerate(online.eval_sets.items()):
            found = evaluate(
                online.sampler, decode_params, state.key, prompts, online.eval_rewards, temperature=config.temperature,
                samples=config.eval_num_generations, limit=config.eval_limit, policy_step=int(state.step), name=name,
                purpose=EVAL + number,
            )  # fmt: skip
            values |= found.metrics
        return values

    def state(self) -> dict[str, Any]:
        """Pairs that wait, and how far the prompts have been drawn."""
        return {
            "waiting": [pair._asdict() for pair in self._waiting],
            "drawn": self._drawn,
            "calls": self._calls,
            "make": self._make.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """See `state`."""
        self._waiting = [Pair(**{**one, "logprobs": tuple(one["logprobs"])}) for one in state["waiting"]]
        self._drawn, self._calls = state["drawn"], state["calls"]
        self._make.load(state["make"])


def _example(prompt: list[int], completion: list[int]) -> Example:
    return Example([*prompt, *completion], [False] * len(prompt) + [True] * len(completion))


def best_and_worst(
    prompts: EncodedPrompts,
    indices: Sequence[int],
    sampled: Sampled,
    values: Float64[np.ndarray, "P n"],
    valid: Bool[np.ndarray, "P n"],
) -> list[Pair]:
    """A pair of each prompt whose samples differ in value: the first best and the first worst of them.

    Samples without a value or without a token are left out.
    """
    group, pairs = values.shape[1], []
    logprobs, mask = gather((sampled.rollout.logprobs, sampled.rollout.action_mask))
    for place, index in enumerate(indices):
        rows = [n for n in range(group) if valid[place, n] and sampled.completion_ids[place * group + n]]
        if not rows:
            continue
        best = max(rows, key=lambda n: values[place, n])
        worst = min(rows, key=lambda n: values[place, n])
        ids = [sampled.completion_ids[place * group + n] for n in (best, worst)]
        if values[place, best] == values[place, worst] or ids[0] == ids[1]:
            continue
        own = [logprobs[place * group + n][mask[place * group + n]].tolist() for n in (best, worst)]
        pairs.append(Pair(prompts.ids[index], *ids, tuple(own)))
    return pairs


def win_rates(
    judge: Callable[..., Any], sampled: Sampled, group: int, *, name: str | None
) -> tuple[Float64[np.ndarray, "P n"], Bool[np.ndarray, "P n"]]:
    """The mean of P(i ≻ j) over the other samples j of the prompt, from `judge(prompts, completions, others, **columns)`.

    Of several processes each judges its share of the prompts. Source: SPO (Swamy et al., 2024).

    Raises RewardError for another number of answers than pairs, or one outside [0, 1].
    """
    if inspect.iscoroutinefunction(judge):
        raise RewardError(f"judge {name}: an async judge is not supported; return a list")
    own = lambda prompts: _win_rates(judge, sampled, group, prompts, name)
    rates = np.array(spread(sampled.count // group, own, raises=RewardError), np.float64)
    return rates, np.ones(rates.shape, bool)


def _win_rates(judge: Callable[..., Any], sampled: Sampled, group: int, prompts: range, name: str | None) -> list:
    """Of these prompts alone."""
    pairs = [(p * group + i, p * group + j) for p in prompts for i in range(group) for j in range(group) if i != j]
    if not pairs:
        return []
    first, second = ([index for index, _ in pairs], [index for _, index in pairs])
    texts = lambda rows: [sampled.texts[row] for row in rows]
    columns = {key: [values[row] for row in first] for key, values in columns_of(sampled.rows).items()}
    shown = [sampled.prompts[row] for row in first]
    try:
        answers = judge(prompts=shown, completions=texts(first), others=texts(second), **columns)
    except Exception as error:
        raise RewardError(f"judge {name}: {type(error).__name__}: {error}") from error
    if not isinstance(answers, Sequence | np.ndarray):
        raise RewardError(f"judge {name}: returned {answers!r}, not a list")
    if len(answers) != len(pairs):
        raise RewardError(f"judge {name}: {len(answers)} answers for {len(pairs)} pairs")
    for row, answer in enumerate(answers):
        if not isinstance(answer, numbers.Real) or not 0.0 <= answer <= 1.0:
            raise RewardError(f"judge {name}: pair {row}: {answer!r} is no probability")
    return np.asarray(answers, np.float64).reshape(len(prompts), group, group - 1).mean(axis=2).tolist()
