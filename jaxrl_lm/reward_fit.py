"""Training reward models: from comparisons or outcomes (`jaxrl-lm reward`), from labels of steps (`jaxrl-lm prm`).

The model is a decoder without its unembedding and a head (`models/heads.py`); it starts from a language model, or goes on
from a reward model. The loop is `fit.py`, the losses are `algos.reward_model_loss` and its relatives.
"""

import functools
import math
import numbers
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm.assemble import compute_dtype, with_attention, with_remat
from jaxrl_lm.distributed import place_tree
from jaxrl_lm.fit import Fit, FitRun, fit
from jaxrl_lm.fit_batches import comparison_batch, labelled_batch
from jaxrl_lm.fit_config import PRMConfig, RewardConfig
from jaxrl_lm.fit_objectives import ComparisonObjective, LabelledObjective
from jaxrl_lm.fit_prepare import Basis, Tables, make_tables, open_model, start_notes, timing
from jaxrl_lm.fit_steps import FitSteps, compile_fit
from jaxrl_lm.given import Given, HostRows, Stateless, Table, fingerprint
from jaxrl_lm.models import (
    Model,
    classifier_settings,
    classifier_specs,
    generation_config,
    init_head,
    load_classifier_start,
    save_ensemble,
    save_process_model,
    save_reward_model,
    stacked,
    trunk_model,
)
from jaxrl_lm.optim import optimizer_of
from jaxrl_lm.reward_sequences import encode_comparisons, encode_outcomes, encode_steps
from jaxrl_lm.sharding import Plan
from jaxrl_lm.train_state import state_shardings
from jaxrl_lm.types import ComparisonBatch, Frozen, LabelledBatch, Params, TrainState

PROCESS_LABELS = 2  # wrong and right, as in TRL


def train_reward(config: RewardConfig, *, dataset: Any = None) -> FitRun:
    """Trains as the config says; `dataset` (rows) stands in for the config's. Raises as `fit` and `prepare_reward`."""
    return fit(prepare_reward(config, dataset=dataset))


def train_prm(config: PRMConfig, *, dataset: Any = None) -> FitRun:
    """Trains as the config says; `dataset` (rows) stands in for the config's. Raises as `fit` and `prepare_prm`."""
    return fit(prepare_prm(config, dataset=dataset))


class Start(NamedTuple):
    """What training starts from."""

    basis: Basis
    fresh: bool  # the head is


def _open(config: RewardConfig | PRMConfig, *, labels: int, bias: bool) -> Start:
    """The checked config and the model: a language model gets a fresh head, a model of the same kind keeps its own."""
    for name in ("prompt_template", "system_prompt"):
        if getattr(config, name) is not None:
            raise ValueError(f"{name}: a reward model reads a row's own prompt, in training as in use; leave it out")
    fresh = []

    def load(name: str, plan: Plan, *, dtype: str | None, param_dtype: str, remat: str | None, attention: str):
        model, params, tokenizer, is_fresh = load_classifier_start(
            name, plan=plan, dtype=param_dtype, compute_dtype=compute_dtype(dtype), labels=labels, bias=bias,
            key=head_key(config.seed, 0),
        )  # fmt: skip
        fresh.append(is_fresh)
        return with_attention(with_remat(model, remat), attention), params, tokenizer, generation_config(name)

    start = Start(open_model(config, load), fresh[0])
    if not start.fresh:
        _check_settings(start.basis.config)
    return start


def _check_settings(config: RewardConfig | PRMConfig) -> None:
    """Raises ValueError where a model goes on with other text than it was trained on."""
    name = "append_eos" if isinstance(config, RewardConfig) else "step_separator"
    own = classifier_settings(config.model)[name]
    if own is not None and own != getattr(config, name):
        raise ValueError(
            f"{name}={getattr(config, name)!r}: {config.model} was trained with {own!r}; give that, or start from a "
            "language model"
        )


def head_key(seed: int, member: int) -> jax.Array:
    """The key that the head of a member of an ensemble is drawn with."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), member)


def _stack(start: Start, members: int) -> Params:
    """As many models as the ensemble has, with heads of their own, stacked. Raises ValueError for a trained head."""
    basis, trunk = start.basis, start.basis.params["trunk"]
    if not start.fresh:
        raise ValueError(
            f"members={members}: {basis.config.model} has a head already, with which all members would be the same; start "
            "from a language model"
        )
    heads = [
        init_head(basis.model.config, key=head_key(basis.config.seed, member), dtype=basis.config.param_dtype)
        for member in range(members)
    ]
    whole = {
        "trunk": jax.tree.map(lambda leaf: jnp.stack([leaf] * members), trunk),
        "head": jax.tree.map(lambda *leaves: jnp.stack(leaves), *heads),
    }
    return place_tree(whole, basis.plan.tree(stacked(classifier_specs(basis.model), members)))


def _check_margins(tables: Tables) -> None:
    """Raises ValueError with the row for a margin that is no number, and for rows without one beside rows with one."""
    named = {"dataset": tables.train} | {f"eval_dataset {name!r}": one for name, one in tables.held_out.items()}
    for name, table in named.items():
        margins = [row.get("margin") for row in table.data.rows]
        if all(margin is None for margin in margins):
            continue
        for index, margin in enumerate(margins):
            if not isinstance(margin, numbers.Real) or not math.isfinite(margin):
                raise ValueError(
                    f"{name}: 'margin' of row {index} of those kept is {margin!r}: every row needs a finite number, or "
                    "none has one"
                )


class ComparisonBatches(Stateless):
    """Pairs for `ComparisonObjective`."""

    def __init__(self, steps: FitSteps):
        self._steps = steps

    def __call__(self, host: HostRows, table: Table, state: TrainState, frozen: Frozen) -> ComparisonBatch:
        """The batch of these pairs."""
        place = self._steps.place
        margins = [table.data.rows[index].get("margin") for index in host.indices]
        margin = None if margins[0] is None else place(host.numbers(margins))
        return self._steps.batch(*place((host.tokens, host.segment_ids, host.valid)), margin)


class LabelledBatches(Stateless):
    """Labelled rows for `LabelledObjective`."""

    def __init__(self, steps: FitSteps):
        self._steps = steps

    def __call__(self, host: HostRows, table: Table, state: TrainState, frozen: Frozen) -> LabelledBatch:
        """The batch of these rows."""
        mask = host.mask & host.valid[:, None, None]
        arrays = (host.tokens, host.segment_ids, host.labels, mask)
        return self._steps.batch(*self._steps.place(tuple(x[:, 0] for x in arrays)))


def prepare_reward(config: RewardConfig, *, dataset: Any = None) -> Fit:
    """Everything before the first step. Raises ValueError, naming option, file or row, for what does not fit."""
    start = _open(config, labels=1, bias=False)
    config, basis = start.basis.config, start.basis
    options = {
        "tokenizer": basis.tokenizer,
        "max_length": config.max_length,
        "append_eos": config.append_eos,
        "long_rows": config.long_rows,
    }
    if not 0.0 <= config.label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={config.label_smoothing}: must be at least 0 and below 0.5")
    if config.loss_type == "bradley_terry":
        encode = functools.partial(encode_comparisons, **options)
        objective = ComparisonObjective(
            center=config.center_rewards_coefficient, label_smoothing=config.label_smoothing, members=config.members
        )
        make_batch, batches = comparison_batch, ComparisonBatches
    else:
        for name, default in (("center_rewards_coefficient", 0.0), ("label_smoothing", 0.0), ("members", 1)):
            if getattr(config, name) != default:
                raise ValueError(f"{name}: belongs to loss_type=bradley_terry, not to {config.loss_type}; leave it out")
        per_token = config.loss_type == "outcome_per_token"
        encode = functools.partial(encode_outcomes, per_token=per_token, **options)
        objective = LabelledObjective(kind="outcome")
        make_batch, batches = functools.partial(labelled_batch, per_row=True), LabelledBatches
    specs, params = classifier_specs(basis.model), basis.params
    if config.members > 1:
        specs, params = stacked(specs, config.members), _stack(start, config.members)
    tables = make_tables(basis, encode, dataset, left=True)
    if config.loss_type == "bradley_terry":
        _check_margins(tables)
    by_rows = config.loss_type != "bradley_terry"
    return _fit("reward", start, params, specs, tables, objective, make_batch, batches, by_rows=by_rows)


def prepare_prm(config: PRMConfig, *, dataset: Any = None) -> Fit:
    """Everything before the first step. Raises ValueError, naming option, file or row, for what does not fit."""
    start = _open(config, labels=PROCESS_LABELS, bias=True)
    config, basis = start.basis.config, start.basis
    if not config.step_separator:
        raise ValueError("step_separator must not be empty: a model without one could not be exported")
    encode = functools.partial(
        encode_steps,
        tokenizer=basis.tokenizer,
        max_length=config.max_length,
        step_separator=config.step_separator,
        long_rows=config.long_rows,
    )
    tables = make_tables(basis, encode, dataset, left=True)
    specs = classifier_specs(basis.model, labels=PROCESS_LABELS, bias=True)
    objective = LabelledObjective(kind="process")
    return _fit("prm", start, basis.params, specs, tables, objective, labelled_batch, LabelledBatches)


def _fit(
    command: str, start: Start, params, specs, tables: Tables, objective, make_batch, batches, *, by_rows: bool = False
) -> Fit:
    basis, config = start.basis, start.basis.config
    time = timing(config, len(tables.train.data.sides))
    steps = compile_fit(
        basis.model,
        basis.plan,
        specs={"reward": specs},
        objective=objective,
        make_batch=make_batch,
        tx=time.tx,
        param_dtype=config.param_dtype,
        microbatches=basis.microbatches,
        score_chunk=config.score_chunk,
        by_rows=by_rows,
    )
    head = "a fresh head on a language model" if start.fresh else "training goes on from a trained head"
    return Fit(
        command=command,
        config=config,
        directory=Path(config.output_dir),
        model=trunk_model(basis.model),
        params={"reward": params},
        frozen=Frozen(),
        reference_is_start=False,
        tokenizer=basis.tokenizer,
        generation=basis.generation,
        steps=steps,
        source=Given(tables.train, tables.held_out, steps, batches(steps), config.seed, config.eval_limit),
        schedule=time.schedule,
        total_steps=time.total_steps,
        fingerprint=fingerprint(tables.train.data),
        notes=[*start_notes(basis, tables, params, None, time.total_steps), head],
    )


def reward_state(config: RewardConfig | PRMConfig, plan: Plan) -> tuple[Model, TrainState, Any]:
    """The model, the shapes and layouts of a run's state on a mesh, to restore a checkpoint into, and the tokenizer."""
    process = isinstance(config, PRMConfig)
    kind = {"labels": PROCESS_LABELS, "bias": True} if process else {"labels": 1, "bias": False}
    model, _, tokenizer, _ = load_classifier_start(config.model, plan=plan, dtype=config.param_dtype, **kind)
    specs = classifier_specs(model, **kind)
    if not process and config.members > 1:
        specs = stacked(specs, config.members)
    _, tx = optimizer_of(config, total_steps=1 + config.warmup_steps)
    return model, state_shardings({"reward": specs}, plan, tx, config.param_dtype)[0], tokenizer


def save_reward(
    directory: str | Path, config: RewardConfig | PRMConfig, model: Model, params: Params, tokenizer, **options
):
    """Writes what such a run has trained as a Hugging Face directory; an ensemble as one a member.

    `options` are those of `models.save_reward_model`.
    """
    if isinstance(config, PRMConfig):
        save_process_model(directory, model, params, tokenizer, step_separator=config.step_separator, **options)
        return
    save = save_reward_model if config.members == 1 else save_ensemble
    save(directory, model, params, tokenizer, append_eos=config.append_eos, **options)
