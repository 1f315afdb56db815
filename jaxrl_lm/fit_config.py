"""Options of training on what is given: demonstrations (sft), comparisons (dpo, reward), labels (reward, prm).

Frozen dataclasses, the same keys in TOML files and on the command line; the words and defaults are TRL's where one fits.
"""

import dataclasses
from typing import Literal

from jaxrl_lm.algorithm_config import LoraOptions
from jaxrl_lm.config import MachineOptions, OptimizerOptions, PromptOptions, SamplingOptions, TemplateOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions(OptimizerOptions, TemplateOptions, MachineOptions):
    """What every such run has."""

    model: str
    """Directory in Hugging Face format, GGUF file, or hub id."""
    dataset: str
    """JSONL, JSON, CSV or Parquet file, a directory of them, a hub dataset id, or package.module:function."""
    eval_dataset: dict[str, str] = dataclasses.field(default_factory=dict)
    """Named held-out sets, by name; what evaluates never trains."""
    output_dir: str
    """Run directory. An existing run is resumed."""
    seed: int = 0
    """Of the order of rows, and of what is drawn fresh."""
    max_length: int = 1024
    """Tokens of a row (prompt and completion) at most; see long_rows."""
    long_rows: Literal["drop", "keep_start", "error"] = "keep_start"
    """What happens to longer rows. Counted and logged; one of whose response nothing would be left is dropped."""
    length_buckets: tuple[int, ...] = ()
    """Padded row lengths; each compiles once. Empty: one that holds the longest row."""
    rows_per_step: int = 16
    """Rows (pairs count once) of one optimiser step, over all devices."""
    microbatch_rows: int | None = None
    """Rows of one forward and backward pass; never changes a result. None: all of the step's."""
    max_steps: int | None = None
    """Optimiser steps; None: num_epochs decides."""
    num_epochs: float = 1.0
    """Passes over the dataset."""
    eval_steps: int = 50
    """Evaluate every so many steps, at the start and at the end; 0: never."""
    eval_limit: int = 256
    """Rows of each evaluation set that are used."""
    save_steps: int = 100
    """Checkpoint every so many steps and at the end; 0: only at the end."""
    save_total_limit: int = 3
    """Checkpoints kept, beside the best."""
    best_metric: str | None = None
    """Metric whose best (highest) checkpoint is kept beside the last ones, such as eval/test/accuracy."""
    logging_steps: int = 1
    report_to: tuple[str, ...] = ()
    """Further sinks: tensorboard."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig(LoraOptions, FitOptions):
    """Options of supervised training on prompt-completion, messages or text rows."""

    long_rows: Literal["drop", "keep_start", "error"] = "drop"
    """What happens to longer rows. Counted and logged; one of whose response nothing would be left is dropped."""
    packing: bool = False
    """Put several rows into one of max_length tokens; they do not see each other."""
    learning_rate: float = 2e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineOptions(SamplingOptions, PromptOptions):
    """Pairs from the policy's own samples; the dataset then holds prompts."""

    refresh_steps: int | None = None
    """Sample pairs anew every so many steps: 1 is online, more is semi-online. None: pairs are given."""
    reward: tuple[str, ...] = ()
    """What ranks samples, the best and the worst of which make a pair: reward functions as in GRPO."""
    reward_weights: tuple[float, ...] = ()
    """One weight a reward function; empty: all 1."""
    judge: str | None = None
    """Ranks them by P(first is preferred) instead: package.module:function or file.py:function."""
    eval_reward_functions: tuple[str, ...] = ()
    """Reward functions of the evaluation, whose sets hold prompts; empty: those of reward."""
    eval_num_generations: int = 8
    """Samples a prompt for pass@k, beside the greedy one."""
    prompts_per_step: int = 16
    """Prompts sampled at once, over all devices."""
    num_generations: int = 8
    """Samples a prompt, of which the best and the worst make a pair."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig(OnlineOptions, LoraOptions, FitOptions):
    """Options of training on preferences."""

    loss_type: tuple[str, ...] = ("sigmoid",)
    """Losses on pairs, a sum where there are several (see loss_weights), or kto alone on rows with a label."""
    loss_weights: tuple[float, ...] = ()
    """One weight a loss; empty: all 1."""
    beta: float = 0.1
    """Strength of the KL to the reference; the meaning in each loss is in docs/preferences.md."""
    label_smoothing: float = 0.0
    """Share of comparisons that are taken to be the wrong way round."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    """Of alpha_divergence."""
    length_alpha: float = 0.0
    """R-DPO: added to the margin, times the difference in tokens."""
    ld_alpha: float | None = None
    """LD-DPO: weight of the tokens beyond the shorter side's length."""
    simpo_gamma: float = 0.5
    """Target margin of simpo."""
    discopop_tau: float = 0.05
    rpo_alpha: float | None = None
    """Adds the sft loss of the chosen side with this weight to any loss."""
    desirable_weight: float = 1.0
    """Of kto."""
    undesirable_weight: float = 1.0
    """Of kto."""
    reference_model: str | None = None
    """None: the model itself as it starts, under LoRA with the adapter off."""
    reference_reset_steps: int | None = None
    """The reference becomes the policy every so many steps (iterated DPO)."""
    inpo_eta: float | None = None
    """Of loss inpo: 1 / step size of the mirror descent; None: beta."""
    precompute_ref_log_probs: bool = False
    """Score every row by the reference once, before the first step, and let the reference go."""
    learning_rate: float = 1e-6


def idle_options(refresh_steps: int | None) -> frozenset[str]:
    """What nothing reads of `DPOConfig`: options of sampling where pairs are given, of given rows where they are sampled."""
    if refresh_steps is not None:
        return frozenset({"max_length", "long_rows", "length_buckets"})
    names = lambda config_class: {field.name for field in dataclasses.fields(config_class)}
    return frozenset(names(OnlineOptions) - names(TemplateOptions) - {"refresh_steps", "reward", "judge"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig(FitOptions):
    """Options of training a reward model."""

    loss_type: Literal["bradley_terry", "outcome", "outcome_per_token"] = "bradley_terry"
    """From comparisons; or from rows with a label, at the last token or at every token of the completion."""
    center_rewards_coefficient: float = 0.0
    """Draws scores to a mean of 0."""
    label_smoothing: float = 0.0
    """Share of comparisons that are taken to be the wrong way round."""
    append_eos: bool = True
    """End plain-text rows with an end-of-sequence token, here and wherever the model is used."""
    members: int = 1
    """Models of an ensemble, each with a fresh head of its own, as stacked parameters."""
    learning_rate: float = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PRMConfig(FitOptions):
    """Options of training a process reward model on stepwise rows."""

    step_separator: str = "\n"
    """Put after each step; the label sits on the last token of step and separator."""
    learning_rate: float = 1e-5
