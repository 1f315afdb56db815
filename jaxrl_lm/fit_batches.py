"""Batches of given rows, with the weight of every term of the loss.

Weights come first: they are computed here from the whole batch, before it is cut into microbatches. A mask names the
tokens that a loss reads; a row that only fills the batch has `valid` False or an empty mask, weight 0, and stands in no
count. What reads the batches: `fit_objectives.py`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrl_lm import algos
from jaxrl_lm.types import ComparisonBatch, LabelledBatch, PreferenceBatch, SFTBatch, UnpairedBatch

Tokens = Int32[Array, "N T"]
Pairs = Int32[Array, "N 2 T"]


def _predicted(mask: Bool[Array, "*n T"], segment_ids: Int32[Array, "*n T"]) -> Bool[Array, "*n T"]:
    """The mask without the first token of each segment: nothing stands before it, so it has no log-prob."""
    same = segment_ids[..., 1:] == segment_ids[..., :-1]
    return mask.at[..., 0].set(False).at[..., 1:].set(mask[..., 1:] & same)


def _shares(valid: Bool[Array, "N"]) -> Float[Array, "N"]:
    """1 / number of valid rows at each of them, 0 elsewhere."""
    return jnp.where(valid, 1.0 / jnp.maximum(jnp.sum(valid), 1), 0.0).astype(jnp.float32)


def _everywhere(value: Shaped[Array, ""], like: Float[Array, "N"]) -> Float[Array, "N"]:
    return jnp.full_like(like, value)


def sft_batch(tokens: Tokens, segment_ids: Tokens, mask: Bool[Array, "N T"], *, over: str = "token-mean") -> SFTBatch:
    """Demonstrations; `over` is the reduction of `token_weights`, a packed row's segments being its sequences."""
    mask = _predicted(mask, segment_ids)
    return SFTBatch(tokens, segment_ids, algos.token_weights(mask, over=over, segment_ids=segment_ids))


def preference_batch(
    tokens: Pairs,
    segment_ids: Pairs,
    mask: Bool[Array, "N 2 T"],
    valid: Bool[Array, "N"],
    ref_logprobs: Float[Array, "N 2 T"] | None,
    old_logprobs: Float[Array, "N 2 T"] | None = None,
    reward_shift: Shaped[Array, ""] | None = None,
    *,
    over_tokens_sft: bool = False,
) -> PreferenceBatch:
    """Pairs; each whole and valid one weighs 1 / their number.

    over_tokens_sft: an sft term becomes the mean over all chosen tokens, instead of over pairs of each one's own mean.
    """
    mask = _predicted(mask, segment_ids)
    valid = valid & algos.whole_pairs(mask)
    weights = _shares(valid)
    length = None
    if over_tokens_sft:
        tokens_chosen = jnp.sum(jnp.sum(mask[:, 0], axis=1) * valid)
        length = _everywhere(jnp.maximum(tokens_chosen / jnp.maximum(jnp.sum(valid), 1), 1.0), weights)
    shift = None if reward_shift is None else _everywhere(reward_shift, weights)
    return PreferenceBatch(tokens, segment_ids, mask, weights, ref_logprobs, old_logprobs, shift, length)


def unpaired_batch(
    tokens: Tokens,
    segment_ids: Tokens,
    mask: Bool[Array, "N T"],
    labels: Bool[Array, "N"],
    valid: Bool[Array, "N"],
    ref_logprobs: Float[Array, "N T"],
    kl_logprobs: Float[Array, "M K"],
    kl_ref_logprobs: Float[Array, "M K"],
    kl_mask: Bool[Array, "M K"],
) -> UnpairedBatch:
    """Judged completions; each valid row with a token weighs 1 / their number.

    The kl_… are of the batch's prompts with completions of other prompts, by the policy and by the reference; a row of
    theirs that fills the batch has an empty mask. Their KL, at least 0, is KTO's z_0.
    """
    mask = _predicted(mask, segment_ids)
    weights = _shares(valid & jnp.any(mask, axis=1))
    kl = algos.kto_kl(kl_logprobs, kl_ref_logprobs, kl_mask)
    return UnpairedBatch(tokens, segment_ids, mask, labels, weights, ref_logprobs, _everywhere(kl, weights))


def comparison_batch(
    tokens: Pairs, segment_ids: Pairs, valid: Bool[Array, "N"], margin: Float[Array, "N"] | None = None
) -> ComparisonBatch:
    """Pairs for a reward model; each valid one whose sides both have a token weighs 1 / their number."""
    return ComparisonBatch(tokens, segment_ids, _shares(valid & algos.whole_pairs(segment_ids > 0)), margin)


def labelled_batch(
    tokens: Tokens, segment_ids: Tokens, labels: Float[Array, "N T"], mask: Bool[Array, "N T"], *, per_row: bool = False
) -> LabelledBatch:
    """Rows with labels at the tokens of the mask: a mean over these tokens, or over rows of each one's mean (per_row)."""
    over = "seq-mean-token-mean" if per_row else "token-mean"
    weights = algos.token_weights(mask, over=over, segment_ids=segment_ids)
    return LabelledBatch(tokens, segment_ids, labels, weights)
