"""Episodes of several turns: a row is given tokens in its slot and goes on from its cache, while others decode.

With `SamplingConfig.observation_columns` a row that ends a turn (an end-of-sequence token, a stop string) keeps its slot and
waits; one that has run into its limit is over and gives it up. The host reads what has been written, and either gives the
row an observation (`append`: one `extend` at the row's own place, so that nothing that it has read is computed again) or
ends it (`finish`, which fills the slot from the queue). Then `decode` goes on. The engine: `generate.py`, `slots.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from jaxrl_lm.models import Model, extend
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.sharding import Plan
from jaxrl_lm.slots import EMPTY, PAUSED, DecodeState, apart, pick, refill
from jaxrl_lm.types import Params, Requests


def row_of(state: DecodeState) -> Int32[Array, "W"]:
    """The row that each slot holds, decoding or waiting, numbered within its part of the batch; −1: the slot is empty."""
    return jnp.where(state.request < EMPTY, PAUSED - state.request, state.request)


def waiting(state: DecodeState) -> Int32[Array, "W"]:
    """The row of each slot that has ended a turn, numbered over the whole batch; −1 for the other slots."""
    parts, (slots,), (rows,) = state.next.shape[0], state.request.shape, state.results.ended.shape
    part = jnp.arange(slots, dtype=jnp.int32) // (slots // parts)
    return jnp.where(state.request < EMPTY, row_of(state) + part * (rows // parts), EMPTY)


def room(state: DecodeState, requests: Requests, *, sampling: SamplingConfig) -> Int32[Array, "W"]:
    """How many tokens the row of each slot can be given so that one of its own still has a place; 0 for empty slots."""
    row, parts = row_of(state), state.next.shape[0]
    limit = pick(jnp.minimum(requests.max_new, sampling.max_new_tokens), jnp.maximum(row, 0), parts)
    return jnp.where(row == EMPTY, 0, jnp.maximum(limit - state.drawn - 1, 0))


def append(
    params: Params,
    requests: Requests,
    state: DecodeState,
    observations: Int32[Array, "W T"],
    lengths: Int32[Array, "W"],
    *,
    model: Model,
    sampling: SamplingConfig,
) -> DecodeState:
    """The state in which the row of each slot has been given the first `lengths` of its tokens, and decodes on.

    They stand in the row's results outside its action mask; what it says next is its next turn. 0: the slot stays as it is,
    and so does one whose `room` is smaller (ask `check_append` on the host). The tokens of all slots are computed, [W, T].
    Raises ValueError for shapes that do not fit, and where the state's rows do not pause.
    """
    _check_shapes(state, observations, lengths, sampling)
    parts, row = state.next.shape[0], row_of(state)
    takes = (lengths > 0) & (lengths <= room(state, requests, sampling=sampling))
    count = jnp.where(takes, lengths, 0)
    column = jnp.arange(observations.shape[1], dtype=jnp.int32)[None]
    counts = column < count[:, None]
    # What is not given may be anything; a token outside the vocabulary would have keys and values of NaN.
    given = jnp.where(counts, observations, sampling.pad_token_id)
    # The token that the row would have read next is read first, and its last one in the next pass.
    read = jnp.concatenate([state.token[:, None], given[:, :-1]], axis=1)
    _, cache = extend(params, read, state.cache, model=model, count=count)
    last = jnp.take_along_axis(given, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]

    results, (rows, new) = state.results, state.results.tokens.shape
    where = apart(jnp.where(takes, row, rows // parts), parts)
    places = apart(jnp.where(counts, state.drawn[:, None] + column, new), parts)
    put = jax.vmap(lambda buffer, row, place, value: buffer.at[row[:, None], place].set(value, mode="drop"))
    one = lambda buffer, value: put(apart(buffer, parts), where, places, apart(value, parts)).reshape(buffer.shape)
    unmark = jax.vmap(lambda buffer, row: buffer.at[row].set(False, mode="drop"))
    turn = jnp.broadcast_to(_next_turn(state, row)[:, None], given.shape)
    return state._replace(
        request=jnp.where(takes, row, state.request),
        drawn=state.drawn + count,
        token=jnp.where(takes, last, state.token),
        stop_state=jnp.where(takes, 0, state.stop_state),
        cache=cache,
        results=results._replace(
            tokens=one(results.tokens, given),
            turns=one(results.turns, turn),
            ended=unmark(apart(results.ended, parts), where).reshape(rows),
        ),
    )


def _next_turn(state: DecodeState, row: Int32[Array, "W"]) -> Int32[Array, "W"]:
    """The number of the turn that a slot's row begins after tokens that it is given now: of its own turns, not of gifts."""
    turns = pick(state.results.turns, jnp.maximum(row, 0), state.next.shape[0])
    before = jnp.take_along_axis(turns, jnp.maximum(state.drawn - 1, 0)[:, None], axis=1)[:, 0]
    after = jnp.maximum(turns.max(1), 1) + 1
    return jnp.where(state.drawn == 0, 1, jnp.where(before > 0, before, after))


def finish(
    state: DecodeState, over: Bool[Array, "W"], cut: Bool[Array, "W"] | None = None, *, plan: Plan | None = None
) -> DecodeState:
    """The state in which the rows of these slots, waiting or decoding, are over, and the next ones of the queue begin there.

    `cut`: those of them that had no room for what came next; they count as truncated, as do rows in the middle of a turn.
    `plan`: that of the model, laid out for decoding.
    """
    parts, (slots,), (rows,) = state.next.shape[0], state.request.shape, state.results.ended.shape
    if cut is not None:
        row = jnp.where(over & cut & (state.request != EMPTY), row_of(state), rows // parts)
        unmark = jax.vmap(lambda buffer, row: buffer.at[row].set(False, mode="drop"))
        ended = unmark(apart(state.results.ended, parts), apart(row, parts)).reshape(rows)
        state = state._replace(results=state.results._replace(ended=ended))
    state = state._replace(request=jnp.where(over, EMPTY, state.request))
    return refill(state, None, plan) if slots < rows else state


def _check_shapes(state: DecodeState, observations, lengths, sampling: SamplingConfig) -> None:
    most, slots = sampling.observation_columns, state.request.shape[0]
    if most is None or state.results.turns is None:
        raise ValueError(
            "append: observation_columns is not set, so that rows give up their slots with their first turn; set it, for "
            "start and decode too, to the most tokens that a row is given at once"
        )
    if observations.ndim != 2 or observations.shape[0] != slots or lengths.shape != (slots,):
        raise ValueError(
            f"append: observations of shape {observations.shape} and lengths of shape {lengths.shape} do not fit {slots} "
            f"slots: give [{slots}, T] and [{slots}], a row a slot"
        )
    if not 1 <= observations.shape[1] <= most:
        raise ValueError(
            f"append: observations of {observations.shape[1]} columns; there must be between 1 and "
            f"observation_columns={most}"
        )


def check_append(
    state: DecodeState,
    requests: Requests,
    observations: Int[np.ndarray, "..."],
    lengths: Int[np.ndarray, "..."],
    *,
    vocab_size: int,
    sampling: SamplingConfig,
) -> None:
    """Raises ValueError, naming the slot, for an observation that `append` would not take; on the host, before it."""
    _check_shapes(state, observations, lengths, sampling)
    rows, rooms = np.asarray(row_of(state)), np.asarray(room(state, requests, sampling=sampling))
    for slot, (length, row, most) in enumerate(zip(lengths.tolist(), rows.tolist(), rooms.tolist(), strict=True)):
        if not 0 <= length <= observations.shape[1]:
            raise ValueError(
                f"append: slot {slot} is given {length} tokens of an observation of {observations.shape[1]} columns"
            )
        if length and row == EMPTY:
            raise ValueError(f"append: slot {slot} is empty and cannot be given {length} tokens: its length must be 0")
        if length > most:
            raise ValueError(
                f"append: slot {slot} (row {row}) has room for {most} tokens and one of its own, and is given {length}: "
                "finish the row with cut, shorten the observation, or raise max_new_tokens"
            )
        own = observations[slot, :length]
        if ((own < 0) | (own >= vocab_size)).any():
            wrong = own[(own < 0) | (own >= vocab_size)][0]
            raise ValueError(f"append: slot {slot} is given token {wrong}, outside the vocabulary of {vocab_size}")
