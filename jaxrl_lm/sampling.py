"""Drawing one token a row from logits: temperature, top-k, top-p, min-p, and a draw that costs little noise."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key

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


def _gumbel_argmax(key: Key[Array, ""], logits: Float[Array, "n"]) -> Int32[Array, ""]:
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)
    return jnp.argmax(jnp.where(jnp.isneginf(logits), -jnp.inf, logits + noise)).astype(jnp.int32)


def categorical(logits: Float[Array, "N V"], keys: Key[Array, "N"]) -> Int32[Array, "N"]:
    """One draw a row from softmax(logits), each from its own key.

    In two stages, a block of 128 tokens by its summed probability and a token within it, each by the Gumbel maximum: the
    same distribution as one Gumbel a token for V/128 + 128 random numbers a row instead of V.
    """
    rows, size = logits.shape
    blocks = -(-size // BLOCK)
    padded = jnp.pad(logits, ((0, 0), (0, blocks * BLOCK - size)), constant_values=-jnp.inf).reshape(
        rows, blocks, BLOCK
    )
    best = jnp.max(logits, axis=1)[:, None, None]
    weight = jnp.sum(jnp.exp(padded - best), axis=2)
    log_weight = jnp.where(weight > 0, jnp.log(jnp.where(weight > 0, weight, 1.0)), -jnp.inf)

    def one(key, log_weight, row):
        first, second = jax.random.split(key)
        block = _gumbel_argmax(first, log_weight)
        return block * BLOCK + _gumbel_argmax(second, row[block])

    return jax.vmap(one)(keys, log_weight, padded)


def draw(
    logits: Float[Array, "N V"], keys: Key[Array, "N"], temperature: Float[Array, "N"], sampling: SamplingConfig
) -> Drawn:
    """A token a row, with its log-probs. Temperature 0 is argmax, with log-probs at temperature 1 and a behaviour of 0."""
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    log_total = jax.nn.logsumexp(scaled, axis=1)
    allowed = truncate(scaled, sampling) if sampling.truncates else scaled
    token = jnp.where(greedy, jnp.argmax(logits, axis=1).astype(jnp.int32), categorical(allowed, keys))
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
    logprob = chosen - log_total
    if not sampling.truncates:
        return Drawn(token, logprob, logprob)
    behaviour = chosen - jax.nn.logsumexp(allowed, axis=1)
    return Drawn(token, logprob, jnp.where(greedy, 0.0, behaviour))
