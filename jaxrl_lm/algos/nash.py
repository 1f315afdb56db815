"""Preferences that no reward explains: advantages from pairwise comparisons, INPO's loss, and steps of tabular games.

preference[i, j] is P(i ≻ j). The regularised game of two players, P(π ≻ π′) − τ KL(π ‖ ref) + τ KL(π′ ‖ ref), has one
equilibrium, π ∝ π_ref exp(P(· ≻ π) / τ), whatever cycles the preference has. `examples/preference_game.py` plays it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jaxrl_lm import masked
from jaxrl_lm.algos.preference import whole_pairs


def pairwise_advantages(preference: Float[Array, "n n"]) -> Float[Array, "n"]:
    """The mean of P(i ≻ j) over the others of the group, less ½; 0 for a group of one. The diagonal is not read.

    An unbiased estimate of P(y ≻ π) − ½ where the group are samples of π; with P(i ≻ j) + P(j ≻ i) = 1 they sum to 0.
    Source: SPO (Swamy et al., 2024), whose reward is the win rate within the group.
    """
    return masked.mean(preference - 0.5, ~jnp.eye(preference.shape[0], dtype=bool), axis=1)


def inpo_loss(
    logprobs: Float[Array, "N 2 T"],
    ref_logprobs: Float[Array, "N 2 T"],
    old_logprobs: Float[Array, "N 2 T"],
    mask: Bool[Array, "N 2 T"],
    *,
    eta: float,
    tau: float,
) -> Float[Array, "N"]:
    """(h − 1 / (2η))² of each pair, h = Δ(π) − (τ/η) Δ(π_ref) − (1 − τ/η) Δ(π_t), Δ(p) = Σ_w log p − Σ_l log p.

    The pairs are two samples of π_t (`old_logprobs`), ordered by one draw of the preference. Its minimum over many is the
    next policy, π_ref^(τ/η) π_t^(1−τ/η) exp(P(· ≻ π_t) / η), normalised: online mirror descent with step 1/η on the game of
    strength τ. Source: INPO (Zhang et al., 2024). A pair that lacks a side has h = 0 and gradient 0.
    Raises ValueError unless 0 <= tau <= eta and eta > 0.
    """
    if not 0 <= tau <= eta or eta <= 0:
        raise ValueError(f"eta={eta}, tau={tau}: need 0 <= tau <= eta, and eta above 0")
    inside = mask & whole_pairs(mask)[:, None, None]
    share = tau / eta
    anchor = share * masked.select(ref_logprobs, inside) + (1.0 - share) * masked.select(old_logprobs, inside)
    gaps = masked.select(logprobs, inside) - anchor
    return jnp.square(jnp.sum(gaps[:, 0] - gaps[:, 1], axis=1) - 0.5 / eta)


def regularised_step(
    logits: Float[Array, "K"],
    opponent: Float[Array, "K"],
    ref_logits: Float[Array, "K"],
    preference: Float[Array, "K K"],
    *,
    step_size: Shaped[Array, ""] | float,
    tau: float,
) -> Float[Array, "K"]:
    """Log-probs of π^(1−ητ) π_ref^(ητ) exp(η P(· ≻ opponent)), normalised; all three given as logits, η = step_size.

    The mirror step of the regularised game against a fixed opponent, 0 < η τ <= 1.
    """
    mixed = (1.0 - step_size * tau) * jax.nn.log_softmax(logits) + step_size * tau * jax.nn.log_softmax(ref_logits)
    return jax.nn.log_softmax(mixed + step_size * (preference @ jax.nn.softmax(opponent)))


def nash_md_step(
    logits: Float[Array, "K"],
    ref_logits: Float[Array, "K"],
    preference: Float[Array, "K K"],
    *,
    step_size: Shaped[Array, ""] | float,
    tau: float,
) -> Float[Array, "K"]:
    """The next policy's log-probs: a mirror step against the mixture π^(1−ητ) π_ref^(ητ), which it also starts from.

    With η_t = 2 / (τ (t + 2)), t from 0, the last iterate reaches the regularised equilibrium: KL <= 8 / (τ² (T + 1)).
    Source: Nash-MD (Munos et al., 2023), theorem 1.
    """
    mixture = (1.0 - step_size * tau) * jax.nn.log_softmax(logits) + step_size * tau * jax.nn.log_softmax(ref_logits)
    return regularised_step(logits, mixture, ref_logits, preference, step_size=step_size, tau=tau)


def extragradient_step(
    logits: Float[Array, "K"],
    ref_logits: Float[Array, "K"],
    preference: Float[Array, "K K"],
    *,
    step_size: Shaped[Array, ""] | float,
    tau: float,
) -> Float[Array, "K"]:
    """The next policy's log-probs: a step against where a first step from here leads.

    With a constant step size the distance to the regularised equilibrium shrinks by a factor a step, about 1 − ητ.
    Source: EGPO (Zhou et al., 2025), with the updates of Cen et al., 2021.
    """
    ahead = regularised_step(logits, logits, ref_logits, preference, step_size=step_size, tau=tau)
    return regularised_step(logits, ahead, ref_logits, preference, step_size=step_size, tau=tau)
