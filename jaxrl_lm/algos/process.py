"""Advantages of the tokens of a completion from rewards of its steps or turns, normalised within the group."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_lm import masked
from jaxrl_lm.algos.actions import action_starts
from jaxrl_lm.algos.groups import Scale, Valid, as_groups, check_groups, normalise
from jaxrl_lm.algos.returns import last_heads, returns_to_go

Credit = Literal["sum-to-go", "mean", "min", "product", "last"]


def completion_credit(x: Shaped[Array, "N T"], ends: Bool[Array, "N T"], credit: str) -> Float[Array, "N"]:
    """One number a row from the rewards at its step ends; 0 for a row without steps."""
    if credit == "mean":
        first = masked.mean(x, ends, 1)  # its rounding is not that of another row: without the rest it would be spread
        return first + masked.mean(masked.select(x, ends) - first[:, None], ends, 1)
    if credit == "last":
        return masked.sum(x, last_heads(ends, None)[1], 1)
    some = jnp.any(ends, axis=1)
    if credit == "min":
        return masked.select(jnp.min(masked.select(x, ends, jnp.inf), axis=1), some)
    if credit == "product":
        return masked.select(jnp.prod(masked.select(x, ends, 1.0), axis=1), some)
    raise ValueError(f"credit={credit!r} is unknown: use sum-to-go, mean, min, product or last")


def process_advantages(
    step_rewards: Shaped[Array, "N T"],
    step_ends: Bool[Array, "N T"],
    outcome: Shaped[Array, "N"],
    mask: Bool[Array, "N T"],
    *,
    group_size: int,
    scale: Scale = "group",
    credit: Credit = "sum-to-go",
    step_mean: bool = False,
    outcome_weight: float = 1.0,
    step_weight: float = 1.0,
    valid: Valid = None,
) -> Float[Array, "N T"]:
    """At each token its row's `group_advantages` of the outcome, plus the credit of its steps; 0 off the mask.

    A = outcome_weight · A_outcome + step_weight · A_steps, the weights after the normalisation, which would undo them.
    credit="sum-to-go": the rewards of all steps of the group together are normalised (minus their mean, over their std
    plus 1e-6, see `scale`), and a token gets the sum of those of the steps that end at or after it. Tokens after the
    last end get none. With step_mean each is divided by the number of its row's steps first, so that a row's sum is
    their mean and more steps do not pay by themselves.
    credit="mean", "min", "product", "last": one number a completion from its step rewards, normalised over the
    completions of the group that have steps, the same at every token. A completion without steps gets none.
    A step is read where step_ends holds under the mask. An outcome of zeros leaves the steps alone. "product" is for
    rewards in [0, 1], the chances that steps are right.
    Source: DeepSeekMath (Shao et al., 2024), section 4.1.3, process supervision. Departs: the outcome is added; there
    the reward of the last step carries it.

    Raises ValueError if group_size is below 2 or does not divide N, for an unknown scale or credit, and for step_mean
    with another credit than sum-to-go.
    """
    if step_mean and credit != "sum-to-go":
        raise ValueError(f"step_mean with credit={credit!r}: only the sums of sum-to-go grow with the number of steps")
    rows = jnp.ones(outcome.shape, bool) if valid is None else valid
    ends = step_ends & mask & rows[:, None]
    by_group = lambda x, inside: normalise(
        *as_groups(x, group_size=group_size, valid=inside, least=2), scale=scale
    ).reshape(-1, 1)
    whole = by_group(outcome, rows)
    if credit == "sum-to-go":
        together = lambda x: x.reshape(-1, group_size * mask.shape[1])
        steps = normalise(together(step_rewards), together(ends), scale=scale).reshape(mask.shape)
        if step_mean:
            steps = steps / jnp.maximum(jnp.sum(ends, axis=1, keepdims=True), 1)
        part = jnp.flip(jnp.cumsum(jnp.flip(steps, 1), axis=1), 1)
    else:
        part = by_group(completion_credit(step_rewards, ends, credit), jnp.any(ends, axis=1))
    whole = jnp.broadcast_to(outcome_weight * whole + step_weight * part, mask.shape)
    return masked.select(whole, mask & rows[:, None])


def turn_advantages(
    turn_rewards: Shaped[Array, "N T"],
    turn_ids: Int[Array, "N T"],
    mask: Bool[Array, "N T"],
    *,
    group_size: int,
    scale: Scale = "group",
    discount: float = 1.0,
    valid: Valid = None,
) -> Float[Array, "N T"]:
    """At each token the return-to-go of its turn, normalised over the rows of the group that have that turn; 0 off it.

    G_k = r_k + γ G_{k+1} over the turns of a row, r_k the sum of the rewards on the turn's tokens;
    A_k = (G_k − mean) / (std + 1e-6) over the valid rows of the group with a turn k, or see `scale` ("batch": over the
    std of all turns of the batch). 0 where fewer than two rows have the turn, or all have the same. Turn ids count up
    along a row, from 1 to at most T; a token with id 0 belongs to no turn. For a fixed baseline instead: `returns_to_go`
    with `action_ids=turn_ids`, minus it.
    Source: group-relative advantages of DeepSeekMath (Shao et al., 2024), section 4.1.2, a turn at a time.

    Raises ValueError if group_size is below 2 or does not divide N, or for an unknown scale.
    """
    rows, turns = mask.shape[0], mask.shape[1] + 1
    check_groups(rows, group_size, 2)
    mask = mask & (turn_ids > 0) if valid is None else mask & (turn_ids > 0) & valid[:, None]
    to_go = returns_to_go(turn_rewards, mask, discount=discount, action_ids=turn_ids)
    heads = action_starts(mask, turn_ids)
    place = jax.vmap(lambda x, at: jax.ops.segment_sum(x, at, num_segments=turns))
    table, has = place(masked.select(to_go, heads), turn_ids), place(heads.astype(jnp.int32), turn_ids) > 0
    # A row a pair of group and turn number, to be normalised over the group's rows.
    by_turn = lambda x: x.reshape(-1, group_size, turns).swapaxes(1, 2).reshape(-1, group_size)
    normal = normalise(by_turn(table), by_turn(has), scale=scale)
    normal = normal.reshape(-1, turns, group_size).swapaxes(1, 2).reshape(rows, turns)
    return masked.select(jnp.take_along_axis(normal, jnp.where(mask, turn_ids, 0), axis=1), mask)
