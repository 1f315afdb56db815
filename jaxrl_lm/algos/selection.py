"""Using scores without training: best-of-n, votes, beams; what best-of-n is worth and how far it is from the policy.

P prompts, n candidates each. `valid` [P n] is False where there is no candidate. A NaN score is the caller's to refuse;
here it is the worst. Where scores come from: `reward_losses.py`; credit of steps in one score: `process.py`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_lm import masked

Candidates = Bool[Array, "P n"] | None


def beam_step(scores: Shaped[Array, "P n"], *, width: int, valid: Candidates = None) -> Int[Array, "P width"]:
    """The indices of the `width` best candidates of each prompt, best first; of equal ones the first. −1: there is none.

    A step of beam search guided by a process reward model: n = width · w candidates, the w continuations by one step of
    each beam lying side by side, so that index // w is the beam that goes on. A finished beam is a single candidate with
    the score that it has. Source: Snell et al., 2024, section 5.2, beam search.

    Raises ValueError for a width below 1 or above n.
    """
    if not 1 <= width <= scores.shape[1]:
        raise ValueError(f"width={width}: between 1 and the {scores.shape[1]} candidates of a prompt")
    valid = jnp.ones(scores.shape, bool) if valid is None else valid
    # Stable; the last key decides first, so that a valid −inf comes before what is not there.
    order = jnp.lexsort((-masked.select(scores, valid), ~valid), axis=1)[:, :width]
    return jnp.where(jnp.take_along_axis(valid, order, axis=1), order, -1)


def best_of_n(scores: Shaped[Array, "P n"], *, valid: Candidates = None) -> Int[Array, "P"]:
    """The index of the best candidate of each prompt; of equal ones the first. −1: there is none."""
    return beam_step(scores, width=1, valid=valid)[:, 0]


def weighted_majority(
    answers: Int[Array, "P n"], weights: Shaped[Array, "P n"] | None = None, *, valid: Candidates = None
) -> Int[Array, "P"]:
    """The answer of each prompt whose candidates have the largest total weight; of equal ones the first. −1: none.

    answers are ids, at least 0: candidates with the same final answer share one. Weights are scores of candidates, such
    as the chance that a verifier gives; None is majority voting. With negative scores more votes would count less.
    Source: self-consistency (Wang et al., 2022); weighted by a verifier: Li et al., 2022.
    """
    valid = jnp.ones(answers.shape, bool) if valid is None else valid
    weights = jnp.ones(answers.shape) if weights is None else weights
    weights = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))
    same = (answers[:, :, None] == answers[:, None, :]) & valid[:, None, :]
    index = best_of_n(jnp.sum(jnp.where(same, weights[:, None, :], 0.0), axis=2), valid=valid)
    chosen = jnp.take_along_axis(answers, jnp.maximum(index, 0)[:, None], axis=1)[:, 0]
    return jnp.where(index >= 0, chosen, -1)


def expected_best_of_n(
    scores: Shaped[Array, "P n"], *, k: int, values: Shaped[Array, "P n"] | None = None
) -> Float[Array, "P"]:
    """The mean, over all subsets of k of the n candidates, of the value of the subset's best by score.

    Σ_i C(i−1, k−1) / C(n, k) · value of the i-th in ascending order of score: unbiased for best-of-k from n samples, with
    k = 1 the mean and k = n the best. Values are the scores themselves, or another measure such as the gold reward of
    candidates that a proxy ranks, or whether they are right: how a reward model is to be judged. Equal scores share the
    mean of their values, as if one of them was drawn. With values of 0 and 1 ranked by themselves it is `pass_at_k`.
    Source: order statistics; Chen et al., 2021, eq. 1, is the case of 0 and 1.

    Raises ValueError unless 1 ≤ k ≤ n.
    """
    n = scores.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: best-of-k from {n} candidates needs 1 <= k <= {n}")
    # From the best down, C(i−2, k−1) / C(i−1, k−1) = (i − k) / (i − 1) each time; in float64, as n may be thousands.
    rank = np.arange(n, 1, -1)
    weights = np.cumprod(np.concatenate([[k / n], np.maximum(rank - k, 0) / (rank - 1)]))[::-1]
    values = scores if values is None else values
    order = jnp.argsort(scores, axis=1)
    ordered = jnp.take_along_axis(scores, order, axis=1)
    values = jnp.take_along_axis(values, order, axis=1)
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    rises = jnp.pad(ordered[:, 1:] != ordered[:, :-1], ((0, 0), (1, 0)))
    share = jax.vmap(_tie_means)(values, jnp.cumsum(rises, axis=1))
    return share @ jnp.asarray(weights, share.dtype)


def _tie_means(values: Float[Array, "n"], tie: Int[Array, "n"]) -> Float[Array, "n"]:
    """At each value the mean of those with its number."""
    total = lambda x: jax.ops.segment_sum(x, tie, num_segments=values.shape[0])
    return (total(values) / jnp.maximum(total(jnp.ones_like(values)), 1.0))[tie]


def best_of_n_kl(n: int) -> float:
    """log n − (n − 1) / n: KL(best-of-n ‖ policy) where no two samples have the same score, else an upper bound.

    Source: Stiennon et al., 2020, appendix G.3; the bound: Beirami et al., 2024. Raises ValueError for n below 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: best-of-n needs a sample")
    return math.log(n) - (n - 1) / n
