"""What a step is worth: labels from completions, rewards that cannot be farmed by writing more steps, implicit rewards.

N rows, T columns; a step ends at its last token, where `step_ends` holds under the mask. Losses on labels:
`reward_losses.py`. Advantages from rewards of steps: `process.py`, which reads what is made here.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_lm import masked
from jaxrl_lm.algos.actions import Ids, action_starts, action_sum, before
from jaxrl_lm.algos.returns import DiscountPer, gae

Label = Literal["soft", "hard", "log-mean-exp"]


def monte_carlo_labels(
    successes: Shaped[Array, "*s n"],
    *,
    kind: Label = "soft",
    beta: float | None = None,
    threshold: float = 0.5,
    valid: Bool[Array, "*s n"] | None = None,
) -> Float[Array, "*s"]:
    """A label for each step from the outcomes of n completions that go on from it; NaN for a step without a valid one.

    soft: the mean outcome. hard: 1 if any outcome reaches the threshold, else 0. log-mean-exp: β log mean_i exp(r_i / β),
    which goes to the best outcome as β → 0 and to the mean as β → ∞. With outcomes of 0 and 1 that are 1 with chance v
    (the value of the step under the policy that completes), soft labels have the mean v: they are unbiased; hard ones
    have 1 − (1 − v)^n (`expected_hard_label`), which tells a good step from a lucky one the less, the larger n.
    Source: hard and soft estimation of Math-Shepherd (Wang et al., 2024); log-mean-exp: "Free Process Rewards without
    Process Labels" (Yuan et al., 2024), the value of a step to an implicit reward model, which lies between the two.

    Raises ValueError for an unknown kind, and unless log-mean-exp, and it alone, has a beta above 0.
    """
    if kind not in get_args(Label):
        raise ValueError(f"kind={kind!r} is unknown: use {', '.join(get_args(Label))}")
    if (kind == "log-mean-exp") != (beta is not None) or (beta is not None and not beta > 0):
        raise ValueError(f"kind={kind!r}, beta={beta}: log-mean-exp needs a beta above 0, the others have none")
    valid = jnp.ones(successes.shape, bool) if valid is None else valid
    some = jnp.any(valid, axis=-1)
    if kind == "soft":
        label = masked.mean(successes, valid, -1)
    elif kind == "hard":
        label = jnp.any(valid & (successes >= threshold), axis=-1).astype(jnp.float32)
    else:
        top = jnp.max(masked.select(successes, valid, -jnp.inf), axis=-1)
        gap = masked.select(successes - jnp.where(some, top, 0.0)[..., None], valid)
        share = masked.mean(jnp.exp(gap / beta), valid, -1)
        label = top + beta * jnp.log(jnp.where(some, share, 1.0))
    return jnp.where(some, label, jnp.nan)


def expected_hard_label(values: Shaped[Array, "*s"], *, samples: int) -> Float[Array, "*s"]:
    """1 − (1 − v)^n: the mean of the hard label of n completions of a step of value v."""
    return -jnp.expm1(samples * jnp.log1p(-values))


# --- rewards of steps -------------------------------------------------------------------------------------------------


def step_ids(step_ends: Bool[Array, "N T"], mask: Bool[Array, "N T"]) -> Int[Array, "N T"]:
    """The number of each token's step, from 1: `action_ids` that make a step one action. Packed rows count on.

    Tokens after the last end have the next number.
    """
    ends = (step_ends & mask).astype(jnp.int32)
    return jnp.cumsum(ends, axis=1) - ends + 1


def step_counts(step_ends: Bool[Array, "N T"], mask: Bool[Array, "N T"]) -> Int[Array, "N"]:
    """The steps of each row. Where they rise with the reward, look: `reward_losses.moments` of both, `correlation`."""
    return jnp.sum(step_ends & mask, axis=1)


def normalise_step_rewards(
    step_rewards: Shaped[Array, "N T"], step_ends: Bool[Array, "N T"], mask: Bool[Array, "N T"]
) -> Float[Array, "N T"]:
    """Each step's reward over the number of steps of its row, so that a row is paid their mean; 0 off the ends.

    A plain sum of scores above 0 pays for every further step, whatever it says. The mean does not: a step of the mean
    score adds nothing, and one that is cut in two equal ones is paid the same. (A constant taken off each step would
    leave every step above it to be repeated.) What it leaves open: trivial steps of high scores dilute a poor one. The
    credits "min" and "product" of `process_advantages` and `potential_shaping` cannot be raised by steps at all.
    """
    ends = step_ends & mask
    return masked.select(step_rewards, ends) / jnp.maximum(jnp.sum(ends, axis=1, keepdims=True), 1)


def potential_shaping(
    potentials: Shaped[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    discount: float = 1.0,
    segment_ids: Ids = None,
    action_ids: Ids = None,
    discount_per: DiscountPer = "action",
) -> Float[Array, "N T"]:
    """γ Φ(s′) − Φ(s) at the first token of each action, to be added to its reward; 0 elsewhere.

    potentials[n, t] is Φ of the state before token t, as values are (a critic, or `step_potentials` of a process reward
    model); s′ is the state before the next action under the mask, and Φ is 0 after the last one of a sequence. With that 0
    the shaping to come, Σ_k γ^k F_{t+k}, is −Φ(s_t): it depends on no action from t on, so that returns-to-go discounted
    by the same γ keep their expected gradient and every order of policies, however wrong Φ is. Actions and γ are those
    of `returns_to_go`; action_ids=None: each token is one.
    Source: Ng, Harada and Russell, 1999, theorem 1; the 0 at the end: Grześ, 2017.
    """
    actions = {"segment_ids": segment_ids, "action_ids": action_ids}
    nothing = jnp.zeros(mask.shape, jnp.float32)
    errors, _ = gae(nothing, potentials, mask, discount=discount, lam=0.0, discount_per=discount_per, **actions)
    return masked.select(errors, action_starts(mask, **actions))


def step_potentials(
    scores: Shaped[Array, "N T"],
    step_ends: Bool[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    start: float = 0.0,
    segment_ids: Ids = None,
) -> Float[Array, "N T"]:
    """Φ of the state before each token: the score of the last step that ended before it, `start` before the first end.

    For `potential_shaping`: with γ = 1 it then pays each step, at its last token, its score minus that of the step before,
    and the last tokens what brings the sum to −start. 0 off the mask.
    """
    ends = step_ends & mask
    last = before(ends)
    at = jnp.maximum(last, 0)
    ended = last >= 0
    if segment_ids is not None:
        ended = ended & (jnp.take_along_axis(segment_ids, at, axis=1) == segment_ids)
    found = jnp.take_along_axis(masked.select(scores, ends), at, axis=1)
    return masked.select(jnp.where(ended, found, start), mask)


def implicit_process_rewards(
    logprobs: Float[Array, "N T"],
    ref_logprobs: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    beta: float,
    step_ends: Bool[Array, "N T"] | None = None,
    segment_ids: Ids = None,
) -> Float[Array, "N T"]:
    """β (log π_φ − log π_ref) at each token; with step_ends the sum over each step at its last token; 0 elsewhere.

    π_φ is a language model whose sum over the whole completion was trained to be the logit of its outcome
    (`outcome_loss` of `implicit_outcome_logits`); then the sum up to a token is the value of that prefix, and these are
    its differences. Tokens after the last end are in no step. The log-probs are those of the reward model, not of the
    policy. Source: Yuan et al., 2024; trained on the policy's own samples as it goes: PRIME (Cui et al., 2025).
    """
    gain = beta * (masked.select(logprobs, mask) - masked.select(ref_logprobs, mask))
    if step_ends is None:
        return masked.select(gain, mask)
    return masked.select(action_sum(gain, mask, step_ids(step_ends, mask), segment_ids), step_ends & mask)


def implicit_outcome_logits(
    logprobs: Float[Array, "N T"], ref_logprobs: Float[Array, "N T"], mask: Bool[Array, "N T"], *, beta: float
) -> Float[Array, "N"]:
    """β Σ_t (log π_φ − log π_ref) of each row: what PRIME trains by cross-entropy to the outcome, and ranks rows by.

    Source: PRIME (Cui et al., 2025).
    """
    return jnp.sum(implicit_process_rewards(logprobs, ref_logprobs, mask, beta=beta), axis=1)
