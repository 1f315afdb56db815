"""Actions larger than tokens: tokens of a row that share an id are one action (an n-gram, a step, a turn, the whole).

`action_ids=None` is the token case; ids that count the tokens are the same, bit for bit. Only tokens under the mask
belong to actions, so that an action may have holes (tool output); a new segment of a packed row starts a new action.
Ids are read along the row: an id that comes back after another one is a new action.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_lm import masked

Ids = Int[Array, "N T"] | None


def before(mask: Bool[Array, "N T"]) -> Int[Array, "N T"]:
    """The column of the last token under the mask before each column; −1 where there is none."""
    columns = jnp.where(mask, jnp.arange(mask.shape[1]), -1)
    return jnp.pad(jax.lax.cummax(columns, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def action_starts(mask: Bool[Array, "N T"], action_ids: Ids = None, segment_ids: Ids = None) -> Bool[Array, "N T"]:
    """True at the first token of each action."""
    if action_ids is None:
        return mask
    last = before(mask)
    differs = lambda ids: jnp.take_along_axis(ids, jnp.maximum(last, 0), axis=1) != ids
    new = (last < 0) | differs(action_ids)
    return mask & (new if segment_ids is None else new | differs(segment_ids))


def action_sum(
    x: Shaped[Array, "N T"], mask: Bool[Array, "N T"], action_ids: Ids = None, segment_ids: Ids = None
) -> Float[Array, "N T"]:
    """At each token the total of x over its action; 0 off the mask."""
    x = masked.select(x, mask)
    if action_ids is None:
        return x
    number = jnp.cumsum(action_starts(mask, action_ids, segment_ids), axis=1)  # 0 before the first action
    one = lambda values, at: jax.ops.segment_sum(values, at, num_segments=mask.shape[1] + 1)[at]
    return masked.select(jax.vmap(one)(x, number), mask)


def action_sizes(mask: Bool[Array, "N T"], action_ids: Ids = None, segment_ids: Ids = None) -> Float[Array, "N T"]:
    """At each token the number of tokens of its action; 0 off the mask."""
    return action_sum(mask.astype(jnp.float32), mask, action_ids, segment_ids)


def from_start(
    x: Shaped[Array, "N T"], mask: Bool[Array, "N T"], action_ids: Ids = None, segment_ids: Ids = None
) -> Float[Array, "N T"]:
    """At each token what x is at the first token of its action; 0 off the mask."""
    if action_ids is None:
        return masked.select(x, mask)
    starts = action_starts(mask, action_ids, segment_ids)
    first = jax.lax.cummax(jnp.where(starts, jnp.arange(mask.shape[1]), 0), axis=1)
    return masked.select(jnp.take_along_axis(masked.select(x, mask), first, axis=1), mask)


def sequence_ids(mask: Bool[Array, "N T"], segment_ids: Ids = None) -> Int[Array, "N T"]:
    """Ids that make each sequence one action: its row, or its segment of a packed row."""
    return jnp.ones(mask.shape, jnp.int32) if segment_ids is None else segment_ids


def ngram_actions(mask: Bool[Array, "N T"], *, n: int, segment_ids: Ids = None) -> Int[Array, "N T"]:
    """Ids of actions of n tokens each, counted from the start of each sequence; the last one may be shorter.

    Source: MA-RLHF (Chai et al., 2024), n-gram macro actions. Raises ValueError for n below 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: an action has at least one token")
    count = jnp.cumsum(mask, axis=1) - 1
    if segment_ids is not None:
        starts = action_starts(mask, segment_ids)
        count = count - jax.lax.cummax(jnp.where(starts, count, 0), axis=1)
    return count // n + 1
