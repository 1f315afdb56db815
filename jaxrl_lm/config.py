"""Every option of a run: frozen dataclasses, the same keys in TOML files and on the command line.

The words and defaults are those of TRL and verl where one fits. Reading files and overrides: `cli.py`.
"""

import dataclasses
from typing import Literal

from jaxrl_lm.algorithm_config import (
    AdvantageOptions,
    CriticOptions,
    DistanceOptions,
    LoraOptions,
    MixOptions,
    OverlapOptions,
    ProcessOptions,
    PromptPolicyOptions,
    RatioOptions,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedOptions:
    """How several processes find each other; on TPU pods, under Slurm, Open MPI and Kubernetes they do so by themselves."""

    coordinator_address: str | None = None
    """Host:port of process 0, to start several processes by hand."""
    num_processes: int | None = None
    """Processes of the run; 1: this one alone, whatever the environment says."""
    process_id: int | None = None
    """Which of them this one is, from 0."""
    start_timeout: int = 300
    """Seconds that a process waits for the others at its start."""
    heartbeat_timeout: int = 100
    """Seconds without a sign of life of a process after which the others end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineOptions(DistributedOptions):
    """What the run computes on."""

    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: {"fsdp": -1})
    """Mesh axes (data, fsdp, sequence, tensor) and their sizes; one may be -1."""
    sharding_preset: Literal["fsdp", "fsdp+tensor", "tensor", "sequence"] | None = None
    """What weights and activations are split over; None: each axis of the mesh for what it is for."""
    sharding_rules: dict[str, str] = dataclasses.field(default_factory=dict)
    """Single rules instead, such as embed = "fsdp", vocab = "tensor+fsdp" or mlp = "none"."""
    decode_sharding_rules: dict[str, str] = dataclasses.field(default_factory=dict)
    """The same of generation, whose weights are split over tensor alone."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the computation; None: bfloat16 on accelerators, float32 on CPU."""
    attention_implementation: Literal["auto", "reference", "xla", "splash", "cudnn"] = "auto"
    """Of scoring, the update and prefill; auto: splash on TPUs where model and mesh allow it, xla elsewhere. cudnn (GPUs)
    must be asked for. See docs/scale.md."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """What is put around a prompt."""

    prompt_template: str | None = None
    """String with {prompt} for models without a chat template, or a shipped one by name (think)."""
    system_prompt: str | None = None
    """Put before chat prompts that bring no system message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions(TemplateOptions):
    """How rows become prompts."""

    max_prompt_length: int = 512
    """Prompt tokens at most; see long_prompts."""
    long_prompts: Literal["drop", "keep_start", "keep_end", "error"] = "drop"
    """What happens to longer prompts; counted and logged."""
    prompt_buckets: tuple[int, ...] = ()
    """Padded prompt lengths; each compiles once. Empty: one that holds the longest prompt kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How completions are sampled."""

    prompts_per_step: int = 16
    """Prompts sampled a step, over all devices."""
    num_generations: int = 8
    """Completions a prompt (the group)."""
    max_completion_length: int = 512
    """New tokens at most."""
    temperature: float = 1.0
    """Of sampling; log-probs are those of logits / temperature."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    """Strings that end a completion; their tokens are the policy's own and are trained."""
    repetition_penalty: float | None = None
    """Logits of tokens of the prompt and the completion so far are divided by it, negative ones multiplied."""
    logit_bias: dict[str, float] = dataclasses.field(default_factory=dict)
    """Added to the logits of token ids, such as 42 = -5.0."""
    suppress_tokens: tuple[int, ...] = ()
    """Token ids that are never drawn."""
    allowed_token_ids: tuple[int, ...] = ()
    """Token ids that alone are drawn; empty: all."""
    min_new_tokens: int = 0
    """No end-of-sequence token is drawn among the first so many."""
    forced_tokens: tuple[int, ...] = ()
    """Token ids that every completion begins with; they are not the policy's actions."""
    max_thinking_tokens: int | None = None
    """After so many tokens without end_of_thinking it is forced; its tokens are then not the policy's actions."""
    end_of_thinking: str | None = None
    """Text, such as </think>, or the id of a token."""
    vocabulary_mask: str | None = None
    """Function that makes a grammar's table, package.module:function or file.py:function; see docs/generation.md."""
    decode_slots: int | None = None
    """Rows that are decoded at once, over all devices; one that ends gives its slot to the next. None: all of a step."""
    kv_cache_dtype: Literal["int8"] | None = None
    """Of the keys and values that generation keeps; None: that of the computation."""
    num_speculative_tokens: int | None = None
    """Tokens guessed ahead that each pass of decoding reads beside the new one; None, 0: none. Samples are as without."""
    speculative_source: Literal["prompt_lookup", "last_epoch"] = "prompt_lookup"
    """Where guesses come from: the row's own text, or in training what its prompt was last completed with."""
    prompt_lookup_max: int = 3
    """Last tokens of a row, at most, whose other place in that text is looked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW, its schedule, and the precision of the weights it moves."""

    learning_rate: float = 1e-6
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimiser steps of linear warm-up."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    """Decoupled, on matrices only."""
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    moments_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Of Adam's two moments; int8 in blocks, which needs the extra 8bit. See docs/scale_memory.md."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the master weights."""
    remat: Literal["none", "full", "dots", "offload"] | None = None
    """What the backward pass recomputes; None: full on accelerators, dots (all but matrix products) on CPU. offload: as
    full, and what it keeps lies in the host's memory."""
    score_chunk: int = 2048
    """Tokens whose logits exist at once while scoring."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Where the models of a run lie. See docs/scale_placement.md."""

    rollout_mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    """Mesh of generation on devices of its own: mesh takes the first devices, this one the others. Empty: those of mesh."""
    reference_placement: Literal["mesh", "rollout_mesh", "host"] = "mesh"
    """Where the reference lies and scores; host: in the hosts' memory, and on the mesh while it scores."""
    reward_placement: Literal["mesh", "rollout_mesh", "host"] = "mesh"
    """The same of reward models (reward_model: and prm:)."""
    critic_placement: Literal["mesh", "host"] = "mesh"
    """Of a separate critic and its optimiser state; host: on the mesh while it scores and learns."""
    optimizer_placement: Literal["mesh", "host"] = "mesh"
    """Of all optimiser state; host: on the mesh for the updates of a step alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig(
    LoraOptions,
    MixOptions,
    OverlapOptions,
    CriticOptions,
    PromptPolicyOptions,
    ProcessOptions,
    DistanceOptions,
    RatioOptions,
    AdvantageOptions,
    OptimizerOptions,
    SamplingOptions,
    PromptOptions,
    PlacementOptions,
    MachineOptions,
):
    """Options of a policy-gradient run; the defaults are GRPO's as in TRL."""

    # --- what to train on -------------------------------------------------------------------------------------------
    model: str
    """Directory in Hugging Face format, GGUF file, or hub id."""
    dataset: str
    """JSONL, JSON, CSV or Parquet file, a directory of them, a hub dataset id, or package.module:function."""
    eval_dataset: dict[str, str] = dataclasses.field(default_factory=dict)
    """Named held-out sets, by name; what evaluates never trains."""
    reward: tuple[str, ...] = ()
    """Reward functions: a shipped name, package.module:function, file.py:function or reward_model:DIRECTORY."""
    reward_weights: tuple[float, ...] = ()
    """One weight a reward function; empty: all 1. A weight of 0 is computed and logged only."""
    eval_reward_functions: tuple[str, ...] = ()
    """Reward functions of the evaluation; empty: those of training. Right is an answer with at least 0.5 on the first."""
    true_reward: str | None = None
    """Name of the reward function whose gap to the trained reward is logged as reward_gap."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Whether each reward is scaled within its group before the weighted sum."""
    output_dir: str
    """Run directory. An existing run is resumed."""
    seed: int = 0
    """Seed of everything random in the run."""

    # --- the algorithm -------------------------------------------------------------------------------------------
    preset: str | None = None
    """Named choice of all parts; options given beside it win."""
    loss_type: str | None = None
    """TRL's names for the reduction: dapo, grpo, dr_grpo, bnpo, cispo, sapo. None: that of the preset, or dapo."""
    loss_agg_mode: (
        Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None
    ) = None
    """None: that of loss_type or the preset."""
    mask_truncated_completions: bool = False
    """Leave rows that ran into their limit out of the loss."""
    num_iterations: int = 1
    """Passes over each batch of completions."""
    minibatch_completions: int | None = None
    """Completions of one optimiser step; None: all of the step's."""
    microbatch_completions: int | None = None
    """Completions of one forward and backward pass; never changes a result. None: the minibatch."""

    share_prompt: bool = False
    """Score and train a group's completions beside one copy of their prompt. See docs/scoring_and_update.md."""
    pack_completions: bool = False
    """Score and train several short rows, or groups, side by side in one."""

    # --- the run -------------------------------------------------------------------------------------------------
    max_steps: int | None = None
    """Steps of sampling; None: num_epochs decides, or 100."""
    num_epochs: float | None = None
    """Passes over the dataset, instead of max_steps."""
    eval_steps: int = 20
    """Evaluate every so many steps, at the start and at the end; 0: never."""
    eval_limit: int = 256
    """Prompts of each evaluation set that are used."""
    eval_num_generations: int = 8
    """Samples a prompt for pass@k, beside the greedy one."""
    probe_prompts: int = 64
    """Training prompts probed before step 1; 0: none."""
    save_steps: int = 50
    """Checkpoint every so many steps and at the end; 0: only at the end."""
    save_total_limit: int = 3
    """Checkpoints kept, beside the best."""
    best_metric: str | None = None
    """Metric whose best (highest) checkpoint is kept beside the last ones, such as eval/test/greedy_accuracy."""
    logging_steps: int = 1
    completions_steps: int = 10
    """A table of completions every so many steps; 0: never."""
    report_to: tuple[str, ...] = ()
    """Further sinks: tensorboard."""
    seeds: int = 1
    """Runs of the same options with seeds of their own, in output_dir/seed_<n>; mean and interval are printed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLOOConfig(GRPOConfig):
    """Options of an RLOO run: GRPO's, with other defaults."""

    preset: str | None = "rloo"
    num_generations: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(GRPOConfig):
    """Options of a PPO run: GRPO's, with other defaults."""

    preset: str | None = "ppo"
    num_generations: int = 1
    num_iterations: int = 4
    critic: Literal["none", "separate", "shared"] = "separate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingOptions, PromptOptions, MachineOptions):
    """Options of generation from a model or a run."""

    model: str
    """Run directory, directory in Hugging Face format, GGUF file, or hub id."""
    prompt: tuple[str, ...] = ()
    """Prompts; a model with a chat template gets each as a user message."""
    dataset: str | None = None
    """Rows with `prompt`, instead of prompts on the command line."""
    limit: int | None = None
    """Rows of the dataset that are used; None: all."""
    output: str | None = None
    """JSONL file for rows with the completions; None: the terminal."""
    seed: int = 0
    prompts_per_step: int = 8
    """Prompts sampled at once, over all devices."""
    num_generations: int = 1
    """Completions a prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(SamplingOptions, PromptOptions, MachineOptions):
    """Options of an evaluation of a model or a run."""

    model: str
    """Run directory, directory in Hugging Face format, GGUF file, or hub id."""
    eval_dataset: dict[str, str] = dataclasses.field(default_factory=dict)
    """Named sets, by name."""
    eval_reward_functions: tuple[str, ...] = ()
    """Reward functions; an answer counts as right from 0.5 up on the first."""
    eval_limit: int = 256
    """Prompts of each set that are used."""
    eval_num_generations: int = 8
    """Samples a prompt for pass@k, beside the greedy one."""
    probe: bool = False
    """Sample each set's prompts as training would, and print how many groups would teach something."""
    output: str | None = None
    """Directory for metrics.json, probe.json and a row a prompt; None: the terminal only."""
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Options of an export to a Hugging Face directory."""

    run: str
    """Run directory."""
    directory: str
    """Where to write; transformers, vLLM and SGLang load it."""
    step: int | None = None
    """Step whose checkpoint is exported; None: the last."""
    best: bool = False
    """Export the best checkpoint by the run's best_metric instead."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights written; None: that of the master weights."""
    overwrite: bool = False
    """Replace a directory that is there."""
    adapter: bool = False
    """Write the LoRA adapter alone, in PEFT's format, instead of the merged weights."""
