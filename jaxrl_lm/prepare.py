"""From a config to everything a run needs: checked options, model on the mesh, encoded data, compiled steps.

`prepare` reads top to bottom what a run is made of; the loop itself is `loop.py`.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import algos
from jaxrl_lm.checks import (
    check,
    check_held_out,
    check_own,
    check_rewards,
    check_routes,
    resolve_algorithm,
    updates_per_step,
)
from jaxrl_lm.config import GRPOConfig, PromptOptions, SamplingConfig
from jaxrl_lm.data import default_buckets, read_rows
from jaxrl_lm.encode import EncodedPrompts, encode_prompts
from jaxrl_lm.models import Model, eos_token_ids, generation_config, load
from jaxrl_lm.objectives import PolicyObjective
from jaxrl_lm.optim import optimizer_of
from jaxrl_lm.options import from_dict
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
    fingerprint: str  # of the training prompts: a resumed run must see the same
    notes: list[str]  # what the run should say at its start


def encode_with(config: PromptOptions, tokenizer: Any, rows: list[dict[str, Any]], name: str) -> EncodedPrompts:
    """The rows' prompts, encoded as a config's options say."""
    return encode_prompts(
        rows,
        tokenizer,
        max_prompt_length=config.max_prompt_length,
        long_prompts=config.long_prompts,
        prompt_template=config.prompt_template,
        system_prompt=config.system_prompt,
        name=name,
    )


def drop_notes(sets: dict[str, EncodedPrompts], limit: int) -> list[str]:
    """What to say of prompts that were longer than the limit."""
    return [
        f"{name}: {encoded.dropped} prompts dropped and {encoded.cut} cut, longer than max_prompt_length={limit}"
        for name, encoded in sets.items()
        if encoded.dropped or encoded.cut
    ]


def fingerprint(prompts: EncodedPrompts) -> str:
    """A hash of the encoded prompts and their rows, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for ids, row in zip(prompts.ids, prompts.rows, strict=True):
        digest.update(repr((ids, sorted(row.items()))).encode())
    return digest.hexdigest()


def vocabulary_notes(model: Model, tokenizer: Any) -> list[str]:
    """What to say of embedding rows that no token has."""
    spare = model.config.vocab_size - (max(tokenizer.get_vocab().values()) + 1)
    return (
        [f"{spare} rows of the embedding have no token (padding); one that is sampled decodes to nothing"]
        if spare
        else []
    )


def build_plan(mesh: dict[str, int]) -> Plan:
    return Plan(make_mesh(mesh))


def load_model(name: str, plan: Plan, *, dtype: str | None, param_dtype: str, remat: str | None):
    """Model, parameters, tokenizer and generation config, with the machine's defaults for dtype and remat."""
    cpu = jax.default_backend() == "cpu"
    compute = dtype or ("float32" if cpu else "bfloat16")
    model, params, tokenizer = load(name, plan=plan, dtype=param_dtype, compute_dtype=compute)
    config = dataclasses.replace(model.config, remat=remat or ("dots" if cpu else "full"))
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
        score_rows_at_once=config.microbatch_completions or minibatch,
        kl_estimator=config.kl_estimator or "k1",
    )
    return steps, schedule


def _names(given: tuple[str, ...], rewards: Sequence[RewardFunction]) -> tuple[str, ...]:
    """The reward option that a run is resumed by: as given, or the names of functions that the caller passed."""
    return given if len(given) == len(rewards) else tuple(function.name for function in rewards)


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
    plan = build_plan(config.mesh)
    rewards = resolve_all(reward_functions if reward_functions is not None else config.reward, config.reward_weights)
    eval_rewards = resolve_all(config.eval_reward_functions) if config.eval_reward_functions else rewards
    config = dataclasses.replace(config, reward=_names(config.reward, rewards))
    check(config, plan.batch_ways)
    check_own(config, advantages=advantages, objective=objective)
    check_rewards(config, rewards)
    rows = read_rows(dataset if dataset is not None else config.dataset, name="dataset")
    check_routes(rewards, rows, "dataset")
    eval_rows = {name: read_rows(source, name=f"eval_dataset {name!r}") for name, source in config.eval_dataset.items()}
    for name, held in eval_rows.items():
        check_routes(eval_rewards, held, f"eval_dataset {name!r}")

    model, params, tokenizer, generation = load_model(
        config.model, plan, dtype=config.dtype, param_dtype=config.param_dtype, remat=config.remat
    )
    prompts = encode_with(config, tokenizer, rows, "dataset")
    eval_sets = {
        name: encode_with(config, tokenizer, held, f"eval_dataset {name!r}") for name, held in eval_rows.items()
    }
    check_held_out(prompts, eval_sets)
    lengths = [len(ids) for encoded in (prompts, *eval_sets.values()) for ids in encoded.ids]
    buckets = tuple(sorted(config.prompt_buckets)) or default_buckets(lengths)
    if max(lengths) > buckets[-1]:
        raise ValueError(
            f"prompt_buckets={buckets}: the longest prompt has {max(lengths)} tokens; add a bucket that holds it"
        )

    sampling = make_sampling(config, tokenizer, generation)
    total_steps = config.max_steps or 100
    if config.num_epochs is not None:
        total_steps = max(1, round(config.num_epochs * len(prompts.ids) / config.prompts_per_step))
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
        *drop_notes({"dataset": prompts, **eval_sets}, config.max_prompt_length),
        *vocabulary_notes(model, tokenizer),
    ]
    notes.append(
        f"{len(buckets)} declared prompt bucket(s) {list(buckets)} + {config.max_completion_length} new tokens: "
        "each step of the program compiles once a bucket"
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    notes.append(f"{size / 1e6:.1f} M parameters, {len(prompts.ids)} training prompts, mesh {dict(plan.mesh.shape)}")
    return Setup(config, Path(config.output_dir), model, params, tokenizer, generation, steps, sampler, schedule, prompts,
                 eval_sets, rewards, eval_rewards, total_steps, fingerprint(prompts), notes)  # fmt: skip


def copy_params(params: Params) -> Params:
    """A second copy: the training state is donated to each update, the reference must outlive it."""
    return jax.tree.map(jnp.copy, params)
