"""The sampler: its log-probs are the scorer's, a row depends on its prompt and key only, and rows end where they should.

Two models: the tiny decoder, for numerics; and a chain, whose next-token logits are a table of the last token, so that
what must be sampled is known beforehand.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import EOS, requests, same

from jaxrl_lm.generate import generate, prepare_decode
from jaxrl_lm.models import Model, ModelConfig, build, positions
from jaxrl_lm.models import decode as decoding
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score

ROWS, PROMPT, NEW = 8, 6, 10
LENGTHS = np.array([6, 1, 3, 5, 2, 6, 4, 1])  # of the prompts, left-padded
TOKENS = np.random.default_rng(0).integers(10, 48, (ROWS, PROMPT)).astype(np.int32)
SEGMENTS = (np.arange(PROMPT) >= PROMPT - LENGTHS[:, None]).astype(np.int32)
MIXED = np.array([1.0, 0.5, 2.0, 0.0, 1.3, 0.6, 1.0, 0.8], np.float32)

# --- the tiny decoder -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_config):
    return build(tiny_config)


@pytest.fixture(scope="module")
def sample(model, weights):
    """The one compiled sampler of this section; the last test counts."""
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=EOS, pad_token_id=0)
    compiled = jax.jit(functools.partial(generate, model=model, sampling=sampling))
    call = lambda request: compiled(weights, request)
    call.compiled = compiled
    return call


@pytest.fixture(scope="module")
def rescore(model, params):
    compiled = jax.jit(
        lambda tokens, segments, temperature: score(params, tokens, segments, model=model, temperature=temperature)
    )
    return lambda rollout, temperature: compiled(rollout.tokens, rollout.segment_ids, jnp.asarray(temperature))


@pytest.fixture(scope="module")
def mixed(sample):
    return sample(requests(TOKENS, SEGMENTS, temperature=MIXED))


@pytest.mark.parametrize("seed", range(3))
def test_the_samplers_logprobs_are_the_scorers(sample, rescore, seed):
    temperature = np.roll(MIXED, seed)
    rollout = sample(requests(TOKENS, SEGMENTS, seed=seed, temperature=temperature))
    scores = rescore(rollout, temperature)
    mask = np.asarray(rollout.action_mask)
    assert mask.sum() > 40
    np.testing.assert_allclose(np.asarray(rollout.logprobs)[mask], np.asarray(scores.logprobs)[mask], atol=1e-5)
    assert (np.asarray(rollout.logprobs)[~mask] == 0).all()
    assert rollout.behaviour_logprobs is None


def test_bfloat16_logprobs_are_the_scorers_within_a_bound(tiny_config, params):
    """The bound: 0.05 nats on average, 0.5 at most, on weights fifteen times the usual size."""
    half = build(dataclasses.replace(tiny_config, dtype="bfloat16"))
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=EOS, pad_token_id=0)
    weights = prepare_decode(params, model=half)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    rollout = jax.jit(functools.partial(generate, model=half, sampling=sampling))(weights, requests(TOKENS, SEGMENTS))
    scores = jax.jit(functools.partial(score, model=half))(params, rollout.tokens, rollout.segment_ids)
    assert rollout.logprobs.dtype == jnp.float32
    gap = np.abs(np.asarray(rollout.logprobs) - np.asarray(scores.logprobs))[np.asarray(rollout.action_mask)]
    assert gap.mean() < 0.05
    assert gap.max() < 0.5


def test_greedy_is_the_argmax_of_the_full_forward_step_by_step(model, params, sample):
    rollout = sample(requests(TOKENS, SEGMENTS, temperature=0.0))

    @jax.jit
    def logits(tokens, segments):
        return model.unembed(params, model.hidden(params, tokens, positions(segments), segments))

    tokens = np.pad(TOKENS, ((0, 0), (0, NEW)))
    segments = np.pad(SEGMENTS, ((0, 0), (0, NEW)))
    active = np.ones(ROWS, bool)
    for column in range(PROMPT, PROMPT + NEW):
        best = np.asarray(logits(tokens, segments))[:, column - 1].argmax(-1)
        tokens[:, column] = np.where(active, best, 0)
        segments[:, column] = active
        active = active & ~np.isin(tokens[:, column], EOS)
    np.testing.assert_array_equal(rollout.tokens, tokens)
    np.testing.assert_array_equal(rollout.segment_ids, segments)
    np.testing.assert_array_equal(rollout.truncated, active)


def test_a_row_moved_to_another_place_is_the_same_bit_for_bit(sample, mixed):
    keys = jax.random.split(jax.random.key(0), ROWS)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(ROWS)
        moved = requests(TOKENS[order], SEGMENTS[order], keys=jax.random.clone(keys)[order], temperature=MIXED[order])
        same(mixed, sample(moved), rows_of_a=order)


def test_a_row_does_not_see_its_neighbours(sample, mixed):
    kept = [1, 4, 6]
    others = np.setdiff1d(np.arange(ROWS), kept)
    tokens, segments, temperature = TOKENS.copy(), SEGMENTS.copy(), MIXED.copy()
    tokens[others] = np.roll(TOKENS[others], 2, axis=1)[::-1] // 2 + 1
    segments[others] = SEGMENTS[others][::-1]
    temperature[others] = 3.0
    limits = np.full(ROWS, NEW)
    limits[others] = [0, 1, 2, 3, 10]
    changed = sample(requests(tokens, segments, temperature=temperature, max_new=limits))
    for name, before, after in zip(mixed._fields, mixed, changed, strict=True):
        if before is not None:
            np.testing.assert_array_equal(np.asarray(after)[kept], np.asarray(before)[kept], err_msg=name)
    assert not np.array_equal(np.asarray(changed.tokens)[others], np.asarray(mixed.tokens)[others])


def test_another_key_is_another_sample(sample, mixed):
    other = sample(requests(TOKENS, SEGMENTS, seed=1, temperature=MIXED))
    differ = (np.asarray(other.tokens) != np.asarray(mixed.tokens)).any(1)
    np.testing.assert_array_equal(differ[MIXED == 0], [False])  # argmax needs no key
    assert differ[MIXED >= 0.5].all()


def test_prompts_shared_by_a_group_and_other_widths_give_the_same_rows(model, weights, sample):
    """4 prompts × 2 samples against 8 prompts, and 4 rows alone: other widths, so equal within rounding."""
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=EOS, pad_token_id=0)
    keys = jax.random.split(jax.random.key(11), ROWS)
    twice = np.repeat(np.arange(4), 2)
    wide = sample(requests(TOKENS[twice], SEGMENTS[twice], keys=keys))
    run = jax.jit(functools.partial(generate, model=model, sampling=sampling))
    grouped = run(weights, requests(TOKENS[:4], SEGMENTS[:4], keys=jax.random.clone(keys)))
    narrow = run(weights, requests(TOKENS[twice[:4]], SEGMENTS[twice[:4]], keys=jax.random.clone(keys)[:4]))
    assert not np.array_equal(wide.tokens[0], wide.tokens[1])  # a group's rows differ by their keys
    for other, rows in ((grouped, slice(None)), (narrow, slice(0, 4))):
        np.testing.assert_array_equal(other.tokens, wide.tokens[rows])
        np.testing.assert_array_equal(other.action_mask, wide.action_mask[rows])
        np.testing.assert_allclose(other.logprobs, wide.logprobs[rows], atol=1e-4)


def test_values_of_arrays_compile_nothing(sample, mixed):
    before = sample.compiled._cache_size()
    assert before == 1  # all the tests above
    for seed, (limit, temperature, step) in enumerate([(0, 0.0, 0), (NEW, 1.7, 1), (3, 1e-3, 10**6)]):
        sample(requests(TOKENS, SEGMENTS, seed=seed, max_new=limit, temperature=temperature, step=step))
    assert sample.compiled._cache_size() == before


def test_rows_that_are_no_multiple_of_the_prompts_are_refused(model, weights):
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=EOS, pad_token_id=0)
    request = requests(TOKENS[:3], SEGMENTS[:3], keys=jax.random.split(jax.random.key(0), 8))
    with pytest.raises(ValueError, match="8 rows are not a multiple of 3 prompts"):
        generate(weights, request, model=model, sampling=sampling)


# --- a chain: the logits of the next token are a table of the last one --------------------------------------------------

CHAIN_NEW = 7
STATES = 16


class Chain:
    """A decoder whose attention and feed-forward add nothing and whose embeddings are unit vectors."""

    def __init__(self, table):
        config = ModelConfig(
            vocab_size=STATES,
            hidden_size=STATES,
            intermediate_size=4,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            rms_norm_eps=0.0,
        )
        self.model = Model(config)
        zeros = lambda spec: np.zeros(spec.shape, np.float32)
        params = jax.tree.map(zeros, self.model.specs, is_leaf=lambda leaf: hasattr(leaf, "axes"))
        params["embed"]["table"] = np.eye(STATES, dtype=np.float32)
        params["final_norm"]["scale"] = np.ones(STATES, np.float32)
        # The norm of a unit vector of 16 numbers is 4 at its place.
        params["lm_head"]["table"] = np.asarray(table, np.float32).T / 4
        self.params = prepare_decode(params, model=self.model)

    def sampler(self, new=CHAIN_NEW, eos=(), pad=0, **truncation):
        sampling = SamplingConfig(max_new_tokens=new, eos_token_ids=eos, pad_token_id=pad, **truncation)
        compiled = jax.jit(functools.partial(generate, model=self.model, sampling=sampling))
        return lambda request, stops=None: compiled(self.params, request, stops)


def always(successor):
    """A table that makes argmax follow successor: token -> token."""
    table = np.zeros((STATES, STATES))
    for token in range(STATES):
        table[token, successor.get(token, token)] = 9.0
    return table


# 1 -> 2 -> … -> 7 -> 3, 8 <-> 9, 10 -> 3, 11 -> 12 -> 14 -> 14, 15 -> 1
PATHS = always({1: 2, 2: 4, 4: 5, 5: 6, 6: 7, 7: 3, 8: 9, 9: 8, 10: 3, 11: 12, 12: 14, 15: 1})


def greedy(sampler, prompts, stops=None, **options):
    """Rollout of greedy rows with these prompts, left-padded with 0 to two columns."""
    tokens = np.array([[0] * (2 - len(prompt)) + list(prompt) for prompt in prompts], np.int32)
    segments = np.array([[0] * (2 - len(prompt)) + [1] * len(prompt) for prompt in prompts], np.int32)
    return sampler(requests(tokens, segments, temperature=0.0, **options), stops)


def completions(rollout):
    """The tokens under each row's action_mask."""
    return [
        row[mask].tolist()
        for row, mask in zip(np.asarray(rollout.tokens), np.asarray(rollout.action_mask), strict=True)
    ]


@pytest.fixture(scope="module")
def paths():
    return Chain(PATHS)


@pytest.fixture(scope="module")
def ends_at_3_or_14(paths):
    """Two eos ids, one of which is the padding's id too."""
    return paths.sampler(eos=(3, 14), pad=3)


def test_every_way_to_end(ends_at_3_or_14):
    cases = [
        ([1], [2, 4, 5, 6, 7, 3], False),  # by an eos; it is the policy's own choice
        ([11], [12, 14], False),  # by the other eos
        ([10], [3], False),  # eos as first token
        # An eos, here the padding id too, inside the prompt ends nothing; without an eos the limit does.
        ([3, 8], [9, 8, 9, 8, 9, 8, 9], True),
        ([3, 3], [3], False),  # prompt of eos tokens only, and the chain stays there
        ([2, 6], [7, 3], False),
    ]
    rollout = greedy(ends_at_3_or_14, [prompt for prompt, _, _ in cases])
    assert completions(rollout) == [tokens for _, tokens, _ in cases]
    np.testing.assert_array_equal(rollout.truncated, [truncated for _, _, truncated in cases])
    # After its end a row holds the padding id, nowhere under the mask, and is padding to the model.
    mask = np.asarray(rollout.action_mask)
    assert not mask[:, :2].any()
    assert (np.asarray(rollout.tokens)[:, 2:][~mask[:, 2:]] == 3).all()
    np.testing.assert_array_equal(rollout.segment_ids[:, 2:], mask[:, 2:])
    np.testing.assert_array_equal(rollout.segment_ids[:, :2], [[0, 1], [0, 1], [0, 1], [1, 1], [1, 1], [1, 1]])
    np.testing.assert_array_equal(rollout.turn_ids, mask)
    np.testing.assert_array_equal(rollout.policy_step, np.where(mask, 7, 0))
    assert rollout.turn_ids.dtype == rollout.policy_step.dtype == jnp.int32
    assert (np.asarray(rollout.logprobs)[~mask] == 0).all()
    np.testing.assert_allclose(np.asarray(rollout.logprobs)[mask], -np.log1p(15 * np.exp(-9)), atol=1e-6)


def test_each_row_has_its_own_limit(ends_at_3_or_14):
    limits = [0, 1, 3, CHAIN_NEW, 100, 6]
    rollout = greedy(ends_at_3_or_14, [[8], [8], [8], [8], [8], [1]], max_new=limits)
    assert [len(tokens) for tokens in completions(rollout)] == [0, 1, 3, CHAIN_NEW, CHAIN_NEW, 6]
    # A row that asked for nothing ran into no limit; one whose eos is its last allowed token ended by itself.
    np.testing.assert_array_equal(rollout.truncated, [False, True, True, True, True, False])


def test_a_batch_that_asks_for_nothing(ends_at_3_or_14):
    rollout = greedy(ends_at_3_or_14, [[1]] * 6, max_new=0)
    assert not np.asarray(rollout.action_mask).any()
    assert not np.asarray(rollout.truncated).any()
    np.testing.assert_array_equal(rollout.tokens[:, 2:], np.full((6, CHAIN_NEW), 3))
    assert (np.asarray(rollout.logprobs) == 0).all()


def test_without_an_eos_id_every_row_runs_into_its_limit(paths):
    rollout = greedy(paths.sampler(), [[1], [10]])
    assert completions(rollout) == [[2, 4, 5, 6, 7, 3, 3], [3] * CHAIN_NEW]
    np.testing.assert_array_equal(rollout.truncated, [True, True])


def stop_rows(pieces, stops):
    """The table for a vocabulary of these texts, from the library's own automaton."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from jaxrl_lm.stops import stop_table

    backend = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="?"))
    return jnp.asarray(stop_table(stops, PreTrainedTokenizerFast(tokenizer_object=backend), len(pieces)))


def test_a_stop_string_ends_a_row_and_its_tokens_are_the_policys_own(paths):
    pieces = [
        "?",
        "1",
        "<a",
        "3",
        "nsw",
        "er> ",
        "6</",
        "answer>7",
        "the </an",
        "swer>",
        "10",
        "END",
        "END END",
        "13",
        "14",
        "15",
    ]
    table = stop_rows(pieces, ("</answer>", "END END"))
    rollout = greedy(
        paths.sampler(),
        [
            [2],  # nsw, er>, "6</", "answer>7": begins and ends in the middle of tokens
            [9],  # "the </an", "swer>": spans two
            [8],  # begins inside the prompt: what the prompt holds does not count, so it ends only one round later
            [11],  # one token holds it whole
            [10],  # none: 3 3 3 …
        ],
        stops=table,
    )
    assert completions(rollout) == [[4, 5, 6, 7], [8, 9], [9, 8, 9], [12], [3] * CHAIN_NEW]
    np.testing.assert_array_equal(rollout.truncated, [False, False, False, False, True])


@pytest.mark.parametrize("longest", [1, 4])
def test_the_loop_stops_when_every_row_has_ended(longest, monkeypatch):
    """By what goes through the layers: the prompts once, then a token a row in every pass."""
    passes = []
    real = decoding._run

    def counting(params, tokens, *rest):
        jax.debug.callback(lambda: passes.append(tokens.shape[1]))
        return real(params, tokens, *rest)

    monkeypatch.setattr(decoding, "_run", counting)
    sampler = Chain(PATHS).sampler(new=500, eos=(3, 14))
    prompts = {1: [[10], [12]], 4: [[10], [5], [11], [4]]}[longest]
    rollout = jax.block_until_ready(greedy(sampler, prompts))
    jax.effects_barrier()
    assert max(map(len, completions(rollout))) == longest
    assert sorted(passes, reverse=True) == [2] + [1] * longest


# --- truncated distributions ------------------------------------------------------------------------------------------

TRUNCATIONS = [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.25}, {"top_k": 6, "top_p": 0.85, "min_p": 0.1}]


def allowed_tokens(row, top_k=None, top_p=None, min_p=None):
    """The kept tokens of logits without ties, best first."""
    kept = sorted(range(len(row)), key=lambda token: -row[token])[:top_k]
    share = lambda: np.exp(row[kept]) / np.exp(row[kept]).sum()
    if top_p is not None:
        before = np.cumsum(share()) - share()
        kept = [token for token, mass in zip(kept, before, strict=True) if mass < top_p]
    if min_p is not None:
        kept = [token for token, part in zip(kept, share(), strict=True) if part >= min_p * share().max()]
    return kept


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_truncated_samples_stay_inside_and_behaviour_logprobs_are_renormalised(truncation):
    rows = 64
    table = np.random.default_rng(3).normal(size=(STATES, STATES)).astype(np.float32) * 1.5
    temperature = np.tile([0.7, 1.0, 1.6, 0.0], rows // 4).astype(np.float32)
    start = np.arange(rows)[:, None] % STATES
    rollout = Chain(table).sampler(**truncation)(requests(start, np.ones_like(start), temperature=temperature))
    tokens, logprobs, behaviour = map(np.asarray, (rollout.tokens, rollout.logprobs, rollout.behaviour_logprobs))
    used, left_out = set(), 0
    for n, t in np.ndindex(rows, CHAIN_NEW):
        heat = temperature[n] or 1.0
        logits = np.float64(table[tokens[n, t]]) / heat
        kept = allowed_tokens(logits, **truncation)
        token = tokens[n, t + 1]
        if temperature[n] == 0:
            assert token == logits.argmax()
            expected = 0.0  # nothing else could be drawn
        else:
            assert token in kept
            expected = logits[token] - np.log(np.exp(logits[kept]).sum())
            used.add((tokens[n, t], token))
            left_out += STATES - len(kept)
        assert behaviour[n, t + 1] == pytest.approx(expected, abs=1e-5)
        whole = logits[token] - np.log(np.exp(logits).sum())
        assert logprobs[n, t + 1] == pytest.approx(whole, abs=1e-5)
    assert (behaviour[:, 0] == 0).all()
    assert left_out > 0
    assert len(used) > STATES  # several choices at most states
