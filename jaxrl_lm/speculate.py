"""Speculation: a pass reads, beside a row's new token, guesses of those that follow it, and keeps what comes true.

The loop is that of `generate.py` on the same state, but a pass reads 1 + k tokens a row, a new one and a draft of k, and
draws at each of their places with the key of that place. While what is drawn is what was guessed, the next place's draw
counts too. So each token is the one that decoding one at a time draws, from the same logits with the same key: the samples
are the same but for the rounding of wider products, whatever the drafts are. Of the cache the columns that count are kept.

Sources: Leviathan, Kalman and Matias (2023), "Fast Inference from Transformers via Speculative Decoding"; their test accepts
a guess that is certain with its probability under the model, as a draw that is compared does. Drafts: prompt lookup
(Saxena, 2023), the longest n-gram match in a text.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxrl_lm.config import SamplingConfig
from jaxrl_lm.generate import EMPTY, DecodeState, _apart, _pick, _record, _refill
from jaxrl_lm.generate import decode as one_by_one
from jaxrl_lm.generate import generate as generate_by
from jaxrl_lm.logit_rules import Tables
from jaxrl_lm.models import Model, extend, next_logits
from jaxrl_lm.sampling import Drawn, draw
from jaxrl_lm.types import Params, Requests, Rollout

NOTHING = -1  # in place of a guess


def look_up(
    text: Int32[Array, "W S"],
    known: Int32[Array, "W"],
    own: Int32[Array, "W S"],
    end: Int32[Array, "W"],
    first: Int32[Array, "W"],
    *,
    draft: int,
    longest: int,
) -> Int32[Array, "W k"]:
    """What follows in `text` where it reads as the last tokens of `own`, that is columns before `end`; −1 without a place.

    Columns from `first` up to `known` of the text count. The place is the one where most tokens match, up to `longest`, then
    the one that is nearest to the row's own. A place that is nearer to the text's end than the draft is long is
    followed by itself: the text goes on in its period.
    """
    size = text.shape[1]
    places = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), text.shape)
    wide = lambda x: jnp.broadcast_to(x[:, None], text.shape)
    runs, matched = places < wide(known - 1), jnp.zeros(text.shape, jnp.int32)
    for back in range(longest):
        last = jnp.take_along_axis(own, jnp.maximum(end - 1 - back, 0)[:, None], axis=1)[:, 0]
        inside = (places - back >= wide(first)) & wide(end - 1 - back >= first)
        runs = runs & inside & (jnp.roll(text, back, axis=1) == wide(last))
        matched = matched + runs
    rank = jnp.where(matched > 0, matched * size - jnp.abs(places - wide(end - 1)), 0)
    place = jnp.argmax(rank, axis=1).astype(jnp.int32)
    period = jnp.maximum(known - 1 - place, 1)[:, None]
    steps = jnp.broadcast_to(jnp.arange(draft, dtype=jnp.int32), (text.shape[0], draft))
    found = jnp.take_along_axis(text, jnp.minimum(place[:, None] + 1 + steps % period, size - 1), axis=1)
    return jnp.where(jnp.broadcast_to((jnp.max(rank, axis=1) > 0)[:, None], found.shape), found, NOTHING)


class Prompts(NamedTuple):
    """The prompt of each row."""

    tokens: Int32[Array, "N Tp"]
    first: Int32[Array, "N"]  # the column of its first token


def prompts_of(requests: Requests) -> Prompts:
    each = lambda x: jnp.repeat(x, requests.keys.shape[0] // x.shape[0], axis=0)
    return Prompts(each(requests.tokens), each((requests.segment_ids == 0).sum(1, dtype=jnp.int32)))


def propose(
    requests: Requests, state: DecodeState, prompts: Prompts, *, sampling: SamplingConfig
) -> Int32[Array, "W k"]:
    """Drafts of every slot's next tokens, from its row's own text or, where it has one, the prompt's earlier completion.

    A row that goes on as the earlier completion did gets what followed there.
    """
    parts, request = state.next.shape[0], jnp.maximum(state.request, 0)
    of = lambda x: _pick(x, request, parts)
    prompt, columns = of(prompts.tokens), prompts.tokens.shape[1]
    own = jnp.concatenate([prompt, of(state.results.tokens)], axis=1)
    end = columns + state.drawn
    text, known = own, end
    if requests.drafts is not None:
        earlier = of(requests.drafts)
        count = (earlier >= 0).sum(1, dtype=jnp.int32)
        is_there = jnp.broadcast_to((count > 0)[:, None], own.shape)
        text = jnp.where(is_there, jnp.concatenate([prompt, earlier], axis=1), own)
        known = jnp.where(count > 0, columns + count, end)
    size = {"draft": sampling.num_speculative_tokens, "longest": sampling.prompt_lookup_max}
    return look_up(text, known, own, end, of(prompts.first), **size)


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
    """`generate.decode`, with `num_speculative_tokens` guesses a pass; without where they are off.

    Raises ValueError for drafts that do not fit.
    """
    if not sampling.num_speculative_tokens:
        return one_by_one(params, requests, state, stops, until, model=model, sampling=sampling)
    _check(requests, sampling)
    stops = stops.stops if isinstance(stops, Tables) else stops
    parts, own = state.next.shape[0], state.results.ended.shape[0] // state.next.shape[0]
    rows, slots, places = state.results.ended.shape[0], state.request.shape[0], 1 + sampling.num_speculative_tokens
    most = -(-rows // slots) * sampling.max_new_tokens
    limits = jnp.minimum(requests.max_new, sampling.max_new_tokens)
    prompts = prompts_of(requests)

    def body(state: DecodeState) -> DecodeState:
        active, request = state.request > EMPTY, jnp.maximum(state.request, 0)
        of = lambda x: _pick(x, request, parts)
        draft = propose(requests, state, prompts, sampling=sampling)
        read = jnp.concatenate([state.token[:, None], jnp.maximum(draft, 0)], axis=1)
        hidden, cache = extend(params, read, state.cache, model=model, count=active.astype(jnp.int32))
        drawn_so_far = state.drawn[:, None] + jnp.arange(places, dtype=jnp.int32)[None]
        flat = lambda x: x.reshape(slots * places, *x.shape[2:])
        each = lambda x: jnp.repeat(x, places, axis=0)
        keys = jax.vmap(jax.random.fold_in)(each(of(requests.keys)), flat(drawn_so_far))
        logits = next_logits(params, hidden.reshape(hidden.shape[0], slots * places), model=model)
        drawn = draw(logits, keys, each(of(requests.temperature)), sampling)
        token = jnp.where(each(active), drawn.token, sampling.pad_token_id).reshape(slots, places)
        over, stop_states = _over(state, token, stops, sampling)
        ends = over | (drawn_so_far + 1 >= of(limits)[:, None])
        follows = (token[:, :-1] == draft) & ~ends[:, :-1]
        counts = jnp.concatenate([active[:, None], follows], axis=1).astype(jnp.int32).cumprod(axis=1).astype(bool)
        results = _record_each(state, Drawn(token, drawn.logprob, drawn.behaviour_logprob), counts, over, parts)
        count = counts.sum(1, dtype=jnp.int32)
        last = lambda x: jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        state = state._replace(
            step=state.step + 1,
            busy=state.busy + active.sum(dtype=jnp.int32),
            request=jnp.where(active & last(ends), EMPTY, state.request),
            drawn=state.drawn + count,
            token=last(token),
            stop_state=jnp.where(active, last(stop_states), state.stop_state),
            cache=cache._replace(lengths=state.cache.lengths + count),
            results=results,
            passes=_one_more(state, parts),
        )
        return _refill(state, parts, own, None, model.plan) if slots < rows else state

    def goes_on(state: DecodeState) -> Bool[Array, ""]:
        more = (state.request > EMPTY).any() & (state.step < most)
        return more if until is None else more & (state.step < until)

    return jax.lax.while_loop(goes_on, body, state)


def _over(
    state: DecodeState, token: Int32[Array, "W T"], stops: Int32[Array, "states V"] | None, sampling: SamplingConfig
) -> tuple[Bool[Array, "W T"], Int32[Array, "W T"]]:
    """Whether each token ends its row if those before it count, and the automaton's state after it."""
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


def _record_each(state: DecodeState, drawn: Drawn, counts: Bool[Array, "W T"], over: Bool[Array, "W T"], parts: int):
    """The results with the tokens that count, as if each had had a slot of its own."""
    slots, places = counts.shape
    column = state.drawn[:, None] + jnp.arange(places, dtype=jnp.int32)[None]
    flat = state._replace(
        request=jnp.where(counts, state.request[:, None], EMPTY).reshape(slots * places),
        drawn=column.reshape(slots * places),
    )
    token, ended = drawn.token.reshape(slots * places), (counts & over).reshape(slots * places)
    return _record(flat, token, drawn.logprob, drawn.behaviour_logprob, ended, parts)


def _one_more(state: DecodeState, parts: int) -> Int32[Array, "N"]:
    """Passes of each row with this one."""
    rows = state.passes.shape[0] // parts
    place = _apart(jnp.where(state.request == EMPTY, rows, state.request), parts)
    add = jax.vmap(lambda passes, row: passes.at[row].add(1, mode="drop"))
    return add(_apart(state.passes, parts), place).reshape(rows * parts)


def _check(requests: Requests, sampling: SamplingConfig) -> None:
    if requests.drafts is None:
        return
    if sampling.speculative_source != "last_epoch":
        raise ValueError('drafts are given, but not read: set speculative_source="last_epoch", or leave them out')
    shape = (requests.keys.shape[0], sampling.max_new_tokens)
    if requests.drafts.shape != shape:
        raise ValueError(
            f"drafts of shape {requests.drafts.shape}: must be a row a request and a column a token, {shape}"
        )


def generate(
    params: Params,
    requests: Requests,
    stops: Int32[Array, "states V"] | Tables | None = None,
    *,
    model: Model,
    sampling: SamplingConfig,
) -> Rollout:
    """`generate.generate`, with speculation where it is asked for; `passes` of the rollout are None without.

    Raises ValueError as `start`, and for drafts that do not fit.
    """
    return generate_by(params, requests, stops, model=model, sampling=sampling, loop=decode)
