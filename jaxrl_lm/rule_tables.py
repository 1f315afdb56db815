"""From options to the rules of a draw: fields of `SamplingConfig`, and the tables that the sampler reads.

On the host, once a run. What the rules do: `logit_rules.py`; which options there are: `config.SamplingOptions`.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxrl_lm.config import SamplingOptions
from jaxrl_lm.data import load_function
from jaxrl_lm.logit_rules import Tables, check_rules, make_grammar
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.stops import read_vocabulary, stop_table, token_bytes

PLAIN = (
    "repetition_penalty",
    "suppress_tokens",
    "allowed_token_ids",
    "min_new_tokens",
    "forced_tokens",
    "max_thinking_tokens",
)
"""Options that `SamplingConfig` has as they are."""

FROM_THE_START = ("min_new_tokens", "forced_tokens", "end_of_thinking", "max_thinking_tokens", "vocabulary_mask")
"""Options that read a completion from its first token."""


def rules_of(config: SamplingOptions, tokenizer: Any) -> dict[str, Any]:
    """The fields of `SamplingConfig` that are rules. Raises ValueError for a key of logit_bias that is no token id."""
    wrong = [key for key in config.logit_bias if not key.isdecimal()]
    if wrong:
        raise ValueError(f"logit_bias: {wrong[0]!r} is no token id: its keys are ids, such as 42 = -5.0")
    return {
        **{name: getattr(config, name) for name in PLAIN},
        "logit_bias": tuple(sorted((int(key), float(bias)) for key, bias in config.logit_bias.items())),
        "end_of_thinking": () if config.end_of_thinking is None else _end_ids(config.end_of_thinking, tokenizer),
        "vocabulary_mask": config.vocabulary_mask is not None,
    }


def sampling_of(
    config: SamplingOptions, tokenizer: Any, *, eos_token_ids: tuple[int, ...], pad_token_id: int
) -> SamplingConfig:
    """What a sampler compiles in of these options. Raises ValueError as `rules_of` and SamplingConfig."""
    return SamplingConfig(
        max_new_tokens=config.max_completion_length,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        slots=config.decode_slots,
        **rules_of(config, tokenizer),
        kv_cache_dtype=config.kv_cache_dtype,
        num_speculative_tokens=config.num_speculative_tokens,
        speculative_source=config.speculative_source,
        prompt_lookup_max=config.prompt_lookup_max,
    )


def check_options(config: SamplingOptions) -> None:
    """Raises ValueError, before anything is loaded, for rules that contradict each other, the lengths or speculation."""
    check_speculation(config)
    if (config.max_thinking_tokens is None) != (config.end_of_thinking is None):
        raise ValueError(
            f"max_thinking_tokens={config.max_thinking_tokens} and end_of_thinking={config.end_of_thinking!r}: give both, "
            "or neither"
        )
    without = {"max_thinking_tokens": None, "end_of_thinking": None}
    rules = rules_of(dataclasses.replace(config, **without), None)
    found = SamplingConfig(
        max_new_tokens=config.max_completion_length,
        eos_token_ids=(),
        pad_token_id=0,
        num_speculative_tokens=config.num_speculative_tokens,
        speculative_source=config.speculative_source,
        prompt_lookup_max=config.prompt_lookup_max,
        **rules,
    )
    if (
        config.max_thinking_tokens is not None
    ):  # the tokens of its end are not known yet: one that is no id stands for them
        budget = {"max_thinking_tokens": config.max_thinking_tokens, "end_of_thinking": (-1,)}
        dataclasses.replace(found, allowed_token_ids=(), **budget)


def check_speculation(config: SamplingOptions) -> None:
    """Raises ValueError for options of speculation without speculation."""
    for name in () if config.num_speculative_tokens else ("speculative_source", "prompt_lookup_max"):
        if getattr(config, name) != SamplingOptions.__dataclass_fields__[name].default:
            raise ValueError(
                f"{name}={getattr(config, name)!r} has no effect without num_speculative_tokens: give both, or leave it out"
            )


def _end_ids(end: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that are forced at the end of thinking: a token id, or a text's."""
    ids = (int(end),) if end.isdecimal() else tuple(tokenizer(end, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ValueError(f"end_of_thinking={end!r} has no tokens")
    return ids


def thinking_table(end: str, ids: tuple[int, ...], tokenizer: Any, vocab_size: int) -> Int[np.ndarray, "places V"]:
    """Next place [places, V] of what reads a row for the end of thinking, however it is spelled; the last is the end.

    Raises ValueError where the ids that are forced do not write it.
    """
    if end.isdecimal():
        table = np.zeros((2, vocab_size), np.int32)
        table[0, int(end)], table[1] = 1, 1
        return table
    table, place = stop_table((end,), tokenizer, vocab_size), 0
    for token in ids:
        place = table[place, token]
    if place != len(table) - 1:
        raise ValueError(
            f"end_of_thinking={end!r}: the tokenizer's tokens {list(ids)} do not spell it; give a token id"
        )
    return table


def rule_tables(config: SamplingOptions, sampling: SamplingConfig, tokenizer: Any, vocab_size: int) -> Any:
    """What `generate` takes as its tables: of stop strings alone, of the rules too, or None.

    Raises ValueError as `check_rules` and `make_grammar`, and for forced tokens that the grammar does not allow or that
    write a stop string.
    """
    check_rules(sampling, None, vocab_size)
    stops = stop_table(config.stop, tokenizer, vocab_size)
    _check_stops(stops, config.stop, sampling)
    if not sampling.vocabulary_mask and sampling.max_thinking_tokens is None:
        return stops
    grammar = thinking = None
    if sampling.max_thinking_tokens is not None:
        thinking = thinking_table(config.end_of_thinking, sampling.end_of_thinking, tokenizer, vocab_size)
    if sampling.vocabulary_mask:
        hook = load_function(config.vocabulary_mask, option="vocabulary_mask")
        table = np.asarray(hook(tokenizer=tokenizer, vocab_size=vocab_size, eos_token_ids=sampling.eos_token_ids))
        if table.ndim == 2 and table.shape[1] != vocab_size:
            raise ValueError(f"vocabulary_mask: the table has {table.shape[1]} tokens, the model {vocab_size}")
        grammar = make_grammar(table, eos_token_ids=sampling.eos_token_ids, banned=banned_ids(sampling, vocab_size))
        _check_forced(table, sampling)
    return Tables(stops, grammar, thinking)


def banned_ids(sampling: SamplingConfig, vocab_size: int) -> tuple[int, ...]:
    """Token ids that suppress_tokens and allowed_token_ids forbid."""
    others = set(range(vocab_size)) - set(sampling.allowed_token_ids) if sampling.allowed_token_ids else set()
    return tuple(sorted(others | set(sampling.suppress_tokens)))


def _check_stops(stops: np.ndarray | None, texts: tuple[str, ...], sampling: SamplingConfig) -> None:
    """Raises ValueError where tokens are forced that write a stop string by themselves: stops are read in these too."""
    head, end = sampling.forced_tokens, sampling.end_of_thinking
    for name, tokens in (("forced_tokens", head), ("end_of_thinking", end)):
        # With a budget of 0 the one stands right after the other; else what stands before is the policy's.
        read = (*head, *tokens) if name == "end_of_thinking" and sampling.max_thinking_tokens == 0 else tokens
        state = 0
        for token in () if stops is None else read:
            state = stops[state, token]
        if state and state == len(stops) - 1:
            raise ValueError(
                f"stop={texts}: the tokens of {name}, {list(tokens)}, write one of these strings, so that a completion "
                "would end within them; leave the string out, or force other tokens"
            )


def _check_forced(table: np.ndarray, sampling: SamplingConfig) -> None:
    state = 0
    for token in sampling.forced_tokens:
        if table[state, token] < 0:
            raise ValueError(f"forced_tokens: vocabulary_mask does not allow token {token} in state {state}")
        state = table[state, token]


def grammar_table(
    transitions: Int[np.ndarray, "states 256"],
    accepting: Bool[np.ndarray, " states"],
    *,
    tokenizer: Any,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> Int[np.ndarray, "states V"]:
    """A table for `make_grammar` from an automaton over bytes: next states, −1 where a byte is not allowed, state 0 first.

    A token is allowed where all of its bytes are; an end-of-sequence token in accepting states; special tokens and those
    without bytes nowhere. A token is allowed even if no token could follow it: give an automaton each of whose states
    leads to an accepting one, and a vocabulary that spells all of its bytes.
    """
    dead = len(transitions)
    closed = np.full((dead + 1, 256), dead, np.int32)
    closed[:dead] = np.where(transitions < 0, dead, transitions)
    pieces = token_bytes(tokenizer)
    table = read_vocabulary(closed, pieces, vocab_size)[:dead]
    table[table == dead] = -1
    empty = [token for token in range(vocab_size) if token >= len(pieces) or not pieces[token]]
    table[:, [*empty, *(token for token in tokenizer.all_special_ids if token < vocab_size)]] = -1
    for token in eos_token_ids:
        table[:, token] = np.where(accepting, np.arange(dead), -1)
    return table


def refuse_from_the_start(config: SamplingOptions, what: str) -> None:
    """Raises ValueError for options that read a completion from its first token, where `what` goes on from prefixes."""
    for name in FROM_THE_START:
        if getattr(config, name):
            raise ValueError(f"{name}: counts from the first token of a completion, and {what} goes on from prefixes")
