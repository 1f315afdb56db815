"""Returns and advantages of tokens, or of larger actions, along a row: rewards-to-go, GAE, where a reward is paid.

Only tokens under the mask belong to actions; what lies between them (tool output) is skipped, and nothing is read there.
Actions: `actions.py`. Advantages within the group of a prompt: `advantages.py`, `process.py`.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jaxrl_lm import masked
from jaxrl_lm.algos.actions import Ids, action_sizes, action_starts, action_sum, before, from_start, sequence_ids

DiscountPer = Literal["action", "token"]


def last_heads(heads: Bool[Array, "N T"], segment_ids: Ids) -> tuple[Bool[Array, "N T"], Bool[Array, "N T"]]:
    """Of the first tokens of actions: the last one of each sequence, and the last one of each row."""
    flipped = jnp.flip(heads, 1)
    of_sequence = action_starts(flipped, jnp.flip(sequence_ids(heads, segment_ids), 1))
    of_row = flipped & (before(flipped) < 0)
    return jnp.flip(of_sequence, 1), jnp.flip(of_row, 1)


def accumulate(
    terms: Float[Array, "N T"], factors: Float[Array, "N T"], heads: Bool[Array, "N T"], last: Bool[Array, "N T"]
) -> Float[Array, "N T"]:
    """At each head x = term + factor · x of the next head, without the second part at the last head of a sequence."""

    def step(after, column):
        term, factor, head, end = column
        here = term + jnp.where(end, 0.0, factor * jnp.where(end, 0.0, after))
        after = jnp.where(head, here, after)
        return after, after

    columns = jax.tree.map(lambda x: x.T, (terms, factors, heads, last))
    return jax.lax.scan(step, jnp.zeros_like(terms[:, 0]), columns, reverse=True)[1].T


def discounts(
    mask: Bool[Array, "N T"], discount: float, discount_per: str, action_ids: Ids, segment_ids: Ids, dtype
) -> Float[Array, "N T"]:
    """The factor between an action and the next one: the discount, or its power of the action's tokens."""
    if discount_per not in ("action", "token"):
        raise ValueError(f"discount_per={discount_per!r} is unknown: use action or token")
    factors = jnp.full(mask.shape, discount, dtype)
    if discount_per == "action" or action_ids is None:
        return factors
    sizes = action_sizes(mask, action_ids, segment_ids).astype(dtype)
    return jnp.where(sizes > 1, factors**sizes, factors)


def returns_to_go(
    rewards: Shaped[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    discount: float = 1.0,
    segment_ids: Ids = None,
    action_ids: Ids = None,
    discount_per: DiscountPer = "action",
) -> Float[Array, "N T"]:
    """At each token of an action the rewards from that action on: G_a = r_a + γ G_next; 0 off the mask.

    r_a is the sum over the action's tokens. γ is the discount, or with discount_per="token" its power of the number of
    the action's tokens (as for options: Sutton, Precup and Singh, 1999). Rewards off the mask are ignored. Sums of one
    sequence never reach another of a packed row. Source: Sutton and Barto, 2018, eq. 3.9.

    Raises ValueError for an unknown discount_per.
    """
    paid = action_sum(rewards, mask, action_ids, segment_ids)
    heads = action_starts(mask, action_ids, segment_ids)
    factors = discounts(mask, discount, discount_per, action_ids, segment_ids, paid.dtype)
    found = accumulate(paid, factors, heads, last_heads(heads, segment_ids)[0])
    return from_start(found, mask, action_ids, segment_ids)


def gae(
    rewards: Shaped[Array, "N T"],
    values: Shaped[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    discount: float = 1.0,
    lam: float = 0.95,
    bootstrap: Shaped[Array, "N"] | None = None,
    segment_ids: Ids = None,
    action_ids: Ids = None,
    discount_per: DiscountPer = "action",
) -> tuple[Float[Array, "N T"], Float[Array, "N T"]]:
    """(advantages, targets) of each token, both those of its action and 0 off the mask.

    δ_a = r_a + γ V_next − V_a,  A_a = δ_a + γ λ A_next,  target_a = A_a + V_a (the λ-return), with V the value of the
    state before the action, read at its first token. The next action is the next one under the mask, across a hole.
    After the last action of a row stands bootstrap[N] (None: 0), after that of an earlier sequence of a packed row 0.
    λ = 0 is the one-step TD error, λ = 1 the return-to-go minus the value. Nothing is stopped: stop gradients outside.
    Source: GAE (Schulman et al., 2016), eq. 16. Departs: actions may have several tokens (see `returns_to_go`), and γ is
    its power where discount_per="token", λ never.

    Raises ValueError for an unknown discount_per.
    """
    heads = action_starts(mask, action_ids, segment_ids)
    last, last_of_row = last_heads(heads, segment_ids)
    dtype = jnp.promote_types(jnp.promote_types(rewards.dtype, values.dtype), jnp.float32)
    paid = action_sum(rewards, mask, action_ids, segment_ids).astype(dtype)
    value = masked.select(values, heads).astype(dtype)
    end = jnp.zeros(mask.shape[:1], dtype) if bootstrap is None else bootstrap.astype(dtype)
    following = mask.shape[1] - 1 - jnp.flip(before(jnp.flip(heads, 1)), 1)  # T where there is none
    after = jnp.take_along_axis(value, jnp.minimum(following, mask.shape[1] - 1), axis=1)
    after = jnp.where(last, jnp.where(last_of_row, end[:, None], 0.0), after)
    factors = discounts(mask, discount, discount_per, action_ids, segment_ids, dtype)
    errors = masked.select(paid + factors * after - value, heads)
    found = accumulate(errors, lam * factors, heads, last)
    spread = lambda x: from_start(x, mask, action_ids, segment_ids)
    return spread(found), spread(masked.select(found + value, heads))


def token_rewards(
    returns: Shaped[Array, "N"], mask: Bool[Array, "N T"], *, valid: Bool[Array, "N"] | None = None
) -> Float[Array, "N T"]:
    """Each row's return paid on its last action token, 0 elsewhere; nothing for rows without one or not valid."""
    last = last_heads(mask, None)[1]
    last = last if valid is None else last & valid[:, None]
    return masked.select(jnp.broadcast_to(returns[:, None], mask.shape), last)
