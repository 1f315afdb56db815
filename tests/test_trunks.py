"""Prefixes from caches: labels and beams read nothing twice, by what goes through the model, and sample what they sampled.

References: the same prefixes read anew; counts of the tokens that `prefill` and `extend` are called with.
"""

import collections
import dataclasses
import importlib

import jax
import numpy as np
import pytest
import tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm.beams import FIRST_DRAW, Beam, Continuations, beam_search
from jaxrl_lm.completions import Completer
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.label_steps import ROLLOUT, Prefix, Solution, roll_out
from jaxrl_lm.rewards import resolve
from jaxrl_lm.search import run_search
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.tools_config import LabelStepsConfig, SearchConfig
from jaxrl_lm.trunks import after_prefixes, longest

pytestmark = pytest.mark.usefixtures("cached")

BATCH = 4  # prompts a call
TOKENIZER = lab_tokenizer()
TEXTS = ["12+3=", "4+5=", "6=", "7+8+9=", "10+2=", "3+3="]


def length(*, completion_ids, **_):
    return [len(ids) / 100 for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def plan():
    """One device, where a count is a count."""
    return Plan(make_mesh({"data": 1}, devices=jax.devices()[:1]))


@pytest.fixture
def read(monkeypatch):
    """How many tokens went through the model as prompts and as what follows them, and in how many columns they stood."""
    found = collections.Counter()
    generate, turns = (importlib.import_module(f"jaxrl_lm.{name}") for name in ("generate", "turns"))
    prefill, extend = generate.prefill, turns.extend

    def counting(params, tokens, lengths, **options):
        jax.debug.callback(lambda own: found.update(prompts=int(own.sum()), calls=1), lengths)
        return prefill(params, tokens, lengths, **options)

    def extending(params, tokens, cache, *, model, count):
        jax.debug.callback(lambda own: found.update(after=int(own.sum())), count)
        return extend(params, tokens, cache, model=model, count=count)

    monkeypatch.setattr(generate, "prefill", counting)
    monkeypatch.setattr(turns, "extend", extending)
    return found


def encoded(texts):
    rows = [{"prompt": text, "answer": 1} for text in texts]
    return EncodedPrompts(rows, [TOKENIZER(text)["input_ids"] for text in texts], list(texts), 0, 0)


# --- what is read -----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.sets(st.lists(st.integers(0, 2), max_size=5).map(tuple), min_size=1, max_size=12))
def test_trunks_are_the_sequences_that_no_other_begins_with(sequences):
    ordered = sorted(sequences)
    kept, numbers = longest(ordered)
    wanted = [own for own in ordered if not any(o != own and o[: len(own)] == own for o in ordered)]
    assert kept == wanted
    assert all(kept[number][: len(own)] == own for own, number in zip(ordered, numbers, strict=True))
    assert numbers == sorted(numbers)


# --- labels of steps --------------------------------------------------------------------------------------------------


def solutions():
    """Some prompts have several, one has none, two share their beginning, and one is the beginning of another."""
    rng = np.random.default_rng(0)
    made = []
    for prompt in range(len(TEXTS)):
        for number in range((0, 3, 2, 1, 3, 2)[prompt]):
            ids = rng.integers(1, 14, 24 - 3 * prompt + number).tolist()
            if number == 1:
                ids[:9] = made[-1].prefixes[-1].ids[:9]
            if number == 2:
                ids = list(made[-2].prefixes[-1].ids[:11])
            ends = sorted({*rng.integers(0, len(ids), 4).tolist(), len(ids)})
            prefixes = [Prefix(TOKENIZER.decode(ids[:end]), tuple(ids[:end])) for end in ends]
            made.append(Solution(prompt, "", ids, ["s"] * len(ends), prefixes, True))
    return made


@pytest.fixture
def labels(model, plan):
    options = {"rollouts": 3, "prompts_per_step": BATCH, "max_completion_length": 6, "reward": ("x",)}
    return Completer(LabelStepsConfig(model=model, dataset="d", output="o", **options), plan)


def test_each_prompt_and_each_solution_is_read_once(labels, read):
    prompts, own = encoded(TEXTS), solutions()
    found, counts = roll_out(labels, [resolve(length)], prompts, own, 3)
    jax.effects_barrier()
    every = {(one.prompt, prefix.ids) for one in own for prefix in one.prefixes}
    assert set(found) == every
    assert counts["prefixes"] == len(every) > 5 * BATCH
    asked = {prompt for prompt, _ in every}
    filling = -len(asked) % BATCH  # rows of one token
    assert filling > 0
    assert read["prompts"] == sum(len(prompts.ids[prompt]) for prompt in asked) + filling
    whole, _ = longest(sorted((prompt, *ids) for prompt, ids in every))
    assert read["after"] == sum(len(one) - 1 for one in whole)
    assert len(whole) < len(own)
    assert counts["prefilled_tokens"] == read["prompts"] + read["after"] - filling
    assert counts["prefix_tokens"] == sum(len(prompts.ids[prompt]) + len(ids) for prompt, ids in every)
    assert counts["prefix_tokens"] > 3 * counts["prefilled_tokens"]


def test_rollouts_from_caches_are_those_of_prefixes_read_anew(labels):
    """Other ways of the same arithmetic: equal tokens, sums of log-probs within 1e-3."""
    prompts = encoded(TEXTS)
    keys = sorted({(one.prompt, prefix.ids) for one in solutions() for prefix in one.prefixes})
    ids = [[*prompts.ids[prompt], *prefix] for prompt, prefix in keys]
    extended = EncodedPrompts([prompts.rows[prompt] for prompt, _ in keys], ids, [""] * len(keys), 0, 0)
    plain = labels.sampler([extended], num_generations=3)
    forked, _ = after_prefixes(plain, labels.forks(num_generations=3), prompts.ids, keys, (16,))
    draw = lambda sampler: labels.draw(sampler, extended, list(range(len(keys))), number=ROLLOUT)
    lengths, held = set(), []
    for (batch, ours), (_, theirs) in zip(draw(forked), draw(plain), strict=True):
        assert ours.completion_ids == theirs.completion_ids
        np.testing.assert_allclose(ours.logprob_sums, theirs.logprob_sums, atol=1e-3)
        np.testing.assert_array_equal(ours.truncated, theirs.truncated)
        np.testing.assert_array_equal(ours.rollout.tokens, theirs.rollout.tokens)
        lengths |= {len(ids[index]) for index in batch}
        held.append(sorted(forked.source.trunks.held))
    assert len(lengths) > 12
    assert (held[0], held[-1]) == ([0], [1])
    assert all(len(numbers) <= 2 for numbers in held)  # what no later prefix needs is dropped


# --- beams ------------------------------------------------------------------------------------------------------------


def beam_config(model, **changes):
    options = {"methods": ("beam",), "beam_width": 2, "beam_expand": 3, "step_separator": "+", "max_steps": 4}
    options |= {"max_step_length": 5, "max_completion_length": 18, "prompts_per_step": BATCH, "temperature": 1.5}
    return SearchConfig(model=model, dataset="d", scorer="test_trunks:length", reward=("x",), **options | changes)


def liked(places, beams):
    """More of a digit, and steps that have ended, which go on."""
    return [sum(c in "13579" for c in beam.text) / 7 + beam.text.endswith("+") for beam in beams]


def test_beams_go_on_from_the_rows_that_wrote_them(model, plan, read):
    """Equal beams where each is read anew, as it is with fewer slots than rows; tokens by count."""
    prompts, found, counts = encoded(TEXTS), [], []
    for changes in ({}, {"decode_slots": 11}):
        config = beam_config(model, **changes)
        grow = Continuations(config, Completer(config, plan), prompts)
        found.append(beam_search(grow, liked, len(TEXTS), width=2, max_steps=4))
        jax.effects_barrier()
        counts.append((dict(read), grow.prefilled, grow.tokens))
        read.clear()
    assert found[0] == found[1]
    assert max(beam.steps for group in found[0] for beam in group) == 4
    (ours, prefilled, tokens), (theirs, anew, again) = counts
    whole = sum(map(len, prompts.ids))
    assert ours == {"prompts": whole + -len(TEXTS) % BATCH, "calls": 2}
    assert (prefilled, anew, tokens) == (whole, None, again)
    assert theirs["prompts"] > 4 * whole


def test_rounds_and_groups_of_prompts_share_no_key(model, plan, monkeypatch):
    config, numbers = beam_config(model), []
    completer = Completer(config, plan)
    draw = completer.draw
    monkeypatch.setattr(completer, "draw", lambda *args, number: numbers.append(number) or draw(*args, number=number))
    grow = Continuations(config, completer, encoded(TEXTS))
    for first in (0, 3):
        first_round = grow(0, [first, first, first + 1], [Beam()] * 3)
        grow(1, [first, first + 1], [first_round[0][1], first_round[2][0]])
    assert numbers == [FIRST_DRAW + number for number in range(4)]


def test_prompts_are_searched_in_groups(model, tmp_path):
    """Without randomness: every group has its beams, whatever the others are."""
    rows = [{"prompt": text, "answer": 1} for text in TEXTS]
    changes = {"dataset": tiny_run.write_rows(tmp_path / "rows.jsonl", rows), "reward": ("test_trunks:length",)}
    changes |= {"temperature": 0.0, "mesh": {"data": 4, "tensor": 2}, "scorer": "test_trunks:length"}
    config = dataclasses.replace(beam_config(model), **changes)
    at_once = run_search(config)
    assert run_search(dataclasses.replace(config, beam_prompts=4)) == at_once
    with pytest.raises(ValueError, match="beam_prompts=0: must be at least 1"):
        run_search(dataclasses.replace(config, beam_prompts=0))
    with pytest.raises(ValueError, match="beam_prompts=3 has no effect without the method beam"):
        run_search(SearchConfig(model=model, dataset="d", scorer="test_trunks:length", beam_prompts=3))
