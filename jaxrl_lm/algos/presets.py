"""Named algorithms as frozen choices of the parts. A table with papers and departures: docs/algorithms.md."""

import dataclasses
from typing import Any, Literal

from jaxrl_lm.algos.reduction import Over

Advantage = Literal[
    "group", "leave-one-out", "greedy", "constant", "batch", "gae", "max-rl", "pass-at-k", "accepted"
]  # fmt: skip
Surrogate = Literal["clip", "clipped-weight", "soft-gate", "policy-gradient"]
Drop = Literal["none", "wrong", "all-wrong", "all-right", "equal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """One choice of each part: an advantage, a ratio and its clip, a reduction, a place for the KL, a filter of rows."""

    advantage: Advantage = "group"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    advantage_baseline: float = 0.0  # of "constant"
    drop: Drop = "none"  # rows or groups that do not learn
    dynamic_sampling: bool = False  # groups of equal rewards are replaced by further ones
    overlong_buffer: int = 0  # tokens before the limit over which a penalty of length grows to 1
    surrogate: Surrogate = "clip"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: epsilon
    dual_clip: float | None = None
    delta: float | None = None
    sampler_correction: str | None = None  # None: token_truncate where old log-probs are recomputed
    sampler_correction_cap: float | None = 2.0
    loss_agg_mode: Over = "token-mean"
    beta: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"


PRESETS: dict[str, Preset] = {
    "reinforce": Preset(advantage="constant", surrogate="policy-gradient", loss_agg_mode="seq-mean-token-sum"),
    "reinforce_pp": Preset(advantage="batch", kl_in="reward"),
    "rloo": Preset(
        advantage="leave-one-out",
        importance_sampling_level="sequence-sum",
        loss_agg_mode="seq-mean-token-mean",  # every token has its sequence's loss: the mean over tokens is that loss
        beta=0.05,
        kl_in="reward",
    ),
    "remax": Preset(
        advantage="greedy", surrogate="policy-gradient", loss_agg_mode="seq-mean-token-sum", kl_in="reward"
    ),
    "grpo": Preset(loss_agg_mode="seq-mean-token-mean"),
    "dr_grpo": Preset(loss_agg_mode="seq-mean-token-sum-norm", scale_rewards="none"),
    "dapo": Preset(epsilon_high=0.28, dynamic_sampling=True),
    "gspo": Preset(
        importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, loss_agg_mode="seq-mean-token-mean"
    ),
    "cispo": Preset(surrogate="clipped-weight", epsilon=1.0, epsilon_high=4.0),  # weights in [0, 5]
    "gpg": Preset(scale_rewards="none", surrogate="policy-gradient", drop="equal"),
    "sapo": Preset(surrogate="soft-gate", loss_agg_mode="seq-mean-token-mean"),
    "ppo": Preset(advantage="gae", beta=0.05, kl_in="reward"),
    "raft": Preset(advantage="accepted", surrogate="policy-gradient", drop="wrong"),
    "reinforce_rej": Preset(
        advantage="constant", advantage_baseline=0.5, drop="equal", loss_agg_mode="seq-mean-token-mean"
    ),
    "max_rl": Preset(advantage="max-rl", surrogate="policy-gradient"),
    "decoupled_ppo": Preset(sampler_correction="token_truncate", sampler_correction_cap=None),
}

# TRL's loss_type chooses a reduction and, for some, the surrogate.
LOSS_TYPES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_agg_mode": "token-mean"},
    "bnpo": {"loss_agg_mode": "token-mean"},
    "grpo": {"loss_agg_mode": "seq-mean-token-mean"},
    "dr_grpo": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    "cispo": {"loss_agg_mode": "token-mean", "surrogate": "clipped-weight", "epsilon": 1.0, "epsilon_high": 4.0},
    "sapo": {"loss_agg_mode": "seq-mean-token-mean", "surrogate": "soft-gate"},
}
