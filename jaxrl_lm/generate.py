"""Generation as one pure function: prefill each prompt once, then a loop until every row has ended.

The sampler's state is one tuple of fixed buffers (`DecodeState`) and its loop has one body. A row's sample is a function
of its prompt and its key only. How a token is drawn: `sampling.py`; stop strings: `stops.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrl_lm.config import SamplingConfig
from jaxrl_lm.models import Cache, Model, positions, unstack_layers
from jaxrl_lm.sampling import draw
from jaxrl_lm.types import Params, Requests, Rollout


class DecodeState(NamedTuple):
    """Everything the loop carries. C = the new tokens at most."""

    step: Int32[Array, ""]  # new tokens drawn so far
    token: Int32[Array, "N"]  # the last one
    tokens: Int32[Array, "N C"]
    action_mask: Bool[Array, "N C"]
    logprobs: Float[Array, "N C"]
    behaviour_logprobs: Float[Array, "N C"]
    stop_state: Int32[Array, "N"]  # of the automaton that reads the stop strings
    ended: Bool[Array, "N"]  # by an end-of-sequence token or a stop string
    active: Bool[Array, "N"]  # draws another token
    cache: Cache


def prepare_decode(params: Params, *, model: Model) -> Params:
    """The weights laid out for decoding: layers unstacked, in the dtype of the computation."""
    return jax.tree.map(lambda leaf: leaf.astype(model.config.dtype), unstack_layers(params))


def _prefill(params: Params, requests: Requests, model: Model, new: int) -> tuple[Float[Array, "N D"], Cache]:
    """The last hidden state of each row and a cache with room for `new` more columns; a prompt is computed once."""
    rows, (prompts, columns) = requests.keys.shape[0], requests.tokens.shape
    places = positions(requests.segment_ids)
    given = (requests.tokens, places, requests.segment_ids)
    hidden, cache = model.for_prompts().hidden(params, *given, return_cache=True)
    spread = lambda x: jnp.repeat(x, rows // prompts, axis=0)
    room = lambda x, axis: jnp.pad(spread(x), [(0, new if a == axis else 0) for a in range(x.ndim)])
    layers = tuple(tuple(model.constrain_kv(room(x, 2)) for x in kv) for kv in cache.layers)
    cache = Cache(layers, room(places, 1), room(requests.segment_ids, 1), jnp.asarray(columns, jnp.int32))
    return spread(hidden[:, -1]), cache


def generate(
    params: Params,
    requests: Requests,
    stops: Int32[Array, "states V"] | None = None,
    *,
    model: Model,
    sampling: SamplingConfig,
) -> Rollout:
    """Sampled completions of the requested prompts; params from `prepare_decode`.

    The log-probs are those that `score` gives at the same temperature, `behaviour_logprobs` those of the distribution
    after top-k, top-p and min-p (None when these are off). A row is `truncated` when it ran into its limit.
    `stops` is the table of `stops.stop_table`. Raises ValueError if the rows are no multiple of the prompts.
    """
    rows, (prompts, prompt_columns) = requests.keys.shape[0], requests.tokens.shape
    if rows % prompts:
        raise ValueError(f"{rows} rows are not a multiple of {prompts} prompts")
    new = sampling.max_new_tokens
    next_position = jnp.repeat((requests.segment_ids > 0).sum(1, dtype=jnp.int32), rows // prompts, axis=0)
    eos = jnp.asarray(sampling.eos_token_ids, jnp.int32)

    def advance(state: DecodeState, hidden: Float[Array, "N D"]) -> DecodeState:
        """Draw token number state.step of every active row."""
        keys = jax.vmap(jax.random.fold_in, (0, None))(requests.keys, state.step)
        drawn = draw(model.unembed(params, hidden), keys, requests.temperature, sampling)
        active = state.active
        token = jnp.where(active, drawn.token, sampling.pad_token_id)
        put = lambda buffer, value: jax.lax.dynamic_update_slice_in_dim(buffer, value[:, None], state.step, 1)
        stop_state = state.stop_state
        over = (token[:, None] == eos[None]).any(1)
        if stops is not None:
            stop_state = jnp.where(active, stops[stop_state, token], stop_state)
            over = over | (stop_state == stops.shape[0] - 1)
        ended = state.ended | (active & over)
        step = state.step + 1
        return DecodeState(
            step=step,
            token=token,
            tokens=put(state.tokens, token),
            action_mask=put(state.action_mask, active),
            logprobs=put(state.logprobs, jnp.where(active, drawn.logprob, 0.0)),
            behaviour_logprobs=put(state.behaviour_logprobs, jnp.where(active, drawn.behaviour_logprob, 0.0)),
            stop_state=stop_state,
            ended=ended,
            active=active & ~ended & (step < requests.max_new),
            cache=state.cache,
        )

    def body(state: DecodeState) -> DecodeState:
        place = (next_position + state.step - 1)[:, None]
        segment = state.active.astype(jnp.int32)[:, None]
        hidden, cache = model.hidden(params, state.token[:, None], place, segment, cache=state.cache)
        return advance(state._replace(cache=cache), hidden[:, 0])

    hidden, cache = _prefill(params, requests, model, new)
    empty = jnp.zeros((rows, new), jnp.float32)
    state = DecodeState(
        step=jnp.zeros((), jnp.int32),
        token=jnp.zeros((rows,), jnp.int32),
        tokens=jnp.full((rows, new), sampling.pad_token_id, jnp.int32),
        action_mask=jnp.zeros((rows, new), bool),
        logprobs=empty,
        behaviour_logprobs=empty,
        stop_state=jnp.zeros((rows,), jnp.int32),
        ended=jnp.zeros((rows,), bool),
        active=requests.max_new > 0,
        cache=cache,
    )
    state = jax.lax.while_loop(lambda s: s.active.any() & (s.step < new), body, advance(state, hidden))
    return _collect(state, requests, prompt_columns, sampling.truncates)


def _collect(state: DecodeState, requests: Requests, prompt_columns: int, truncates: bool) -> Rollout:
    copies = state.tokens.shape[0] // requests.tokens.shape[0]
    prompt = lambda x: jnp.repeat(x, copies, axis=0)
    beside = lambda x: jnp.pad(x, ((0, 0), (prompt_columns, 0)))
    action_mask = beside(state.action_mask)
    segments = jnp.concatenate([prompt(requests.segment_ids), state.action_mask.astype(jnp.int32)], axis=1)
    return Rollout(
        tokens=jnp.concatenate([prompt(requests.tokens), state.tokens], axis=1),
        segment_ids=segments,
        action_mask=action_mask,
        logprobs=beside(state.logprobs),
        behaviour_logprobs=beside(state.behaviour_logprobs) if truncates else None,
        truncated=(requests.max_new > 0) & ~state.ended,
        turn_ids=action_mask.astype(jnp.int32),
        policy_step=jnp.where(action_mask, requests.policy_step, 0),
    )
