"""What a run's options must satisfy, and what they resolve to; called before anything is loaded.

Every error names the option and what to do. Next to read: `prepare.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrl_lm import algos
from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.rewards import RewardFunction, route

# The least value that an option may have.
LEAST = {
    "prompts_per_step": 1,
    "max_completion_length": 1,
    "num_iterations": 1,
    "minibatch_completions": 1,
    "microbatch_completions": 1,
    "max_steps": 1,
    "num_epochs": 0,
    "seed": 0,
    "beta": 0,
    "epsilon": 0,
    "epsilon_high": 0,
    "max_grad_norm": 0,
    "weight_decay": 0,
    "learning_rate": 0,
    "warmup_steps": 0,
    "eval_steps": 0,
    "eval_limit": 1,
    "eval_num_generations": 1,
    "probe_prompts": 0,
    "save_steps": 0,
    "completions_steps": 0,
    "score_chunk": 1,
}


def resolve_algorithm(config: GRPOConfig) -> algos.Preset:
    """The preset, or loss_type's reduction, with the options given beside it. Raises ValueError for unknown names."""
    if config.preset is not None and config.preset not in algos.PRESETS:
        raise ValueError(f"preset={config.preset!r} is unknown: use {', '.join(algos.PRESETS)}")
    if config.loss_type is not None and config.loss_type not in algos.LOSS_TYPES:
        raise ValueError(f"loss_type={config.loss_type!r} is unknown: use {', '.join(algos.LOSS_TYPES)}")
    base = algos.PRESETS[config.preset] if config.preset else algos.Preset(loss_agg_mode=algos.LOSS_TYPES["dapo"])
    if config.loss_type is not None:
        base = dataclasses.replace(base, loss_agg_mode=algos.LOSS_TYPES[config.loss_type])
    names = ("scale_rewards", "importance_sampling_level", "epsilon", "epsilon_high", "loss_agg_mode")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    chosen = dataclasses.replace(base, **given)
    return chosen if chosen.epsilon_high is not None else dataclasses.replace(chosen, epsilon_high=chosen.epsilon)


def updates_per_step(config: GRPOConfig) -> int:
    """Optimiser steps for each step of sampling."""
    completions = config.prompts_per_step * config.num_generations
    return config.num_iterations * (completions // (config.minibatch_completions or completions))


def check(config: GRPOConfig, devices: int) -> None:
    """Raises ValueError, naming the options, where sizes do not divide or options contradict each other."""
    for name, least in LEAST.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    if config.temperature <= 0:
        raise ValueError(f"temperature={config.temperature}: training samples, so it must be above 0")
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
    if config.max_steps is not None and config.num_epochs is not None:
        raise ValueError("max_steps and num_epochs are both given: say in one of them how long to train")
    if config.best_metric is not None and not (config.eval_steps and config.eval_dataset):
        raise ValueError(f"best_metric={config.best_metric!r} needs an eval_dataset and eval_steps above 0")


def check_own(config: GRPOConfig, *, advantages: Any, objective: Any) -> None:
    """Raises ValueError where an option speaks of a part that a function of the caller's replaces."""
    replaced = {
        "objective": (objective, ("epsilon", "epsilon_high", "delta", "importance_sampling_level")),
        "advantages": (advantages, ("scale_rewards",)),
    }
    for name, (function, options) in replaced.items():
        for option in options:
            if function is not None and getattr(config, option) is not None:
                raise ValueError(f"{option} has no effect beside an {name} function of your own: leave it out")


def check_rewards(config: GRPOConfig, rewards: Sequence[RewardFunction]) -> None:
    """Raises ValueError where true_reward names no function, or no function has a weight."""
    if config.true_reward is not None and config.true_reward not in [function.name for function in rewards]:
        raise ValueError(f"true_reward={config.true_reward!r} is none of the reward functions")
    if not any(function.weight for function in rewards):
        raise ValueError("reward_weights: every weight is 0, nothing would be trained")


def check_routes(functions: Sequence[RewardFunction], rows: Sequence[dict[str, Any]], name: str) -> None:
    """Raises ValueError with the row for a `reward` column that names a function that there is not."""
    try:
        route(functions, [row.get("reward") for row in rows])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


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
