"""Episodes of several turns in slots: what `append` goes on from is what prefilling the whole past would give.

References: each turn's whole prefix prefilled anew, the full forward pass of the scorer, walks by hand over the rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import random_params, requests, same

from jaxrl_lm.decode_steps import compile_turns
from jaxrl_lm.generate import collect, decode, prepare_decode, read_prompts
from jaxrl_lm.models import build
from jaxrl_lm.models import decode as decoding
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.slots import fork, start
from jaxrl_lm.turns import append, check_append

PROMPTS, GROUP, COLUMNS, NEW, WIDTH, VOCAB = 8, 2, 6, 24, 5, 48
ROWS = PROMPTS * GROUP
EOS = tuple(range(3, 10))  # turns of some seven tokens
LENGTHS = np.array([6, 1, 3, 5, 2, 6, 4, 1])
TOKENS = np.random.default_rng(0).integers(10, VOCAB, (PROMPTS, COLUMNS)).astype(np.int32)
SEGMENTS = (np.arange(COLUMNS) >= COLUMNS - LENGTHS[:, None]).astype(np.int32)
LIMITS = np.where(np.arange(ROWS) % 5 == 3, 9, NEW).astype(np.int32)
LIMITS[11] = 0
TEMPERATURE = np.random.default_rng(2).choice([0.7, 1.0, 1.5], ROWS).astype(np.float32)
TURNS = np.random.default_rng(3).integers(1, 5, ROWS)  # of each row, at most


def observation(row, turn):
    """What a row is given after this turn; None: it is over."""
    rng = np.random.default_rng([row, turn])
    return None if turn >= TURNS[row] else rng.integers(10, VOCAB, rng.integers(1, WIDTH + 1)).astype(np.int32)


def sampling_of(slots=4, **changes):
    options = {"max_new_tokens": NEW, "eos_token_ids": EOS, "pad_token_id": 0, "slots": slots}
    return SamplingConfig(**options | {"observation_columns": WIDTH} | changes)


def asked(prompts=slice(None), rows=slice(None), **changes):
    options = {"max_new": LIMITS[rows], "temperature": TEMPERATURE[rows]} | changes
    keys = jax.random.split(jax.random.key(0), ROWS)[rows]
    return requests(TOKENS[prompts], SEGMENTS[prompts], keys=keys, **options)


class Engine:
    """Compiled parts, and a host that plays episodes by them."""

    def __init__(self, model, weights, sampling, place=lambda tree: tree, stops=None):
        self.weights, self.sampling, self.place, self.stops = weights, sampling, place, stops
        self.steps = compile_turns(model, sampling)

    def play(self, given, *, passes=1000, name=lambda row: row, filler=0):
        """The final state, and how often the host was asked. `name` is the row as `observation` knows it."""
        state, visits, done = self.steps.start(self.weights, given), 0, {}
        while (np.asarray(state.request) != -1).any():
            state = self.steps.decode(self.weights, given, state, self.stops, state.step + passes)
            state, visits = self.answer(given, state, done, name, filler), visits + 1
        return state, visits

    def answer(self, given, state, done, name, filler):
        rows, left = np.asarray(self.steps.waiting(state)), np.asarray(self.steps.room(state, given))
        slots = len(rows)
        observations = np.full((slots, self.sampling.observation_columns), filler, np.int32)
        lengths = np.zeros(slots, np.int32)
        over, cut = np.zeros(slots, bool), np.zeros(slots, bool)
        for slot, row in enumerate(rows.tolist()):
            if row < 0:
                continue
            done[row] = done.get(row, 0) + 1
            tokens = observation(name(row), done[row])
            over[slot] = tokens is None or len(tokens) > left[slot]
            cut[slot] = tokens is not None
            if not over[slot]:
                observations[slot, : len(tokens)], lengths[slot] = tokens, len(tokens)
        observations, lengths, over, cut = self.place((observations, lengths, over, cut))
        if np.asarray(lengths).any():
            state = self.steps.append(self.weights, given, state, observations, lengths)
        return self.steps.finish(state, over, cut) if np.asarray(over).any() else state


@pytest.fixture(scope="module")
def engine(model, weights):
    return Engine(model, weights, sampling_of())


@pytest.fixture(scope="module")
def wide(tiny_config, params):
    """A slot for each row, on a mesh of two parts, with more columns for what is given."""
    plan = Plan(make_mesh({"data": 2, "tensor": 2}, devices=jax.devices()[:4])).for_decode()
    model = build(dataclasses.replace(tiny_config, num_layers=2), plan=plan)
    weights = jax.device_put(prepare_decode(params, model=model), plan.tree(decoding.decode_specs(model.config)))
    place = lambda tree: jax.tree.map(lambda x: jax.device_put(x, plan.rows if np.ndim(x) else plan.replicated), tree)
    return Engine(model, weights, sampling_of(None, observation_columns=WIDTH + 2), place)


@pytest.fixture(scope="module")
def played(engine):
    given = asked()
    state, visits = engine.play(given)
    assert visits > 3
    return collect(state, given, sampling=engine.sampling)


def turns_of(rollout):
    """(row, first column, last column + 1) of each turn, columns of the results."""
    ids = np.asarray(rollout.turn_ids)[:, COLUMNS:]
    return [
        (row, *(np.flatnonzero(ids[row] == turn)[[0, -1]] + [0, 1]))
        for row in range(ROWS)
        for turn in range(1, ids[row].max() + 1)
    ]


def test_an_episode_is_that_of_whole_pasts_prefilled_anew(played, model, weights):
    """Each turn as a request of its own, whose prompt is all that stands before it."""
    tokens, logprobs = (np.asarray(x)[:, COLUMNS:] for x in (played.tokens, played.logprobs))
    turns = turns_of(played)
    assert len(turns) > ROWS
    past = [np.r_[TOKENS[row // GROUP, -LENGTHS[row // GROUP] :], tokens[row, :first]] for row, first, _ in turns]
    width = max(map(len, past))
    rows, first = np.array([row for row, _, _ in turns]), np.array([first for _, first, _ in turns], np.int32)
    again = requests(
        np.stack([np.pad(one, (width - len(one), 0)) for one in past]),
        np.stack([np.arange(width) >= width - len(one) for one in past]),
        keys=jax.random.split(jax.random.key(0), ROWS)[rows],
        max_new=LIMITS[rows],
        temperature=TEMPERATURE[rows],
    )
    own = {"model": model, "sampling": sampling_of(None, observation_columns=None)}

    @jax.jit
    def run(weights, given):
        state = start(read_prompts(weights, given, model=model), given, **own)
        return decode(weights, given, state._replace(drawn=first), **own).results  # a token's key is of its column

    anew = run(weights, again)
    for number, (row, begin, end) in enumerate(turns):
        mine = np.flatnonzero(anew.action_mask[number])
        assert (mine[0], mine[-1] + 1) == (begin, end)
        np.testing.assert_array_equal(anew.tokens[number, begin:end], tokens[row, begin:end])
        np.testing.assert_allclose(anew.logprobs[number, begin:end], logprobs[row, begin:end], atol=1e-5)


def test_the_samplers_logprobs_are_the_scorers(played, model, params):
    scores = jax.jit(functools.partial(score, model=model))(
        params, played.tokens, played.segment_ids, temperature=jnp.asarray(TEMPERATURE)
    )
    mask = np.asarray(played.action_mask)
    assert mask.sum() > 100
    np.testing.assert_allclose(np.asarray(played.logprobs)[mask], np.asarray(scores.logprobs)[mask], atol=1e-5)
    assert (np.asarray(played.logprobs)[~mask] == 0).all()


def test_rows_are_turns_and_what_was_given_between_them(played):
    """A walk over each row: a turn up to its end of sequence, an observation, the next turn."""
    kinds = set()
    for row in range(ROWS):
        four = (played.tokens, played.action_mask, played.turn_ids, played.segment_ids)
        tokens, mask, turns, segments = (np.asarray(x)[row, COLUMNS:].tolist() for x in four)
        column, turn, truncated = 0, 1, False
        while column < LIMITS[row]:
            assert (mask[column], turns[column], segments[column]) == (True, turn, 1)
            column += 1
            if tokens[column - 1] not in EOS:
                truncated = column == LIMITS[row]
                continue
            given = observation(row, turn)
            if column == LIMITS[row] or given is None:
                break
            if column + len(given) >= LIMITS[row]:
                truncated = True
                break
            here = slice(column, column + len(given))
            assert tokens[here] == given.tolist()
            assert not any(mask[here] + turns[here])
            assert all(segments[here])
            column, turn = column + len(given), turn + 1
        assert not any(mask[column:] + turns[column:] + segments[column:])
        assert bool(played.truncated[row]) == truncated
        kinds.add((turn, truncated))
    assert {turn for turn, _ in kinds} >= {1, 2, 3}
    assert {truncated for _, truncated in kinds} == {False, True}
    np.testing.assert_array_equal(played.policy_step, np.where(played.action_mask, 7, 0))
    np.testing.assert_array_equal(played.segment_ids[:, :COLUMNS], np.repeat(SEGMENTS, GROUP, 0))


@pytest.mark.parametrize("passes", [1, 4])
def test_how_long_a_row_waits_changes_no_bit(engine, played, passes):
    """Rows of the same slots are visited at other times, beside other rows."""
    given = asked()
    state, visits = engine.play(given, passes=passes)
    assert visits > 10
    same(played, collect(state, given, sampling=engine.sampling))


def test_order_neighbours_and_padding_change_no_bit(engine, played):
    prompts = np.random.default_rng(1).permutation(PROMPTS)
    rows = (prompts[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
    given = asked(prompts, rows)
    state, _ = engine.play(given, passes=5, name=lambda row: rows[row], filler=47)
    same(played, collect(state, given, sampling=engine.sampling), rows_of_a=rows)
    kept = np.arange(ROWS) % 3 == 0
    given = asked(max_new=np.where(kept, LIMITS, 4), temperature=np.where(kept, TEMPERATURE, 3.0))
    state, _ = engine.play(given, passes=3, filler=-1)  # what pads may be no token at all
    changed = collect(state, given, sampling=engine.sampling)
    for name, before, after in zip(played._fields, played, changed, strict=True):
        if before is not None:
            np.testing.assert_array_equal(np.asarray(after)[kept], np.asarray(before)[kept], err_msg=name)
    assert not np.array_equal(changed.tokens, played.tokens)


def close(a, b, atol=1e-4):
    """Other shapes round differently."""
    for name in ("tokens", "action_mask", "segment_ids", "truncated", "turn_ids", "policy_step"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol)


def test_a_stop_string_ends_a_turn_and_is_looked_for_anew_in_the_next(model, weights, played):
    """The automaton whose stops are the other sampler's end-of-sequence tokens."""
    ends = np.isin(np.arange(VOCAB), EOS).astype(np.int32)
    stops = np.stack([ends, np.ones(VOCAB, np.int32)])
    engine, given = Engine(model, weights, sampling_of(eos_token_ids=()), stops=stops), asked()
    state, _ = engine.play(given)
    same(played, collect(state, given, sampling=engine.sampling))


def test_what_is_given_is_read_in_blocks_and_windows_too(tiny_config, monkeypatch):
    """A cache in blocks of 4 columns and a window of 5, against the full forward pass."""
    monkeypatch.setattr(decoding, "BLOCK", 4)
    model = build(dataclasses.replace(tiny_config, num_layers=2, sliding_window=5))
    params = random_params(model)
    engine, given = Engine(model, prepare_decode(params, model=model), sampling_of()), asked()
    state, _ = engine.play(given)
    rollout = collect(state, given, sampling=engine.sampling)
    scores = jax.jit(functools.partial(score, model=model))(
        params, rollout.tokens, rollout.segment_ids, temperature=jnp.asarray(TEMPERATURE)
    )
    mask = np.asarray(rollout.action_mask)
    assert np.asarray(rollout.turn_ids).max() > 2
    np.testing.assert_allclose(np.asarray(rollout.logprobs)[mask], np.asarray(scores.logprobs)[mask], atol=1e-5)


@pytest.fixture(scope="module")
def spread(wide):
    """The final state of `wide`."""
    return wide.play(wide.place(asked()))[0]


def test_a_slot_for_each_row_on_a_mesh_and_more_columns_of_padding_give_the_same(wide, spread, played):
    rollout = collect(spread, asked(), sampling=wide.sampling)
    for name in ("tokens", "action_mask", "segment_ids", "truncated", "turn_ids", "policy_step"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(played, name), err_msg=name)
    np.testing.assert_allclose(rollout.logprobs, played.logprobs, atol=1e-4)  # other shapes round differently
    assert (np.asarray(spread.request) == -1).all()
    # A pass of a slot for each token that the policy chose, and no more.
    assert int(spread.busy) == np.asarray(played.action_mask).sum()


def test_a_fork_goes_on_from_any_place_of_an_episode(spread, played, model, weights):
    """From turns, from the midst of what was given, and from prompts; as a prompt of the same tokens."""
    length = np.asarray(played.segment_ids)[:, COLUMNS:].sum(1)
    rows = np.array([0, 1, 2, 5, 6, 9, 10, 13], np.int32)
    counts = np.minimum(length[rows], [0, 24, 3, 9, 14, 6, 12, 1]).astype(np.int32)
    tokens = np.asarray(played.tokens)[:, COLUMNS:]
    known = [
        np.r_[TOKENS[row // GROUP, -LENGTHS[row // GROUP] :], tokens[row, :count]]
        for row, count in zip(rows, counts, strict=True)
    ]
    width = max(map(len, known))
    again = requests(
        np.stack([np.pad(one, (width - len(one), 0)) for one in known]),
        np.stack([np.arange(width) >= width - len(one) for one in known]),
        max_new=6,
    )
    own = {"model": model, "sampling": sampling_of(None, observation_columns=None, max_new_tokens=6)}
    run = jax.jit(lambda weights, given, prefixes: decode(weights, given, start(prefixes, given, **own), **own).results)
    forked = jax.device_get(jax.jit(fork)(spread, rows, counts))
    layers = tuple((k[..., :width], v[:, :, :width]) for k, v in forked.cache.layers)  # no prefix fills the rest
    forked = run(weights, again, forked._replace(cache=forked.cache._replace(layers=layers)))
    anew = run(weights, again, jax.jit(functools.partial(read_prompts, model=model))(weights, again))
    np.testing.assert_array_equal(forked.tokens, anew.tokens)
    np.testing.assert_allclose(forked.logprobs, anew.logprobs, atol=1e-4)


def test_tokens_are_given_to_rows_that_decode_too(engine):
    """At once, before a first token, in the midst of a turn, and twice; a row ended in the midst is truncated."""
    given = asked(max_new=NEW)
    state = engine.steps.decode(engine.weights, given, engine.steps.start(engine.weights, given), None, np.int32(0))
    tokens = np.full((4, WIDTH), 30, np.int32)
    state = engine.steps.append(engine.weights, given, state, tokens, np.array([2, 0, 1, 0]))
    state = engine.steps.append(engine.weights, given, state, tokens + 1, np.array([1, 0, 0, 0]))
    state = engine.steps.decode(engine.weights, given, state, None, np.int32(2))
    held = np.flatnonzero(np.asarray(state.request) >= 0)
    assert {1, 2} <= set(held)
    state = engine.steps.append(engine.weights, given, state, tokens + 2, np.array([0, 1, 0, 0]))
    state = engine.steps.decode(engine.weights, given, state, None, state.step + 1)
    state = engine.steps.finish(state, np.array([True] * 4), np.array([False] * 4))
    rollout = collect(state, given, sampling=engine.sampling)
    turns, own = np.asarray(rollout.turn_ids)[:4, COLUMNS:], np.asarray(rollout.tokens)[:4, COLUMNS:]
    assert own[0, :3].tolist() == [30, 30, 31]
    assert turns[0, :5].tolist() == [0, 0, 0, 1, 1]
    assert own[1, 2] == 32
    assert turns[1, :4].tolist() == [1, 1, 0, 2]
    assert turns[2, :3].tolist() == [0, 1, 1]
    assert bool(rollout.truncated[1]) == (own[1, 3] not in EOS)
    assert sorted(np.asarray(state.request)) == [4, 5, 6, 7]  # the next rows of the queue


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half(engine):
    """Requests, and a state in which each of the four slots holds a row; slot 3 that of row 3, whose limit is 9."""
    given = asked()
    return given, engine.steps.decode(
        engine.weights, given, engine.steps.start(engine.weights, given), None, np.int32(2)
    )


def test_what_does_not_fit_is_named(engine, half):
    given, state = half
    check = lambda observations, lengths: check_append(
        state, given, np.asarray(observations), np.asarray(lengths), vocab_size=VOCAB, sampling=engine.sampling
    )
    tokens = np.full((4, WIDTH), 30)
    check(tokens, [5, 0, 5, 5])
    with pytest.raises(ValueError, match=r"slot 1 is given 6 tokens of an observation of 5 columns"):
        check(tokens, [0, 6, 0, 0])
    with pytest.raises(ValueError, match=r"slot 0 is given token 48, outside the vocabulary of 48"):
        check(np.where(np.arange(WIDTH) == 1, 48, tokens), [2, 0, 0, 0])
    check(np.where(np.arange(WIDTH) == 2, -1, tokens), [2, 0, 0, 0])  # beyond what is given
    give = lambda state, lengths: engine.steps.append(
        engine.weights, given, jax.tree.map(jnp.copy, state), tokens, np.array(lengths)
    )
    full = give(state, [0, 0, 0, 5])
    with pytest.raises(ValueError, match=r"slot 3 \(row 3\) has room for 1 tokens and one of its own, and is given 2"):
        check_append(full, given, tokens, np.array([0, 0, 0, 2]), vocab_size=VOCAB, sampling=engine.sampling)
    again = give(full, [0, 0, 0, 2])  # which changes nothing
    for name in ("tokens", "turns", "action_mask", "ended"):
        np.testing.assert_array_equal(getattr(again.results, name), getattr(full.results, name), err_msg=name)
    np.testing.assert_array_equal(again.cache.lengths, full.cache.lengths)
    empty = state._replace(request=jnp.full((4,), -1, jnp.int32))
    with pytest.raises(ValueError, match="slot 2 is empty and cannot be given 1 tokens"):
        check_append(empty, given, tokens, np.array([0, 0, 1, 0]), vocab_size=VOCAB, sampling=engine.sampling)


@pytest.mark.parametrize(
    ("shape", "lengths", "message"),
    [
        ((4, 6), (4,), "observations of 6 columns; there must be between 1 and observation_columns=5"),
        ((4, 0), (4,), "observations of 0 columns"),
        ((3, 5), (3,), r"observations of shape \(3, 5\) and lengths of shape \(3,\) do not fit 4 slots"),
        ((4, 5), (3,), "lengths of shape"),
    ],
)
def test_wrong_shapes_are_named(engine, half, model, shape, lengths, message):
    given, state = half
    with pytest.raises(ValueError, match=message):
        check_append(
            state, given, np.zeros(shape, int), np.zeros(lengths, int), vocab_size=VOCAB, sampling=engine.sampling
        )


def test_rows_that_do_not_pause_take_nothing(engine, half, model):
    given, state = half
    plain = sampling_of(observation_columns=None)
    state = state._replace(results=state.results._replace(turns=None))
    tokens, lengths = jnp.zeros((4, WIDTH), jnp.int32), jnp.ones((4,), jnp.int32)
    with pytest.raises(ValueError, match="append: observation_columns is not set"):
        append(engine.weights, given, state, tokens, lengths, model=model, sampling=plain)
    with pytest.raises(ValueError, match="observation_columns=0: must be at least 1"):
        sampling_of(observation_columns=0)
