"""From a config's options to the parts of its algorithm: what is trained, the objective, credit and batch rules.

`prepare.py` puts them together with a model, data and compiled steps.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import algos
from jaxrl_lm.algorithm_config import LoraOptions
from jaxrl_lm.batch import BatchRule
from jaxrl_lm.checks import old_logprobs_of, updates_per_step
from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.credit import CreditRule
from jaxrl_lm.distill import check_same_vocabulary
from jaxrl_lm.distributed import place_tree
from jaxrl_lm.models import (
    LoraConfig,
    Model,
    generation_config,
    init_lora,
    init_value_head,
    load,
    load_critic,
    lora_specs,
    trunk_model,
    value_specs,
)
from jaxrl_lm.models.attention import choose as choose_attention
from jaxrl_lm.objectives import CriticObjective, ImplicitObjective, PolicyObjective
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import Params
from jaxrl_lm.update import Objective


def compute_dtype(dtype: str | None) -> str:
    """The dtype of the computation, by the machine where none is asked for."""
    return dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def with_remat(model: Model, remat: str | None) -> Model:
    """The model with what its backward pass recomputes, by the machine where nothing is asked for."""
    remat = remat or ("dots" if jax.default_backend() == "cpu" else "full")
    return dataclasses.replace(model, config=dataclasses.replace(model.config, remat=remat))


def with_attention(model: Model, asked: str) -> Model:
    """The model with the attention that is asked for on this machine. Raises ValueError as `models.attention.choose`."""
    chosen = choose_attention(asked, model.config, platform=jax.default_backend(), plan=model.plan)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, attention_implementation=chosen))


def load_model(
    name: str, plan: Plan, *, dtype: str | None, param_dtype: str, remat: str | None, attention: str = "auto"
):
    """Model, parameters, tokenizer and generation config, with the machine's defaults for dtype, remat and attention."""
    model, params, tokenizer = load(name, plan=plan, dtype=param_dtype, compute_dtype=compute_dtype(dtype))
    return with_attention(with_remat(model, remat), attention), params, tokenizer, generation_config(name)


def lora_of(config: LoraOptions) -> LoraConfig | None:
    """The adapter that a config asks for, if any."""
    if config.lora_rank is None:
        return None
    return LoraConfig(
        rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets, rslora=config.lora_rslora
    )


def with_adapter(
    config: Any, model: Model, params: Params, plan: Plan, lora: LoraConfig | None
) -> tuple[dict[str, Params], Params | None]:
    """The policy's tree that is trained, by its name, and under LoRA the weights below the fresh adapter."""
    if lora is None:
        return {"policy": params}, None
    adapter = init_lora(jax.random.fold_in(jax.random.key(config.seed), 1), model, lora, config.param_dtype)
    return {"policy": place_tree(adapter, plan.tree(lora_specs(model, lora)))}, params


def trained_params(
    config: GRPOConfig, model: Model, params: Params, plan: Plan, lora: LoraConfig | None, tokenizer: Any
) -> tuple[dict[str, Params], Any]:
    """The trees that are trained, by name, and under LoRA the weights below the adapter.

    Raises ValueError for a critic_model or an implicit_prm_model of another shape.
    """
    trained, base = with_adapter(config, model, params, plan, lora)
    if config.implicit_prm is not None:
        trained["prm"] = _of_same_shape(config, "implicit_prm_model", model, params, plan, tokenizer)
    if config.critic == "none":
        return trained, base
    head = init_value_head(model.config, config.param_dtype)
    critic = {"head": place_tree(head, plan.tree(value_specs(model.config)))}
    if config.critic == "separate":
        critic = _critic(config, model, params, plan, tokenizer) | ({} if config.critic_model else critic)
    return trained | {"critic": critic}, base


def _critic(config: GRPOConfig, model: Model, params: Params, plan: Plan, tokenizer: Any) -> dict[str, Params]:
    """A separate critic: a copy of the policy's trunk, or the model that is named, a reward model with its own head."""
    if config.critic_model is None:
        trunk = copy_params(params)
        return {"trunk": {name: leaf for name, leaf in trunk.items() if name in trunk_model(model).specs}}
    other, found, theirs = load_critic(
        config.critic_model, plan=plan, dtype=config.param_dtype, compute_dtype=compute_dtype(config.dtype)
    )
    other = with_attention(with_remat(other, config.remat), config.attention_implementation)
    if other.config != trunk_model(model).config:
        raise ValueError(f"critic_model={config.critic_model!r} has another shape than the policy; give one of it")
    check_tokens("critic_model", config.critic_model, tokenizer, theirs)
    return found


def check_tokens(option: str, name: str, tokenizer: Any, other: Any) -> None:
    """Raises ValueError, naming option, model and token, where a model that reads the policy's tokens has others."""
    try:
        check_same_vocabulary(tokenizer, other)
    except ValueError as error:
        raise ValueError(f"{option}={name!r}: {error}") from error


def _of_same_shape(config: GRPOConfig, option: str, model: Model, params: Params, plan: Plan, tokenizer: Any) -> Params:
    """The weights of the model that an option names, or a copy of the policy's start."""
    name = getattr(config, option)
    if name is None:
        return copy_params(params)
    other, weights, theirs, _ = load_model(
        name, plan, dtype=config.dtype, param_dtype=config.param_dtype, remat=config.remat,
        attention=config.attention_implementation,
    )  # fmt: skip
    if other.config != model.config:
        raise ValueError(f"{option}={name!r} has another shape than the policy; give one of it")
    check_tokens(option, name, tokenizer, theirs)
    return weights


def make_objective(config: GRPOConfig, algorithm: algos.Preset) -> Objective:
    """The loss that the options describe."""
    policy = PolicyObjective(
        completion_columns=config.max_completion_length,
        surrogate=algorithm.surrogate,
        clip_low=algorithm.epsilon,
        clip_high=algorithm.epsilon_high,
        dual_clip=algorithm.dual_clip,
        delta=algorithm.delta,
        log_ratio_clip=config.log_ratio_clip,
        level=algorithm.importance_sampling_level,
        gate_positive=config.sapo_temperature_pos,
        gate_negative=config.sapo_temperature_neg,
        max_drift=config.max_drift,
        old_is_sampler=old_logprobs_of(config) == "sampler" and updates_per_step(config) > 1,
        kl_estimator=config.kl_estimator or "k3",
        kl_importance=config.kl_importance,
        score_chunk=config.score_chunk,
    )
    objective = policy
    if config.critic != "none":
        objective = CriticObjective(
            policy=policy, vf_coef=config.vf_coef, clip=config.cliprange_value, shared=config.critic == "shared"
        )
    if config.implicit_prm is None:
        return objective
    return ImplicitObjective(
        policy=objective,
        completion_columns=config.max_completion_length,
        beta=config.implicit_prm,
        coef=config.implicit_prm_coef,
        score_chunk=config.score_chunk,
    )


def make_credit(config: GRPOConfig, algorithm: algos.Preset, own: Callable[..., jax.Array] | None) -> CreditRule:
    """The advantage estimator that the options describe, or the caller's."""
    return CreditRule(
        advantage=algorithm.advantage,
        group_size=config.num_generations,
        scale=algorithm.scale_rewards,
        baseline=algorithm.advantage_baseline,
        drop=algorithm.drop,
        outlier_limit=config.outlier_limit,
        overlong_buffer=algorithm.overlong_buffer,
        max_length=config.max_completion_length,
        length_penalty=config.length_penalty,
        unlikeliness=config.unlikeliness,
        pass_k=config.pass_k,
        discount=config.gamma,
        lam=config.lam,
        discount_per=config.discount_per,
        actions=config.actions,
        ngram=config.ngram,
        step_credit=config.step_credit,
        step_weight=config.step_weight,
        outcome_weight=config.outcome_weight,
        step_normalise=config.step_normalise,
        step_shaping=config.step_shaping,
        own=own,
    )


def _most_actions(config: GRPOConfig) -> int:
    """Actions of the longest completion: what a constant length counts. One turn is all that there is yet."""
    tokens = config.max_completion_length
    return {"token": tokens, "ngram": -(-tokens // config.ngram), "turn": 1, "sequence": 1}[config.actions]


def make_batch_rules(config: GRPOConfig, algorithm: algos.Preset, tokenizer) -> tuple[BatchRule, BatchRule]:
    """How batches are built, and how once the sampler is too far from the scorer for its log-probs to be used."""
    words = [tokenizer.encode(word, add_special_tokens=False) for word in config.planning_tokens]
    sampler = old_logprobs_of(config) == "sampler"
    rule = BatchRule(
        group_size=config.num_generations,
        over=algorithm.loss_agg_mode,
        length=_most_actions(config),
        mask_truncated=config.mask_truncated_completions,
        keep_old=not sampler or updates_per_step(config) > 1 or config.max_off_policy_steps > 0,
        # A correction weighs the scored policy over the sampler's: the ratio is to the former, or the gap counted twice.
        sampler_ratio=sampler and algorithm.sampler_correction == "none",
        actions=config.actions,
        ngram=config.ngram,
        sampler_correction=algorithm.sampler_correction,
        correction_cap=algorithm.sampler_correction_cap,
        correction_floor=config.sampler_correction_floor,
        token_scale=config.token_scale,
        scale_alpha=config.token_scale_alpha,
        scale_kappa=config.token_scale_kappa,
        scale_token_ids=tuple(sorted({token for ids in words for token in ids})),
        kl_power=config.kl_token_power,
        entropy_bonus=config.entropy_coef > 0 or config.target_entropy is not None,
        top_entropy_share=config.top_entropy_share,
        entropy_clip=config.entropy_clip,
        cov_share=config.cov_share,
        cov_low=config.cov_low,
        cov_high=config.cov_high,
        kl_cov_coef=config.kl_cov_coef,
    )
    if not sampler or config.sampler_correction == "none" or config.max_off_policy_steps:
        return rule, rule  # of older weights the gap says nothing of the sampler
    correction = "token_truncate" if rule.sampler_correction == "none" else rule.sampler_correction
    return rule, dataclasses.replace(rule, keep_old=True, sampler_ratio=False, sampler_correction=correction)


def copy_params(params: Params) -> Params:
    """A second copy: the training state is donated to each update, the reference must outlive it."""
    return jax.tree.map(jnp.copy, params)
