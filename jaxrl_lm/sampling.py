"""Drawing one token a row from logits: temperature, top-k, top-p, min-p, and a draw that costs little noise."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from jaxrl_lm.sampling_config import SamplingConfig

BLOCK = 128


class Drawn(NamedTuple):
    token: Int32[Array, "N"]
    logprob: Float[Array, "N"]  # under softmax(logits / temperature)
    behaviour_logprob: Float[Array, "N"]  # under what was sampled from


def truncate(logits: Float[Array, "N V"], sampling: SamplingConfig) -> Float[Array, "N V"]:
    """Logits with −inf outside top-k, then top-p, then min-p, in transformers' order. The best token always stays;
    ties at a threshold stay together. Each is a threshold, found without a sort of the vocabulary."""
    threshold = ordered = None
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        ordered = jax.lax.top_k(logits, sampling.top_k)[0]
        threshold = ordered[:, -1:]
    if sampling.top_p is not None and sampling.top_p < 1.0:  # at 1 the rounded sum would cut off the tail
        of_best = ordered is not None
        threshold = _nucleus_of_best(logits, ordered, sampling.top_p) if of_best else nucleus(logits, sampling.top_p)
    if sampling.min_p is not None:
        least = jnp.max(logits, axis=1, keepdims=True) + jnp.log(sampling.min_p)
        threshold = least if threshold is None else jnp.maximum(threshold, least)
    return logits if threshold is None else jnp.where(logits >= threshold, logits, -jnp.inf)


def nucleus(logits: Float[Array, "N V"], top_p: float, *, ways: int | None = None) -> Float[Array, "N 1"]:
    """The least logit of the nucleus: of the tokens above which the probabilities sum to less than top_p.

    That sum falls as the threshold rises. So the threshold's place among the float32 numbers, whose bits are ordered as
    they are, is found by cutting the interval into `ways` parts again and again (2 on a CPU, where a comparison costs;
    8 elsewhere, where reading the logits does: the same threshold), which takes 29 or 10 sums over the vocabulary.
    Source of the nucleus: Holtzman et al. (2020). Weights that are equal as float32 numbers are ties.
    """
    rows, size = logits.shape
    ways = ways or (2 if jax.default_backend() == "cpu" else 8)
    weights = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    blocks = jnp.pad(weights, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)
    bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
    weight = lambda x: jax.lax.bitcast_convert_type(x, jnp.float32)

    def above(low: Float[Array, "N"]) -> Float[Array, "N"]:
        parts = jnp.sum(jnp.where(blocks > low[:, None, None], blocks, 0.0), axis=1)
        return jnp.sum(jax.lax.optimization_barrier(parts), axis=1)  # in two: less rounding

    total = above(jnp.full((rows,), -1.0))
    limit = top_p * total
    # All tokens of a weight below this one together have less than half of what the nucleus leaves out.
    low, high = bits(0.5 * (1.0 - top_p) * total / size), bits(jnp.ones((rows,), jnp.float32))

    def cut(ends):
        low, high = ends  # the first is outside, the second is inside
        step = (high - low + ways - 1) // ways
        middles = [jnp.minimum(low + number * step, high - 1) for number in range(1, ways)]
        inside = [(middle > low) & (above(weight(middle)) < limit) for middle in middles]
        for middle, within in zip(middles, inside, strict=True):
            low, high = (
                jnp.where(within, low, jnp.maximum(low, middle)),
                jnp.where(within, jnp.minimum(high, middle), high),
            )
        return low, high

    _, least = jax.lax.while_loop(lambda ends: jnp.any(ends[1] - ends[0] > 1), cut, (low, high))
    return jnp.min(jnp.where(weights >= weight(least)[:, None], logits, jnp.inf), axis=1, keepdims=True)


def _nucleus_of_best(logits: Float[Array, "N V"], ordered: Float[Array, "N k"], top_p: float) -> Float[Array, "N 1"]:
    """The same within top-k, of whose logits the best k come in order; more may be tied with the last of them."""
    more = jnp.sum(logits >= ordered[:, -1:], axis=1) - ordered.shape[1]
    weights = jnp.exp(ordered - ordered[:, :1])
    total = jnp.sum(weights, axis=1) + more * weights[:, -1]
    before = jnp.pad(jnp.cumsum(weights, axis=1)[:, :-1], ((0, 0), (1, 0)))
    kept = before < (top_p * total)[:, None]
    return jnp.min(jnp.where(kept, ordered, jnp.inf), axis=1, keepdims=True)


def _gumbel_argmax(keys: Key[Array, "N"], logits: Float[Array, "N n"], greedy: Bool[Array, "N"]) -> Int32[Array, "N"]:
    """A draw from softmax(logits) of each row; of a greedy one the first of the best."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    noisy = jnp.where(jnp.isneginf(logits) | greedy[:, None], logits, logits + noise)
    return jnp.argmax(noisy, axis=1).astype(jnp.int32)


def categorical(
    logits: Float[Array, "N V"], keys: Key[Array, "N"], greedy: Bool[Array, "N"] | None = None
) -> tuple[Int32[Array, "N"], Float[Array, "N"], Float[Array, "N"]]:
    """One draw a row from softmax(logits), each from its own key, its logit, and log Σ exp(logits); greedy rows take the
    first best.

    In two stages, a block of 128 tokens by its summed probability and a token within it, each by the Gumbel maximum: the
    same distribution as one Gumbel a token for V/128 + 128 random numbers a row instead of V, and two passes over V.
    """
    rows, size = logits.shape
    greedy = jnp.zeros((rows,), bool) if greedy is None else greedy
    room = ((0, 0), (0, -size % BLOCK))
    blocks = jnp.pad(logits, room, constant_values=-jnp.inf).reshape(rows, -1, BLOCK)
    highest = jnp.max(blocks, axis=2)
    best = jnp.max(highest, axis=1)
    weight = jnp.sum(jnp.exp(blocks - best[:, None, None]), axis=2)
    log_weight = jnp.where(weight > 0, jnp.log(jnp.where(weight > 0, weight, 1.0)), -jnp.inf)
    two = jax.vmap(jax.random.split)(keys)
    block = _gumbel_argmax(two[:, 0], jnp.where(greedy[:, None], highest, log_weight), greedy)
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    place = _gumbel_argmax(two[:, 1], within, greedy)
    chosen = jnp.take_along_axis(within, place[:, None], axis=1)[:, 0]
    return block * BLOCK + place, chosen, best + jnp.log(jnp.sum(weight, axis=1))


def draw(
    logits: Float[Array, "N V"],
    keys: Key[Array, "N"],
    temperature: Float[Array, "N"],
    sampling: SamplingConfig,
    ruled: Float[Array, "N V"] | None = None,
) -> Drawn:
    """A token a row, with its log-probs. Temperature 0 is argmax, with log-probs at temperature 1 and a behaviour of 0.

    `ruled`: the logits under `logit_rules`, which are then drawn from; the log-prob stays that of the policy's own.
    """
    greedy = temperature <= 0
    heat = jnp.where(greedy, 1.0, temperature)[:, None]
    scaled = logits / heat
    drawn_from = scaled if ruled is None else ruled / heat
    if sampling.truncates:
        drawn_from = truncate(drawn_from, sampling)
    token, chosen, log_total = categorical(drawn_from, keys, greedy)
    behaviour = chosen - log_total
    if not sampling.truncates and ruled is None:
        return Drawn(token, behaviour, behaviour)
    own = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
    return Drawn(token, own - jax.nn.logsumexp(scaled, axis=1), jnp.where(greedy, 0.0, behaviour))
