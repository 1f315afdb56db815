"""Rules of a draw that change the logits or say the token: what a step of `generate.decode` asks before and after it.

Pure functions of arrays; each rule that is off leaves no array and no operation behind. The order is that of
transformers and vLLM: bias and bans, the repetition penalty, the earliest end, the grammar; then temperature and
truncation (`sampling.py`). A forced token is no draw: it stands in the row, and is not the policy's action.
What the tables are made from: `rule_tables.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxrl_lm.sampling_config import SamplingConfig

WORD = 32


class Grammar(NamedTuple):
    """An automaton over tokens, begun in state 0. A token that a state does not allow leaves it as it is."""

    allowed: UInt32[Array, "states words"]  # bit t % 32 of word t // 32 is token t
    next: Int32[Array, "states V"]


class Tables(NamedTuple):
    """What `generate` reads of the host's making, in place of the table of stop strings alone."""

    stops: Int32[Array, "states V"] | None = None  # `stops.stop_table`
    grammar: Grammar | None = None  # `make_grammar`
    thinking: Int32[Array, "places V"] | None = None  # next places; in the last one thinking has ended


class RuleState(NamedTuple):
    """What rules remember of the row in each slot."""

    seen: Bool[Array, "W V"] | None  # tokens of its prompt and completion
    grammar: Int32[Array, "W"] | None
    thinking: Int32[Array, "W"] | None


def make_grammar(table: np.ndarray, *, eos_token_ids: tuple[int, ...] = (), banned: tuple[int, ...] = ()) -> Grammar:
    """The automaton whose next states stand in the table, integers [states, V], −1 where a token is not allowed, state 0
    first.

    `banned` tokens are allowed nowhere; nothing comes after an end-of-sequence token.

    Raises ValueError for a table of another kind, for a state that there is none of, and for a state that a row may come
    to and that allows no token.
    """
    table = np.array(table)  # a copy
    if table.ndim != 2 or not table.size or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(f"vocabulary_mask: needs integers [states, V], not {table.dtype} {table.shape}")
    states = len(table)
    if table.min() < -1 or table.max() >= states:
        raise ValueError(f"vocabulary_mask: next states must be -1 (not allowed) or one of the {states} states")
    table[:, list(banned)] = -1
    reached, waiting = {0}, [0]
    while waiting:
        found = {*np.unique(np.delete(table[waiting.pop()], eos_token_ids)).tolist()} - reached - {-1}
        reached |= found
        waiting += found
    stuck = [state for state in sorted(reached) if (table[state] < 0).all()]
    if stuck:
        raise ValueError(
            f"vocabulary_mask: state {stuck[0]} allows no token, after suppress_tokens and allowed_token_ids: allow an "
            "end-of-sequence token where a text may end"
        )
    bits = np.pad(table >= 0, ((0, 0), (0, -table.shape[1] % WORD))).reshape(states, -1, WORD).astype(np.uint32)
    packed = np.bitwise_or.reduce(bits << np.arange(WORD, dtype=np.uint32), axis=2)
    stay = np.arange(states)[:, None]
    return Grammar(packed, np.where(table < 0, stay, table).astype(np.int32))


def check_rules(sampling: SamplingConfig, tables: Tables | None, vocab_size: int) -> None:
    """Raises ValueError for token ids outside the vocabulary, for one of which no token is left, for tables that are
    missing, and for those that nothing was said of."""
    named = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "suppress_tokens": sampling.suppress_tokens,
        "allowed_token_ids": sampling.allowed_token_ids,
        "forced_tokens": sampling.forced_tokens,
        "end_of_thinking": sampling.end_of_thinking,
    }
    for name, ids in named.items():
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"{name}: token {outside[0]} is outside the vocabulary, whose ids are 0 to {vocab_size - 1}"
            )
    left = set(sampling.allowed_token_ids or range(vocab_size)) - set(sampling.suppress_tokens)
    if not left - set(sampling.eos_token_ids if sampling.min_new_tokens else ()):
        raise ValueError("suppress_tokens, allowed_token_ids and min_new_tokens leave no token to draw")
    if tables is None:
        return
    for name, asked, table in (
        ("vocabulary_mask", sampling.vocabulary_mask, tables.grammar),
        ("max_thinking_tokens", sampling.max_thinking_tokens is not None, tables.thinking),
    ):
        if asked != (table is not None):
            raise ValueError(f"{name}: the option and its table go together: give both in SamplingConfig and Tables")


def tokens_seen(tokens: Int32[Array, "P T"], segment_ids: Int32[Array, "P T"], vocab_size: int) -> Bool[Array, "P V"]:
    """Which tokens stand in each prompt."""
    place = jnp.where(segment_ids > 0, tokens, vocab_size)
    one = lambda place: jnp.zeros((vocab_size,), bool).at[place].set(True, mode="drop")
    return jax.vmap(one)(place)


def first_rules(sampling: SamplingConfig, slots: int, seen: Bool[Array, "W V"] | None) -> RuleState | None:
    """The state of rows without a new token; `seen` of their prompts, where there is a repetition penalty."""
    zero = jnp.zeros((slots,), jnp.int32)
    grammar = zero if sampling.vocabulary_mask else None
    thinking = None if sampling.max_thinking_tokens is None else zero
    found = RuleState(seen, grammar, thinking)
    return None if all(part is None for part in found) else found


def renewed(rules: RuleState | None, taken: Bool[Array, "W"], seen: Bool[Array, "W V"] | None) -> RuleState | None:
    """The state where the slots that are taken have a fresh row, of whose prompt `seen` is."""
    if rules is None:
        return None
    fresh = lambda x: None if x is None else jnp.where(taken, 0, x)
    seen = None if rules.seen is None else jnp.where(taken[:, None], seen, rules.seen)
    return RuleState(seen, fresh(rules.grammar), fresh(rules.thinking))


def advance(
    rules: RuleState | None, token: Int32[Array, "W"], active: Bool[Array, "W"], tables: Tables
) -> RuleState | None:
    """The state after a token of each slot that has a row."""
    if rules is None:
        return None
    seen, move = rules.seen, lambda table, place: jnp.where(active, table[place, token], place)
    if seen is not None:
        place = jnp.where(active, token, seen.shape[1])
        seen = jax.vmap(lambda row, place: row.at[place].set(True, mode="drop"))(seen, place)
    return RuleState(
        seen,
        None if rules.grammar is None else move(tables.grammar.next, rules.grammar),
        None if rules.thinking is None else move(tables.thinking, rules.thinking),
    )


def _added(sampling: SamplingConfig, vocab_size: int) -> Float[Array, "V"] | None:
    """What is added to every row's logits: the bias, −inf for what is banned."""
    if not (sampling.logit_bias or sampling.suppress_tokens or sampling.allowed_token_ids):
        return None
    added = jnp.zeros((vocab_size,), jnp.float32)
    if sampling.allowed_token_ids:
        allowed = jnp.asarray(sampling.allowed_token_ids, jnp.int32)
        added = jnp.full((vocab_size,), -jnp.inf, jnp.float32).at[allowed].set(0.0)
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        added = added.at[jnp.asarray(ids, jnp.int32)].add(jnp.asarray(values, jnp.float32))
    if sampling.suppress_tokens:
        added = added.at[jnp.asarray(sampling.suppress_tokens, jnp.int32)].set(-jnp.inf)
    return added


def ruled(
    logits: Float[Array, "W V"],
    rules: RuleState | None,
    drawn: Int32[Array, "W"],
    tables: Tables,
    sampling: SamplingConfig,
) -> Float[Array, "W V"] | None:
    """The logits under the rules, −inf for what may not be drawn; None where no rule changes them.

    Bias and bans; then, of tokens seen, l·p where l < 0 and l/p elsewhere (Keskar et al., 2019, as in transformers); no
    end-of-sequence token among the first `min_new_tokens`; what the grammar allows. Where these leave no token, the
    grammar alone holds: a text that it says is over ends before `min_new_tokens`.
    """
    if not sampling.changes_logits:
        return None
    size, raw = logits.shape[1], logits
    added, penalty = _added(sampling, size), sampling.repetition_penalty
    if added is not None:
        logits = logits + added[None]
    if rules is not None and rules.seen is not None:
        logits = jnp.where(rules.seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
    if sampling.min_new_tokens and sampling.eos_token_ids:
        ends = jnp.zeros((size,), bool).at[jnp.asarray(sampling.eos_token_ids, jnp.int32)].set(True)
        logits = jnp.where(ends[None] & (drawn < sampling.min_new_tokens)[:, None], -jnp.inf, logits)
    if sampling.vocabulary_mask:
        words = tables.grammar.allowed[rules.grammar]
        bits = (words[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None]) & 1
        allowed = bits.astype(bool).reshape(len(words), -1)[:, :size]
        logits = jnp.where(allowed, logits, -jnp.inf)
        left = jnp.any(~jnp.isneginf(logits), axis=1, keepdims=True)
        logits = jnp.where(left, logits, jnp.where(allowed, raw, -jnp.inf))
    return logits


def forced(
    rules: RuleState | None, drawn: Int32[Array, "W"], tables: Tables, sampling: SamplingConfig
) -> Int32[Array, "W"] | None:
    """The token that each slot's row must have next, −1 where it is the policy's choice; None without such rules.

    The first tokens; and the end of thinking, once the policy has had `max_thinking_tokens` after them and has not
    written it.
    """
    if not sampling.forces:
        return None
    first, end = sampling.forced_tokens, sampling.end_of_thinking
    token = jnp.full(drawn.shape, -1, jnp.int32)
    of = lambda ids, number: jnp.asarray(ids, jnp.int32)[jnp.clip(number, 0, len(ids) - 1)]
    if first:
        token = jnp.where(drawn < len(first), of(first, drawn), token)
    if sampling.max_thinking_tokens is not None:
        number = drawn - (len(first) + sampling.max_thinking_tokens)
        thinks = rules.thinking != tables.thinking.shape[0] - 1
        token = jnp.where(thinks & (number >= 0) & (number < len(end)), of(end, number), token)
    return token
