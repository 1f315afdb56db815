"""train(): prompts -> rollouts -> rewards -> batches -> updates -> metrics and checkpoints. The one loop.

Every algorithm goes through it, and so does your own: give `advantages` and `objective` as pure functions. What a run
is made of is put together in `prepare.py`; a resumed run continues bit for bit (same number of devices).
"""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_lm.assemble import copy_params
from jaxrl_lm.checkpoint import Checkpoints
from jaxrl_lm.checks import moves_reference, needs_reference, updates_per_step
from jaxrl_lm.clock import Clock
from jaxrl_lm.collect import Collected, collect
from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.credit import Credit
from jaxrl_lm.distributed import agree, any_of, gather, place, writes
from jaxrl_lm.evaluate import evaluate, probe, probe_message
from jaxrl_lm.flight import Ahead, Flight
from jaxrl_lm.host import Host, make_host
from jaxrl_lm.learn import learn
from jaxrl_lm.memory import explained, run_arrays
from jaxrl_lm.models import Model
from jaxrl_lm.options import to_toml
from jaxrl_lm.placement import as_saved, saved_shapes
from jaxrl_lm.prepare import Setup, prepare
from jaxrl_lm.report import Reporter
from jaxrl_lm.rewards import RewardError
from jaxrl_lm.rollout import EVAL
from jaxrl_lm.runs import came, check_command, check_same_run, on_signal, open_directory
from jaxrl_lm.sharding import keep, move
from jaxrl_lm.types import Frozen, TrainState
from jaxrl_lm.update import Objective

TURNS = (
    "max_off_policy_steps=1: sampling and updates take turns here (they share several devices, or are made by several "
    "processes): the next batch is sampled before each update instead of beside it"
)


class Run(NamedTuple):
    """A run that has ended, or was told to."""

    directory: Path
    model: Model
    tokenizer: Any
    state: TrainState
    step: int
    metrics: list[dict[str, float]]  # of the steps taken by this call
    stopped: str | None  # what ended it early: a signal, or a spent kl_budget
    interrupted: bool  # by a signal: the same command goes on


def train(
    config: GRPOConfig,
    *,
    reward_functions: Sequence[Callable[..., Any]] | None = None,
    dataset: Any = None,
    advantages: Callable[..., jax.Array] | None = None,
    objective: Objective | None = None,
) -> Run:
    """Trains, evaluates and saves as the config says; on an existing run directory it resumes.

    `reward_functions` (Python callables) and `dataset` (rows) stand in for the config's names;
    `advantages(returns, *, group_size, valid) -> [N]` and `objective(params, frozen, batch, *, model) -> (loss, metrics)`
    for the algorithm's. Raises ValueError for options, files and rows that do not fit, RewardError, CheckpointError and
    NonFiniteError for what goes wrong later; earlier checkpoints stay valid.
    """
    if config.seeds != 1:
        raise ValueError(f"seeds={config.seeds}: train makes one run; `train_seeds` and the command line make several")
    return run(
        prepare(config, reward_functions=reward_functions, dataset=dataset, advantages=advantages, objective=objective)
    )


def run(setup: Setup) -> Run:
    """The run that has been prepared, see `train`."""
    config, history = setup.config, []
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(on_signal(signal.SIGTERM))
        checkpoints = stack.enter_context(
            Checkpoints(
                setup.directory / "checkpoints", keep_last=config.save_total_limit, best_metric=config.best_metric
            )
        )
        setup, host, state, frozen, done, notes = _start(setup, checkpoints)
        flight = stack.enter_context(Flight(setup)) if config.max_off_policy_steps else None
        if flight is not None:
            flight.load(checkpoints.restore_host(step=done).get("flight") if done else None)
            notes += [TURNS] * flight.takes_turns
        report = stack.enter_context(
            Reporter(
                setup.directory,
                total_steps=setup.total_steps,
                report_to=config.report_to,
                logging_steps=config.logging_steps,
                writes=writes(),
            )
        )
        for note in (*setup.notes, *notes):
            report.message(note)
        if done == 0:
            _before_first_step(setup, state, frozen, report)
        step, save_time, spent, signalled = done, 0.0, host.spent, False
        before = host.snapshot()  # of the last whole step
        for step in range(done + 1, setup.total_steps + 1) if spent is None else ():
            try:
                state, values, table = _step(setup, host, flight, state, frozen, step)
            except RewardError:
                if step > 1:  # nothing of the steps before is lost
                    _save(setup, checkpoints, step - 1, state, before(), {})
                    checkpoints.wait()
                raise
            values["time/checkpoint"] = save_time
            state = _move_reference(setup, state, step)
            state, spent = _within_limits(setup, host, state, values, report)
            before = host.snapshot()
            last = step == setup.total_steps or spent is not None
            evaluates = config.eval_steps and setup.eval_sets and (step % config.eval_steps == 0 or last)
            if evaluates:
                values |= _evaluate(setup, state, frozen, step)
            if config.completions_steps and (step % config.completions_steps == 0 or last):
                report.completions(step, table())
            report.log(step, values)
            history.append({"step": step, **values})
            signalled = any_of(bool(stop))  # read once: what is decided here is what is said below
            stopping = last or signalled
            save_time = time.perf_counter()
            if stopping or (config.save_steps and step % config.save_steps == 0) or config.best_metric in values:
                _save(setup, checkpoints, step, state, before(), values, flight)
            save_time = time.perf_counter() - save_time
            if stopping:
                break
        checkpoints.wait()
        if spent is not None:
            report.message(f"step {step}: {spent}; the run ends here")
        elif step < setup.total_steps:
            report.message(f"{came(stop)}: saved step {step}; the same command goes on from there")
    interrupted = signalled and step < setup.total_steps and spent is None
    stopped = came(stop) if interrupted else spent
    return Run(setup.directory, setup.model, setup.tokenizer, state, step, history, stopped, interrupted)


def _save(
    setup: Setup,
    checkpoints: Checkpoints,
    step: int,
    state: TrainState,
    host: dict[str, Any],
    values,
    flight: Flight | None = None,
) -> None:
    table = {"step": step, "host": host, "config": to_toml(setup.config), "data": setup.fingerprint}
    if flight is not None:
        table["flight"] = flight.state()
    checkpoints.save(step, as_saved(state, setup.steps.placement), table, metrics=values)


def _start(setup: Setup, checkpoints: Checkpoints) -> tuple[Setup, Host, TrainState, Frozen, int, list[str]]:
    """The state to go on from: that of the latest checkpoint, or a fresh one. Files are rewound to it."""
    config, notes, done, latest = setup.config, [], 0, agree(checkpoints.latest())
    host = make_host(config, setup.prompts.rows, setup.algorithm.beta)
    key = place(jax.random.key(config.seed), setup.steps.plan.replicated)
    keeps = needs_reference(config) and not moves_reference(config)  # one that moves is part of the state
    if latest is None:
        prm = copy_params(setup.params["prm"]) if "prm" in setup.params else None
        with explained(lambda: "start", lambda: {"params": setup.params}, config):
            reference = keep(setup.params["policy"], setup.steps.reference) if keeps else None
            state = setup.steps.init(setup.params, key)
    else:
        prm = setup.params.get("prm")
        reference = move(setup.params["policy"], setup.steps.reference) if keeps else None
        kept = {id(leaf) for leaf in jax.tree.leaves((prm, reference))}
        spare = [leaf for leaf in jax.tree.leaves(setup.params) if id(leaf) not in kept]
        jax.tree.map(lambda leaf: leaf.delete(), spare)  # the restored state takes their place
        saved = checkpoints.restore_host(step=latest)
        check_command(setup.directory, None)
        notes += check_same_run(saved, config, directory=setup.directory, fingerprint=setup.fingerprint)
        abstract = setup.steps.abstract_state
        state, saved = checkpoints.restore(saved_shapes(abstract, setup.steps.placement), step=latest)
        state = move(state, jax.tree.map(lambda x: x.sharding, abstract), delete=True)
        host.load(saved["host"], rows=setup.prompts.rows)
        done = saved["step"]
        notes.append(f"resumed from step {done}")
    frozen = Frozen(reference, setup.base, prm_reference=prm, teacher=setup.teacher)
    state = setup.steps.at_rest(state)
    open_directory(setup.directory, config, command=None, step=done if latest is not None else -1)
    return setup._replace(params=None), host, state, frozen, done, notes


def _before_first_step(setup: Setup, state: TrainState, frozen: Frozen, report: Reporter) -> None:
    """The probe of training prompts, and the evaluation that later ones are compared with."""
    config = setup.config
    if config.probe_prompts:
        found = probe(
            setup.sampler,
            setup.steps.prepare_decode(state.params["policy"], frozen.base),
            state.key,
            setup.prompts,
            setup.rewards,
            temperature=config.temperature,
            limit=config.probe_prompts,
        )
        if writes():
            (setup.directory / "probe.json").write_text(json.dumps(found, indent=2) + "\n")
        report.message(probe_message(found))
    if config.eval_steps and setup.eval_sets:
        values = _evaluate(setup, state, frozen, 0)
        if config.best_metric is not None and config.best_metric not in values:
            raise ValueError(
                f"best_metric={config.best_metric!r} is no metric of the evaluation; there are {', '.join(values)}"
            )
        report.log(0, values)


def _evaluate(setup: Setup, state: TrainState, frozen: Frozen, step: int) -> dict[str, float]:
    """Metrics of every evaluation set; what each prompt got goes to eval/<set>/step_<n>.jsonl."""
    with explained(lambda: f"step {step}, evaluate", lambda: run_arrays(state, frozen), setup.config):
        return _evaluate_sets(setup, state, frozen, step)


def _evaluate_sets(setup: Setup, state: TrainState, frozen: Frozen, step: int) -> dict[str, float]:
    config, values = setup.config, {}
    decode_params = setup.steps.prepare_decode(state.params["policy"], frozen.base)
    for number, (name, prompts) in enumerate(setup.eval_sets.items()):
        found = evaluate(
            setup.sampler,
            decode_params,
            state.key,
            prompts,
            setup.eval_rewards,
            temperature=config.temperature,
            samples=config.eval_num_generations,
            limit=config.eval_limit,
            policy_step=int(gather(state.step)),
            name=name,
            purpose=EVAL + number,
        )
        if writes():
            path = setup.directory / "eval" / name / f"step_{step:06d}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in found.records))
        values |= found.metrics
    return values


def _step(setup: Setup, host: Host, flight: Flight | None, state: TrainState, frozen: Frozen, step: int):
    """One step of sampling and its updates: the new state, its metrics, and a function that makes the completion table."""
    clock = Clock()
    with explained(lambda: f"step {step}, {clock.part}", lambda: run_arrays(state, frozen), setup.config):
        return _sample_and_learn(setup, host, flight, state, frozen, step, clock)


def _batch(
    setup: Setup, host: Host, flight: Flight | None, state: TrainState, frozen: Frozen, step: int, clock: Clock
) -> Ahead:
    """What the step learns from: sampled by the newest weights, or the batch in flight, and then the next one is sampled
    by them."""
    ahead = None if flight is None else flight.take()
    with clock("weights"):  # the newest
        decode_params = jax.block_until_ready(setup.steps.prepare_decode(state.params["policy"], frozen.base))
    policy_step = int(gather(state.step))
    if ahead is None:
        found = collect(setup, host, decode_params, state.key, step=step, policy_step=policy_step, clock=clock)
        ahead = Ahead(found, step - 1, clock.seconds["generate"])
    if flight is not None:  # after the last step too: a run that is made longer goes on with it
        flight.launch(host, decode_params, step=step - 1, policy_step=policy_step)
    return ahead


def _sample_and_learn(
    setup: Setup, host: Host, flight: Flight | None, state: TrainState, frozen: Frozen, step: int, clock: Clock
):
    config = setup.config
    collected, after, seconds = _batch(setup, host, flight, state, frozen, step, clock)
    learned = learn(setup, host, state, frozen, collected, step=step, clock=clock)
    state, found = learned.state, learned.metrics
    if flight is not None:
        flight.land(host, clock)
        found["sampling/off_policy_steps"] = float(step - 1 - after)
    trained_tokens = (
        found["updates"]
        / updates_per_step(config)
        * config.num_iterations
        * sum(map(len, collected.judged.sampled.completion_ids))
    )
    host.tokens += collected.generated + collected.prompt_tokens
    values = collected.metrics | found | clock.metrics() | {
        "learning_rate": host.lr_scale * float(setup.schedule(max(int(gather(state.step)) - 1, 0))),
        "tokens_per_second/generate": collected.generated / seconds,
        "tokens_per_second/train": trained_tokens / clock.seconds["update"],
        "num_tokens": host.tokens,
    }  # fmt: skip
    return state, values | _steer(setup, host, values), lambda: _completion_rows(setup, collected, learned.credit)


def _steer(setup: Setup, host: Host, values: dict[str, float]) -> dict[str, float]:
    """Moves what follows the measurements of a step, and logs where it stands."""
    config, found = setup.config, {}
    per_completion = values.get("kl", float("nan")) * values["completions/mean_length"]
    host.adapt(
        config,
        kl=per_completion,
        entropy=values.get("entropy", float("nan")),
        completions=config.prompts_per_step * config.num_generations,
    )
    if config.target_kl is not None:
        found["kl_coef"] = host.kl_coef
    if config.target_entropy is not None:
        found["entropy_coef"] = host.entropy_bonus
    if "kl" in values:
        found["sqrt_kl"] = max(per_completion, 0.0) ** 0.5
    return found


def _move_reference(setup: Setup, state: TrainState, step: int) -> TrainState:
    """The state whose reference has followed the policy, or become it."""
    config = setup.config
    if config.reference_ema is not None:
        ema = config.reference_ema
    elif config.reference_reset_steps is not None and step % config.reference_reset_steps == 0:
        ema = 0.0
    else:
        return state
    reference = setup.steps.follow(state.extra["reference"], state.params["policy"], setup.steps.place(np.float32(ema)))
    return state._replace(extra=state.extra | {"reference": reference})


def _within_limits(setup: Setup, host: Host, state: TrainState, values: dict[str, float], report: Reporter):
    """The state, and why the run ends here; None where it goes on. Says what it changes."""
    config = setup.config
    gap = values.get("sampling/logp_difference/mean", 0.0)
    if setup.scored_rule is not setup.batch_rule and not host.scored and gap > config.max_sampler_gap:
        host.scored = True
        report.message(
            f"sampler and scorer differ by {gap:.3g} nats a token, more than max_sampler_gap={config.max_sampler_gap}: "
            "from now on batches are scored, and weighted by sampler_correction="
            f"{setup.scored_rule.sampler_correction}"
        )
    if config.kl_budget is None or not values["updates"]:  # without an update nothing was measured, nor has moved
        return state, None
    if "sqrt_kl" not in values:
        raise ValueError(
            "kl_budget needs the metric kl: log it in your objective (nats a token), or leave kl_budget out"
        )
    if not values["sqrt_kl"] ** 2 > config.kl_budget / host.lr_scale:
        return state, None
    spent = f"{values['sqrt_kl'] ** 2:.3g} nats a completion from the initial policy"
    if config.kl_budget_action == "stop":
        host.spent = f"kl_budget={config.kl_budget} is spent: {spent}"
        return state, host.spent
    host.lr_scale /= 2
    report.message(f"{spent}: the learning rate is halved, to {host.lr_scale:g} of the schedule's")
    scale = setup.steps.place(np.float32(host.lr_scale))
    return state._replace(extra=state.extra | {"lr_scale": scale}), None


def _completion_rows(setup: Setup, collected: Collected, credit: Credit) -> list[dict[str, Any]]:
    judged, sampled = collected.judged, collected.judged.sampled
    rollout = sampled.rollout
    advantages, turn_ids, policy_step, mask = gather(
        (credit.advantages, rollout.turn_ids, rollout.policy_step, rollout.action_mask)
    )
    return [
        {
            "prompt": sampled.prompts[n] if isinstance(sampled.prompts[n], str) else json.dumps(sampled.prompts[n]),
            "completion": sampled.texts[n],
            **{f.name: None if np.isnan(v) else float(v) for f, v in zip(setup.rewards, judged.values[n], strict=True)},
            "advantage": float(advantages[n][mask[n]].mean()) if mask[n].any() else 0.0,
            "truncated": bool(sampled.truncated[n]),
            "turn_ids": turn_ids[n][mask[n]],
            "policy_step": policy_step[n][mask[n]],
        }
        for n in range(sampled.count)
    ]
