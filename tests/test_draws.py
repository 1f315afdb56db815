"""Rules of a draw: top-p without a sort, penalty, bias, bans, forced tokens, the thinking budget, grammars.

References: sorted sums in float64, transformers' own logits processors, and each row of a rollout gone over again, token
by token, with the logits of the full forward pass.
"""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from test_select import rollout_of
from tiny_engine import requests, same
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from jaxrl_lm import checks, cli, inference, rule_tables
from jaxrl_lm.config import EvalConfig, GenerateConfig, GRPOConfig
from jaxrl_lm.generate import generate
from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.logit_rules import RuleState, Tables, check_rules, make_grammar, ruled, tokens_seen
from jaxrl_lm.models import build, positions
from jaxrl_lm.rollout import Replay
from jaxrl_lm.sampling import draw, nucleus, truncate
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.step_rewards import place_steps

LAB = lab_tokenizer()


def sampling(new=1, eos=(), **options):
    return SamplingConfig(max_new_tokens=new, eos_token_ids=eos, pad_token_id=0, **options)


def log_softmax(row):
    row = np.float64(row)
    best = row.max()
    with np.errstate(divide="ignore"):
        return row - best - np.log(np.exp(row - best).sum())


# --- top-p without a sort ---------------------------------------------------------------------------------------------


CLOSE = 24  # whose logits are that near each other


def adversarial(size=1000):
    """Rows of logits that are hard in one way each, among random ones of all temperatures."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=size) * scale for scale in (0.01, 0.1, 0.5, 1, 1, 2, 2, 4, 8, 30)]
    rows += [np.round(rng.normal(size=size) * scale) for scale in (0.5, 1, 2, 4)]  # many ties
    rows += [np.round(rng.normal(size=size)) * 0.25 - 50, np.zeros(size), np.full(size, -1e4)]
    one = np.zeros(size)
    one[rng.integers(size, size=5)] = [40, 12, 12, 9, 8.99]
    rows += [one, np.where(np.arange(size) == 3, 1e30, -1e30), np.where(rng.random(size) < 0.9, -np.inf, rows[4])]
    rows += [np.log(1 / (np.arange(size) + 1.0)), -np.arange(size) * 1e-3, np.sort(rng.gumbel(size=size)) * 3]
    rows += [np.where(np.arange(size) < 2, 5.0, -20.0), np.linspace(-1e-6, 1e-6, size), np.linspace(90, 100, size)]
    return np.stack(rows).astype(np.float32)


def sums_above(row):
    """Of each logit the summed probability of those above it, in float64, by a sort."""
    probs = np.exp(log_softmax(row))
    order = np.argsort(-np.float64(row), kind="stable")
    before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
    first = np.searchsorted(-np.float64(row)[order], -np.float64(row), side="left")  # of its ties
    return before[first]


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.97, 0.9999])
def test_the_nucleus_is_that_of_a_sort_in_float64(top_p):
    logits = adversarial()
    threshold = np.asarray(jax.jit(nucleus, static_argnums=1, static_argnames="ways")(logits, top_p))
    for number, (row, least) in enumerate(zip(logits, threshold, strict=True)):
        kept, above = row >= least, sums_above(row)
        assert least in row
        # The sums of float32 weights are known to 1e-6, and logits nearer than 3e-7 may have one weight.
        assert kept[above < top_p - 1e-6].all(), number
        assert not kept[row < row[above < top_p + 1e-6].min() - 3e-7].any(), number
        if number != CLOSE and np.abs(above - top_p).min() > 1e-6:
            np.testing.assert_array_equal(kept, (above < top_p) & ~np.isneginf(row), err_msg=str(number))


def test_the_interval_may_be_cut_in_any_number_of_parts():
    logits = adversarial()
    found = [jax.jit(functools.partial(nucleus, top_p=0.9, ways=ways))(logits) for ways in (2, 3, 8)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 0.9), (7, 0.5), (50, 0.95), (1000, 0.9)])
def test_top_p_within_top_k_counts_the_ties_at_both_thresholds(top_k, top_p):
    logits = adversarial()
    kept = ~np.isneginf(jax.jit(truncate, static_argnums=1)(logits, sampling(top_k=top_k, top_p=top_p)))
    for number, (row, mine) in enumerate(zip(logits, kept, strict=True)):
        first = row >= np.sort(row)[-top_k]
        above = np.where(first, sums_above(np.where(first, row, -np.inf)), 1.0)
        assert mine[above < top_p - 1e-6].all(), number
        assert not mine[(above >= top_p + 1e-6) | np.isneginf(row)].any() or top_k == 1000, number
        assert (mine == (row >= row[mine].min())).all(), number


# --- the rules on logits ----------------------------------------------------------------------------------------------

SIZE, PROMPTS = 48, 8
EOS = (3, 17)


@pytest.fixture(scope="module")
def given():
    """(logits, tokens so far, which of them are real)."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, SIZE, (PROMPTS, 6))
    return (rng.normal(size=(PROMPTS, SIZE)) * 3).astype(np.float32), tokens, np.ones_like(tokens)


def by_us(given, drawn=0, tables=None, **options):
    logits, tokens, segments = given
    rules = sampling(new=20, eos=EOS, **options)
    seen = tokens_seen(jnp.int32(tokens), jnp.int32(segments), SIZE) if rules.penalises else None
    count = jnp.full((PROMPTS,), drawn, jnp.int32)
    state = RuleState(seen, jnp.zeros_like(count) if tables else None, None)
    return np.asarray(ruled(jnp.asarray(logits), state, count, tables or Tables(), rules))


@pytest.mark.parametrize("penalty", [0.6, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(given, penalty):
    logits, tokens, _ = given
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(tokens), torch.tensor(logits))
    np.testing.assert_allclose(by_us(given, repetition_penalty=penalty), theirs, rtol=3e-7)


def test_padding_is_not_seen(given):
    logits, tokens, segments = given
    segments = segments * (np.arange(6) >= 2)
    penalised = by_us((logits, tokens, segments), repetition_penalty=2.0)
    np.testing.assert_array_equal(penalised, by_us((logits, tokens[:, 2:], segments[:, 2:]), repetition_penalty=2.0))
    assert not np.array_equal(penalised, by_us(given, repetition_penalty=2.0))


def test_bias_bans_and_the_earliest_end_are_those_of_transformers(given):
    """Together, and in their order: the penalty comes after the bias."""
    logits, tokens, _ = given
    bias, banned = {5: 2.5, 9: -4.0, 30: 0.25}, [2, 11, 47]
    options = {"repetition_penalty": 1.4, "logit_bias": tuple(bias.items()), "suppress_tokens": tuple(banned)}
    scores, ids = torch.tensor(logits), torch.tensor(tokens)
    for processor in (
        SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
        RepetitionPenaltyLogitsProcessor(1.4),
        MinNewTokensLengthLogitsProcessor(6, 4, list(EOS)),
        SuppressTokensLogitsProcessor(banned),
    ):
        scores = processor(ids, scores)
    np.testing.assert_allclose(by_us(given, min_new_tokens=4, **options), scores, rtol=3e-7)
    np.testing.assert_allclose(by_us(given, drawn=3, min_new_tokens=4, **options), scores, rtol=3e-7)
    later = by_us(given, drawn=4, min_new_tokens=4, **options)
    assert np.isfinite(later[:, EOS]).all()
    np.testing.assert_allclose(np.delete(later, EOS, 1), np.delete(scores.numpy(), EOS, 1), rtol=3e-7)


def test_allowed_tokens_alone_are_left(given):
    kept = by_us(given, allowed_token_ids=(4, 9, 40))
    np.testing.assert_array_equal(kept[:, [4, 9, 40]], given[0][:, [4, 9, 40]])
    assert np.isneginf(np.delete(kept, [4, 9, 40], 1)).all()


def test_a_grammar_that_allows_nothing_but_the_end_has_its_way(given):
    table = np.full((1, SIZE), -1)
    table[0, 3] = 0
    tables = Tables(grammar=make_grammar(table))
    kept = by_us(given, tables=tables, vocabulary_mask=True, min_new_tokens=5)
    np.testing.assert_array_equal(kept[:, 3], given[0][:, 3])
    assert np.isneginf(np.delete(kept, 3, 1)).all()


def test_without_rules_there_is_nothing_to_do(given):
    assert ruled(jnp.asarray(given[0]), None, jnp.zeros((PROMPTS,), jnp.int32), Tables(), sampling()) is None


def test_behaviour_logprobs_sum_to_one_over_what_can_be_drawn():
    rng, draws = np.random.default_rng(2), 3000
    logits = jnp.float32(np.broadcast_to(rng.normal(size=12) * 0.7, (draws, 12)))
    changed = logits.at[:, 3].set(-jnp.inf).at[:, 5].add(1.0)
    keys = jax.random.split(jax.random.key(0), draws)
    for options, count in (({}, 11), ({"top_k": 4}, 4)):
        token, logprob, behaviour = map(
            np.asarray,
            jax.jit(draw, static_argnums=3)(
                logits, jax.random.clone(keys), jnp.full((draws,), 0.9), sampling(**options), changed
            ),
        )
        tokens, first = np.unique(token, return_index=True)
        assert len(tokens) == count
        assert np.exp(behaviour[first]).sum() == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_allclose(logprob, log_softmax(logits[0] / np.float32(0.9))[token], atol=1e-5)


# --- whole rollouts ---------------------------------------------------------------------------------------------------

COLUMNS, GROUP, NEW = 5, 3, 10
ROWS = PROMPTS // 2 * GROUP
TOKENS = np.random.default_rng(3).integers(10, SIZE, (PROMPTS // 2, COLUMNS)).astype(np.int32)
SEGMENTS = (np.arange(COLUMNS) >= COLUMNS - np.array([5, 1, 3, 2])[:, None]).astype(np.int32)
TEMPERATURE = np.random.default_rng(4).choice([0.0, 0.8, 1.0, 1.6], ROWS).astype(np.float32)
LIMITS = np.random.default_rng(5).permutation([NEW] * 8 + [0, 1, 3, 6]).astype(np.int32)


def grammar():
    """Even ids, then odd ids, in turn; after the fourth token the end alone."""
    table, ids = np.full((6, SIZE), -1), np.arange(SIZE)
    for state in range(4):
        table[state, (ids % 2 == state % 2) & ~np.isin(ids, EOS)] = state + 1
    table[4, list(EOS)] = 5
    return table


def thinking(end):
    """Where a row is in the tokens that end thinking, of which none comes twice."""
    table = np.zeros((len(end) + 1, SIZE), np.int32)
    table[: len(end), end[0]], table[len(end)] = 1, len(end)
    table[range(len(end)), end] = np.arange(len(end)) + 1
    return table


RULES = {
    "penalty": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": ((8, 1.0),), "allowed_token_ids": (3, 5, 8, 21, 34, 40), "min_new_tokens": 4, "top_p": 0.9},
    "forced": {"forced_tokens": (41, 42)},
    "thinking": {"max_thinking_tokens": 3, "end_of_thinking": (20, 22), "logit_bias": ((20, 12.0), (22, 12.0))},
    "grammar": {"vocabulary_mask": True},
    "all": {
        "repetition_penalty": 1.3,
        "logit_bias": ((7, 3.0), (20, -1.0)),
        "suppress_tokens": (13, 14),
        "min_new_tokens": 3,
        "forced_tokens": (40,),
        "max_thinking_tokens": 2,
        "end_of_thinking": (20,),
        "vocabulary_mask": True,
        "top_k": 9,
    },
}


def tables_of(rules):
    return Tables(
        None,
        make_grammar(grammar(), eos_token_ids=EOS, banned=rules.suppress_tokens) if rules.vocabulary_mask else None,
        thinking(rules.end_of_thinking) if rules.end_of_thinking else None,
    )


@pytest.fixture(scope="module")
def model(tiny_config):
    return build(dataclasses.replace(tiny_config, num_layers=1))


@pytest.fixture(scope="module")
def sampler(model, weights):
    """sampler(name of rules, slots) -> requests -> Rollout; one compilation each."""

    @functools.cache
    def make(name, slots=4):
        rules = sampling(new=NEW, eos=EOS, slots=slots, **RULES[name])
        tables = tables_of(rules)
        compiled = jax.jit(functools.partial(generate, model=model, sampling=rules))
        return lambda request: compiled(weights, request, tables)

    return make


@pytest.fixture(scope="module")
def whole(model, params):
    """rollout -> (the full forward pass's logits before each token, the scorer's log-probs)."""

    @jax.jit
    def both(tokens, segments, temperature):
        logits = model.unembed(params, model.hidden(params, tokens, positions(segments), segments))
        return logits, score(params, tokens, segments, model=model, temperature=temperature).logprobs

    def of(rollout, temperature):
        logits, logprobs = both(rollout.tokens, rollout.segment_ids, temperature)
        return np.pad(logits, ((0, 0), (1, 0), (0, 0)))[:, :-1], np.asarray(logprobs)

    return of


def asked(seed=0, order=None, limits=LIMITS, temperature=TEMPERATURE):
    keys = jax.random.split(jax.random.key(seed), ROWS)
    order = np.arange(PROMPTS // 2) if order is None else order
    rows = (order[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
    options = {"max_new": limits[rows], "temperature": temperature[rows]}
    return requests(TOKENS[order], SEGMENTS[order], keys=keys[rows], **options)


def has(tokens, part):
    return any(tuple(tokens[start : start + len(part)]) == part for start in range(len(tokens)))


def gone_over(rules, prompt, completion, logits, heat):
    """Of each token whether it was forced, and the float64 log-probs that it was drawn from, by loops."""
    state, thought, seen, end = 0, 0, set(prompt), rules.end_of_thinking
    for number, token in enumerate(completion):
        row = np.float64(logits[number])
        for name, bias in rules.logit_bias:
            row[name] += bias
        row[list(rules.suppress_tokens)] = -np.inf
        if rules.allowed_token_ids:
            row[np.setdiff1d(np.arange(SIZE), rules.allowed_token_ids)] = -np.inf
        for name in seen if rules.repetition_penalty else ():
            row[name] = row[name] * rules.repetition_penalty if row[name] < 0 else row[name] / rules.repetition_penalty
        if number < rules.min_new_tokens:
            row[list(EOS)] = -np.inf
        if rules.vocabulary_mask:
            row[grammar()[state] < 0] = -np.inf
        row = row / (heat or 1.0)
        if rules.top_k is not None:
            row = np.where(row >= np.sort(row)[-rules.top_k], row, -np.inf)
        if rules.top_p is not None:
            row = np.where(sums_above(row) < rules.top_p, row, -np.inf)
        must = None
        if number < len(rules.forced_tokens):
            must = rules.forced_tokens[number]
        elif end and thought >= rules.max_thinking_tokens and not has(completion[:number], end):
            must = end[thought - rules.max_thinking_tokens]
        if number >= len(rules.forced_tokens):
            thought += 1
        yield must, log_softmax(row)
        seen.add(token)
        if rules.vocabulary_mask and grammar()[state, token] >= 0:
            state = grammar()[state, token]


@pytest.mark.parametrize("name", RULES)
def test_rows_are_drawn_by_the_rules_and_scored_by_the_policy(sampler, whole, name):
    """Through few slots, so that a slot's memory begins anew with each row."""
    rules, counts = sampling(new=NEW, eos=EOS, **RULES[name]), {"forced": 0, "drawn": 0, "ended": 0, "closed": 0}
    for seed in range(2):
        rollout = sampler(name)(asked(seed))
        logits, scores = whole(rollout, TEMPERATURE)
        mask, tokens, segments = map(np.asarray, (rollout.action_mask, rollout.tokens, rollout.segment_ids))
        np.testing.assert_allclose(np.where(mask, rollout.logprobs, 0), np.where(mask, scores, 0), atol=2e-5)
        assert (np.asarray(rollout.logprobs)[~mask] == 0).all()
        assert (rollout.behaviour_logprobs is not None) == rules.reshapes
        behaviour = np.asarray(rollout.logprobs if rollout.behaviour_logprobs is None else rollout.behaviour_logprobs)
        assert (behaviour[~mask] == 0).all()
        np.testing.assert_array_equal(np.asarray(rollout.turn_ids), mask)
        for row in range(ROWS):
            columns = COLUMNS + np.flatnonzero(segments[row, COLUMNS:])
            assert len(columns) <= LIMITS[row]
            assert (columns == COLUMNS + np.arange(len(columns))).all()  # no hole
            assert (tokens[row, COLUMNS + len(columns) :] == 0).all()
            prompt = TOKENS[row // GROUP][SEGMENTS[row // GROUP] > 0].tolist()
            own = tokens[row, columns].tolist()
            ended = bool(own) and own[-1] in EOS
            assert not np.isin(own[:-1], EOS).any()
            assert ended or len(own) == LIMITS[row]
            assert bool(rollout.truncated[row]) == (LIMITS[row] > 0 and not ended)
            found = gone_over(rules, prompt, own, logits[row, columns], TEMPERATURE[row])
            for column, token, (must, logprobs) in zip(columns, own, found, strict=True):
                assert mask[row, column] == (must is None)
                if must is not None:
                    assert token == must
                    counts["forced"] += 1
                    continue
                counts["drawn"] += 1
                if TEMPERATURE[row] == 0:
                    assert logprobs[token] == pytest.approx(logprobs.max(), abs=1e-4)
                    assert behaviour[row, column] == (0 if rules.reshapes else pytest.approx(logprobs[token], abs=1e-4))
                else:
                    assert np.isfinite(logprobs[token])
                    assert np.exp(logprobs).sum() == pytest.approx(1.0)
                    assert behaviour[row, column] == pytest.approx(logprobs[token], abs=1e-4)
            counts["ended"] += ended
            counts["closed"] += name == "thinking" and mask[row, columns].all() and has(own, rules.end_of_thinking)
    assert counts["drawn"] > 40
    assert (counts["forced"] > 10) == rules.forces
    assert (counts["closed"] > 0) == (name == "thinking")  # by the policy itself
    if rules.vocabulary_mask:
        assert counts["ended"] >= 12  # by the grammar's end


def test_slots_order_and_neighbours_change_no_bit_under_the_rules(sampler):
    base = sampler("all")(asked())
    order = np.array([2, 0, 3, 1])
    rows = (order[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
    same(base, sampler("all")(asked(order=order)), rows_of_a=rows)
    kept = np.arange(ROWS) % 4 == 1
    limits, heat = np.where(kept, LIMITS, LIMITS[::-1]), np.where(kept, TEMPERATURE, np.float32(2.5))
    changed = sampler("all")(asked(limits=limits, temperature=heat))
    for name, before, after in zip(base._fields, base, changed, strict=True):
        if before is not None:
            np.testing.assert_array_equal(np.asarray(after)[kept], np.asarray(before)[kept], err_msg=name)
    assert not np.array_equal(changed.tokens, base.tokens)


# --- from options to rules --------------------------------------------------------------------------------------------


def options(**changes):
    return GenerateConfig(model="", max_completion_length=20, **changes)


def rules_and_tables(config):
    rules = sampling(new=config.max_completion_length, eos=(1,), **rule_tables.rules_of(config, LAB))
    return rules, rule_tables.rule_tables(config, rules, LAB, len(LAB))


def test_options_become_rules_and_stop_strings_alone_one_table():
    config = options(logit_bias={"5": 2.0, "3": -1.5}, suppress_tokens=(4,), repetition_penalty=1.1, stop=(";",))
    rules, table = rules_and_tables(config)
    assert rules.logit_bias == ((3, -1.5), (5, 2.0))
    assert (rules.suppress_tokens, rules.repetition_penalty, rules.forces) == ((4,), 1.1, False)
    assert table.shape == (3, len(LAB))
    assert rules_and_tables(options())[1] is None
    assert not sampling(repetition_penalty=1.0).reshapes


def test_the_end_of_thinking_is_a_text_however_spelled_or_a_token():
    rules, tables = rules_and_tables(options(max_thinking_tokens=5, end_of_thinking="#;"))
    assert rules.end_of_thinking == tuple(LAB("#;")["input_ids"])
    place = 0
    for token in LAB("1##;2")["input_ids"]:
        place = tables.thinking[place, token]
    assert place == len(tables.thinking) - 1
    rules, tables = rules_and_tables(options(max_thinking_tokens=5, end_of_thinking="7"))
    assert rules.end_of_thinking == (7,)
    np.testing.assert_array_equal(np.flatnonzero(tables.thinking[0]), [7])


def signed_numbers(tokenizer, vocab_size, eos_token_ids):
    """The hook of the tests: -?[0-9]+ from an automaton over bytes."""
    moves = np.full((3, 256), -1)
    moves[0, ord("-")] = 1
    moves[:, [ord(c) for c in "0123456789"]] = 2
    over = np.array([False, False, True])
    return rule_tables.grammar_table(
        moves, over, tokenizer=tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids
    )


def no_way_out(tokenizer, vocab_size, eos_token_ids):
    return np.where(np.arange(vocab_size)[None] == 3, np.array([[1], [-1]]), -1)


def test_a_grammar_of_bytes_allows_what_the_expression_matches():
    table = signed_numbers(LAB, len(LAB) + 4, (1,))
    rng = np.random.default_rng(6)
    texts = ["", "-", "12", "-0", "--1", "1-", "1+1", *("".join(rng.choice(list("01-#"), 3)) for _ in range(40))]
    for text in texts:
        state = 0
        for token in [*LAB(text)["input_ids"], 1] if text else [1]:
            state = table[state, token] if state >= 0 else -1
        assert (state >= 0) == bool(re.fullmatch("-?[0-9]+", text)), text
    assert (table[:, [0, 2, *range(len(LAB), len(LAB) + 4)]] == -1).all()  # special tokens and the embedding's padding


def test_a_hook_makes_the_table():
    spec = f"{__file__}:signed_numbers"
    rules, tables = rules_and_tables(options(vocabulary_mask=spec, suppress_tokens=(LAB("7")["input_ids"][0],)))
    assert rules.vocabulary_mask
    words = tables.grammar.allowed[0]
    allowed = [token for token in range(len(LAB)) if words[token // 32] >> (token % 32) & 1]
    assert LAB.decode(allowed) == "012345689-"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be above 0"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias: 'five' is no token id"),
        ({"logit_bias": {"5": float("inf")}}, "logit_bias=.*one finite number a token"),
        ({"min_new_tokens": 21}, "min_new_tokens=21: must be from 0 to max_completion_length=20"),
        ({"suppress_tokens": (4,), "allowed_token_ids": (4, 5)}, "both have token 4"),
        ({"forced_tokens": (4,), "suppress_tokens": (4,)}, "forced_tokens: token 4 is forced, and banned"),
        ({"forced_tokens": (4,), "allowed_token_ids": (5,)}, "forced_tokens: token 4 is forced, and banned"),
        ({"forced_tokens": (4, 1)}, "forced_tokens: token 1 ends the sequence"),
        ({"forced_tokens": (4,) * 20}, "leaves no answer"),
        ({"max_thinking_tokens": 4}, "max_thinking_tokens=4 and end_of_thinking=.*: give both"),
        ({"end_of_thinking": "#"}, "max_thinking_tokens=None and end_of_thinking=.*: give both"),
        ({"max_thinking_tokens": -1, "end_of_thinking": "#"}, "max_thinking_tokens=-1: must be at least 0"),
        ({"max_thinking_tokens": 19, "end_of_thinking": "#"}, "leaves no answer"),
        ({"max_thinking_tokens": 3, "end_of_thinking": "x"}, "do not spell it"),
        ({"logit_bias": {"99": 1.0}}, "logit_bias: token 99 is outside the vocabulary"),
        ({"suppress_tokens": (24,)}, "suppress_tokens: token 24 is outside the vocabulary, whose ids are 0 to 23"),
        ({"allowed_token_ids": (1,), "min_new_tokens": 2}, "leave no token to draw"),
        ({"suppress_tokens": tuple(range(24))}, "leave no token to draw"),
        ({"vocabulary_mask": f"{__file__}:no_way_out"}, "state 1 allows no token"),
        ({"vocabulary_mask": f"{__file__}:options"}, "unexpected keyword|missing"),
        (
            {"vocabulary_mask": f"{__file__}:signed_numbers", "forced_tokens": (13,)},
            "does not allow token 13 in state 0",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_rules_that_cannot_be_followed_are_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rules_and_tables(options(**changes))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros((2, 4)), "needs integers"),
        (np.zeros(4, int), "needs integers"),
        (np.full((2, 4), 2), "next states must be -1"),
        (np.full((2, 4), -1), "state 0 allows no token"),
    ],
)
def test_a_table_of_another_kind_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        make_grammar(table)


def test_options_and_tables_go_together():
    with pytest.raises(ValueError, match="vocabulary_mask: the option and its table go together"):
        check_rules(sampling(vocabulary_mask=True), Tables(), SIZE)
    with pytest.raises(ValueError, match="max_thinking_tokens: the option and its table go together"):
        check_rules(sampling(), Tables(thinking=thinking((20,))), SIZE)


def test_a_run_is_refused_before_anything_is_loaded():
    config = GRPOConfig(model="", dataset="", output_dir="", max_thinking_tokens=3)
    with pytest.raises(ValueError, match="end_of_thinking=None: give both"):
        checks.check(config, 1)
    with pytest.raises(ValueError, match="min_new_tokens=600: must be from 0"):
        checks.check(dataclasses.replace(config, max_thinking_tokens=None, min_new_tokens=600), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_new_tokens": 2}, "num_speculative_tokens with rules of drawing"),
        ({"max_thinking_tokens": 2, "end_of_thinking": "</think>"}, "num_speculative_tokens with rules of drawing"),
        ({"max_completion_length": 4}, "num_speculative_tokens=4: must be below the 4 new tokens"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max=0: at least 1 token must match"),
    ],
    ids=str,
)
def test_speculation_and_rules_are_refused_before_anything_is_loaded(changes, message):
    config = GRPOConfig(model="", dataset="", output_dir="", num_speculative_tokens=4)
    checks.check(config, 1)
    with pytest.raises(ValueError, match=message):
        checks.check(dataclasses.replace(config, **changes), 1)


@pytest.mark.parametrize("changes", [{"speculative_source": "last_epoch"}, {"prompt_lookup_max": 5}], ids=str)
@pytest.mark.parametrize("off", [None, 0])
def test_options_of_speculation_need_speculation(changes, off):
    message = f"{next(iter(changes))}=.* has no effect without num_speculative_tokens: give both"
    with pytest.raises(ValueError, match=message):
        checks.check(GRPOConfig(model="", dataset="", output_dir="", num_speculative_tokens=off, **changes), 1)
    for function in (inference.run_generate, inference.run_eval):
        kind = GenerateConfig if function is inference.run_generate else EvalConfig
        with pytest.raises(ValueError, match=message):
            function(kind(model="/nowhere", num_speculative_tokens=off, **changes))


BUDGET = {"max_thinking_tokens": 3, "end_of_thinking": "##;"}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"stop": ("#;",)} | BUDGET, "end_of_thinking"),
        ({"stop": ("9", "##")} | BUDGET, "end_of_thinking"),
        (
            {"stop": ("1#",), "forced_tokens": tuple(LAB("1")["input_ids"])} | BUDGET | {"max_thinking_tokens": 0},
            "end_of_",
        ),
        ({"stop": ("2",), "forced_tokens": tuple(LAB("123")["input_ids"])}, "forced_tokens"),
    ],
    ids=str,
)
def test_forced_tokens_that_write_a_stop_string_are_refused(changes, name):
    with pytest.raises(ValueError, match=rf"stop=\(.*: the tokens of {name}.* write one of these strings"):
        rules_and_tables(options(**changes))


def test_stop_strings_that_what_is_forced_does_not_write_by_itself_are_kept():
    forced = {"forced_tokens": tuple(LAB("12")["input_ids"])}
    for stop in ("#;#", "1#", "2#"):  # with a budget above 0 the policy writes between the two
        _, tables = rules_and_tables(options(stop=(stop,), **BUDGET, **forced))
        assert tables.stops is not None


def test_what_goes_on_from_prefixes_refuses_what_counts_from_the_start():
    config = options(max_thinking_tokens=0, end_of_thinking="#")
    with pytest.raises(ValueError, match="end_of_thinking: counts from the first token"):
        rule_tables.refuse_from_the_start(config, "method beam")


# --- what reads the rollouts ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("tiny") / "model")


def test_the_command_line_generates_by_the_rules(tiny, tmp_path):
    """Forced tokens stand in texts and ids; what the policy may not draw stands nowhere else."""
    output = tmp_path / "out.jsonl"
    rules = (
        "--forced_tokens 17 18 --logit_bias.3 -2.5 --suppress_tokens 4 5 --min_new_tokens 5 --repetition_penalty 1.2"
    )
    rules += f" --max_thinking_tokens 2 --end_of_thinking ## --vocabulary_mask {__file__}:letters"
    rules += " --mesh.fsdp 4 --mesh.tensor 2"
    shape = [
        "--max_completion_length",
        "9",
        "--prompts_per_step",
        "4",
        "--num_generations",
        "2",
        "--prompt_buckets",
        "8",
    ]
    cli.main(["generate", "--model", tiny, "--prompt", "1+1=", "2=", "--output", str(output), *shape, *rules.split()])
    for line in output.read_text().splitlines():
        row = json.loads(line)
        for text, ids in zip(row["completions"], row["completion_ids"], strict=True):
            assert ids[:2] == [17, 18]
            assert text == LAB.decode(ids, skip_special_tokens=True)
            assert "##" in text[: 2 + 2 + 2]
            assert len(ids) >= 5
            assert not {4, 5, 1} & set(ids[:4])
            assert max(ids) < 19


def letters(tokenizer, vocab_size, eos_token_ids):
    return np.where(np.arange(vocab_size)[None] < 19, 0, -1)


def with_forced():
    """Four rows of which the policy chose all tokens but the first and the last; the second has one token alone."""
    sampled = rollout_of(2, group_size=2, prompt_columns=2, new=5, seed=1, on_device=False)
    segments, mask = np.array(sampled.rollout.segment_ids), np.zeros_like(sampled.rollout.action_mask)
    for row, length in enumerate((5, 1, 4, 3)):
        segments[row, 2:] = np.arange(5) < length
        mask[row, 3 : 2 + length - 1] = True
    rollout = sampled.rollout._replace(
        segment_ids=segments, action_mask=mask, policy_step=np.where(mask, 11, 0).astype(np.int32)
    )
    ids = [t[2:][s[2:] > 0].tolist() for t, s in zip(rollout.tokens, segments, strict=True)]
    return sampled._replace(rollout=rollout, completion_ids=ids)


def test_a_replayed_group_keeps_its_forced_tokens():
    sampled = with_forced()
    first, second = Replay(4, 4), Replay(4, 4)
    values = np.array([[1.0], [0.0], [1.0], [0.0]], np.float32)
    first.put(sampled, values, values[:, 0] > 0, np.ones(4, bool), indices=[0, 1], group_size=2)
    second.load(json.loads(json.dumps(first.state())), rows=[{"prompt": "a"}, {"prompt": "b"}])
    for number, group in enumerate(second.take(2, policy_step=11)):
        assert group.sampled.completion_ids == sampled.completion_ids[2 * number : 2 * number + 2]


def test_a_step_that_ends_on_a_forced_token_stands_on_the_policys_last_before_it():
    sampled = with_forced()
    ids = [[3 + token % 9 for token in own] for own in sampled.completion_ids]
    sampled = sampled._replace(completion_ids=ids, texts=[LAB.decode(own) for own in ids])
    found = place_steps([[(1, 0.5), (3, 1.0), (5, 2.0)], [(1, 4.0)], [(4, 3.0)], None], sampled, LAB)
    np.testing.assert_array_equal(found.rewards[0], [0, 0, 0, 0.5, 1, 2, 0])  # the first token is forced too
    np.testing.assert_array_equal(found.rewards[2], [0, 0, 0, 0, 3, 0, 0])
    assert not found.rewards[[1, 3]].any()  # nothing that the policy could be paid for
