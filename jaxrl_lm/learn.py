"""One step's learning: scores and values of what was sampled, credit, and the updates over its minibatches.

The compiled parts are those of `steps.py`; what they are made of: `credit.py`, `batch.py`, `objectives.py`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import algos
from jaxrl_lm import metrics as metric
from jaxrl_lm.batch import Coefficients, Implicit, Rated
from jaxrl_lm.checks import moves_reference, old_logprobs_of
from jaxrl_lm.clock import Clock
from jaxrl_lm.collect import Collected
from jaxrl_lm.credit import Credit, action_ids
from jaxrl_lm.distributed import gather, one_at_a_time
from jaxrl_lm.group_metrics import group_metrics
from jaxrl_lm.host import Host
from jaxrl_lm.layout import Cut, layout_metrics, pack_rows, share_of, with_layout
from jaxrl_lm.mix import MixedBatch
from jaxrl_lm.prepare import Setup
from jaxrl_lm.runs import NonFiniteError, keep_batch
from jaxrl_lm.types import Frozen, Layout, Rollout, Scores, TrainState


class Learned(NamedTuple):
    state: TrainState
    metrics: dict[str, float]
    credit: Credit


class _Scored(NamedTuple):
    old: Scores | None  # of the policy before the updates
    ref: jax.Array | None
    values: jax.Array | None


class _Packed(NamedTuple):
    """The rows as the model reads them, where they are packed."""

    score: Layout | None
    updates: dict[int, Layout]  # by the first row of each minibatch
    metrics: dict[str, float]

    def rows(self, rollout: Rollout) -> tuple[Layout | jax.Array, jax.Array | None]:
        """What scoring takes for tokens and segment_ids."""
        return (rollout.tokens, rollout.segment_ids) if self.score is None else (self.score, None)


def learn(
    setup: Setup, host: Host, state: TrainState, frozen: Frozen, collected: Collected, *, step: int, clock: Clock
) -> Learned:
    """The state after the step's updates. Raises NonFiniteError, and keeps the batch, where one is not finite."""
    config, steps, sampled = setup.config, setup.steps, collected.judged.sampled
    rows = config.prompts_per_step * config.num_generations
    in_reward = setup.algorithm.kl_in == "reward"
    with clock("score"):
        packed = _packed(setup, sampled.rollout)
        scored = jax.block_until_ready(_score(setup, host, state, frozen, collected, packed))
        paid, implicit = _step_rewards(setup, state, frozen, collected, packed)
    if steps.placement.moves_state:
        with clock("move"):
            state = jax.block_until_ready(steps.on_devices(state))
    with clock("update"):
        fill = lambda x, dtype: steps.place(np.concatenate([x, np.zeros(rows - len(x))]).astype(dtype))
        coefficients = _coefficients(setup, host, step)
        credit = steps.credit(
            fill(collected.judged.returns, np.float32),
            fill(collected.judged.valid, bool),
            sampled.rollout,
            scored.old.logprobs if in_reward and scored.ref is not None else None,
            scored.ref if in_reward else None,
            coefficients.kl,
            scored.values,
            None if collected.greedy_returns is None else fill(collected.greedy_returns, np.float32),
            *paid,
        )
        rated = Rated(
            rollout=sampled.rollout,
            temperature=sampled.temperature,
            credit=credit,
            old=scored.old if _uses_old(setup, host) else None,
            values=scored.values,
            ref_logprobs=None if in_reward else scored.ref,
            implicit=implicit,
        )
        read = frozen if steps.placement.reference == "mesh" else frozen._replace(reference=None)
        state, found = _updates(setup, host, state, read, rated, coefficients, step, packed)
    if steps.placement.moves_state:
        with clock("move"):
            state = jax.block_until_ready(steps.at_rest(state))
    found |= _credit_metrics(setup, host, collected, credit, scored) | packed.metrics
    return Learned(state, found, credit)


def _uses_old(setup: Setup, host: Host) -> bool:
    return host.scored or old_logprobs_of(setup.config) == "recompute" or setup.batch_rule.needs_old


def _packed(setup: Setup, rollout: Rollout) -> _Packed:
    """The layouts of a step's rows: of all of them for scores, of each minibatch for its updates."""
    config, steps = setup.config, setup.steps
    if not (config.share_prompt or config.pack_completions):
        return _Packed(None, {}, {})
    tokens, segment_ids, mask = gather((rollout.tokens, rollout.segment_ids, rollout.action_mask))
    rows, size = len(tokens), config.minibatch_completions or len(tokens)
    microbatch = config.microbatch_completions or size
    firsts = range(0, rows, size)
    cuts = [Cut(first, size, size // microbatch) for first in firsts]
    whole = [] if size == rows else [Cut(0, rows, rows // microbatch)]
    found = pack_rows(
        tokens,
        segment_ids,
        mask,
        start=tokens.shape[1] - config.max_completion_length,
        cuts=cuts + whole,
        ways=steps.plan.batch_ways,
        group=share_of(config),
        pack=config.pack_completions,
    )
    layouts = steps.place(found)
    return _Packed(layouts[-1], dict(zip(firsts, layouts, strict=False)), layout_metrics(found[: len(cuts)]))


def _score(
    setup: Setup, host: Host, state: TrainState, frozen: Frozen, collected: Collected, packed: _Packed
) -> _Scored:
    """Scores of the policy where something reads them, of the reference where there is one, and values."""
    config, steps, rollout = setup.config, setup.steps, collected.judged.sampled.rollout
    start = rollout.tokens.shape[1] - config.max_completion_length
    temperature = collected.judged.sampled.temperature
    rows = packed.rows(rollout)
    given = (frozen.base, *rows, temperature, start)
    moves = moves_reference(config)
    reference = state.extra["reference"] if moves else frozen.reference
    score_reference = steps.score if moves else steps.score_reference
    # A KL compares two scorers: the sampler's rounding must not look like a distance.
    compares = reference is not None and setup.algorithm.kl_in == "reward"
    return _Scored(
        old=steps.score(state.params["policy"], *given) if compares or _uses_old(setup, host) else None,
        ref=None if reference is None else score_reference(reference, *given).logprobs,
        values=steps.values(state.params, frozen.base, *rows, start) if config.critic != "none" else None,
    )


def _step_rewards(
    setup: Setup, state: TrainState, frozen: Frozen, collected: Collected, packed: _Packed
) -> tuple[tuple[jax.Array | None, jax.Array | None], Implicit | None]:
    """(rewards of steps, their last tokens), and what an implicit process reward model learns from."""
    config, steps, judged = setup.config, setup.steps, collected.judged
    if config.implicit_prm is None:
        found = collected.steps
        return (None, None) if found is None else steps.place((found.rewards, found.ends)), None
    rollout = judged.sampled.rollout
    start = rollout.tokens.shape[1] - config.max_completion_length
    tokens, segment_ids = packed.rows(rollout)
    rows = rollout._replace(tokens=tokens, segment_ids=segment_ids)
    paid, ref = jax.block_until_ready(steps.implicit(state.params["prm"], frozen.prm_reference, rows, start))
    fill = lambda x, dtype: np.pad(x, (0, len(rollout.tokens) - len(x))).astype(dtype)
    outcomes = steps.place((fill(judged.plain, np.float32), fill(judged.valid, bool)))
    return (paid, rollout.action_mask), Implicit(ref, *outcomes)


def _coefficients(setup: Setup, host: Host, step: int) -> Coefficients:
    learns = float(step > setup.config.critic_warmup_steps or setup.config.critic == "none")
    values = (host.kl_coef, host.entropy_bonus, learns)
    return Coefficients(*(setup.steps.place(np.float32(value)) for value in values))


def _updates(
    setup: Setup,
    host: Host,
    state: TrainState,
    frozen: Frozen,
    rated: Rated,
    coefficients: Coefficients,
    step: int,
    packed: _Packed,
) -> tuple[TrainState, dict[str, float]]:
    """num_iterations passes over the minibatches, or fewer; the metrics of all updates together."""
    config, steps = setup.config, setup.steps
    rows = config.prompts_per_step * config.num_generations
    size = config.minibatch_completions or rows
    rule = setup.scored_rule if host.scored else setup.batch_rule
    learns, truncated = gather((rated.credit.learns, rated.rollout.truncated))
    if rule.mask_truncated:
        learns = learns & ~truncated
    # A minibatch in which no row learns is no optimiser step: momentum and decay would move the weights all the same.
    warm = config.critic == "none" or step > config.critic_warmup_steps  # before, only the critic learns
    teaches = warm and setup.mix is not None and setup.mix.teaches(host.rates)
    starts = [first for first in range(0, rows, size) if teaches or learns[first : first + size].any()]
    starts = starts * config.num_iterations

    def batch_of(first: int, number: int):
        chosen = steps.place(np.arange(first, first + size, dtype=np.int32))
        batch = steps.minibatch(rated, coefficients, state.key, np.int32(number), chosen, rule)
        if packed.updates:
            batch = with_layout(batch, packed.updates[first])
        if setup.mix is None:
            return batch
        drawn = {"steps": setup.stream_steps, "rates": host.rates, "seed": config.seed, "learns": warm}
        return MixedBatch(batch, setup.mix.batches(number, state=state, frozen=frozen, **drawn))

    numbers, each = range(host.updates, host.updates + len(starts)), []
    for first, number in zip(starts, numbers, strict=True):
        state, found = steps.update(state, frozen, batch_of(first, number))
        each.append(found)
        if one_at_a_time():
            jax.block_until_ready(found)
        if config.max_approx_kl is not None:  # the one decision between updates; else they follow without the host
            each[-1] = gather(found)
            if _approx_kl(each[-1]) > config.max_approx_kl:
                break
    host.updates += len(each)
    if not each:
        return state, {"updates": 0.0}
    each = jax.tree.map(jnp.asarray, gather(each))  # every process goes by them, with devices of training or not
    for done, found in enumerate(each):
        if float(found["nonfinite"].value):
            # Made anew rather than held for every update: nothing that a batch is made of (scores, credit, the key, the
            # reference, solve rates) is moved by an update.
            path = keep_batch(setup.directory, step, batch_of(starts[done], numbers[done]))
            later = "the updates after it were done; " if done + 1 < len(each) else ""
            raise NonFiniteError(
                f"step {step}, update {done + 1}: the loss or its gradient is not finite; {later}the batch is in {path}. "
                "Lower learning_rate or max_grad_norm, or look for the rows at fault"
            )
    return state, _metrics_of(each, sampler=old_logprobs_of(config) == "sampler")


def _metrics_of(each: list[metric.Metrics], *, sampler: bool) -> dict[str, float]:
    """The metrics of all updates together. `sampler`: the old policy is the sampler's."""
    merged, done, found = functools.reduce(metric.merge, each), len(each), each[-1]
    # Later, the current policy has moved away from the sampler's weights.
    firsts = {name: value for name, value in each[0].items() if sampler and name.startswith("sampling/")}
    totals = {name for name, value in merged.items() if isinstance(value, metric.Sum)}
    values = metric.result(merged | firsts)
    del values["nonfinite"]
    last = {"approx_kl/last": metric.result(found)["approx_kl"]} if "approx_kl" in found else {}
    return {
        **{name: value / done if name in totals else value for name, value in values.items()},
        **last,
        "updates": float(done),
    }


def _approx_kl(found: metric.Metrics) -> float:
    if "approx_kl" not in found:
        raise ValueError(
            "max_approx_kl needs the metric approx_kl: log it in your objective (a Mean, nats a token), or leave it out"
        )
    return metric.result(found)["approx_kl"]


def _credit_metrics(
    setup: Setup, host: Host, collected: Collected, credit: Credit, scored: _Scored
) -> dict[str, float]:
    """How hard the groups were and where the advantage went; for a critic, how much of the returns it explains."""
    judged, group = collected.judged, setup.config.num_generations
    rollout, count = judged.sampled.rollout, judged.sampled.count
    mask, advantages, kl = gather((rollout.action_mask, credit.advantages, credit.kl))
    per_row = np.where(mask, advantages, 0.0).sum(1)[:count] / np.maximum(mask.sum(1), 1)[:count]
    found = group_metrics(judged.plain, judged.valid, per_row, judged.sampled.texts, group)
    if kl is not None:
        tokens = max(int(mask[:count].sum()), 1)
        mean = lambda x: float(x[judged.valid].mean()) if judged.valid.any() else float("nan")
        found |= {
            "kl": float(kl[:count].sum() / tokens),
            "objective/kl": float(kl[:count].mean()),
            "objective/rlhf_reward": mean(judged.returns - host.kl_coef * kl[:count]),
            "objective/scores": mean(judged.returns),
        }
    if scored.values is not None:
        whole = gather((credit.learns, rollout.turn_ids, scored.values, credit.targets))
        learns, turn_ids, values, targets = jax.tree.map(jnp.asarray, whole)
        learns = jnp.asarray(mask) & learns[:, None]
        ids = action_ids(learns, turn_ids, actions=setup.config.actions, n=setup.config.ngram)
        states = algos.action_starts(learns, ids)  # a value belongs to the state before an action
        found["explained_variance"] = float(algos.explained_variance(values, targets, states))
    return found
