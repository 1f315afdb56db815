"""From a config to everything a run needs: checked options, model on the mesh, encoded data, compiled steps.

`prepare` reads top to bottom what a run is made of; the loop itself is `loop.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_lm import algos
from jaxrl_lm.assemble import (
    check_tokens,
    compute_dtype,
    load_model,
    lora_of,
    make_batch_rules,
    make_credit,
    make_objective,
    trained_params,
)
from jaxrl_lm.batch import BatchRule
from jaxrl_lm.checks import (
    check,
    check_own,
    check_rewards,
    moves_reference,
    needs_reference,
    resolve_algorithm,
    updates_per_step,
)
from jaxrl_lm.config import GRPOConfig, MachineOptions
from jaxrl_lm.distill import DistillObjective
from jaxrl_lm.distributed import place
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.fit_steps import StreamSteps, compile_streams
from jaxrl_lm.judges import Rewards, open_rewards
from jaxrl_lm.layout import check_layout, share_of
from jaxrl_lm.mix import Mix, check_held_out_streams, check_mix, check_teacher, open_mix, split_rows
from jaxrl_lm.models import Model, eos_token_ids
from jaxrl_lm.optim import optimizer_of
from jaxrl_lm.options import from_dict
from jaxrl_lm.placement import Placement, check_placement, open_placement, placement_notes
from jaxrl_lm.prompt_sets import Data, Rows, drop_notes, encode_data, fingerprint, read_data
from jaxrl_lm.rewards import RewardFunction
from jaxrl_lm.rollout import Sampler
from jaxrl_lm.rule_tables import rule_tables, sampling_of
from jaxrl_lm.runs import check_processes
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.sharding import Plan, build_plan
from jaxrl_lm.steps import Steps, compile_steps
from jaxrl_lm.types import Params
from jaxrl_lm.update import Objective


class Setup(NamedTuple):
    """A run before its first step."""

    config: GRPOConfig
    directory: Path
    model: Model
    params: dict[str, Params]  # what is trained, by name
    base: Params | None  # under LoRA: the weights below the adapter
    algorithm: algos.Preset  # every choice resolved
    batch_rule: BatchRule
    scored_rule: BatchRule  # once the sampler is too far from the scorer
    tokenizer: Any
    generation: dict[str, Any]  # the generation config that came with the model
    steps: Steps
    mix: Mix | None  # further streams in each update
    stream_steps: StreamSteps | None
    teacher: Params | None
    sampler: Sampler
    schedule: Callable[[int], Any]
    prompts: EncodedPrompts
    eval_sets: dict[str, EncodedPrompts]
    rewards: tuple[RewardFunction, ...]
    eval_rewards: tuple[RewardFunction, ...]
    step_reward: RewardFunction | None
    total_steps: int
    fingerprint: str  # of the training prompts: a resumed run must see the same
    notes: list[str]  # what the run should say at its start


def vocabulary_notes(model: Model, tokenizer: Any) -> list[str]:
    """What to say of embedding rows that no token has."""
    spare = model.config.vocab_size - (max(tokenizer.get_vocab().values()) + 1)
    return (
        [f"{spare} rows of the embedding have no token (padding); one that is sampled decodes to nothing"]
        if spare
        else []
    )


def plan_of(config: MachineOptions) -> Plan:
    """The plan of a config."""
    rules = {"rules": config.sharding_rules, "decode_rules": config.decode_sharding_rules}
    return build_plan(config.mesh, preset=config.sharding_preset, **rules)


def make_sampling(config: Any, tokenizer, generation: dict[str, Any]) -> SamplingConfig:
    """The static part of sampling, from a config with `SamplingOptions`."""
    eos = eos_token_ids(generation, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    return sampling_of(config, tokenizer, eos_token_ids=eos, pad_token_id=pad)


def make_sampler(
    steps: Steps, config: Any, tokenizer, sampling: SamplingConfig, *, buckets, prompts: int, vocab: int
) -> Sampler:
    """A sampler whose tables of stop strings and rules, if any, are on the devices."""
    table = rule_tables(config, sampling, tokenizer, vocab)
    return Sampler(
        steps=steps,
        tokenizer=tokenizer,
        buckets=buckets,
        prompts_per_call=prompts,
        group_size=config.num_generations,
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=sampling.pad_token_id,
        stops=jax.tree.map(lambda x: place(x, steps.placement.rollout.replicated), table),
        forces=sampling.forces,
        drafts=bool(sampling.num_speculative_tokens) and sampling.speculative_source == "last_epoch",
    )


def compile_run(
    config: GRPOConfig,
    algorithm: algos.Preset,
    model: Model,
    plan: Plan,
    sampling: SamplingConfig,
    *,
    total_updates: int,
    advantages: Callable[..., jax.Array] | None,
    objective: Objective,
    placement: Placement | None = None,
) -> tuple[Steps, Callable[[int], Any]]:
    """The compiled steps of a run, and its learning-rate schedule."""
    rows = config.prompts_per_step * config.num_generations
    minibatch = config.minibatch_completions or rows
    schedule, tx = optimizer_of(config, total_steps=total_updates)
    steps = compile_steps(
        model,
        plan,
        objective=objective,
        tx=tx,
        param_dtype=config.param_dtype,
        rows=rows,
        sampling=sampling,
        credit=make_credit(config, algorithm, advantages),
        microbatches=microbatches_of(config),
        score_chunk=config.score_chunk,
        score_rows_at_once=config.microbatch_completions or minibatch,
        kl_estimator=config.kl_estimator or "k1",
        lora=lora_of(config),
        critic=config.critic,
        implicit_prm=config.implicit_prm,
        reference=moves_reference(config),
        placement=placement,
        decode_chunk=config.decode_chunk,
        together=share_of(config),
    )
    return steps, schedule


def microbatches_of(config: GRPOConfig) -> int:
    """Forward and backward passes of an update."""
    minibatch = config.minibatch_completions or config.prompts_per_step * config.num_generations
    return minibatch // (config.microbatch_completions or minibatch)


def open_teacher(config: GRPOConfig, tokenizer: Any, plan: Plan) -> tuple[Model, Params] | None:
    """The model that is learned from, in the dtype of the computation.

    Raises ValueError, naming the first token that differs, for one of another vocabulary.
    """
    if config.teacher is None:
        return None
    dtype = compute_dtype(config.dtype)
    model, params, other, _ = load_model(
        config.teacher, plan, dtype=dtype, param_dtype=dtype, remat="none", attention=config.attention_implementation
    )
    check_tokens("teacher", config.teacher, tokenizer, other)
    return model, params


def whole_objective(
    config: GRPOConfig, algorithm: algos.Preset, own: Objective | None, teacher: Model | None, mix: Mix | None
) -> Objective:
    """The algorithm's loss or the caller's, with the teacher's and the streams' beside it."""
    objective = own or make_objective(config, algorithm)
    if teacher is not None:
        objective = DistillObjective(
            teacher_model=teacher,
            completion_columns=config.max_completion_length,
            coef=config.teacher_coef,
            direction=config.teacher_divergence,
            temperature=config.temperature,
            beta=config.teacher_beta,
            score_chunk=config.score_chunk,
            policy=None if config.teacher_only else objective,
        )
    return objective if mix is None else mix.objective(objective, score_chunk=config.score_chunk)


def start_notes(
    config: GRPOConfig,
    model: Model,
    tokenizer: Any,
    data: Data,
    trained: Any,
    base: Any,
    steps: Steps,
    rewards: Rewards,
) -> list[str]:
    """What a run says before its first step."""
    plan, given = steps.plan, {"reference": needs_reference(config), "base": base, "rewards": rewards.nbytes}
    size = lambda tree: f"{sum(leaf.size for leaf in jax.tree.leaves(tree)) / 1e6:.1f} M parameters"
    below = f" on {size(base)}" if base is not None else ""
    return [
        *plan.notes,
        *drop_notes({"dataset": data.prompts, **data.eval_sets}, config.max_prompt_length),
        *vocabulary_notes(model, tokenizer),
        f"{len(data.buckets)} declared prompt bucket(s) {list(data.buckets)} + {config.max_completion_length} new tokens: "
        "each step of the program compiles once a bucket",
        f"{size(trained)}{below}, {len(data.prompts.ids)} training prompts, mesh {dict(plan.mesh.shape)}",
        *placement_notes(model, steps.placement, steps.abstract_state, steps.rest, **given),
    ]


def steps_in_all(config: GRPOConfig, prompts: int) -> int:
    """Steps of a run over so many prompts."""
    if config.num_epochs is None:
        return config.max_steps or 100
    return max(1, round(config.num_epochs * prompts / config.prompts_per_step))


def check_options(
    config: GRPOConfig,
    placement: Placement,
    *,
    advantages: Callable[..., jax.Array] | None,
    objective: Objective | None,
) -> None:
    """What options alone say about each other and about the mesh. Raises ValueError, naming the option."""
    plan = placement.train
    check(config, plan.batch_ways)
    check_layout(config, plan)
    check_placement(config, placement, reference=needs_reference(config), moves=moves_reference(config))
    check_mix(config, plan.batch_ways, microbatches_of(config))
    check_teacher(config)
    check_own(config, advantages=advantages, objective=objective)


def open_streams(config: GRPOConfig, tokenizer: Any, sampling: SamplingConfig, told: Rows, data: Data) -> Mix | None:
    """The further streams of each update. Raises ValueError for one that holds what the run is evaluated on."""
    eos = sampling.eos_token_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    ids = {"eos_token_id": eos, "pad_token_id": sampling.pad_token_id}
    mix = open_mix(config, tokenizer, **ids, told=told, prompts=data.prompts.rows)
    if mix is not None:
        check_held_out_streams(mix, data.eval_sets)
    return mix


def prepare(
    config: GRPOConfig,
    *,
    reward_functions: Sequence[Callable[..., Any]] | None = None,
    dataset: Any = None,
    advantages: Callable[..., jax.Array] | None = None,
    objective: Objective | None = None,
) -> Setup:
    """Everything of a run before its first step. Raises ValueError, naming option, file or row, for what does not fit."""
    # Values that Python code gave get the same check as those of files and command lines.
    config = from_dict(type(config), dataclasses.asdict(config), where="config")
    check_processes(config)
    placement, lora = open_placement(config), lora_of(config)
    plan = placement.train
    check_options(config, placement, advantages=advantages, objective=objective)
    config, rewards = open_rewards(config, reward_functions, placement)
    check_rewards(config, rewards.train)
    rows, eval_rows = read_data(config, dataset, rewards)
    rows, told = split_rows(config, rows)
    model, params, tokenizer, generation = load_model(
        config.model, plan, dtype=config.dtype, param_dtype=config.param_dtype, remat=config.remat,
        attention=config.attention_implementation,
    )  # fmt: skip
    data = encode_data(config, tokenizer, rows, eval_rows)
    sampling, algorithm = make_sampling(config, tokenizer, generation), resolve_algorithm(config)
    total_steps = steps_in_all(config, len(data.prompts.ids))
    mix = open_streams(config, tokenizer, sampling, told, data)
    teacher_model, teacher = open_teacher(config, tokenizer, plan) or (None, None)
    own = {"advantages": advantages, "objective": whole_objective(config, algorithm, objective, teacher_model, mix)}
    own["placement"] = placement
    total_updates = total_steps * updates_per_step(config)
    steps, schedule = compile_run(config, algorithm, model, plan, sampling, total_updates=total_updates, **own)
    shape = {"score_chunk": config.score_chunk, "microbatches": microbatches_of(config)}
    batch_rule, scored_rule = make_batch_rules(config, algorithm, tokenizer)
    trained, base = trained_params(config, model, params, plan, lora, tokenizer)
    return Setup(
        config=config,
        directory=Path(config.output_dir),
        model=model,
        params=trained,
        base=base,
        algorithm=algorithm,
        batch_rule=batch_rule,
        scored_rule=scored_rule,
        tokenizer=tokenizer,
        generation=generation,
        steps=steps,
        mix=mix,
        stream_steps=None if mix is None else compile_streams(model, plan, **shape),
        teacher=teacher,
        sampler=make_sampler(
            steps,
            config,
            tokenizer,
            sampling,
            buckets=data.buckets,
            prompts=config.prompts_per_step,
            vocab=model.config.vocab_size,
        ),
        schedule=schedule,
        prompts=data.prompts,
        eval_sets=data.eval_sets,
        rewards=rewards.train,
        eval_rewards=rewards.evaluate,
        step_reward=rewards.steps,
        total_steps=total_steps,
        fingerprint=fingerprint(data.prompts) + (mix.fingerprint() if mix is not None else ""),
        notes=start_notes(config, model, tokenizer, data, trained, base, steps, rewards),
    )
