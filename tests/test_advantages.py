"""Advantages of completions and the groups they come from: loops, exact values, enumeration, identities."""

import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_advantages as loops
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_lm import algos, masked
from jaxrl_lm.algos import advantages, groups

POISON = (math.nan, math.inf, -math.inf)
DROPS = ("none", "all-wrong", "all-right", "equal")


def f32(x):
    return jnp.asarray(x, jnp.float32)


def compiled(function):
    """The function as one program: by itself each of its operations would be compiled."""
    numbers = ("group_size", "scale", "ddof", "eps", "k", "threshold", "baseline", "drop", "limit", "axis")
    return jax.jit(function, static_argnames=[n for n in inspect.signature(function).parameters if n in numbers])


accepted_advantages = compiled(advantages.accepted_advantages)
batch_whitened_advantages = compiled(advantages.batch_whitened_advantages)
constant_baseline_advantages = compiled(advantages.constant_baseline_advantages)
greedy_baseline_advantages = compiled(advantages.greedy_baseline_advantages)
group_advantages = compiled(advantages.group_advantages)
leave_one_out_advantages = compiled(advantages.leave_one_out_advantages)
max_rl_advantages = compiled(advantages.max_rl_advantages)
pass_at_k_advantages = compiled(advantages.pass_at_k_advantages)
mixed_groups = compiled(groups.mixed_groups)
outlier_rows = compiled(groups.outlier_rows)
whiten = compiled(masked.whiten)


# --- everything against its loop ------------------------------------------------------------------------------------


def compute(returns, other, valid, group_size):
    """Every function of rows, by name; the first dictionary has gradients."""
    group = {"group_size": group_size, "valid": valid}
    smooth = {
        "leave one out": leave_one_out_advantages(returns, **group) if group_size > 1 else jnp.zeros(returns.shape),
        "max rl": max_rl_advantages(returns, **group),
        "greedy": greedy_baseline_advantages(returns, other, valid=valid),
        "constant": constant_baseline_advantages(returns, baseline=0.45, valid=valid),
        "whitened": masked.whiten(returns, valid),
        "whitened, mean kept": masked.whiten(returns, valid, shift_mean=False, ddof=0),
    }
    steps = {f"pass@{k}": pass_at_k_advantages(returns, k=k, **group) for k in {1, min(2, group_size), group_size}}
    steps |= {f"drop {drop}": mixed_groups(returns, drop=drop, **group) for drop in DROPS}
    steps["accepted"] = accepted_advantages(returns, valid=valid)
    steps["outliers"] = outlier_rows(returns, limit=1.5, valid=valid)
    return smooth, steps


def expect(returns, other, valid, group_size):
    group, where = {"group_size": group_size, "valid": valid}, lambda x: np.where(valid, x, 0.0)
    real, greedy = (np.where(valid, x, 0.0).astype(float) for x in (returns, other))
    smooth = {
        "leave one out": loops.leave_one_out(real, **group),
        "max rl": loops.max_rl(real, **group),
        "greedy": real - greedy,
        "constant": where(real - 0.45),
        "whitened": loops.whiten(returns, valid),
        "whitened, mean kept": loops.whiten(returns, valid, shift_mean=False, ddof=0),
    }
    steps = {f"pass@{k}": loops.pass_at_k(real, k=k, **group) for k in {1, min(2, group_size), group_size}}
    steps |= {f"drop {drop}": loops.mixed(real, drop=drop, **group) for drop in DROPS}
    steps["accepted"] = where(real >= 0.5)
    steps["outliers"] = loops.outliers(real, limit=1.5, valid=valid)
    return smooth, steps


computed = jax.jit(compute, static_argnums=3)
total = lambda *args: sum(jnp.sum(x) for x in compute(*args)[0].values())
gradients = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=3)


@st.composite
def rows(draw, size=12):
    values = st.sampled_from([0.0, 1.0, 0.1, 1e6]) | st.floats(0, 5, width=32, allow_subnormal=False)
    kind = st.sampled_from([[0.0] * size, [1.0] * size, [0.1] * size]) | st.lists(values, min_size=size, max_size=size)
    kind = kind | st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size)
    flags = st.lists(st.booleans(), min_size=size, max_size=size)
    valid = np.array(draw(st.just([True] * size) | flags | st.just([False] * size)))
    poison = lambda x: np.where(valid, np.array(x), draw(st.sampled_from(POISON))).astype(np.float32)
    return poison(draw(kind)), poison(draw(kind)), valid


@settings(max_examples=30, deadline=None)
@given(rows(), st.sampled_from([1, 4, 12]))
def test_every_function_equals_its_loop_and_invalid_rows_leave_no_trace(drawn, group_size):
    arrays = tuple(jnp.asarray(x) for x in drawn)
    got, expected = computed(*arrays, group_size), expect(*drawn, group_size)
    for part, wanted in zip(got, expected, strict=True):
        assert part.keys() == wanted.keys()
        for name, value in part.items():
            bound = 1e-6 * max(1.0, np.abs(wanted[name]).max())  # float32 against the largest of the batch
            np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=3 * bound, err_msg=name)
            if value.shape == drawn[2].shape:
                assert (np.asarray(value)[~drawn[2]] == 0).all(), name
    for gradient in gradients(*arrays, group_size):
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[~drawn[2]] == 0).all()


@pytest.mark.parametrize("size", range(2, 10))
def test_groups_of_every_size(size):
    rng = np.random.default_rng(size)
    returns = (rng.random(3 * size) < 0.4).astype(np.float32)
    returns[:2], returns[-size:] = (0, 1), 1.0

    def every(r):
        steps = {k: pass_at_k_advantages(r, group_size=size, k=k) for k in range(1, size + 1)}
        return (
            leave_one_out_advantages(r, group_size=size),
            group_advantages(r, group_size=size, scale="none"),
            steps,
        )

    left, centred, steps = jax.jit(every)(returns)
    np.testing.assert_allclose(left, loops.leave_one_out(returns, group_size=size), atol=1e-6)
    np.testing.assert_allclose(left, size / (size - 1) * centred, atol=1e-6)
    for k, got in steps.items():
        np.testing.assert_allclose(got, loops.pass_at_k(returns, group_size=size, k=k), rtol=1e-5, atol=1e-6)


# --- exact values ---------------------------------------------------------------------------------------------------

RLOO = {1: (1.0, -0.2), 2: (0.8, -0.4), 3: (0.6, -0.6), 4: (0.4, -0.8), 5: (0.2, -1.0)}  # right, wrong


@pytest.mark.parametrize("right", range(7))
def test_six_responses(right):
    returns = f32([1] * right + [0] * (6 - right))
    good, bad = RLOO.get(right, (0.0, 0.0))
    got = leave_one_out_advantages(returns, group_size=6)
    np.testing.assert_allclose(got, [good] * right + [bad] * (6 - right), atol=1e-6)


def test_one_of_two_right_by_hand():
    """n = 4, c = 1, k = 2: R = 1 − 3/6 = 1/2, σ = 1/2; right 1, wrong (1/2 − C(2,1)/C(3,1)) / (1/2) = −1/3."""
    got = pass_at_k_advantages(f32([0, 1, 0, 0]), group_size=4, k=2)
    np.testing.assert_allclose(got, [-1 / 3, 1, -1 / 3, -1 / 3], rtol=1e-6)


def test_pass_at_k_is_the_mean_over_subsets():
    """A row's advantage is the mean of (subset's reward − R) / σ over the subsets that it is in."""
    returns, k = [1, 0, 0, 1, 0, 0, 0], 3
    subsets = list(itertools.combinations(range(7), k))
    rewards = np.array([float(any(returns[n] for n in subset)) for subset in subsets])
    standard = (rewards - rewards.mean()) / rewards.std()
    expected = [np.mean([s for s, subset in zip(standard, subsets, strict=True) if n in subset]) for n in range(7)]
    np.testing.assert_allclose(pass_at_k_advantages(f32(returns), group_size=7, k=k), expected, rtol=1e-5)


@pytest.mark.parametrize("right", range(9))
def test_pass_at_one_is_grpo_with_the_population_std(right):
    returns = f32([1] * right + [0] * (8 - right))
    got = pass_at_k_advantages(returns, group_size=8, k=1)
    np.testing.assert_allclose(got, group_advantages(returns, group_size=8, ddof=0, eps=0.0), atol=1e-6)


def test_pass_at_k_with_many_samples():
    for k, right in ((256, 1), (256, 7), (512, 300), (1024, 3), (64, 900)):
        returns = np.array([1] * right + [0] * (1024 - right), np.float32)
        expected = loops.pass_at_k(returns, group_size=1024, k=k)
        np.testing.assert_allclose(pass_at_k_advantages(f32(returns), group_size=1024, k=k), expected, rtol=2e-4)


def test_pass_at_k_counts_valid_rows_only():
    returns, valid = f32([1, 0, 0, math.nan, 1, 0, math.inf, 0]), jnp.array([1, 1, 1, 0, 1, 0, 0, 0], bool)
    got = pass_at_k_advantages(returns, group_size=4, k=2, valid=valid)
    np.testing.assert_allclose(got[:3], pass_at_k_advantages(f32([1, 0, 0]), group_size=3, k=2), rtol=1e-6)
    assert got[3:].tolist() == [0.0] * 5  # the second group has fewer than k


def test_max_rl_weighs_a_group_by_the_inverse_of_its_success():
    got = max_rl_advantages(f32([1, 0, 0, 0, *[1, 1, 1, 0], *[0] * 4, *[1] * 4]), group_size=4)
    np.testing.assert_allclose(got, [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, *[0] * 8], rtol=1e-6)


def test_rows_without_an_opinion_leave_the_baseline():
    returns, valid = f32([1, 0, 0, 99, 7, math.nan, -3, 8]), jnp.array([1, 1, 1, 0, 1, 0, 0, 0], bool)
    got = leave_one_out_advantages(returns, group_size=4, valid=valid)
    np.testing.assert_allclose(got, [1, -0.5, -0.5, 0, 0, 0, 0, 0], atol=1e-7)  # and a row alone has no baseline


def test_dropped_groups():
    returns = f32([0, 0, 0.2, 0, 1, 1, 1, 0.7, 1, 0])
    kept = {drop: mixed_groups(returns, group_size=2, drop=drop).reshape(-1, 2)[:, 0].tolist() for drop in DROPS}
    assert kept["none"] == [True] * 5
    assert kept["equal"] == [False, True, False, True, True]
    assert kept["all-wrong"] == [False, False, True, True, True]
    assert kept["all-right"] == [True, True, False, False, True]
    lone = mixed_groups(f32([1, 0]), group_size=2, valid=jnp.array([True, False]))
    assert lone.tolist() == [False, False]


def test_outliers():
    values = f32([1, 2, 3, 4, 5, 1e4, math.nan])  # median 3.5, MAD 1.5: the bound is 6.67
    valid = jnp.arange(7) < 6
    assert outlier_rows(values, limit=3.0, valid=valid).tolist() == [False] * 5 + [True, False]
    assert not outlier_rows(f32([1, 1, 1, 1, 50]), limit=3.0).any()  # a MAD of 0 says nothing
    assert outlier_rows(f32([0, 1, 2, -math.inf]), limit=3.0).tolist() == [False] * 3 + [True]


def test_whitened_tokens():
    x, mask = f32([[1, 2, math.nan], [3, math.inf, 6]]), jnp.array([[1, 1, 0], [1, 0, 1]], bool)
    got = batch_whitened_advantages(x, mask)
    np.testing.assert_allclose(got[mask], (np.array([1, 2, 3, 6]) - 3) / np.std([1, 2, 3, 6], ddof=1), rtol=1e-6)
    assert (np.asarray(got)[~mask] == 0).all()
    assert (batch_whitened_advantages(jnp.full((2, 3), 0.1), mask, eps=0.0) == 0).all()  # no noise over noise
    alone = batch_whitened_advantages(x, mask, valid=jnp.array([True, False]))
    np.testing.assert_allclose(alone, np.array([[-1, 1, 0], [0, 0, 0]]) / math.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(whiten(x + 1e6, mask), got, atol=1e-4)
    by_row = whiten(x, mask, axis=1)
    np.testing.assert_allclose(by_row, np.array([[-1, 1, 0], [-1, 0, 1]]) / math.sqrt(2), rtol=1e-6)


def test_whitening_over_eight_devices_is_that_of_one():
    rng = np.random.default_rng(0)
    x, mask = f32(rng.normal(size=(16, 5))), jnp.asarray(rng.random((16, 5)) < 0.6)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec("data")))
    got = batch_whitened_advantages(spread(x), spread(mask))
    assert len(got.sharding.device_set) == 8
    np.testing.assert_allclose(got, batch_whitened_advantages(x, mask), atol=1e-6)


# --- unbiasedness by enumeration, in float64 ------------------------------------------------------------------------

LOGITS, REWARDS, GRADIENT = (0.4, -0.3, 0.1), (1.0, 0.2, 0.0), (0.227346, -0.064661, -0.162684)


def mean_update(function, rewards, pi, size=3):
    """The exact mean over all groups of (1/G) Σ A_i ∇ log π(a_i), for logits as parameters."""
    every = np.array(list(itertools.product(range(len(pi)), repeat=size)))
    values = np.asarray(jax.jit(jax.vmap(function))(jnp.asarray(np.array(rewards)[every], jnp.float64)))
    assert values.dtype == np.float64
    slopes = np.eye(len(pi))[every] - pi
    return np.einsum("m,mi,mia->a", np.prod(pi[every], axis=1), values, slopes) / size


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


def enumerated(function):
    """mean_update of a function of the returns of one group."""
    return mean_update(function, REWARDS, softmax(LOGITS))


def test_baselines_that_do_not_look_at_the_row_are_unbiased(double):
    pi, rewards = softmax(LOGITS), np.array(REWARDS)
    exact = pi * (rewards - pi @ rewards)
    np.testing.assert_allclose(exact, GRADIENT, atol=5e-7)
    unbiased = {
        "none": constant_baseline_advantages,
        "constant": lambda r: constant_baseline_advantages(r, baseline=0.7),
        "leave one out": lambda r: leave_one_out_advantages(r, group_size=3),
        "greedy": lambda r: greedy_baseline_advantages(r, jnp.full_like(r, REWARDS[0])),
    }
    for name, function in unbiased.items():
        np.testing.assert_allclose(enumerated(function), exact, atol=1e-12, err_msg=name)
    centred = enumerated(lambda r: group_advantages(r, group_size=3, scale="none"))
    np.testing.assert_allclose(centred, exact * 2 / 3, atol=1e-12)


def test_the_std_and_a_baseline_that_looks_change_the_direction(double):
    over_std = enumerated(lambda r: group_advantages(r, group_size=3, ddof=0))
    np.testing.assert_allclose(over_std, (0.347898, -0.066769, -0.281129), atol=5e-7)
    looking = enumerated(lambda r: greedy_baseline_advantages(r, jnp.where(r == REWARDS[0], 0.5, 0.0)))
    np.testing.assert_allclose(looking, (0.103753, -0.015062, -0.088691), atol=5e-7)


def binary_update(function, p, size):
    """d/dθ of p, of a policy with success rate p = σ(θ), as the exact mean update in units of dp/dθ = p (1 − p)."""
    return mean_update(function, (1.0, 0.0), np.array([p, 1 - p]), size)[0] / (p * (1 - p))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mean_updates_follow_their_objectives(double, p):
    plain = binary_update(lambda r: leave_one_out_advantages(r, group_size=4), p, 4)
    assert plain == pytest.approx(1.0, abs=1e-12)
    # MaxRL: Σ_{k<G} (1 − p)^k, the series of 1/p = d log p / dp; the group's mean takes away its last term.
    series = sum((1 - p) ** k for k in range(4)) - (1 - p) ** 3 * 1.0
    assert binary_update(lambda r: max_rl_advantages(r, group_size=4), p, 4) == pytest.approx(series, abs=1e-12)
    # √(p (1 − p)) below makes it 2 arcsin √p, whose derivative is 1 / √(p (1 − p)).
    root = math.sqrt(p * (1 - p))
    weight = binary_update(lambda r: constant_baseline_advantages(r, baseline=p) / root, p, 2)
    assert weight == pytest.approx({0.1: 3.3333333, 0.5: 2.0, 0.9: 3.3333333}[p], abs=1e-6)
    slope = jax.grad(lambda q: 2 * jnp.arcsin(jnp.sqrt(q)))(jnp.float64(p))
    assert weight == pytest.approx(float(slope), rel=1e-12)


# --- identities -----------------------------------------------------------------------------------------------------

GROUPED = {
    "group": group_advantages,
    "leave one out": leave_one_out_advantages,
    "max rl": max_rl_advantages,
    "pass@2": lambda r, **options: pass_at_k_advantages(r, k=2, **options),
}


@pytest.mark.parametrize("name", GROUPED)
def test_permuting_groups_or_rows_permutes_advantages(name):
    returns = np.random.default_rng(1).random(12).astype(np.float32)
    call = lambda x: np.asarray(GROUPED[name](jnp.asarray(x), group_size=4))
    order, inner = np.array([2, 0, 1]), np.array([3, 1, 0, 2])
    moved = lambda x: x.reshape(3, 4)[order][:, inner].reshape(-1)
    np.testing.assert_allclose(call(moved(returns)), moved(call(returns)), atol=1e-6)
    assert np.abs(call(returns)).max() > 0.1


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_returns_give_exactly_zero(name, value):
    got = GROUPED[name](f32([value] * 7 + [0, 0, 1, 0, 0.25, 0, 0]), group_size=7)
    assert got[:7].tolist() == [0.0] * 7
    assert np.abs(got[7:]).max() > 0


def test_a_constant_added_to_a_group_changes_nothing():
    small = np.random.default_rng(0).integers(0, 8, size=24) / 8
    large = small + np.repeat([1e6, -1e3, 0.0], 8)  # exact in float32
    call = lambda returns: leave_one_out_advantages(f32(returns), group_size=8)
    np.testing.assert_allclose(call(large), call(small), atol=1e-6)


def test_a_nan_shows_and_stays_in_its_group():
    for name in ("group", "leave one out", "max rl"):
        got = GROUPED[name](f32([1, math.nan, 0, 1]), group_size=2)
        assert np.isnan(got[:2]).all(), name
        assert np.isfinite(got[2:]).all(), name


def test_whole_numbers_and_half_precision():
    every = jax.jit(lambda x: {name: function(x, group_size=2) for name, function in GROUPED.items()})
    expected = every(f32([1, 0, 0, 1]))
    for dtype in (jnp.int32, jnp.bfloat16, bool):
        for name, got in every(jnp.array([1, 0, 0, 1], dtype)).items():
            assert got.dtype == jnp.float32, name
            assert got.tolist() == expected[name].tolist(), name


def test_jit_and_vmap_agree_with_plain_calls():
    returns = f32(np.random.default_rng(3).integers(0, 2, size=(3, 8)))
    for name, function in GROUPED.items():
        call = lambda x, function=function: function(x, group_size=4)
        np.testing.assert_allclose(
            jax.jit(jax.vmap(call))(returns), [call(row) for row in returns], atol=1e-6, err_msg=name
        )


def test_errors():
    zeros = jnp.zeros(6)
    with pytest.raises(ValueError, match="group_size=1: a group needs at least two"):
        leave_one_out_advantages(zeros, group_size=1)
    with pytest.raises(ValueError, match="group_size=0: a group needs at least one"):
        max_rl_advantages(zeros, group_size=0)
    for function in (leave_one_out_advantages, max_rl_advantages, mixed_groups):
        with pytest.raises(ValueError, match="6 rows are not a multiple of group_size=4"):
            function(zeros, group_size=4)
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"k={k}: .*group_size=3"):
            pass_at_k_advantages(zeros, group_size=3, k=k)
    with pytest.raises(ValueError, match=r"drop='some' is unknown: use none, all-wrong, all-right, equal"):
        inspect.unwrap(groups.mixed_groups)(zeros, group_size=3, drop="some")
    with pytest.raises(ValueError, match=r"limit=0\.0"):
        outlier_rows(zeros, limit=0.0)


def test_the_loop_of_the_old_reference_agrees():
    """Two loops by different hands: the centred one and the leave-one-out one."""
    returns = np.random.default_rng(2).normal(size=10)
    centred = reference.group_advantages(returns, group_size=5, scale="none")
    np.testing.assert_allclose(loops.leave_one_out(returns, group_size=5), 5 / 4 * centred, atol=1e-12)
    assert algos.group_advantages is advantages.group_advantages
