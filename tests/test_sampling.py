"""Drawing a token: the distribution of the two-stage draw, truncation against numpy and transformers, greedy rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jaxrl_lm.sampling import BLOCK, categorical, draw, truncate
from jaxrl_lm.sampling_config import SamplingConfig

DRAWS = 20_000


def sampling(**options):
    return SamplingConfig(max_new_tokens=1, eos_token_ids=(), pad_token_id=0, **options)


def softmax(logits):
    weight = np.exp(np.float64(logits) - np.max(logits, axis=-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def counts(logits, seed, draws=DRAWS):
    """How often each token is drawn from one row of logits."""
    keys = jax.random.split(jax.random.key(seed), draws)
    tokens, _, _ = jax.jit(categorical)(jnp.broadcast_to(jnp.float32(logits), (draws, len(logits))), keys)
    return np.bincount(tokens, minlength=len(logits))


# --- the draw ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 48, BLOCK, BLOCK + 1, 300])
def test_frequencies_are_those_of_the_softmax(size):
    logits = np.random.default_rng(size).normal(size=size) * 1.5
    expected = softmax(logits) * DRAWS
    seen = counts(logits, seed=size)
    chi_square = ((seen - expected) ** 2 / expected).sum()
    freedom = size - 1
    # A wrong weight of one block or token moves the statistic by far more than six of its standard deviations.
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom), (chi_square, freedom)


def test_the_chi_square_bound_notices_a_wrong_distribution():
    logits = np.random.default_rng(300).normal(size=300) * 1.5
    expected = softmax(logits * 0.85) * DRAWS
    chi_square = ((counts(logits, seed=300) - expected) ** 2 / expected).sum()
    assert chi_square > 299 + 6 * np.sqrt(2 * 299)


def test_tokens_of_no_weight_are_never_drawn():
    logits = np.random.default_rng(0).normal(size=300)
    logits[:BLOCK] = -np.inf  # a whole block
    logits[BLOCK::3] = -np.inf
    seen = counts(logits, seed=1)
    assert (seen[np.isneginf(logits)] == 0).all()
    assert (seen[~np.isneginf(logits)] > 0).all()


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 299])
def test_a_single_possible_token_is_always_drawn(place):
    logits = np.full(300, -np.inf)
    logits[place] = -5.0
    assert counts(logits, seed=2, draws=64)[place] == 64


def test_logits_far_apart_neither_overflow_nor_lose_the_best():
    logits = np.full(260, -1e30)
    logits[[7, 200]] = 3e4  # two equal ones in different blocks
    seen = counts(logits, seed=3, draws=2000)
    assert seen[7] + seen[200] == 2000
    assert abs(seen[7] - 1000) < 6 * np.sqrt(500)


def test_a_draw_depends_on_its_row_and_key_only():
    rng = np.random.default_rng(4)
    logits = jnp.float32(rng.normal(size=(16, 200)))
    keys = jax.random.split(jax.random.key(4), 16)
    order = rng.permutation(16)
    one_draw = jax.jit(lambda logits, keys: categorical(logits, keys)[0])
    tokens = np.asarray(one_draw(logits, keys))
    _, chosen, total = categorical(logits, jax.random.clone(keys))
    np.testing.assert_array_equal(chosen, np.asarray(logits)[np.arange(16), tokens])
    exact = np.log(np.exp(np.asarray(logits, np.float64)).sum(1))
    np.testing.assert_allclose(total, exact, rtol=1e-6)
    np.testing.assert_array_equal(tokens[order], one_draw(logits[order], jax.random.clone(keys)[order]))
    same_logits = np.asarray(one_draw(jnp.broadcast_to(logits[:1], logits.shape), jax.random.clone(keys)))
    assert len(set(same_logits.tolist())) > 4


# --- truncation -------------------------------------------------------------------------------------------------------

OPTIONS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 60},
    {"top_k": 1000},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
]


def plain_truncate(row, top_k=None, top_p=None, min_p=None):
    """The kept tokens of one row, by loops over a sorted list; no ties."""
    kept = sorted(range(len(row)), key=lambda token: -row[token])
    if top_k is not None:
        kept = kept[:top_k]
    if top_p is not None:
        probs = softmax(row[kept])
        kept = [token for place, token in enumerate(kept) if probs[:place].sum() < top_p]
    if min_p is not None:
        probs = softmax(row[kept])
        kept = [token for token, prob in zip(kept, probs, strict=True) if prob >= min_p * probs.max()]
    return set(kept)


def transformers_truncate(logits, top_k=None, top_p=None, min_p=None):
    warpers = [
        TopKLogitsWarper(min(top_k, logits.shape[1])) if top_k else None,
        TopPLogitsWarper(top_p) if top_p else None,
        MinPLogitsWarper(min_p) if min_p else None,
    ]
    scores = torch.tensor(logits)
    for warper in filter(None, warpers):
        scores = warper(None, scores)
    return scores.numpy()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_truncation_keeps_what_numpy_and_transformers_keep(options):
    logits = (np.random.default_rng(5).normal(size=(12, 60)) * 2).astype(np.float32)
    ours = np.asarray(truncate(jnp.asarray(logits), sampling(**options)))
    for row, kept in zip(logits, ours, strict=True):
        assert set(np.flatnonzero(~np.isneginf(kept))) == plain_truncate(row, **options)
    np.testing.assert_array_equal(ours, transformers_truncate(logits, **options))
    if options != {"top_k": 1000} and options != {"top_k": 60}:
        assert np.isneginf(ours).any()


def test_tokens_already_excluded_stay_excluded_and_count_for_nothing():
    logits = np.array([[-np.inf, 0.0, 1.0, -np.inf, 0.5]], np.float32)
    kept = np.asarray(truncate(jnp.asarray(logits), sampling(top_k=4, top_p=0.99, min_p=1e-3)))
    np.testing.assert_array_equal(kept, logits)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 1.0}], ids=str)
def test_ties_at_the_threshold_stay_together(options):
    logits = jnp.log(jnp.array([[0.1, 0.3, 0.3, 0.3]], jnp.float32))
    kept = np.asarray(truncate(logits, sampling(**options)))
    np.testing.assert_array_equal(np.isneginf(kept), [[True, False, False, False]])


def test_a_top_p_of_one_keeps_everything():
    # In float32 the two best already sum to 1; what comes after them is unlikely, not forbidden.
    logits = jnp.array([[30.0, 29.0, 0.0, -5.0]], jnp.float32)
    np.testing.assert_array_equal(truncate(logits, sampling(top_p=1.0)), logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k=0: must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0: must be in"),
        ({"top_p": 1.5}, "top_p=1.5: must be in"),
        ({"min_p": -0.1}, "min_p=-0.1: must be in"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: at least one"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**{"max_new_tokens": 1, "eos_token_ids": (), "pad_token_id": 0} | options)


# --- a token with its log-probs ---------------------------------------------------------------------------------------


def drawn(logits, temperature, options, seed=6):
    keys = jax.random.split(jax.random.key(seed), len(logits))
    return jax.jit(draw, static_argnums=3)(jnp.float32(logits), keys, jnp.float32(temperature), sampling(**options))


def test_logprobs_are_those_of_the_whole_vocabulary_at_the_rows_temperature():
    logits = np.random.default_rng(7).normal(size=(40, 50)) * 2
    temperature = np.tile([0.5, 1.0, 2.0, 0.1], 10)
    token, logprob, behaviour = drawn(logits, temperature, {})
    expected = np.log(softmax(logits / temperature[:, None]))[np.arange(40), token]
    np.testing.assert_allclose(logprob, expected, atol=2e-5)
    np.testing.assert_array_equal(logprob, behaviour)


def test_behaviour_logprobs_are_those_of_the_truncated_distribution():
    options = {"top_k": 8, "top_p": 0.9, "min_p": 0.02}
    logits = np.random.default_rng(8).normal(size=(200, 50)) * 2
    temperature = np.tile([0.5, 1.0, 2.0, 1.5], 50)
    scaled = logits / temperature[:, None]
    token, logprob, behaviour = drawn(logits, temperature, options)
    for n, row in enumerate(scaled):
        kept = plain_truncate(row, **options)
        assert int(token[n]) in kept
        expected = row[token[n]] - np.log(np.exp(row[sorted(kept)]).sum())
        assert behaviour[n] == pytest.approx(expected, abs=2e-5)
        assert logprob[n] == pytest.approx(np.log(softmax(row))[token[n]], abs=2e-5)


@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_p": 0.3}], ids=str)
def test_temperature_zero_is_argmax_with_logprobs_at_temperature_one(options):
    logits = np.random.default_rng(9).normal(size=(6, 50)) * 2
    token, logprob, behaviour = drawn(logits, np.zeros(6), options)
    np.testing.assert_array_equal(token, logits.argmax(1))
    np.testing.assert_allclose(logprob, np.log(softmax(logits)).max(1), atol=2e-5)
    np.testing.assert_array_equal(behaviour, np.zeros(6) if options else logprob)
