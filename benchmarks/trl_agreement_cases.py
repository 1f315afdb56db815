"""What trl_agreement.py compares: options of TRL beside the same choice in our words."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

P, G, T = 8, 6, 24
N = P * G


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: options of TRL, the same choice in our words, and what to draw."""

    ours: str
    trl: dict[str, Any]
    preset: str = "dapo"
    choice: dict[str, Any] = dataclasses.field(default_factory=dict)  # of algos.Preset
    rule: dict[str, Any] = dataclasses.field(default_factory=dict)  # of BatchRule
    objective: dict[str, Any] = dataclasses.field(default_factory=dict)  # of PolicyObjective
    draw: dict[str, Any] = dataclasses.field(default_factory=dict)
    eps: float = 1e-4  # beside the standard deviation; TRL's
    rloo: bool = False
    cuts: int = 1  # TRL's microbatches for an optimiser step
    steps: int = 1  # optimiser steps for a batch of completions; the first is compared
    # Where we differ on purpose: in what, and how TRL's numbers follow from ours, or under which changes the two agree.
    departs: str = ""
    factor: Callable[[dict], float] | None = None
    instead: dict[str, Any] | None = None


def vllm(mode, low, high):
    """TRL's options for weights against the sampler."""
    clips = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    return {"use_vllm": True, "loss_type": "dapo", "vllm_importance_sampling_mode": mode} | clips


def corrected(mode, low, high):
    return Case(
        ours=f"`sampler_correction={mode}`",
        trl=vllm(mode, low, high),
        choice={"sampler_correction": mode, "sampler_correction_cap": high, "epsilon_high": None},
        rule={"correction_floor": low or 0.0},
        draw={"drift": 0.2},
    )


DAPO = {"loss_type": "dapo"}
PLAIN = {"choice": {"epsilon_high": None}}  # the token mean with a clip of 0.2 on both sides
GRPO = {"preset": "grpo", "trl": {"loss_type": "grpo"}}
SEQUENCE = {"importance_sampling_level": "sequence"}
GSPO = {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4} | SEQUENCE
SUMS = {"loss_agg_mode": "seq-mean-token-sum", "epsilon_high": None} | SEQUENCE
CISPO = {"loss_type": "cispo", "epsilon_high": 5.0}
BNPO = {"loss_type": "bnpo"}
KL = {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}
ABSTAIN = {"holes": False, "rewards": 2, "abstain": True}

AGREE = (
    Case(ours="`grpo`", **GRPO),
    Case(ours="`grpo`, two microbatches", cuts=2, **GRPO),
    Case(ours="`grpo`, KL loss", preset="grpo", trl=KL),
    Case(ours="`grpo`, KL loss, `kl_importance`", preset="grpo", trl=KL | {"use_bias_correction_kl": True},
         objective={"kl_importance": True}),
    Case(ours="`dr_grpo`", preset="dr_grpo", trl={"loss_type": "dr_grpo", "scale_rewards": "none"}),
    Case(ours="`dapo`", trl=DAPO | {"epsilon_high": 0.28}),
    Case(ours="`dapo`, two microbatches", cuts=2, trl=DAPO | {"epsilon_high": 0.28}),
    Case(ours="`loss_type=bnpo`", trl=BNPO, **PLAIN),
    Case(ours="`gspo`", preset="gspo", trl=GSPO, draw={"gap": 1e-3}),
    Case(ours="`gspo`, wide clip", preset="gspo", trl=GSPO | {"epsilon": 0.2, "epsilon_high": 0.28},
         choice={"epsilon": 0.2, "epsilon_high": 0.28}),
    Case(ours="`cispo`", preset="cispo", trl=CISPO),
    Case(ours="`cispo`, sequence ratio", preset="cispo", trl=CISPO | SEQUENCE, choice=SEQUENCE),
    Case(ours="`sapo`", preset="sapo", trl={"loss_type": "sapo"}),
    Case(ours="`sapo`, sequence ratio", preset="sapo", trl={"loss_type": "sapo"} | SEQUENCE, choice=SEQUENCE),
    Case(ours="sequence ratio, `seq-mean-token-sum`", trl={"loss_type": "luspo"} | SEQUENCE, choice=SUMS),
    Case(ours="`rloo`, KL in the reward", preset="rloo", rloo=True, trl={"beta": 0.05}, draw={"holes": False}),
    Case(ours="`decoupled_ppo`", preset="decoupled_ppo", trl=vllm("token_truncate", 0.0, None), draw={"drift": 0.2}),
    corrected("token_truncate", None, 2.0),
    corrected("token_mask", 0.5, 5.0),
    corrected("sequence_truncate", None, 2.0),
    corrected("sequence_mask", 0.2, 5.0),
    Case(ours="first update, no old log-probs", preset="grpo", trl={"loss_type": "grpo", "num_iterations": 1},
         rule={"keep_old": False}),
    Case(ours="`delta=2`", preset="grpo", trl={"loss_type": "grpo", "delta": 2.0}, choice={"delta": 2.0}),
    Case(ours="`max_drift=0.02`", trl=DAPO | {"off_policy_mask_threshold": 0.02}, objective={"max_drift": 0.02}, **PLAIN),
    Case(ours="`top_entropy_share=0.2`", trl=DAPO | {"top_entropy_quantile": 0.2},
         rule={"top_entropy_share": 0.2}, **PLAIN),
    Case(ours="`entropy_coef=0.01`", trl=DAPO | {"entropy_coef": 0.01}, **PLAIN),
    Case(ours="`mask_truncated_completions`", trl=DAPO | {"mask_truncated_completions": True},
         rule={"mask_truncated": True}, **PLAIN),
    Case(ours="`scale_rewards=batch`", trl=DAPO | {"scale_rewards": "batch"},
         choice={"epsilon_high": None, "scale_rewards": "batch"}),
    Case(ours="two rewards with weights", trl=DAPO, draw={"rewards": 2}, **PLAIN),
)  # fmt: skip

AVERAGE = {"multi_objective_aggregation": "normalize_then_sum"}
kept = lambda x: (~x["truncated"]).mean()
scored = lambda x: ~np.isnan(x["returns"]).all(1)
DEPART = (
    Case(ours="`grpo`, our eps", eps=1e-6, **GRPO, departs="1e-6 beside the std, TRL 1e-4", instead={"eps": 1e-4}),
    Case(ours="a group of equal rewards of 10.1", trl=DAPO, **PLAIN, draw={"equal": 10.1},
         departs="0 for equal rewards; TRL the rounding of their mean over eps", instead={"draw": {}}),
    Case(ours="`normalize_then_sum`", trl=DAPO | AVERAGE, choice={"epsilon_high": None, "scale_rewards": "batch"},
         draw={"rewards": 2}, departs="no eps beside each reward's own std, TRL 1e-4",
         instead={"draw": {"rewards": 2, "scale": 1e5}}),
    Case(ours="`dapo`, rows that abstain", trl=DAPO, **PLAIN, draw={"abstain": True},
         departs="their tokens do not count, in TRL they do",
         factor=lambda x: x["mask"][scored(x)].sum() / x["mask"].sum()),
    Case(ours="`grpo`, rows that abstain", **GRPO, draw={"abstain": True},
         departs="they are no sequences, in TRL they are", factor=lambda x: scored(x).mean()),
    Case(ours="`rloo`, rows that abstain", preset="rloo", rloo=True, trl={"beta": 0.05}, draw=ABSTAIN,
         departs="the same", factor=lambda x: scored(x).mean()),
    Case(ours="`grpo`, truncated rows masked", preset="grpo", rule={"mask_truncated": True}, factor=kept,
         trl={"loss_type": "grpo", "mask_truncated_completions": True},
         departs="a row without a token is no sequence, in TRL it is"),
    Case(ours="`dr_grpo`, truncated rows masked", preset="dr_grpo", rule={"mask_truncated": True}, factor=kept,
         trl={"loss_type": "dr_grpo", "scale_rewards": "none", "mask_truncated_completions": True},
         departs="the same"),
    Case(ours="`dapo`, two updates a batch of completions", trl=DAPO, **PLAIN, steps=2,
         departs="the tokens of the update, TRL's are the mean over the updates",
         factor=lambda x: 2 * x["mask"][: N // 2].sum() / x["mask"].sum()),
    Case(ours="`loss_type=bnpo`, two microbatches", trl=BNPO, **PLAIN, cuts=2,
         departs="the tokens of the update, TRL's are the microbatch's", instead={"cuts": 1, "steps": 2}),
    Case(ours="`top_entropy_share=0.7`", trl=DAPO | {"top_entropy_quantile": 0.7}, rule={"top_entropy_share": 0.7},
         **PLAIN, departs="⌈share · tokens⌉ tokens, TRL those above an interpolated quantile: at times one less",
         instead={"trl": DAPO | {"top_entropy_quantile": 0.5}, "rule": {"top_entropy_share": 0.5}}),
    Case(ours="`grpo`, `entropy_coef=0.01`", preset="grpo", trl={"loss_type": "grpo", "entropy_coef": 0.01},
         departs="the bonus is reduced as the loss is, TRL's always over tokens",
         instead={"preset": "dapo", "trl": DAPO | {"entropy_coef": 0.01}, **PLAIN}),
    Case(ours="`entropy_coef` and `top_entropy_share=0.5`", **PLAIN, rule={"top_entropy_share": 0.5},
         trl=DAPO | {"entropy_coef": 0.01, "top_entropy_quantile": 0.5},
         departs="a bonus at all tokens, TRL's at the chosen ones", 
         instead={"trl": DAPO | {"entropy_coef": 0.01}, "rule": {}}),
    Case(ours="log-ratios of 25", trl=DAPO, **PLAIN, draw={"far": 25.0},
         departs="bounded to ±20, no gradient beyond; TRL no bound", instead={"draw": {"far": 15.0}}),
    Case(ours="`grpo`, KL loss, without `kl_importance`", preset="grpo", trl=KL | {"use_bias_correction_kl": True},
         departs="plain k3, TRL multiplies it with the ratio (DeepSeek-V3.2)", instead={"trl": KL}),
    Case(ours="k3 at a gap of 30 nats", preset="grpo", trl=KL, draw={"far_ref": 30.0},
         departs="goes on along its tangent beyond 20; TRL no bound", instead={"draw": {"far_ref": 15.0}}),
    Case(ours="NaN off the mask", trl=DAPO, **PLAIN, draw={"nan": True},
         departs="masks select; TRL multiplies with them", instead={"draw": {}}),
)  # fmt: skip
