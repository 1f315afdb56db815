"""fit(): batches -> updates -> metrics and checkpoints, for everything that trains without sampling in the loop, and for
online preferences, whose source samples.

What a run is made of is put together by `sft.py`, `dpo.py` and `reward_fit.py`; a resumed run continues bit for bit (same
number of devices). Reinforcement learning has a loop of its own: `loop.py`.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from jaxrl_lm import metrics as metric
from jaxrl_lm.assemble import copy_params
from jaxrl_lm.checkpoint import Checkpoints
from jaxrl_lm.clock import Clock
from jaxrl_lm.distributed import agree, any_of, place, writes
from jaxrl_lm.fit_config import FitOptions
from jaxrl_lm.fit_steps import FitSteps
from jaxrl_lm.memory import explained, run_arrays
from jaxrl_lm.models import Model
from jaxrl_lm.options import to_toml
from jaxrl_lm.report import Reporter
from jaxrl_lm.rewards import RewardError
from jaxrl_lm.runs import NonFiniteError, came, check_command, check_same_run, keep_batch, on_signal, open_directory
from jaxrl_lm.types import Frozen, TrainState


@runtime_checkable
class Source(Protocol):
    """Where batches come from; `given.Given` is the plain one."""

    def take(self, step: int, state: TrainState, frozen: Frozen, clock: Clock) -> tuple[Any, dict[str, float]]:
        """The batch of a step (None: nothing to learn), and numbers to log; `tokens`, its real ones, is added up."""

    def observe(self, found: dict[str, float]) -> None:
        """Sees the metrics of each step."""

    def evaluate(self, state: TrainState, frozen: Frozen) -> dict[str, float]:
        """Metrics of the held-out sets, by names that begin with eval/; empty without a set."""

    def state(self) -> dict[str, Any]:
        """A JSON table that `load` goes on from."""

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a saved table."""


class Fit(NamedTuple):
    """A run before its first step."""

    command: str
    config: FitOptions
    directory: Path
    model: Model
    params: dict[str, Any] | None  # what is trained, by name; donated to the state
    frozen: Frozen
    reference_is_start: bool  # the reference is a copy of the policy's first weights
    tokenizer: Any
    generation: dict[str, Any]
    steps: FitSteps
    source: Source
    schedule: Callable[[int], Any]
    total_steps: int
    fingerprint: str
    notes: list[str]
    prepare_frozen: Callable[[Frozen], Frozen] = lambda frozen: frozen  # work on the reference before the first step
    reset_steps: int | None = None  # the reference, part of the state, becomes the policy every so many steps


class FitRun(NamedTuple):
    """A run that has ended, or was told to."""

    directory: Path
    model: Model
    tokenizer: Any
    generation: dict[str, Any]
    state: TrainState
    frozen: Frozen
    step: int
    metrics: list[dict[str, float]]  # of the steps taken by this call
    interrupted: bool  # by a signal: the same command goes on


def fit(setup: Fit) -> FitRun:
    """Trains, evaluates and saves as the config says; on an existing run directory it resumes.

    Raises ValueError for a directory of another run, NonFiniteError and CheckpointError for what goes wrong later;
    earlier checkpoints stay valid.
    """
    config, history = setup.config, []
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(on_signal(signal.SIGTERM))
        checkpoints = stack.enter_context(
            Checkpoints(
                setup.directory / "checkpoints", keep_last=config.save_total_limit, best_metric=config.best_metric
            )
        )
        state, frozen, done, tokens, notes = _start(setup, checkpoints)
        setup = setup._replace(params=None, frozen=Frozen())  # the loop holds what it needs of them
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
        if done == 0 and config.eval_steps and (values := _evaluate(setup, state, frozen, 0)):
            _check_best(config.best_metric, values)
            report.log(0, values)
        step, save_time, before = done, 0.0, setup.source.state()
        for step in range(done + 1, setup.total_steps + 1):
            try:
                state, values, tokens = _step(setup, state, frozen, step, tokens)
            except RewardError:
                if step > 1:  # nothing of the steps before is lost
                    _save(setup, checkpoints, step - 1, state, tokens, {}, before)
                    checkpoints.wait()
                raise
            before = setup.source.state()
            values["time/checkpoint"] = save_time
            last = step == setup.total_steps
            if config.eval_steps and (step % config.eval_steps == 0 or last):
                values |= (found := _evaluate(setup, state, frozen, step))
                _check_best(config.best_metric, found)
            report.log(step, values)
            history.append({"step": step, **values})
            signalled = any_of(bool(stop))
            stopping = last or signalled
            save_time = time.perf_counter()
            if stopping or (config.save_steps and step % config.save_steps == 0) or config.best_metric in values:
                _save(setup, checkpoints, step, state, tokens, values, before)
            save_time = time.perf_counter() - save_time
            if stopping:
                break
        checkpoints.wait()
        if step < setup.total_steps:
            report.message(f"{came(stop)}: saved step {step}; the same command goes on from there")
    interrupted = step < setup.total_steps
    return FitRun(
        setup.directory, setup.model, setup.tokenizer, setup.generation, state, frozen, step, history, interrupted
    )  # fmt: skip


def _evaluate(setup: Fit, state: TrainState, frozen: Frozen, step: int) -> dict[str, float]:
    with explained(lambda: f"step {step}, evaluate", lambda: run_arrays(state, frozen), setup.config):
        return setup.source.evaluate(state, frozen)


def _check_best(name: str | None, values: dict[str, float]) -> None:
    if name is not None and name not in values:
        raise ValueError(f"best_metric={name!r} is no metric of the evaluation; there are {', '.join(values)}")


def _start(setup: Fit, checkpoints: Checkpoints) -> tuple[TrainState, Frozen, int, int, list[str]]:
    """The state to go on from, what stays frozen, the steps done, the tokens seen, and what to say."""
    config, latest, frozen = setup.config, agree(checkpoints.latest()), setup.frozen
    if latest is None:
        if setup.reference_is_start:
            frozen = frozen._replace(reference=copy_params(setup.params["policy"]))
        key = place(jax.random.key(config.seed), setup.steps.plan.replicated)
        with explained(lambda: "start", lambda: {"params": setup.params, "frozen": frozen}, config):
            state, done, tokens, notes = setup.steps.init(setup.params, key), 0, 0, []
    else:
        saved = checkpoints.restore_host(step=latest)
        check_command(setup.directory, setup.command)
        notes = check_same_run(saved, config, directory=setup.directory, fingerprint=setup.fingerprint)
        spare = dict(setup.params)
        if setup.reference_is_start:
            frozen = frozen._replace(reference=spare.pop("policy"))
        jax.tree.map(lambda leaf: leaf.delete(), spare)  # the restored state takes their place
        state, saved = checkpoints.restore(setup.steps.abstract_state, step=latest)
        setup.source.load(saved["source"])
        done, tokens = saved["step"], saved["tokens"]
        notes.append(f"resumed from step {done}")
    open_directory(setup.directory, config, command=setup.command, step=done if latest is not None else -1)
    return state, setup.prepare_frozen(frozen), done, tokens, notes


def _step(
    setup: Fit, state: TrainState, frozen: Frozen, step: int, tokens: int
) -> tuple[TrainState, dict[str, float], int]:
    """One optimiser step: the new state, its metrics, and the tokens seen so far."""
    clock = Clock()
    with explained(lambda: f"step {step}, {clock.part}", lambda: run_arrays(state, frozen), setup.config):
        return _learn(setup, state, frozen, step, tokens, clock)


def _learn(
    setup: Fit, state: TrainState, frozen: Frozen, step: int, tokens: int, clock: Clock
) -> tuple[TrainState, dict[str, float], int]:
    batch, more = setup.source.take(step, state, frozen, clock)
    new_tokens = more.pop("tokens")
    if batch is None:  # nothing to learn from: no optimiser step, momentum would move the weights all the same
        return _reset(setup, state, step), more | clock.metrics() | {"updates": 0.0}, tokens
    with clock("update"):
        rate = float(setup.schedule(int(state.step)))
        state, found = setup.steps.update(state, frozen, batch)
        values = metric.result(found)  # waits for the devices
    if values.pop("nonfinite"):
        path = keep_batch(setup.directory, step, batch)
        raise NonFiniteError(
            f"step {step}: the loss or its gradient is not finite; the batch is in {path}. Lower learning_rate or "
            "max_grad_norm, or look for the rows at fault"
        )
    setup.source.observe(values)
    tokens += int(new_tokens)
    return _reset(setup, state, step), values | more | clock.metrics() | {
        "learning_rate": rate,
        "tokens_per_second/train": new_tokens / clock.seconds["update"],
        "num_tokens": float(tokens),
    }, tokens  # fmt: skip


def _reset(setup: Fit, state: TrainState, step: int) -> TrainState:
    """The state whose reference has become the policy, where that is due."""
    if setup.reset_steps is None or step % setup.reset_steps:
        return state
    moved = setup.steps.follow(state.extra["reference"], state.params["policy"], setup.steps.place(np.float32(0.0)))
    return state._replace(extra=state.extra | {"reference": moved})


def updates(setup: Fit) -> Iterator[tuple[int, TrainState, dict[str, float]]]:
    """Yields (step, state, metrics) after each step from a fresh state, without evaluation, checkpoints and files.

    The state is donated to the next step: keep no part of an old one. Raises NonFiniteError.
    """
    frozen = setup.frozen
    if setup.reference_is_start:
        frozen = frozen._replace(reference=copy_params(setup.params["policy"]))
    frozen = setup.prepare_frozen(frozen)
    key = place(jax.random.key(setup.config.seed), setup.steps.plan.replicated)
    state, tokens = setup.steps.init(setup.params, key), 0
    setup.directory.mkdir(parents=True, exist_ok=True)
    for step in range(1, setup.total_steps + 1):
        state, values, tokens = _step(setup, state, frozen, step, tokens)
        yield step, state, values


def _save(
    setup: Fit, checkpoints: Checkpoints, step: int, state: TrainState, tokens: int, values, source: dict[str, Any]
) -> None:
    table = {
        "step": step,
        "tokens": tokens,
        "source": source,
        "config": to_toml(setup.config),
        "data": setup.fingerprint,
    }
    checkpoints.save(step, state, table, metrics=values)
