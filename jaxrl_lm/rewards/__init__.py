"""Scoring completions: the reward protocol and the shipped reward functions."""

from jaxrl_lm.rewards.aggregate import combine, reward_metrics
from jaxrl_lm.rewards.protocol import (
    SHIPPED,
    Everywhere,
    RewardError,
    RewardFunction,
    columns_of,
    compute_rewards,
    resolve,
    resolve_all,
    route,
)
from jaxrl_lm.rewards.steps import RowSteps, compute_step_rewards, resolve_steps, step_tokens
from jaxrl_lm.rewards.verl import from_verl

__all__ = [
    "SHIPPED",
    "Everywhere",
    "RewardError",
    "RewardFunction",
    "RowSteps",
    "columns_of",
    "combine",
    "compute_rewards",
    "compute_step_rewards",
    "from_verl",
    "resolve",
    "resolve_all",
    "resolve_steps",
    "reward_metrics",
    "route",
    "step_tokens",
]
