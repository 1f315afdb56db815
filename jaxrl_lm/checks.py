"""What a run's options must satisfy, and what they resolve to; called before anything is loaded.

Every error names the option and what to do. Next to read: `prepare.py`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxrl_lm import algos, overlap_checks, process_checks
from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.rewards import RewardFunction, route
from jaxrl_lm.rule_tables import check_options

_OTHERS = process_checks.LEAST | overlap_checks.LEAST
# The least value that an option may have.
LEAST = {
    "prompts_per_step": 1,
    "num_generations": 1,
    "max_drift": 0,
    "kl_token_power": 0,
    "kl_cov_coef": 0,
    "sampler_correction_cap": 0,
    "token_scale_kappa": 1,
    "token_scale_alpha": 0,
    "lam": 0,
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
    "ngram": 1,
    "pass_k": 1,
    "overlong_buffer": 0,
    "length_penalty": 0,
    "unlikeliness": 0,
    "max_sampler_gap": 0,
    "sampler_correction_floor": 0,
    "kl_horizon": 1,
    "reference_reset_steps": 1,
    "max_approx_kl": 0,
    "kl_budget": 0,
    "entropy_coef": 0,
    "target_entropy": 0,
    "entropy_coef_step": 0,
    "entropy_coef_max": 0,
    "dynamic_sampling_batches": 1,
    "oversample": 1,
    "replay_groups": 0,
    "replay_size": 1,
    "replay_max_age": 1,
    "vf_coef": 0,
    "critic_warmup_steps": 0,
    "lora_rank": 1,
    "seeds": 1,
    "teacher_coef": 0,
    "mix_beta": 0,
} | _OTHERS


def resolve_algorithm(config: GRPOConfig) -> algos.Preset:
    """The preset, or loss_type's choice, with the options given beside it. Raises ValueError for unknown names."""
    if config.preset is not None and config.preset not in algos.PRESETS:
        raise ValueError(f"preset={config.preset!r} is unknown: use {', '.join(algos.PRESETS)}")
    if config.loss_type is not None and config.loss_type not in algos.LOSS_TYPES:
        raise ValueError(f"loss_type={config.loss_type!r} is unknown: use {', '.join(algos.LOSS_TYPES)}")
    base = algos.PRESETS[config.preset] if config.preset else algos.Preset(**algos.LOSS_TYPES["dapo"])
    if config.loss_type is not None:
        base = dataclasses.replace(base, **algos.LOSS_TYPES[config.loss_type])
    if config.actions != "token":
        base = dataclasses.replace(base, importance_sampling_level="action")
    names = [field.name for field in dataclasses.fields(algos.Preset)]
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    chosen = dataclasses.replace(base, **given)
    if chosen.epsilon_high is None:
        chosen = dataclasses.replace(chosen, epsilon_high=chosen.epsilon)
    if chosen.sampler_correction is None:
        mode = "token_truncate" if old_logprobs_of(config) == "recompute" else "none"
        chosen = dataclasses.replace(chosen, sampler_correction=mode)
    return chosen


def old_logprobs_of(config: GRPOConfig) -> str:
    """Where old log-probs come from: with one update a batch the old policy is the current one, and none are needed, but
    where older weights have sampled it."""
    several = updates_per_step(config) > 1 or config.replay_groups > 0 or config.max_off_policy_steps > 0
    return config.old_logprobs or ("recompute" if several else "sampler")


def needs_reference(config: GRPOConfig) -> bool:
    """Whether a reference policy is kept: for a KL in loss or reward, or to measure the distance from the start."""
    measured = config.target_kl is not None or config.kl_budget is not None or "dpo" in config.mix
    return bool(resolve_algorithm(config).beta or measured)


def moves_reference(config: GRPOConfig) -> bool:
    return config.reference_reset_steps is not None or config.reference_ema is not None


def updates_per_step(config: GRPOConfig) -> int:
    """Optimiser steps for each step of sampling, where nothing ends them early."""
    completions = config.prompts_per_step * config.num_generations
    return config.num_iterations * (completions // (config.minibatch_completions or completions))


# Between which values (exclusive, inclusive) an option must lie that is given.
RANGES = {
    "gamma": (0.0, 1.0),
    "lam": (-math.inf, 1.0),
    "outlier_limit": (0.0, math.inf),
    "token_scale_alpha": (-math.inf, 1.0),
    "sapo_temperature_pos": (0.0, math.inf),
    "sapo_temperature_neg": (0.0, math.inf),
    "delta": (1.0, math.inf),
    "cliprange_value": (0.0, math.inf),
    "dual_clip": (1.0, math.inf),
    "log_ratio_clip": (0.0, math.inf),
    "target_kl": (0.0, math.inf),
    "reference_ema": (0.0, 1.0),
    "top_entropy_share": (0.0, 1.0),
    "cov_share": (0.0, 1.0),
    "implicit_prm": (0.0, math.inf),
}


def check(config: GRPOConfig, devices: int) -> None:
    """Raises ValueError, naming the options, where sizes do not divide or options contradict each other."""
    for name, least in LEAST.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    for name, (above, most) in RANGES.items():
        value = getattr(config, name)
        if value is not None and not above < value <= most:
            raise ValueError(f"{name}={value}: must be in ({above:g}, {most:g}]")
    if config.temperature <= 0:
        raise ValueError(f"temperature={config.temperature}: training samples, so it must be above 0")
    check_options(config)
    _check_algorithm(config)
    _check_sizes(config, devices)
    if config.max_steps is not None and config.num_epochs is not None:
        raise ValueError("max_steps and num_epochs are both given: say in one of them how long to train")
    if config.best_metric is not None and not (config.eval_steps and config.eval_dataset):
        raise ValueError(f"best_metric={config.best_metric!r} needs an eval_dataset and eval_steps above 0")


def _check_sizes(config: GRPOConfig, devices: int) -> None:
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
    if config.replay_groups >= config.prompts_per_step:
        raise ValueError(
            f"replay_groups={config.replay_groups}: must be below prompts_per_step={config.prompts_per_step}, or nothing "
            "new is learned"
        )


# Options of the ratio and its clip, and the surrogates that read them.
ONLY_OF = {
    "epsilon": ("clip", "clipped-weight"),
    "epsilon_high": ("clip", "clipped-weight"),
    "delta": ("clip",),
    "dual_clip": ("clip",),
    "log_ratio_clip": ("clip", "clipped-weight", "soft-gate"),
}

# What compares the completions of one prompt.
GROUPED = ("group", "leave-one-out", "max-rl", "pass-at-k")


def _check_algorithm(config: GRPOConfig) -> None:
    """Raises ValueError where the parts of the algorithm do not go together."""
    chosen, group = resolve_algorithm(config), config.num_generations
    compares = chosen.advantage in GROUPED or chosen.dynamic_sampling or chosen.drop not in ("none", "wrong")
    if group < 2 and (compares or config.length_penalty or config.unlikeliness):
        raise ValueError(
            f"num_generations={group}: {config.preset or 'GRPO'} compares completions of one prompt: use 2 or more"
        )
    if chosen.advantage == "pass-at-k" and not 1 <= config.pass_k <= group:
        raise ValueError(f"pass_k={config.pass_k}: must be from 1 to num_generations={group}")
    if (chosen.advantage == "gae") != (config.critic != "none"):
        raise ValueError(
            f"advantage={chosen.advantage!r} with critic={config.critic!r}: advantage gae (preset ppo) needs a critic, and "
            "no other one has a use for it: give both (`jaxrl-lm ppo` does), or neither"
        )
    if chosen.advantage == "greedy" and config.multi_objective_aggregation == "normalize_then_sum":
        raise ValueError("multi_objective_aggregation='normalize_then_sum' leaves a greedy baseline nothing to compare")
    if chosen.overlong_buffer >= config.max_completion_length:
        raise ValueError(
            f"overlong_buffer={chosen.overlong_buffer}: must be below max_completion_length="
            f"{config.max_completion_length}"
        )
    if chosen.importance_sampling_level == "action" and config.actions == "token":
        raise ValueError("importance_sampling_level='action' needs actions larger than tokens: give actions")
    if chosen.surrogate == "policy-gradient" and chosen.advantage != "accepted" and updates_per_step(config) > 1:
        raise ValueError(
            f"surrogate='policy-gradient' has no ratio that would account for the {updates_per_step(config)} updates a "
            "batch that num_iterations and minibatch_completions ask for: use one update, or another surrogate"
        )
    for name, surrogates in ONLY_OF.items():
        if getattr(config, name) is not None and chosen.surrogate not in surrogates:
            raise ValueError(f"{name} has no effect on surrogate={chosen.surrogate!r}: leave it out")
    if chosen.sampler_correction_cap is not None and config.sampler_correction_floor > chosen.sampler_correction_cap:
        raise ValueError(
            f"sampler_correction_floor={config.sampler_correction_floor} is above sampler_correction_cap="
            f"{chosen.sampler_correction_cap}"
        )
    if config.entropy_clip == "kl_cov" and updates_per_step(config) == 1:
        raise ValueError(
            "entropy_clip='kl_cov' is a KL to the policy that a batch's updates start from: with one update it is 0; ask "
            "for more by num_iterations or minibatch_completions, or use clip_cov"
        )
    if config.token_scale == "planning" and not config.planning_tokens:
        raise ValueError("token_scale='planning' needs planning_tokens")
    if config.cov_low > config.cov_high:
        raise ValueError(f"cov_low={config.cov_low} is above cov_high={config.cov_high}")
    if config.oversample > 1 and group < 2:
        raise ValueError(
            f"oversample={config.oversample} with num_generations=1 would train on the best of several completions alone: "
            "use 2 or more"
        )
    if config.critic_warmup_steps and config.weight_decay:
        raise ValueError("critic_warmup_steps: weight_decay would move the policy meanwhile; leave one of them out")
    _check_replay(config, chosen)
    _check_right_and_wrong(config, chosen)
    _check_idle(config, chosen)
    _check_kl(config, chosen)
    process_checks.check(config, chosen)
    overlap_checks.check(config, chosen, old_logprobs_of(config))


def _check_replay(config: GRPOConfig, chosen: algos.Preset) -> None:
    if config.replay_groups and old_logprobs_of(config) == "sampler":
        raise ValueError("replay_groups: old rows need a ratio to the policy of now: use old_logprobs='recompute'")
    if config.replay_groups and chosen.surrogate == "policy-gradient" and chosen.sampler_correction == "none":
        raise ValueError(
            "replay_groups with surrogate='policy-gradient' needs a sampler_correction: it has no other ratio"
        )


def _check_right_and_wrong(config: GRPOConfig, chosen: algos.Preset) -> None:
    """Raises ValueError where something that asks whether a reward is at least 0.5, or by how much above 0, gets another
    number to judge."""
    judges = chosen.advantage in ("accepted", "pass-at-k", "max-rl")
    shaped = {
        "kl_in='reward'": chosen.beta and chosen.kl_in == "reward",
        "overlong_buffer": chosen.overlong_buffer,
        "length_penalty": config.length_penalty,
        "unlikeliness": config.unlikeliness,
    }
    for name, given in shaped.items():
        if judges and given:
            raise ValueError(
                f"{name} changes the rewards that advantage={chosen.advantage!r} judges: leave one of them out"
            )
    judges = judges or chosen.drop not in ("none", "equal") or config.length_penalty or config.unlikeliness
    if judges and config.multi_objective_aggregation == "normalize_then_sum":
        raise ValueError(
            "multi_objective_aggregation='normalize_then_sum' leaves no reward that is right from 0.5 up, which advantage="
            f"{chosen.advantage!r}, drop={chosen.drop!r}, length_penalty or unlikeliness would need: use sum_then_normalize"
        )


def _check_idle(config: GRPOConfig, chosen: algos.Preset) -> None:
    """Raises ValueError for an option that was given and that nothing reads."""
    idle = {
        "scale_rewards": config.scale_rewards is not None and chosen.advantage != "group",
        "advantage_baseline": config.advantage_baseline is not None and chosen.advantage != "constant",
        "importance_sampling_level": config.importance_sampling_level is not None
        and chosen.surrogate == "policy-gradient",
        "gamma": config.gamma != 1 and chosen.advantage not in ("gae", "batch"),
        "critic_model": config.critic_model is not None and config.critic != "separate",
        "critic_warmup_steps": config.critic_warmup_steps and config.critic == "none",
        "planning_tokens": config.planning_tokens and config.token_scale != "planning",
        "sampler_correction_cap": config.sampler_correction_cap is not None and chosen.sampler_correction == "none",
        "kl_estimator": config.kl_estimator is not None and not needs_reference(config),
    }
    for name, given in idle.items():
        if given:
            raise ValueError(
                f"{name}={getattr(config, name)!r} has no effect on the algorithm that is chosen (advantage="
                f"{chosen.advantage!r}, surrogate={chosen.surrogate!r}): leave it out"
            )


def _check_kl(config: GRPOConfig, chosen: algos.Preset) -> None:
    if chosen.beta and chosen.kl_in == "loss" and config.kl_estimator == "k1":
        raise ValueError(
            "kl_estimator='k1' as a loss has an expected gradient of 0 and regularises nothing: use k3 or k2, or "
            "kl_in='reward'"
        )
    if config.reference_ema is not None and config.param_dtype == "bfloat16":
        raise ValueError("reference_ema with param_dtype='bfloat16': its small steps round to nothing; use float32")
    if config.reference_reset_steps is not None and config.reference_ema is not None:
        raise ValueError("reference_reset_steps and reference_ema are both given: the reference moves by one of them")
    if moves_reference(config) and not needs_reference(config):
        raise ValueError(
            "reference_reset_steps and reference_ema move a reference that beta=0 does not keep: give beta"
        )
    if moves_reference(config) and config.kl_budget is not None:
        raise ValueError("kl_budget is measured from the initial policy: it does not go with a reference that moves")
    if config.target_kl is not None and not chosen.beta:
        raise ValueError("target_kl moves beta, which is 0: give the beta to start from")
    completions = config.prompts_per_step * config.num_generations
    if config.target_kl is not None and 0.2 * completions > config.kl_horizon:
        raise ValueError(
            f"kl_horizon={config.kl_horizon}: must be at least a fifth of the step's {completions} completions, or beta "
            "could turn negative"
        )
    for name in ("kl_token_power", "kl_importance"):
        if getattr(config, name) and (chosen.kl_in == "reward" or not chosen.beta):
            raise ValueError(f"{name} weighs the KL in the loss: give beta, and kl_in='loss'")
    if config.target_entropy is not None and config.entropy_coef > config.entropy_coef_max:
        raise ValueError(f"entropy_coef={config.entropy_coef} is above entropy_coef_max={config.entropy_coef_max}")


def check_own(config: GRPOConfig, *, advantages: Any, objective: Any) -> None:
    """Raises ValueError where an option speaks of a part that a function of the caller's replaces."""
    if advantages is not None and config.critic != "none":
        raise ValueError(
            "critic: its values belong to advantage gae, which an advantages function of your own replaces"
        )
    replaced = {
        "objective": (
            objective,
            (
                "epsilon",
                "epsilon_high",
                "delta",
                "dual_clip",
                "surrogate",
                "importance_sampling_level",
                "log_ratio_clip",
            ),
        ),
        "advantages": (advantages, ("advantage", "scale_rewards", "advantage_baseline")),
    }
    for name, (function, options) in replaced.items():
        for option in options:
            if function is not None and getattr(config, option) is not None:
                raise ValueError(f"{option} has no effect beside an {name} function of your own: leave it out")
    process_checks.check_own(config, advantages=advantages, objective=objective)


def check_rewards(config: GRPOConfig, rewards: Sequence[RewardFunction]) -> None:
    """Raises ValueError for no function, where true_reward names none, or where none has a weight."""
    if not rewards:
        raise ValueError("reward: no reward function is given")
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
