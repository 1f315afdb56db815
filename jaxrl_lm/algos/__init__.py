"""The mathematics: plain arrays in, plain arrays out, hyperparameters by keyword.

Advantages -> `advantages.py`, `returns.py`, `process.py`; rewards before them -> `shaping.py`, `groups.py`; ratios and
clipping -> `surrogate.py`, `gates.py`, `corrections.py`; KL -> `kl.py`; entropy -> `entropy.py`, `token_scales.py`; critics
-> `values.py`; reductions -> `reduction.py`; actions larger than tokens -> `actions.py`; named choices of these ->
`presets.py`. Preferences -> `preference.py`, `nash.py`; reward models, labels of steps and using scores ->
`reward_losses.py`, `step_labels.py`, `selection.py`. Nothing here runs a model: see `objectives.py`.
"""

from jaxrl_lm.algos.actions import action_sizes, action_starts, action_sum, from_start, ngram_actions, sequence_ids
from jaxrl_lm.algos.advantages import (
    accepted_advantages,
    batch_whitened_advantages,
    constant_baseline_advantages,
    greedy_baseline_advantages,
    group_advantages,
    leave_one_out_advantages,
    max_rl_advantages,
    pass_at_k_advantages,
)
from jaxrl_lm.algos.corrections import sampler_correction
from jaxrl_lm.algos.entropy import (
    adaptive_entropy_coefficient,
    clip_cov_mask,
    covariance,
    kl_cov_mask,
    top_entropy_mask,
)
from jaxrl_lm.algos.f_divergence import divergence_score
from jaxrl_lm.algos.gates import drift_mask, soft_gate_surrogate
from jaxrl_lm.algos.groups import mixed_groups, outlier_rows
from jaxrl_lm.algos.kl import adaptive_coefficient, kl_estimate, mean_and_max_kl
from jaxrl_lm.algos.nash import extragradient_step, inpo_loss, nash_md_step, pairwise_advantages, regularised_step
from jaxrl_lm.algos.passk import pass_at_k, same_outcome_share
from jaxrl_lm.algos.preference import (
    dpo_loss,
    implicit_rewards,
    kto_kl,
    kto_loss,
    moving_reward_shift,
    mpo_loss,
    preference_metrics,
    whole_pairs,
)
from jaxrl_lm.algos.presets import LOSS_TYPES, PRESETS, Preset, Surrogate
from jaxrl_lm.algos.process import process_advantages, turn_advantages
from jaxrl_lm.algos.reduction import token_weights
from jaxrl_lm.algos.returns import gae, returns_to_go, token_rewards
from jaxrl_lm.algos.reward_losses import (
    binary_cross_entropy,
    calibration,
    calibration_error,
    correlation,
    ensemble_reward,
    label_metrics,
    length_reward_moments,
    merge_moments,
    moments,
    outcome_loss,
    outcome_tokens,
    pair_calibration,
    process_loss,
    process_scores,
    reward_model_loss,
    reward_model_metrics,
)
from jaxrl_lm.algos.selection import beam_step, best_of_n, best_of_n_kl, expected_best_of_n, weighted_majority
from jaxrl_lm.algos.shaping import length_penalty, overlong_penalty, unlikeliness_rewards
from jaxrl_lm.algos.step_labels import (
    expected_hard_label,
    implicit_outcome_logits,
    implicit_process_rewards,
    monte_carlo_labels,
    normalise_step_rewards,
    potential_shaping,
    step_counts,
    step_ids,
    step_potentials,
)
from jaxrl_lm.algos.surrogate import (
    clip_metrics,
    clipped_surrogate,
    clipped_weight_surrogate,
    importance_ratio,
    policy_gradient,
)
from jaxrl_lm.algos.token_scales import (
    critical_kl_weight,
    entropy_shaped_scale,
    gtpo_scale,
    low_probability_scale,
    normalise_scale,
    planning_token_scale,
)
from jaxrl_lm.algos.values import explained_variance, value_loss

__all__ = [
    "LOSS_TYPES",
    "PRESETS",
    "Preset",
    "Surrogate",
    "accepted_advantages",
    "action_sizes",
    "action_starts",
    "action_sum",
    "adaptive_coefficient",
    "adaptive_entropy_coefficient",
    "batch_whitened_advantages",
    "beam_step",
    "best_of_n",
    "best_of_n_kl",
    "binary_cross_entropy",
    "calibration",
    "calibration_error",
    "clip_cov_mask",
    "clip_metrics",
    "clipped_surrogate",
    "clipped_weight_surrogate",
    "constant_baseline_advantages",
    "correlation",
    "covariance",
    "critical_kl_weight",
    "divergence_score",
    "dpo_loss",
    "drift_mask",
    "ensemble_reward",
    "entropy_shaped_scale",
    "expected_best_of_n",
    "expected_hard_label",
    "explained_variance",
    "extragradient_step",
    "from_start",
    "gae",
    "greedy_baseline_advantages",
    "group_advantages",
    "gtpo_scale",
    "implicit_outcome_logits",
    "implicit_process_rewards",
    "implicit_rewards",
    "importance_ratio",
    "inpo_loss",
    "kl_cov_mask",
    "kl_estimate",
    "kto_kl",
    "kto_loss",
    "label_metrics",
    "leave_one_out_advantages",
    "length_penalty",
    "length_reward_moments",
    "low_probability_scale",
    "max_rl_advantages",
    "mean_and_max_kl",
    "merge_moments",
    "mixed_groups",
    "moments",
    "monte_carlo_labels",
    "moving_reward_shift",
    "mpo_loss",
    "nash_md_step",
    "ngram_actions",
    "normalise_scale",
    "normalise_step_rewards",
    "outcome_loss",
    "outcome_tokens",
    "outlier_rows",
    "overlong_penalty",
    "pair_calibration",
    "pairwise_advantages",
    "pass_at_k",
    "pass_at_k_advantages",
    "planning_token_scale",
    "policy_gradient",
    "potential_shaping",
    "preference_metrics",
    "process_advantages",
    "process_loss",
    "process_scores",
    "regularised_step",
    "returns_to_go",
    "reward_model_loss",
    "reward_model_metrics",
    "same_outcome_share",
    "sampler_correction",
    "sequence_ids",
    "soft_gate_surrogate",
    "step_counts",
    "step_ids",
    "step_potentials",
    "token_rewards",
    "token_weights",
    "top_entropy_mask",
    "turn_advantages",
    "unlikeliness_rewards",
    "value_loss",
    "weighted_majority",
    "whole_pairs",
]
