"""Covariance and what it says about entropy, the masks chosen by it, and the adaptive bonus."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_policy as policy
from hypothesis import given, settings
from test_algos import f32

from jaxrl_lm import masked
from jaxrl_lm.algos import entropy

Z = np.array([1.0, 0.0, -1.0, 0.5])
A = np.array([1.0, -0.5, 0.2, -1.0])
SHARES = (0.0, 0.2, 0.5, 1.0)


def policy_entropy(z):
    return -jnp.sum(jax.nn.softmax(z) * jax.nn.log_softmax(z))


@pytest.mark.parametrize(("step", "expected"), [("natural", -0.255334), ("plain", -0.111861)])
def test_entropy_falls_by_the_covariance(step, expected):
    """dH/dη under z ← z + η d is −Cov(log pi, d): d = A, or pi · A for a plain policy-gradient step."""
    pi = np.exp(Z) / np.exp(Z).sum()
    direction = A if step == "natural" else pi * A
    with jax.enable_x64(True):
        slope = jax.grad(lambda eta: policy_entropy(jnp.asarray(Z) + eta * jnp.asarray(direction)))(0.0)
    assert float(slope) == pytest.approx(expected, abs=1e-6)
    counts = np.round(pi * 200_000).astype(int)  # a batch in the policy's proportions
    tokens = np.repeat(np.arange(4), counts)[None]
    mask = jnp.ones(tokens.shape, bool)
    values = entropy.covariance(f32(np.log(pi)[tokens]), f32(direction[tokens]), mask)
    assert float(masked.mean(values, mask)) == pytest.approx(-expected, abs=1e-5)


@jax.jit
def everything(batch, key):
    arrays = (batch["logprobs"], batch["advantages"], batch["mask"])
    return {
        "covariance": entropy.covariance(*arrays),
        "kl": {share: entropy.kl_cov_mask(*arrays, share=share) for share in SHARES},
        "top": {share: entropy.top_entropy_mask(batch["entropy"], batch["mask"], share=share) for share in SHARES},
        "clip": {
            share: entropy.clip_cov_mask(*arrays, jax.random.fold_in(key, n), low=-0.1, high=0.2, share=share)
            for n, share in enumerate(SHARES)
        },
    }


@settings(max_examples=25, deadline=None)
@given(policy.batches())
def test_covariance_and_masks_equal_the_loop(batch):
    mask, count = batch["mask"], int(batch["mask"].sum())
    got = jax.tree.map(np.asarray, everything(batch, jax.random.key(count)))
    expected = policy.covariance(batch["logprobs"], batch["advantages"], mask)
    np.testing.assert_allclose(got["covariance"], expected, rtol=1e-4, atol=1e-5)
    for share in SHARES:
        # The order is that of the library's own values: ties of a rounding are not the subject.
        assert (got["kl"][share] == policy.largest(got["covariance"], mask, share, count)).all(), share
        assert (got["top"][share] == policy.largest(batch["entropy"], mask, share, count)).all(), share
        inside = mask & (got["covariance"] >= np.float32(-0.1)) & (got["covariance"] <= np.float32(0.2))
        assert not (got["clip"][share] & ~inside).any()
        assert got["clip"][share].sum() == min(math.ceil(share * count - 1e-9), inside.sum()), share


def test_the_number_of_tokens_is_exact_with_ties_and_odd_shares():
    mask = jnp.asarray(np.arange(120)[None] >= 20)
    choose = jax.jit(
        lambda x: [entropy.top_entropy_mask(x, mask, share=share) for share in (0.07, 0.29, 0.2, 0.001, 1.0)]
    )
    for values in (jnp.zeros((1, 120)), jnp.full((1, 120), -jnp.inf), f32(np.arange(120)[None])):
        assert [int(chosen.sum()) for chosen in choose(values)] == [7, 29, 20, 1, 100]
    assert choose(jnp.zeros((1, 120)))[0][0, 20:27].all()  # the first of equals
    assert choose(f32(np.arange(120)[None]))[0][0, -7:].all()


def test_clip_cov_draws_at_random_and_in_the_range_only():
    logprobs, advantages = f32([[0.0] * 50 + [1.0] * 50]), f32([[-1.0] * 50 + [1.0] * 25 + [-1.0] * 25])
    mask = jnp.ones((1, 100), bool)
    value = np.asarray(entropy.covariance(logprobs, advantages, mask))[0]
    low = float(value[50]) - 1e-3
    draw = jax.jit(lambda key: entropy.clip_cov_mask(logprobs, advantages, mask, key, low=low, high=9.0, share=0.1))
    drawn = np.stack([np.asarray(draw(jax.random.key(seed)))[0] for seed in range(200)])
    assert (drawn.sum(1) == 10).all()
    assert not drawn[:, value < low].any()
    each = drawn[:, value >= low].mean(0)  # each of the 25 in 40 % of the draws
    assert each.shape == (25,)
    assert each.mean() == pytest.approx(0.4)
    assert 0.2 < each.min() < each.max() < 0.6


def test_no_gradient_through_the_covariance():
    x, mask = f32([[0.5, -1.0, 2.0]]), jnp.ones((1, 3), bool)
    assert (np.asarray(jax.grad(lambda x: jnp.sum(entropy.covariance(x, x, mask)))(x)) == 0).all()


def test_adaptive_entropy_coefficient():
    def after(coefficient, observed):
        options = {"target": 0.2, "step": 0.005, "maximum": 0.01}
        return [float(x) for x in entropy.adaptive_entropy_coefficient(coefficient, observed, **options)]

    assert after(0.005, 0.1) == pytest.approx([0.01, 0.005])
    assert after(0.01, 0.1) == pytest.approx([0.01, 0.01])  # at the maximum
    assert after(0.008, 0.3) == pytest.approx([0.003, 0.0])  # above the target: down, and off
    assert after(0.001, 0.3) == pytest.approx([0.0, 0.0])
    assert after(0.004, 0.2) == pytest.approx([0.004, 0.004])


def test_errors():
    x, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"share={share}"):
            entropy.top_entropy_mask(x, mask, share=share)
    with pytest.raises(ValueError, match=r"low=2\.0, high=1\.0"):
        entropy.clip_cov_mask(x, x, mask, jax.random.key(0), low=2.0, high=1.0, share=0.1)
    with pytest.raises(ValueError, match=r"step=-1\.0"):
        entropy.adaptive_entropy_coefficient(0.0, 0.0, target=1.0, step=-1.0, maximum=1.0)
