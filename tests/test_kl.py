"""The KL of sequences by enumeration, how far an update went, and the adaptive coefficient."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_policy as policy
from hypothesis import given, settings
from test_algos import f32

from jaxrl_lm.algos import kl

# Two tokens of a binary vocabulary: the logits of the first, of the second after 0, of the second after 1.
LOGITS = np.array([[0.3, -0.2], [0.5, 0.0], [-1.0, 0.4]])
REF = np.array([[0.0, 0.0], [0.0, 0.7], [0.2, 0.0]])
PATHS = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])


def logprobs_of(z):
    """Log-probs [4 2] of all four sequences."""
    table = jax.nn.log_softmax(jnp.asarray(z), axis=1)
    return jnp.stack([table[0][PATHS[:, 0]], table[PATHS[:, 0] + 1, PATHS[:, 1]]], axis=1)


def estimates(z, estimator):
    return kl.kl_estimate(logprobs_of(z), logprobs_of(REF), jnp.ones((4, 2), bool), estimator=estimator)


def chances(z):
    return jax.lax.stop_gradient(jnp.exp(logprobs_of(z).sum(1)))


def exact(z):
    gap = logprobs_of(z) - logprobs_of(REF)
    return jnp.sum(jnp.exp(logprobs_of(z).sum(1)) * gap.sum(1))


def in_reward(z, credit):
    """The policy-gradient loss whose reward is +k1, credited to-go or as the whole sequence's sum."""
    k1 = jax.lax.stop_gradient(estimates(z, "k1"))
    whole = jnp.broadcast_to(k1.sum(1, keepdims=True), k1.shape)
    credited = whole if credit == "whole" else jnp.cumsum(k1[:, ::-1], axis=1)[:, ::-1]
    return jnp.sum(chances(z)[:, None] * credited * logprobs_of(z))


def test_the_kl_of_sequences_and_what_each_placement_gives():
    with jax.enable_x64(True):
        z = jnp.asarray(LOGITS)
        slope = lambda function, *rest: np.asarray(jax.jit(jax.grad(lambda z: function(z, *rest)))(z))
        assert float(exact(z)) == pytest.approx(0.238510, abs=1e-6)
        truth = slope(exact)
        assert truth[0, 0] == pytest.approx(0.097490, abs=1e-6)
        for credit in ("to-go", "whole"):
            np.testing.assert_allclose(slope(in_reward, credit), truth, atol=1e-12)
        as_loss = lambda z, name: jnp.sum(chances(z)[:, None] * estimates(z, name))
        for name, expected in {"k2": 0.117502, "k1+": 0.117502, "k3+": 0.117502, "k3": 0.122459, "k1": 0.0}.items():
            assert slope(as_loss, name)[0, 0] == pytest.approx(expected, abs=1e-6), name
        for name in ("k1", "k3"):  # the values are unbiased all the same
            assert float(as_loss(z, name)) == pytest.approx(0.238510, abs=1e-6)


@pytest.mark.parametrize("name", ["k1+", "k3+"])
def test_a_straight_through_estimate_at_a_hundred_nats(name):
    gaps, zero, mask = f32([[100.0, -100.0, 0.5]]), jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
    call = lambda x: kl.kl_estimate(x, zero, mask, estimator=name)
    values, gradient = call(gaps), jax.grad(lambda x: jnp.sum(call(x)))(gaps)
    expected = [reference.kl_token(g, 0.0, name)[0] for g in (100.0, -20.0, 0.5)]
    if name == "k1+":
        expected[1] = -100.0
    else:  # along the tangent at −20
        expected[1] += -80 * reference.kl_token(-20.0, 0.0, "k3")[1]
    np.testing.assert_allclose(values, [expected], rtol=1e-5)
    np.testing.assert_allclose(gradient, gaps, rtol=1e-6)


mean_and_max = jax.jit(kl.mean_and_max_kl)


@settings(max_examples=25, deadline=None)
@given(policy.batches())
def test_mean_and_max_kl_equal_the_loop(batch):
    mean, largest = mean_and_max(batch["logprobs"], batch["old_logprobs"], batch["mask"])
    rows, tokens = [], []
    for n, columns in reference.sequences(batch["mask"]):
        gaps = [float(batch["logprobs"][n, t]) - float(batch["old_logprobs"][n, t]) for t in columns]
        rows.append([math.expm1(gap) - gap for gap in gaps])
        tokens += rows[-1]
    assert float(mean) == pytest.approx(reference.mean(tokens) if rows else 0.0, rel=1e-4, abs=1e-7)
    assert float(largest) == pytest.approx(max((reference.mean(row) for row in rows), default=0.0), rel=1e-4, abs=1e-7)


def test_mean_kl_is_the_kl_of_the_old_policy_to_the_current_one():
    old, new, mask = np.array([0.5, 0.25, 0.25]), np.array([0.7, 0.2, 0.1]), jnp.ones((1, 4), bool)
    sampled = np.array([[0, 0, 1, 2]])  # in the old policy's proportions
    mean, largest = kl.mean_and_max_kl(f32(np.log(new)[sampled]), f32(np.log(old)[sampled]), mask)
    assert float(mean) == pytest.approx(float(np.sum(old * np.log(old / new))), rel=1e-5)
    assert float(largest) == pytest.approx(float(mean))
    gradient = jax.grad(lambda x: kl.mean_and_max_kl(x, jnp.zeros_like(x), mask)[1])(jnp.ones((1, 4)))
    assert (np.asarray(gradient) == 0).all()
    assert float(kl.mean_and_max_kl(jnp.zeros((1, 4)), jnp.zeros((1, 4)), mask)[1]) == 0.0


def test_adaptive_coefficient():
    def after(observed, steps=64):
        return float(kl.adaptive_coefficient(0.5, observed, target=6.0, horizon=640, steps=steps))

    assert after(6.0) == pytest.approx(0.5)
    assert after(6.6) == pytest.approx(0.5 * 1.01)  # e = 0.1, steps / horizon = 0.1
    assert after(5.4) == pytest.approx(0.5 * 0.99)
    assert after(600.0) == pytest.approx(0.5 * 1.02)  # clipped at 0.2
    assert after(0.0) == pytest.approx(0.5 * 0.98)
    assert after(7.0, steps=0) == pytest.approx(0.5)
    moved = jax.jit(lambda b, k: kl.adaptive_coefficient(b, k, target=6.0, horizon=640, steps=64))(f32(0.5), f32(6.6))
    assert float(moved) == pytest.approx(0.5 * 1.01)


@pytest.mark.parametrize("bad", [{"target": 0.0}, {"horizon": 0.0}, {"steps": 51.0}, {"steps": -1.0}])
def test_adaptive_coefficient_errors(bad):
    with pytest.raises(ValueError, match="need target > 0"):
        kl.adaptive_coefficient(0.5, 1.0, **{"target": 1.0, "horizon": 10.0, "steps": 1.0, **bad})
