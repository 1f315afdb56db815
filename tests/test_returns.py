"""Actions, returns and values along a row against loops, with holes, packed rows and poison under the mask."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_advantages as loops
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm.algos import actions, returns, values
from jaxrl_lm.algos.advantages import constant_baseline_advantages

SHAPE = (4, 7)
POISON = (math.nan, math.inf, -math.inf)
OPTIONS = (
    {},
    {"discount": 0.9, "lam": 0.95, "discount_per": "token"},
    {"discount": 0.9, "lam": 0.7, "discount_per": "action"},
    {"discount": 0.5, "lam": 0.0, "discount_per": "token"},
    {"discount": 0.0, "lam": 1.0, "discount_per": "action"},
)


def f32(x):
    return jnp.asarray(x, jnp.float32)


def without_lam(options):
    return {name: value for name, value in options.items() if name != "lam"}


PACKED = np.array([0, 1, 1, 2, 2, 2, 3], np.int32)
IDS = {
    "tokens": [0, 1, 2, 3, 4, 5, 6],
    "pairs": [0, 0, 1, 1, 2, 2, 3],
    "whole": [1] * 7,
    "back again": [1, 1, 2, 1, 1, 3, 3],
    "across the segments": [5, 5, 5, 5, 6, 6, 6],
}


@st.composite
def batches(draw):
    """Rows with holes, empty ones and single tokens; poison off the mask; packed rows and actions of every kind."""
    row = st.sampled_from([(0,) * 7, (1,) * 7, (0, 1, 1, 0, 1, 1, 1), (0, 0, 0, 1, 0, 0, 0), (0, 1, 1, 1, 1, 0, 0)])
    mask = np.array([draw(row | st.tuples(*[st.integers(0, 1)] * 7)) for _ in range(SHAPE[0])], bool)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([1.0, 1.0, 1e6]))
    poisoned = lambda x: np.where(mask, x * scale, draw(st.sampled_from(POISON))).astype(np.float32)
    arrays = [poisoned(rng.normal(size=SHAPE)), poisoned(rng.normal(size=SHAPE))]
    arrays.append((rng.normal(size=SHAPE[0]) * scale).astype(np.float32))
    ids = np.array([IDS[draw(st.sampled_from(sorted(IDS)))] for _ in range(SHAPE[0])], np.int32)
    segments = np.tile(PACKED, (SHAPE[0], 1)) if draw(st.booleans()) else np.ones(SHAPE, np.int32)
    weights = rng.normal(size=(3, *SHAPE)).astype(np.float32)
    return arrays, mask, ids, segments, weights, scale


def everything(rewards, values, bootstrap, mask, ids, segments, weights):
    named = {"action_ids": ids, "segment_ids": segments}
    out = []
    for options in OPTIONS:
        to_go = returns.returns_to_go(rewards, mask, **named, **without_lam(options))
        out.append((to_go, *returns.gae(rewards, values, mask, bootstrap=bootstrap, **named, **options)))
    return [jnp.sum(weights * jnp.stack(x)) for x in out], out


gradients = jax.jit(jax.jacrev(everything, argnums=(0, 1, 2), has_aux=True))


def expected(rewards, values, bootstrap, mask, ids, segments, options):
    named = {"action_ids": ids, "segment_ids": segments}
    to_go = loops.returns_to_go(rewards, mask, **named, **without_lam(options))
    return (to_go, *loops.gae(rewards, values, mask, bootstrap=bootstrap, **named, **options))


@settings(max_examples=30, deadline=None)
@given(batches())
def test_returns_and_advantages_and_their_gradients_equal_the_loops(drawn):
    arrays, mask, ids, segments, weights, scale = drawn
    slopes, outputs = gradients(*arrays, mask, ids, segments, weights)
    # All outputs are linear in rewards, values and bootstrap: the gradient applied to another point is that one's sum.
    rng = np.random.default_rng(0)
    other = [rng.normal(size=x.shape) for x in arrays]
    for options, slope, got in zip(OPTIONS, slopes, outputs, strict=True):
        wanted = expected(*arrays, mask, ids, segments, options)
        for name, one, loop in zip(("returns", "advantages", "targets"), got, wanted, strict=True):
            np.testing.assert_allclose(one, loop, rtol=1e-4, atol=2e-5 * scale, err_msg=f"{name} {options}")
            assert (np.asarray(one)[~mask] == 0).all(), name
        for part in slope:
            assert np.isfinite(part).all(), options
            assert part.shape != mask.shape or (np.asarray(part)[~mask] == 0).all(), options
        applied = sum(np.sum(np.asarray(part, float) * x) for part, x in zip(slope, other, strict=True))
        there = expected(*other, mask, ids, segments, options)
        total = sum(np.sum(w * x) for w, x in zip(weights.astype(float), there, strict=True))
        assert applied == pytest.approx(total, rel=1e-4, abs=1e-4), options


def actions_of(x, mask, ids, segments):
    return {
        "starts": actions.action_starts(mask, ids, segments),
        "sum": actions.action_sum(x, mask, ids, segments),
        "sizes": actions.action_sizes(mask, ids, segments),
        "from start": actions.from_start(x, mask, ids, segments),
        "before": actions.before(mask),
        "trigrams": actions.ngram_actions(mask, n=3, segment_ids=segments),
    }


actions_jitted = jax.jit(actions_of)


@settings(max_examples=20, deadline=None)
@given(batches())
def test_actions_equal_the_loops(drawn):
    (x, _, _), mask, ids, segments, _, scale = drawn
    got = {name: np.asarray(value) for name, value in actions_jitted(x, mask, ids, segments).items()}
    names = ("starts", "sum", "sizes", "from start")
    wanted = {name: np.zeros(SHAPE) for name in names}
    trigrams = np.full(SHAPE, -1)
    for n, row in enumerate(loops.actions(mask, ids, segments)):
        for sequence in row:
            tokens = [t for action in sequence for t in action]
            for place, t in enumerate(tokens):
                trigrams[n, t] = place // 3 + 1
            for action in sequence:
                wanted["starts"][n, action[0]] = 1
                wanted["sum"][n, action] = math.fsum(float(x[n, t]) for t in action)
                wanted["sizes"][n, action] = len(action)
                wanted["from start"][n, action] = float(x[n, action[0]])
    for name in names:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5, atol=1e-6 * scale, err_msg=name)
    np.testing.assert_array_equal(got["trigrams"][mask], trigrams[mask])
    for n, t in np.ndindex(SHAPE):
        assert got["before"][n, t] == max([s for s in range(t) if mask[n, s]], default=-1)


def test_token_ids_are_the_token_case_bit_for_bit():
    rng = np.random.default_rng(4)
    x, v, mask = f32(rng.normal(size=(5, 9))), f32(rng.normal(size=(5, 9))), jnp.asarray(rng.random((5, 9)) < 0.7)
    end, segments = f32(rng.normal(size=5)), jnp.asarray(np.tile([1, 1, 1, 2, 2, 2, 2, 3, 3], (5, 1)))

    @jax.jit
    def every(ids):
        out = []
        for segment_ids in (None, segments):
            named = {"action_ids": ids, "segment_ids": segment_ids}
            for per in ("token", "action"):
                out.append(returns.returns_to_go(x, mask, discount=0.93, discount_per=per, **named))
                out.extend(returns.gae(x, v, mask, discount=0.93, bootstrap=end, discount_per=per, **named))
            out.extend([actions.action_sum(x, mask, ids, segment_ids), actions.from_start(x, mask, ids, segment_ids)])
            out.extend([actions.action_starts(mask, ids, segment_ids), actions.action_sizes(mask, ids, segment_ids)])
        return out

    positions = jnp.broadcast_to(jnp.arange(9), (5, 9))
    for one, other in zip(every(None), every(positions), strict=True):
        np.testing.assert_array_equal(one, other)
    tokens = every(None)
    np.testing.assert_array_equal(tokens[0], tokens[3])  # and with single tokens both discounts are the same


def test_ngrams():
    mask = jnp.array([[0, 1, 1, 0, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]], bool)
    ids = actions.ngram_actions(mask, n=2)
    assert ids[mask].tolist() == [1, 1, 2, 2, 3, 1]
    assert actions.sequence_ids(mask).tolist() == np.ones((2, 7)).tolist()
    assert actions.sequence_ids(mask, ids) is ids
    with pytest.raises(ValueError, match="n=0"):
        actions.ngram_actions(mask, n=0)


# --- identities and exact values ------------------------------------------------------------------------------------

MASK = jnp.array([[0, 1, 1, 0, 0, 1, 1, 0], [1, 0, 1, 1, 1, 0, 0, 0], [0] * 8, [0, 0, 0, 1, 0, 0, 0, 0]], bool)
RNG = np.random.default_rng(5)
REWARDS, VALUES = f32(RNG.normal(size=(4, 8))), f32(RNG.normal(size=(4, 8)))
gae = jax.jit(returns.gae, static_argnames=("discount", "lam", "discount_per"))
to_go = jax.jit(returns.returns_to_go, static_argnames=("discount", "discount_per"))


def test_lambda_zero_is_the_td_error_and_one_the_return_minus_value():
    advantages, targets = gae(REWARDS, VALUES, MASK, discount=0.9, lam=0.0)
    for row, columns in ((0, [1, 2, 5, 6]), (1, [0, 2, 3, 4]), (3, [3])):
        for t, following in zip(columns, [*columns[1:], None], strict=True):
            after = 0.0 if following is None else VALUES[row, following]
            td = REWARDS[row, t] + 0.9 * after - VALUES[row, t]
            assert float(advantages[row, t]) == pytest.approx(float(td), abs=1e-6)
            assert float(targets[row, t]) == pytest.approx(float(td + VALUES[row, t]), abs=1e-6)
    ids = jnp.broadcast_to(jnp.arange(8) // 3, MASK.shape)
    for action_ids, per in ((None, "action"), (ids, "token")):
        named = {"discount": 0.9, "action_ids": action_ids, "discount_per": per}
        whole, targets = gae(REWARDS, VALUES, MASK, lam=1.0, **named)
        reward = to_go(REWARDS, MASK, **named)
        read = actions.from_start(VALUES, MASK, action_ids)
        np.testing.assert_allclose(whole, reward - read, atol=1e-6)
        np.testing.assert_allclose(targets, reward, atol=1e-6)


def test_the_last_action_bootstraps():
    end = f32([2.0, -1.0, 99.0, 4.0])
    with_end, _ = gae(REWARDS, VALUES, MASK, discount=0.5, lam=0.8, bootstrap=end)
    without, _ = gae(REWARDS, VALUES, MASK, discount=0.5, lam=0.8)
    gap = np.zeros((4, 8))
    for row, columns in ((0, [1, 2, 5, 6]), (1, [0, 2, 3, 4]), (3, [3])):
        for place, t in enumerate(reversed(columns)):
            gap[row, t] = 0.5 * float(end[row]) * (0.5 * 0.8) ** place
    np.testing.assert_allclose(with_end - without, gap, atol=1e-6)


def test_an_action_of_two_tokens_by_hand():
    """Rewards 1, 2 | 4 in actions (a, a), (b) with a hole between; γ = ½: per action 3 + ½·4, per token 3 + ¼·4."""
    rewards, mask, ids = f32([[1, 2, 77, 4]]), jnp.array([[1, 1, 0, 1]], bool), jnp.array([[1, 1, 1, 2]])
    got = to_go(rewards, mask, discount=0.5, action_ids=ids)
    np.testing.assert_allclose(got, [[5, 5, 0, 4]])
    got = to_go(rewards, mask, discount=0.5, action_ids=ids, discount_per="token")
    np.testing.assert_allclose(got, [[4, 4, 0, 4]])
    # Values 10, 20 | 40: the first action is worth 10, and its token after the first is not read.
    values = f32([[10, 20, 1e9, 40]])
    advantages, targets = gae(rewards, values, mask, discount=0.5, lam=0.5, action_ids=ids, bootstrap=f32([8.0]))
    second = 4 + 0.5 * 8 - 40
    first = 3 + 0.5 * 40 - 10 + 0.25 * second
    np.testing.assert_allclose(advantages, [[first, first, 0, second]])
    np.testing.assert_allclose(targets, [[first + 10, first + 10, 0, second + 40]])


def test_packed_rows_give_what_single_rows_give():
    lengths = (3, 1, 4)
    cuts = np.split(np.arange(8), np.cumsum(lengths)[:-1])
    segments = jnp.asarray(np.repeat([1, 2, 3], lengths)[None])
    mask = jnp.array([[1, 0, 1, 1, 0, 1, 1, 0]], bool)
    ids = jnp.array([[7, 7, 7, 7, 1, 1, 1, 1]])  # one id across a border is still two actions
    named = {"discount": 0.9, "lam": 0.8, "discount_per": "token"}
    x, v = REWARDS[:1], VALUES[:1]
    packed = (
        to_go(x, mask, segment_ids=segments, action_ids=ids, discount=0.9, discount_per="token"),
        *gae(x, v, mask, segment_ids=segments, action_ids=ids, **named),
    )
    alone = np.zeros((3, 1, 8))
    for cut in cuts:
        row, rest = slice(None), {"action_ids": ids[:, cut]}
        alone[0, row, cut] = loops.returns_to_go(x[:, cut], mask[:, cut], discount=0.9, discount_per="token", **rest)[
            0
        ][:, None]
        for place, array in enumerate(loops.gae(x[:, cut], v[:, cut], mask[:, cut], **named, **rest)):
            alone[1 + place, row, cut] = array[0][:, None]
    np.testing.assert_allclose(packed, alone, atol=1e-6)
    # The bootstrap is that of the row's last sequence.
    ended, _ = gae(x, v, mask, segment_ids=segments, action_ids=ids, bootstrap=f32([3.0]), **named)
    changed = np.asarray(ended != packed[1])[0]
    assert changed.tolist() == [False, False, False, False, False, True, True, False]


def test_a_nan_stays_in_its_sequence():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2]])
    mask, broken = jnp.ones((1, 8), bool), REWARDS[:1].at[0, 5].set(jnp.nan)
    for out in (to_go(broken, mask, segment_ids=segments), *gae(broken, VALUES[:1], mask, segment_ids=segments)):
        assert np.isnan(out[0]).tolist() == [False] * 3 + [True] * 3 + [False] * 2


def test_padding_columns_change_nothing():
    pad = lambda x: jnp.pad(x, ((0, 0), (2, 3)), constant_values=False if x.dtype == bool else jnp.nan)
    cut = lambda x: np.asarray(x)[:, 2:-3]
    np.testing.assert_array_equal(cut(to_go(pad(REWARDS), pad(MASK), discount=0.9)), to_go(REWARDS, MASK, discount=0.9))
    padded, plain = gae(pad(REWARDS), pad(VALUES), pad(MASK)), gae(REWARDS, VALUES, MASK)
    for one, other in zip(padded, plain, strict=True):
        np.testing.assert_array_equal(cut(one), other)


def test_agent_episode():
    """Four calls that pay 0.1 and a submission; a fixed baseline of 0.45. Success pays 1 on the submission."""
    turn = np.repeat([1, 2, 3, 4, 5], 3)[None]
    mask = jnp.asarray(np.tile([True, True, False], 5)[None])  # two tokens, then tool output
    for outcome, expected in ((0, [-0.05, -0.15, -0.25, -0.35, -0.45]), (1, [0.95, 0.85, 0.75, 0.65, 0.55])):
        rewards = np.where(np.arange(15) % 3 == 2, 99.0, 0.0)  # whatever lies under the mask
        rewards[[1, 4, 7, 10]], rewards[13] = 0.1, outcome
        got = to_go(f32(rewards[None]), mask, action_ids=jnp.asarray(turn))
        minus = constant_baseline_advantages(got.reshape(-1), baseline=0.45, valid=mask.reshape(-1))
        np.testing.assert_allclose(minus.reshape(5, 3), [[x, x, 0] for x in expected], atol=1e-6)


def test_a_return_is_paid_on_the_last_action_token():
    got = returns.token_rewards(f32([1, 2, math.nan, 4]), MASK)
    expected = np.zeros((4, 8))
    expected[0, 6], expected[1, 4], expected[3, 3] = 1, 2, 4
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_allclose(to_go(got, MASK), np.where(MASK, np.array([[1], [2], [0], [4]]), 0))
    some = returns.token_rewards(f32([1, math.inf, 3, 4]), MASK, valid=jnp.array([True, False, True, True]))
    assert some.sum(1).tolist() == [1, 0, 0, 4]


def test_nothing_under_the_mask_is_all_zero():
    bad, none = jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool)
    advantages, targets = returns.gae(bad, bad, none, bootstrap=f32([1.0, 2.0]))
    assert (returns.returns_to_go(bad, none) == 0).all()
    assert (advantages == 0).all()
    assert (targets == 0).all()


def test_types_and_errors():
    half = returns.returns_to_go(jnp.ones((1, 3), jnp.bfloat16), jnp.ones((1, 3), bool))
    assert half.dtype == jnp.float32
    assert half.tolist() == [[3.0, 2.0, 1.0]]
    assert (
        returns.gae(jnp.ones((1, 3), int), jnp.ones((1, 3), jnp.bfloat16), jnp.ones((1, 3), bool))[0].dtype == "float32"
    )
    for function, arrays in ((returns.returns_to_go, (REWARDS, MASK)), (returns.gae, (REWARDS, VALUES, MASK))):
        with pytest.raises(ValueError, match="discount_per='turn' is unknown: use action or token"):
            inspect.unwrap(function)(*arrays, discount_per="turn")


# --- the critic -----------------------------------------------------------------------------------------------------

CLIPS = (None, 0.2, 1.0)


def losses(v, old, target, mask, weights):
    out = [values.value_loss(v, old, target, mask, clip=clip) for clip in CLIPS]
    return [jnp.sum(weights * x) for x in out], out


value_gradients = jax.jit(jax.jacrev(losses, argnums=0, has_aux=True))


@settings(max_examples=20, deadline=None)
@given(batches())
def test_value_loss_and_its_gradient_equal_the_loop(drawn):
    (v, old, _), mask, _, _, weights, scale = drawn
    target = np.roll(np.where(mask, v, 0.0), 1, axis=1) * 0.5
    slopes, got = value_gradients(v, old, target.astype(np.float32), mask, weights[0])
    for clip, slope, loss in zip(CLIPS, slopes, got, strict=True):
        wanted = np.zeros((2, *SHAPE))
        for at in zip(*np.nonzero(mask), strict=True):
            wanted[(slice(None), *at)] = loops.value_loss(*(float(x[at]) for x in (v, old, target)), clip)
        np.testing.assert_allclose(loss, wanted[0], rtol=1e-5, atol=1e-5 * scale**2, err_msg=clip)
        np.testing.assert_allclose(slope, weights[0] * wanted[1], rtol=1e-4, atol=1e-5 * scale, err_msg=clip)


def test_a_clipped_value_by_hand():
    one, loss = (
        jnp.ones((1, 1), bool),
        lambda v: float(values.value_loss(f32([[v]]), f32([[0]]), f32([[2]]), one, clip=0.5)[0, 0]),
    )
    assert loss(0.2) == pytest.approx(0.5 * 1.8**2)
    assert loss(1.0) == pytest.approx(0.5 * 1.5**2)  # moved past the clip: the loss of 0.5, without a gradient
    assert loss(-1.0) == pytest.approx(0.5 * 3.0**2)  # moved away: its own


def explained(v, target, mask):
    sums = values.explained_variance_sums(v, target, mask)
    return values.explained_variance(v, target, mask), values.explained_variance_of(sums), sums


explained_jitted = jax.jit(explained)
explained_slope = jax.jit(jax.grad(values.explained_variance))


@settings(max_examples=20, deadline=None)
@given(batches())
def test_explained_variance_equals_numpy_and_is_finite(drawn):
    (v, target, _), mask, *_ = drawn
    direct, merged, _ = explained_jitted(v, target, mask)
    r, left = target[mask].astype(float), (target[mask] - v[mask]).astype(float)
    wanted = 1 - np.var(left) / np.var(r) if len(r) > 1 else 0.0
    assert float(direct) == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    assert float(merged) == pytest.approx(wanted, rel=1e-2, abs=1e-2)
    slope = explained_slope(v, target, mask)
    assert np.isfinite(slope).all()
    assert (np.asarray(slope)[~mask] == 0).all()


def test_explained_variance_of_parts_and_at_its_ends():
    rng = np.random.default_rng(6)
    target, mask = f32(rng.normal(size=(6, 5)) + 3), jnp.asarray(rng.random((6, 5)) < 0.7)
    v = target + f32(rng.normal(size=(6, 5)) * 0.3)
    parts = [explained_jitted(v[rows], target[rows], mask[rows])[2] for rows in (slice(0, 1), slice(1, 3), slice(3, 6))]
    together = values.explained_variance_of(jax.tree.map(lambda *x: sum(x), *parts))
    assert float(together) == pytest.approx(float(explained_jitted(v, target, mask)[0]), abs=1e-4)
    assert 0.8 < float(together) < 1
    assert float(explained_jitted(target, target, mask)[0]) == 1.0
    assert float(explained_jitted(jnp.zeros((6, 5)), target, mask)[0]) == pytest.approx(0.0, abs=1e-6)
    for flat in (jnp.full((6, 5), 0.1), jnp.full((6, 5), 1e6 + 0.1)):  # no spread, and no noise in its place
        assert [float(x) for x in explained_jitted(v, flat, mask)[:2]] == [0.0, 0.0]
    assert [float(x) for x in explained_jitted(v, target, jnp.zeros((6, 5), bool))[:2]] == [0.0, 0.0]
