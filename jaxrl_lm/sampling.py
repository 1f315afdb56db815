"""Drawing one token a row from logits: temperature, top-k, top-p, min-p, and a draw that costs little noise."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from jaxrl_lm.config import SamplingConfig

BLOCK = 128


class Drawn(NamedTuple):
    token: Int32[Array, "N"]
    logprob: Float[Array, "N"]  # under softmax(logits / temperature)
    behaviour_logprob: Float[Array, "N"]  # under what was sampled from


def truncate(logits: Float[Array, "N V"], sampling: SamplingConfig) -> Float[Array, "N V"]:
    """Logits with −inf outside top-k, then top-p, then min-p, in transformers' order. The best token always stays;
    ties at a threshold stay together."""
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        kth = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= kth, logits, -jnp.inf)
    if sampling.top_p is not None and sampling.top_p < 1.0:  # at 1 the rounded sum would cut off the tail
        ordered = jnp.sort(logits, axis=1, descending=True)
        probs = jax.nn.softmax(ordered, axis=1)
        kept = (jnp.cumsum(probs, axis=1) - probs) < sampling.top_p
        threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=1, keepdims=True)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    if sampling.min_p is not None:
        best = jnp.max(logits, axis=1, keepdims=True)
        logits = jnp.where(logits >= best + jnp.log(sampling.min_p), logits, -jnp.inf)
    return logits


def _gumbel_argmax(keys: Key[Array, "N"], logits: Float[Array, "N n"], greedy: Bool[Array, "N"]) -> Int32[Array, "N"]:
    """A draw from softmax(logits) of each row; of a greedy one the first of the best."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    noisy = jnp.where(jnp.isneginf(logits) | greedy[:, None], logits, logits + noise)
    return jnp.argmax(noisy, axis=1).astype(jnp.int32)


def categorical(
    logits: Float[Array, "N V"], keys: Key[Array, "N"], greedy: Bool[Array, "N"] | None = None
) -> tuple[Int32[Array, "N"], Float[Array, "N"]]:
    """One draw a row from softmax(logits), each from its own key, and log Σ exp(logits); greedy rows take the first best.

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
    token = block * BLOCK + _gumbel_argmax(two[:, 1], within, greedy)
    return token, best + jnp.log(jnp.sum(weight, axis=1))


def draw(
    logits: Float[Array, "N V"], keys: Key[Array, "N"], temperature: Float[Array, "N"], sampling: SamplingConfig
) -> Drawn:
    """A token a row, with its log-probs. Temperature 0 is argmax, with log-probs at temperature 1 and a behaviour of 0."""
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    token, log_total = categorical(truncate(scaled, sampling) if sampling.truncates else scaled, keys, greedy)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
    if not sampling.truncates:
        logprob = chosen - log_total
        return Drawn(token, logprob, logprob)
    return Drawn(token, chosen - jax.nn.logsumexp(scaled, axis=1), jnp.where(greedy, 0.0, chosen - log_total))
