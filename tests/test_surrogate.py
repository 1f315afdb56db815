"""Every surrogate at every level against float64 loops, at ratio 1, packed, with actions, and far from the old policy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_policy as policy
from hypothesis import given, settings
from test_algos import f32, plain

from jaxrl_lm.algos import gates, reduction, surrogate

LEVELS = surrogate.Level.__args__
OVERS = reduction.Over.__args__
POSITIONS = np.tile(np.arange(6, dtype=np.int32), (4, 1))


def losses_of(logprobs, batch, level, **ids):
    """The surrogates by name."""
    arrays = (logprobs, batch["old_logprobs"], batch["advantages"], batch["mask"])
    return {
        "clip": surrogate.clipped_surrogate(*arrays, clip_high=0.28, dual_clip=1.5, level=level, **ids),
        "weight": surrogate.clipped_weight_surrogate(*arrays, clip_low=None, clip_high=0.3, level=level, **ids),
        "weight both": surrogate.clipped_weight_surrogate(*arrays, clip_low=0.1, clip_high=None, level=level, **ids),
        "gate": gates.soft_gate_surrogate(*arrays, temperature_negative=3.0, level=level, **ids),
    }


def ids_of(batch, clip):
    return {"segment_ids": batch["segment_ids"], "action_ids": batch["action_ids"], "log_ratio_clip": clip}


CASES = [("token", 0.3), ("sequence", None), ("sequence-token", None), ("sequence-sum", 0.3), ("action", None)]


@jax.jit
def everything(logprobs, batch):
    def totals(logprobs):
        losses = {level: losses_of(logprobs, batch, level, **ids_of(batch, clip)) for level, clip in CASES}
        losses["plain"] = {"plain": surrogate.policy_gradient(logprobs, batch["advantages"], batch["mask"])}
        return jax.tree.map(lambda x: jnp.sum(batch["weights"] * x), losses), losses

    return jax.jacrev(totals, has_aux=True)(logprobs)


def expected_of(batch, level, clip):
    """{name: (loss, d Σ weight · loss / d logprobs)} by loops."""
    mask, advantages, weights, ids = batch["mask"], batch["advantages"], batch["weights"], ids_of(batch, clip)
    ratio, slopes = policy.ratio_and_slopes(
        batch["logprobs"], batch["old_logprobs"], mask, level=level, **ids_of(batch, clip)
    )
    tokens = {
        "clip": lambda r, a: reference.surrogate_token(r, a, 0.2, 0.28, 1.5, None),
        "gate": lambda r, a: policy.soft_gate(r, a, 1.0, 3.0),
    }
    out = {}
    for name, token in tokens.items():
        pair = lambda n, t, token=token: token(ratio[n, t], float(advantages[n, t]))
        loss, slope = (policy.each(mask, lambda n, t, i=i, pair=pair: pair(n, t)[i]) for i in (0, 1))
        out[name] = loss, policy.through_ratio(weights, slope, slopes, mask)
    for name, low, high in (("weight", 0.0, 1.3), ("weight both", 0.9, math.inf)):
        scale = lambda n, t, low=low, high=high: -min(max(ratio[n, t], low), high) * float(advantages[n, t])
        loss, slope = np.zeros(mask.shape), np.zeros(mask.shape)
        # The log-prob is that of the whole action at level action, of the token at the others.
        unit = "action" if level == "action" else "token"
        for n, columns in policy.units(mask, unit, ids["segment_ids"], ids["action_ids"]):
            for t in columns:
                loss[n, t] = scale(n, t) * math.fsum(float(batch["logprobs"][n, u]) for u in columns)
                slope[n, t] = math.fsum(weights[n, u] * scale(n, u) for u in columns)
        out[name] = loss, slope
    return out


@settings(max_examples=20, deadline=None)
@given(policy.batches())
def test_every_surrogate_and_its_gradient_equal_the_loop(batch):
    gradients, losses = everything(batch["logprobs"], batch)
    off = ~batch["mask"]
    for level, clip in CASES:
        for name, (loss, gradient) in expected_of(batch, level, clip).items():
            got, slope = losses[level][name], gradients[level][name]
            np.testing.assert_allclose(got, loss, rtol=2e-5, atol=2e-6, err_msg=f"{level} {name}")
            np.testing.assert_allclose(slope, gradient, rtol=2e-4, atol=2e-6, err_msg=f"{level} {name}")
            assert (np.asarray(got)[off] == 0).all()
            assert (np.asarray(slope)[off] == 0).all()
    product = lambda n, t: -float(batch["advantages"][n, t]) * float(batch["logprobs"][n, t])
    np.testing.assert_allclose(losses["plain"]["plain"], policy.each(batch["mask"], product), rtol=1e-6)
    slope = policy.each(batch["mask"], lambda n, t: -batch["weights"][n, t] * float(batch["advantages"][n, t]))
    np.testing.assert_allclose(gradients["plain"]["plain"], slope, rtol=1e-6)


ratios = jax.jit(
    lambda batch, positions: {
        (level, clip): surrogate.importance_ratio(
            batch["logprobs"], batch["old_logprobs"], batch["mask"], level=level,
            action_ids=positions, segment_ids=batch["segment_ids"], log_ratio_clip=clip,
        )
        for level in ("token", "action")
        for clip in (0.2, 99.0)
    }
)  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(policy.batches())
def test_actions_of_one_token_are_tokens_bit_for_bit(batch):
    got = ratios(batch, POSITIONS)
    for clip in (0.2, 99.0):
        assert (np.asarray(got["action", clip]) == np.asarray(got["token", clip])).all()
        assert (np.asarray(got["action", clip])[~batch["mask"]] == 1).all()


def test_ratios_by_hand():
    logprobs, old = f32([[math.log(2), math.log(8), math.log(3), 5.0]]), f32([[0.0, 0.0, 0.0, -5.0]])
    mask, ids = jnp.array([[True, True, True, False]]), jnp.array([[1, 1, 2, 2]])
    expected = {
        "token": [2, 8, 3, 1],
        "sequence": [48 ** (1 / 3)] * 3 + [1],
        "sequence-token": [48 ** (1 / 3)] * 3 + [1],
        "sequence-sum": [48, 48, 48, 1],
        "action": [16, 16, 3, 1],
    }
    assert set(expected) == set(LEVELS)
    for level, values in expected.items():
        got = surrogate.importance_ratio(logprobs, old, mask, level=level, action_ids=ids)
        np.testing.assert_allclose(got, [values], rtol=1e-5, err_msg=level)
    clipped = surrogate.importance_ratio(
        logprobs, old, mask, level="action", action_ids=ids, log_ratio_clip=math.log(4)
    )
    np.testing.assert_allclose(clipped, [[8, 8, 3, 1]], rtol=1e-5)


def test_a_clipped_log_ratio_stops_value_and_gradient():
    gaps, zero, mask = f32([[-3.0, -0.4, 0.4, 3.0]]), jnp.zeros((1, 4)), jnp.ones((1, 4), bool)
    ratio = lambda x: surrogate.importance_ratio(x, zero, mask, log_ratio_clip=0.5)
    np.testing.assert_allclose(ratio(gaps), np.exp([[-0.5, -0.4, 0.4, 0.5]]), rtol=1e-6)
    slopes = jax.grad(lambda x: jnp.sum(ratio(x)))(gaps)
    np.testing.assert_allclose(slopes, [[0, math.exp(-0.4), math.exp(0.4), 0]], rtol=1e-6)


def test_gradient_at_ratio_one_is_the_plain_policy_gradient():
    """At every level, with the weights that make the units the terms: an action's log-prob is the sum of its tokens'."""
    rng = np.random.default_rng(4)
    mask = jnp.asarray(np.array([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0]], bool))
    logprobs = f32(rng.normal(size=(3, 4)) - 2)
    advantages = jnp.broadcast_to(f32([[1.5], [-0.5], [2.0]]), (3, 4))
    batch = {"old_logprobs": logprobs, "advantages": advantages, "mask": mask}
    ids = {"action_ids": jnp.array([[1, 1, 2, 2], [1, 1, 1, 2], [1, 1, 1, 1]])}

    def weights_of(level, name):
        units = {"sequence-sum": jnp.ones((3, 4), jnp.int32), "action": ids["action_ids"]}.get(level)
        if name.startswith("weight") and level != "action":
            units = None  # its gradient is each token's own at the other levels
        return "seq-mean-token-mean" if units is None else "seq-mean-token-sum", units

    def totals(x):
        out = {}
        for level in LEVELS:
            for name, loss in losses_of(x, batch, level, **ids).items():
                over, units = weights_of(level, name)
                each = reduction.token_weights(mask, over=over)
                plain_loss = jnp.sum(each * surrogate.policy_gradient(x, advantages, mask))
                out[level, name] = (
                    jnp.sum(reduction.token_weights(mask, over=over, action_ids=units) * loss),
                    plain_loss,
                )
        return out

    for key, (got, expected) in jax.jit(jax.jacrev(totals))(logprobs).items():
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=str(key))
        assert np.abs(expected).max() > 0.1


def slopes_at(function, ratios, advantage):
    x, mask = f32([np.log(ratios)]), jnp.ones((1, len(ratios)), bool)
    call = lambda x: jnp.sum(function(x, jnp.zeros_like(x), jnp.full(x.shape, advantage), mask))
    return np.asarray(jax.grad(call)(x))[0]


def test_a_clipped_weight_never_stops_the_gradient():
    points = np.array([0.1, 0.799, 1.0, 1.279, 1.281, 9.0])
    both = functools.partial(surrogate.clipped_weight_surrogate, clip_low=0.2, clip_high=0.28)
    clip = functools.partial(surrogate.clipped_surrogate, clip_low=0.2, clip_high=0.28)
    for advantage in (1.0, -1.0):
        np.testing.assert_allclose(slopes_at(both, points, advantage), -advantage * np.clip(points, 0.8, 1.28), 1e-5)
    np.testing.assert_allclose(slopes_at(clip, points, 1.0)[-2:], 0)
    np.testing.assert_allclose(slopes_at(clip, points, -1.0)[:2], 0)


def test_a_soft_gate_fades_on_both_sides():
    points = np.array([0.1, 0.5, 1.0, 2.0, 5.0])
    for advantage, tau in ((1.0, 1.0), (-1.0, 1.05)):
        got = slopes_at(gates.soft_gate_surrogate, points, advantage)
        s = 1 / (1 + np.exp(-tau * (points - 1)))
        np.testing.assert_allclose(got, -advantage * 4 * s * (1 - s) * points, rtol=1e-5)
        assert abs(got[2]) == pytest.approx(1.0)
        per_ratio = np.abs(got / points)
        assert per_ratio.argmax() == 2  # of the gradient with respect to ρ
    sharp = slopes_at(functools.partial(gates.soft_gate_surrogate, temperature_positive=8.0), points, 1.0)
    assert abs(sharp[3]) < abs(slopes_at(gates.soft_gate_surrogate, points, 1.0)[3])


def test_a_hundred_nats_stay_finite():
    batch = {"old_logprobs": jnp.zeros((2, 3)), "advantages": f32([[1.0] * 3, [-1.0] * 3])}
    batch["mask"] = jnp.ones((2, 3), bool)
    ids = {"action_ids": jnp.ones((2, 3), jnp.int32)}

    def total(x):
        losses = {level: losses_of(x, batch, level, **ids) for level in LEVELS}
        return jax.tree.map(jnp.sum, losses)

    call = jax.jit(lambda x: (total(x), jax.jacrev(total)(x)))
    for gap in (100.0, -100.0):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(call(jnp.full((2, 3), gap))))


def test_packed_rows_equal_unpacked_rows():
    rows, packed = policy.packed_example()

    @jax.jit
    def run(batch, segment_ids):
        def total(x):
            ids = {"action_ids": batch["action_ids"], "segment_ids": segment_ids}
            losses = {level: losses_of(x, batch, level, **ids) for level in LEVELS}
            return jax.tree.map(lambda v: jnp.sum(v * v), losses), losses  # squared, so that tokens differ in weight

        return jax.jacrev(total, has_aux=True)(batch["logprobs"])

    def check(got, expected):
        np.testing.assert_allclose(policy.unpack(got), expected, atol=2e-5)

    jax.tree.map(check, run(packed, packed["segment_ids"]), run(rows, None))


def test_an_action_of_the_last_segment_does_not_reach_into_the_next():
    mask, zero = jnp.ones((1, 4), bool), jnp.zeros((1, 4))
    ids, segments = jnp.ones((1, 4), jnp.int32), jnp.array([[1, 1, 2, 2]])
    call = lambda **options: surrogate.importance_ratio(
        zero + math.log(2), zero, mask, level="action", action_ids=ids, **options
    )
    np.testing.assert_allclose(call(segment_ids=segments), [[4] * 4], rtol=1e-6)
    np.testing.assert_allclose(call(), [[16] * 4], rtol=1e-6)


# --- weights of actions ---------------------------------------------------------------------------------------------

weights_jitted = jax.jit(
    lambda mask, action_ids, segment_ids: {
        (over, packed): reduction.token_weights(
            mask, over=over, length=9, action_ids=action_ids, segment_ids=segment_ids if packed else None
        )
        for over in OVERS
        for packed in (False, True)
    }
)


@settings(max_examples=25, deadline=None)
@given(policy.batches())
def test_weights_of_actions_equal_the_loop(batch):
    for (over, packed), got in weights_jitted(batch["mask"], batch["action_ids"], batch["segment_ids"]).items():
        options = {"over": over, "length": 9, "segment_ids": batch["segment_ids"] if packed else None}
        expected = policy.token_weights(batch["mask"], **options, action_ids=batch["action_ids"])
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=over)


@settings(max_examples=20, deadline=None)
@given(policy.batches())
def test_weights_of_one_token_actions_are_those_of_tokens_bit_for_bit(batch):
    by_position = weights_jitted(batch["mask"], POSITIONS, batch["segment_ids"])
    by_token = weights_jitted(batch["mask"], None, batch["segment_ids"])
    for key, got in by_position.items():
        assert (np.asarray(got) == np.asarray(by_token[key])).all(), key


def test_weights_of_actions_by_hand():
    mask = jnp.array([[True, True, True, True], [True, False, True, False], [False] * 4])
    ids = jnp.array([[1, 1, 1, 2], [4, 4, 4, 4], [1, 2, 3, 4]])  # three actions; the hole is inside one
    third = 1 / 3
    expected = {
        "token-mean": ([third / 3] * 3 + [third], third / 2),
        "seq-mean-token-mean": ([0.25 / 3] * 3 + [0.25], 0.25),
        "seq-mean-token-sum": ([0.5 / 3] * 3 + [0.5], 0.25),
        "seq-mean-token-sum-norm": ([0.05 / 3] * 3 + [0.05], 0.025),
    }
    for over, (first, second) in expected.items():
        got = reduction.token_weights(mask, over=over, length=10, action_ids=ids)
        np.testing.assert_allclose(got, [first, [second, 0, second, 0], [0] * 4], rtol=1e-6, err_msg=over)
    without = reduction.token_weights(mask, action_ids=ids, valid=jnp.array([False, True, True]))
    np.testing.assert_allclose(without, [[0] * 4, [0.5, 0, 0.5, 0], [0] * 4])


def test_packed_weights_of_actions_equal_unpacked_ones():
    rows, packed = policy.packed_example()
    whole = weights_jitted(rows["mask"], rows["action_ids"], np.ones(rows["mask"].shape, np.int32))
    got = weights_jitted(packed["mask"], packed["action_ids"], packed["segment_ids"])
    for over in OVERS:
        np.testing.assert_allclose(policy.unpack(got[over, True]), whole[over, False], rtol=1e-6, err_msg=over)


# --- drifted sequences ----------------------------------------------------------------------------------------------

drift_jitted = jax.jit(
    lambda batch: {
        limit: gates.drift_mask(
            batch["logprobs"], batch["old_logprobs"], batch["advantages"], batch["mask"],
            limit=limit, segment_ids=batch["segment_ids"],
        )
        for limit in (-0.3, 0.0, 0.1, 0.4)
    }
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(policy.batches())
def test_drift_mask_equals_the_loop(batch):
    arrays = (batch["logprobs"], batch["old_logprobs"], batch["advantages"], batch["mask"])
    for limit, got in drift_jitted(batch).items():
        expected = policy.drift_mask(*arrays, limit=limit, segment_ids=batch["segment_ids"])
        assert (np.asarray(got) == expected).all(), limit


def test_drift_mask_by_hand():
    sampler, mask = jnp.zeros((4, 3)), jnp.array([[True, True, False]] * 4)
    logprobs = f32([[-1.0, -0.2, -99], [-1.0, -0.2, -99], [1.0, 0.2, -99], [-0.4, -0.4, 99]])  # drift 0.6 0.6 −0.6 0.4
    advantages = jnp.broadcast_to(f32([[-1.0], [1.0], [-1.0], [-1.0]]), (4, 3))
    keep = gates.drift_mask(logprobs, sampler, advantages, mask, limit=0.5)
    assert keep[:, 0].tolist() == [False, True, True, True]
    assert (keep[:, 1] == keep[:, 0]).all()
    assert not keep[:, 2].any()
    assert not gates.drift_mask(logprobs * jnp.nan, sampler, advantages, mask, limit=0.5)[0].any()


def test_unknown_names_and_bad_numbers_are_errors():
    x, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match=r"level='turn'.*sequence-sum, action"):
        plain(surrogate.importance_ratio)(x, x, mask, level="turn")
    with pytest.raises(ValueError, match="level='action' needs action_ids"):
        surrogate.importance_ratio(x, x, mask, level="action")
    with pytest.raises(ValueError, match=r"log_ratio_clip=0\.0"):
        surrogate.importance_ratio(x, x, mask, log_ratio_clip=0.0)
    with pytest.raises(ValueError, match=r"temperature=0\.0"):
        gates.soft_gate_surrogate(x, x, x, mask, temperature_negative=0.0)
