"""Training on preferences: `jaxrl-lm dpo`. Pairs, judged single completions (kto), or pairs of the policy's own samples.

The losses are `algos.dpo_loss` and its relatives, the loop is `fit.py`, the batches are `preferences.py`; sampled pairs
(`refresh_steps`) come from `online_pairs.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrl_lm import algos
from jaxrl_lm.algos.preference_variants import READERS
from jaxrl_lm.assemble import check_tokens, load_model, lora_of, with_adapter
from jaxrl_lm.fit import Fit, FitRun, Source, fit
from jaxrl_lm.fit_batches import preference_batch, unpaired_batch
from jaxrl_lm.fit_config import DPOConfig, idle_options
from jaxrl_lm.fit_objectives import PreferenceObjective, UnpairedObjective
from jaxrl_lm.fit_prepare import Basis, Timing, checked, make_tables, open_model, start_notes, timing
from jaxrl_lm.fit_steps import FitSteps, compile_fit
from jaxrl_lm.given import Given, fingerprint
from jaxrl_lm.online_pairs import OnlinePairs, open_online
from jaxrl_lm.options import nearest
from jaxrl_lm.preferences import PairBatches, Reference, UnpairedBatches
from jaxrl_lm.sequences import encode_pairs, encode_unpaired
from jaxrl_lm.train_state import trained_specs
from jaxrl_lm.types import Frozen, Params, PreferenceBatch

WITHOUT_REFERENCE = ("simpo", "cpo", "orpo", "sft")
SFT_TERM = ("sft", "cpo", "orpo")  # whose mean is over all chosen tokens
RANKED = ("aot", "aot_unpaired")  # a pair's loss depends on the others of its batch
LOSSES = (*algos.preference_variants.LOSSES, "inpo", "kto")
# Which losses read an option; given to others it is refused.
READ_BY = {
    "label_smoothing": READERS["label_smoothing"],
    "f_divergence_type": READERS["f_divergence"],
    "f_alpha_divergence_coef": READERS["f_divergence"],
    "length_alpha": READERS["length_alpha"],
    "ld_alpha": READERS["ld_alpha"],
    "simpo_gamma": ("simpo",),
    "discopop_tau": ("discopop",),
    "loss_weights": tuple(name for name in LOSSES if name != "kto"),
    "rpo_alpha": tuple(name for name in LOSSES if name not in ("inpo", "kto")),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "inpo_eta": ("inpo",),
}


def train_dpo(
    config: DPOConfig, *, dataset: Any = None, reward_functions: Sequence[Callable[..., Any]] | None = None
) -> FitRun:
    """Trains as the config says; `dataset` (rows) and `reward_functions` stand in for the config's.

    Raises as `fit` and `prepare_dpo`.
    """
    return fit(prepare_dpo(config, dataset=dataset, reward_functions=reward_functions))


def parts_of(config: DPOConfig) -> tuple[tuple[str, float], ...]:
    """The losses with their weights. Raises ValueError where the numbers of the two differ."""
    weights = config.loss_weights or (1.0,) * len(config.loss_type)
    if len(weights) != len(config.loss_type):
        raise ValueError(f"loss_weights has {len(weights)} values for {len(config.loss_type)} losses of loss_type")
    parts = tuple(zip(config.loss_type, weights, strict=True))
    return parts if config.rpo_alpha is None else (*parts, ("sft", config.rpo_alpha))


def needs_reference(config: DPOConfig) -> bool:
    """Whether a loss compares with a reference policy."""
    return any(name not in WITHOUT_REFERENCE for name in config.loss_type)


def make_objective(config: DPOConfig, start: int) -> PreferenceObjective | UnpairedObjective:
    """The loss that the options describe. Raises ValueError, naming them, for options that it does not read."""
    shared = {"beta": config.beta, "score_chunk": config.score_chunk, "start": start}
    if config.loss_type == ("kto",):
        weights = {"desirable_weight": config.desirable_weight, "undesirable_weight": config.undesirable_weight}
        return UnpairedObjective(**shared, **weights)
    inpo = "inpo" in config.loss_type
    objective = PreferenceObjective(
        parts=parts_of(config),
        label_smoothing=config.label_smoothing,
        f_divergence=config.f_divergence_type,
        f_alpha=config.f_alpha_divergence_coef,
        length_alpha=config.length_alpha,
        ld_alpha=config.ld_alpha,
        gamma=config.simpo_gamma,
        discopop_tau=config.discopop_tau,
        eta=(config.beta if config.inpo_eta is None else config.inpo_eta) if inpo else None,
        tau=config.beta if inpo else None,
        **shared,
    )
    _try(config, objective)
    return objective


def _try(config: DPOConfig, objective: PreferenceObjective) -> None:
    """One loss on zeros, so that options which do not belong to it show before anything is compiled."""
    zeros, some = jnp.zeros((1, 2, 1)), jnp.ones((1, 2, 1), bool)
    tokens = jnp.zeros((1, 2, 1), jnp.int32)
    reference = zeros if needs_reference(config) else None
    batch = PreferenceBatch(tokens, tokens + 1, some, jnp.ones(1), reference, zeros)
    try:
        objective.losses(zeros, batch, some)
    except ValueError as error:
        raise ValueError(f"loss_type={', '.join(config.loss_type)}: {error}") from error


def check(config: DPOConfig, microbatches: int) -> None:
    """Raises ValueError, naming the options, for those that contradict each other."""
    _check_losses(config, microbatches)
    _check_reference(config)
    online = config.refresh_steps is not None
    if online and config.precompute_ref_log_probs:
        raise ValueError(
            "precompute_ref_log_probs: with refresh_steps the pairs are not known beforehand; leave it out"
        )
    if "kto" in config.loss_type and config.precompute_ref_log_probs:
        raise ValueError(
            "precompute_ref_log_probs: loss_type=kto scores prompts with the completions of other rows too, which are not "
            "known beforehand; leave it out"
        )
    if online and bool(config.reward) == bool(config.judge):
        raise ValueError("refresh_steps: give either reward or judge, which rank the samples")
    if not online and (config.reward or config.judge):
        raise ValueError("reward and judge rank samples of the policy: give refresh_steps too (1: online)")
    defaults = DPOConfig(model="", dataset="", output_dir="")
    for name in sorted(idle_options(config.refresh_steps)):
        if getattr(config, name) != getattr(defaults, name):
            mode = "with refresh_steps pairs are sampled" if online else "without refresh_steps pairs are given"
            raise ValueError(f"{name}={getattr(config, name)!r} has no effect: {mode}; leave it out")
    if "inpo" in config.loss_type and not online:
        raise ValueError("loss_type=inpo learns from the policy's own samples: give refresh_steps")
    if "inpo" in config.loss_type and config.temperature != 1.0:
        raise ValueError(
            f"temperature={config.temperature}: loss_type=inpo compares with the policy that sampled, whose log-probs are "
            "then of another temperature than those that are trained; leave it at 1"
        )


def _check_losses(config: DPOConfig, microbatches: int) -> None:
    losses, shown = config.loss_type, f"loss_type={', '.join(config.loss_type)}"
    if not losses:
        raise ValueError(f"loss_type is empty: give one or several of {', '.join(LOSSES)}")
    for name in losses:
        if name not in LOSSES:
            near = nearest(name, LOSSES)
            raise ValueError(f"loss_type={name} is unknown; did you mean {near}? There are {', '.join(LOSSES)}")
    if "kto" in losses and (len(losses) > 1 or config.refresh_steps is not None):
        raise ValueError("loss_type=kto stands alone, and on given rows with a label")
    if "kto" in losses and config.rows_per_step < 2:
        raise ValueError(
            "rows_per_step=1: loss_type=kto compares each row with the next one of its step; give 2 or more"
        )
    for name, readers in READ_BY.items():
        given = getattr(config, name) != DPOConfig.__dataclass_fields__[name].default
        if given and not set(losses) & set(readers):
            does = "does" if len(readers) == 1 else "do"
            raise ValueError(f"{name}: {shown} does not read it; {', '.join(readers)} {does}")
    alpha = DPOConfig.__dataclass_fields__["f_alpha_divergence_coef"].default
    if config.f_alpha_divergence_coef != alpha and config.f_divergence_type != "alpha_divergence":
        raise ValueError("f_alpha_divergence_coef belongs to f_divergence_type=alpha_divergence")
    if config.beta <= 0 and "inpo" not in losses:
        raise ValueError(f"beta={config.beta}: must be above 0")
    ranked = [name for name in losses if name in RANKED]
    if ranked and microbatches > 1:
        raise ValueError(
            f"loss_type={ranked[0]} compares pairs of the whole batch: leave microbatch_rows out (or = rows_per_step)"
        )


def _check_reference(config: DPOConfig) -> None:
    resets = config.reference_reset_steps
    if not needs_reference(config):
        for name in ("reference_model", "reference_reset_steps", "precompute_ref_log_probs"):
            if getattr(config, name):
                raise ValueError(f"{name}: loss_type={', '.join(config.loss_type)} reads no reference; leave it out")
    if resets is None:
        return
    if resets < 1:
        raise ValueError(f"reference_reset_steps={resets}: must be at least 1")
    if config.precompute_ref_log_probs or config.lora_rank:
        raise ValueError(
            "reference_reset_steps: a reference that moves can neither be computed beforehand nor be the weights below "
            "an adapter; leave precompute_ref_log_probs and lora_rank out"
        )
    if config.reference_model is not None:
        raise ValueError("reference_model: with reference_reset_steps the reference is the policy from the start")


def _frozen(config: DPOConfig, basis: Basis, base: Params | None) -> tuple[Frozen, bool]:
    """What stays frozen, and whether the reference is to be a copy of the policy as it starts."""
    if not needs_reference(config):
        return Frozen(base=base), False
    if config.reference_model is not None:
        other, reference, theirs, _ = load_model(
            config.reference_model, basis.plan, dtype=config.dtype, param_dtype=config.param_dtype, remat=config.remat,
            attention=config.attention_implementation,
        )  # fmt: skip
        if other.config != basis.model.config:
            raise ValueError(
                f"reference_model={config.reference_model!r} has another shape than the policy; give one of it"
            )
        check_tokens("reference_model", config.reference_model, basis.tokenizer, theirs)
        return Frozen(reference=reference, base=base), False
    moves = config.reference_reset_steps is not None  # then it is part of the state
    return Frozen(base=base), base is None and not moves


class _Data(NamedTuple):
    start: int
    rows: int
    fingerprint: str
    notes: Callable[[Any, Params | None, Timing], list[str]]
    source: Callable[[FitSteps, Reference | None], Source]
    precompute: Callable[[Reference, Frozen], None]


def _given(config: DPOConfig, basis: Basis, dataset: Any) -> _Data:
    """Pairs or judged completions as they stand in the dataset."""
    unpaired = config.loss_type == ("kto",)
    encode = functools.partial(
        encode_unpaired if unpaired else encode_pairs,
        tokenizer=basis.tokenizer,
        max_length=config.max_length,
        eos_token_id=basis.eos_token_id,
        long_rows=config.long_rows,
        prompt_template=config.prompt_template,
        system_prompt=config.system_prompt,
    )
    tables = make_tables(basis, encode, dataset)

    def source(steps: FitSteps, reference: Reference | None) -> Given:
        shifts = "bco_pair" in config.loss_type
        make = UnpairedBatches(steps, reference) if unpaired else PairBatches(steps, reference, shifts=shifts)
        return Given(tables.train, tables.held_out, steps, make, config.seed, config.eval_limit)

    return _Data(
        start=tables.train.start,
        rows=len(tables.train.data.sides),
        fingerprint=fingerprint(tables.train.data),
        notes=lambda trained, base, time: start_notes(basis, tables, trained, base, time.total_steps),
        source=source,
        precompute=lambda reference, frozen: reference.precompute([tables.train, *tables.held_out.values()], frozen),
    )


def _sampled(config: DPOConfig, basis: Basis, dataset: Any, reward_functions) -> _Data:
    """Prompts, whose pairs are sampled as the run goes."""
    online = open_online(config, basis, dataset, reward_functions)

    def source(steps: FitSteps, reference: Reference | None) -> OnlinePairs:
        return OnlinePairs(online, PairBatches(steps, reference, shifts="bco_pair" in config.loss_type))

    return _Data(
        start=online.table.start,
        rows=len(online.prompts.ids),
        fingerprint=online.fingerprint,
        notes=online.notes,
        source=source,
        precompute=lambda reference, frozen: None,
    )


def prepare_dpo(
    config: DPOConfig, *, dataset: Any = None, reward_functions: Sequence[Callable[..., Any]] | None = None
) -> Fit:
    """Everything before the first step. Raises ValueError, naming option, file or row, for what does not fit."""
    if reward_functions is not None:
        config = dataclasses.replace(config, reward=tuple(getattr(f, "__name__", "reward") for f in reward_functions))
    config = checked(config)
    check(config, config.rows_per_step // (config.microbatch_rows or config.rows_per_step))
    basis = open_model(config)
    model, plan = basis.model, basis.plan
    online = config.refresh_steps is not None
    data = _sampled(config, basis, dataset, reward_functions) if online else _given(config, basis, dataset)
    time, lora = timing(config, data.rows), lora_of(config)
    trained, base = with_adapter(config, model, basis.params, plan, lora)
    moves = config.reference_reset_steps is not None
    sft = any(name in SFT_TERM for name, _ in parts_of(config))
    pairs = functools.partial(preference_batch, over_tokens_sft=sft)
    steps = compile_fit(
        model,
        plan,
        specs=trained_specs(model, lora=lora),
        objective=make_objective(config, data.start),
        make_batch=unpaired_batch if config.loss_type == ("kto",) else pairs,
        tx=time.tx,
        param_dtype=config.param_dtype,
        microbatches=basis.microbatches,
        score_chunk=config.score_chunk,
        lora=lora,
        reference=moves,
    )
    frozen, copies = _frozen(config, basis, base)
    reference = Reference(steps) if needs_reference(config) else None

    precompute = data.precompute  # and not `data`, which holds the model

    def once(frozen: Frozen) -> Frozen:
        precompute(reference, frozen)
        return frozen._replace(reference=None)

    return Fit(
        command="dpo",
        config=config,
        directory=Path(config.output_dir),
        model=model,
        params=trained,
        frozen=frozen,
        reference_is_start=copies,
        tokenizer=basis.tokenizer,
        generation=basis.generation,
        steps=steps,
        source=data.source(steps, reference),
        schedule=time.schedule,
        total_steps=time.total_steps,
        fingerprint=data.fingerprint,
        notes=data.notes(trained, base, time),
        prepare_frozen=once if config.precompute_ref_log_probs else lambda frozen: frozen,
        reset_steps=config.reference_reset_steps,
    )
