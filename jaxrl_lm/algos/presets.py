"""Named algorithms as frozen choices of the parts. A table with papers and departures: docs/algorithms.md."""

import dataclasses

from jaxrl_lm.algos.reduction import Over


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """An advantage, a ratio and its clip, a reduction."""

    scale_rewards: str = "group"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: epsilon
    loss_agg_mode: Over = "token-mean"


PRESETS: dict[str, Preset] = {
    "grpo": Preset(loss_agg_mode="seq-mean-token-mean"),
    "dr_grpo": Preset(loss_agg_mode="seq-mean-token-sum-norm", scale_rewards="none"),
    "dapo": Preset(loss_agg_mode="token-mean", epsilon_high=0.28),
}

# TRL's loss_type chooses a reduction only.
LOSS_TYPES: dict[str, Over] = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
