"""Generation as one pure function: each prompt prefilled once, then one loop in which slots take the next request.

N requests are sampled in W slots, W ≤ N: the slot of a row that has ended takes the next row of the queue, by bookkeeping on
the device, so that a long row holds nothing up but its slot. The engine's state is one tuple of fixed buffers
(`DecodeState`), its loop has one body (`decode`). A row's sample is a function of its prompt and its key only: neither slots
nor neighbours nor their order change a bit of it. The state and its slots: `slots.py`; how a token is drawn: `sampling.py`;
stop strings: `stops.py`; the forward pass: `models/decode.py`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key, Shaped

from jaxrl_lm.logit_rules import Tables, advance, check_rules, forced, ruled
from jaxrl_lm.models import Model, extend, fuse_layers, next_logits, prefill
from jaxrl_lm.sampling import Drawn, draw
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.slots import EMPTY, PAUSED, DecodeState, Prefixes, Results, apart, pick, prompts_seen, refill, start
from jaxrl_lm.speculate import Prompts, check_drafts, prompts_of, propose
from jaxrl_lm.types import Params, Requests, Rollout


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
    seen, prompts = prompts_seen(requests, model, sampling), prompts_of(requests)
    (rows,), (slots,), parts = state.results.ended.shape, state.request.shape, state.next.shape[0]
    reads = 1 + (sampling.num_speculative_tokens or 0)
    # Which no queue exceeds: a bound for who reads the program. Rows that pause may go on one after another.
    most = (rows if sampling.observation_columns is not None else -(-rows // slots)) * sampling.max_new_tokens
    limits = jnp.minimum(requests.max_new, sampling.max_new_tokens)

    def body(state: DecodeState) -> DecodeState:
        active, request = state.request > EMPTY, jnp.maximum(state.request, 0)
        of = lambda x: pick(x, request, parts)
        column = state.drawn[:, None] + jnp.arange(reads, dtype=jnp.int32)[None]
        guesses = _guesses(requests, prompts, state, sampling)
        read = jnp.concatenate([state.token[:, None], jnp.maximum(guesses, 0)], axis=1)
        alive = active.astype(jnp.int32)
        hidden, cache = extend(params, read, state.cache, model=model, count=alive, looped=True)
        logits = next_logits(params, hidden.reshape(hidden.shape[0], slots * reads), model=model)
        drawn, chosen = _draw(logits, of(requests.keys), of(requests.temperature), column, state, tables, sampling)
        state = state._replace(cache=cache._replace(lengths=state.cache.lengths))  # nothing that was read counts yet
        state = _keep(state, drawn, chosen, guesses, column, of(limits), tables, sampling)
        return refill(state, seen, model.plan) if slots < rows else state

    def goes_on(state: DecodeState) -> Bool[Array, ""]:
        more = (state.request > EMPTY).any() & (state.step < most)
        return more if until is None else more & (state.step < until)

    return jax.lax.while_loop(goes_on, body, state)


def _guesses(requests: Requests, prompts: Prompts, state: DecodeState, sampling: SamplingConfig) -> Int32[Array, "W k"]:
    """What may follow the next token of each slot's row; k is 0 without speculation."""
    if not sampling.num_speculative_tokens:
        return jnp.zeros((state.request.shape[0], 0), jnp.int32)
    of = lambda x: pick(x, jnp.maximum(state.request, 0), state.next.shape[0])
    earlier = None if requests.drafts is None else of(requests.drafts)
    size = {"draft": sampling.num_speculative_tokens, "longest": sampling.prompt_lookup_max}
    return propose(jax.tree.map(of, prompts), of(state.results.tokens), state.drawn, earlier, **size)


def _draw(
    logits: Float[Array, "WT V"],
    keys: Key[Array, "W"],
    temperature: Float[Array, "W"],
    column: Int32[Array, "W T"],
    state: DecodeState,
    tables: Tables,
    sampling: SamplingConfig,
) -> tuple[Drawn, Bool[Array, "WT"] | None]:
    """A token for each of these columns of each slot's row, and which of them the policy chose; None: all."""
    flat, each = column.reshape(-1), lambda x: jnp.repeat(x, column.shape[1], axis=0)
    shaped = ruled(logits, state.rules, flat, tables, sampling)
    drawn = draw(logits, jax.vmap(jax.random.fold_in)(each(keys), flat), each(temperature), sampling, shaped)
    given = forced(state.rules, state.drawn, tables, sampling)  # with one token a pass
    if given is None:
        return drawn, None
    chosen = given < 0
    zero = lambda x: jnp.where(chosen, x, 0.0)
    return Drawn(jnp.where(chosen, drawn.token, given), zero(drawn.logprob), zero(drawn.behaviour_logprob)), chosen


def _keep(
    state: DecodeState,
    drawn: Drawn,
    chosen: Bool[Array, "WT"] | None,
    guesses: Int32[Array, "W k"],
    column: Int32[Array, "W T"],
    limits: Int32[Array, "W"],
    tables: Tables,
    sampling: SamplingConfig,
) -> DecodeState:
    """The state with the draws that count: those of slots with a row, as far as guesses were right and nothing ended."""
    active, (slots, reads) = state.request > EMPTY, column.shape
    token = jnp.where(active[:, None], drawn.token.reshape(slots, reads), state.token[:, None])
    over, stop_states = _over(state, token, tables.stops, sampling)
    full = column + 1 >= limits[:, None]
    # A draw counts if all before it were what had been guessed, and ended nothing.
    follows = (token[:, :-1] == guesses) & ~(over | full)[:, :-1]
    counts = jnp.concatenate([active[:, None], follows], axis=1).astype(jnp.int32).cumprod(axis=1).astype(bool)
    count = counts.sum(1, dtype=jnp.int32)
    last = lambda x: jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    left = EMPTY if sampling.observation_columns is None else jnp.where(last(full), EMPTY, PAUSED - state.request)
    return state._replace(
        step=state.step + 1,
        busy=state.busy + active.sum(dtype=jnp.int32),
        request=jnp.where(active & last(over | full), left, state.request),
        drawn=state.drawn + count,
        token=last(token),
        stop_state=jnp.where(active, last(stop_states), state.stop_state),
        cache=state.cache._replace(lengths=state.cache.lengths + count),
        results=_record(state, column, drawn._replace(token=token.reshape(-1)), counts, counts & over, chosen),
        rules=advance(state.rules, last(token), active, tables),
        passes=None if state.passes is None else _one_more(state),
    )


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
    flat = lambda x: apart(x.reshape(-1), parts)
    outside = rows // parts  # where what does not count has its place
    row = flat(jnp.where(counts, state.request[:, None], outside))
    put = lambda buffer, row, column, value: buffer.at[row, column].set(value, mode="drop")
    one = lambda buffer, value: jax.vmap(put)(apart(buffer, parts), row, flat(column), flat(value)).reshape(
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
        ended=mark(apart(results.ended, parts), jnp.where(flat(ended), row, outside)).reshape(rows),
        written=None if chosen is None else one(results.written, there),
    )


def _one_more(state: DecodeState) -> Int32[Array, "N"]:
    """Passes of each row with this one."""
    parts, rows = state.order.shape
    place = apart(jnp.where(state.request == EMPTY, rows, state.request), parts)
    add = jax.vmap(lambda passes, row: passes.at[row].add(1, mode="drop"))
    return add(apart(state.passes, parts), place).reshape(rows * parts)


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
