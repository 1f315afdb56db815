"""Speculation: a pass reads, beside a row's new token, guesses of those that follow it, and keeps what comes true.

Here are the guesses; the loop that reads them is that of `generate.py`. A pass reads 1 + k tokens a row, a new one and a
draft of k, and draws at each of their places with the key of that place. While what is drawn is what was guessed, the next
place's draw counts too. So each token is the one that decoding one at a time draws, from the same logits with the same key:
the samples are the same but for the rounding of wider products, whatever the drafts are. Of the cache the columns that count
are kept.

Sources: Leviathan, Kalman and Matias (2023), "Fast Inference from Transformers via Speculative Decoding"; their test accepts
a guess that is certain with its probability under the model, as a draw that is compared does. Drafts: prompt lookup
(Saxena, 2023), the longest n-gram match in a text.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.types import Requests

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
    prompts: Prompts,
    written: Int32[Array, "W C"],
    drawn: Int32[Array, "W"],
    earlier: Int32[Array, "W C"] | None,
    *,
    draft: int,
    longest: int,
) -> Int32[Array, "W k"]:
    """Drafts of each row's next tokens, from its own prompt and the `drawn` tokens it has written or, where it has one, from
    the prompt's earlier completion, which −1 ends.

    A row that goes on as the earlier completion did gets what followed there.
    """
    columns = prompts.tokens.shape[1]
    own = jnp.concatenate([prompts.tokens, written], axis=1)
    end = columns + drawn
    text, known = own, end
    if earlier is not None:
        count = (earlier >= 0).sum(1, dtype=jnp.int32)
        is_there = jnp.broadcast_to((count > 0)[:, None], own.shape)
        text = jnp.where(is_there, jnp.concatenate([prompts.tokens, earlier], axis=1), own)
        known = jnp.where(count > 0, columns + count, end)
    return look_up(text, known, own, end, prompts.first, draft=draft, longest=longest)


def check_drafts(requests: Requests, sampling: SamplingConfig) -> None:
    """Raises ValueError for earlier completions that are not read, or do not fit."""
    if requests.drafts is None:
        return
    if not sampling.num_speculative_tokens or sampling.speculative_source != "last_epoch":
        raise ValueError(
            'drafts are given, but not read: set num_speculative_tokens and speculative_source="last_epoch", or leave them '
            "out"
        )
    shape = (requests.keys.shape[0], sampling.max_new_tokens)
    if requests.drafts.shape != shape:
        raise ValueError(
            f"drafts of shape {requests.drafts.shape}: must be a row a request and a column a token, {shape}"
        )
