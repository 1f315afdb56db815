"""Reward, outcome and process losses, step labels and shaping: exact values, loops, enumeration, poison under masks."""

import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_rewards as loops
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm import metrics
from jaxrl_lm.algos import reward_losses as rm
from jaxrl_lm.algos import step_labels as steps
from jaxrl_lm.algos.process import completion_credit
from jaxrl_lm.algos.reduction import token_weights
from jaxrl_lm.algos.returns import returns_to_go

SHAPE = (4, 7)
POISON = (math.nan, math.inf, -math.inf, -100.0)
KINDS = {"soft": None, "hard": None, "log-mean-exp": 0.3}
HOWS = ("mean", "min", "pessimistic")
LN2 = 0.693147180559945


labels_of = jax.jit(steps.monte_carlo_labels, static_argnames=("kind", "beta"))
calibration = jax.jit(rm.calibration, static_argnames="bins")
calibration_error = jax.jit(rm.calibration_error)
moments, merge_moments, correlation = map(jax.jit, (rm.moments, rm.merge_moments, rm.correlation))
length_reward_moments = jax.jit(rm.length_reward_moments)
ensemble_reward = jax.jit(rm.ensemble_reward, static_argnames=("how", "k"))

reward_model_loss = jax.jit(rm.reward_model_loss, static_argnames=("center", "label_smoothing"))
reward_model_metrics, label_metrics, process_loss = map(
    jax.jit, (rm.reward_model_metrics, rm.label_metrics, rm.process_loss)
)
outcome_loss = jax.jit(rm.outcome_loss, static_argnames="per_token")
weights_of = jax.jit(token_weights, static_argnames="over")
pair_calibration = jax.jit(rm.pair_calibration)
potential_shaping = jax.jit(steps.potential_shaping, static_argnames="discount")
step_potentials = jax.jit(steps.step_potentials, static_argnames="start")
normalise_step_rewards = jax.jit(steps.normalise_step_rewards)
implicit_process_rewards = jax.jit(steps.implicit_process_rewards, static_argnames="beta")


def f32(x):
    return jnp.asarray(x, jnp.float32)


@st.composite
def batches(draw):
    """Ragged rows, holes, empty rows, gaps of ±1e4, soft labels; poison wherever nothing is to be read."""
    row = st.sampled_from([(0,) * 7, (1,) * 7, (0, 1, 1, 0, 1, 1, 1), (0, 0, 0, 1, 0, 0, 0)])
    mask = np.array([draw(row | st.tuples(*[st.integers(0, 1)] * 7)) for _ in range(SHAPE[0])], bool)
    valid = np.array(draw(st.lists(st.booleans(), min_size=4, max_size=4) | st.just([True] * 4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale, poison = draw(st.sampled_from([0.0, 1.0, 1.0, 100.0, 1e4])), draw(st.sampled_from(POISON))
    ends = mask & (rng.random(SHAPE) < draw(st.sampled_from([0.0, 0.4, 1.0])))
    numbers = lambda *shape: rng.normal(size=shape) * scale
    labels = lambda *shape: rng.integers(0, 5, size=shape) / 4
    arrays = {
        "scores": np.where(valid[:, None], numbers(4, 2), poison),
        "margin": np.where(valid, np.abs(numbers(4)), poison),
        "logits": np.where(mask, numbers(*SHAPE), poison),
        "row_logits": np.where(valid, numbers(4), poison),
        "outcomes": np.where(mask.any(1) & valid, labels(4), poison),
        "step_logits": np.where(ends, numbers(*SHAPE), poison),
        "classes": np.where(ends[..., None], numbers(*SHAPE, 2), poison),
        "labels": np.where(ends, labels(*SHAPE), poison),
        "ref": np.where(mask, numbers(*SHAPE), poison),
    }
    ids = np.tile([0, 1, 1, 2, 2, 2, 3] if draw(st.booleans()) else [1] * 7, (4, 1)).astype(np.int32)
    weights = rng.normal(size=(4, 7)).astype(np.float32)
    return {name: x.astype(np.float32) for name, x in arrays.items()}, mask, valid, ends, ids, weights


def everything(arrays, mask, valid, ends, ids, weights):
    """By name: values [N] or [N T], a random weighting of all of them to be differentiated beside them."""
    a, packed = arrays, {"segment_ids": ids}
    rows = mask & valid[:, None]
    out = {
        "pairs": rm.reward_model_loss(a["scores"], valid=valid),
        "all pairs": rm.reward_model_loss(
            a["scores"], margin=a["margin"], center=0.01, label_smoothing=0.1, valid=valid
        ),
        "outcome": rm.outcome_loss(a["logits"], a["outcomes"], rows),
        "outcome of tokens": rm.outcome_loss(a["logits"], a["outcomes"], rows, per_token=True),
        "outcome of rows": rm.outcome_loss(a["row_logits"], a["outcomes"], rows.any(1)),
        "process": rm.process_loss(a["step_logits"], a["labels"], ends),
        "process of classes": rm.process_loss(a["classes"], a["labels"], ends),
        "probabilities": rm.process_scores(a["step_logits"], ends),
        "shaping": steps.potential_shaping(a["logits"], mask, discount=0.9, **packed),
        "potentials": steps.step_potentials(a["step_logits"], ends, mask, start=0.5, **packed),
        "credit": steps.normalise_step_rewards(a["step_logits"], ends, mask),
        "implicit": steps.implicit_process_rewards(a["logits"], a["ref"], mask, beta=0.05),
        "implicit steps": steps.implicit_process_rewards(
            a["logits"], a["ref"], mask, beta=0.05, step_ends=ends, **packed
        ),
    }
    return sum(jnp.sum(weights[:, : x.shape[1]] * x if x.ndim == 2 else weights[:, 0] * x) for x in out.values()), out


computed = jax.jit(jax.value_and_grad(everything, has_aux=True))


def expected(a, mask, valid, ends, ids):
    rows = mask & valid[:, None]
    packed = {"segment_ids": ids}
    one = lambda row: loops.outcome(row[:, None], a["outcomes"], rows.any(1)[:, None], per_token=True)[0][:, 0]
    whole = {"margin": a["margin"], "center": 0.01, "label_smoothing": 0.1}
    return {
        "pairs": loops.reward_model(a["scores"], valid=valid)[0],
        "all pairs": loops.reward_model(a["scores"], valid=valid, **whole)[0],
        "outcome": loops.outcome(a["logits"], a["outcomes"], rows, per_token=False)[0],
        "outcome of tokens": loops.outcome(a["logits"], a["outcomes"], rows, per_token=True)[0],
        "outcome of rows": one(a["row_logits"]),
        "process": loops.process(a["step_logits"], a["labels"], ends)[0],
        "process of classes": loops.process(a["classes"], a["labels"], ends)[0],
        "probabilities": [[loops.sigmoid(float(z)) if end else 0.0 for z, end in zip(*both, strict=True)]
                          for both in zip(a["step_logits"], ends, strict=True)],
        "shaping": loops.shaping(a["logits"], mask, discount=0.9, **packed),
        "potentials": loops.step_potentials(a["step_logits"], ends, mask, start=0.5, **packed),
        "credit": loops.mean_credit(a["step_logits"], ends, mask),
        "implicit": loops.implicit(a["logits"], a["ref"], mask, beta=0.05, **packed),
        "implicit steps": loops.implicit(a["logits"], a["ref"], mask, beta=0.05, ends=ends, **packed),
    }  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(batches())
def test_every_function_equals_its_loop_and_poison_leaves_no_trace(drawn):
    arrays, mask, valid, ends, ids, _ = drawn
    (_, got), slopes = computed(*drawn)
    wanted = expected(arrays, mask, valid, ends, ids)
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        bound = 2e-6 * max(1.0, float(np.abs(wanted[name]).max(initial=0.0)))
        np.testing.assert_allclose(value, wanted[name], rtol=2e-5, atol=bound, err_msg=name)
    read = {"scores": valid[:, None], "margin": valid, "row_logits": valid, "outcomes": valid & mask.any(1),
            "logits": mask, "ref": mask}  # fmt: skip
    for name, slope in slopes.items():
        assert np.isfinite(slope).all(), name
        seen = read.get(name, ends[..., None] if name == "classes" else ends)
        assert (np.asarray(slope)[~np.broadcast_to(seen, slope.shape)] == 0).all(), name


@settings(max_examples=20, deadline=None)
@given(batches())
def test_gradients_equal_the_loops(drawn):
    a, mask, valid, ends, _, _ = drawn
    rows = mask & valid[:, None]
    got = loss_gradients(a, rows, valid, ends)
    wanted = (
        loops.reward_model(a["scores"], margin=a["margin"], center=0.01, label_smoothing=0.1, valid=valid)[1],
        loops.outcome(a["logits"], a["outcomes"], rows, per_token=True)[1],
        loops.process(a["step_logits"], a["labels"], ends)[1],
        loops.process(a["classes"], a["labels"], ends)[1],
    )
    for slope, loop in zip(got, wanted, strict=True):
        np.testing.assert_allclose(slope, loop, rtol=1e-4, atol=1e-5)


@jax.jit
def loss_gradients(a, rows, valid, ends):
    pairs = lambda x: rm.reward_model_loss(x, margin=a["margin"], center=0.01, label_smoothing=0.1, valid=valid).sum()
    outcome = lambda x: rm.outcome_loss(x, a["outcomes"], rows, per_token=True).sum()
    process = lambda x: rm.process_loss(x, a["labels"], ends).sum()
    of = lambda loss, name: jax.grad(loss)(a[name])
    return of(pairs, "scores"), of(outcome, "logits"), of(process, "step_logits"), of(process, "classes")


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_comparisons_by_hand():
    scores = f32([[2.0, 2.0], [1.0, 0.0], [-3.0, 1.0]])
    loss = reward_model_loss(scores)
    np.testing.assert_allclose(loss, [LN2, math.log1p(math.exp(-1)), math.log1p(math.exp(4))], rtol=1e-6)
    slope = jax.grad(lambda x: reward_model_loss(x).sum())(scores)
    wrong = [0.5, 1 / (1 + math.e), 1 / (1 + math.exp(-4))]  # 1 − P(chosen)
    np.testing.assert_allclose(slope, [[-p, p] for p in wrong], rtol=1e-6)
    # A margin that the gap just meets is ln 2 again; the same score on both sides of it is more.
    np.testing.assert_allclose(reward_model_loss(scores, margin=f32([0.0, 1.0, -4.0])), [LN2] * 3, rtol=1e-6)
    np.testing.assert_allclose(rm.reward_model_loss(scores, margin=1.0)[0], math.log1p(math.e), rtol=1e-6)
    np.testing.assert_allclose(reward_model_loss(scores, center=0.01) - loss, [0.16, 0.01, 0.04], atol=1e-6)


def test_smoothing_is_least_where_the_model_believes_the_label_as_often_as_it_is_right():
    at = lambda gap: float(reward_model_loss(f32([[gap, 0.0]]), label_smoothing=0.2)[0])
    best = math.log(0.8 / 0.2)
    assert at(best) < min(at(best - 0.1), at(best + 0.1))
    assert at(best) == pytest.approx(-0.8 * math.log(0.8) - 0.2 * math.log(0.2))
    assert at(0.0) == pytest.approx(LN2)


@pytest.mark.parametrize("gap", [1e4, -1e4, 3e38])
def test_no_gap_is_too_wide(gap):
    scores = f32([[gap / 2, -gap / 2]])
    loss, slope = jax.value_and_grad(lambda x: reward_model_loss(x, label_smoothing=0.1).sum())(scores)
    assert float(loss) == pytest.approx((0.1 if gap > 0 else 0.9) * abs(gap))
    np.testing.assert_allclose(slope, [[0.1, -0.1]] if gap > 0 else [[-0.9, 0.9]], atol=1e-6)


def test_a_nan_among_valid_scores_shows():
    assert np.isnan(reward_model_loss(f32([[math.nan, 0.0]]))[0])
    assert all(np.isnan(ensemble_reward(f32([[math.nan], [0.0]]), how=how)[0]) for how in HOWS)


def test_the_metrics_of_comparisons():
    valid = jnp.array([True, True, True, False])
    scores = f32([[2, 1], [0, 3], [1, 1], [math.nan, math.inf]])
    got = metrics.result(reward_model_metrics(scores, valid=valid))
    assert got == pytest.approx({"accuracy": 1 / 3, "margin": -2 / 3, "mean_reward": 8 / 6})
    halves = [reward_model_metrics(scores[i : i + 2], valid=valid[i : i + 2]) for i in (0, 2)]
    assert metrics.result(metrics.merge(*halves)) == pytest.approx(got)


def test_ensembles():
    scores = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    for how, k in itertools.product(HOWS, (0.0, 1.0, 2.5)):
        np.testing.assert_allclose(
            ensemble_reward(scores, how=how, k=k), loops.ensemble(scores, how=how, k=k), rtol=1e-5, atol=1e-6
        )
    for how in HOWS:  # a single model has no spread, and equal ones have none
        np.testing.assert_array_equal(ensemble_reward(scores[:1], how=how), scores[0])
        assert float(ensemble_reward(jnp.full((3, 1), 0.1), how=how)[0]) == pytest.approx(0.1, abs=1e-7)
    slope = jax.grad(lambda x: ensemble_reward(x, how="pessimistic").sum())(jnp.full((3, 2), 0.1))
    np.testing.assert_allclose(slope, 1 / 3, rtol=1e-6)


# --- outcomes and steps -----------------------------------------------------------------------------------------------


def test_where_outcomes_are_read():
    mask = jnp.array([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]], bool)
    logits = jnp.where(mask, 0.0, jnp.nan)
    labels = f32([1, -100, 0])  # the second row's outcome is unknown: nothing of it is read
    last, every = (outcome_loss(logits, labels, mask, per_token=flag) for flag in (False, True))
    np.testing.assert_allclose(last, LN2 * jnp.array([[0, 0, 0, 0, 1, 0], [0] * 6, [1, 0, 0, 0, 0, 0]]), rtol=1e-6)
    np.testing.assert_allclose(every, LN2 * mask, rtol=1e-6)
    for loss, per_token in ((last, False), (every, True)):
        weights = weights_of(rm.outcome_tokens(mask, per_token=per_token), over="seq-mean-token-mean")
        assert float(jnp.sum(weights * loss)) == pytest.approx(LN2)


def test_a_label_to_be_ignored_is_never_read_as_a_number():
    """−100 under the mask would be a strong pull, and bool(−100) a positive: it shows instead."""
    loss, slope = jax.value_and_grad(lambda z: process_loss(z, f32([[-100, 1]]), jnp.ones((1, 2), bool)).sum())(
        jnp.zeros((1, 2))
    )
    assert np.isnan(loss)
    np.testing.assert_array_equal(np.isnan(slope), [[True, False]])
    masked = process_loss(jnp.zeros((1, 2)), f32([[-100, 1]]), jnp.array([[False, True]]))
    np.testing.assert_allclose(masked, [[0, LN2]], rtol=1e-6)


def test_two_classes_are_token_classification():
    """torch's cross-entropy with −100 ignored, as TRL's trainer of process reward models."""
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(3, 8, 2)) * 3).astype(np.float32)
    labels = rng.integers(0, 2, size=(3, 8))
    mask = rng.random((3, 8)) < 0.4
    theirs = torch.tensor(logits, requires_grad=True)
    coded = torch.tensor(np.where(mask, labels, -100))
    loss = torch.nn.functional.cross_entropy(theirs.reshape(-1, 2), coded.reshape(-1), ignore_index=-100)
    loss.backward()

    def mean(z):
        return jnp.sum(weights_of(jnp.asarray(mask)) * process_loss(z, f32(labels), jnp.asarray(mask)))

    value, slope = jax.value_and_grad(mean)(jnp.asarray(logits))
    assert float(value) == pytest.approx(loss.item(), abs=1e-6)
    np.testing.assert_allclose(slope, theirs.grad, atol=1e-7)
    one = f32(logits[..., 1] - logits[..., 0])
    both = [process_loss(z, f32(labels), jnp.asarray(mask)) for z in (one, jnp.asarray(logits))]
    np.testing.assert_array_equal(*both)


def test_a_soft_label_is_best_met_by_its_own_chance():
    at = lambda z: process_loss(f32([[z]]), f32([[0.3]]), jnp.ones((1, 1), bool))
    assert float(jax.grad(lambda z: at(z).sum())(math.log(0.3 / 0.7))) == pytest.approx(0.0, abs=1e-7)


def test_the_metrics_of_labels():
    mask = jnp.array([True, True, True, True, False])
    got = metrics.result(label_metrics(f32([2, -1, 0, 5, math.nan]), f32([1, 1, 0.25, 0.5, -100]), mask))
    chances = [loops.sigmoid(z) for z in (2, -1, 0, 5)]
    assert got == pytest.approx(
        {"accuracy": 3 / 4, "mean_probability": sum(chances) / 4, "mean_label": 2.75 / 4}, rel=1e-6
    )


# --- calibration and length -------------------------------------------------------------------------------------------


def add(a, b):
    return jax.tree.map(jnp.add, a, b)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(POISON), st.sampled_from([1, 4, 10]))
def test_calibration_equals_its_loop_in_parts_too(seed, poison, bins):
    rng = np.random.default_rng(seed)
    mask = np.append(rng.random(23) < 0.7, True)
    p, y = rng.choice([0.0, 0.1, 0.25, 0.5, 0.77, 1.0], size=24), rng.integers(0, 3, size=24) / 2
    poisoned = [np.where(mask, x, poison).astype(np.float32) for x in (p, y)]
    parts = [calibration(*(x[half] for x in (*poisoned, mask)), bins=bins) for half in (slice(12), slice(12, 24))]
    wanted = loops.calibration_error(np.float32(p)[mask].astype(float).tolist(), y[mask].tolist(), bins)
    assert float(calibration_error(add(*parts))) == pytest.approx(wanted, abs=1e-6)
    assert int(add(*parts).count.sum()) == mask.sum()


def test_calibration_of_comparisons():
    even = pair_calibration(f32([[3, 3], [0, 0]]))
    assert float(calibration_error(even)) == 0.0  # says ½, is right by half
    # Sure and right 3 of 4 times: a gap of ln 3 is calibrated, in whichever order the wrong one stands.
    gap = math.log(3)
    right = pair_calibration(f32([[gap, 0], [1 + gap, 1], [gap, 0], [0, gap], [math.nan, 0]]),
                                valid=jnp.array([True] * 4 + [False]))  # fmt: skip
    assert float(calibration_error(right)) == pytest.approx(0.0, abs=1e-6)
    sure = pair_calibration(f32([[1e4, 0], [0, 1e4]]))
    assert float(calibration_error(sure)) == pytest.approx(0.5)
    nothing = pair_calibration(f32([[1, 0]]), valid=jnp.array([False]))
    assert np.isnan(calibration_error(nothing))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(POISON), st.sampled_from([0.0, 1e4]))
def test_moments_of_parts_are_those_of_the_whole(seed, poison, offset):
    rng = np.random.default_rng(seed)
    mask = rng.random(24) < rng.choice([0.1, 0.6, 1.0])
    lengths = rng.integers(100, 400, size=24).astype(np.int32)
    scores = (0.01 * lengths + rng.normal(size=24) + offset).astype(np.float32)
    poisoned = np.where(mask, scores, poison).astype(np.float32)
    parts = [length_reward_moments(*(x[i : i + 8] for x in (poisoned, lengths, mask))) for i in (0, 8, 16)]
    for sums in (merge_moments(parts[0], merge_moments(parts[1], parts[2])),
                 length_reward_moments(poisoned, lengths, mask)):  # fmt: skip
        if mask.sum() < 2:
            assert np.isnan(correlation(sums))
        else:
            wanted = np.corrcoef(lengths[mask], scores.astype(np.float64)[mask])[0, 1]
            # A mean of numbers near the offset is rounded by its float32 spacing, to be compared with their spread.
            rounding = 2 * np.finfo(np.float32).eps * offset / scores.astype(np.float64)[mask].std()
            assert float(correlation(sums)) == pytest.approx(wanted, abs=1e-5 + rounding)


def test_a_score_that_is_the_length_correlates_with_it_and_a_constant_with_nothing():
    lengths, mask = jnp.arange(1, 6), jnp.ones(5, bool)
    for slope in (2.0, -2.0):
        sums = length_reward_moments(slope * lengths.astype(jnp.float32), lengths, mask)
        assert float(correlation(sums)) == pytest.approx(math.copysign(1, slope), abs=1e-6)
    assert np.isnan(correlation(length_reward_moments(jnp.full(5, 0.1), lengths, mask)))


# --- labels of steps --------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(POISON), st.sampled_from([1, 3, 8]))
def test_labels_equal_their_loops(seed, poison, n):
    rng = np.random.default_rng(seed)
    valid = rng.random((5, n)) < rng.choice([0.0, 0.5, 1.0], size=(5, 1))
    outcomes = np.where(valid, rng.integers(0, 5, size=(5, n)) / 4, poison).astype(np.float32)
    for kind, beta in KINDS.items():
        got = labels_of(outcomes, kind=kind, beta=beta, valid=valid)
        wanted = loops.monte_carlo(outcomes, kind=kind, beta=beta, valid=valid)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=kind)


def test_log_mean_exp_lies_between_the_mean_and_the_best():
    outcomes = f32([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    label = lambda beta: labels_of(outcomes, kind="log-mean-exp", beta=beta)
    np.testing.assert_allclose(label(1e-3), [1, 1, 0], atol=2e-3)
    np.testing.assert_allclose(label(100.0), [0.25, 0.75, 0], atol=2e-3)
    assert (np.diff(np.stack([label(beta) for beta in (0.05, 0.2, 1.0, 5.0)])[:, :2], axis=0) < 0).all()
    np.testing.assert_allclose(label(0.5)[0], 0.5 * math.log((math.exp(2) + 3) / 4), rtol=1e-6)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.85])
def test_what_labels_of_eight_completions_mean(value):
    """By enumeration of all outcomes: soft labels are unbiased, hard ones have 1 − (1 − v)^8."""
    outcomes = np.array(list(itertools.product([0, 1], repeat=8)), np.float32)
    chance = np.prod(np.where(outcomes == 1, value, 1 - value).astype(np.float64), axis=1)
    mean = {kind: chance @ np.asarray(labels_of(outcomes, kind=kind, beta=beta), np.float64)
            for kind, beta in KINDS.items()}  # fmt: skip
    assert mean["soft"] == pytest.approx(value, abs=1e-7)
    assert mean["hard"] == pytest.approx(1 - (1 - value) ** 8, abs=1e-7)
    assert float(steps.expected_hard_label(f32(value), samples=8)) == pytest.approx(mean["hard"], abs=1e-6)
    assert mean["soft"] < mean["log-mean-exp"] < mean["hard"]


def test_the_means_of_hard_labels_that_are_known():
    got = steps.expected_hard_label(f32([0.0, 0.1, 0.3, 1.0]), samples=8)
    np.testing.assert_allclose(got, [0.0, 0.569533, 0.942352, 1.0], atol=1e-6)
    assert float(steps.expected_hard_label(f32(1e-9), samples=8)) == pytest.approx(8e-9, rel=1e-5)


# --- rewards of steps -------------------------------------------------------------------------------------------------


def test_steps_are_numbered_and_counted():
    mask = jnp.array([[0, 1, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0]], bool)
    ends = jnp.array([[1, 0, 1, 0, 1, 1], [0, 0, 0, 1, 0, 0]], bool)  # off the mask an end is none
    np.testing.assert_array_equal(steps.step_ids(ends, mask)[0][mask[0]], [1, 1, 2, 2])
    np.testing.assert_array_equal(steps.step_counts(ends, mask), [2, 0])


def test_mean_credit_does_not_pay_for_steps():
    mask = jnp.ones((3, 4), bool)
    ends = jnp.array([[0, 0, 0, 1], [0, 1, 0, 1], [1, 1, 1, 1]], bool)
    scores = jnp.where(ends, 0.8, jnp.nan)
    paid = normalise_step_rewards(scores, ends, mask)
    np.testing.assert_allclose(paid.sum(1), [0.8] * 3, rtol=1e-6)
    np.testing.assert_allclose(paid.sum(1), completion_credit(scores, ends, "mean"), rtol=1e-6)
    np.testing.assert_allclose(jnp.where(ends, scores, 0).sum(1), [0.8, 1.6, 3.2], rtol=1e-6)  # the plain sum pays


def test_differences_of_step_scores_pay_the_same_for_every_number_of_steps():
    mask = jnp.array([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], bool)
    ends = jnp.array([[0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0]], bool)
    scores = jnp.where(ends, jnp.arange(12.0).reshape(2, 6) / 8, jnp.nan)
    potentials = step_potentials(scores, ends, mask, start=0.5)
    paid = potential_shaping(potentials, mask)
    np.testing.assert_allclose(paid.sum(1), [-0.5, -0.5], atol=1e-6)
    np.testing.assert_allclose(paid[0], [0, 0, 2 / 8 - 0.5, 0, 2 / 8, -4 / 8], atol=1e-6)


def test_a_step_of_implicit_rewards_is_the_sum_of_its_tokens():
    rng = np.random.default_rng(2)
    logprobs, ref = f32(rng.normal(size=(2, 6))), f32(rng.normal(size=(2, 6)))
    mask = jnp.ones((2, 6), bool)
    ends = jnp.array([[0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1]], bool)
    by_token = implicit_process_rewards(logprobs, ref, mask, beta=0.05)
    by_step = implicit_process_rewards(logprobs, ref, mask, beta=0.05, step_ends=ends)
    np.testing.assert_allclose(by_step[0, [2, 5]], [by_token[0, :3].sum(), by_token[0, 3:].sum()], rtol=1e-5)
    whole = steps.implicit_outcome_logits(logprobs, ref, mask, beta=0.05)
    np.testing.assert_allclose(by_step.sum(1), whole, rtol=1e-5)
    np.testing.assert_allclose(by_token.sum(1), whole, rtol=1e-5)


def test_the_sum_of_implicit_rewards_up_to_a_token_is_the_value_of_the_prefix():
    """π_φ ∝ π_ref exp(r / β): β log-ratio summed to t is β log E_ref[exp(r / β) | prefix], up to one constant."""
    rng = np.random.default_rng(5)
    beta, reward = 0.7, rng.normal(size=(3, 3))
    ref = rng.dirichlet(np.ones(9)).reshape(3, 3)
    tilted = ref * np.exp(reward / beta)
    model = tilted / tilted.sum()
    both = np.array(list(itertools.product(range(3), repeat=2)))
    tokens = lambda p: np.log(np.stack([p.sum(1)[both[:, 0]], p[both[:, 0], both[:, 1]] / p.sum(1)[both[:, 0]]], 1))
    gains = implicit_process_rewards(f32(tokens(model)), f32(tokens(ref)), jnp.ones((9, 2), bool), beta=beta)
    value = beta * np.log(tilted.sum(1) / ref.sum(1)) - beta * np.log(tilted.sum())
    np.testing.assert_allclose(gains[:, 0], value[both[:, 0]], atol=1e-5)
    np.testing.assert_allclose(gains.sum(1), reward.reshape(-1) - beta * np.log(tilted.sum()), atol=1e-5)


# --- what shaping does to the expected gradient, by enumeration -------------------------------------------------------

STOP, LIMIT = 0, 4  # a policy over tokens 0 (stop), 1, 2 that writes at most four; a table of logits for each prefix


def episodes():
    """All of them: rows of prefix numbers, tokens, and the mask; each token ends a step."""
    numbers, rows = {(): 0}, []

    def grow(prefix):
        for token in range(3):
            whole = (*prefix, token)
            if token == STOP or len(whole) == LIMIT:
                rows.append(whole)
            else:
                numbers[whole] = len(numbers)
                grow(whole)

    grow(())
    prefixes = np.zeros((len(rows), LIMIT), np.int32)
    tokens, mask = np.zeros_like(prefixes), np.zeros(prefixes.shape, bool)
    for n, row in enumerate(rows):
        for t, token in enumerate(row):
            prefixes[n, t], tokens[n, t], mask[n, t] = numbers[row[:t]], token, True
    return len(numbers), prefixes, tokens, mask


STATES, PREFIXES, TOKENS, MASK = episodes()


def gradient(logits, rewards, discount):
    """E Σ_t γ^t ∇ log π(a_t | s_t) G_t over all episodes, G the discounted return-to-go."""
    to_go = returns_to_go(rewards, jnp.asarray(MASK), discount=discount) * discount ** jnp.arange(LIMIT)[None, :]

    def surrogate(x):
        logprobs = jnp.where(MASK, jax.nn.log_softmax(x)[PREFIXES, TOKENS], 0.0)
        chance = jax.lax.stop_gradient(jnp.exp(logprobs.sum(1)))
        return jnp.sum(chance[:, None] * logprobs * to_go)

    return jax.grad(surrogate)(logits)


gradient = jax.jit(gradient, static_argnums=2)


@pytest.mark.parametrize("discount", [1.0, 0.8])
def test_shaping_by_a_potential_leaves_the_expected_gradient_and_other_step_rewards_do_not(discount):
    rng = np.random.default_rng(7)
    with jax.enable_x64(True):
        logits = jnp.asarray(rng.normal(size=(STATES, 3)))
        outcome = jnp.where(MASK, jnp.asarray(rng.normal(size=MASK.shape)), 0.0)  # any rewards of the task
        potentials = jnp.where(MASK, 10 * jnp.asarray(rng.normal(size=STATES))[PREFIXES], jnp.nan)
        shaping = lambda by: potential_shaping(potentials, jnp.asarray(MASK), discount=by)
        plain = gradient(logits, outcome, discount)
        shaped = gradient(logits, outcome + shaping(discount), discount)
        np.testing.assert_allclose(shaped, plain, atol=1e-12)
        raw = gradient(logits, outcome + jnp.where(MASK, potentials, 0.0), discount)
        assert np.abs(raw - plain).max() > 0.1
        assert np.abs(gradient(logits, outcome + shaping(0.5), discount) - plain).max() > 0.1


def test_a_reward_above_0_for_each_step_teaches_not_to_stop_and_the_guards_do_not():
    """The failure of sums: nothing but the number of steps differs, and the gradient is against stopping."""
    logits, mask = jnp.zeros((STATES, 3)), jnp.asarray(MASK)
    scores = jnp.where(mask, 0.9, jnp.nan)
    stop_now = lambda rewards: float(gradient(logits, rewards, 1.0)[0, STOP])
    assert stop_now(jnp.where(mask, scores, 0.0)) < -0.2
    assert stop_now(normalise_step_rewards(scores, mask, mask)) == pytest.approx(0.0, abs=1e-6)
    shaped = potential_shaping(step_potentials(scores, mask, mask, start=0.9), mask)
    assert stop_now(shaped) == pytest.approx(0.0, abs=1e-6)
    counts, paid = steps.step_counts(mask, mask), jnp.where(mask, scores, 0.0).sum(1)
    every = jnp.ones(counts.shape, bool)
    assert float(correlation(moments(counts, paid, every))) == pytest.approx(1.0, abs=1e-6)


# --- failures ---------------------------------------------------------------------------------------------------------

TWO = jnp.zeros((1, 2))
FAILURES = [
    (rm.reward_model_loss, (TWO,), {"label_smoothing": 0.5}, "label_smoothing=0.5"),
    (rm.reward_model_loss, (TWO,), {"label_smoothing": -0.1}, "label_smoothing=-0.1"),
    (rm.ensemble_reward, (TWO,), {"how": "median"}, "how='median' is unknown: use mean, min, pessimistic"),
    (rm.outcome_loss, (TWO[0], TWO[0], TWO[0] == 0), {"per_token": True}, "needs a logit a token"),
    (rm.binary_logits, (jnp.zeros((1, 2, 3)),), {}, "wrong and right"),
    (rm.calibration, (TWO, TWO, TWO == 0), {"bins": 0}, "bins=0"),
    (steps.monte_carlo_labels, (TWO,), {"kind": "firm"}, "kind='firm' is unknown: use soft, hard, log-mean-exp"),
    (steps.monte_carlo_labels, (TWO,), {"kind": "log-mean-exp"}, "needs a beta above 0"),
    (steps.monte_carlo_labels, (TWO,), {"kind": "log-mean-exp", "beta": 0.0}, "needs a beta above 0"),
    (steps.monte_carlo_labels, (TWO,), {"kind": "soft", "beta": 1.0}, "the others have none"),
]


@pytest.mark.parametrize(("function", "arguments", "options", "words"), FAILURES)
def test_what_is_refused(function, arguments, options, words):
    with pytest.raises(ValueError, match=words):
        inspect.unwrap(function)(*arguments, **options)
