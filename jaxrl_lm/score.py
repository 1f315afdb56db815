"""Log-probs and entropy of given tokens. The ONLY shift by one in the package stands here.

The logits of a whole batch never exist: the vocabulary head runs over chunks of columns, and the backward pass computes
each chunk again.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxrl_lm.models import Model, positions
from jaxrl_lm.types import Params, Scores


def token_scores(logits: Float[Array, "N t V"], targets: Int32[Array, "N t"], temperature: Float[Array, "N"]) -> Scores:
    """log softmax(logits / temperature) at the targets, and the entropy in nats; float32. Temperature 0 counts as 1."""
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    logprobs = logits - log_total
    entropy = -jnp.sum(jnp.exp(logprobs) * jnp.maximum(logprobs, jnp.finfo(logprobs.dtype).min), axis=-1)
    return Scores((chosen - log_total)[..., 0], entropy)


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
    rows, columns = tokens.shape
    if not 1 <= start < columns:
        raise ValueError(f"start={start} is outside [1, {columns}): column 0 has nothing before it")
    hidden, _ = model.hidden(params, tokens, positions(segment_ids), segment_ids)
    temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (rows,))
    before, targets = hidden[:, start - 1 : -1], tokens[:, start:]  # the shift: column t−1 predicts token t

    width = min(columns - start, max(1, chunk // rows))
    count = -(-(columns - start) // width)
    split = lambda x: (
        jnp.pad(x, ((0, 0), (0, count * width - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
        .reshape(rows, count, width, *x.shape[2:])
        .swapaxes(0, 1)
    )

    @jax.checkpoint
    def one(_, part):
        return None, token_scores(model.unembed(params, part[0]), part[1], temperature)

    _, scores = jax.lax.scan(one, None, (split(before), split(targets)))
    real = (segment_ids[:, start:] > 0) & (segment_ids[:, start:] == segment_ids[:, start - 1 : -1])
    join = lambda x: x.swapaxes(0, 1).reshape(rows, count * width)[:, : columns - start]
    place = lambda x: jnp.pad(jnp.where(real, join(x), 0.0), ((0, 0), (start, 0)))
    return Scores(place(scores.logprobs), place(scores.entropy))
