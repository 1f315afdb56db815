"""Token scales against loops, their means and signs, and what they leave alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_policy as policy
from hypothesis import given, settings
from test_algos import f32

from jaxrl_lm.algos import token_scales as scales


@jax.jit
def everything(batch):
    h, a, logprobs, mask = (batch[name] for name in ("entropy", "advantages", "logprobs", "mask"))
    return {
        "normalised": scales.normalise_scale(h, mask, batch["segment_ids"]),
        "shaped": scales.entropy_shaped_scale(h, a, mask),
        "gtpo": scales.gtpo_scale(h, a, mask, group_size=2, share=0.3),
        "planning": scales.planning_token_scale(batch["action_ids"], mask, token_ids=(2, 7), weight=1.5),
        "low": scales.low_probability_scale(logprobs, mask, alpha=0.3),
        "kl": scales.critical_kl_weight(logprobs, mask, power=2.0),
    }


@settings(max_examples=25, deadline=None)
@given(policy.batches())
def test_scales_equal_the_loop(batch):
    got, mask = jax.tree.map(np.asarray, everything(batch)), batch["mask"]
    h, a, logprobs = batch["entropy"], batch["advantages"], batch["logprobs"]
    expected = {
        "normalised": policy.normalise_scale(h, mask, batch["segment_ids"]),
        "gtpo": policy.gtpo_scale(h, a, mask, group_size=2, share=0.3),
        "planning": policy.each(mask, lambda n, t: 1.5 if batch["action_ids"][n, t] in (2, 7) else 1.0),
        "low": policy.each(mask, lambda n, t: 0.3 * math.exp(min(logprobs[n, t], 0.0)) + 0.7),
        "kl": policy.each(mask, lambda n, t: math.exp(min(logprobs[n, t], 0.0)) ** 2),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=2e-4, atol=1e-6, err_msg=name)
    shaped = np.where(mask, got["shaped"] * np.where(mask, a, 0), 0)
    target = policy.entropy_shaped_advantage(h, a, mask, alpha=0.4, kappa=2.0)
    np.testing.assert_allclose(shaped, target, rtol=1e-4, atol=1e-6)
    for name, values in got.items():
        assert (values[~mask] == 0).all(), name


def test_normalised_scales_have_mean_one():
    mask = jnp.array([[True, True, True, False], [True, True, False, False], [False] * 4])
    scale = f32([[1.0, 2.0, 6.0, jnp.nan], [0.0, 0.0, 5.0, 5.0], [jnp.inf] * 4])
    got = scales.normalise_scale(scale, mask)
    np.testing.assert_allclose(got, [[1 / 3, 2 / 3, 2, 0], [1, 1, 0, 0], [0] * 4], rtol=1e-6)
    packed = scales.normalise_scale(f32([[1.0, 3.0, 4.0, 4.0]]), jnp.ones((1, 4), bool), jnp.array([[1, 1, 2, 2]]))
    np.testing.assert_allclose(packed, [[0.5, 1.5, 1, 1]], rtol=1e-6)


def test_the_entropy_shaped_advantage_by_hand():
    entropy, mask = f32([[0.5, 10.0, 0.5, 10.0, 3.0, 1.0]]), jnp.ones((1, 6), bool)
    advantages = f32([[1.0, 1.0, -1.0, -1.0, 0.0, 1e-42]])
    scale = scales.entropy_shaped_scale(entropy, advantages, mask)
    np.testing.assert_allclose(scale[0, :5] * advantages[0, :5], [1.2, 1.5, -0.8, -0.5, 0.0], rtol=1e-6)
    assert np.isfinite(scale).all()
    assert float(scale[0, 4]) == 1.0


def test_gtpo_by_hand():
    # One group of four: two successes, two failures; the third column has one success and no failure.
    mask = jnp.array([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 0]], bool)
    advantages = jnp.broadcast_to(f32([[1.0], [0.5], [-1.0], [-2.0]]), (4, 3))
    entropy = f32([[1.0, 2.0, 5.0], [3.0, 2.0, jnp.nan], [1.0, 2.0, jnp.nan], [3.0, 2.0, jnp.nan]])
    scale = scales.gtpo_scale(entropy, advantages, mask, group_size=4, share=1.0)
    np.testing.assert_allclose(scale, [[0.5, 1, 1], [1.5, 1, 0], [1.5, 1, 0], [0.5, 1, 0]], rtol=1e-6)
    none = scales.gtpo_scale(entropy, advantages * 0, mask, group_size=4, share=1.0)
    assert (np.asarray(none) == mask).all()
    certain = scales.gtpo_scale(jnp.zeros((4, 3)), advantages, mask, group_size=4, share=1.0)
    np.testing.assert_allclose(certain, mask.astype(jnp.float32), rtol=1e-6)


def test_scales_have_no_gradient_and_survive_a_hundred_nats():
    mask = jnp.ones((2, 3), bool)

    def total(x):
        batch = {"entropy": jnp.abs(x), "advantages": x, "logprobs": x, "mask": mask}
        ids = jnp.ones((2, 3), jnp.int32)
        return sum(jnp.sum(v) for v in everything({**batch, "segment_ids": ids, "action_ids": ids}).values())

    for gap in (100.0, -100.0, 0.0):
        value, gradient = jax.value_and_grad(total)(jnp.full((2, 3), gap))
        assert np.isfinite(float(value))
        assert (np.asarray(gradient) == 0).all()


def test_errors():
    x, mask, ids = jnp.ones((3, 2)), jnp.ones((3, 2), bool), jnp.zeros((3, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"kappa=1\.0"):
        scales.entropy_shaped_scale(x, x, mask, kappa=1.0)
    with pytest.raises(ValueError, match="3 rows are not a multiple of group_size=2"):
        scales.gtpo_scale(x, x, mask, group_size=2)
    with pytest.raises(ValueError, match=r"share=2\.0"):
        scales.gtpo_scale(x, x, mask, group_size=3, share=2.0)
    with pytest.raises(ValueError, match=r"weight=-1\.0"):
        scales.planning_token_scale(ids, mask, token_ids=(1,), weight=-1.0)
    with pytest.raises(ValueError, match=r"alpha=2\.0"):
        scales.low_probability_scale(x, mask, alpha=2.0)
    with pytest.raises(ValueError, match=r"power=-1\.0"):
        scales.critical_kl_weight(x, mask, power=-1.0)
