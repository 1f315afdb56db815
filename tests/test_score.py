"""Log-probs and entropy against a plain softmax in float64, whatever the chunks; the logits never exist at once."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_lm.models import Model, build, positions
from jaxrl_lm.rows import score_rows
from jaxrl_lm.score import score, token_scores

SEGMENTS = np.array(
    [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    np.int32,
)
ROWS, COLUMNS = SEGMENTS.shape
VOCABULARY = 48
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, SEGMENTS.shape).astype(np.int32)
TEMPERATURE = np.array([1.0, 0.5, 2.0, 0.0, 1.3, 1.0], np.float32)
CHUNKS = [1, 19, 2048]  # one column at a time; 3, which does not divide 10; all
RNG = np.random.default_rng(1)
LOGPROB_PULL, ENTROPY_PULL = RNG.normal(size=(2, ROWS, COLUMNS)).astype(np.float32)


@pytest.fixture(scope="module")
def model(tiny_config):
    return build(tiny_config)


class HeadOnly(Model):
    """The tiny model without its layers: compiles fast, and what score() adds to a model is all there."""

    def hidden(self, params, tokens, positions, segment_ids):
        return params["embed"]["table"][tokens]


@pytest.fixture(scope="module")
def head(tiny_config):
    return HeadOnly(tiny_config)


def loss(params, model, chunk, start=1):
    scores = score(
        params,
        jnp.asarray(TOKENS),
        jnp.asarray(SEGMENTS),
        model=model,
        temperature=jnp.asarray(TEMPERATURE),
        chunk=chunk,
        start=start,
    )
    return jnp.sum(LOGPROB_PULL * scores.logprobs + ENTROPY_PULL * scores.entropy), scores


@pytest.fixture(scope="module")
def by_chunk(head, params):
    """chunk -> (scores, gradient of a random linear function of them)."""
    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=(1, 2))
    return {chunk: run(params, head, chunk)[::-1] for chunk in CHUNKS}


@pytest.fixture(scope="module")
def whole_model_scores(model, params):
    return jax.jit(loss, static_argnums=(1, 2))(params, model, 19)[1]


def plain_scores(logits, tokens, segments, temperature, start=1):
    """What score() says it gives, by loops in float64."""
    logprobs, entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for n, t in np.ndindex(*tokens.shape):
        if t < max(start, 1) or segments[n, t] == 0 or segments[n, t] != segments[n, t - 1]:
            continue
        row = np.float64(logits[n, t - 1]) / (temperature[n] if temperature[n] > 0 else 1.0)
        row = row - row.max() - np.log(np.exp(row - row.max()).sum())
        logprobs[n, t] = row[tokens[n, t]]
        entropy[n, t] = -(np.exp(row) * row).sum()
    return logprobs, entropy


def expected_from(model, params):
    @jax.jit
    def logits(tokens, segments):
        return model.unembed(params, model.hidden(params, tokens, positions(segments), segments))

    return plain_scores(np.asarray(logits(TOKENS, SEGMENTS)), TOKENS, SEGMENTS, TEMPERATURE)


@pytest.fixture(scope="module")
def expected(model, params):
    return expected_from(model, params)


def test_scores_are_those_of_a_plain_softmax_one_column_before(whole_model_scores, expected):
    assert whole_model_scores.logprobs.dtype == whole_model_scores.entropy.dtype == jnp.float32
    np.testing.assert_allclose(whole_model_scores.logprobs, expected[0], atol=1e-5)
    np.testing.assert_allclose(whole_model_scores.entropy, expected[1], atol=1e-5)


def test_first_tokens_and_padding_hold_zero(whole_model_scores):
    first = np.pad(SEGMENTS[:, :-1], ((0, 0), (1, 0))) != SEGMENTS
    empty = first | (SEGMENTS == 0)
    for values in map(np.asarray, whole_model_scores):
        assert (values[empty] == 0).all()
        assert (values[~empty] != 0).all()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_chunk_gives_the_plain_softmax(by_chunk, head, params, chunk):
    for ours, plain in zip(by_chunk[chunk][0], expected_from(head, params), strict=True):
        np.testing.assert_allclose(ours, plain, atol=5e-6)


@pytest.mark.parametrize("chunk", CHUNKS[:-1])
def test_chunks_change_neither_values_nor_gradients(by_chunk, chunk):
    (ours, our_gradient), (whole, gradient) = by_chunk[chunk], by_chunk[CHUNKS[-1]]
    for a, b in zip(ours, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    for a, b in zip(jax.tree.leaves(our_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_the_gradient_is_that_of_the_unchunked_formula(by_chunk, head, params):
    segments = jnp.asarray(SEGMENTS)
    real = np.pad((SEGMENTS[:, 1:] > 0) & (SEGMENTS[:, 1:] == SEGMENTS[:, :-1]), ((0, 0), (1, 0)))

    @jax.jit
    @jax.grad
    def plain(params):
        hidden = head.hidden(params, jnp.asarray(TOKENS), positions(segments), segments)
        logits = head.unembed(params, hidden) / np.where(TEMPERATURE > 0, TEMPERATURE, 1)[:, None, None]
        logprobs = jnp.roll(jax.nn.log_softmax(logits), 1, axis=1)
        chosen = jnp.take_along_axis(logprobs, TOKENS[..., None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return jnp.sum(jnp.where(real, LOGPROB_PULL * chosen + ENTROPY_PULL * entropy, 0.0))

    for a, b in zip(jax.tree.leaves(by_chunk[1][1]), jax.tree.leaves(plain(params)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("start", [4, COLUMNS - 1])
def test_columns_before_start_hold_zero_and_the_others_are_unchanged(by_chunk, head, params, start):
    _, scores = jax.jit(loss, static_argnums=(1, 2, 3))(params, head, 12, start)
    for values, whole in zip(map(np.asarray, scores), map(np.asarray, by_chunk[2048][0]), strict=True):
        assert (values[:, :start] == 0).all()
        np.testing.assert_allclose(values[:, start:], whole[:, start:], atol=2e-6)


@pytest.mark.parametrize("start", [0, -1, COLUMNS])
def test_a_start_outside_the_row_is_refused(model, params, start):
    with pytest.raises(ValueError, match=rf"start={start} is outside \[1, {COLUMNS}\)"):
        loss(params, model, 8, start)


def test_rows_scored_a_few_at_a_time_are_the_same_rows(by_chunk, head, params):
    run = jax.jit(
        lambda params, *arrays: score_rows(params, None, *arrays, 1, model=head, lora=None, chunk=2048, size=2)
    )
    scores = run(params, jnp.asarray(TOKENS), jnp.asarray(SEGMENTS), jnp.asarray(TEMPERATURE))
    for values, whole in zip(scores, by_chunk[2048][0], strict=True):
        np.testing.assert_allclose(values, whole, atol=2e-6)


# --- memory -----------------------------------------------------------------------------------------------------------


def array_sizes(jaxpr):
    """The number of elements of each intermediate, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars if hasattr(variable.aval, "size"))
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from array_sizes(inner)


def test_the_logits_of_the_batch_never_exist(tiny_config):
    """Nor their softmax for the backward pass: the largest array with the vocabulary as its axis is one chunk's."""
    vocabulary = 4096  # more than everything else in the model together
    model = build(dataclasses.replace(tiny_config, vocab_size=vocabulary, num_layers=1))
    params = jax.eval_shape(model.init, jax.random.key(0))
    weights = vocabulary * tiny_config.hidden_size
    columns = 64
    tokens = jnp.zeros((ROWS, columns), jnp.int32)

    def largest(chunk):
        def total(params):
            scores = score(params, tokens, jnp.ones_like(tokens), model=model, chunk=chunk)
            return jnp.sum(scores.logprobs + scores.entropy)

        return max(array_sizes(jax.make_jaxpr(jax.grad(total))(params).jaxpr))

    assert largest(chunk=ROWS * 2) == weights  # a gradient; logits of two columns are smaller
    assert largest(chunk=ROWS * 16) == ROWS * 16 * vocabulary
    assert largest(chunk=10**6) == ROWS * (columns - 1) * vocabulary  # so this test can fail


# --- the formula ------------------------------------------------------------------------------------------------------


def test_equal_logits_have_the_entropy_of_the_uniform_distribution():
    logits = jnp.full((1, 2, 7), 3.0)
    scores = token_scores(logits, jnp.array([[0, 6]], jnp.int32), jnp.ones(1))
    np.testing.assert_allclose(scores.logprobs, [[-math.log(7)] * 2], rtol=1e-6)
    np.testing.assert_allclose(scores.entropy, [[math.log(7)] * 2], rtol=1e-6)


def test_extreme_logits_stay_finite():
    logits = jnp.array([[[1e4, -1e4, 0.0], [-np.inf, 0.0, 0.0]]], jnp.float32)
    scores = token_scores(logits, jnp.array([[1, 2]], jnp.int32), jnp.ones(1))
    np.testing.assert_allclose(scores.logprobs, [[-2e4, -math.log(2)]], rtol=1e-6)
    np.testing.assert_allclose(scores.entropy, [[0.0, math.log(2)]], rtol=1e-6, atol=1e-30)


def test_one_temperature_for_all_rows_is_the_same_as_an_array_of_it(head, params):
    call = lambda temperature: score(
        params, jnp.asarray(TOKENS), jnp.asarray(SEGMENTS), model=head, temperature=temperature
    )
    array = jnp.full(ROWS, 0.7, jnp.float32)
    for one, each in zip(jax.jit(call, static_argnums=0)(0.7), jax.jit(call)(array), strict=True):
        np.testing.assert_allclose(one, each, atol=1e-6)


def test_bfloat16_scores_lie_near_the_float32_ones(tiny_config, params, expected):
    """The bound: 0.05 nats on average and 0.4 at most, for this model, whose weights are fifteen times the usual size."""
    half = build(dataclasses.replace(tiny_config, dtype="bfloat16"))
    _, scores = jax.jit(loss, static_argnums=(1, 2))(params, half, 2048)
    assert scores.logprobs.dtype == jnp.float32
    real = expected[0] != 0
    for values, exact in zip(scores, expected, strict=True):
        error = np.abs(np.asarray(values) - exact)[real]
        assert error.max() > 1e-3  # it really computed in bfloat16
        assert error.mean() < 0.05
        assert error.max() < 0.4
