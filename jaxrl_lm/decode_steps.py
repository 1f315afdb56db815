"""The engine in parts, compiled: the loop alone, episodes of turns, samples after forks. What samples in one piece:
`steps.py`.

`compile_decode`, `compile_turns` and `compile_forks` bind a model and sampling to the functions of `generate.py`,
`slots.py` and `turns.py`. Who calls the forks: `trunks.py`; who looks at the loop: `plan_decode.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxrl_lm.generate import begin, collect, decode
from jaxrl_lm.models import Model
from jaxrl_lm.models.kv_cache import column_axes
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.sharding import Plan
from jaxrl_lm.slots import DecodeState, Prefixes, fork, start
from jaxrl_lm.turns import append, finish, room, waiting
from jaxrl_lm.types import Params, Requests, Rollout


@dataclasses.dataclass(frozen=True)
class Turns:
    """Compiled functions of an episode, in the order in which a host calls them; states that go in are donated."""

    start: Callable[..., DecodeState]  # (weights, requests)
    decode: Callable[..., DecodeState]  # (weights, requests, state, stops, until)
    waiting: Callable[..., jax.Array]  # (state) -> [W]
    room: Callable[..., jax.Array]  # (state, requests) -> [W]
    append: Callable[..., DecodeState]  # (weights, requests, state, observations, lengths)
    finish: Callable[..., DecodeState]  # (state, over, cut)
    collect: Callable[..., Rollout]  # (state, requests)


def state_layouts(state: DecodeState, plan: Plan) -> Any:
    """The layouts of a state, of arrays or of shapes: rows and slots over the batch axes, caches by their heads too."""

    def one(path, x):
        if not x.ndim:
            return plan.replicated
        heads = ("kv_heads",) if x.ndim == 4 else ()  # of what has rows first
        return plan.sharding(("batch", *heads, *(None,) * (x.ndim - 1 - len(heads))), x.shape, f"state{path}")

    return jax.tree.map_with_path(one, state)


def compile_decode(layouts: Any, *, model: Model, sampling: SamplingConfig) -> Callable[..., DecodeState]:
    """(decode params, requests, state, stops, until) -> state, of `decode`; the state that it starts from is donated.

    `model` is laid out for decoding (`Model.for_decode`); `layouts` are `state_layouts`.
    """
    return jax.jit(functools.partial(decode, model=model, sampling=sampling), donate_argnums=2, out_shardings=layouts)


def compile_turns(model: Model, sampling: SamplingConfig) -> Turns:
    """Binds everything static; nothing is compiled before its first call. On a mesh arguments lie where they shall."""
    bind, own = functools.partial, {"model": model.for_decode(), "sampling": sampling}
    return Turns(
        start=jax.jit(bind(begin, **own)),
        decode=jax.jit(bind(decode, **own), donate_argnums=2),
        waiting=jax.jit(waiting),
        room=jax.jit(bind(room, sampling=sampling)),
        append=jax.jit(bind(append, **own), donate_argnums=2),
        finish=jax.jit(bind(finish, plan=own["model"].plan), donate_argnums=0),
        collect=jax.jit(bind(collect, sampling=sampling)),
    )


@dataclasses.dataclass(frozen=True)
class Forks:
    """Compiled functions. A state here holds no caches of the prefixes that its rows began with: forks do not read them."""

    plan: Plan
    read: Callable[..., DecodeState]  # (weights, prompts, their segment ids): a row a prompt, that has nothing new
    give: Callable[..., DecodeState]  # (weights, prefixes, tokens, lengths): a row a prefix, as if it had sampled these
    fork: Callable[..., Prefixes]  # (state, rows, counts, which of them are this state's, the others, columns)
    sample: Callable[..., tuple[DecodeState | None, Rollout]]  # (weights, prefixes, requests, stops, keep the state)


def _light(state: DecodeState) -> DecodeState:
    prefixes = state.prefixes
    return state._replace(prefixes=prefixes._replace(cache=prefixes.cache._replace(layers=())))


def _blank(tokens: Int32[Array, "P Tp"], segment_ids: Int32[Array, "P Tp"], new: int) -> Requests:
    """Requests of rows that are never sampled."""
    full = lambda value, dtype: jnp.full((tokens.shape[0],), value, dtype)
    keys = jnp.broadcast_to(jax.random.key(0), (tokens.shape[0],))
    return Requests(tokens, segment_ids, keys, full(new, jnp.int32), full(1.0, jnp.float32), jnp.zeros((), jnp.int32))


def _bare(sampling: SamplingConfig, new: int, observation_columns: int | None = None) -> SamplingConfig:
    """Of rows that draw nothing: how they are kept, and no rules of drawing."""
    return SamplingConfig(
        max_new_tokens=new,
        eos_token_ids=sampling.eos_token_ids,
        pad_token_id=sampling.pad_token_id,
        kv_cache_dtype=sampling.kv_cache_dtype,
        observation_columns=observation_columns,
    )


def read_rows(
    params: Params,
    tokens: Int32[Array, "P Tp"],
    segment_ids: Int32[Array, "P Tp"],
    *,
    model: Model,
    sampling: SamplingConfig,
) -> DecodeState:
    """The state of rows that have read these left-padded prompts and written nothing."""
    own = _bare(sampling, 1)
    return _light(begin(params, _blank(tokens, segment_ids, 1), model=model, sampling=own))


def give_rows(
    params: Params,
    prefixes: Prefixes,
    tokens: Int32[Array, "P C"],
    lengths: Int32[Array, "P"],
    *,
    model: Model,
    sampling: SamplingConfig,
) -> DecodeState:
    """The state of rows that have written the first `lengths` of these tokens after their prefixes."""
    columns = tokens.shape[1]
    own = _bare(sampling, columns + 1, observation_columns=columns)
    requests = _blank(tokens, jnp.ones_like(tokens), columns + 1)
    state = start(prefixes, requests, model=model, sampling=own)
    return _light(append(params, requests, state, tokens, lengths, model=model, sampling=own))


def fork_among(
    state: DecodeState,
    rows: Int32[Array, "P"],
    counts: Int32[Array, "P"],
    here: Bool[Array, "P"],
    others: Prefixes | None,
    *,
    columns: int,
    model: Model,
) -> Prefixes:
    """`fork` of the rows that are this state's, beside forks of other states, with caches of so many columns."""

    def fit(x, axis):
        more = max(0, columns - x.shape[axis])
        x = jnp.pad(x, [(0, more if a == axis else 0) for a in range(4)])
        return model.constrain_kv(jax.lax.slice_in_dim(x, 0, columns, axis=axis))

    found = fork(state, rows, counts)
    layers = tuple(jax.tree.map(fit, layer, column_axes(*layer)) for layer in found.cache.layers)
    found = found._replace(cache=found.cache._replace(layers=layers))
    if others is None:
        return found
    pick = lambda new, old: jnp.where(here.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
    return jax.tree.map(pick, found, others)


def sample_from(
    params: Params,
    prefixes: Prefixes,
    requests: Requests,
    stops: Int32[Array, "states V"] | None,
    keep: bool,
    *,
    model: Model,
    sampling: SamplingConfig,
) -> tuple[DecodeState | None, Rollout]:
    """What `generate` gives for these requests, whose prompts the prefixes have read; and the state, to fork from."""
    state = start(prefixes, requests, model=model, sampling=sampling)
    state = decode(params, requests, state, stops, model=model, sampling=sampling)
    return _light(state) if keep else None, collect(state, requests, sampling=sampling)


def compile_forks(model: Model, plan: Plan, sampling: SamplingConfig) -> Forks:
    """Binds everything static; each function compiles once a shape."""
    bind, own = functools.partial, {"model": model.for_decode(), "sampling": sampling}
    return Forks(
        plan=plan,
        read=jax.jit(bind(read_rows, **own)),
        give=jax.jit(bind(give_rows, **own)),
        fork=jax.jit(bind(fork_among, model=own["model"]), static_argnames="columns"),
        sample=jax.jit(bind(sample_from, **own), static_argnums=4, out_shardings=(None, plan.for_decode().rows)),
    )
