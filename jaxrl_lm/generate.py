"""Generation as one pure function: each prompt prefilled once, then one loop in which slots take the next request.

N requests are sampled in W slots, W ≤ N: the slot of a row that has ended takes the next row of the queue, by bookkeeping on
the device, so that a long row holds nothing up but its slot. The engine's state is one tuple of fixed buffers
(`DecodeState`), its loop has one body (`decode`). A row's sample is a function of its prompt and its key only: neither slots
nor neighbours nor their order change a bit of it. How a token is drawn: `sampling.py`; stop strings: `stops.py`; the forward
pass: `models/decode.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrl_lm.config import SamplingConfig
from jaxrl_lm.logit_rules import (
    RuleState,
    Tables,
    advance,
    check_rules,
    first_rules,
    forced,
    renewed,
    ruled,
    tokens_seen,
)
from jaxrl_lm.models import Cache, Model, extend, fuse_layers, next_logits, prefill, room_for
from jaxrl_lm.models.cache_write import narrow, turned
from jaxrl_lm.models.kv_cache import wider
from jaxrl_lm.sampling import Drawn, draw
from jaxrl_lm.sharding import Plan
from jaxrl_lm.speculate import Prompts, check_drafts, prompts_of, propose
from jaxrl_lm.types import Params, Requests, Rollout

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


def prepare_decode(params: Params, *, model: Model) -> Params:
    """The weights laid out for decoding: layers apart, projections of one input in one matrix, in the dtype of the
    computation."""
    return jax.tree.map(lambda leaf: leaf.astype(model.config.dtype), fuse_layers(params, model=model))


def _ahead(row: Shaped[Array, "T"], by: Int32[Array, ""]) -> Shaped[Array, "T"]:
    return jnp.roll(row, -by)


def read_prompts(params: Params, requests: Requests, *, model: Model, kv_cache_dtype: str | None = None) -> Prefixes:
    """The prompts' caches, each prompt computed once however many rows it has; params from `prepare_decode`."""
    columns = requests.tokens.shape[1]
    lengths = (requests.segment_ids > 0).sum(1, dtype=jnp.int32)
    # Left-padded prompts come in; a cache's column is a position.
    tokens = jax.vmap(_ahead)(requests.tokens, columns - lengths)
    cache = prefill(params, tokens, lengths, model=model.for_prompts(), kv_cache_dtype=kv_cache_dtype)
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
    return Prefixes(cache._replace(lengths=lengths - 1), last)


def begin(params: Params, requests: Requests, *, model: Model, sampling: SamplingConfig) -> DecodeState:
    """The state before the first pass, with the prompts read: `read_prompts` and `start`."""
    prefixes = read_prompts(params, requests, model=model, kv_cache_dtype=sampling.kv_cache_dtype)
    return start(prefixes, requests, model=model, sampling=sampling)


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
        pick = lambda x: jnp.repeat(x, rows // prompts, axis=0)
    else:
        first = jnp.arange(slots // parts, dtype=jnp.int32)[None] < total[:, None]
        request = jnp.where(first, order[:, : slots // parts], EMPTY).reshape(slots)
        prompt = jnp.maximum(request, 0) // (rows // prompts)
        pick = lambda x: _pick(x, prompt, parts)
    columns = prefixes.cache.columns
    draft = sampling.num_speculative_tokens or 0  # columns that a pass may write and not keep
    more = room_for(columns + new + draft + (sampling.observation_columns or 0)) - columns
    layers = tuple(wider(*jax.tree.map(pick, layer), more) for layer in prefixes.cache.layers)
    layers = jax.tree.map(model.constrain_kv, layers)
    empty = jnp.zeros((rows, new), jnp.float32)
    seen = _seen(requests, model, sampling)
    return DecodeState(
        step=jnp.zeros((), jnp.int32),
        busy=jnp.zeros((), jnp.int32),
        next=jnp.minimum(total, slots // parts),
        request=request,
        drawn=jnp.zeros((slots,), jnp.int32),
        token=pick(prefixes.token),
        stop_state=jnp.zeros((slots,), jnp.int32),
        cache=Cache(layers, pick(prefixes.cache.lengths)),
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
        rules=first_rules(sampling, slots, None if seen is None else pick(seen)),
        passes=jnp.zeros((rows,), jnp.int32) if draft else None,
    )


def _seen(requests: Requests, model: Model, sampling: SamplingConfig) -> Bool[Array, "P V"] | None:
    """The tokens of each prompt, where a rule asks for them."""
    return tokens_seen(requests.tokens, requests.segment_ids, model.config.vocab_size) if sampling.penalises else None


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


def _apart(x: Shaped[Array, "M ..."], parts: int) -> Shaped[Array, "D m ..."]:
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def _pick(x: Shaped[Array, "M ..."], number: Int32[Array, "W"], parts: int) -> Shaped[Array, "W ..."]:
    """The rows of x with these numbers, each of its own part."""
    found = jax.vmap(lambda own, number: own[number])(_apart(x, parts), _apart(number, parts))
    return found.reshape(number.shape[0], *x.shape[1:])


def decode(
    params: Params,
    requests: Requests,
    state: DecodeState,
    stops: Int32[Array, "states V"] | Tables | None = None,
    until: Int32[Array, ""] | None = None,
    *,
    model: Model,
    sampling: SamplingConfig,
) -> DecodeState:
    """The state when every row has ended, or after pass number `until`; `stops` is the table of `stops.stop_table`, or
    all tables of the rules.

    A pass reads the next token of each slot's row, and with `num_speculative_tokens` guesses of those that follow it
    (`speculate.py`). With `observation_columns` a row whose turn has ended keeps its slot, and waits there (`turns.py`).
    Raises ValueError as `check_rules` and `check_drafts`.
    """
    tables = stops if isinstance(stops, Tables) else Tables(stops)
    check_rules(sampling, tables, model.config.vocab_size)
    check_drafts(requests, sampling)
    seen, prompts = _seen(requests, model, sampling), prompts_of(requests)
    parts, own = state.next.shape[0], state.results.ended.shape[0] // state.next.shape[0]
    rows, slots, reads = (
        state.results.ended.shape[0],
        state.request.shape[0],
        1 + (sampling.num_speculative_tokens or 0),
    )
    pauses = sampling.observation_columns is not None
    # Which no queue exceeds: a bound for who reads the program. Rows that pause may go on one after another.
    most = (rows if pauses else -(-rows // slots)) * sampling.max_new_tokens
    limits = jnp.minimum(requests.max_new, sampling.max_new_tokens)
    flat = lambda x: x.reshape(slots * reads, *x.shape[2:])
    each = lambda x: jnp.repeat(x, reads, axis=0)

    def body(state: DecodeState) -> DecodeState:
        active, request = state.request > EMPTY, jnp.maximum(state.request, 0)
        of = lambda x: _pick(x, request, parts)
        column = state.drawn[:, None] + jnp.arange(reads, dtype=jnp.int32)[None]
        guesses = _guesses(requests, prompts, state, sampling)
        read = jnp.concatenate([state.token[:, None], jnp.maximum(guesses, 0)], axis=1)
        alive = active.astype(jnp.int32)
        hidden, cache = extend(params, read, state.cache, model=model, count=alive, looped=True)
        logits = next_logits(params, hidden.reshape(hidden.shape[0], slots * reads), model=model)
        keys = jax.vmap(jax.random.fold_in)(each(of(requests.keys)), flat(column))
        shaped = ruled(logits, state.rules, flat(column), tables, sampling)
        drawn = draw(logits, keys, each(of(requests.temperature)), sampling, shaped)
        given, chosen = forced(state.rules, state.drawn, tables, sampling), None  # with one token a pass
        if given is not None:
            chosen = given < 0
            zero = lambda x: jnp.where(chosen, x, 0.0)
            drawn = Drawn(jnp.where(chosen, drawn.token, given), zero(drawn.logprob), zero(drawn.behaviour_logprob))
        token = jnp.where(each(active), drawn.token, each(state.token)).reshape(slots, reads)
        over, stop_states = _over(state, token, tables.stops, sampling)
        full = column + 1 >= of(limits)[:, None]
        # A draw counts if all before it were what had been guessed, and ended nothing.
        follows = (token[:, :-1] == guesses) & ~(over | full)[:, :-1]
        counts = jnp.concatenate([active[:, None], follows], axis=1).astype(jnp.int32).cumprod(axis=1).astype(bool)
        count = counts.sum(1, dtype=jnp.int32)
        last = lambda x: jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        left = jnp.where(last(full), EMPTY, PAUSED - state.request) if pauses else EMPTY
        state = state._replace(
            step=state.step + 1,
            busy=state.busy + active.sum(dtype=jnp.int32),
            request=jnp.where(active & last(over | full), left, state.request),
            drawn=state.drawn + count,
            token=last(token),
            stop_state=jnp.where(active, last(stop_states), state.stop_state),
            cache=cache._replace(lengths=state.cache.lengths + count),
            results=_record(state, column, drawn._replace(token=flat(token)), counts, counts & over, chosen),
            rules=advance(state.rules, last(token), active, tables),
            passes=None if state.passes is None else _one_more(state, parts),
        )
        return _refill(state, parts, own, seen, model.plan) if slots < rows else state

    def goes_on(state: DecodeState) -> Bool[Array, ""]:
        more = (state.request > EMPTY).any() & (state.step < most)
        return more if until is None else more & (state.step < until)

    return jax.lax.while_loop(goes_on, body, state)


def _guesses(requests: Requests, prompts: Prompts, state: DecodeState, sampling: SamplingConfig) -> Int32[Array, "W k"]:
    """What may follow the next token of each slot's row; k is 0 without speculation."""
    if not sampling.num_speculative_tokens:
        return jnp.zeros((state.request.shape[0], 0), jnp.int32)
    of = lambda x: _pick(x, jnp.maximum(state.request, 0), state.next.shape[0])
    earlier = None if requests.drafts is None else of(requests.drafts)
    size = {"draft": sampling.num_speculative_tokens, "longest": sampling.prompt_lookup_max}
    return propose(jax.tree.map(of, prompts), of(state.results.tokens), state.drawn, earlier, **size)


def _over(
    state: DecodeState, token: Int32[Array, "W T"], stops: Int32[Array, "states V"] | None, sampling: SamplingConfig
) -> tuple[Bool[Array, "W T"], Int32[Array, "W T"]]:
    """Whether each token ends its row if those before it count, and the stop strings' state after it."""
    eos = jnp.asarray(sampling.eos_token_ids, jnp.int32)
    over = (token[:, :, None] == eos[None, None]).any(2)
    if stops is None:
        return over, jnp.broadcast_to(state.stop_state[:, None], token.shape)
    states, reached = state.stop_state, []
    for place in range(token.shape[1]):
        states = stops[states, token[:, place]]
        reached.append(states)
    reached = jnp.stack(reached, axis=1)
    return over | (reached == stops.shape[0] - 1), reached


def _record(
    state: DecodeState,
    column: Int32[Array, "W T"],
    drawn: Drawn,
    counts: Bool[Array, "W T"],
    ended: Bool[Array, "W T"],
    chosen: Bool[Array, "WT"] | None,
) -> Results:
    """The results with the draws [W·T] that count. `chosen`: by the policy."""
    rows, parts, reads = state.results.ended.shape[0], state.next.shape[0], column.shape[1]
    flat = lambda x: _apart(x.reshape(-1), parts)
    outside = rows // parts  # where what does not count has its place
    row = flat(jnp.where(counts, state.request[:, None], outside))
    put = lambda buffer, row, column, value: buffer.at[row, column].set(value, mode="drop")
    one = lambda buffer, value: jax.vmap(put)(_apart(buffer, parts), row, flat(column), flat(value)).reshape(
        buffer.shape
    )
    results = state.results
    mark = jax.vmap(lambda buffer, row: buffer.at[row].set(True, mode="drop"))
    there = jnp.ones((state.request.shape[0] * reads,), bool)
    return results._replace(
        tokens=one(results.tokens, drawn.token),
        action_mask=one(results.action_mask, there if chosen is None else chosen),
        logprobs=one(results.logprobs, drawn.logprob),
        behaviour_logprobs=one(results.behaviour_logprobs, drawn.behaviour_logprob),
        ended=mark(_apart(results.ended, parts), jnp.where(flat(ended), row, outside)).reshape(rows),
        written=None if chosen is None else one(results.written, there),
    )


def _one_more(state: DecodeState, parts: int) -> Int32[Array, "N"]:
    """Passes of each row with this one."""
    rows = state.passes.shape[0] // parts
    place = _apart(jnp.where(state.request == EMPTY, rows, state.request), parts)
    add = jax.vmap(lambda passes, row: passes.at[row].add(1, mode="drop"))
    return add(_apart(state.passes, parts), place).reshape(rows * parts)


def _refill(
    state: DecodeState, parts: int, own: int, seen: Bool[Array, "P V"] | None, plan: Plan | None
) -> DecodeState:
    """The state with the next rows of the queue in the empty slots, first slots first; `seen` as `_seen`."""
    turns = narrow(state.cache.layers, plan)
    prefixes, slots = state.prefixes, state.request.shape[0]
    group = state.results.ended.shape[0] // prefixes.token.shape[0]
    request = _apart(state.request, parts)
    empty = request == EMPTY
    rank = jnp.cumsum(empty, axis=1, dtype=jnp.int32) - 1
    place = state.next[:, None] + rank
    taken = empty & (place < state.total[:, None])
    row = jnp.take_along_axis(state.order, jnp.minimum(place, own - 1), axis=1)
    count, prompt = taken.sum(1, dtype=jnp.int32), row // group
    of = lambda x: _pick(x, prompt.reshape(slots), parts)
    taken_slots = taken.reshape(slots)

    def copy(number, layers):
        found = taken & (rank == number)
        slot = jnp.where(found.any(1), jnp.argmax(found, axis=1), slots // parts)  # outside where a part has no more
        source = jnp.take_along_axis(prompt, jnp.minimum(slot, slots // parts - 1)[:, None], axis=1)[:, 0]

        def one(old, new):
            new = jax.vmap(lambda x, number: x[number])(_apart(new, parts), source)
            put = lambda old, slot, new: old.at[slot, :, : new.shape[1], : new.shape[2]].set(new, mode="drop")
            return jax.vmap(put)(_apart(old, parts), slot, new).reshape(old.shape)

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


def collect(state: DecodeState, requests: Requests, *, sampling: SamplingConfig) -> Rollout:
    """What has been sampled, in the order of the requests."""
    results, columns = state.results, requests.tokens.shape[1]
    copies = results.ended.shape[0] // requests.tokens.shape[0]
    prompt = lambda x: jnp.repeat(x, copies, axis=0)
    beside = lambda x: jnp.pad(x, ((0, 0), (columns, 0)))
    action_mask = beside(results.action_mask)
    written, turn = results.action_mask, action_mask.astype(jnp.int32)
    if results.written is not None:
        written = results.written
    if results.turns is not None:  # tokens that were given belong to the row, and a turn begins after them
        written = written | (results.turns > 0)
        turn = turn * jax.lax.cummax(jnp.maximum(beside(results.turns), 1), axis=1)
    return Rollout(
        tokens=jnp.concatenate([prompt(requests.tokens), results.tokens], axis=1),
        segment_ids=jnp.concatenate([prompt(requests.segment_ids), written.astype(jnp.int32)], axis=1),
        action_mask=action_mask,
        logprobs=beside(results.logprobs),
        behaviour_logprobs=beside(results.behaviour_logprobs) if sampling.reshapes else None,
        truncated=(requests.max_new > 0) & ~results.ended,
        turn_ids=turn,
        policy_step=jnp.where(action_mask, requests.policy_step, 0),
        passes=state.passes,
    )


def generate(
    params: Params,
    requests: Requests,
    stops: Int32[Array, "states V"] | Tables | None = None,
    *,
    model: Model,
    sampling: SamplingConfig,
) -> Rollout:
    """Sampled completions of the requested prompts: `read_prompts`, `start`, `decode` until all have ended, `collect`.

    The log-probs are those that `score` gives at the same temperature, with an int8 cache up to its rounding, which the
    tokens were drawn with; `behaviour_logprobs` those of the distribution after rules, top-k, top-p and min-p (None when
    these are off). Forced tokens stand in `tokens` and `segment_ids`, not in `action_mask`. A row is `truncated` when it
    ran into its limit. Raises ValueError as `start` and `decode`.
    """
    state = begin(params, requests, model=model, sampling=sampling)
    return collect(decode(params, requests, state, stops, model=model, sampling=sampling), requests, sampling=sampling)
