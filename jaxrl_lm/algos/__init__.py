"""The mathematics: plain arrays in, plain arrays out, hyperparameters by keyword.

Advantages -> `advantages.py`, ratios and clipping -> `surrogate.py`, KL -> `kl.py`, reductions -> `reduction.py`, named
choices of these -> `presets.py`. Nothing here runs a model: see `objectives.py`.
"""

from jaxrl_lm.algos.advantages import group_advantages
from jaxrl_lm.algos.kl import kl_estimate
from jaxrl_lm.algos.passk import pass_at_k, same_outcome_share
from jaxrl_lm.algos.presets import LOSS_TYPES, PRESETS, Preset
from jaxrl_lm.algos.reduction import token_weights
from jaxrl_lm.algos.surrogate import clip_metrics, clipped_surrogate, importance_ratio

__all__ = [
    "LOSS_TYPES",
    "PRESETS",
    "Preset",
    "clip_metrics",
    "clipped_surrogate",
    "group_advantages",
    "importance_ratio",
    "kl_estimate",
    "pass_at_k",
    "same_outcome_share",
    "token_weights",
]
