"""Log-probs, entropy and values of given tokens. The ONLY shift by one in the package stands here.

The logits of a whole batch never exist: the vocabulary head runs over chunks of columns, and the backward pass computes
each chunk again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrl_lm.models import Model, heads, positions
from jaxrl_lm.types import Params, Scores


def token_scores(logits: Float[Array, "N t V"], targets: Int32[Array, "N t"], temperature: Float[Array, "N"]) -> Scores:
    """log softmax(logits / temperature) at the targets, and the entropy in nats; float32. Temperature 0 counts as 1."""
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    logprobs = logits - log_total
    entropy = -jnp.sum(jnp.exp(logprobs) * jnp.maximum(logprobs, jnp.finfo(logprobs.dtype).min), axis=-1)
    return Scores((chosen - log_total)[..., 0], entropy)


def states_before(
    params: Params, tokens: Int32[Array, "N T"], segment_ids: Int32[Array, "N T"], *, model: Model, start: int
) -> tuple[Float[Array, "N t D"], Bool[Array, "N t"]]:
    """The hidden state before each token from column `start` on, and whether it stands in the token's segment.

    Raises ValueError if start is not in [1, T).
    """
    columns = tokens.shape[1]
    if not 1 <= start < columns:
        raise ValueError(f"start={start} is outside [1, {columns}): column 0 has nothing before it")
    hidden, _ = model.hidden(params, tokens, positions(segment_ids), segment_ids)
    real = (segment_ids[:, start:] > 0) & (segment_ids[:, start:] == segment_ids[:, start - 1 : -1])
    return hidden[:, start - 1 : -1], real  # the shift: column t−1 predicts token t


def place_columns(values: Float[Array, "N t"], real: Bool[Array, "N t"], start: int) -> Float[Array, "N T"]:
    """Values of the columns from `start` on as facts about all T columns, 0 where there is nothing before."""
    return jnp.pad(jnp.where(real, values, 0.0), ((0, 0), (start, 0)))


def score(
    params: Params,
    tokens: Int32[Array, "N T"],
    segment_ids: Int32[Array, "N T"],
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
    return _scores(params, before, tokens[:, start:], real, model, temperature, chunk, start)


def values(
    head: Params,
    params: Params,
    tokens: Int32[Array, "N T"],
    segment_ids: Int32[Array, "N T"],
    *,
    model: Model,
    start: int = 1,
) -> Float[Array, "N T"]:
    """The value of the state before tokens[n, t], tokens[n, :t] of its segment, at column t; float32, 0 as in `score`.

    `params` are a critic's trunk, or a policy's weights that the head shares. Raises ValueError as `score`.
    """
    before, real = states_before(params, tokens, segment_ids, model=model, start=start)
    return place_columns(heads.apply(head, before), real, start)


def score_with_values(
    params: Params,
    head: Params,
    tokens: Int32[Array, "N T"],
    segment_ids: Int32[Array, "N T"],
    *,
    model: Model,
    temperature: Float[Array, "N"] | float = 1.0,
    chunk: int = 2048,
    start: int = 1,
) -> tuple[Scores, Float[Array, "N T"]]:
    """What `score` and `values` give for a shared trunk, from one forward pass. Raises ValueError as `score`."""
    before, real = states_before(params, tokens, segment_ids, model=model, start=start)
    scores = _scores(params, before, tokens[:, start:], real, model, temperature, chunk, start)
    return scores, place_columns(heads.apply(head, before), real, start)


def _scores(params, before, targets, real, model: Model, temperature, chunk: int, start: int) -> Scores:
    """Scores of the targets from the hidden states before them, a chunk of columns at a time."""
    temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (targets.shape[0],))
    one = lambda before, targets: token_scores(model.unembed(params, before), targets, temperature)
    return Scores(*(place_columns(x, real, start) for x in by_columns(one, before, targets, chunk=chunk)))


def by_columns(function: Callable[..., Any], *arrays: Shaped[Array, "N t ..."], chunk: int) -> Any:
    """function(*arrays), of arrays [N t …] to a tree of [N t], on about `chunk` tokens at a time.

    The backward pass computes each chunk again, so that what is large within one never exists for all columns.
    """
    rows, columns = arrays[0].shape[:2]
    width = min(columns, max(1, chunk // rows))
    count = -(-columns // width)
    split = lambda x: (
        jnp.pad(x, ((0, 0), (0, count * width - columns), *((0, 0),) * (x.ndim - 2)))
        .reshape(rows, count, width, *x.shape[2:])
        .swapaxes(0, 1)
    )

    @jax.checkpoint
    def one(_, part):
        return None, function(*part)

    _, out = jax.lax.scan(one, None, tuple(map(split, arrays)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, count * width)[:, :columns], out)
