"""From a config to everything a run needs: checked options, model on the mesh, encoded data, compiled steps.

`prepare` reads top to bottom what a run is made of; the loop itself is `loop.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import algos
from jaxrl_lm.config import GRPOConfig, SamplingConfig
from jaxrl_lm.data import default_buckets, read_rows
from jaxrl_lm.encode import EncodedPrompts, encode_prompts
from jaxrl_lm.models import Model, eos_token_ids, generation_config, load
from jaxrl_lm.objectives import PolicyObjective
from jaxrl_lm.optim import optimizer_of
from jaxrl_lm.rewards import RewardFunction, resolve_all
from jaxrl_lm.rollout import Sampler
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.steps import Steps, compile_steps
from jaxrl_lm.stops import stop_table
from jaxrl_lm.types import Params
from jaxrl_lm.update import Objective


class Setup(NamedTuple):
    """A run before its first step."""

    config: GRPOConfig
    directory: Path
    model: Model
    params: Params
    tokenizer: Any
    generation: dict[str, Any]  # the generation config that came with the model
    steps: Steps
    sampler: Sampler
    schedule: Callable[[int], Any]
    prompts: EncodedPrompts
    eval_sets: dict[str, EncodedPrompts]
    rewards: tuple[RewardFunction, ...]
    eval_rewards: tuple[RewardFunction, ...]
    total_steps: int
    notes: list[str]  # what the run should say at its start


def resolve_algorithm(config: GRPOConfig) -> algos.Preset:
    """The preset, or loss_type's reduction, with the options given beside it. Raises ValueError for unknown names."""
    if config.preset is not None and config.preset not in algos.PRESETS:
        raise ValueError(f"preset={config.preset!r} is unknown: use {', '.join(algos.PRESETS)}")
    if config.loss_type not in algos.LOSS_TYPES:
        raise ValueError(f"loss_type={config.loss_type!r} is unknown: use {', '.join(algos.LOSS_TYPES)}")
    base = (
        algos.PRESETS[config.preset]
        if config.preset
        else algos.Preset(loss_agg_mode=algos.LOSS_TYPES[config.loss_type])
    )
    if config.epsilon is not None and config.preset is None:
        base = dataclasses.replace(base, epsilon_high=config.epsilon)
    names = ("scale_rewards", "importance_sampling_level", "epsilon", "epsilon_high", "loss_agg_mode")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    return dataclasses.replace(base, **given)


def updates_per_step(config: GRPOConfig) -> int:
    """Optimiser steps for each step of sampling."""
    completions = config.prompts_per_step * config.num_generations
    return config.num_iterations * (completions // (config.minibatch_completions or completions))


def check(config: GRPOConfig, devices: int) -> None:
    """Raises ValueError, naming the options, where sizes do not divide or options contradict each other."""
    if config.num_generations < 2:
        raise ValueError(
            f"num_generations={config.num_generations}: GRPO compares completions of one prompt: use 2 or more"
        )
    completions = config.prompts_per_step * config.num_generations
    minibatch = config.minibatch_completions or completions
    microbatch = config.microbatch_completions or minibatch
    if completions % minibatch:
        raise ValueError(
            f"minibatch_completions={minibatch} does not divide the step's completions, prompts_per_step × "
            f"num_generations = {completions}"
        )
    if minibatch % config.num_generations:
        raise ValueError(
            f"minibatch_completions={minibatch} is not a multiple of num_generations={config.num_generations}"
        )
    if minibatch % microbatch:
        raise ValueError(f"microbatch_completions={microbatch} does not divide minibatch_completions={minibatch}")
    for name, size in (("prompts_per_step", config.prompts_per_step), ("microbatch_completions", microbatch)):
        if size % devices:
            raise ValueError(
                f"{name}={size} is not divisible by the {devices} devices of the mesh's data and fsdp axes"
            )
    if config.beta and config.kl_in == "loss" and config.kl_estimator == "k1":
        raise ValueError(
            "kl_estimator='k1' as a loss has an expected gradient of 0 and regularises nothing: use k3 or k2, or "
            "kl_in='reward'"
        )
    if not config.reward:
        raise ValueError("reward: no reward function is given")
    if config.reward_weights and len(config.reward_weights) != len(config.reward):
        raise ValueError(
            f"reward_weights has {len(config.reward_weights)} values for {len(config.reward)} reward functions"
        )
    if config.max_steps < 1 and config.num_epochs <= 0:
        raise ValueError("max_steps=0 and num_epochs=0: one of them must say how long to train")


def _encode(config: GRPOConfig, tokenizer, source: Any, name: str) -> EncodedPrompts:
    return encode_prompts(
        read_rows(source, name=name),
        tokenizer,
        max_prompt_length=config.max_prompt_length,
        long_prompts=config.long_prompts,
        prompt_template=config.prompt_template,
        system_prompt=config.system_prompt,
        name=name,
    )


def check_held_out(prompts: EncodedPrompts, eval_sets: dict[str, EncodedPrompts]) -> None:
    """Raises ValueError where a prompt of an evaluation set is also trained on."""
    trained = {tuple(ids) for ids in prompts.ids}
    for name, held in eval_sets.items():
        shared = [row for row, ids in enumerate(held.ids) if tuple(ids) in trained]
        if shared:
            raise ValueError(
                f"eval_dataset {name!r}: {len(shared)} of its {len(held.ids)} prompts are in the training set too (the "
                f"first is row {shared[0]}); an evaluation must not see what is trained: take them out of one of the two"
            )


def build_plan(mesh: dict[str, int]) -> Plan:
    return Plan(make_mesh(mesh))


def load_model(name: str, plan: Plan, *, dtype: str | None, param_dtype: str, remat: str | None):
    """Model, parameters, tokenizer and generation config, with the machine's defaults for dtype and remat."""
    cpu = jax.default_backend() == "cpu"
    compute = dtype or ("float32" if cpu else "bfloat16")
    model, params, tokenizer = load(name, plan=plan, dtype=param_dtype, compute_dtype=compute)
    config = dataclasses.replace(model.config, remat=remat or ("none" if cpu else "full"))
    return dataclasses.replace(model, config=config), params, tokenizer, generation_config(name)


def make_sampling(config: Any, tokenizer, generation: dict[str, Any]) -> SamplingConfig:
    """The static part of sampling, from a config with max_completion_length, top_k, top_p and min_p."""
    eos = eos_token_ids(generation, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    return SamplingConfig(
        max_new_tokens=config.max_completion_length,
        eos_token_ids=eos,
        pad_token_id=pad,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
    )


def make_sampler(
    steps: Steps, config: Any, tokenizer, sampling: SamplingConfig, *, buckets, prompts: int, vocab: int
) -> Sampler:
    """A sampler whose stop strings, if any, are on the devices."""
    table = stop_table(config.stop, tokenizer, vocab)
    return Sampler(
        steps=steps,
        tokenizer=tokenizer,
        buckets=buckets,
        prompts_per_call=prompts,
        group_size=config.num_generations,
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=sampling.pad_token_id,
        stops=None if table is None else jax.device_put(table, steps.plan.replicated),
    )


def compile_run(
    config: GRPOConfig,
    model: Model,
    plan: Plan,
    sampling: SamplingConfig,
    *,
    total_updates: int,
    advantages: Callable[..., jax.Array] | None,
    objective: Objective | None,
) -> tuple[Steps, Callable[[int], Any]]:
    """The compiled steps of a run, and its learning-rate schedule."""
    algorithm = resolve_algorithm(config)
    rows = config.prompts_per_step * config.num_generations
    minibatch = config.minibatch_completions or rows
    schedule, tx = optimizer_of(config, total_steps=total_updates)
    if objective is None:
        objective = PolicyObjective(
            completion_columns=config.max_completion_length,
            clip_low=algorithm.epsilon,
            clip_high=algorithm.epsilon_high,
            delta=config.delta,
            level=algorithm.importance_sampling_level,
            beta=config.beta if config.kl_in == "loss" else 0.0,
            kl_estimator=config.kl_estimator or "k3",
            score_chunk=config.score_chunk,
        )
    if advantages is None:
        advantages = functools.partial(algos.group_advantages, scale=algorithm.scale_rewards)
    steps = compile_steps(
        model,
        plan,
        objective=objective,
        tx=tx,
        param_dtype=config.param_dtype,
        rows=rows,
        sampling=sampling,
        advantages=functools.partial(advantages, group_size=config.num_generations),
        over=algorithm.loss_agg_mode,
        mask_truncated=config.mask_truncated_completions,
        microbatches=minibatch // (config.microbatch_completions or minibatch),
        score_chunk=config.score_chunk,
        kl_estimator=config.kl_estimator or "k1",
    )
    return steps, schedule


def prepare(
    config: GRPOConfig,
    *,
    reward_functions: Sequence[Callable[..., Any]] | None = None,
    dataset: Any = None,
    advantages: Callable[..., jax.Array] | None = None,
    objective: Objective | None = None,
) -> Setup:
    """Everything of a run before its first step. Raises ValueError, naming option, file or row, for what does not fit."""
    plan = build_plan(config.mesh)
    specs = list(reward_functions) if reward_functions is not None else list(config.reward)
    if reward_functions is not None:
        config = dataclasses.replace(config, reward=tuple(getattr(f, "__name__", str(f)) for f in specs))
    check(config, plan.batch_ways)
    resolve_algorithm(config)
    rewards = resolve_all(specs, config.reward_weights)
    if config.true_reward is not None and config.true_reward not in [function.name for function in rewards]:
        raise ValueError(f"true_reward={config.true_reward!r} is none of the reward functions")
    eval_rewards = resolve_all(list(config.eval_reward_functions)) if config.eval_reward_functions else rewards

    model, params, tokenizer, generation = load_model(
        config.model, plan, dtype=config.dtype, param_dtype=config.param_dtype, remat=config.remat
    )
    prompts = _encode(config, tokenizer, dataset if dataset is not None else config.dataset, "dataset")
    eval_sets = {
        name: _encode(config, tokenizer, source, f"eval_dataset {name!r}")
        for name, source in config.eval_dataset.items()
    }
    check_held_out(prompts, eval_sets)
    lengths = [len(ids) for encoded in (prompts, *eval_sets.values()) for ids in encoded.ids]
    buckets = tuple(sorted(config.prompt_buckets)) or default_buckets(lengths)
    if max(lengths) > buckets[-1]:
        raise ValueError(
            f"prompt_buckets={buckets}: the longest prompt has {max(lengths)} tokens; add a bucket that holds it"
        )

    sampling = make_sampling(config, tokenizer, generation)
    total_steps = config.max_steps or max(1, round(config.num_epochs * len(prompts.ids) / config.prompts_per_step))
    steps, schedule = compile_run(
        config,
        model,
        plan,
        sampling,
        total_updates=total_steps * updates_per_step(config),
        advantages=advantages,
        objective=objective,
    )
    sampler = make_sampler(
        steps,
        config,
        tokenizer,
        sampling,
        buckets=buckets,
        prompts=config.prompts_per_step,
        vocab=model.config.vocab_size,
    )
    notes = [
        f"{name}: {encoded.dropped} prompts dropped and {encoded.cut} cut, longer than {config.max_prompt_length} tokens"
        for name, encoded in {"dataset": prompts, **eval_sets}.items()
        if encoded.dropped or encoded.cut
    ]
    notes.append(
        f"{len(buckets)} declared prompt bucket(s) {list(buckets)} + {config.max_completion_length} new tokens: "
        "each step of the program compiles once a bucket"
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    notes.append(f"{size / 1e6:.1f} M parameters, {len(prompts.ids)} training prompts, mesh {dict(plan.mesh.shape)}")
    return Setup(config, Path(config.output_dir), model, params, tokenizer, generation, steps, sampler, schedule, prompts,
                 eval_sets, rewards, eval_rewards, total_steps, notes)  # fmt: skip


def copy_params(params: Params) -> Params:
    """A second copy: the training state is donated to each update, the reference must outlive it."""
    return jax.tree.map(jnp.copy, params)
