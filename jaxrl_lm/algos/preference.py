"""Losses on preferences: pairs (`dpo_loss`, sums of them `mpo_loss`), judged single completions (`kto_loss`), and the
implicit rewards and metrics that go with them.

The variants of the loss on pairs -> `preference_variants.py`; other divergences than the KL -> `f_divergence.py`;
preferences that no reward explains -> `nash.py`. The reduction is the caller's: a loss a pair or row comes back.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jaxrl_lm import masked
from jaxrl_lm.algos.f_divergence import Divergence, divergence_score
from jaxrl_lm.algos.preference_variants import LOSSES, READERS, Options, Pairs, Variant
from jaxrl_lm.metrics import Metrics, mean_of

MPO = (("sigmoid", 0.8), ("bco_pair", 0.2), ("sft", 1.0))  # the weights of Wang et al., 2024


def whole_pairs(mask: Bool[Array, "N 2 T"]) -> Bool[Array, "N"]:
    """Whether both sides of a pair have a token: otherwise there is nothing to compare."""
    return jnp.all(jnp.any(mask, axis=2), axis=1)


def dpo_loss(
    logprobs: Float[Array, "N 2 T"],
    ref_logprobs: Float[Array, "N 2 T"] | None,
    mask: Bool[Array, "N 2 T"],
    *,
    beta: float = 0.1,
    variant: Variant = "sigmoid",
    label_smoothing: float = 0.0,
    f_divergence: Divergence = "reverse_kl",
    f_alpha: float = 0.5,
    length_alpha: float = 0.0,
    ld_alpha: float | None = None,
    gamma: float = 0.5,
    reward_shift: Shaped[Array, ""] | float | None = None,
    discopop_tau: float = 0.05,
    sft_length: Shaped[Array, ""] | float | None = None,
    sft_weight: float = 1.0,
) -> Float[Array, "N"]:
    """The loss of each pair (index 0 chosen, 1 rejected), by `variant`; to minimise.

    sigmoid: −log σ(β Δ), Δ = Σ_w (l − l_ref) − Σ_l (l − l_ref). Source: DPO (Rafailov et al., 2023), eq. 7. Its gradient
    is −β (1 − P(chosen)) at each token of chosen, the opposite at rejected. Formulas and papers of the other variants and
    of the options: `preference_variants.py`. ref_logprobs=None: no reference, l_ref is 0.

    aot and aot_unpaired sort over the rows that they are given, and row n's loss is that of its rank.
    Departs from the papers: a pair that lacks a side has the loss of zero margin (and zero γ), gradient 0, and no place
    in a sort; ORPO's mean log-probs end at −1e-6, exponents as in `divergence_score`.
    Raises ValueError for an unknown variant, an option that the variant does not read, or a value out of its range.
    """
    options = Options(
        beta, label_smoothing, f_divergence, f_alpha, length_alpha, ld_alpha, gamma, reward_shift, discopop_tau,
        sft_length, sft_weight,
    )  # fmt: skip
    _check(variant, options)
    return LOSSES[variant](_sums(logprobs, ref_logprobs, mask, options), options)


def _check(variant: str, options: Options) -> None:
    if variant not in LOSSES:
        raise ValueError(f"variant={variant!r} is unknown: use {', '.join(LOSSES)}")
    for name, readers in READERS.items():
        value, default = getattr(options, name), Options._field_defaults[name]
        given = value is not None if default is None else value != default
        if given and variant not in readers:
            raise ValueError(f"variant={variant!r} does not read {name}: {', '.join(readers)} do")
    beta, smoothing, tail, tau = options.beta, options.label_smoothing, options.ld_alpha, options.discopop_tau
    ranges = {
        f"beta={beta}: above 0": beta > 0,
        f"label_smoothing={smoothing}: at least 0 and below 0.5": 0 <= smoothing < 0.5,
        f"label_smoothing={smoothing}: above 0 for exo_pair": smoothing > 0 or variant != "exo_pair",
        f"ld_alpha={tail}: within 0 and 1": tail is None or 0 <= tail <= 1,
        f"discopop_tau={tau}: above 0 and at most 1": 0 < tau <= 1,
    }
    for what, holds in ranges.items():
        if not holds:
            raise ValueError(what)


def _token_weights(mask: Bool[Array, "N 2 T"], ld_alpha: float | None) -> Float[Array, "N 2 T"] | None:
    """ld_alpha at the tokens beyond the shorter side's number of them, 1 before; None where nothing is weighted."""
    if ld_alpha is None:
        return None
    shared = jnp.min(jnp.sum(mask, axis=2), axis=1)
    return jnp.where(jnp.cumsum(mask, axis=2) > shared[:, None, None], ld_alpha, 1.0)


def _sums(
    logprobs: Float[Array, "N 2 T"],
    ref_logprobs: Float[Array, "N 2 T"] | None,
    mask: Bool[Array, "N 2 T"],
    options: Options,
) -> Pairs:
    valid = whole_pairs(mask)
    mask = mask & valid[:, None, None]
    tokens = masked.select(logprobs, mask)
    ref = jnp.zeros_like(tokens) if ref_logprobs is None else masked.select(ref_logprobs, mask)
    weights = _token_weights(mask, options.ld_alpha)
    if weights is not None:
        tokens, ref = tokens * weights, ref * weights
    gaps = tokens - ref
    log_ratios = jnp.sum(gaps, axis=2)
    scores = divergence_score(log_ratios, divergence=options.f_divergence, alpha=options.f_alpha)
    # Column by column, tokens of a shared prefix cancel exactly, whatever their size.
    plain = options.f_divergence == "reverse_kl"
    margin = jnp.sum(gaps[:, 0] - gaps[:, 1], axis=1) if plain else scores[:, 0] - scores[:, 1]
    lengths = jnp.sum(mask, axis=2).astype(tokens.dtype)
    return Pairs(margin, scores, log_ratios, jnp.sum(tokens, axis=2), jnp.sum(ref, axis=2), lengths, valid)


def mpo_loss(
    logprobs: Float[Array, "N 2 T"],
    ref_logprobs: Float[Array, "N 2 T"] | None,
    mask: Bool[Array, "N 2 T"],
    *,
    parts: Sequence[tuple[str, float]] = MPO,
    **options: Any,
) -> Float[Array, "N"]:
    """Σ weight · dpo_loss(variant=name) over the (name, weight) of `parts`.

    `options` are those of `dpo_loss`; each goes to the parts that read it. The default is MPO's (Wang et al., 2024).
    TRL: `loss_type` as a list with `loss_weights`.
    Raises ValueError for no parts, an unknown part, an option that no part reads, or an f_divergence beside a part other
    than sft that has no form for it.
    """
    unknown = [name for name, _ in parts if name not in LOSSES]
    if unknown or not parts:
        raise ValueError(f"parts={parts!r}: pairs of a weight and a name out of {', '.join(LOSSES)}")
    for option in options.keys() & READERS.keys():
        if not any(name in READERS[option] for name, _ in parts):
            raise ValueError(f"no part of {parts!r} reads {option}: {', '.join(READERS[option])} do")

    def takes(name: str, option: str) -> bool:
        everywhere = option == "f_divergence" and name != "sft"
        return everywhere or option not in READERS or name in READERS[option]

    def loss(name: str) -> Float[Array, "N"]:
        own = {option: value for option, value in options.items() if takes(name, option)}
        return dpo_loss(logprobs, ref_logprobs, mask, variant=name, **own)

    first, *rest = (weight * loss(name) for name, weight in parts)
    return sum(rest, start=first)


def implicit_rewards(
    logprobs: Float[Array, "N 2 T"],
    ref_logprobs: Float[Array, "N 2 T"] | None,
    mask: Bool[Array, "N 2 T"],
    *,
    beta: float,
    ld_alpha: float | None = None,
    average: bool = False,
) -> Float[Array, "N 2"]:
    """β Σ (l − l_ref) of each side; 0 for a pair that lacks a side.

    At the optimum of DPO this is the reward up to a constant of the prompt. Source: DPO (Rafailov et al., 2023), eq. 5.
    average=True divides by the number of tokens (SimPO's reward, without a reference).
    """
    pairs = _sums(logprobs, ref_logprobs, mask, Options(ld_alpha=ld_alpha))
    below = jnp.maximum(pairs.lengths, 1.0) if average else 1.0
    return beta * pairs.log_ratios / below


def preference_metrics(
    logprobs: Float[Array, "N 2 T"],
    ref_logprobs: Float[Array, "N 2 T"] | None,
    mask: Bool[Array, "N 2 T"],
    *,
    beta: float,
    ld_alpha: float | None = None,
    average: bool = False,
) -> Metrics:
    """Means over the whole pairs of the implicit rewards, of their margin, of margin > 0, and of Σ l; TRL's names."""
    rewards = implicit_rewards(logprobs, ref_logprobs, mask, beta=beta, ld_alpha=ld_alpha, average=average)
    logps, valid = masked.sum(logprobs, mask, axis=2), whole_pairs(mask)
    values = {
        "rewards/chosen": rewards[:, 0],
        "rewards/rejected": rewards[:, 1],
        "rewards/margins": rewards[:, 0] - rewards[:, 1],
        "rewards/accuracies": rewards[:, 0] > rewards[:, 1],
        "logps/chosen": logps[:, 0],
        "logps/rejected": logps[:, 1],
    }
    return {name: mean_of(jax.lax.stop_gradient(value), valid) for name, value in values.items()}


def moving_reward_shift(
    shift: Shaped[Array, ""] | float, rewards: Float[Array, "N 2"], valid: Bool[Array, "N"], *, decay: float = 0.9
) -> Float[Array, ""]:
    """The next δ: decay · δ + (1 − decay) · mean of the implicit rewards, both sides alike; δ where no pair is valid.

    Source: BCO (Jung et al., 2024). Call it on the global batch; no gradient.
    """
    mean = masked.mean(jnp.mean(jax.lax.stop_gradient(rewards), axis=1), valid)
    return jnp.where(jnp.any(valid), decay * shift + (1.0 - decay) * mean, shift)


def kto_kl(
    logprobs: Float[Array, "N T"], ref_logprobs: Float[Array, "N T"], mask: Bool[Array, "N T"]
) -> Float[Array, ""]:
    """max(0, mean of Σ (l − l_ref)) over the rows that have a token: KTO's z_0, in nats; no gradient, 0 for no rows.

    The rows are prompts with completions of other prompts of the batch. Source: KTO (Ethayarajh et al., 2024), section 4.
    """
    log_ratios = masked.sum(masked.select(logprobs, mask) - masked.select(ref_logprobs, mask), mask, axis=1)
    return jax.lax.stop_gradient(jnp.maximum(masked.mean(log_ratios, jnp.any(mask, axis=1)), 0.0))


def kto_loss(
    logprobs: Float[Array, "N T"],
    ref_logprobs: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    labels: Bool[Array, "N"],
    kl: Shaped[Array, ""] | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Array, "N"]:
    """λ_D σ(β (kl − g)) of a desirable row, λ_U σ(β (g − kl)) of an undesirable one, g = Σ (l − l_ref).

    Source: KTO (Ethayarajh et al., 2024), section 4: λ_y − v. `kl` is `kto_kl`'s, without gradient; kl = 0
    is TRL's `loss_type="apo_zero_unpaired"`. A row without a token has g = 0 and gradient 0.
    Raises ValueError for a beta of 0 or below.
    """
    if beta <= 0:
        raise ValueError(f"beta={beta}: above 0")
    log_ratio = masked.sum(masked.select(logprobs, mask) - masked.select(ref_logprobs, mask), mask, axis=1)
    above = beta * (log_ratio - jax.lax.stop_gradient(kl))
    desirable = desirable_weight * jax.nn.sigmoid(-above)
    return jnp.where(labels, desirable, undesirable_weight * jax.nn.sigmoid(above))
