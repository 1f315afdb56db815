"""train(): prompts -> rollouts -> rewards -> batches -> updates -> metrics and checkpoints. The one loop.

Every algorithm goes through it, and so does your own: give `advantages` and `objective` as pure functions. What a run
is made of is put together in `prepare.py`; a resumed run continues bit for bit (same number of devices).
"""

import contextlib
import json
import signal
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_lm import metrics as metric
from jaxrl_lm.checkpoint import Checkpoints, rewind
from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.data import batch_indices
from jaxrl_lm.evaluate import evaluate, probe, probe_message, reward_table
from jaxrl_lm.models import Model
from jaxrl_lm.options import check_resume, from_dict, to_toml
from jaxrl_lm.prepare import Setup, copy_params, prepare, updates_per_step
from jaxrl_lm.report import Reporter
from jaxrl_lm.rewards import RewardError, combine, reward_metrics
from jaxrl_lm.rollout import EVAL, TRAIN, Sampled
from jaxrl_lm.types import Frozen, TrainState
from jaxrl_lm.update import Objective


class NonFiniteError(FloatingPointError):
    """A loss or gradient was NaN or infinite; the message names the step and the file with the batch."""


class Run(NamedTuple):
    """A run that has ended, or was told to."""

    directory: Path
    model: Model
    tokenizer: Any
    state: TrainState
    step: int
    metrics: list[dict[str, float]]  # of the steps taken by this call
    stopped: str | None  # the signal that ended it early


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
    setup = prepare(
        config, reward_functions=reward_functions, dataset=dataset, advantages=advantages, objective=objective
    )
    config, history = setup.config, []
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_on_signal(signal.SIGTERM))
        checkpoints = stack.enter_context(
            Checkpoints(
                setup.directory / "checkpoints", keep_last=config.save_total_limit, best_metric=config.best_metric
            )
        )
        setup, state, frozen, done, tokens, notes = _start(setup, checkpoints)
        report = stack.enter_context(
            Reporter(
                setup.directory,
                total_steps=setup.total_steps,
                report_to=config.report_to,
                logging_steps=config.logging_steps,
            )
        )
        for note in (*setup.notes, *notes):
            report.message(note)
        if done == 0:
            _before_first_step(setup, state, report)
        step, save_time = done, 0.0
        for step in range(done + 1, setup.total_steps + 1):
            try:
                state, values, table = _step(setup, state, frozen, step)
            except RewardError:
                if step > 1:  # nothing of the steps before is lost
                    _save(setup, checkpoints, step - 1, state, tokens, {})
                    checkpoints.wait()
                raise
            tokens += values.pop("tokens")
            values |= {"num_tokens": tokens, "time/checkpoint": save_time}
            last = step == setup.total_steps
            evaluates = config.eval_steps and setup.eval_sets and (step % config.eval_steps == 0 or last)
            if evaluates:
                values |= _evaluate(setup, state, step)
            if config.completions_steps and (step % config.completions_steps == 0 or last):
                report.completions(step, table())
            report.log(step, values)
            history.append({"step": step, **values})
            stopping = last or bool(stop)  # read once: what is decided here is what is said below
            save_time = time.perf_counter()
            if stopping or (config.save_steps and step % config.save_steps == 0) or config.best_metric in values:
                _save(setup, checkpoints, step, state, tokens, values)
            save_time = time.perf_counter() - save_time
            if stopping:
                break
        checkpoints.wait()
        if step < setup.total_steps:
            report.message(f"{stop[0]}: saved step {step}; the same command goes on from there")
    return Run(setup.directory, setup.model, setup.tokenizer, state, step, history, stop[0] if stop else None)


def _save(setup: Setup, checkpoints: Checkpoints, step: int, state: TrainState, tokens: int, values) -> None:
    host = {"step": step, "tokens": tokens, "config": to_toml(setup.config), "data": setup.fingerprint}
    checkpoints.save(step, state, host, metrics=values)


@contextlib.contextmanager
def _on_signal(number: signal.Signals) -> Iterator[list[str]]:
    """A list that holds the signal's name once it has come; the run ends after the step under way."""
    came: list[str] = []
    try:
        before = signal.signal(number, lambda *_: came.append(number.name))
    except ValueError:  # not the main thread: signals are somebody else's
        yield came
        return
    try:
        yield came
    finally:
        signal.signal(number, before)


def _start(setup: Setup, checkpoints: Checkpoints) -> tuple[Setup, TrainState, Frozen, int, int, list[str]]:
    """The state to go on from: that of the latest checkpoint, or a fresh one. Files are rewound to it."""
    config, notes, reference = setup.config, [], None
    latest = checkpoints.latest()
    if latest is None:
        reference = copy_params(setup.params) if config.beta else None
        key = jax.device_put(jax.random.key(config.seed), setup.steps.plan.replicated)
        state, host = setup.steps.init(setup.params, key), {"step": 0, "tokens": 0}
    else:
        if config.beta:
            reference = setup.params
        else:
            jax.tree.map(lambda leaf: leaf.delete(), setup.params)  # the restored state takes their place
        host = checkpoints.restore_host()
        earlier = from_dict(GRPOConfig, tomllib.loads(host["config"]), where="checkpoint")
        for name, (old, new) in check_resume(earlier, config).items():
            notes.append(f"resumed with {name}: {old!r} -> {new!r}")
        if host["data"] != setup.fingerprint:
            raise ValueError(
                f"{setup.directory}: the training prompts are not those that this run was started with (dataset, template "
                "or tokenizer changed): restore them, or give another output_dir to start a new run"
            )
        state, host = checkpoints.restore(setup.steps.abstract_state)
        notes.append(f"resumed from step {host['step']}")
    setup.directory.mkdir(parents=True, exist_ok=True)
    rewind(setup.directory, host["step"] if latest is not None else -1)
    (setup.directory / "config.toml").write_text(to_toml(config))
    return setup._replace(params=None), state, Frozen(reference=reference), host["step"], host["tokens"], notes


def _before_first_step(setup: Setup, state: TrainState, report: Reporter) -> None:
    """The probe of training prompts, and the evaluation that later ones are compared with."""
    config = setup.config
    if config.probe_prompts:
        found = probe(
            setup.sampler,
            setup.steps.prepare_decode(state.params["policy"]),
            state.key,
            setup.prompts,
            setup.rewards,
            temperature=config.temperature,
            limit=config.probe_prompts,
        )
        (setup.directory / "probe.json").write_text(json.dumps(found, indent=2) + "\n")
        report.message(probe_message(found))
    if config.eval_steps and setup.eval_sets:
        values = _evaluate(setup, state, 0)
        if config.best_metric is not None and config.best_metric not in values:
            raise ValueError(
                f"best_metric={config.best_metric!r} is no metric of the evaluation; there are {', '.join(values)}"
            )
        report.log(0, values)


def _evaluate(setup: Setup, state: TrainState, step: int) -> dict[str, float]:
    """Metrics of every evaluation set; what each prompt got goes to eval/<set>/step_<n>.jsonl."""
    config, values = setup.config, {}
    decode_params = setup.steps.prepare_decode(state.params["policy"])
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
            policy_step=int(state.step),
            name=name,
            purpose=EVAL + number,
        )
        path = setup.directory / "eval" / name / f"step_{step:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in found.records))
        values |= found.metrics
    return values


def _step(setup: Setup, state: TrainState, frozen: Frozen, step: int):
    """One step of sampling and its updates: the new state, its metrics, and a function that makes the completion table."""
    config, clock = setup.config, _Clock()
    with clock("generate"):
        indices = batch_indices(
            len(setup.prompts.ids),
            seed=config.seed,
            position=(step - 1) * config.prompts_per_step,
            count=config.prompts_per_step,
        )
        sampled = setup.sampler(
            setup.steps.prepare_decode(state.params["policy"]),  # of the newest weights, each step anew
            state.key,
            setup.prompts,
            indices.tolist(),
            purpose=TRAIN,
            step=step,
            temperature=config.temperature,
            policy_step=int(state.step),
        )
    with clock("reward"):
        values = reward_table(setup.rewards, sampled, config.num_generations)
        returns, valid = combine(
            values,
            [function.weight for function in setup.rewards],
            group_size=config.num_generations,
            aggregation=config.multi_objective_aggregation,
        )
    logged = _reward_metrics(setup, sampled, values, returns, valid)
    with clock("score"):
        old, ref, kl = _score(setup, state, frozen, sampled)
        if kl is not None and config.kl_in == "reward":
            returns = returns - config.beta * kl
            logged["kl"] = float(kl.sum() / max(sum(map(len, sampled.completion_ids)), 1))
    with clock("update"):
        place = setup.steps.place
        advantages = setup.steps.advantages(place(returns.astype(np.float32)), valid=place(valid))
        state, trained = _learn(setup, state, frozen, sampled, advantages, place(valid), old, ref, step)
    generated = sum(map(len, sampled.completion_ids))
    trained_tokens = updates_per_step(config) * generated
    logged |= trained | clock.metrics() | {
        "learning_rate": float(setup.schedule(int(state.step) - 1)),
        "tokens_per_second/generate": generated / clock.seconds["generate"],
        "tokens_per_second/train": trained_tokens / clock.seconds["update"],
        "tokens": generated + config.num_generations * sum(len(setup.prompts.ids[i]) for i in indices),
    }  # fmt: skip

    def table() -> list[dict[str, Any]]:
        host = jax.device_get(
            (advantages, sampled.rollout.turn_ids, sampled.rollout.policy_step, sampled.rollout.action_mask)
        )
        return _completion_rows(setup, sampled, values, *host)

    return state, logged, table


class _Clock:
    """Seconds of each part of a step."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": value for name, value in self.seconds.items()} | {
            "step_time": sum(self.seconds.values())
        }


def _score(setup: Setup, state: TrainState, frozen: Frozen, sampled: Sampled):
    """Old log-probs where several updates need them, the reference's where there is one, and a KL a row."""
    config, rollout = setup.config, sampled.rollout
    start = rollout.tokens.shape[1] - config.max_completion_length
    in_reward = frozen.reference is not None and config.kl_in == "reward"
    score = lambda params: (
        setup.steps.score(params, rollout.tokens, rollout.segment_ids, sampled.temperature, start).logprobs
    )
    # A KL compares two scorers: the sampler's rounding must not look like a distance.
    current = score(state.params["policy"]) if updates_per_step(config) > 1 or in_reward else None
    ref = score(frozen.reference) if frozen.reference is not None else None
    kl = None
    if in_reward:
        kl = np.asarray(setup.steps.kl_sums(current, ref, rollout.action_mask), np.float64)
    old = current if updates_per_step(config) > 1 else None
    return old, ref if config.kl_in == "loss" else None, kl


def _learn(setup: Setup, state, frozen, sampled, advantages, valid, old, ref, step: int):
    """num_iterations passes over the minibatches; the metrics of all updates together."""
    config, steps = setup.config, setup.steps
    rows = config.prompts_per_step * config.num_generations
    size = config.minibatch_completions or rows
    merged, updates = None, 0
    for _ in range(config.num_iterations):
        for first in range(0, rows, size):
            chosen = steps.place(np.arange(first, first + size, dtype=np.int32))
            batch = steps.minibatch(sampled.rollout, sampled.temperature, advantages, valid, old, ref, chosen)
            state, found = steps.update(state, frozen, batch)
            if float(found["nonfinite"].value):
                path = _keep_batch(setup.directory, step, batch)
                raise NonFiniteError(
                    f"step {step}, update {updates + 1}: the loss or its gradient is not finite; the batch is in {path}. "
                    "Lower learning_rate or max_grad_norm, or look for the rows at fault"
                )
            merged = found if merged is None else metric.merge(merged, found)
            updates += 1
    values = metric.result(merged)
    values["loss"] /= updates  # the one total that is not divided yet
    del values["nonfinite"]
    return state, values


def _keep_batch(directory: Path, step: int, batch) -> Path:
    path = directory / f"nonfinite_step_{step:06d}.npz"
    arrays = {name: np.asarray(value) for name, value in batch._asdict().items() if value is not None}
    with tempfile.NamedTemporaryFile(dir=directory, suffix=".npz", delete=False) as file:
        np.savez(file, **arrays)
    Path(file.name).replace(path)
    return path


def _reward_metrics(setup: Setup, sampled: Sampled, values, returns, valid) -> dict[str, float]:
    """Rewards and lengths, in the names that dashboards have."""
    group = setup.config.num_generations
    sources = [row.get("data_source") for row in sampled.rows]
    groups = [returns[g : g + group][valid[g : g + group]] for g in range(0, len(returns), group)]
    # Equality decides about zero spread: the rounding of a mean would leave a tiny std.
    spread = np.array([one.std(ddof=1) if np.ptp(one) > 0 else 0.0 for one in groups if len(one) > 1])
    # Of what was asked for, not of the scaled returns, whose mean is 0 under normalize_then_sum.
    plain = np.nansum(values * [function.weight for function in setup.rewards], axis=1)
    sizes = np.array([len(ids) for ids in sampled.completion_ids])
    ended = sizes[~sampled.truncated]
    return {
        **reward_metrics(setup.rewards, values, returns, sources if any(sources) else None, setup.config.true_reward),
        "reward": float(plain[valid].mean()) if valid.any() else float("nan"),
        "reward_std": float(spread.mean()) if len(spread) else float("nan"),
        "frac_reward_zero_std": float((spread == 0).mean()) if len(spread) else float("nan"),
        "frac_reward_abstained": float((~valid).mean()),
        "completions/mean_length": float(sizes.mean()),
        "completions/min_length": float(sizes.min()),
        "completions/max_length": float(sizes.max()),
        "completions/mean_terminated_length": float(ended.mean()) if len(ended) else float("nan"),
        "completions/clipped_ratio": float(sampled.truncated.mean()),
    }


def _completion_rows(
    setup: Setup, sampled: Sampled, values, advantages, turn_ids, policy_step, mask
) -> list[dict[str, Any]]:
    return [
        {
            "prompt": sampled.prompts[n] if isinstance(sampled.prompts[n], str) else json.dumps(sampled.prompts[n]),
            "completion": sampled.texts[n],
            **{f.name: None if np.isnan(v) else float(v) for f, v in zip(setup.rewards, values[n], strict=True)},
            "advantage": float(advantages[n]),
            "truncated": bool(sampled.truncated[n]),
            "turn_ids": turn_ids[n][mask[n]],
            "policy_step": policy_step[n][mask[n]],
        }
        for n in range(sampled.count)
    ]
