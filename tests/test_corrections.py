"""Weights against the sampler: loops, what each mode does at its bounds, and decoupled PPO."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_policy as policy
from hypothesis import given, settings
from test_algos import f32, plain

from jaxrl_lm.algos import corrections, surrogate

MODES = corrections.Correction.__args__
BOUNDS = ((2.0, 0.0), (1.3, 0.7), (99.0, 0.5))
call = corrections.sampler_correction


@jax.jit
def everything(batch):
    arrays = (batch["old_logprobs"], batch["logprobs"], batch["mask"])
    return {
        (mode, cap, floor): call(*arrays, mode=mode, cap=cap, floor=floor, segment_ids=batch["segment_ids"])
        for mode in MODES
        for cap, floor in BOUNDS
    }


@settings(max_examples=25, deadline=None)
@given(policy.batches())
def test_corrections_equal_the_loop(batch):
    arrays = (batch["old_logprobs"], batch["logprobs"], batch["mask"])
    for (mode, cap, floor), got in everything(batch).items():
        options = {"mode": mode, "cap": cap, "floor": floor, "segment_ids": batch["segment_ids"]}
        expected = policy.sampler_correction(*arrays, **options)
        np.testing.assert_allclose(got, expected, rtol=2e-5, err_msg=f"{mode} {cap} {floor}")
        assert (np.asarray(got)[~batch["mask"]] == 0).all()


def test_corrections_by_hand():
    old, mask = f32([[math.log(3), math.log(0.4), 0.0, 7.0]]), jnp.array([[True, True, True, False]])
    weights = lambda mode, **options: call(old, jnp.zeros_like(old), mask, mode=mode, **options)[0]
    np.testing.assert_allclose(weights("token_truncate"), [2, 0.4, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(weights("token_truncate", cap=None), [3, 0.4, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(weights("token_mask", floor=0.5, cap=5.0), [3, 0, 1, 0], rtol=1e-6)  # IcePop
    np.testing.assert_allclose(weights("token_mask", cap=None, floor=0.5), [3, 0, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(weights("sequence_truncate", cap=1.1), [1.1, 1.1, 1.1, 0], rtol=1e-6)
    np.testing.assert_allclose(weights("sequence_mask"), [1.2, 1.2, 1.2, 0], rtol=1e-6)
    np.testing.assert_allclose(weights("sequence_mask", cap=1.1), [0] * 4)


def test_equal_distributions_weigh_one_and_far_ones_stay_finite():
    x, mask = jnp.full((2, 3), -1.5), jnp.array([[True, True, False], [False] * 3])
    options = [{"mode": mode, "cap": cap} for mode in MODES for cap in (2.0, None)]
    run = jax.jit(lambda old: [call(old, x, mask, **option) for option in options])
    for weights in run(x):
        assert (np.asarray(weights) == mask).all()
    for gap in (100.0, -100.0):
        assert all(np.isfinite(weights).all() for weights in run(x + gap))


def test_a_correction_has_no_gradient():
    x, mask = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
    total = lambda old, sampler: sum(jnp.sum(call(old, sampler, mask, mode=mode)) for mode in MODES)
    for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(x + 0.1, x):
        assert (np.asarray(gradient) == 0).all()


def test_packed_corrections_equal_unpacked_ones():
    rows, packed = policy.packed_example()
    whole = everything({**rows, "segment_ids": np.ones((4, 5), np.int32)})
    for key, got in everything(packed).items():
        np.testing.assert_allclose(policy.unpack(got), whole[key], rtol=1e-5)


def test_decoupled_ppo_is_an_uncapped_weight_times_the_surrogate():
    """E over the behaviour policy of (prox / behav) · clipped surrogate against prox, from Hilton et al., eq. 3."""
    rng = np.random.default_rng(0)
    current, proximal, behaviour = (f32(np.log(rng.dirichlet(np.ones(5)))[:, None]) for _ in range(3))
    advantages, mask = f32(rng.normal(size=(5, 1))), jnp.ones((5, 1), bool)
    weight = call(proximal, behaviour, mask, cap=None)
    loss = weight * surrogate.clipped_surrogate(current, proximal, advantages, mask)
    got = float(jnp.sum(jnp.exp(behaviour) * loss))
    p, q = np.exp(np.asarray(current, np.float64))[:, 0], np.exp(np.asarray(proximal, np.float64))[:, 0]
    a = np.asarray(advantages, np.float64)[:, 0]
    expected = -sum(q[i] * min(p[i] / q[i] * a[i], min(max(p[i] / q[i], 0.8), 1.2) * a[i]) for i in range(5))
    assert got == pytest.approx(expected, rel=1e-5)


def test_errors():
    x, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match=r"mode='tis'.*token_truncate"):
        plain(call)(x, x, mask, mode="tis")
    with pytest.raises(ValueError, match=r"floor=3\.0, cap=2\.0"):
        call(x, x, mask, floor=3.0)
