"""Decoding in chunks of passes: between two of them the host sees which rows have ended, and what they say.

`generate.decode` until a pass, called again with its own state, which is donated: the same passes in the same order, so
the same bits. What the host does with ended rows while the others go on is `beside.py`. Compiled in `steps.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxrl_lm.distributed import gather, one_at_a_time
from jaxrl_lm.generate import begin as begin_decoding
from jaxrl_lm.generate import decode
from jaxrl_lm.models import Model
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.slots import EMPTY, DecodeState
from jaxrl_lm.turns import row_of
from jaxrl_lm.types import Params, Requests, Rollout


class Seen(NamedTuple):
    """What the host reads after a chunk, in buffers of its own: those of the state are the next chunk's."""

    ended: Bool[Array, "N"]  # rows whose samples are whole; those that ask for nothing from the start
    tokens: Int32[Array, "N C"]
    written: Bool[Array, "N C"]  # where there is a token, the policy's or a forced one


class Chunks(NamedTuple):
    """The compiled functions."""

    begin: Callable[..., DecodeState]  # (params, requests)
    advance: Callable[..., tuple[DecodeState, Seen]]  # (params, requests, state, stops); the state is donated
    finish: Callable[..., Rollout]  # (state, requests)


Watch = Callable[[np.ndarray, np.ndarray, np.ndarray], None]  # gets `Seen` as host arrays


def begin(params: Params, requests: Requests, *, model: Model, sampling: SamplingConfig) -> DecodeState:
    """The state before the first pass. Raises ValueError as `slots.start`."""
    state = begin_decoding(params, requests, model=model, sampling=sampling)
    if state.request.shape == state.results.ended.shape:  # a slot a row: nobody reads the prompts' caches any more
        state = state._replace(prefixes=state.prefixes._replace(cache=state.prefixes.cache._replace(layers=())))
    return _laid_out(state, model)


def advance(
    params: Params,
    requests: Requests,
    state: DecodeState,
    stops: Int32[Array, "states V"] | None = None,
    *,
    passes: int,
    model: Model,
    sampling: SamplingConfig,
) -> tuple[DecodeState, Seen]:
    """The state after so many passes more, or fewer where every row has ended; then it comes back as it was."""
    state = decode(params, requests, state, stops, state.step + passes, model=model, sampling=sampling)
    results = state.results
    written = results.action_mask if results.written is None else results.written
    return _laid_out(state, model), Seen(ended_rows(state), results.tokens, written)


def ended_rows(state: DecodeState) -> Bool[Array, "N"]:
    """Which rows neither have a slot nor wait for one."""
    parts, own = state.order.shape
    places = jnp.arange(own, dtype=jnp.int32)[None]
    waits = (places >= state.next[:, None]) & (places < state.total[:, None])
    slots = row_of(state).reshape(parts, -1)  # a row that waits between two turns has not ended
    busy = jnp.where(slots == EMPTY, own, slots)  # an empty slot's row is outside

    def one(order, waits, busy):
        return jnp.ones((own,), bool).at[order].set(~waits).at[busy].set(False, mode="drop")

    return jax.vmap(one)(state.order, waits, busy).reshape(parts * own)


def _laid_out(state: DecodeState, model: Model) -> DecodeState:
    """The state with each array's layout fixed, rows split and heads as their projections, so that a chunk gives what
    the next one takes."""
    if model.plan is None:
        return state

    def under(plan):
        def one(x):
            axes = ("batch", "kv_heads" if x.ndim == 4 else None, *[None] * x.ndim)[: x.ndim]
            return plan.constrain(x, axes)

        return one

    prefixes = jax.tree.map(under(model.plan.for_prompts()), state.prefixes)
    return jax.tree.map(under(model.plan), state._replace(prefixes=()))._replace(prefixes=prefixes)


def sample_in_chunks(
    chunks: Chunks, params: Params, requests: Requests, stops: Any = None, watch: Watch | None = None
) -> Rollout:
    """What `generate` gives. `watch` is called after each chunk in which a row has ended, with that chunk's `Seen`.

    The next chunk is given to the devices before the host looks, so that they do not wait for it; after the last one it
    does nothing. Where programs must not overlap it is given after.
    """
    state, seen = chunks.advance(params, requests, chunks.begin(params, requests), stops)
    count = -1
    while True:
        later = None if one_at_a_time() else chunks.advance(params, requests, state, stops)
        ended = gather(seen.ended)
        if watch is not None and ended.sum() > count:
            count = ended.sum()
            watch(*gather(seen))
        if ended.all():
            return chunks.finish(state if later is None else later[0], requests)
        state, seen = later or chunks.advance(params, requests, state, stops)
