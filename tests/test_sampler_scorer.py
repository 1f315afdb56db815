"""The sampler's log-probs are those of the scorer: one tiny model, through paths that draw and through ways to score.

Plain batches, slots, turns and rules alone are in the files of these; here are the other paths, and their combinations.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_turns
from test_slots import COLUMNS, GROUP, LENGTHS, NEW, PROMPTS, ROWS, SEGMENTS, TEMPERATURE, TOKENS
from tiny_engine import EOS, random_params, requests

from jaxrl_lm import chunks
from jaxrl_lm.decode_steps import compile_forks
from jaxrl_lm.generate import begin, collect, decode, generate, prepare_decode
from jaxrl_lm.layout import Cut, pack_rows
from jaxrl_lm.models import LoraConfig, Model, attention, build, decode_specs, lora
from jaxrl_lm.models import decode as decoding
from jaxrl_lm.models.config import LinearRope, Llama3Rope
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.slots import fork, start

ROOM = 40  # columns that all rows are scored in, so that a model's scorer compiles once
# Bounds of the largest and the mean difference, and what the largest must reach where something is rounded: of weights
# fifteen times the usual size, as in test_cache_int8.py and test_generate.py.
BOUNDS = {None: (2e-5, 2e-5, 0.0), "int8": (0.1, 0.02, 1e-4), "bfloat16": (0.5, 0.05, 1e-3)}


class Family(NamedTuple):
    """A model with weights, as it is trained and as it decodes."""

    model: Model
    params: Any
    weights: Any
    logprobs: Any  # compiled: (tokens, segment ids, temperature) -> [ROWS ROOM]


def family_of(config, mesh=None, adapted=False):
    plan = None if mesh is None else Plan(make_mesh(dict(mesh)))
    model = build(config, plan=plan)
    params = random_params(model)
    if adapted:
        rng, ranks = np.random.default_rng(5), LoraConfig(rank=3, alpha=6.0)
        one = lambda spec: jnp.asarray(rng.normal(0, 0.2, spec.shape), jnp.float32)
        adapter = jax.tree.map(one, lora.specs(model, ranks), is_leaf=lambda leaf: hasattr(leaf, "axes"))
        params = lora.attach(params, adapter, ranks)
    weights = prepare_decode(params, model=model.for_decode())
    if plan is not None:
        params = jax.device_put(params, plan.tree(model.specs))
        weights = jax.device_put(weights, plan.for_decode().tree(decode_specs(config)))
    run = jax.jit(lambda params, *rows: score(params, *rows[:2], model=model, temperature=rows[2]).logprobs)
    return Family(model, params, weights, functools.partial(run, params))


@pytest.fixture(scope="module")
def family(tiny_config):
    """family(what differs from the tiny model of one layer), each made once."""
    config = dataclasses.replace(tiny_config, num_layers=1)
    make = functools.cache(lambda changes, **how: family_of(dataclasses.replace(config, **dict(changes)), **how))
    return lambda changes=(), **how: make(tuple(dict(changes).items()), **how)


def sampling_of(**changes):
    return SamplingConfig(**{"max_new_tokens": NEW, "eos_token_ids": EOS, "pad_token_id": 0} | changes)


def asked(tokens=TOKENS, segments=SEGMENTS, seed=0, **changes):
    rows = len(tokens) * GROUP
    given = {"max_new": NEW, "temperature": TEMPERATURE[:rows]} | changes
    return requests(tokens, segments, keys=jax.random.split(jax.random.key(seed), rows), **given)


def gaps(family, rollout, temperature):
    """|sampler − scorer| of the tokens that the policy chose."""
    rows, columns = rollout.tokens.shape
    wide = lambda x: np.pad(x, ((0, ROWS - rows), (0, ROOM - columns)))
    heat = np.pad(temperature, (0, ROWS - rows), constant_values=1.0)
    scores = np.asarray(family.logprobs(wide(rollout.tokens), wide(rollout.segment_ids), heat))[:rows, :columns]
    mask, logprobs = np.asarray(rollout.action_mask), np.asarray(rollout.logprobs)
    assert mask.sum() > 80
    assert (logprobs[~mask] == 0).all()
    return np.abs(logprobs - scores)[mask]


def assert_bounded(found, kind):
    most, mean, least = BOUNDS[kind]
    assert found.max() <= most
    assert found.mean() <= mean
    assert found.max() >= least


# --- paths that draw: (family, sampling) -> rollouts with their temperatures ------------------------------------------


def parts_of(family, sampling):
    return {"model": family.model.for_decode(), "sampling": sampling}


def at_once(family, sampling):
    return [(with_guesses(family, sampling, asked()), TEMPERATURE)]


def with_guesses(family, sampling, given):
    """What is sampled; where it asks for earlier completions, beside these: the first half of each row itself."""
    run, plan = jax.jit(functools.partial(generate, **parts_of(family, sampling))), family.model.for_decode().plan
    place = lambda x: x if plan is None else jax.device_put(x, plan.rows if x.ndim else plan.replicated)
    given, keys = jax.tree.map(place, given), jax.random.clone(given.keys)
    if not sampling.num_speculative_tokens:
        return run(family.weights, given)
    if sampling.speculative_source == "last_epoch":
        given = given._replace(drafts=place(jnp.full((len(keys), NEW), -1)))
        rollout = run(family.weights, given)
        known = np.asarray(rollout.action_mask)[:, -NEW:] & (np.arange(NEW) < NEW // 2)
        drafts = np.where(known, np.asarray(rollout.tokens)[:, -NEW:], -1)
        given = given._replace(drafts=place(jnp.asarray(drafts)), keys=place(keys))
    rollout = run(family.weights, given)
    assert np.asarray(rollout.passes).sum() < 0.9 * np.asarray(rollout.action_mask).sum()  # guesses come true
    return rollout


def in_chunks(family, sampling):
    parts = parts_of(family, sampling)
    compiled = chunks.Chunks(
        jax.jit(functools.partial(chunks.begin, **parts)),
        jax.jit(functools.partial(chunks.advance, passes=3, **parts), donate_argnums=2),
        functools.partial(collect, sampling=sampling),
    )
    seen = []
    rollout = chunks.sample_in_chunks(compiled, family.weights, asked(), watch=lambda *one: seen.append(one))
    assert len(seen) > 4
    return [(rollout, TEMPERATURE)]


def after(known, columns, seed):
    """Requests of GROUP rows after each of these texts."""
    tokens = np.stack([np.pad(one, (columns - len(one), 0)) for one in known])
    segments = np.stack([np.arange(columns) >= columns - len(one) for one in known])
    return asked(tokens, segments, seed)


def forked(family, sampling):
    """Rows after prefixes of rows that live and that have ended."""
    parts = parts_of(family, sampling)
    until = lambda weights, given: decode(weights, given, begin(weights, given, **parts), None, jnp.int32(5), **parts)
    half = jax.jit(until)(family.weights, asked())
    assert 0 < np.asarray(half.results.ended).sum() < ROWS
    rows = np.array([0, 1, 5, 9, 14, 16, 20, 23], np.int32)
    counts = np.minimum([0, 1, 2, 3, 4, 5, 5, 5], np.asarray(half.results.action_mask).sum(1)[rows]).astype(np.int32)
    known = [
        np.r_[TOKENS[row // GROUP, -LENGTHS[row // GROUP] :], half.results.tokens[row, :count]]
        for row, count in zip(rows, counts, strict=True)
    ]

    def go_on(weights, half, given, *places):
        state = decode(weights, given, start(fork(half, *places), given, **parts), **parts)
        return collect(state, given, sampling=sampling)

    rollout = jax.jit(go_on)(family.weights, half, after(known, COLUMNS + NEW, 9), rows, counts)
    return [(rollout, TEMPERATURE)]


def from_trunks(family, sampling):
    """After prompts that were read, and solutions that were given; then after the midst of what was sampled there."""
    forks = compile_forks(family.model, Plan(make_mesh({}, devices=jax.devices()[:1])), sampling)
    every, rng, columns = np.ones(PROMPTS, bool), np.random.default_rng(7), ROOM - NEW
    whole, lengths = rng.integers(10, 48, (PROMPTS, 8)).astype(np.int32), rng.integers(1, 9, PROMPTS).astype(np.int32)
    read = forks.read(family.weights, TOKENS, SEGMENTS)
    rows, nothing = np.arange(PROMPTS, dtype=np.int32), np.zeros(PROMPTS, np.int32)
    prompts = forks.fork(read, rows, nothing, every, None, columns=COLUMNS)
    state = forks.give(family.weights, prompts, whole, lengths)
    counts, known, found = lengths // 2, [TOKENS[row, -LENGTHS[row] :] for row in range(PROMPTS)], []
    for seed in (1, 2):
        prefixes = forks.fork(state, rows, counts, every, None, columns=columns)
        known = [np.r_[one, own[:count]] for one, own, count in zip(known, whole, counts, strict=True)]
        state, rollout = forks.sample(family.weights, prefixes, after(known, columns, seed), None, True)
        found.append((rollout, TEMPERATURE))
        rows = np.arange(PROMPTS, dtype=np.int32) * GROUP + 1
        whole = np.asarray(rollout.tokens)[rows, columns:]
        counts = (np.asarray(rollout.action_mask).sum(1)[rows] // 2).astype(np.int32)
    return found


def in_turns(family, sampling):
    engine, given = test_turns.Engine(family.model, family.weights, sampling), test_turns.asked()
    state, visits = engine.play(given, passes=3)
    rollout = collect(state, given, sampling=sampling)
    assert visits > 5
    assert np.asarray(rollout.turn_ids).max() > 2
    return [(rollout, test_turns.TEMPERATURE)]


EPOCH = {"num_speculative_tokens": 3, "speculative_source": "last_epoch"}
INT8 = {"kv_cache_dtype": "int8"}
TRUNCATED = {"top_k": 9, "top_p": 0.95, "min_p": 0.02}
RULES = {"repetition_penalty": 1.3, "logit_bias": ((7, 2.0),), "suppress_tokens": (13,), "min_new_tokens": 3}
RULES |= {"forced_tokens": (40, 41)}
TURNS = {"slots": 4, "eos_token_ids": test_turns.EOS, "max_new_tokens": test_turns.NEW}
TURNS |= {"observation_columns": test_turns.WIDTH}
LLAMA = {"family": "llama", "num_kv_heads": 1, "qk_norm": False, "output_bias": True, "mlp_bias": True}
LLAMA |= {"tie_embeddings": True, "rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 8)}
MISTRAL = {"family": "mistral", "num_kv_heads": 4, "qkv_bias": False, "qk_norm": False, "sliding_window": 4}
MISTRAL |= {"rope_scaling": LinearRope(2.0)}
MESH = (("fsdp", 2), ("sequence", 2), ("tensor", 2))
WINDOW, HALF = {"sliding_window": 5}, {"dtype": "bfloat16"}

# What is drawn, of which model (how it differs, how it lies), by which options, and in what columns a cache is read.
PATHS = {
    "truncation, last epoch, slots": (at_once, {}, {}, TRUNCATED | EPOCH | {"slots": 4}, 128),
    "last epoch, slots, windows": (at_once, WINDOW, {}, EPOCH | {"slots": 4}, 4),
    "int8, last epoch, slots": (at_once, {}, {}, INT8 | EPOCH | {"slots": 4}, 4),
    "int8, rules, windows": (at_once, WINDOW, {}, INT8 | RULES | {"slots": 6}, 4),
    "bfloat16, last epoch, slots": (at_once, HALF, {}, EPOCH | {"slots": 4}, 4),
    "bfloat16, int8": (at_once, HALF, {}, INT8, 128),
    "llama": (at_once, LLAMA, {}, {"slots": 4}, 128),
    "mistral": (at_once, MISTRAL, {}, {"slots": 4}, 4),
    "mesh with a sequence axis, last epoch": (at_once, {}, {"mesh": MESH}, EPOCH | {"slots": 8}, 128),
    "splash": (at_once, {"attention_implementation": "splash"} | WINDOW, {}, {}, 4),
    "adapter": (at_once, {}, {"adapted": True}, {"slots": 4}, 128),
    "chunks, rules, slots": (in_chunks, {}, {}, RULES | TRUNCATED | {"slots": 4}, 128),
    "chunks, int8, slots": (in_chunks, {}, {}, INT8 | {"slots": 4}, 128),
    "forks": (forked, {}, {}, {}, 4),
    "forks, int8": (forked, {}, {}, INT8, 128),
    "trunks": (from_trunks, {}, {}, {}, 128),
    "trunks, int8": (from_trunks, {}, {}, INT8, 4),
    "turns, int8": (in_turns, {}, {}, TURNS | INT8, 4),
    "turns, truncation, bias": (in_turns, {}, {}, TURNS | TRUNCATED | {"logit_bias": ((7, 2.0),)}, 128),
}


@pytest.mark.parametrize("name", PATHS)
def test_the_samplers_logprobs_are_the_scorers(family, monkeypatch, name):
    path, changes, how, options, block = PATHS[name]
    monkeypatch.setattr(decoding, "BLOCK", block)
    monkeypatch.setattr(attention, "INTERPRET", True)  # splash on a CPU
    own, sampling = family(changes, **how), sampling_of(**options)
    for rollout, temperature in path(own, sampling):
        assert_bounded(gaps(own, rollout, temperature), changes.get("dtype") or sampling.kv_cache_dtype)
        if sampling.reshapes:
            mask = np.asarray(rollout.action_mask)
            assert not np.allclose(np.asarray(rollout.behaviour_logprobs)[mask], np.asarray(rollout.logprobs)[mask])


def test_positions_that_are_off_by_one_would_be_noticed(family, monkeypatch):
    real = decoding._run

    def moved(params, tokens, places, *rest):
        return real(params, tokens, places + (tokens.shape[1] == 1), *rest)

    monkeypatch.setattr(decoding, "_run", moved)
    for changes, options, kind in (
        ({}, {}, None),
        ({}, INT8, "int8"),
        (HALF, {}, "bfloat16"),
        (HALF, INT8, "bfloat16"),
    ):
        own = family(changes)
        ((rollout, temperature),) = at_once(own, sampling_of(slots=4, **options))
        with pytest.raises(AssertionError):
            assert_bounded(gaps(own, rollout, temperature), kind)


@pytest.mark.parametrize(("changes", "options"), [((), {}), ((("sliding_window", 70),), INT8 | EPOCH)], ids=str)
def test_prompts_and_caches_of_several_blocks(family, changes, options):
    """Of 128 columns, as they are; rows of some tokens beside rows of 260."""
    lengths, rows, columns = np.array([260, 3, 129, 127]), 8, 260
    tokens = np.random.default_rng(8).integers(10, 48, (4, columns)).astype(np.int32)
    segments = (np.arange(columns) >= columns - lengths[:, None]).astype(np.int32)
    own, sampling = family(changes), sampling_of(slots=4, eos_token_ids=(), **options)
    keys = jax.random.split(jax.random.key(0), rows)
    given = requests(tokens, segments, keys=keys, max_new=NEW, temperature=TEMPERATURE[:rows])
    rollout = with_guesses(own, sampling, given)
    scores = own.logprobs(rollout.tokens, rollout.segment_ids, TEMPERATURE[:rows])
    found = np.abs(np.asarray(rollout.logprobs - scores))[np.asarray(rollout.action_mask)]
    assert found.size == rows * NEW
    assert_bounded(found, sampling.kv_cache_dtype)


# --- ways to score ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampled(family):
    """Groups with tokens that the policy did not choose."""
    rollout = jax.jit(functools.partial(generate, model=family().model, sampling=sampling_of(forced_tokens=(40, 41))))(
        family().weights, asked()
    )
    return jax.device_get(rollout)


# How rows lie, of a model that differs how, and whether a gradient is taken, as in an update.
WAYS = {
    "some columns at a time": (None, {}, False),
    "packed": ({"group": 1, "pack": True}, {}, False),
    "one prompt a group, in blocks": ({"group": GROUP, "pack": False, "block": 2}, {}, False),
    "one prompt a group, packed, remat full": ({"group": GROUP, "pack": True}, {"remat": "full"}, True),
    "packed, remat dots": ({"group": 1, "pack": True}, {"remat": "dots"}, True),
    "splash, remat full": (None, {"attention_implementation": "splash", "remat": "full"}, True),
    "a sequence axis": (None, {}, True),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_scorers_logprobs_are_the_samplers(family, sampled, monkeypatch, name):
    layout, changes, gradient = WAYS[name]
    monkeypatch.setattr(attention, "INTERPRET", True)
    own = family(changes, **({"mesh": MESH} if "axis" in name else {}))
    rows = sampled.tokens, sampled.segment_ids
    if layout is not None:
        (packed,) = pack_rows(*rows, sampled.action_mask, start=COLUMNS, cuts=[Cut(0, ROWS, 1)], **layout)
        assert packed.tokens.size < 0.8 * sampled.tokens.size
        rows = packed, None

    def total(params, tokens, segments):
        options = {"model": own.model, "temperature": jnp.asarray(TEMPERATURE), "chunk": 50, "start": COLUMNS}
        logprobs = score(params, tokens, segments, **options).logprobs
        return logprobs.sum(), logprobs

    run = jax.jit(jax.grad(total, has_aux=True) if gradient else total)
    sum_or_gradient, logprobs = run(own.params, *rows)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sum_or_gradient))
    found = np.abs(np.asarray(logprobs) - sampled.logprobs)[sampled.action_mask]
    assert found.size > 100
    assert_bounded(found, None)
