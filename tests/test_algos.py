"""The mathematics against float64 loops, exact values, identities, and whatever may lie under a mask."""

import dataclasses
import inspect
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm import algos
from jaxrl_lm.algos.reduction import Over

POISON = (math.nan, math.inf, -math.inf)
LEVELS = ("token", "sequence", "sequence-token")
OVERS = Over.__args__
ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


def f32(x):
    return jnp.asarray(x, jnp.float32)


def plain(function):
    """The function without the test session's type checks, to see its own errors."""
    return inspect.unwrap(function)


# --- group_advantages -----------------------------------------------------------------------------------------------

# Binary rewards, k right of 6, population std: A right, A wrong, centred right, centred wrong.
SIX = {
    1: (2.236068, -0.447214, 0.833333, -0.166667),
    2: (1.414214, -0.707107, 0.666667, -0.333333),
    3: (1.0, -1.0, 0.5, -0.5),
    4: (0.707107, -1.414214, 0.333333, -0.666667),
    5: (0.447214, -2.236068, 0.166667, -0.833333),
}


@pytest.mark.parametrize("k", range(7))
def test_six_responses(k):
    returns = f32([1] * k + [0] * (6 - k))
    right, wrong, centred_right, centred_wrong = SIX.get(k, (0.0,) * 4)
    advantages = lambda **options: algos.group_advantages(returns, group_size=6, eps=0.0, **options)
    expected = np.array([right] * k + [wrong] * (6 - k))
    np.testing.assert_allclose(advantages(ddof=0), expected, atol=1e-6)
    np.testing.assert_allclose(advantages(), expected * math.sqrt(5 / 6), atol=1e-6)  # ddof=1 is the default
    centred = np.array([centred_right] * k + [centred_wrong] * (6 - k))
    np.testing.assert_allclose(advantages(scale="none"), centred, atol=1e-6)
    assert float(jnp.sum(advantages(scale="none") ** 2)) == pytest.approx(6 * (k / 6) * (1 - k / 6), abs=1e-6)


def test_three_of_six_with_the_sample_std():
    advantages = algos.group_advantages(f32([1, 1, 1, 0, 0, 0]), group_size=6)
    np.testing.assert_allclose(advantages, [0.912871] * 3 + [-0.912871] * 3, atol=5e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.7, 1e6 + 0.1, 1e-30])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_equal_returns_gets_exactly_zero(value, scale):
    # Summed and divided in float32 such a mean differs from the value, and the noise over eps would be a gradient.
    returns = f32([value] * 7 + [0, 1, 2, 3, 4, 5, 6])
    advantages = algos.group_advantages(returns, group_size=7, scale=scale)
    assert advantages[:7].tolist() == [0.0] * 7
    assert (np.abs(advantages[7:10]) > 0).all()


def all_scales(returns, valid):
    options = [(scale, ddof) for scale in ("group", "batch", "none") for ddof in (0, 1)]
    call = lambda scale, ddof: algos.group_advantages(returns, group_size=4, scale=scale, ddof=ddof, valid=valid)
    return {option: call(*option) for option in options}


all_scales_jitted = jax.jit(all_scales)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 0.1, -2.5, 1e6]) | st.floats(-5, 5, width=32), min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.sampled_from(POISON),
)
def test_advantages_equal_the_loop_and_invalid_rows_leave_no_trace(values, valid, poison):
    valid = np.array(valid)
    returns = np.where(valid, np.array(values), poison).astype(np.float32)
    for (scale, ddof), got in all_scales_jitted(returns, valid).items():
        expected = reference.group_advantages(returns, group_size=4, scale=scale, ddof=ddof, valid=valid)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4, err_msg=f"{scale} {ddof}")
        assert (np.asarray(got)[~valid] == 0).all()


def test_rows_that_abstain_leave_the_baseline():
    returns = f32([1, 0, 0, 99, 1, 0, -7, math.nan])
    valid = jnp.array([True, True, True, False, True, True, False, False])
    advantages = algos.group_advantages(returns, group_size=4, scale="none", valid=valid)
    np.testing.assert_allclose(advantages, [2 / 3, -1 / 3, -1 / 3, 0, 0.5, -0.5, 0, 0], atol=1e-7)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_with_one_valid_row_or_none(scale):
    returns, valid = f32([1, 0, 5, 7, 1, 0]), jnp.array([False, False, True, False, True, True])
    advantages = algos.group_advantages(returns, group_size=2, scale=scale, valid=valid)
    assert advantages[:4].tolist() == [0.0] * 4
    assert advantages[4] == -advantages[5] > 0
    nothing = algos.group_advantages(returns, group_size=2, scale=scale, valid=jnp.zeros(6, bool))
    assert nothing.tolist() == [0.0] * 6


def test_a_nan_return_shows_and_stays_in_its_group():
    advantages = algos.group_advantages(f32([1, math.nan, 0, 1]), group_size=2)
    assert np.isnan(advantages[:2]).all()
    assert np.isfinite(advantages[2:]).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_constant_added_to_a_group_changes_nothing(scale):
    rng = np.random.default_rng(0)
    small = rng.integers(0, 8, size=24) / 8
    large = small + np.repeat([1e6, -1e3, 0.0], 8)  # exact in float32
    call = lambda returns: algos.group_advantages(f32(returns), group_size=8, scale=scale)
    if scale == "batch":  # its std is that of the batch: the same constant for all
        large = small + 1e6
    np.testing.assert_allclose(call(large), call(small), atol=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_permuting_groups_or_rows_permutes_advantages(scale):
    rng = np.random.default_rng(1)
    returns = rng.normal(size=12).astype(np.float32)
    call = lambda x: np.asarray(algos.group_advantages(jnp.asarray(x), group_size=4, scale=scale))
    groups = np.array([2, 0, 1])
    np.testing.assert_allclose(
        call(returns.reshape(3, 4)[groups].reshape(-1)), call(returns).reshape(3, 4)[groups].reshape(-1), atol=1e-6
    )
    rows = np.array([3, 1, 0, 2, 4, 5, 6, 7, 9, 8, 11, 10])
    np.testing.assert_allclose(call(returns[rows]), call(returns)[rows], atol=1e-6)


def test_returns_of_a_million():
    small = f32([1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0])
    scaled = algos.group_advantages(small * 1e6, group_size=6)
    np.testing.assert_allclose(scaled, algos.group_advantages(small, group_size=6, eps=0.0), rtol=1e-5)
    np.testing.assert_allclose(
        algos.group_advantages(small * 1e6, group_size=6, scale="none"),
        1e6 * reference.group_advantages(np.asarray(small), group_size=6, scale="none"),
        rtol=1e-6,
    )


def test_integer_and_half_precision_returns():
    expected = algos.group_advantages(f32([1, 0, 0, 1]), group_size=2)
    for dtype in (jnp.int32, jnp.bfloat16, bool):
        got = algos.group_advantages(jnp.array([1, 0, 0, 1], dtype), group_size=2)
        assert got.dtype == jnp.float32
        assert got.tolist() == expected.tolist()


def test_advantage_errors():
    with pytest.raises(ValueError, match="group_size=1"):
        algos.group_advantages(jnp.zeros(4), group_size=1)
    with pytest.raises(ValueError, match="6 rows are not a multiple of group_size=4"):
        algos.group_advantages(jnp.zeros(6), group_size=4)
    with pytest.raises(ValueError, match=r"scale='std'.*group, batch or none"):
        plain(algos.group_advantages)(jnp.zeros(4), group_size=2, scale="std")


def test_mean_baseline_is_the_leave_one_out_baseline_shrunk():
    # r_i − mean = ((G − 1) / G) (r_i − mean of the others)
    returns = np.random.default_rng(2).normal(size=5)
    others = [returns[n] - reference.mean(np.delete(returns, n).tolist()) for n in range(5)]
    got = algos.group_advantages(f32(returns), group_size=5, scale="none")
    np.testing.assert_allclose(got, 4 / 5 * np.array(others), atol=1e-6)


# --- ratios and the surrogate, on ragged rows -----------------------------------------------------------------------

SHAPE = (4, 6)
CLIPS = {
    "ppo": {},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "dual": {"dual_clip": 1.5},
    "two-sided": {"delta": 1.6},
    "two-sided below the clip": {"delta": 1.1},
}
ROWS = st.sampled_from([(0,) * 6, (1,) * 6, (1, 0, 1, 1, 0, 1), (0, 0, 0, 1, 0, 0)])


@st.composite
def batches(draw):
    """Numbers of a batch, with poison wherever the mask is off; every kind of ragged row."""
    mask = np.array([draw(ROWS | st.tuples(*[st.integers(0, 1)] * 6)) for _ in range(SHAPE[0])], bool)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = ("logprobs", "old_logprobs", "ref_logprobs", "advantages")
    arrays = {name: rng.normal(size=SHAPE) * 0.5 for name in names}
    arrays["segment_ids"] = np.tile([0, 1, 1, 2, 2, 2], (SHAPE[0], 1)) if draw(st.booleans()) else np.ones(SHAPE, int)
    weights = np.where(mask, rng.random(SHAPE), 0.0)
    poisoned = {
        name: np.where(mask, array, draw(st.sampled_from(POISON))).astype(np.float32) if name in names else array
        for name, array in arrays.items()
    }
    return {**poisoned, "segment_ids": poisoned["segment_ids"].astype(np.int32)}, mask, weights.astype(np.float32)


def surrogates(logprobs, batch, mask, weights):
    """Every level with every clip: the weighted sum, and the per-token losses."""
    losses = {
        (level, name): algos.clipped_surrogate(
            logprobs, batch["old_logprobs"], batch["advantages"], mask, **options, level=level,
            segment_ids=batch["segment_ids"],
        )
        for level in LEVELS
        for name, options in CLIPS.items()
    }  # fmt: skip
    totals = {key: jnp.sum(weights * loss) for key, loss in losses.items()}
    return totals, losses


surrogate_gradients = jax.jit(jax.jacrev(surrogates, has_aux=True))


@settings(max_examples=25, deadline=None)
@given(batches())
def test_surrogate_and_its_gradient_equal_the_loop(drawn):
    batch, mask, weights = drawn
    gradients, losses = surrogate_gradients(batch["logprobs"], batch, mask, weights)
    arrays = (batch["logprobs"], batch["old_logprobs"], batch["advantages"], mask)
    for (level, name), loss in losses.items():
        options = {**CLIPS[name], "level": level, "segment_ids": batch["segment_ids"]}
        expected = reference.clipped_surrogate(*arrays, **options)
        np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6, err_msg=f"{level} {name}")
        slope = reference.clipped_surrogate_gradient(weights, *arrays, **options)
        np.testing.assert_allclose(gradients[level, name], slope, rtol=1e-4, atol=1e-6, err_msg=f"{level} {name}")
        assert (np.asarray(loss)[~mask] == 0).all()
        assert (np.asarray(gradients[level, name])[~mask] == 0).all()


ratios_jitted = jax.jit(
    lambda logprobs, old, mask, segment_ids: {
        level: algos.importance_ratio(logprobs, old, mask, level=level, segment_ids=segment_ids) for level in LEVELS
    }
)


@settings(max_examples=15, deadline=None)
@given(batches())
def test_ratios_equal_the_loop_and_are_one_off_the_mask(drawn):
    batch, mask, _ = drawn
    arrays = (batch["logprobs"], batch["old_logprobs"], mask)
    for level, got in ratios_jitted(*arrays, batch["segment_ids"]).items():
        expected = reference.importance_ratio(*arrays, level=level, segment_ids=batch["segment_ids"])
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=level)
        assert (np.asarray(got)[~mask] == 1).all()


def test_ratios_by_hand():
    logprobs, old = f32([[math.log(2), math.log(8), 5.0]]), f32([[0.0, 0.0, -5.0]])
    mask = jnp.array([[True, True, False]])
    for level, expected in (("token", [2, 8, 1]), ("sequence", [4, 4, 1]), ("sequence-token", [4, 4, 1])):
        got = algos.importance_ratio(logprobs, old, mask, level=level)
        np.testing.assert_allclose(got, [expected], rtol=1e-6)


def pack(x, fill):
    """Rows (0, 1) and (2, 3) end to end, a column of padding between them."""
    gap = np.full((1, 1), fill, x.dtype)
    return np.concatenate([np.concatenate([x[n : n + 1], gap, x[n + 1 : n + 2]], axis=1) for n in (0, 2)])


def unpack(x):
    width = (x.shape[1] - 1) // 2
    return np.concatenate([np.stack([row[:width], row[width + 1 :]]) for row in np.asarray(x)])


def packed_example():
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=(4, 5)).astype(np.float32) * 0.4 for _ in range(3)]
    mask = np.array([[0, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1]], bool)
    packed = [pack(x, np.nan) for x in arrays]
    segment_ids = np.tile([1] * 5 + [0] + [2] * 5, (2, 1)).astype(np.int32)
    return [jnp.asarray(x) for x in arrays], mask, [jnp.asarray(x) for x in packed], pack(mask, False), segment_ids


@pytest.mark.parametrize("level", LEVELS)
def test_packed_rows_equal_unpacked_rows(level):
    arrays, mask, packed, packed_mask, segment_ids = packed_example()
    options = {"level": level, "clip_high": 0.28}

    def total(logprobs, old, advantages, mask, segment_ids):
        losses = algos.clipped_surrogate(logprobs, old, advantages, mask, **options, segment_ids=segment_ids)
        return jnp.sum(losses * losses), losses  # squared, so that tokens differ in weight

    gradient, losses = jax.grad(total, has_aux=True)(*arrays, jnp.asarray(mask), None)
    segments = jnp.asarray(segment_ids)
    packed_gradient, packed_losses = jax.grad(total, has_aux=True)(*packed, jnp.asarray(packed_mask), segments)
    np.testing.assert_allclose(unpack(packed_losses), losses, atol=1e-6)
    np.testing.assert_allclose(unpack(packed_gradient), gradient, atol=1e-5)
    ratio = algos.importance_ratio(*packed[:2], jnp.asarray(packed_mask), level=level, segment_ids=segments)
    np.testing.assert_allclose(
        unpack(ratio), algos.importance_ratio(*arrays[:2], jnp.asarray(mask), level=level), rtol=1e-6
    )


@pytest.mark.parametrize("over", OVERS)
def test_packed_weights_equal_unpacked_weights(over):
    _, mask, _, packed_mask, segment_ids = packed_example()
    whole = algos.token_weights(jnp.asarray(mask), over=over, length=7)
    packed = algos.token_weights(jnp.asarray(packed_mask), over=over, length=7, segment_ids=jnp.asarray(segment_ids))
    np.testing.assert_allclose(unpack(packed), whole, rtol=1e-6)


def surrogate_slopes(ratios, advantages, **options):
    """d loss / d log-prob at given ratios."""
    x, mask = f32([np.log(ratios)]), jnp.ones((1, len(ratios)), bool)
    old, advantages = jnp.zeros_like(x), f32([advantages])
    loss = lambda x: jnp.sum(algos.clipped_surrogate(x, old, advantages, mask, **options))
    return np.asarray(jax.grad(loss)(x))[0]


def test_gradient_vanishes_past_dapos_clip_and_only_there():
    ratios = np.array([0.5, 0.799, 0.801, 1.0, 1.279, 1.281, 3.0])
    dapo = algos.PRESETS["dapo"]
    options = {"clip_low": dapo.epsilon, "clip_high": dapo.epsilon_high}
    up = surrogate_slopes(ratios, np.ones(7), **options)
    np.testing.assert_allclose(up, -ratios * [1, 1, 1, 1, 1, 0, 0], rtol=1e-5)
    down = surrogate_slopes(ratios, -np.ones(7), **options)
    np.testing.assert_allclose(down, ratios * [0, 0, 1, 1, 1, 1, 1], rtol=1e-5)


def test_dual_clip_bounds_negative_advantages_only():
    ratios = np.array([0.5, 2.0, 2.9, 3.1, 50.0])
    x, zero, mask = f32([np.log(ratios)]), jnp.zeros((1, 5)), jnp.ones((1, 5), bool)
    loss = algos.clipped_surrogate(x, zero, jnp.full((1, 5), -2.0), mask, dual_clip=3.0)
    np.testing.assert_allclose(loss, [[1.6, 4.0, 5.8, 6.0, 6.0]], rtol=1e-5)
    np.testing.assert_allclose(surrogate_slopes(ratios, -2 * np.ones(5), dual_clip=3.0), [0, 4, 5.8, 0, 0], rtol=1e-5)
    up = algos.clipped_surrogate(x, zero, jnp.full((1, 5), 2.0), mask, dual_clip=3.0)
    np.testing.assert_allclose(up, algos.clipped_surrogate(x, zero, jnp.full((1, 5), 2.0), mask))


def test_delta_bounds_the_ratio_of_negative_advantages():
    ratios = np.array([0.5, 2.0, 3.9, 4.1, 50.0])
    x, zero, mask = f32([np.log(ratios)]), jnp.zeros((1, 5)), jnp.ones((1, 5), bool)
    loss = algos.clipped_surrogate(x, zero, jnp.full((1, 5), -1.0), mask, delta=4.0)
    np.testing.assert_allclose(loss, [[0.8, 2.0, 3.9, 4.0, 4.0]], rtol=1e-5)
    np.testing.assert_allclose(surrogate_slopes(ratios, -np.ones(5), delta=4.0), [0, 2, 3.9, 0, 0], rtol=1e-5)
    # Above 1 + clip_high, positive advantages are clipped long before delta.
    np.testing.assert_allclose(surrogate_slopes(ratios, np.ones(5), delta=4.0), [-0.5, 0, 0, 0, 0], rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_gradient_at_ratio_one_is_the_plain_policy_gradient(level):
    rng = np.random.default_rng(4)
    mask = jnp.asarray(np.array([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0]], bool))
    logprobs = f32(rng.normal(size=(3, 4)) - 2)
    advantages = jnp.broadcast_to(f32([[1.5], [-0.5], [2.0]]), (3, 4))
    weights = algos.token_weights(mask, over="seq-mean-token-mean")

    def clipped(x):
        return jnp.sum(weights * algos.clipped_surrogate(x, logprobs, advantages, mask, level=level))

    policy_gradient = jax.grad(lambda x: -jnp.sum(weights * advantages * x))(logprobs)
    np.testing.assert_allclose(jax.grad(clipped)(logprobs), policy_gradient, rtol=1e-6)
    assert float(clipped(logprobs)) == pytest.approx(-float(jnp.sum(weights * advantages)), rel=1e-6)


def test_the_two_sequence_levels_differ_in_the_gradient():
    # GSPO hands every token the mean of the advantages, GSPO-token each its own.
    x, zero, mask = jnp.zeros((1, 2)), jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    advantages = f32([[1.0, 0.0]])

    def slopes(level):
        return jax.grad(lambda x: jnp.sum(algos.clipped_surrogate(x, zero, advantages, mask, level=level)))(x)

    np.testing.assert_allclose(slopes("sequence"), [[-0.5, -0.5]])
    np.testing.assert_allclose(slopes("sequence-token"), [[-1.0, 0.0]])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_ratios_of_a_hundred_nats_stay_finite(level, gap):
    x, old, mask = jnp.full((1, 3), gap), jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
    for sign in (1.0, -1.0):
        value, gradient = jax.value_and_grad(
            lambda x, sign=sign: jnp.sum(algos.clipped_surrogate(x, old, jnp.full((1, 3), sign), mask, level=level))
        )(x)
        assert np.isfinite(float(value))
        assert np.isfinite(gradient).all()
    ratio = algos.importance_ratio(x, old, mask, level=level)
    np.testing.assert_allclose(ratio, np.full((1, 3), math.exp(math.copysign(20, gap))), rtol=1e-5)


def test_clip_metrics():
    ratio, mask = f32([[0.7, 0.7, 1.0, 1.3, 1.3, 9.0]]), jnp.array([[True] * 5 + [False]])
    advantages = f32([[-1, 1, 1, -1, 1, math.nan]])
    found = algos.clip_metrics(ratio, advantages, mask, clip_low=0.2, clip_high=0.28)
    assert {name: np.flatnonzero(where).tolist() for name, where in found.items()} == {
        "clip_ratio/low_mean": [0],
        "clip_ratio/high_mean": [4],
        "clip_ratio/region_mean": [0, 4],
    }


def test_unknown_names_are_errors():
    x, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match=r"level='word'.*token, sequence or sequence-token"):
        plain(algos.importance_ratio)(x, x, mask, level="word")
    with pytest.raises(ValueError, match=r"estimator='k4'.*k1, k2, k3, k1\+ or k3\+"):
        plain(algos.kl_estimate)(x, x, mask, estimator="k4")
    with pytest.raises(ValueError, match=r"over='mean'.*token-mean, seq-mean-token-mean"):
        plain(algos.token_weights)(mask, over="mean")
    for length in (None, 0):
        with pytest.raises(ValueError, match=f"length={length}"):
            algos.token_weights(mask, over="seq-mean-token-sum-norm", length=length)


# --- kl_estimate ----------------------------------------------------------------------------------------------------

# One prompt, ten responses: a reference, a reward, the optimum of E r − β KL(pi ‖ ref) at β = 0.5, and the optimum of
# E r − β KL(ref ‖ pi). Six decimals each; where an identity is exact, the reference is normalised first.
REF = np.array([0.080549, 0.062242, 0.134769, 0.078889, 0.041574, 0.101976, 0.261685, 0.183134, 0.035142, 0.020040])
REWARD = np.array([0.815854, 0.002739, 0.857404, 0.033586, 0.729655, 0.175656, 0.863179, 0.541461, 0.299712, 0.422687])
BEST = np.array([0.109715, 0.016674, 0.199473, 0.022478, 0.047660, 0.038604, 0.391822, 0.144092, 0.017050, 0.012434])
FORWARD = np.array([0.103140, 0.025857, 0.193116, 0.033634, 0.043607, 0.049470, 0.381288, 0.137721, 0.019381, 0.012786])
LOG_REF = np.log(REF / REF.sum())
BETA = 0.5


def column(x):
    return jnp.asarray(x)[:, None]


@pytest.mark.parametrize(
    ("estimator", "mean", "spread"),
    [("k1", 0.136299, 0.114053), ("k2", 0.113353, 0.041636), ("k3", 0.136299, 0.067536)],
)
def test_exact_mean_and_spread_of_the_estimators(estimator, mean, spread):
    with jax.enable_x64(True):
        mask = jnp.ones((10, 1), bool)
        for name in [estimator] if estimator == "k2" else [estimator, estimator + "+"]:
            values = np.asarray(algos.kl_estimate(column(np.log(BEST)), column(np.log(REF)), mask, estimator=name))
            got = float(BEST @ values[:, 0])
            assert got == pytest.approx(mean, abs=1e-5)
            variance = float(BEST @ (values[:, 0] - got) ** 2)
            assert math.sqrt(variance / 16) == pytest.approx(spread, abs=1e-5)


def expected_loss(z, estimator):
    """E_{y ~ sg(pi)} of the estimate as a loss, pi = softmax(z)."""
    log_pi = jax.nn.log_softmax(z)
    values = algos.kl_estimate(log_pi[:, None], column(LOG_REF), jnp.ones((10, 1), bool), estimator=estimator)
    return jnp.sum(jax.lax.stop_gradient(jnp.exp(log_pi)) * values[:, 0])


def reverse_kl(z):
    return jnp.sum(jax.nn.softmax(z) * (jax.nn.log_softmax(z) - LOG_REF))


def forward_kl(z):
    return jnp.sum(np.exp(LOG_REF) * (LOG_REF - jax.nn.log_softmax(z)))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_expected_gradients_of_the_estimators_as_losses(estimator):
    with jax.enable_x64(True):
        z = jnp.asarray(np.random.default_rng(5).normal(size=10))
        got = jax.grad(expected_loss)(z, estimator)
        expected = {"k1": lambda z: 0.0 * z[0], "k3": forward_kl}.get(estimator, reverse_kl)
        np.testing.assert_allclose(got, jax.grad(expected)(z), atol=1e-12)
        assert np.abs(jax.grad(forward_kl)(z) - jax.grad(reverse_kl)(z)).max() > 0.1


def test_k1_in_the_reward_has_the_gradient_of_the_kl():
    with jax.enable_x64(True):
        z = jnp.asarray(np.random.default_rng(7).normal(size=10))

        def policy_gradient(z):
            log_pi = jax.nn.log_softmax(z)
            k1 = algos.kl_estimate(log_pi[:, None], column(LOG_REF), jnp.ones((10, 1), bool), estimator="k1")
            return jnp.sum(jax.lax.stop_gradient(jnp.exp(log_pi) * k1[:, 0]) * log_pi)

        np.testing.assert_allclose(jax.grad(policy_gradient)(z), jax.grad(reverse_kl)(z), atol=1e-12)


def test_where_the_kl_goes_decides_what_is_learned():
    """In the reward: the KL-regularised optimum. k3 as a loss: the forward-KL optimum. k1 as a loss: the reward alone."""
    with jax.enable_x64(True):

        def reward_gradient(z, reward):
            log_pi = jax.nn.log_softmax(z)
            return jax.grad(lambda z: jnp.sum(jnp.exp(log_pi) * reward * jax.nn.log_softmax(z)))(z)

        best, forward = jnp.log(jnp.asarray(BEST)), jnp.log(jnp.asarray(FORWARD))
        k1 = algos.kl_estimate(column(best), column(np.log(REF)), jnp.ones((10, 1), bool), estimator="k1")[:, 0]
        in_reward = reward_gradient(best, REWARD - BETA * k1)
        assert np.abs(in_reward).max() < 3e-6
        as_k3 = reward_gradient(forward, REWARD) - BETA * jax.grad(expected_loss)(forward, "k3")
        assert np.abs(as_k3).max() < 3e-6
        as_k1 = reward_gradient(best, REWARD) - BETA * jax.grad(expected_loss)(best, "k1")
        np.testing.assert_allclose(as_k1, reward_gradient(best, REWARD), atol=1e-12)
        assert np.abs(as_k1).max() > 0.01
        # Each optimum is none of the other's.
        assert np.abs(reward_gradient(best, REWARD) - BETA * jax.grad(expected_loss)(best, "k3")).max() > 1e-3


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gap", [100.0, -100.0, 19.9, -19.9, 20.1, -20.1, 0.0])
def test_gaps_up_to_a_hundred_nats(estimator, gap):
    x, ref, mask = jnp.full((1, 1), gap), jnp.zeros((1, 1)), jnp.ones((1, 1), bool)
    value, slope = jax.value_and_grad(lambda x: jnp.sum(algos.kl_estimate(x, ref, mask, estimator=estimator)))(x)
    expected, gradient = reference.kl_token(gap, 0.0, estimator)
    if gap < -20 and estimator.startswith("k3"):  # along the tangent at −20
        at_bound, slope_at_bound = reference.kl_token(-20.0, 0.0, "k3")
        expected = at_bound + (gap + 20) * slope_at_bound
        gradient = gap if estimator == "k3+" else slope_at_bound
    assert float(value) == pytest.approx(expected, rel=1e-5)
    assert float(slope[0, 0]) == pytest.approx(gradient, rel=1e-5)


def test_k3_keeps_small_gaps_and_is_never_negative():
    gaps = f32([np.concatenate([np.geomspace(1e-5, 1, 40), -np.geomspace(1e-5, 1, 40)])])
    values = algos.kl_estimate(gaps, jnp.zeros_like(gaps), jnp.ones(gaps.shape, bool), estimator="k3")
    exact = [reference.kl_token(gap, 0.0, "k3")[0] for gap in np.asarray(gaps)[0]]
    np.testing.assert_allclose(
        values[0], exact, rtol=0.02
    )  # exp(x) − 1 − x in float32 would be off by a factor of 1000
    assert (np.asarray(values) >= 0).all()


def kl_and_gradient(logprobs, ref, mask, weights, name):
    call = lambda x: algos.kl_estimate(x, ref, mask, estimator=name)
    return call(logprobs), jax.grad(lambda x: jnp.sum(weights * call(x)))(logprobs)


kl_jitted = jax.jit(lambda *arrays: {name: kl_and_gradient(*arrays, name) for name in ESTIMATORS})


@settings(max_examples=25, deadline=None)
@given(batches())
def test_kl_and_its_gradient_equal_the_loop(drawn):
    batch, mask, weights = drawn
    arrays = (batch["logprobs"], batch["ref_logprobs"], mask)
    for name, (values, gradient) in kl_jitted(*arrays, weights).items():
        expected, slopes = reference.kl_estimate(*arrays, estimator=name)
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(gradient, weights * slopes, rtol=1e-4, atol=1e-6, err_msg=name)


# --- token_weights --------------------------------------------------------------------------------------------------


def all_weights(mask, valid, segment_ids):
    return {
        (over, packed): algos.token_weights(
            mask, over=over, length=9, valid=valid, segment_ids=segment_ids if packed else None
        )
        for over in OVERS
        for packed in (False, True)
    }


all_weights_jitted = jax.jit(all_weights)


@settings(max_examples=25, deadline=None)
@given(batches(), st.lists(st.booleans(), min_size=4, max_size=4))
def test_weights_equal_the_loop_and_sum_to_what_their_name_says(drawn, valid):
    batch, mask, _ = drawn
    kept = mask & np.array(valid)[:, None]
    for (over, packed), got in all_weights_jitted(mask, np.array(valid), batch["segment_ids"]).items():
        segment_ids = batch["segment_ids"] if packed else None
        expected = reference.token_weights(mask, over=over, length=9, valid=valid, segment_ids=segment_ids)
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=over)
        assert (np.asarray(got)[~kept] == 0).all()
        tokens, found = int(kept.sum()), len(reference.sequences(kept, segment_ids))
        total = {
            "token-mean": 1.0,
            "seq-mean-token-mean": 1.0,
            "seq-mean-token-sum": tokens / max(found, 1),
            "seq-mean-token-sum-norm": tokens / max(found, 1) / 9,
        }[over]
        assert float(got.sum()) == pytest.approx(total if tokens else 0.0, rel=1e-5)


def test_weights_by_hand():
    mask = jnp.array([[True, True, True, True], [True, False, False, False], [False] * 4])  # the third does not count
    expected = {
        "token-mean": (1 / 5, 1 / 5),
        "seq-mean-token-mean": (1 / 8, 1 / 2),
        "seq-mean-token-sum": (1 / 2, 1 / 2),
        "seq-mean-token-sum-norm": (1 / 20, 1 / 20),
    }
    for over, (first, second) in expected.items():
        got = algos.token_weights(mask, over=over, length=10)
        np.testing.assert_allclose(got, [[first] * 4, [second, 0, 0, 0], [0] * 4], rtol=1e-6)
        without = algos.token_weights(mask, over=over, length=10, valid=jnp.array([False, True, True]))
        alone = algos.token_weights(mask[1:], over=over, length=10)
        np.testing.assert_allclose(without, np.vstack([np.zeros((1, 4)), alone]))


@pytest.mark.parametrize("over", OVERS)
def test_microbatches_cut_after_the_weights_add_up_exactly(over):
    # 16 tokens in 4 sequences of 8, 4, 2 and 2: every weight and every sum is exact in float32.
    lengths = np.array([8, 4, 2, 2])
    mask = jnp.asarray(np.arange(8)[None] < lengths[:, None])
    terms = f32(np.random.default_rng(8).integers(-9, 9, size=(4, 8)))
    weights = algos.token_weights(mask, over=over, length=16)
    whole = jnp.sum(weights * terms)
    for parts in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 3, 2], [1]]):
        cuts = [np.array(rows) for rows in parts]
        assert sum(jnp.sum(weights[rows] * terms[rows]) for rows in cuts) == whole
    # Weights taken per microbatch and averaged are something else, unless every row has the same weight.
    per_part = [algos.token_weights(mask[n : n + 1], over=over, length=16) for n in range(4)]
    averaged = sum(jnp.sum(per_part[n] * terms[n : n + 1]) for n in range(4)) / 4
    assert (float(averaged) == float(whole)) == (over != "token-mean")


# --- pass@k ---------------------------------------------------------------------------------------------------------


def test_pass_at_k_by_hand():
    assert algos.pass_at_k(10, 3, 5) == pytest.approx(0.916667, abs=5e-7)
    assert algos.pass_at_k(10, 3, 1) == pytest.approx(0.3, rel=1e-15)
    assert algos.pass_at_k(10, 1, 10) == 1.0
    assert algos.pass_at_k(10, 6, 5) == 1.0
    nothing = algos.pass_at_k(10, 0, 5)
    assert (nothing, math.copysign(1.0, nothing)) == (0.0, 1.0)  # and not −0.0, which prints as -0.000


@pytest.mark.parametrize("samples", [10, 128, 10_000])
def test_pass_at_k_equals_exact_rational_arithmetic(samples):
    for correct in {0, 1, 3, samples // 2, samples - 10, samples}:
        for k in {1, 8, samples // 10, samples - 1, samples}:
            exact = float(reference.pass_at_k(samples, correct, k))
            assert algos.pass_at_k(samples, correct, k) == pytest.approx(exact, rel=1e-12, abs=0.0)


def test_pass_at_k_is_unbiased():
    for p in (0.3, 0.05):
        for k in (1, 5, 32):
            chances = [math.comb(40, c) * p**c * (1 - p) ** (40 - c) for c in range(41)]
            expected = math.fsum(q * algos.pass_at_k(40, c, k) for c, q in enumerate(chances))
            assert expected == pytest.approx(1 - (1 - p) ** k, rel=1e-12)


def test_a_sharper_policy_loses_at_large_k():
    def mean(probabilities, k):
        # p = c / n with n so large that drawing without replacement is drawing with it
        n = 10_000_000
        return sum(algos.pass_at_k(n, round(p * n), k) for p in probabilities) / 2

    base, sharp = (0.3, 0.05), (0.9, 0.0)
    assert (mean(base, 1), mean(sharp, 1)) == pytest.approx((0.175, 0.45), abs=1e-6)
    assert (mean(base, 32), mean(sharp, 32)) == pytest.approx((0.903139, 0.5), abs=2e-6)
    assert (mean(base, 5), mean(sharp, 5)) == pytest.approx((0.529075, 0.499995), abs=1e-6)
    assert [k for k in range(1, 33) if mean(base, k) > mean(sharp, k)] == list(range(5, 33))


@pytest.mark.parametrize("given", [(10, 11, 5), (10, -1, 5), (10, 3, 0), (10, 3, 11), (0, 0, 1)])
def test_pass_at_k_errors(given):
    with pytest.raises(ValueError, match=f"n={given[0]}, c={given[1]}, k={given[2]}"):
        algos.pass_at_k(*given)


def test_share_of_groups_with_one_outcome():
    assert algos.same_outcome_share(1 / 64, 16) == pytest.approx(0.777265, abs=5e-7)
    for p, size in ((0.3, 4), (0.5, 8)):
        mixed = sum(math.comb(size, c) * p**c * (1 - p) ** (size - c) for c in range(1, size))
        assert algos.same_outcome_share(p, size) == pytest.approx(1 - mixed, rel=1e-12)
    assert algos.same_outcome_share(0.0, 8) == algos.same_outcome_share(1.0, 8) == 1.0


# --- transforms, presets, docs --------------------------------------------------------------------------------------


def everything(logprobs, old, returns, mask):
    """A whole GRPO loss from the public parts."""
    advantages = algos.group_advantages(returns, group_size=2)
    weights = algos.token_weights(mask, over="seq-mean-token-mean")
    token_advantages = jnp.broadcast_to(advantages[:, None], mask.shape)
    losses = algos.clipped_surrogate(logprobs, old, token_advantages, mask, level="sequence")
    return jnp.sum(weights * (losses + 0.1 * algos.kl_estimate(logprobs, old, mask)))


def test_jit_vmap_and_plain_calls_agree():
    rng = np.random.default_rng(9)
    logprobs, old = (f32(rng.normal(size=(3, 4, 5)) * 0.3) for _ in range(2))
    returns, mask = f32(rng.normal(size=(3, 4))), jnp.asarray(rng.random((3, 4, 5)) < 0.7)
    jitted = jax.jit(jax.value_and_grad(everything))
    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(everything)))(logprobs, old, returns, mask)
    for n in range(3):
        value, gradient = jitted(logprobs[n], old[n], returns[n], mask[n])
        assert float(values[n]) == pytest.approx(float(value), rel=1e-5)
        np.testing.assert_allclose(gradients[n], gradient, rtol=1e-4, atol=1e-7)
    assert float(everything(logprobs[0], old[0], returns[0], mask[0])) == pytest.approx(float(values[0]), rel=1e-5)


def test_presets_are_frozen_and_name_parts_that_exist():
    for name, preset in algos.PRESETS.items():
        assert hash(preset) is not None
        assert preset.loss_agg_mode in OVERS, name
        assert preset.importance_sampling_level in (*LEVELS, "sequence-sum"), name
        assert preset.scale_rewards in ("group", "batch", "none"), name
        with pytest.raises(dataclasses.FrozenInstanceError):
            preset.epsilon = 0.3
    assert {choice["loss_agg_mode"] for choice in algos.LOSS_TYPES.values()} <= set(OVERS)
    for choice in algos.LOSS_TYPES.values():
        algos.Preset(**choice)
    dr_grpo, dapo = algos.PRESETS["dr_grpo"], algos.PRESETS["dapo"]
    assert (dr_grpo.scale_rewards, dr_grpo.loss_agg_mode) == ("none", "seq-mean-token-sum-norm")
    assert (dapo.epsilon, dapo.epsilon_high, dapo.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert algos.PRESETS["grpo"].loss_agg_mode == "seq-mean-token-mean"


def test_the_pages_on_algorithms_name_every_public_function_and_preset():
    docs = Path(__file__).parents[1] / "docs"
    page = "".join((docs / f"{name}.md").read_text() for name in ("algorithms", "preferences", "reward_models"))
    names = {*algos.__all__, *algos.PRESETS, *algos.LOSS_TYPES, *OVERS, *LEVELS, *ESTIMATORS} - {"Preset", "Surrogate"}
    assert [name for name in sorted(names) if f"`{name}`" not in page and f"`{name}(" not in page] == []
