"""Schedules step by step, what decays, clipping, and AdamW against a loop."""

import math
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_lm.optim import SCHEDULES, decay_mask, make_optimizer, make_schedule, optimizer_of

PLAIN = {"max_grad_norm": 0.0, "weight_decay": 0.0, "b1": 0.9, "b2": 0.95, "eps": 1e-8}


def rates(name, *, steps, **options):
    schedule = make_schedule(name, 0.5, **options)
    return [float(schedule(step)) for step in range(steps)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 0.5, 0.5, 0.5, 0.5]),
        ("linear", [0.5, 0.375, 0.25, 0.125, 0.0]),
        ("cosine", [0.25 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]),
    ],
)
def test_schedules_without_warmup(name, expected):
    assert rates(name, steps=5, total_steps=4) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("constant", [0.5, 0.5, 0.5, 0.5, 0.5]),
        ("linear", [0.5, 0.375, 0.25, 0.125, 0.0]),
        ("cosine", [0.25 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]),
    ],
)
def test_warmup_moves_from_the_first_step_and_then_hands_over(name, after):
    assert rates(name, steps=9, total_steps=8, warmup_steps=4) == pytest.approx(
        [0.125, 0.25, 0.375, 0.5, *after], abs=1e-7
    )


def test_the_shortest_runs():
    assert rates("linear", steps=3, total_steps=2, warmup_steps=1) == pytest.approx([0.5, 0.5, 0.0])
    for name in SCHEDULES:
        assert rates(name, steps=1, total_steps=1) == [0.5]
    # Past the end a rate stays at its last value and never turns negative or rises again.
    assert [make_schedule(name, 0.5, total_steps=4)(9) for name in ("linear", "cosine")] == pytest.approx([0.0, 0.0])


def test_schedule_errors_name_the_option():
    with pytest.raises(ValueError, match=r"lr_scheduler='polynomial'.*constant, linear, cosine"):
        make_schedule("polynomial", 0.5, total_steps=4)
    with pytest.raises(ValueError, match=r"warmup_steps=4.*4 optimiser steps"):
        make_schedule("constant", 0.5, total_steps=4, warmup_steps=4)


def params():
    return {
        "policy": {
            "embed": {"table": jnp.full((3, 2), 2.0)},
            "layers": {
                "attn": {
                    "q_proj": {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full((2,), 2.0)},
                    "q_norm": {"scale": jnp.full((2,), 2.0)},
                },
                "input_norm": {"scale": jnp.full((1, 2), 2.0)},
            },
            "lm_head": {"table": jnp.full((3, 2), 2.0)},
        }
    }


DECAYS = {
    "policy": {
        "embed": {"table": True},
        "layers": {
            "attn": {"q_proj": {"kernel": True, "bias": False}, "q_norm": {"scale": False}},
            "input_norm": {"scale": False},
        },
        "lm_head": {"table": True},
    }
}


def test_only_kernels_and_tables_decay():
    assert decay_mask(params()) == DECAYS
    tx = make_optimizer(lambda step: 0.5, **PLAIN | {"weight_decay": 0.25})
    zero = optax.tree.zeros_like(params())
    updates, _ = tx.update(zero, tx.init(params()), params())
    layers = updates["policy"]["layers"]
    # Decoupled: rate · decay · weight = 0.5 · 0.25 · 2, whatever the gradient.
    for matrix in (updates["policy"]["embed"]["table"], updates["policy"]["lm_head"]["table"]):
        np.testing.assert_allclose(matrix, np.full((3, 2), -0.25))
    np.testing.assert_allclose(layers["attn"]["q_proj"]["kernel"], np.full((2, 2), -0.25))
    for vector in (layers["attn"]["q_proj"]["bias"], layers["attn"]["q_norm"]["scale"], layers["input_norm"]["scale"]):
        assert not np.any(vector)


@pytest.mark.parametrize(("limit", "factor"), [(0.0, 1.0), (10.0, 1.0), (1.0, 1 / 5), (2.5, 1 / 2)])
def test_clipping_is_by_the_norm_of_the_whole_tree(limit, factor):
    # With b1 = b2 = 0 and eps = 1 the update is −g / (|g| + 1), from which the clipped g can be read.
    tx = make_optimizer(lambda step: 1.0, **PLAIN | {"max_grad_norm": limit, "b1": 0.0, "b2": 0.0, "eps": 1.0})
    weights = {"a": {"kernel": jnp.zeros(1)}, "b": {"bias": jnp.zeros(1)}}
    grads = {"a": {"kernel": jnp.array([3.0])}, "b": {"bias": jnp.array([-4.0])}}  # norm 5
    updates, _ = tx.update(grads, tx.init(weights), weights)
    a, b = 3.0 * factor, 4.0 * factor
    assert float(updates["a"]["kernel"][0]) == pytest.approx(-a / (a + 1), rel=1e-5)
    assert float(updates["b"]["bias"][0]) == pytest.approx(b / (b + 1), rel=1e-5)


def adamw_loop(weight, gradients, rates, *, b1, b2, eps, decay):
    """Loshchilov and Hutter, 2019, algorithm 2, for one number."""
    first = second = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * gradient**2
        direction = (first / (1 - b1**step)) / (math.sqrt(second / (1 - b2**step)) + eps)
        weight -= rate * (direction + decay * weight)
    return weight


def test_options_reach_schedule_and_optimiser():
    config = types.SimpleNamespace(
        lr_scheduler="linear", learning_rate=0.5, warmup_steps=2, max_grad_norm=1.0, weight_decay=0.1, adam_b1=0.8,
        adam_b2=0.7, adam_eps=1e-3, moments_dtype="float32",
    )  # fmt: skip
    schedule, tx = optimizer_of(config, total_steps=6)
    rates = [0.25, 0.5, 0.5, 0.375, 0.25, 0.125]
    assert [float(schedule(step)) for step in range(6)] == pytest.approx(rates)
    gradients = [0.5, -0.25, 4.0, 0.0, 0.125, -3.0]
    weights = {"x": {"kernel": jnp.array([[1.5]])}, "y": {"scale": jnp.array([1.5])}}
    state = tx.init(weights)
    for gradient in gradients:
        half = gradient / math.sqrt(2)  # each of the two weights gets the same share of the norm
        grads = {"x": {"kernel": jnp.array([[half]])}, "y": {"scale": jnp.array([half])}}
        updates, state = tx.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
    clipped = [max(-1.0, min(1.0, gradient)) / math.sqrt(2) for gradient in gradients]
    options = {"b1": 0.8, "b2": 0.7, "eps": 1e-3}
    assert float(weights["x"]["kernel"][0, 0]) == pytest.approx(
        adamw_loop(1.5, clipped, rates, **options, decay=0.1), rel=1e-5
    )
    assert float(weights["y"]["scale"][0]) == pytest.approx(
        adamw_loop(1.5, clipped, rates, **options, decay=0.0), rel=1e-5
    )
