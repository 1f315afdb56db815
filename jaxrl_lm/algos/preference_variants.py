"""The variants of the preference loss: for each a function of sums over a pair's tokens -> a loss a pair.

`preference.dpo_loss` makes the sums and says what the options mean. Here Δ is the pair's margin, s = β Δ plus the term in
the lengths, r = β Σ (l − l_ref) the implicit reward of a side, σ the logistic function, w chosen and l rejected.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid
from jaxtyping import Array, Bool, Float, Shaped

from jaxrl_lm.algos.f_divergence import Divergence

Variant = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "sppo_hard", "discopop", "simpo", "cpo", "orpo", "sft",
]  # fmt: skip

# Largest mean log-prob whose odds ORPO takes: above, p is 1 within float32's rounding.
MAX_MEAN_LOGPROB = -1e-6


class Pairs(NamedTuple):
    """What the variants read of a batch; index 0 is chosen, 1 rejected. All 0 for a pair that lacks a side."""

    margin: Float[Array, "N"]  # score of chosen less that of rejected
    scores: Float[Array, "N 2"]  # f′(π/π_ref) of the completion; its log-ratio, unless an f-divergence is chosen
    log_ratios: Float[Array, "N 2"]  # Σ l − l_ref
    logps: Float[Array, "N 2"]  # Σ l
    ref_logps: Float[Array, "N 2"]  # Σ l_ref; 0 without a reference
    lengths: Float[Array, "N 2"]  # tokens
    valid: Bool[Array, "N"]  # both sides have a token


class Options(NamedTuple):
    """The hyperparameters of `dpo_loss`."""

    beta: float = 0.1
    label_smoothing: float = 0.0  # ε, the share of flipped labels
    f_divergence: Divergence = "reverse_kl"  # `divergence_score` in place of the log-ratio
    f_alpha: float = 0.5
    length_alpha: float = 0.0  # α (|w| − |l|) is added to β Δ: R-DPO (Park et al., 2024)
    ld_alpha: float | None = None  # weight of tokens beyond the shorter side's length: LD-DPO (Liu et al., 2024)
    gamma: float = 0.5  # simpo's target margin
    reward_shift: Shaped[Array, ""] | float | None = None  # bco_pair's δ, see `moving_reward_shift`; None is 0
    discopop_tau: float = 0.05
    # What Σ −l of a chosen side is divided by in sft, cpo and orpo: its own number of tokens, or one number for all. The
    # mean chosen length of the global batch makes the mean over pairs a mean over tokens; 1 leaves sums.
    sft_length: Shaped[Array, ""] | float | None = None
    sft_weight: float = 1.0  # of that term in cpo and orpo


def _logit(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    longer = pairs.lengths[:, 0] - pairs.lengths[:, 1]
    return options.beta * pairs.margin + options.length_alpha * longer


def _per_token(x: Float[Array, "N 2"], pairs: Pairs) -> Float[Array, "N 2"]:
    return x / jnp.maximum(pairs.lengths, 1.0)


def _smoothed(logit: Float[Array, "N"], smoothing: float) -> Float[Array, "N"]:
    """−(1 − ε) log σ(s) − ε log σ(−s)."""
    return -(1.0 - smoothing) * log_sigmoid(logit) - smoothing * log_sigmoid(-logit)


def _difference(x: Float[Array, "N 2"]) -> Float[Array, "N"]:
    return x[:, 0] - x[:, 1]


def sigmoid_pair(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """−(1 − ε) log σ(s) − ε log σ(−s). Source: DPO (Rafailov et al., 2023), eq. 7; with ε > 0 cDPO (Mitchell, 2023)."""
    return _smoothed(_logit(pairs, options), options.label_smoothing)


def sigmoid_norm(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """−log σ(β (f_w / |w| − f_l / |l|)), ε as in sigmoid: rewards a token. Source: Tülu 3 (Lambert et al., 2024)."""
    return _smoothed(options.beta * _difference(_per_token(pairs.scores, pairs)), options.label_smoothing)


def hinge(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """max(0, 1 − s). Source: SLiC-HF (Zhao et al., 2023), with DPO's reward as in RSO (Liu et al., 2023)."""
    return jax.nn.relu(1.0 - _logit(pairs, options))


def ipo(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """(f_w / |w| − f_l / |l| − 1 / (2β))². Source: IPO (Azar et al., 2023), eq. 17, whose log-ratios are sums, not means."""
    return jnp.square(_difference(_per_token(pairs.scores, pairs)) - 0.5 / options.beta)


def robust(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """(−(1 − ε) log σ(s) + ε log σ(−s)) / (1 − 2ε): unbiased under flips of rate ε. Source: Chowdhury et al., 2024."""
    # ((1 − ε) f(s) − ε f(−s)) / (1 − 2ε) with f = −log σ, and f(−s) = f(s) + s: no difference of large numbers.
    logit, smoothing = _logit(pairs, options), options.label_smoothing
    return -log_sigmoid(logit) - smoothing / (1.0 - 2.0 * smoothing) * logit


def exo_pair(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """KL([σ(s), σ(−s)] ‖ [1 − ε, ε]), ε > 0. Source: EXO (Ji et al., 2024), eq. 16."""
    logit, smoothing = _logit(pairs, options), options.label_smoothing
    chosen = sigmoid(logit) * (log_sigmoid(logit) - math.log1p(-smoothing))
    return chosen + sigmoid(-logit) * (log_sigmoid(-logit) - math.log(smoothing))


def nca_pair(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """−log σ(r_w) − ½ log σ(−r_w) − ½ log σ(−r_l). Source: NCA (Chen et al., 2024), for two responses."""
    rewards = options.beta * pairs.log_ratios
    return -log_sigmoid(rewards[:, 0]) - 0.5 * jnp.sum(log_sigmoid(-rewards), axis=1)


def bco_pair(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """−log σ(r_w − δ) − log σ(−(r_l − δ)). Source: BCO (Jung et al., 2024); δ is 0 in TRL's DPO."""
    shift = 0.0 if options.reward_shift is None else options.reward_shift
    rewards = options.beta * pairs.log_ratios - shift
    return -log_sigmoid(rewards[:, 0]) - log_sigmoid(-rewards[:, 1])


def aot(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """sigmoid on Δ(π) − Δ(π_ref) of equal rank in the batch, Δ(p) = log p_w − log p_l. Source: AOT (Melnyk et al., 2024)."""
    return _transport(_difference(pairs.logps), _difference(pairs.ref_logps), pairs.valid, options)


def aot_unpaired(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """sigmoid on Σ_w (l − l_ref) less the Σ_l (l − l_ref) of equal rank in the batch. Source: AOT (Melnyk et al., 2024)."""
    return _transport(pairs.log_ratios[:, 0], pairs.log_ratios[:, 1], pairs.valid, options)


def _transport(
    upper: Float[Array, "N"], lower: Float[Array, "N"], valid: Bool[Array, "N"], options: Options
) -> Float[Array, "N"]:
    """The smoothed loss of each row's `upper` less the `lower` of the same rank; rows that abstain rank last in both."""
    last = jnp.asarray(jnp.inf, upper.dtype)
    ranks = jnp.argsort(jnp.argsort(jnp.where(valid, upper, last)))
    partner = jnp.where(valid, jnp.sort(jnp.where(valid, lower, last))[ranks], 0.0)
    return _smoothed(options.beta * jnp.where(valid, upper - partner, 0.0), options.label_smoothing)


def apo_zero(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """1 − σ(r_w) + σ(r_l). Source: APO (D'Oosterlinck et al., 2024), eq. 7, plus 1."""
    rewards = options.beta * pairs.log_ratios
    return sigmoid(-rewards[:, 0]) + sigmoid(rewards[:, 1])


def apo_down(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """σ(r_w) + 1 − σ(r_w − r_l). Source: APO (D'Oosterlinck et al., 2024), eq. 8, plus 1."""
    return sigmoid(options.beta * pairs.log_ratios[:, 0]) + sigmoid(-options.beta * _difference(pairs.log_ratios))


def sppo_hard(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """(g_w − 1/(2β))² + (g_l + 1/(2β))², g = r / β. Source: SPPO (Wu et al., 2024), eq. 4.7 with P = 1 and 0, η = 1/β."""
    target = 0.5 / options.beta
    return jnp.square(pairs.log_ratios[:, 0] - target) + jnp.square(pairs.log_ratios[:, 1] + target)


def discopop(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """−log σ(s) (1 − σ(s/τ)) + e^−s σ(s/τ). Source: DiscoPOP (Lu et al., 2024), eq. 5."""
    logit = _logit(pairs, options)
    scaled = logit / options.discopop_tau
    # e^−s σ(s/τ) as one exponential: its exponent is never above 0 for τ <= 1, where e^−s alone would overflow.
    return -log_sigmoid(logit) * sigmoid(-scaled) + jnp.exp(log_sigmoid(scaled) - logit)


def simpo(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """−log σ(β (Σ_w l / |w| − Σ_l l / |l|) − γ), ε as in sigmoid. Source: SimPO (Meng et al., 2024), eq. 6."""
    logit = options.beta * _difference(_per_token(pairs.logps, pairs)) - jnp.where(pairs.valid, options.gamma, 0.0)
    return _smoothed(logit, options.label_smoothing)


def cpo(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """−log σ(β (Σ_w l − Σ_l l)) + sft_weight · sft, ε as in sigmoid. Source: CPO (Xu et al., 2024); its sft is a sum."""
    preference = _smoothed(options.beta * _difference(pairs.logps), options.label_smoothing)
    return preference + options.sft_weight * sft(pairs, options)


def orpo(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """sft_weight · sft − β log σ(log odds_w − log odds_l), odds = p / (1 − p), log p the mean l; β is the paper's λ.

    Source: ORPO (Hong et al., 2024), eq. 6 and 7.
    """
    logp = jnp.minimum(_per_token(pairs.logps, pairs), MAX_MEAN_LOGPROB)
    log_odds = logp - jnp.log(-jnp.expm1(logp))
    return options.sft_weight * sft(pairs, options) - options.beta * log_sigmoid(_difference(log_odds))


def sft(pairs: Pairs, options: Options) -> Float[Array, "N"]:
    """Σ_w −l over the number of its tokens, or sft_length. Source: MPO's generation loss (Wang et al., 2024)."""
    length = jnp.maximum(pairs.lengths[:, 0], 1.0) if options.sft_length is None else options.sft_length
    return -pairs.logps[:, 0] / length


LOSSES: dict[str, Callable[[Pairs, Options], Float[Array, "N"]]] = {
    "sigmoid": sigmoid_pair, "sigmoid_norm": sigmoid_norm, "hinge": hinge, "ipo": ipo, "robust": robust,
    "exo_pair": exo_pair, "nca_pair": nca_pair, "bco_pair": bco_pair, "aot": aot, "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero, "apo_down": apo_down, "sppo_hard": sppo_hard, "discopop": discopop, "simpo": simpo,
    "cpo": cpo, "orpo": orpo, "sft": sft,
}  # fmt: skip

_ON_MARGIN = ("sigmoid", "hinge", "robust", "exo_pair", "discopop")

# Which variants read an option that changes nothing at its default. Given to another variant it is refused.
READERS: dict[str, tuple[str, ...]] = {
    "label_smoothing": ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired", "simpo", "cpo"),
    "f_divergence": (*_ON_MARGIN, "sigmoid_norm", "ipo"),
    "length_alpha": _ON_MARGIN,
    "ld_alpha": tuple(name for name in LOSSES if name not in ("simpo", "cpo", "orpo", "sft")),
    "reward_shift": ("bco_pair",),
    "sft_length": ("cpo", "orpo", "sft"),
}
