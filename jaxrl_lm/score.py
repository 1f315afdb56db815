"""Log-probs, entropy and values of given tokens. The ONLY shift by one in the package stands here.

The logits of a whole batch never exist: the vocabulary head runs over chunks of columns, and the backward pass computes
each chunk again. On a mesh each device has its own part of the vocabulary: of a chunk's logits only the sums over its part
leave it, and neither logits nor the head's matrix are gathered.

A `Layout` of packed rows may stand for tokens, with None for segment_ids: the scores are those of its [N T] rows, whatever
`start`, and only its targets have any.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrl_lm.models import Model, heads, positions
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import Layout, Params, Scores


def token_scores(
    logits: Float[Array, "N t V"],
    targets: Int32[Array, "N t"],
    temperature: Float[Array, "N"] | Float[Array, "N t"],
) -> Scores:
    """log softmax(logits / temperature) at the targets, and the entropy in nats; float32. Temperature 0 counts as 1."""
    temperature = jnp.where(temperature > 0, temperature, 1.0)
    logits = logits / jnp.expand_dims(temperature, tuple(range(temperature.ndim, 3)))
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # Selected, not indexed: so a device that holds a part of the vocabulary needs no logits of the others.
    own = jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None] == targets[..., None]
    chosen = jnp.sum(jnp.where(own, logits, 0.0), axis=-1, keepdims=True)
    logprobs = logits - log_total
    entropy = -jnp.sum(jnp.exp(logprobs) * jnp.maximum(logprobs, jnp.finfo(logprobs.dtype).min), axis=-1)
    return Scores((chosen - log_total)[..., 0], entropy)


def states_before(
    params: Params,
    tokens: Int32[Array, "N T"] | Layout,
    segment_ids: Int32[Array, "N T"] | None,
    *,
    model: Model,
    start: int,
) -> tuple[Float[Array, "M t D"], Bool[Array, "M t"]]:
    """The hidden state before each token from column `start` on, and whether it stands in the token's segment.

    Of a Layout: before each of its targets, [C K D], and which of these are there. Raises ValueError if start is not in
    [1, T).
    """
    if isinstance(tokens, Layout):
        hidden = model.hidden(params, tokens.tokens, tokens.positions, tokens.segment_ids, tokens.until, tokens.reads)
        hidden = hidden.reshape(tokens.before.shape[0], -1, hidden.shape[-1])
        places = jnp.maximum(tokens.before, 0)[..., None]
        return jnp.take_along_axis(hidden, places, axis=1, mode="promise_in_bounds"), tokens.before >= 0
    columns = tokens.shape[1]
    if not 1 <= start < columns:
        raise ValueError(f"start={start} is outside [1, {columns}): column 0 has nothing before it")
    hidden = model.hidden(params, tokens, positions(segment_ids), segment_ids)
    real = (segment_ids[:, start:] > 0) & (segment_ids[:, start:] == segment_ids[:, start - 1 : -1])
    return hidden[:, start - 1 : -1], real  # the shift: column t−1 predicts token t


def place_columns(
    values: Float[Array, "M t"], real: Bool[Array, "M t"], start: int, layout: Layout | None = None
) -> Float[Array, "N T"]:
    """Values of the columns from `start` on as facts about all T columns, 0 where there is nothing before.

    Those of a layout's targets come back as facts about the rows that it packs.
    """
    values = jnp.where(real, values, 0.0)
    if layout is None:
        return jnp.pad(values, ((0, 0), (start, 0)))
    places = layout.places.reshape(values.shape[0], -1)
    found = jnp.take_along_axis(values, jnp.maximum(places, 0), axis=1, mode="promise_in_bounds")
    return jnp.where(places >= 0, found, 0.0).reshape(layout.places.shape)


def score(
    params: Params,
    tokens: Int32[Array, "N T"] | Layout,
    segment_ids: Int32[Array, "N T"] | None,
    *,
    model: Model,
    temperature: Float[Array, "N"] | float = 1.0,
    chunk: int = 2048,
    start: int = 1,
) -> Scores:
    """log pi(tokens[n, t] | tokens[n, :t]) and the entropy of that distribution, at column t; [N T].

    Columns before `start` (a prompt whose scores nobody reads), the first token of each segment and padding hold 0.
    `chunk` is the number of tokens whose logits exist at once. Raises ValueError if start is not in [1, T).
    """
    before, real = states_before(params, tokens, segment_ids, model=model, start=start)
    return _scores(params, before, tokens, real, model, temperature, chunk, start)


def values(
    head: Params,
    params: Params,
    tokens: Int32[Array, "N T"] | Layout,
    segment_ids: Int32[Array, "N T"] | None,
    *,
    model: Model,
    start: int = 1,
) -> Float[Array, "N T"]:
    """The value of the state before tokens[n, t], tokens[n, :t] of its segment, at column t; float32, 0 as in `score`.

    `params` are a critic's trunk, or a policy's weights that the head shares. Raises ValueError as `score`.
    """
    before, real = states_before(params, tokens, segment_ids, model=model, start=start)
    return place_columns(heads.apply(head, before), real, start, _layout(tokens))


def score_with_values(
    params: Params,
    head: Params,
    tokens: Int32[Array, "N T"] | Layout,
    segment_ids: Int32[Array, "N T"] | None,
    *,
    model: Model,
    temperature: Float[Array, "N"] | float = 1.0,
    chunk: int = 2048,
    start: int = 1,
) -> tuple[Scores, Float[Array, "N T"]]:
    """What `score` and `values` give for a shared trunk, from one forward pass. Raises ValueError as `score`."""
    before, real = states_before(params, tokens, segment_ids, model=model, start=start)
    scores = _scores(params, before, tokens, real, model, temperature, chunk, start)
    return scores, place_columns(heads.apply(head, before), real, start, _layout(tokens))


def _layout(tokens: Any) -> Layout | None:
    return tokens if isinstance(tokens, Layout) else None


def _scores(params, before, tokens, real, model: Model, temperature, chunk: int, start: int) -> Scores:
    """Scores of the targets from the hidden states before them, a chunk of columns at a time."""
    layout = _layout(tokens)
    rows = (tokens if layout is None else layout.places).shape[0]
    temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (rows,))
    if layout is None:
        one = lambda before, targets: token_scores(model.unembed(params, before), targets, temperature)
        parts = by_columns(one, before, tokens[:, start:], chunk=chunk, plan=model.plan)
    else:
        each = temperature.reshape(layout.rows.shape[0], -1)
        each = jnp.take_along_axis(each, layout.rows, axis=1, mode="promise_in_bounds")
        one = lambda before, *given: token_scores(model.unembed(params, before), *given)
        parts = by_columns(one, before, layout.targets, each, chunk=chunk, plan=model.plan, real=real)
    return Scores(*(place_columns(x, real, start, layout) for x in parts))


def by_columns(
    function: Callable[..., Any],
    *arrays: Shaped[Array, "N t ..."],
    chunk: int,
    plan: Plan | None = None,
    real: Bool[Array, "N t"] | None = None,
) -> Any:
    """function(*arrays), of arrays [N t …] to a tree of [N t], on about `chunk` tokens at a time.

    The backward pass computes each chunk again, so that what is large within one never exists for all columns. Where the
    plan splits columns over devices, each has an equal part of every chunk. A chunk without a `real` token is not computed,
    and gives zeros.
    """
    rows, columns = arrays[0].shape[:2]
    ways = 1 if plan is None else plan.ways("columns")
    own = -(-columns // ways)  # columns of a device
    width = min(own, max(1, chunk // rows // ways))
    count = -(-own // width)

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, ways * count * width - columns), *((0, 0),) * (x.ndim - 2)))
        if ways > 1:
            x = plan.constrain(x, ("batch", "columns", *(None,) * (x.ndim - 2)))
        x = jnp.moveaxis(x.reshape(rows, ways, count, width, *x.shape[2:]), 2, 0)
        return x.reshape(count, rows, ways * width, *x.shape[4:])

    def join(x):
        x = jnp.moveaxis(x.reshape(count, rows, ways, width), 0, 2)
        return x.reshape(rows, ways * count * width)[:, :columns]

    @jax.checkpoint
    def one(_, part):
        return None, function(*part)

    @jax.checkpoint
    def where_real(_, part):
        any_real, part = part
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *part))
        return None, jax.lax.cond(any_real, function, lambda *_: nothing, *part)

    parts = tuple(map(split, arrays))
    if real is None:
        _, out = jax.lax.scan(one, None, parts)
    else:
        _, out = jax.lax.scan(where_real, None, (split(real).any((1, 2)), parts))
    return jax.tree.map(join, out)
