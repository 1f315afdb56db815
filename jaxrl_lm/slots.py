"""The engine's state: rows that take slots from a queue, and what a slot begins with.

`start` makes the state from prompts that have been read, `fork` makes prompts of its rows, `refill` gives empty slots to
the rows that wait. On a mesh each part of the batch has a queue and slots of its own. The loop over a state: `generate.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrl_lm.logit_rules import RuleState, first_rules, renewed, tokens_seen
from jaxrl_lm.models import Cache, Model, room_for
from jaxrl_lm.models.cache_write import narrow, turned
from jaxrl_lm.models.kv_cache import wider
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import Requests

EMPTY = -1  # in place of a slot's row
PAUSED = -2  # minus the row: it has ended a turn and keeps its slot, see `turns.py`


class Prefixes(NamedTuple):
    """What rows start from: P caches, and of each the token that stands next, which its rows read first."""

    cache: Cache
    token: Int32[Array, "P"]


class Results(NamedTuple):
    """Of every request, C new tokens at most."""

    tokens: Int32[Array, "N C"]
    action_mask: Bool[Array, "N C"]
    logprobs: Float[Array, "N C"]
    behaviour_logprobs: Float[Array, "N C"]
    ended: Bool[Array, "N"]  # by an end-of-sequence token or a stop string
    written: Bool[Array, "N C"] | None = None  # all tokens, forced ones too; None: those of action_mask
    turns: Int32[Array, "N C"] | None = None  # of tokens that were given, the number of the turn after them; else 0


class DecodeState(NamedTuple):
    """Everything the loop carries. Rows and slots are numbered within their part of the batch."""

    step: Int32[Array, ""]  # forward passes so far
    busy: Int32[Array, ""]  # slots that they had a row in, summed
    next: Int32[Array, "D"]  # the first place of the queue that no slot has had
    request: Int32[Array, "W"]  # the row of each slot; -1: the slot is empty; below: PAUSED minus the row
    drawn: Int32[Array, "W"]  # new tokens of it so far
    token: Int32[Array, "W"]  # the one that the model reads next
    stop_state: Int32[Array, "W"]  # of the automaton that reads the stop strings
    cache: Cache  # of the slots
    results: Results
    prefixes: Prefixes
    order: Int32[Array, "D n"]  # the rows that ask for tokens, first to last, then the others; D parts of n rows
    total: Int32[Array, "D"]  # how many ask
    rules: RuleState | None = None  # what rules remember of the row of each slot
    passes: Int32[Array, "N"] | None = None  # of each row with speculation (speculate.py)


def start(prefixes: Prefixes, requests: Requests, *, model: Model, sampling: SamplingConfig) -> DecodeState:
    """The state before the first pass, with the first rows in their slots. The prefixes are those of the requests' prompts.

    On a mesh each part of the batch has its own slots and rows. Raises ValueError if the rows are no multiple of the
    prefixes, for slots or waiting prefixes that do not divide over the mesh, and for caches of another `kv_cache_dtype`.
    """
    if prefixes.cache.dtype != sampling.kv_cache_dtype:
        raise ValueError(
            f"kv_cache_dtype={sampling.kv_cache_dtype!r}, but the prefixes' caches were made with {prefixes.cache.dtype!r}: "
            "give both the same"
        )
    (rows,), (prompts,), new = requests.keys.shape, prefixes.token.shape, sampling.max_new_tokens
    slots, parts = min(sampling.slots or rows, rows), 1 if model.plan is None else model.plan.batch_ways
    _check(rows, prompts, slots, parts)
    own = rows // parts  # rows of a part
    asks = (requests.max_new > 0).reshape(parts, own)
    order, total = jnp.argsort(~asks, axis=1, stable=True).astype(jnp.int32), asks.sum(1, dtype=jnp.int32)
    if slots == rows:
        number = jnp.tile(jnp.arange(own, dtype=jnp.int32), parts)
        request = jnp.where(requests.max_new > 0, number, EMPTY)
        of = lambda x: jnp.repeat(x, rows // prompts, axis=0)
    else:
        first = jnp.arange(slots // parts, dtype=jnp.int32)[None] < total[:, None]
        request = jnp.where(first, order[:, : slots // parts], EMPTY).reshape(slots)
        prompt = jnp.maximum(request, 0) // (rows // prompts)
        of = lambda x: pick(x, prompt, parts)
    columns = prefixes.cache.columns
    draft = sampling.num_speculative_tokens or 0  # columns that a pass may write and not keep
    more = room_for(columns + new + draft + (sampling.observation_columns or 0)) - columns
    layers = tuple(wider(*jax.tree.map(of, layer), more) for layer in prefixes.cache.layers)
    layers = jax.tree.map(model.constrain_kv, layers)
    empty = jnp.zeros((rows, new), jnp.float32)
    seen = prompts_seen(requests, model, sampling)
    return DecodeState(
        step=jnp.zeros((), jnp.int32),
        busy=jnp.zeros((), jnp.int32),
        next=jnp.minimum(total, slots // parts),
        request=request,
        drawn=jnp.zeros((slots,), jnp.int32),
        token=of(prefixes.token),
        stop_state=jnp.zeros((slots,), jnp.int32),
        cache=Cache(layers, of(prefixes.cache.lengths)),
        results=Results(
            tokens=jnp.full((rows, new), sampling.pad_token_id, jnp.int32),
            action_mask=jnp.zeros((rows, new), bool),
            logprobs=empty,
            behaviour_logprobs=empty,
            ended=jnp.zeros((rows,), bool),
            written=jnp.zeros((rows, new), bool) if sampling.forces else None,
            turns=None if sampling.observation_columns is None else jnp.zeros((rows, new), jnp.int32),
        ),
        prefixes=prefixes,
        order=order,
        total=total,
        rules=first_rules(sampling, slots, None if seen is None else of(seen)),
        passes=jnp.zeros((rows,), jnp.int32) if draft else None,
    )


def _check(rows: int, prompts: int, slots: int, parts: int) -> None:
    if rows % prompts:
        raise ValueError(f"{rows} rows are not a multiple of {prompts} prompts")
    if slots == rows:
        return
    for name, count in (("", slots), (f": {prompts} prompts, whose rows wait for a slot,", prompts)):
        if count % parts:
            raise ValueError(
                f"decode_slots={slots}{name} does not divide over the {parts} parts that the mesh splits rows into; give a "
                "multiple of them, or leave it out"
            )


def prompts_seen(requests: Requests, model: Model, sampling: SamplingConfig) -> Bool[Array, "P V"] | None:
    """The tokens of each prompt, where a rule asks for them."""
    return tokens_seen(requests.tokens, requests.segment_ids, model.config.vocab_size) if sampling.penalises else None


def apart(x: Shaped[Array, "M ..."], parts: int) -> Shaped[Array, "D m ..."]:
    """Rows or slots by the part of the batch that they belong to."""
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def pick(x: Shaped[Array, "M ..."], number: Int32[Array, "W"], parts: int) -> Shaped[Array, "W ..."]:
    """The rows of x with these numbers, each of its own part."""
    found = jax.vmap(lambda own, number: own[number])(apart(x, parts), apart(number, parts))
    return found.reshape(number.shape[0], *x.shape[1:])


def fork(state: DecodeState, rows: Int32[Array, "P"], counts: Int32[Array, "P"]) -> Prefixes:
    """The prompts of these rows, live or ended, with their first `counts` new tokens, to sample from; nothing is computed.

    For a state whose rows all have a slot of their own, whose cache holds what they have read. `counts` is at most what a
    row has drawn and been given. Raises ValueError for a state with fewer slots than rows.
    """
    count, slots = state.results.ended.shape[0], state.request.shape[0]
    if slots < count:
        raise ValueError(
            f"fork: {count} rows went through {slots} slots, so that caches of ended rows are gone: sample with a slot a row"
        )
    prompt = rows // (count // state.prefixes.token.shape[0])
    drawn = state.results.tokens[rows, jnp.maximum(counts - 1, 0)]
    layers = jax.tree.map(lambda x: x[rows], state.cache.layers)
    lengths = state.prefixes.cache.lengths[prompt] + counts
    return Prefixes(Cache(layers, lengths), jnp.where(counts > 0, drawn, state.prefixes.token[prompt]))


def refill(state: DecodeState, seen: Bool[Array, "P V"] | None, plan: Plan | None) -> DecodeState:
    """The state with the next rows of the queue in the empty slots, first slots first; `seen`: `prompts_seen`."""
    turns = narrow(state.cache.layers, plan)
    (parts, own), prefixes, slots = state.order.shape, state.prefixes, state.request.shape[0]
    group = state.results.ended.shape[0] // prefixes.token.shape[0]
    request = apart(state.request, parts)
    empty = request == EMPTY
    rank = jnp.cumsum(empty, axis=1, dtype=jnp.int32) - 1
    place = state.next[:, None] + rank
    taken = empty & (place < state.total[:, None])
    row = jnp.take_along_axis(state.order, jnp.minimum(place, own - 1), axis=1)
    count, prompt = taken.sum(1, dtype=jnp.int32), row // group
    of = lambda x: pick(x, prompt.reshape(slots), parts)
    taken_slots = taken.reshape(slots)

    def copy(number, layers):
        found = taken & (rank == number)
        slot = jnp.where(found.any(1), jnp.argmax(found, axis=1), slots // parts)  # outside where a part has no more
        source = jnp.take_along_axis(prompt, jnp.minimum(slot, slots // parts - 1)[:, None], axis=1)[:, 0]

        def one(old, new):
            new = jax.vmap(lambda x, number: x[number])(apart(new, parts), source)
            put = lambda old, slot, new: old.at[slot, :, : new.shape[1], : new.shape[2]].set(new, mode="drop")
            return jax.vmap(put)(apart(old, parts), slot, new).reshape(old.shape)

        return jax.tree.map(one, layers, turned(prefixes.cache.layers, turns))

    return state._replace(
        next=state.next + count,
        request=jnp.where(taken, row, request).reshape(slots),
        drawn=jnp.where(taken_slots, 0, state.drawn),
        token=jnp.where(taken_slots, of(prefixes.token), state.token),
        stop_state=jnp.where(taken_slots, 0, state.stop_state),
        cache=Cache(
            turned(jax.lax.fori_loop(0, count.max(), copy, turned(state.cache.layers, turns)), turns),
            jnp.where(taken_slots, of(prefixes.cache.lengths), state.cache.lengths),
        ),
        rules=renewed(state.rules, taken_slots, None if seen is None else of(seen)),
    )
