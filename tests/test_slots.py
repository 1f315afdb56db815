"""Slots: many requests through few of them. Which slot a row has, after whom and beside whom, changes no bit of it.

References: the same rows with a slot each, list scheduling by a heap, the full forward pass.
"""

import dataclasses
import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import EOS, random_params, requests, same

from jaxrl_lm.generate import collect, decode, generate, prepare_decode, read_prompts
from jaxrl_lm.models import build
from jaxrl_lm.models import decode as decoding
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.slots import Prefixes, fork, start

PROMPTS, GROUP, COLUMNS, NEW = 8, 3, 6, 12
ROWS = PROMPTS * GROUP
LENGTHS = np.array([6, 1, 3, 5, 2, 6, 4, 1])
TOKENS = np.random.default_rng(0).integers(10, 48, (PROMPTS, COLUMNS)).astype(np.int32)
SEGMENTS = (np.arange(COLUMNS) >= COLUMNS - LENGTHS[:, None]).astype(np.int32)
LIMITS = np.random.default_rng(1).permutation(np.repeat([0, 1, 2, 3, 5, NEW], 4)).astype(np.int32)
TEMPERATURE = np.random.default_rng(2).choice([0.0, 0.7, 1.0, 1.5], ROWS).astype(np.float32)


@pytest.fixture(scope="module")
def sampler(model, weights):
    """sampler(slots, eos) -> requests -> Rollout; one compilation each."""

    @functools.cache
    def make(slots, eos=EOS):
        sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=eos, pad_token_id=0, slots=slots)
        compiled = jax.jit(functools.partial(generate, model=model, sampling=sampling))
        return lambda given: compiled(weights, given)

    return make


def asked(seed=0, keys=None, prompts=slice(None), limits=LIMITS, temperature=TEMPERATURE):
    keys = jax.random.split(jax.random.key(seed), ROWS) if keys is None else keys
    return requests(TOKENS[prompts], SEGMENTS[prompts], keys=keys, max_new=limits, temperature=temperature)


@pytest.mark.parametrize("slots", [2, 6, 24])
def test_few_slots_give_the_rows_of_a_slot_each(sampler, slots):
    """Other widths round differently: equal tokens, log-probs within 1e-4."""
    for seed in range(2):
        wide, narrow = sampler(None)(asked(seed)), sampler(slots)(asked(seed))
        assert 0 < np.asarray(wide.action_mask).sum() < LIMITS.sum()  # some rows end by themselves
        for name in ("tokens", "action_mask", "segment_ids", "truncated", "turn_ids", "policy_step"):
            np.testing.assert_array_equal(getattr(narrow, name), getattr(wide, name), err_msg=name)
        np.testing.assert_allclose(narrow.logprobs, wide.logprobs, atol=1e-4)


def groups_in_order(order):
    """Prompts, and rows, of groups in another order."""
    return order, (order[:, None] * GROUP + np.arange(GROUP)).reshape(-1)


def test_order_and_slots_change_no_bit(sampler):
    base, keys = sampler(4)(asked()), jax.random.split(jax.random.key(0), ROWS)
    for seed in range(3):
        prompts, rows = groups_in_order(np.random.default_rng(seed).permutation(PROMPTS))
        given = asked(
            keys=jax.random.clone(keys)[rows], prompts=prompts, limits=LIMITS[rows], temperature=TEMPERATURE[rows]
        )
        same(base, sampler(4)(given), rows_of_a=rows)


def test_neighbours_change_no_bit(sampler):
    base = sampler(4)(asked())
    kept = np.flatnonzero(np.arange(ROWS) % 5 == 1)
    others = np.setdiff1d(np.arange(ROWS), kept)
    for seed in range(2):
        limits, temperature = LIMITS.copy(), TEMPERATURE.copy()
        limits[others] = np.random.default_rng(seed).integers(0, NEW + 1, len(others))
        temperature[others] = 3.0
        changed = sampler(4)(asked(limits=limits, temperature=temperature))
        for name, before, after in zip(base._fields, base, changed, strict=True):
            if before is not None:
                np.testing.assert_array_equal(np.asarray(after)[kept], np.asarray(before)[kept], err_msg=name)
    assert not np.array_equal(changed.tokens, base.tokens)


def test_the_samplers_logprobs_are_the_scorers(sampler, model, params):
    rollout = sampler(4)(asked())
    scores = jax.jit(functools.partial(score, model=model))(
        params, rollout.tokens, rollout.segment_ids, temperature=jnp.asarray(TEMPERATURE)
    )
    mask = np.asarray(rollout.action_mask)
    np.testing.assert_allclose(np.asarray(rollout.logprobs)[mask], np.asarray(scores.logprobs)[mask], atol=1e-5)


# --- the queue --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(model, weights):
    """Compiled start and decode with 4 slots."""
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=(), pad_token_id=0, slots=4)

    @jax.jit
    def begin(weights, given):
        return start(read_prompts(weights, given, model=model), given, model=model, sampling=sampling)

    go_on = jax.jit(functools.partial(decode, model=model, sampling=sampling), donate_argnums=2)
    return (
        lambda given: begin(weights, given),
        lambda given, state, until: go_on(weights, given, state, None, until),
        sampling,
    )


def list_schedule(lengths, slots):
    """Passes until every job is done, where a slot that is free takes the next one."""
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


@pytest.mark.parametrize("seed", range(3))
def test_slots_work_as_list_scheduling_and_are_never_idle_while_rows_wait(engine, seed):
    begin, go_on, _ = engine
    limits = np.minimum(np.random.default_rng(seed).geometric(0.25, ROWS), NEW)
    limits[::7] = 0
    given = asked(limits=limits)
    state = go_on(given, begin(given), np.int32(1000))
    assert int(state.busy) == limits.sum()  # every pass of a slot makes a token
    assert int(state.step) == list_schedule(limits[limits > 0], 4)
    np.testing.assert_array_equal(np.asarray(state.results.action_mask).sum(1), limits)
    early = go_on(given, begin(given), np.int32(3))
    assert int(early.busy) == 4 * 3  # rows wait: all slots are busy
    assert int(early.next[0]) < (limits > 0).sum()


def test_chunks_of_passes_are_one_run(engine):
    begin, go_on, sampling = engine
    given = asked()
    whole = go_on(given, begin(given), np.int32(1000))
    state, visits = begin(given), 0
    while bool((state.request >= 0).any()):
        state = go_on(given, state, state.step + 3)
        visits += 1
    assert visits == -(-int(whole.step) // 3)
    same(collect(whole, given, sampling=sampling), collect(state, given, sampling=sampling))


def test_rows_that_ask_for_nothing_take_no_slot(engine):
    begin, go_on, sampling = engine
    limits = np.where(np.arange(ROWS) == 17, 2, 0)
    given = asked(limits=limits)
    state = go_on(given, begin(given), np.int32(1000))
    assert (int(state.step), int(state.busy)) == (2, 2)
    rollout = collect(state, given, sampling=sampling)
    np.testing.assert_array_equal(np.asarray(rollout.action_mask).sum(1), limits)
    nothing = asked(limits=0)
    assert int(go_on(nothing, begin(nothing), np.int32(1000)).step) == 0


def test_a_prompt_is_computed_once(model, weights, monkeypatch):
    """By the columns that go through the layers: P prompts, and then one a slot and pass."""
    seen = []
    real = decoding._run

    def counting(params, tokens, *rest):
        jax.debug.callback(lambda: seen.append(tokens.shape))
        return real(params, tokens, *rest)

    monkeypatch.setattr(decoding, "_run", counting)
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=(), pad_token_id=0, slots=4)
    run = jax.jit(lambda weights, given: generate(weights, given, model=model, sampling=sampling))
    jax.block_until_ready(run(weights, asked()))
    jax.effects_barrier()
    assert sorted(seen, reverse=True) == [(PROMPTS, COLUMNS)] + [(4, 1)] * list_schedule(LIMITS[LIMITS > 0], 4)


def test_slots_that_do_not_fit():
    with pytest.raises(ValueError, match="decode_slots=0: must be at least 1"):
        SamplingConfig(max_new_tokens=NEW, eos_token_ids=EOS, pad_token_id=0, slots=0)


# --- forks ------------------------------------------------------------------------------------------------------------


def test_a_fork_goes_on_as_the_row_itself_and_as_a_prompt_of_its_tokens(model, weights):
    """From prefixes of rows that live and that have ended; nothing is prefilled a second time."""
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=EOS, pad_token_id=0)
    given = asked(limits=NEW)
    run = jax.jit(functools.partial(decode, model=model, sampling=sampling))
    begin = jax.jit(lambda prefixes, given: start(prefixes, given, model=model, sampling=sampling))
    read = jax.jit(functools.partial(read_prompts, model=model))
    half = run(weights, given, begin(read(weights, given), given), None, np.int32(5))
    assert 0 < np.asarray(half.results.ended).sum() < ROWS
    rows = np.array([0, 1, 5, 9, 14, 23])
    drawn = np.asarray(half.results.action_mask).sum(1)
    counts = np.minimum([0, 1, 2, 3, 4, 5], drawn[rows])
    known = [
        np.concatenate([TOKENS[r // GROUP, -LENGTHS[r // GROUP] :], half.results.tokens[r, :c]])
        for r, c in zip(rows, counts, strict=True)
    ]
    width = max(map(len, known))
    tokens = np.stack([np.pad(one, (width - len(one), 0)) for one in known])
    segments = np.stack([np.arange(width) >= width - len(one) for one in known]).astype(np.int32)
    again = requests(
        tokens, segments, keys=jax.random.split(jax.random.key(9), 2 * len(rows)), temperature=1.0, max_new=NEW
    )
    forked = run(weights, again, begin(jax.jit(fork)(half, rows, counts), again))
    prefilled = run(weights, again, begin(read(weights, again), again))
    np.testing.assert_array_equal(forked.results.tokens, prefilled.results.tokens)
    np.testing.assert_allclose(forked.results.logprobs, prefilled.results.logprobs, atol=1e-4)
    np.testing.assert_array_equal(forked.cache.lengths, prefilled.cache.lengths)
    assert not np.array_equal(forked.results.tokens[0], forked.results.tokens[1])  # keys of their own


def test_a_fork_needs_the_caches_of_its_rows(engine):
    begin, _, _ = engine
    with pytest.raises(ValueError, match="24 rows went through 4 slots"):
        fork(begin(asked()), jnp.zeros((1,), jnp.int32), jnp.zeros((1,), jnp.int32))


# --- a cache in blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
def test_blocks_of_a_cache_are_read_as_the_whole(tiny_config, monkeypatch, window):
    """Blocks of 4 columns against one of all; rows that end early leave the others' bits alone."""
    model = build(dataclasses.replace(tiny_config, num_layers=2, sliding_window=window))
    params = random_params(model)
    weights = prepare_decode(params, model=model)
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=EOS, pad_token_id=0, slots=4)
    make = lambda: jax.jit(lambda weights, given: generate(weights, given, model=model, sampling=sampling))
    whole = make()(weights, asked())
    monkeypatch.setattr(decoding, "BLOCK", 4)
    run = make()
    blocks = run(weights, asked())
    np.testing.assert_array_equal(blocks.tokens, whole.tokens)
    np.testing.assert_allclose(blocks.logprobs, whole.logprobs, atol=1e-4)
    scores = jax.jit(functools.partial(score, model=model))(
        params, blocks.tokens, blocks.segment_ids, temperature=jnp.asarray(TEMPERATURE)
    )
    mask = np.asarray(blocks.action_mask)
    np.testing.assert_allclose(np.asarray(blocks.logprobs)[mask], np.asarray(scores.logprobs)[mask], atol=1e-5)
    kept, limits = np.arange(ROWS) % 4 == 0, LIMITS.copy()
    limits[~kept] = np.minimum(limits[~kept], 1)  # neighbours no longer fill more blocks
    shorter = run(weights, asked(limits=limits))
    np.testing.assert_array_equal(np.asarray(shorter.logprobs)[kept], np.asarray(blocks.logprobs)[kept])


def test_several_tokens_at_once_are_one_after_another(model, params, weights):
    """`extend` by 3, 1 and 2 columns, of which not all count, against the full forward pass."""
    lengths = np.array([4, 1, 3], np.int32)
    tokens = np.random.default_rng(5).integers(10, 48, (3, 12)).astype(np.int32)
    cache = decoding.prefill(weights, jnp.asarray(tokens[:, :4]), jnp.asarray(lengths), model=model)
    more = lambda x, axis: jnp.pad(x, [(0, 8 if a == axis else 0) for a in range(4)])
    cache = cache._replace(layers=tuple((more(k, 3), more(v, 2)) for k, v in cache.layers))
    full = model.hidden(
        params, jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(12), (3, 12)), jnp.ones((3, 12), jnp.int32)
    )
    done = lengths.copy()
    for width, count in ((3, [3, 2, 0]), (1, [1, 0, 1]), (2, [2, 1, 2])):
        part = np.stack([np.resize(row[at : at + width], width) for row, at in zip(tokens, done, strict=True)])
        hidden, cache = decoding.extend(weights, jnp.asarray(part), cache, model=model, count=jnp.asarray(count))
        for row, (at, number) in enumerate(zip(done, count, strict=True)):
            np.testing.assert_allclose(hidden[:, row, :number].T, full[row, at : at + number], atol=5e-6)
        done += count
        np.testing.assert_array_equal(cache.lengths, done)


# --- meshes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 2}, {"fsdp": 4}])
def test_each_part_of_a_mesh_has_slots_of_its_own(tiny_config, sampler, params, mesh):
    size = int(np.prod(list(mesh.values())))
    plan = Plan(make_mesh(mesh, devices=jax.devices()[:size])).for_decode()
    model = build(dataclasses.replace(tiny_config, num_layers=2), plan=plan)
    weights = jax.device_put(prepare_decode(params, model=model), plan.tree(decoding.decode_specs(model.config)))
    given = asked()
    placed = jax.tree.map(lambda x: jax.device_put(x, plan.rows if x.ndim else plan.replicated), given)
    slots = lambda count: SamplingConfig(max_new_tokens=NEW, eos_token_ids=EOS, pad_token_id=0, slots=count)
    run = jax.jit(functools.partial(generate, model=model, sampling=slots(8)), out_shardings=plan.rows)
    rollout, alone = run(weights, placed), sampler(None)(given)
    for name in ("tokens", "action_mask", "truncated"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(alone, name), err_msg=name)
    np.testing.assert_allclose(rollout.logprobs, alone.logprobs, atol=1e-4)
    with pytest.raises(ValueError, match="decode_slots=7 does not divide over"):
        generate(weights, given, model=model, sampling=slots(7))
    odd = asked(keys=jax.random.split(jax.random.key(0), 12), prompts=slice(3), limits=1, temperature=1.0)
    layers = tuple((jnp.zeros((3, 2, 8, COLUMNS)), jnp.zeros((3, 2, COLUMNS, 8))) for _ in range(2))
    prefixes = Prefixes(decoding.Cache(layers, jnp.ones((3,), jnp.int32)), jnp.ones((3,), jnp.int32))
    with pytest.raises(ValueError, match="decode_slots=4: 3 prompts, whose rows wait for a slot, does not divide over"):
        jax.eval_shape(functools.partial(start, model=model, sampling=slots(4)), prefixes, odd)
