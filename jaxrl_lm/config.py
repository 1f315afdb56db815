"""Every option of a run: frozen dataclasses, the same keys in TOML files and on the command line.

The words and defaults are those of TRL and verl where one fits. Reading files and overrides: `cli.py`.
"""

import dataclasses
import math
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

SOURCES = ("prompt_lookup", "last_epoch")  # of speculation's drafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What a sampler compiles in. Temperatures, limits and keys are arrays instead (`types.Requests`)."""

    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    slots: int | None = None  # rows that are decoded at once, at most; None: all
    # Rules, see `logit_rules.py`.
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    min_new_tokens: int = 0
    forced_tokens: tuple[int, ...] = ()
    max_thinking_tokens: int | None = None  # with a table of where thinking ends
    end_of_thinking: tuple[int, ...] = ()  # what is then forced
    vocabulary_mask: bool = False  # with the table of a grammar
    kv_cache_dtype: str | None = None  # int8, or None: that of the computation
    observation_columns: int | None = None  # tokens that a turn's row is given at once, at most; None: it is over
    num_speculative_tokens: int | None = None  # read beside each new token, see speculate.py; None, 0: none
    speculative_source: str = "prompt_lookup"
    prompt_lookup_max: int = 3

    def __post_init__(self):
        if self.observation_columns is not None and self.observation_columns < 1:
            raise ValueError(
                f"observation_columns={self.observation_columns}: must be at least 1 (leave it out to end rows with their "
                "first turn)"
            )
        if self.kv_cache_dtype not in (None, "int8"):
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} is unknown: use int8, or leave it out for the computation's own"
            )
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"decode_slots={self.slots}: must be at least 1 (leave it out to decode all rows at once)")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: at least one token must be asked for")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be at least 1 (leave it out to turn it off)")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise ValueError(f"{name}={value}: must be in (0, 1] (leave it out to turn it off)")
        self._check_rules()
        self._check_speculation()

    def _check_speculation(self) -> None:
        draft = self.num_speculative_tokens or 0
        if draft < 0:
            raise ValueError(f"num_speculative_tokens={draft}: must be at least 1 (leave it out to turn it off)")
        if draft >= self.max_new_tokens:
            raise ValueError(
                f"num_speculative_tokens={draft}: must be below the {self.max_new_tokens} new tokens that a row has room "
                "for (max_completion_length)"
            )
        if self.speculative_source not in SOURCES:
            raise ValueError(f"speculative_source={self.speculative_source!r} is unknown: use {' or '.join(SOURCES)}")
        other = self.changes_logits or self.forces or self.observation_columns is not None
        if draft and other:
            raise ValueError(
                "num_speculative_tokens with rules of drawing (repetition_penalty, logit_bias, suppress_tokens, "
                "allowed_token_ids, min_new_tokens, forced_tokens, max_thinking_tokens, vocabulary_mask) or "
                "observation_columns: guesses do not follow them; leave one of the two out"
            )
        if self.prompt_lookup_max < 1:
            raise ValueError(f"prompt_lookup_max={self.prompt_lookup_max}: at least 1 token must match")

    @property
    def truncates(self) -> bool:
        """Whether the distribution that is sampled differs from the softmax."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty not in (None, 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether a rule changes the logits that are drawn from."""
        given = self.logit_bias or self.suppress_tokens or self.allowed_token_ids or self.min_new_tokens
        return bool(given) or self.penalises or self.vocabulary_mask

    @property
    def reshapes(self) -> bool:
        """Whether what is sampled from is not the policy's softmax, so that there are behaviour log-probs."""
        return self.truncates or self.changes_logits

    @property
    def forces(self) -> bool:
        """Whether a row may have tokens that the policy did not choose."""
        return bool(self.forced_tokens) or self.max_thinking_tokens is not None

    def _check_rules(self) -> None:
        if self.repetition_penalty is not None and not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: must be above 0 (1 is off)")
        ids = [token for token, _ in self.logit_bias]
        if len(set(ids)) < len(ids) or not all(math.isfinite(bias) for _, bias in self.logit_bias):
            raise ValueError(f"logit_bias={self.logit_bias}: one finite number a token; suppress_tokens bans")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens}: must be from 0 to max_completion_length={self.max_new_tokens}"
            )
        banned = set(self.suppress_tokens)
        both = banned & set(self.allowed_token_ids)
        if both:
            raise ValueError(f"suppress_tokens and allowed_token_ids both have token {min(both)}: leave it out of one")
        for name in ("forced_tokens", "end_of_thinking"):
            for token in getattr(self, name):
                if token in banned or (self.allowed_token_ids and token not in self.allowed_token_ids):
                    raise ValueError(
                        f"{name}: token {token} is forced, and banned by suppress_tokens or allowed_token_ids"
                    )
                if token in self.eos_token_ids:
                    raise ValueError(f"{name}: token {token} ends the sequence: every completion would end with it")
        self._check_thinking()
        counts = self.penalises or self.min_new_tokens or self.forces or self.vocabulary_mask
        if self.observation_columns is not None and counts:
            raise ValueError(
                "observation_columns with repetition_penalty, min_new_tokens, forced_tokens, max_thinking_tokens or "
                "vocabulary_mask: these rules follow one completion, not turns; leave one of the two out"
            )

    def _check_thinking(self) -> None:
        budget, end = self.max_thinking_tokens, self.end_of_thinking
        if (budget is not None) != bool(end):
            raise ValueError(f"max_thinking_tokens={budget} and end_of_thinking={end}: give both, or neither")
        if budget is not None and budget < 0:
            raise ValueError(f"max_thinking_tokens={budget}: must be at least 0")
        taken = len(self.forced_tokens) + (budget or 0) + len(end)
        if taken and taken >= self.max_new_tokens:
            raise ValueError(
                f"forced_tokens, max_thinking_tokens and end_of_thinking take {taken} tokens: that leaves no answer of "
                f"max_completion_length={self.max_new_tokens}"
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
