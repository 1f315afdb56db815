"""Advantages of whole completions, mostly within the group of one prompt. N rows, a group's rows adjacent.

`valid[N]` False is a row whose rewards abstained: it leaves every statistic and gets 0. Advantages of tokens, from
rewards inside a completion -> `returns.py`, `process.py`; which groups stay in the batch -> `groups.py`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jaxrl_lm import masked
from jaxrl_lm.algos.groups import Scale, Valid, as_groups, normalise


def group_advantages(
    returns: Shaped[Array, "N"],
    *,
    group_size: int,
    scale: Scale = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    valid: Valid = None,
) -> Shaped[Array, "N"]:
    """Return minus its group's mean, over a standard deviation.

    A_i = (r_i − mean_group r) / (std r + eps), the std over the group, over the batch, or none (Dr. GRPO).

    A group without spread gets 0. Rows that are not valid (the reward abstained) leave mean and std, and get 0.
    Source: DeepSeekMath (Shao et al., 2024), eq. for outcome supervision; `scale="none"`: Dr. GRPO (Liu et al., 2025).
    The std is the unbiased one, as in TRL and verl; the paper does not say.

    Raises ValueError if group_size is below 2 or does not divide N, or for an unknown scale.
    """
    grouped, inside = as_groups(returns, group_size=group_size, valid=valid, least=2)
    return normalise(grouped, inside, scale=scale, ddof=ddof, eps=eps).reshape(-1)


def leave_one_out_advantages(
    returns: Shaped[Array, "N"], *, group_size: int, valid: Valid = None
) -> Shaped[Array, "N"]:
    """Return minus the mean of the other valid rows of its group: A_i = r_i − Σ_{j≠i} r_j / (n − 1).

    The baseline does not look at row i, so the gradient is unbiased. A row that is alone in its group gets 0.
    Source: RLOO (Ahmadian et al., 2024), eq. 6; Kool et al., 2019. Computed as n / (n − 1) times the centred return,
    which is the same: a large common offset then costs no precision.

    Raises ValueError if group_size is below 2 or does not divide N.
    """
    grouped, inside = as_groups(returns, group_size=group_size, valid=valid, least=2)
    count = inside.sum(1, keepdims=True)
    centred = normalise(grouped, inside, scale="none")
    return (centred * count / jnp.maximum(count - 1, 1)).reshape(-1)


def greedy_baseline_advantages(
    returns: Shaped[Array, "N"], greedy_returns: Shaped[Array, "N"], *, valid: Valid = None
) -> Shaped[Array, "N"]:
    """Return minus the return of the greedy completion of the same prompt: A_i = r_i − r_greedy.

    `greedy_returns` stands once a row. The baseline does not look at row i, so the gradient is unbiased.
    Source: ReMax (Li et al., 2023), eq. 3. Departs: where the greedy completion's reward abstained, the row is not valid.
    """
    mask = jnp.ones(returns.shape, bool) if valid is None else valid
    return masked.select(returns, mask) - masked.select(greedy_returns, mask)


def constant_baseline_advantages(
    returns: Shaped[Array, "N"], *, baseline: float = 0.0, valid: Valid = None
) -> Shaped[Array, "N"]:
    """Return minus a constant: A_i = r_i − b. Source: REINFORCE (Williams, 1992), section 4."""
    mask = jnp.ones(returns.shape, bool) if valid is None else valid
    return masked.select(masked.select(returns, mask) - baseline, mask)


def batch_whitened_advantages(
    rewards_to_go: Shaped[Array, "N T"], mask: Bool[Array, "N T"], *, eps: float = 1e-8, valid: Valid = None
) -> Float[Array, "N T"]:
    """Reward-to-go of each token, whitened over all tokens of the batch: (x − mean) / (std + eps); 0 off the mask.

    The batch is the global one: call it before the batch is cut. Equal values give exactly 0.
    Source: REINFORCE++ (Hu, 2025), section on advantage normalisation; the std is the unbiased one, as in verl.
    """
    return masked.whiten(rewards_to_go, mask if valid is None else mask & valid[:, None], eps=eps)


def max_rl_advantages(returns: Shaped[Array, "N"], *, group_size: int, valid: Valid = None) -> Shaped[Array, "N"]:
    """Return minus its group's mean, over that mean: A_i = (r_i − r̄) / r̄; 0 where the mean is 0 or all are equal.

    Returns must not be negative. With returns of 0 and 1 and success rate p it estimates the gradient of log p (maximum
    likelihood), its series Σ (1 − p)^k ∇p cut after G − 1 terms, instead of the gradient of p.
    Source: MaxRL (Tajwar et al., 2026). Departs: no eps beside the mean.

    Raises ValueError if group_size is below 1 or does not divide N.
    """
    grouped, inside = as_groups(returns, group_size=group_size, valid=valid)
    mean = masked.mean(grouped, inside, 1, keepdims=True)
    nothing = mean <= 0  # asked this way round, a NaN shows
    centred = jnp.where(nothing, 0.0, normalise(grouped, inside, scale="none"))
    return (centred / jnp.where(nothing, 1.0, mean)).reshape(-1)


def pass_at_k_advantages(
    returns: Shaped[Array, "N"], *, group_size: int, k: int, threshold: float = 0.5, valid: Valid = None
) -> Shaped[Array, "N"]:
    """Advantages whose reward is that of a random subset of k rows of the group: 1 if any of them is right.

    With n valid rows, c of them right, R = 1 − C(n−c, k) / C(n, k), σ = √(R (1 − R)): right rows get (1 − R) / σ, wrong
    ones (1 − R − C(n−c−1, k−1) / C(n−1, k−1)) / σ; all get 0 where σ is 0 or n < k. k = 1 is GRPO with the population
    std. Source: pass@k training (Chen et al., 2025), analytical derivation. Departs: no eps beside σ. Computed with
    q = Π_{0<i<k} (n−c−i) / (n−i): 1 − R = q (n−c) / n and the wrong rows' numerator is −q c / n, without cancellation.

    Raises ValueError unless 1 ≤ k ≤ group_size and group_size divides N.
    """
    if not 1 <= k <= group_size:
        raise ValueError(f"k={k}: a subset has between 1 and group_size={group_size} rows")
    grouped, inside = as_groups(returns, group_size=group_size, valid=valid)
    right = inside & (grouped >= threshold)
    dtype = jnp.promote_types(returns.dtype, jnp.float32)
    n, c = (mask.sum(1, keepdims=True).astype(dtype) for mask in (inside, right))
    i = jnp.arange(1, k, dtype=dtype)[None, :]
    q = jnp.prod(jnp.maximum(n - c - i, 0.0) / jnp.maximum(n - i, 1.0), axis=1, keepdims=True)
    fail = q * (n - c) / jnp.maximum(n, 1.0)
    variance = jnp.where(n >= k, fail * (1.0 - fail), 0.0)
    above = jnp.where(right, fail, -q * c / jnp.maximum(n, 1.0))
    return jnp.where(inside & (variance > 0), above / jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0).reshape(-1)


def accepted_advantages(
    returns: Shaped[Array, "N"], *, threshold: float = 0.5, valid: Valid = None
) -> Shaped[Array, "N"]:
    """1 for rows whose return reaches the threshold, 0 for the others: the gradient is that of SFT on what passed.

    Source: RAFT (Dong et al., 2023), rejection sampling fine-tuning. Departs: it keeps what reaches a threshold (RAFT
    keeps the best of each group), and a mean over tokens then counts the rejected ones too, unless `valid` leaves them.
    """
    mask = jnp.ones(returns.shape, bool) if valid is None else valid
    return (mask & (returns >= threshold)).astype(jnp.promote_types(returns.dtype, jnp.float32))
