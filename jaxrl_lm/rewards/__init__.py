"""Scoring completions: the reward protocol and the shipped reward functions."""

from jaxrl_lm.rewards.aggregate import combine, reward_metrics
from jaxrl_lm.rewards.protocol import (
    SHIPPED,
    RewardError,
    RewardFunction,
    columns_of,
    compute_rewards,
    resolve,
    resolve_all,
    route,
)
from jaxrl_lm.rewards.verl import from_verl

__all__ = [
    "SHIPPED",
    "RewardError",
    "RewardFunction",
    "columns_of",
    "combine",
    "compute_rewards",
    "from_verl",
    "resolve",
    "resolve_all",
    "reward_metrics",
    "route",
]
