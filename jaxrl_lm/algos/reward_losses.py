"""What reward models learn from, and how good they are: comparisons, outcomes, steps; accuracy, calibration, length bias.

A reward model has one score a row (`reward_model_loss`, `outcome_loss` of [N]) or a logit a token (`outcome_loss` of
[N T], `process_loss`). All are losses before any reduction, to be weighted. Where the labels of steps come from:
`step_labels.py`; what to do with scores: `selection.py`; advantages from them: `process.py`.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_lm import masked
from jaxrl_lm.algos.groups import Valid
from jaxrl_lm.algos.returns import last_heads
from jaxrl_lm.metrics import CalibrationError, Correlation, Mean, correlation_of, mean_of, merge_correlations

Ensemble = Literal["mean", "min", "pessimistic"]


def _pairs(scores: Shaped[Array, "N 2"], valid: Valid) -> tuple[Float[Array, "N 2"], Bool[Array, "N"]]:
    """The scores with 0 at rows that are not valid, and which are."""
    valid = jnp.ones(scores.shape[:1], bool) if valid is None else valid
    return masked.select(scores, jnp.broadcast_to(valid[:, None], scores.shape)), valid


def reward_model_loss(
    scores: Shaped[Array, "N 2"],
    *,
    margin: Shaped[Array, "N"] | float | None = None,
    center: float = 0.0,
    label_smoothing: float = 0.0,
    valid: Valid = None,
) -> Float[Array, "N"]:
    """−log P(chosen) of each pair, scores[:, 0] being the chosen one's; 0 at rows that are not valid.

    With d = r⁺ − r⁻ − margin and P(chosen) = σ(d): −(1 − ε) log σ(d) − ε log σ(−d) + center · (r⁺ + r⁻)². The margin is
    a constant, or how much better each chosen one is. ε says how often a comparison is taken to be the wrong way round.
    center draws scores to a mean of 0, which differences leave open. At d = 0 the first part is ln 2, and its gradient
    in r⁺ is −(1 − P(chosen)).
    Source: Bradley and Terry, 1952; Ouyang et al., 2022, eq. 1; margin: Llama 2 (Touvron et al., 2023), eq. 2; centring:
    Eisenstein et al., 2023, as TRL's `center_rewards_coefficient`; ε: conservative DPO (Mitchell, 2023), for scores.

    Raises ValueError for a label_smoothing outside [0, 1/2).
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing}: the share of wrong comparisons, at least 0 and below 1/2")
    scores, valid = _pairs(scores, valid)
    gap = scores[:, 0] - scores[:, 1]
    if margin is not None:
        gap = gap - masked.select(jnp.broadcast_to(jnp.asarray(margin), gap.shape), valid)
    loss = (1.0 - label_smoothing) * jax.nn.softplus(-gap)
    if label_smoothing:  # without it nothing is computed that could overflow in vain
        loss = loss + label_smoothing * jax.nn.softplus(gap)
    if center:
        loss = loss + center * jnp.square(scores[:, 0] + scores[:, 1])
    return masked.select(loss, valid)


def reward_model_metrics(scores: Shaped[Array, "N 2"], *, valid: Valid = None) -> dict[str, Mean]:
    """Of pairs: `accuracy`, the share with r⁺ > r⁻ (equal scores are a miss); `margin`, mean of r⁺ − r⁻; `mean_reward`.

    Names and meaning are TRL's.
    """
    scores, valid = _pairs(scores, valid)
    gap = scores[:, 0] - scores[:, 1]
    return {
        "accuracy": mean_of(gap > 0, valid),
        "margin": mean_of(gap, valid),
        "mean_reward": mean_of(scores, jnp.broadcast_to(valid[:, None], scores.shape)),
    }


def ensemble_reward(scores: Shaped[Array, "K N"], *, how: Ensemble = "mean", k: float = 1.0) -> Float[Array, "N"]:
    """One reward a row from K models: their mean, their min, or the pessimistic mean − k · std.

    The std is the one with K − 1, 0 for a single model. A NaN of any model shows. Source: Coste et al., 2023, mean, worst
    case and uncertainty-weighted optimisation. Departs: that subtracts the variance, which has another unit.

    Raises ValueError for an unknown `how`.
    """
    if how not in get_args(Ensemble):
        raise ValueError(f"how={how!r} is unknown: use {', '.join(get_args(Ensemble))}")
    every = jnp.ones(scores.shape, bool)
    if how == "min":
        return jnp.min(masked.select(scores, every), axis=0)
    mean = masked.mean(scores, every, 0)
    return mean if how == "mean" else mean - k * masked.std(scores, every, 0)


# --- outcomes and steps -----------------------------------------------------------------------------------------------


def binary_cross_entropy(
    logits: Shaped[Array, "*s"], labels: Shaped[Array, "*s"], mask: Bool[Array, "*s"]
) -> Float[Array, "*s"]:
    """−y log σ(z) − (1 − y) log σ(−z) where the mask holds, 0 elsewhere; y in [0, 1] may be soft.

    What is to be ignored lies off the mask. A label outside [0, 1] under it, such as a −100 that was meant to be
    ignored, makes loss and gradient NaN: it is never read as a number.
    """
    z, y = masked.select(logits, mask), masked.select(labels, mask)
    y = jnp.where((y >= 0) & (y <= 1), y, jnp.nan)
    return masked.select(y * jax.nn.softplus(-z) + (1.0 - y) * jax.nn.softplus(z), mask)


def outcome_loss(
    logits: Shaped[Array, "N T"] | Shaped[Array, "N"],
    labels: Shaped[Array, "N"],
    mask: Bool[Array, "N T"] | Bool[Array, "N"],
    *,
    per_token: bool = False,
) -> Float[Array, "N T"] | Float[Array, "N"]:
    """Cross-entropy of "this completion is right" with the label of its row; 0 wherever nothing is read.

    logits [N T]: at the last token under the mask of each row, or with per_token at every token under it, so that each
    is a value of the prefix. A row whose outcome is unknown has an empty mask. logits [N]: one a row, the mask says which
    rows have a label. Weights that make a mean: `token_weights` of `outcome_tokens`.
    Source: Cobbe et al., 2021, verifiers, at every token; Uesato et al., 2022, outcome reward models. Departs: their
    verifiers have a language-modelling loss beside it.

    Raises ValueError for per_token with one logit a row.
    """
    if logits.ndim == 1:
        if per_token:
            raise ValueError("per_token=True needs a logit a token, [N T]: got one a row")
        return binary_cross_entropy(logits, labels, mask)
    read = outcome_tokens(mask, per_token=per_token)
    return binary_cross_entropy(logits, jnp.broadcast_to(labels[:, None], read.shape), read)


def outcome_tokens(mask: Bool[Array, "N T"], *, per_token: bool) -> Bool[Array, "N T"]:
    """The tokens that `outcome_loss` reads: all under the mask, or the last one of each row."""
    return mask if per_token else last_heads(mask, None)[1]


def binary_logits(logits: Shaped[Array, "N T"] | Shaped[Array, "N T 2"]) -> Shaped[Array, "N T"]:
    """The logit of "right": as it is, or of a head with the classes wrong, right the difference of the two.

    Raises ValueError for another number of classes.
    """
    if logits.ndim == 2:
        return logits
    if logits.shape[2] != 2:
        raise ValueError(f"logits {logits.shape}: a process reward model has the classes wrong and right, or one logit")
    return logits[..., 1] - logits[..., 0]


def process_loss(
    logits: Shaped[Array, "N T"] | Shaped[Array, "N T 2"], labels: Shaped[Array, "N T"], label_mask: Bool[Array, "N T"]
) -> Float[Array, "N T"]:
    """Cross-entropy with the label of a step at the step's last token, where label_mask holds; 0 elsewhere.

    Labels lie in [0, 1], hard or soft. logits [N T 2] are token classification with the classes wrong (0) and right (1):
    the cross-entropy of their softmax. Weights that make a mean: `token_weights(label_mask)`.
    Source: Lightman et al., 2023; soft labels: Math-Shepherd (Wang et al., 2024). TRL's `PRMTrainer` is the mean
    over the labelled tokens of [N T 2] with hard labels.

    Raises ValueError as `binary_logits`.
    """
    return binary_cross_entropy(binary_logits(logits), labels, label_mask)


def process_scores(
    logits: Shaped[Array, "N T"] | Shaped[Array, "N T 2"], step_ends: Bool[Array, "N T"]
) -> Float[Array, "N T"]:
    """The chance σ(z) that a step is right, at its last token; 0 elsewhere. Raises ValueError as `binary_logits`."""
    return masked.select(jax.nn.sigmoid(masked.select(binary_logits(logits), step_ends)), step_ends)


def label_metrics(logits: Shaped[Array, "*s"], labels: Shaped[Array, "*s"], mask: Bool[Array, "*s"]) -> dict[str, Mean]:
    """Of an outcome or process model: `accuracy` (z > 0 against y ≥ ½), and the means of σ(z) and of the labels."""
    z, y = masked.select(logits, mask), masked.select(labels, mask)
    return {
        "accuracy": mean_of((z > 0) == (y >= 0.5), mask),
        "mean_probability": mean_of(jax.nn.sigmoid(z), mask),
        "mean_label": mean_of(y, mask),
    }


# --- calibration, and what a score follows instead of quality ---------------------------------------------------------


def calibration(
    probabilities: Shaped[Array, "*s"], labels: Shaped[Array, "*s"], mask: Bool[Array, "*s"], *, bins: int = 10
) -> CalibrationError:
    """Count, Σ probability and Σ label over the mask in equal bins of [0, 1], bin b being [b / bins, (b + 1) / bins).

    1 belongs to the last bin. Add the sums of parts, then `calibration_error`; as a metric they merge by themselves. For
    comparisons see `pair_calibration`. Raises ValueError for bins below 1.
    """
    if bins < 1:
        raise ValueError(f"bins={bins}: at least one bin is needed")
    p, y = masked.select(probabilities, mask).reshape(-1), masked.select(labels, mask).reshape(-1)
    flat = mask.reshape(-1)
    index = jnp.clip(jnp.floor(p * bins).astype(jnp.int32), 0, bins - 1)
    total = lambda x: jax.ops.segment_sum(masked.select(x, flat), index, num_segments=bins)
    return CalibrationError(total(flat), total(p), total(y))


def pair_calibration(scores: Shaped[Array, "N 2"], *, bins: int = 10, valid: Valid = None) -> CalibrationError:
    """The `calibration` of comparisons: with which chance the preferred one wins, σ(|r⁺ − r⁻|), and whether it does.

    Of two orders of a pair the model's own, so that the label is not always 1. Equal scores are right by half.
    """
    scores, valid = _pairs(scores, valid)
    gap = scores[:, 0] - scores[:, 1]
    return calibration(jax.nn.sigmoid(jnp.abs(gap)), 0.5 * (1.0 + jnp.sign(gap)), valid, bins=bins)


def calibration_error(sums: CalibrationError) -> Float[Array, ""]:
    """The expected calibration error Σ_b (n_b / n) |mean label − mean probability|; NaN where nothing was counted.

    Source: Guo et al., 2017, eq. 3 (Naeini et al., 2015).
    """
    return jnp.sum(jnp.abs(sums.label - sums.probability)) / jnp.sum(sums.count)


# Moments of two variables over a part of the data, and those of two parts together.
moments, merge_moments = correlation_of, merge_correlations


def correlation(sums: Correlation) -> Float[Array, ""]:
    """Pearson's correlation; NaN where x or y has no spread: there is nothing to measure."""
    some = (sums.xx > 0) & (sums.yy > 0)
    below = jnp.sqrt(jnp.where(some, sums.xx, 1.0)) * jnp.sqrt(jnp.where(some, sums.yy, 1.0))
    return jnp.where(some, sums.xy / below, jnp.nan)


def length_reward_moments(
    scores: Shaped[Array, "*s"], lengths: Int[Array, "*s"], mask: Bool[Array, "*s"]
) -> Correlation:
    """The `moments` of lengths and scores: merge those of parts, then `correlation`.

    Near 1 the model pays for length. Source: the check of Singhal et al., 2023, "A long way to go".
    """
    return moments(lengths, scores, mask)
