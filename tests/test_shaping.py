"""Advantages from steps and turns, and rewards from lengths and probabilities: loops, exact values, identities."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_advantages as loops
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm.algos import process, shaping
from jaxrl_lm.algos.advantages import group_advantages

SHAPE, GROUP = (6, 7), 3
POISON = (math.nan, math.inf, -math.inf)
CREDITS = ("sum-to-go", "mean", "min", "product", "last")
SCALES = ("group", "batch", "none")
STEPS = [("group", credit) for credit in CREDITS] + [("batch", "sum-to-go"), ("none", "sum-to-go"), ("batch", "min")]
TURNS = (("group", 1.0), ("batch", 0.7), ("none", 0.7))


def f32(x):
    return jnp.asarray(x, jnp.float32)


@st.composite
def batches(draw):
    row = st.sampled_from([(0,) * 7, (1,) * 7, (0, 1, 1, 0, 1, 1, 1), (0, 0, 0, 1, 0, 0, 0)])
    mask = np.array([draw(row | st.tuples(*[st.integers(0, 1)] * 7)) for _ in range(SHAPE[0])], bool)
    flags = st.lists(st.booleans(), min_size=SHAPE[0], max_size=SHAPE[0])
    valid = np.array(draw(st.just([True] * SHAPE[0]) | flags | st.just([False] * SHAPE[0])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["real", "binary", "equal", "large"]))
    numbers = lambda shape: {
        "real": rng.normal(size=shape), "binary": rng.integers(0, 2, size=shape), "equal": np.full(shape, 0.1),
        "large": rng.normal(size=shape) * 1e6,
    }[kind]  # fmt: skip
    poison = draw(st.sampled_from(POISON))
    ends = rng.random(SHAPE) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    seen = mask & valid[:, None]
    ids = np.cumsum(rng.random(SHAPE) < 0.4, axis=1).astype(np.int32)  # 0 at first: no turn
    arrays = {
        "steps": np.where(seen & ends, numbers(SHAPE), poison),
        "turns": np.where(seen & (ids > 0), numbers(SHAPE), poison),
        "chances": np.where(seen & ends, 0.5 + 0.1 * rng.integers(-5, 6, size=SHAPE), poison),
        "outcome": np.where(valid, numbers(SHAPE[0]), poison),
        "logprobs": np.where(valid, rng.integers(-4, 0, size=SHAPE[0]) * 25.0, poison),
    }
    lengths = rng.integers(1, 1 + draw(st.sampled_from([1, 5])), size=SHAPE[0]).astype(np.int32)
    return {name: x.astype(np.float32) for name, x in arrays.items()}, mask, valid, ends, ids, lengths


def results(functions, arrays, mask, valid, ends, ids, lengths):
    """By name: advantages of tokens, then rewards of rows."""
    process, turns, length, unlikely = functions
    group = {"group_size": GROUP, "valid": valid}
    tokens = {}
    for scale, credit in STEPS:
        steps = arrays["chances" if credit == "product" else "steps"]
        tokens[f"{scale} {credit}"] = process(steps, ends, arrays["outcome"], mask, scale=scale, credit=credit, **group)
    for scale, discount in TURNS:
        tokens[f"{scale} turns"] = turns(arrays["turns"], ids, mask, scale=scale, discount=discount, **group)
    return tokens, {
        "length": length(arrays["outcome"], lengths, **group),
        "unlikely": unlikely(arrays["outcome"], arrays["logprobs"], beta=0.25, **group),
    }


OURS = (process.process_advantages, process.turn_advantages, shaping.length_penalty, shaping.unlikeliness_rewards)
LOOPS = (loops.process, loops.turns, loops.length_penalty, loops.unlikeliness)


def compute(*drawn):
    tokens, rows = results(OURS, *drawn)
    return sum(jnp.sum(x) for x in [*tokens.values(), *rows.values()]), (tokens, rows)


computed = jax.jit(jax.value_and_grad(compute, has_aux=True))


@settings(max_examples=25, deadline=None)
@given(batches())
def test_every_function_equals_its_loop_and_poison_leaves_no_trace(drawn):
    _, mask, valid, ends, ids, _ = drawn
    (_, got), slopes = computed(*drawn)
    for part, wanted in zip(got, results(LOOPS, *drawn), strict=True):
        assert part.keys() == wanted.keys()
        for name, value in part.items():
            # Sums along a row that come near each other in float32 differ in it, and the std divides that difference.
            bound = 1e-5 * max(1.0, np.abs(wanted[name]).max())
            np.testing.assert_allclose(value, wanted[name], rtol=1e-4, atol=20 * bound, err_msg=name)
    for name, value in got[0].items():
        assert (np.asarray(value)[~(mask & valid[:, None])] == 0).all(), name
    steps = mask & valid[:, None] & ends
    read = {"steps": steps, "chances": steps, "turns": mask & valid[:, None] & (ids > 0)}
    for name, slope in slopes.items():
        assert np.isfinite(slope).all(), name
        assert (np.asarray(slope)[~read.get(name, valid)] == 0).all(), name


process_advantages = jax.jit(process.process_advantages, static_argnames=("group_size", "scale", "credit"))
turn_advantages = jax.jit(process.turn_advantages, static_argnames=("group_size", "scale", "discount"))
length_penalty = jax.jit(shaping.length_penalty, static_argnames="group_size")
unlikeliness_rewards = jax.jit(shaping.unlikeliness_rewards, static_argnames=("group_size", "beta"))


# --- steps ----------------------------------------------------------------------------------------------------------


def two_rows():
    """Steps 1, 0 | 0, 0 that end at columns 1 and 3, tokens after them; four steps: mean ¼, std ½."""
    mask = jnp.array([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0]], bool)
    ends = jnp.array([[0, 1, 0, 1, 0], [0, 1, 1, 1, 1]], bool)  # off the mask an end is none
    rewards = f32([[9, 1, 9, 0, 9], [9, 0, 99, 0, math.nan]])
    return rewards, ends, mask


def test_steps_by_hand():
    rewards, ends, mask = two_rows()
    got = process_advantages(rewards, ends, f32([0, 0]), mask, group_size=2)
    np.testing.assert_allclose(got, [[1, 1, -0.5, -0.5, 0], [-1, -1, 0, -0.5, 0]], atol=1e-5)
    centred = process_advantages(rewards, ends, f32([0, 0]), mask, group_size=2, scale="none")
    np.testing.assert_allclose(centred, [[0.5, 0.5, -0.25, -0.25, 0], [-0.5, -0.5, 0, -0.25, 0]], atol=1e-6)


def test_the_mean_of_a_rows_steps_by_hand():
    """Each of the normalised steps 1.5, −0.5 | −0.5, −0.5 over its row's two; a row of one step alone keeps it whole."""
    rewards, ends, mask = two_rows()
    got = inspect.unwrap(process.process_advantages)(rewards, ends, f32([0, 0]), mask, group_size=2, step_mean=True)
    np.testing.assert_allclose(got, [[0.5, 0.5, -0.25, -0.25, 0], [-0.5, -0.5, 0, -0.25, 0]], atol=1e-5)
    ends = ends.at[1, 3].set(False)  # 1, 0 | 0: mean ⅓, std √⅓
    got = process.process_advantages(rewards, ends, f32([0, 0]), mask, group_size=2, scale="none", step_mean=True)
    np.testing.assert_allclose(got, [[1 / 6, 1 / 6, -1 / 6, -1 / 6, 0], [-1 / 3, -1 / 3, 0, 0, 0]], atol=1e-6)
    with pytest.raises(ValueError, match="step_mean with credit='min'"):
        process.process_advantages(rewards, ends, f32([0, 0]), mask, group_size=2, credit="min", step_mean=True)


def test_weights_come_after_the_normalisation():
    rewards, ends, mask = two_rows()
    given = (rewards, ends, f32([1, 0]), mask)
    part = lambda outcome, steps: process.process_advantages(
        *given, group_size=2, outcome_weight=outcome, step_weight=steps
    )
    np.testing.assert_allclose(part(3.0, 0.25), 3.0 * part(1.0, 0.0) + 0.25 * part(0.0, 1.0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(part(1.0, 1.0), process.process_advantages(*given, group_size=2))


def test_the_outcome_is_added_at_every_token_those_after_the_steps_too():
    rewards, ends, mask = two_rows()
    outcome = f32([1, 0])
    with_outcome = process_advantages(rewards, ends, outcome, mask, group_size=2)
    without = process_advantages(rewards, ends, f32([0, 0]), mask, group_size=2)
    whole = group_advantages(outcome, group_size=2)[:, None]
    np.testing.assert_allclose(with_outcome, jnp.where(mask, without + whole, 0.0), atol=1e-6)
    assert float(with_outcome[0, 4]) == pytest.approx(float(whole[0, 0]))
    none = process_advantages(rewards, jnp.zeros_like(ends), outcome, mask, group_size=2)
    np.testing.assert_allclose(none, jnp.where(mask, whole, 0.0), atol=1e-7)


def test_one_step_at_the_last_token_is_outcome_supervision():
    """Process supervision with a single step a completion is the outcome case of the same paper."""
    scores, mask = f32([0.3, -1.2, 2.0, 0.1]), jnp.asarray(np.arange(5)[None] < np.array([[5], [2], [3], [1]]))
    last = jnp.asarray(np.arange(5)[None] == np.array([[4], [1], [2], [0]]))
    rewards = jnp.where(last, scores[:, None], jnp.nan)
    expected = jnp.where(mask, group_advantages(scores, group_size=4)[:, None], 0.0)
    for credit in CREDITS:
        got = process_advantages(rewards, last, jnp.zeros(4), mask, group_size=4, credit=credit)
        np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=credit)


def test_credits_of_one_number_a_completion():
    rewards, mask = f32([[0.5, 0.8, 0.1], [0.9, 0.4, 7], [7, 7, 7]]), jnp.ones((3, 3), bool)
    ends = jnp.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]], bool)  # the third has no step, and no part in the statistic
    numbers = {"mean": (1.4 / 3, 0.65), "min": (0.1, 0.4), "product": (0.04, 0.36), "last": (0.1, 0.4)}
    for credit, (one, other) in numbers.items():
        got = process_advantages(rewards, ends, jnp.zeros(3), mask, group_size=3, scale="none", credit=credit)
        expected = np.array([one - other, other - one, 0])[:, None] / 2
        np.testing.assert_allclose(got, np.broadcast_to(expected, (3, 3)), atol=1e-6, err_msg=credit)


def test_rows_of_the_same_steps_have_no_spread_however_many_they_are():
    ends = jnp.asarray(np.arange(7)[None] < np.array([[1], [3], [7]]))
    got = process_advantages(jnp.full((3, 7), 0.1), ends, jnp.zeros(3), ends, group_size=3, credit="mean")
    assert (got == 0).all()


# --- turns ----------------------------------------------------------------------------------------------------------


def test_turns_by_hand():
    """Row 0: turns that pay 1, 2; row 1: 3; row 2: 1, 0, 5. To-go at γ = ½: 2, 2 | 3 | 2¼, 2½, 5."""
    ids = jnp.array([[1, 1, 2, 2, 0], [1, 0, 0, 0, 0], [1, 2, 2, 3, 3]])
    mask = jnp.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
    rewards = f32([[0, 1, 2, 0, 9], [3, 9, 9, 9, 9], [1, 0, 0, 2, 3]])
    got = turn_advantages(rewards, ids, mask, group_size=3, scale="none", discount=0.5)
    first, second = np.array([2, 3, 2.25]) - 7.25 / 3, 0.25
    expected = [
        [first[0], first[0], -second, -second, 0],
        [first[1], 0, 0, 0, 0],  # its second token is no turn's
        [first[2], second, second, 0, 0],  # nobody else has a third turn
    ]
    np.testing.assert_allclose(got, expected, atol=1e-6)
    scaled = turn_advantages(rewards, ids, mask, group_size=3, discount=0.5)
    std = np.std([2, 3, 2.25], ddof=1)
    np.testing.assert_allclose(scaled[:, 0], first / std, atol=1e-5)
    np.testing.assert_allclose(scaled[2, 1:], np.array([1, 1, 0, 0]) / math.sqrt(2), atol=1e-5)
    fewer = turn_advantages(rewards, ids, mask, group_size=3, discount=0.5, valid=jnp.array([True, True, False]))
    np.testing.assert_allclose(fewer[:, 0], np.array([-1, 1, 0]) / math.sqrt(2), atol=1e-5)
    assert (fewer[:, 1:].at[0, 0].set(0) == 0).all()


def test_one_turn_is_a_group_of_returns():
    scores, mask = f32([0.3, -1.2, 2.0, 0.1, 1, 0, 0, 1]), jnp.ones((8, 4), bool)
    rewards = jnp.zeros((8, 4)).at[:, 3].set(scores)
    for scale in SCALES:
        got = turn_advantages(rewards, jnp.ones((8, 4), int), mask, group_size=4, scale=scale)
        expected = group_advantages(scores, group_size=4, scale=scale)[:, None]
        np.testing.assert_allclose(got, jnp.broadcast_to(expected, (8, 4)), atol=1e-6, err_msg=scale)


def test_permuting_groups_permutes_and_padding_changes_nothing():
    rng = np.random.default_rng(3)
    rewards, mask = f32(rng.normal(size=(6, 5))), jnp.asarray(rng.random((6, 5)) < 0.8)
    ids, ends = jnp.asarray(np.tile([1, 1, 2, 2, 3], (6, 1))), jnp.asarray(rng.random((6, 5)) < 0.5)
    outcome, order = f32(rng.normal(size=6)), np.array([3, 4, 5, 0, 1, 2])
    pad = lambda x: jnp.pad(x, ((0, 0), (1, 2)), constant_values=jnp.nan if x.dtype == jnp.float32 else 0)
    both = lambda r, e, o, m, i: (
        process_advantages(r, e, o, m, group_size=3),
        turn_advantages(r, i, m, group_size=3, discount=0.9),
    )
    plain = both(rewards, ends, outcome, mask, ids)
    moved = both(rewards[order], ends[order], outcome[order], mask[order], ids[order])
    padded = both(pad(rewards), pad(ends), outcome, pad(mask), pad(ids))
    for one, other, wide in zip(plain, moved, padded, strict=True):
        assert np.abs(one).max() > 0.5
        np.testing.assert_allclose(other, one[order], atol=1e-6)
        np.testing.assert_allclose(wide[:, 1:-2], one, atol=1e-5)


# --- lengths and probabilities --------------------------------------------------------------------------------------


def test_overlong_penalty():
    """DAPO's setting: 20480 tokens, of which the last 4096 are the cache."""
    lengths = jnp.array([1, 16384, 16385, 18432, 20480, 30000])
    got = shaping.overlong_penalty(lengths, max_length=20480, cache=4096)
    np.testing.assert_allclose(got, [0, 0, -1 / 4096, -0.5, -1, -1], atol=1e-7)
    whole = shaping.overlong_penalty(jnp.array([0, 5, 10]), max_length=10, cache=10)
    np.testing.assert_allclose(whole, [0, -0.5, -1])
    for cache in (0, 11, -1):
        with pytest.raises(ValueError, match=f"cache={cache}: .*max_length=10"):
            shaping.overlong_penalty(lengths, max_length=10, cache=cache)


def test_length_penalty():
    returns, lengths = f32([1, 1, 1, 0, 0, 0, *[1] * 6]), jnp.array([10, 20, 30, 10, 20, 30, *[7] * 6])
    got = length_penalty(returns, lengths, group_size=6)
    np.testing.assert_allclose(got, [0.5, 0, -0.5, 0, 0, -0.5, *[0] * 6], atol=1e-6)
    valid = jnp.arange(12) != 2  # the longest right one abstains; lengths still run from 10 to 30
    assert length_penalty(returns, lengths, group_size=6, valid=valid)[2] == 0


def test_improbable_right_answers_keep_more():
    returns, logprobs = f32([1, 1, 1, 0]), f32([-1, -3, -2, -0.5])  # ranks 1, 3, 2, 0
    got = unlikeliness_rewards(returns, logprobs, group_size=4, beta=0.4)
    np.testing.assert_allclose(got, [1 - 0.4 * 3 / 4, 1 - 0.4 / 4, 1 - 0.4 * 2 / 4, 0], rtol=1e-6)
    tied = unlikeliness_rewards(f32([1, 1, 0, 1]), f32([-2, -2, -2, -9]), group_size=4, beta=0.4)
    np.testing.assert_allclose(tied, [0.7, 0.7, 0, 0.9], rtol=1e-6)  # ranks 1, 1, 1, 3
    assert unlikeliness_rewards(returns, logprobs, group_size=4, beta=0.0).tolist() == returns.tolist()


def test_errors():
    x, mask, ids = jnp.zeros((6, 3)), jnp.ones((6, 3), bool), jnp.ones((6, 3), int)
    steps = lambda **options: inspect.unwrap(process.process_advantages)(x, mask, x[:, 0], mask, **options)
    turn = lambda **options: inspect.unwrap(process.turn_advantages)(x, ids, mask, **options)
    for function in (steps, turn):
        with pytest.raises(ValueError, match="group_size=1"):
            function(group_size=1)
        with pytest.raises(ValueError, match="6 rows are not a multiple of group_size=4"):
            function(group_size=4)
        with pytest.raises(ValueError, match="scale='std' is unknown"):
            function(group_size=3, scale="std")
    with pytest.raises(ValueError, match="credit='sum' is unknown: use sum-to-go, mean, min, product or last"):
        steps(group_size=3, credit="sum")
    for function in (shaping.length_penalty, lambda r, n, **o: shaping.unlikeliness_rewards(r, r, beta=0.1, **o)):
        with pytest.raises(ValueError, match="6 rows are not a multiple of group_size=4"):
            function(x[:, 0], ids[:, 0], group_size=4)
