"""Options of the policy-gradient family: frozen dataclasses that `config.GRPOConfig` and its relatives inherit.

An option that is None takes the preset's choice (`algos.PRESETS`). Formulas and papers: docs/algorithms.md.
"""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    """From rewards to an advantage a token."""

    advantage: (
        Literal["group", "leave-one-out", "greedy", "constant", "batch", "gae", "max-rl", "pass-at-k", "accepted"]
        | None
    ) = None
    """What a return is compared with; None: that of the preset, or group."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """What group advantages are divided by; None: that of the preset, or group."""
    advantage_baseline: float | None = None
    """Of advantage constant; None: that of the preset, or 0."""
    pass_k: int = 4
    """Of advantage pass-at-k."""
    gamma: float = 1.0
    """Discount; of advantages gae and batch."""
    discount_per: Literal["action", "token"] = "action"
    """What gamma is counted by, where actions are larger than tokens."""
    lam: float = 0.95
    """λ of advantage gae."""
    actions: Literal["token", "ngram", "turn", "sequence"] = "token"
    """What one action is; larger ones have one ratio (level action, unless another is given), one advantage, one weight."""
    ngram: int = 5
    """Tokens of an action with actions ngram."""
    drop: Literal["none", "wrong", "all-wrong", "all-right", "equal"] | None = None
    """Rows that do not learn: wrong ones (reward below 0.5), or all of groups that are all wrong, all right, or equal."""
    outlier_limit: float | None = None
    """Rows whose reward is further from the batch's median, in robust standard deviations (1.4826 MAD), do not learn."""
    overlong_buffer: int | None = None
    """Tokens before max_completion_length over which a penalty of length grows to 1; None: that of the preset, or 0."""
    length_penalty: float = 0.0
    """Weight of the penalty of length within the group: short right answers gain, long ones lose."""
    unlikeliness: float = 0.0
    """Share of the reward that the most probable right answer of a group loses; the least probable keeps nearly all."""
    token_scale: Literal["none", "entropy_shaped", "entropy", "planning", "low_probability"] = "none"
    """Factor on the advantage, token by token."""
    token_scale_alpha: float = 0.4
    """Of token_scale entropy_shaped (α), low_probability (α) and entropy (the share of the advantage that it weighs)."""
    token_scale_kappa: float = 2.0
    """Of token_scale entropy_shaped (κ); the weight of planning tokens."""
    planning_tokens: tuple[str, ...] = ()
    """Strings whose tokens are planning tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Rewards of the steps or turns of a completion, beside that of its outcome. See docs/process_rewards.md."""

    step_reward: str | None = None
    """Function that scores steps: package.module:function, file.py:function, or a process reward model, prm:DIRECTORY."""
    step_credit: Literal["sum-to-go", "mean", "min", "product", "last"] = "sum-to-go"
    """What a token gets: the rewards of the steps that end from it on, or one number of the whole completion."""
    step_weight: float = 1.0
    """Of the credit of steps."""
    outcome_weight: float = 1.0
    """Of the reward of the outcome, beside it."""
    step_normalise: bool = False
    """Divides each step's reward by the number of its row's steps, so that more steps do not pay by themselves."""
    step_shaping: bool = False
    """Pays each step by how much its reward is above that of the step before (a potential); of advantage gae and batch."""
    implicit_prm: float | None = None
    """β of an implicit process reward model that learns from outcomes beside the policy (PRIME). None: there is none."""
    implicit_prm_coef: float = 1.0
    """Of its loss."""
    implicit_prm_model: str | None = None
    """Model that it starts from; None: the policy's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """What of a step runs beside what. See docs/overlap.md."""

    decode_chunk: int | None = None
    """Passes of decoding after which the host hands completions that have ended to the reward functions. None: at the
    end."""
    max_off_policy_steps: int = 0
    """1: the next batch is sampled, by the weights before the update, while this one is learned from; 0: after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixOptions:
    """Other losses in the same update: streams of given rows, and a teacher. See docs/mixed_objectives.md."""

    mix: dict[str, float] = dataclasses.field(default_factory=dict)
    """Weights of further streams, by name: sft (demonstrations), dpo (pairs)."""
    mix_dataset: dict[str, str] = dataclasses.field(default_factory=dict)
    """Their rows, by name; sft may also take rows of the dataset whose column loss says sft."""
    mix_rows: int = 16
    """Rows of each stream in an update, over all devices."""
    mix_beta: float = 0.1
    """β of the stream dpo."""
    mix_unsolved: str | None = None
    """Column with a solution: the stream sft then holds the prompts that were sampled and never solved so far."""
    teacher: str | None = None
    """Model whose distribution the policy learns at its own samples (on-policy distillation); of the same vocabulary."""
    teacher_coef: float = 1.0
    """Of the divergence from it."""
    teacher_divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """KL(policy ‖ teacher), KL(teacher ‖ policy), or between the two by teacher_beta."""
    teacher_beta: float = 0.5
    """Of jsd."""
    teacher_only: bool = False
    """Learn from the teacher alone; rewards are measured and logged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatioOptions:
    """The surrogate, its ratio and its clip."""

    surrogate: Literal["clip", "clipped-weight", "soft-gate", "policy-gradient"] | None = None
    """None: that of the preset, or clip."""
    importance_sampling_level: Literal["token", "sequence", "sequence-token", "sequence-sum", "action"] | None = None
    """What a ratio is of: a token, a sequence (mean or sum of log-ratios), an action; None: that of the preset, or token."""
    epsilon: float | None = None
    """Clip range below 1; None: that of the preset, or 0.2."""
    epsilon_high: float | None = None
    """Clip range above 1; None: that of the preset, or epsilon."""
    dual_clip: float | None = None
    """Bound, in advantages, on the loss of negative ones (verl clip_ratio_c)."""
    delta: float | None = None
    """Two-sided bound on the ratio of negative advantages."""
    log_ratio_clip: float | None = None
    """Bound on a token's log-ratio before anything else."""
    sapo_temperature_pos: float = 1.0
    """Of the soft gate for positive advantages."""
    sapo_temperature_neg: float = 1.05
    """Of the soft gate for negative advantages."""
    max_drift: float | None = None
    """Sequences with a negative advantage that have drifted by more nats a token from the sampler do not learn."""
    old_logprobs: Literal["sampler", "recompute"] | None = None
    """Where old log-probs come from. None: sampler with one update a batch, recompute with several."""
    max_sampler_gap: float = 0.02
    """With old_logprobs sampler: mean gap in nats between sampler and scorer above which batches are scored after all."""
    sampler_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = (
        None
    )
    """Weights old / sampler policy on the loss (TIS, IcePop). None: token_truncate where old ones are recomputed."""
    sampler_correction_cap: float | None = None
    """Their upper bound; None: that of the preset, or 2."""
    sampler_correction_floor: float = 0.0
    """Their lower bound, of the masks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceOptions:
    """KL and entropy: how far and how narrow the policy may go."""

    beta: float | None = None
    """KL coefficient; 0 keeps no reference model in memory. None: that of the preset, or 0."""
    kl_in: Literal["loss", "reward"] | None = None
    """None: that of the preset, or loss."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] | None = None
    """None: k3 in the loss, k1 in the reward."""
    kl_importance: bool = False
    """Weighs each token's KL in the loss by its ratio to the policy that sampled it (TRL use_bias_correction_kl)."""
    kl_token_power: float = 0.0
    """Weights each token's KL in the loss by the reference's probability to this power; 0: all alike."""
    target_kl: float | None = None
    """Moves beta so that the KL of a completion, in nats, stays near this. None: beta is fixed."""
    kl_horizon: float = 10_000.0
    """Completions over which beta follows target_kl."""
    reference_reset_steps: int | None = None
    """The reference becomes the policy every so many steps."""
    reference_ema: float | None = None
    """The reference follows the policy: reference = ema · reference + (1 − ema) · policy, a step."""
    max_approx_kl: float | None = None
    """Ends the updates of a batch once the policy is this far from the batch's, in nats a token."""
    kl_budget: float | None = None
    """Nats a completion from the initial policy at which the run stops or slows down."""
    kl_budget_action: Literal["stop", "halve"] = "stop"
    """What happens then: the run ends, or the learning rate is halved, and again at each doubling."""
    entropy_coef: float = 0.0
    """Of the entropy bonus."""
    target_entropy: float | None = None
    """Moves entropy_coef: up while the entropy is below this, down above. None: fixed."""
    entropy_coef_step: float = 0.005
    """How far it moves a step."""
    entropy_coef_max: float = 0.1
    top_entropy_share: float = 1.0
    """Share of a batch's tokens, those of highest entropy, that learn; 0.2 is the paper's."""
    entropy_clip: Literal["none", "clip_cov", "kl_cov"] = "none"
    """What is done to the tokens whose log-prob and advantage vary together most."""
    cov_share: float = 2e-4
    """Their share."""
    cov_low: float = 1.0
    """Of clip_cov: the least covariance."""
    cov_high: float = 5.0
    """Of clip_cov: the largest covariance."""
    kl_cov_coef: float = 1.0
    """Of kl_cov: coefficient of the KL to the old policy at these tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptPolicyOptions:
    """Which prompts are sampled, and which of their completions are trained on."""

    prompt_sampling: Literal["shuffle", "curriculum", "bandit"] = "shuffle"
    """Prompts in a shuffled order, by solve rate (most around 50 %), or by category where advantages are largest."""
    category_column: str = "category"
    """Column that prompt_sampling bandit chooses by."""
    dynamic_sampling: bool | None = None
    """Replace groups of equal rewards by further prompts until the batch is full; None: that of the preset, or false."""
    dynamic_sampling_batches: int = 4
    """At most so many batches are sampled a step; then it trains on what there is."""
    oversample: int = 1
    """Sample num_generations × this for each prompt and train on num_generations of them."""
    oversample_select: Literal["max_variance", "balanced"] = "max_variance"
    """Which of them."""
    replay_groups: int = 0
    """Groups of earlier steps in each batch, once there are some."""
    replay_size: int = 64
    """Groups kept for it."""
    replay_max_age: int = 16
    """Optimiser steps after which they are forgotten."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticOptions:
    """The critic of advantage gae."""

    critic: Literal["none", "separate", "shared"] = "none"
    """A model of its own with a value head, or a value head on the policy."""
    critic_model: str | None = None
    """Model that a separate critic starts from; None: the policy's."""
    vf_coef: float = 0.1
    """Of the value loss."""
    cliprange_value: float | None = 0.2
    """Range that values may move from their old ones in."""
    critic_warmup_steps: int = 0
    """Steps at the start in which only the critic learns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters instead of all weights."""

    lora_rank: int | None = None
    """None: all weights are trained."""
    lora_alpha: float = 32.0
    """The adapter is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ("all",)
    """Projections that get one: q, k, v, o, gate, up, down, or all."""
    lora_rslora: bool = False
    """Scale by alpha / √rank."""
