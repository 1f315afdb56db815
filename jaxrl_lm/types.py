"""The pytrees that everything else passes around, and the legend of their shapes.

P prompts, G samples a prompt, N = P·G rows (a prompt's G rows are adjacent), Tp prompt columns, T = Tp + completion
columns, V vocabulary, D model width.

Column t is a fact about token t: `logprobs[n, t] = log pi(tokens[n, t] | tokens[n, :t])`. Prompts are left-padded,
completions right-padded; `segment_ids == 0` is padding. `action_mask` is written by the sampler and never recomputed.

NamedTuples rather than dataclasses: JAX calls constructors while it rebuilds trees, and the shape checks of the test
session would then see its placeholders. Next to read: `score.py` (the only shift by one) and `algos/`.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, Int32, Key

Params = dict[str, Any]  # a nested dict of jax.Array, never a Variable or a module


class Requests(NamedTuple):
    """What generation is asked for. Everything is an array, so that changing a value compiles nothing."""

    tokens: Int32[Array, "P Tp"]  # left-padded prompts
    segment_ids: Int32[Array, "P Tp"]  # 0 = padding
    keys: Key[Array, "N"]  # one a row: a row's sample depends on its prompt and its key only
    max_new: Int32[Array, "N"]  # at most this many new tokens; 0 = the row is not sampled
    temperature: Float[Array, "N"]  # 0 = argmax
    policy_step: Int32[Array, ""]  # the optimiser step whose weights sample
    drafts: Int32[Array, "N C"] | None = None  # what speculation guesses: earlier completions, −1 after their end


class Rollout(NamedTuple):
    """What was sampled."""

    tokens: Int32[Array, "N T"]
    segment_ids: Int32[Array, "N T"]
    action_mask: Bool[Array, "N T"]  # tokens that the policy chose, its end-of-sequence token included
    logprobs: Float[Array, "N T"]  # log softmax(logits / temperature) over the whole vocabulary; 0 off the mask
    behaviour_logprobs: Float[Array, "N T"] | None  # of the truncated distribution; None = equal to logprobs
    truncated: Bool[Array, "N"]  # the row ran into its limit
    turn_ids: Int32[Array, "N T"]  # 0 = not our action, else the number of the turn
    policy_step: Int32[Array, "N T"]  # the optimiser step whose weights sampled the token; 0 off the mask
    passes: Int32[Array, "N"] | None = None  # forward passes that the row took; None: one a token


class Layout(NamedTuple):
    """Rows of a batch packed into fewer (`layout.py`): what the model reads, and where each token's score comes from.

    B packed rows of W columns in C cells, the parts of the batch that lie on one device; a cell scores K tokens at most.
    Where a function takes tokens and segment_ids, a Layout and None may stand for them.
    """

    tokens: Int32[Array, "B W"]
    segment_ids: Int32[Array, "B W"]
    positions: Int32[Array, "B W"]
    until: (
        Int32[Array, "B W"] | None
    )  # the last segment that sees the token (`visible` in models/decoder.py); None: its own
    targets: Int32[Array, "C K"]  # the tokens that are scored
    before: Int32[Array, "C K"]  # where in the cell's B / C · W columns the state before each stands; −1: no target
    rows: Int32[Array, "C K"]  # which of the cell's N / C rows each is of
    places: Int32[Array, "N T"]  # which of its cell's targets a token is; −1: none, and its score is 0
    reads: (
        Int32[Array, "B Q M"] | None
    )  # blocks of columns that each of a row's Q blocks sees some of, −1: none; None: all


class PolicyBatch(NamedTuple):
    """What an objective reads. Every term's weights are computed once from the global batch: see `batch.py`."""

    tokens: Int32[Array, "N T"]
    segment_ids: Int32[Array, "N T"]
    action_mask: Bool[Array, "N T"]
    weights: Float[Array, "N T"]
    temperature: Float[Array, "N"]
    old_logprobs: Float[Array, "N T"] | None  # None: the batch's only update, the old policy is the current one
    sampler_logprobs: Float[Array, "N T"]
    advantages: Float[Array, "N T"]
    ref_logprobs: Float[Array, "N T"] | None
    truncated: Bool[Array, "N"]
    valid: Bool[Array, "N"]  # False: the row abstains, is filtered or pads the batch, and never learns
    kl_weights: Float[Array, "N T"] | None = None  # of the KL to the reference in the loss, its coefficient included
    entropy_weights: Float[Array, "N T"] | None = None  # of the entropy bonus, its coefficient included
    old_kl_weights: Float[Array, "N T"] | None = None  # of a KL to the old policy (KL-Cov)
    action_ids: Int32[Array, "N T"] | None = None  # tokens that share an id are one action; None: each is its own
    layout: Layout | None = None  # the same rows packed

    @property
    def packed_rows(self) -> tuple[Any, Any]:
        """What the model reads: the packed rows where there are some, or tokens and segment_ids."""
        return (self.tokens, self.segment_ids) if self.layout is None else (self.layout, None)


class CriticBatch(NamedTuple):
    """A policy batch and what the critic learns from the same rows."""

    policy: PolicyBatch
    old_values: Float[Array, "N T"]  # value of the state before each token, when the rows were sampled
    returns: Float[Array, "N T"]  # what they should have been
    value_weights: Float[Array, "N T"]


class ImplicitBatch(NamedTuple):
    """A policy batch, with or without a critic's, and what an implicit process reward model learns from the same rows."""

    policy: PolicyBatch | CriticBatch
    ref_logprobs: Float[Array, "N T"]  # of the model that it started from
    labels: Float[Array, "N"]  # 1: the outcome is right
    weights: Float[Array, "N"]


class SFTBatch(NamedTuple):
    """Prompt-completion rows; the loss is on the completions."""

    tokens: Int32[Array, "N T"]
    segment_ids: Int32[Array, "N T"]
    weights: Float[Array, "N T"]


class PreferenceBatch(NamedTuple):
    """Pairs of completions of one prompt; index 0 chosen, 1 rejected."""

    tokens: Int32[Array, "N 2 T"]
    segment_ids: Int32[Array, "N 2 T"]
    action_mask: Bool[Array, "N 2 T"]  # tokens of the completions, their end-of-sequence token included
    weights: Float[Array, "N"]  # 0: the pair lacks a side, or fills the batch
    ref_logprobs: Float[Array, "N 2 T"] | None  # None: the loss has no reference
    old_logprobs: Float[Array, "N 2 T"] | None = None  # of the policy that sampled the pairs (INPO)
    reward_shift: Float[Array, "N"] | None = None  # the same in every row (BCO)
    sft_length: Float[Array, "N"] | None = None  # what an sft term's sum is divided by, the same in every row


class UnpairedBatch(NamedTuple):
    """Completions that were judged one by one."""

    tokens: Int32[Array, "N T"]
    segment_ids: Int32[Array, "N T"]
    action_mask: Bool[Array, "N T"]
    labels: Bool[Array, "N"]  # desirable
    weights: Float[Array, "N"]
    ref_logprobs: Float[Array, "N T"]
    kl: Float[Array, "N"]  # of the policy from its reference, the same in every row (KTO)


class ComparisonBatch(NamedTuple):
    """Pairs for a reward model; index 0 chosen, 1 rejected."""

    tokens: Int32[Array, "N 2 T"]
    segment_ids: Int32[Array, "N 2 T"]
    weights: Float[Array, "N"]  # 0: the pair fills the batch
    margin: Float[Array, "N"] | None  # how much better the chosen one is


class LabelledBatch(NamedTuple):
    """Rows with labels at some of their tokens, for outcome and process reward models."""

    tokens: Int32[Array, "N T"]
    segment_ids: Int32[Array, "N T"]
    labels: Float[Array, "N T"]  # within 0 and 1, read where the weight is above 0
    weights: Float[Array, "N T"]


class Scores(NamedTuple):
    """Facts about given tokens; column `start` of score() and the padding hold 0."""

    logprobs: Float[Array, "N T"]
    entropy: Float[Array, "N T"]


class TrainState(NamedTuple):
    """Everything an optimiser step changes. `params` holds the trainable trees by name."""

    step: Int[Array, ""]
    params: dict[str, Params]
    opt_state: Any
    key: Key[Array, ""]
    extra: dict[str, Any]


class Frozen(NamedTuple):
    """What a step reads and never changes."""

    reference: Params | None = None
    base: Params | None = None  # under LoRA: the weights that the adapter is added to
    teacher: Params | None = None  # of on-policy distillation
    prm_reference: Params | None = None  # what an implicit process reward model started from
