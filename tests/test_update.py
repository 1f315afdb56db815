"""One optimiser step: microbatches change nothing, non-finite steps change nothing, and the losses are their formulas."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_lm import objectives, steps
from jaxrl_lm.algos import token_weights
from jaxrl_lm.batch import BatchRule, Coefficients, Rated
from jaxrl_lm.credit import Credit
from jaxrl_lm.metrics import Mean, Sum, result
from jaxrl_lm.models import build
from jaxrl_lm.objectives import PolicyObjective, SFTObjective
from jaxrl_lm.score import score
from jaxrl_lm.types import Frozen, PolicyBatch, Rollout, Scores, SFTBatch, TrainState
from jaxrl_lm.update import cut, gradients, update

ROWS, COLUMNS, PROMPT = 8, 9, 4
RNG = np.random.default_rng(0)
LENGTHS = np.array([5, 3, 1, 5, 4, 2, 5, 1])  # of the completions
MASK = (np.arange(COLUMNS) >= PROMPT) & (np.arange(COLUMNS) < PROMPT + LENGTHS[:, None])
SEGMENTS = (MASK | (np.arange(COLUMNS) < PROMPT)).astype(np.int32)
SEGMENTS[::2, :2] = 0  # left padding


@pytest.fixture(scope="module")
def model(tiny_config):
    return build(tiny_config)


def policy_batch(beta=0.1, **fields):
    """A batch of random numbers, with NaN wherever nothing may be read."""
    rng = np.random.default_rng(1)
    hidden = lambda x: jnp.asarray(np.where(MASK, x, np.nan), jnp.float32)
    old = -np.abs(rng.normal(size=MASK.shape)) * 2 - 0.5
    defaults = {
        "tokens": jnp.asarray(rng.integers(0, 48, MASK.shape), jnp.int32),
        "segment_ids": jnp.asarray(SEGMENTS),
        "action_mask": jnp.asarray(MASK),
        "weights": token_weights(jnp.asarray(MASK), over="seq-mean-token-mean"),
        "temperature": jnp.asarray(np.linspace(0.7, 1.3, ROWS), jnp.float32),
        "old_logprobs": hidden(old),
        "sampler_logprobs": hidden(old + rng.normal(size=MASK.shape) * 0.01),
        "advantages": hidden(np.repeat(rng.normal(size=(ROWS, 1)), COLUMNS, 1)),
        "ref_logprobs": hidden(old + rng.normal(size=MASK.shape) * 0.3),
        "truncated": jnp.zeros(ROWS, bool),
        "valid": jnp.ones(ROWS, bool),
    }
    batch = PolicyBatch(**defaults | fields)
    return batch if batch.ref_logprobs is None else batch._replace(kl_weights=beta * batch.weights)


def state_of(params, tx):
    return TrainState(jnp.zeros((), jnp.int32), {"policy": params}, tx.init({"policy": params}), jax.random.key(0), {})


def assert_trees_close(ours, theirs, relative):
    """Each leaf within `relative` of its largest number."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=relative * float(np.abs(b).max()) + 1e-30)


# --- microbatches -----------------------------------------------------------------------------------------------------

OBJECTIVE = PolicyObjective(completion_columns=COLUMNS - PROMPT)


@pytest.fixture(scope="module")
def step(model):
    """step(state, batch, microbatches) -> gradients, new state, metrics, of the real model and objective."""
    tx = optax.sgd(0.01)

    @functools.partial(jax.jit, static_argnums=2)
    def run(state, batch, microbatches):
        options = {"objective": OBJECTIVE, "model": model, "microbatches": microbatches}
        grads, _ = gradients(state.params, Frozen(), batch, **options)
        return grads, *update(state, Frozen(), batch, tx=tx, **options)

    return lambda params, batch, parts=1: run(state_of(params, tx), batch, parts)


@pytest.fixture(scope="module")
def whole(step, params):
    return step(params, policy_batch())


def test_a_step_is_finite_and_moves_every_weight(whole, params):
    grads, state, metrics = whole
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 0
    assert_trees_close(state.params["policy"], jax.tree.map(lambda p, g: p - 0.01 * g, params, grads["policy"]), 1e-6)
    assert int(state.step) == 1
    assert result(metrics)["nonfinite"] == 0
    assert result(metrics)["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-6)


@pytest.mark.parametrize("parts", [2, 4])
def test_microbatches_change_nothing(step, whole, params, parts):
    grads, state, metrics = step(params, policy_batch(), parts)
    assert_trees_close(grads, whole[0], 1e-5)
    assert_trees_close(state.params, whole[1].params, 2e-6)
    ours, theirs = result(metrics), result(whole[2])
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name] == pytest.approx(theirs[name], rel=2e-5, abs=1e-6), name


def test_rows_without_weight_change_nothing(step, whole, params):
    """Their log-probs, advantages and tokens may be anything."""
    valid = np.arange(ROWS) != 3
    weights = token_weights(jnp.asarray(MASK), over="seq-mean-token-mean", valid=jnp.asarray(valid))
    spoil = lambda x, value: jnp.asarray(np.where(valid[:, None], x, value))
    base = policy_batch(weights=weights, valid=jnp.asarray(valid))
    spoilt = base._replace(
        tokens=spoil(base.tokens, 5),
        old_logprobs=spoil(base.old_logprobs, np.float32(np.inf)),
        advantages=spoil(base.advantages, np.float32(np.nan)),
        ref_logprobs=spoil(base.ref_logprobs, np.float32(-np.inf)),
        sampler_logprobs=spoil(base.sampler_logprobs, np.float32(np.nan)),
    )
    first, second = step(params, base), step(params, spoilt)
    jax.tree.map(np.testing.assert_array_equal, first[0], second[0])
    assert result(first[2]) == result(second[2])
    assert all(math.isfinite(value) for value in result(second[2]).values())


@pytest.mark.parametrize("place", ["advantages", "old_logprobs", "weights"])
def test_a_non_finite_loss_leaves_the_state_untouched(step, params, place):
    batch = policy_batch()
    spoilt = np.array(getattr(batch, place))
    spoilt[2, PROMPT] = np.inf if place == "weights" else np.nan
    _, state, metrics = step(params, batch._replace(**{place: jnp.asarray(spoilt)}))
    assert result(metrics)["nonfinite"] == 1
    assert not math.isfinite(result(metrics)["loss"])
    assert int(state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params["policy"], params)


def test_microbatches_take_every_parts_th_row():
    parts = cut({"x": np.arange(8), "y": np.arange(16).reshape(8, 2)}, 4)
    np.testing.assert_array_equal(parts["x"], [[0, 4], [1, 5], [2, 6], [3, 7]])
    np.testing.assert_array_equal(parts["y"][1], [[2, 3], [10, 11]])
    with pytest.raises(ValueError, match="a batch of 8 rows does not divide into 3 microbatches"):
        cut({"x": np.arange(8)}, 3)


# --- the optimiser step on a model of one number ------------------------------------------------------------------------


def toy_objective(params, frozen, batch, *, model):
    """Σ w (x θ)², and metrics of each kind."""
    error = batch["x"] * params["policy"]["theta"]
    return jnp.sum(batch["w"] * error**2), {"error": Mean(jnp.sum(error), jnp.float32(error.size))}


def toy_step(model, objective, tx, microbatches=1):
    return jax.jit(functools.partial(update, objective=objective, tx=tx, model=model, microbatches=microbatches))


def test_moments_count_and_schedule_move_with_the_step_and_stay_without_it(model):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.0, 10)))
    state = state_of({"theta": jnp.float32(2.0)}, tx)
    run = toy_step(model, toy_objective, tx, microbatches=2)
    batch = {"x": jnp.arange(1.0, 5.0), "w": jnp.full(4, 0.25)}
    reference, reference_opt = {"policy": {"theta": jnp.float32(2.0)}}, state.opt_state
    for number in range(3):
        gradient = {"policy": {"theta": 2 * np.mean(np.arange(1.0, 5.0) ** 2) * reference["policy"]["theta"]}}
        state, metrics = run(state, Frozen(), batch)
        assert result(metrics)["grad_norm"] == pytest.approx(float(gradient["policy"]["theta"]), rel=1e-6)
        updates, reference_opt = tx.update(gradient, reference_opt, reference)
        reference = optax.apply_updates(reference, updates)
        assert int(state.step) == number + 1
        assert float(state.params["policy"]["theta"]) == pytest.approx(float(reference["policy"]["theta"]), rel=1e-6)
    after, metrics = run(state, Frozen(), batch | {"x": jnp.array([1.0, jnp.nan, 1.0, 1.0])})
    assert result(metrics)["nonfinite"] == 1
    kept, left = jax.tree.leaves(after._replace(key=0)), jax.tree.leaves(state._replace(key=0))
    for a, b in zip(kept, left, strict=True):
        np.testing.assert_array_equal(a, b)
    again, _ = run(after, Frozen(), batch)  # the run could go on
    assert int(again.step) == 4


def test_a_non_finite_gradient_of_a_finite_loss_leaves_the_state_untouched(model):
    objective = lambda params, frozen, batch, *, model: (jnp.sum(jnp.sqrt(params["policy"]["theta"] * batch)), {})
    tx = optax.adam(0.1)
    state = state_of({"theta": jnp.float32(0.0)}, tx)
    after, metrics = toy_step(model, objective, tx)(state, Frozen(), jnp.ones(2))
    assert result(metrics)["loss"] == 0.0
    assert result(metrics)["nonfinite"] == 1
    assert not math.isfinite(result(metrics)["grad_norm"])
    assert int(after.step) == 0
    assert float(after.params["policy"]["theta"]) == 0.0
    for a, b in zip(jax.tree.leaves(after.opt_state), jax.tree.leaves(state.opt_state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bfloat16_gradients_are_summed_in_float32(model):
    objective = lambda params, frozen, batch, *, model: (jnp.sum(params["policy"]["theta"] * batch), {})
    state = {"policy": {"theta": jnp.ones((), jnp.bfloat16)}}
    batch = jnp.asarray([1.0] + [2.0**-9] * 63, jnp.bfloat16)  # each too small to change a bfloat16 sum of 1
    grads, metrics = jax.jit(
        functools.partial(gradients, frozen=Frozen(), objective=objective, model=model, microbatches=64)
    )(state, batch=batch)
    assert grads["policy"]["theta"].dtype == jnp.float32
    assert float(grads["policy"]["theta"]) == 1 + 63 * 2.0**-9
    assert isinstance(metrics["loss"], Sum)


# --- GRPO's loss on given log-probs -------------------------------------------------------------------------------------


@pytest.fixture
def given_scores(monkeypatch):
    """Lets an objective read its log-probs from the params."""
    read = lambda params, *args, **kwargs: Scores(params["logprobs"], params["entropy"])
    monkeypatch.setattr(objectives, "score", read)


def plain_policy_loss(logprobs, batch, *, low, high, delta, level, beta):
    """The loss and its gradient to the log-probs, by loops in float64."""
    loss, gradient, clipped = 0.0, np.zeros(MASK.shape), {"low": 0, "high": 0}
    weights, old, ref, advantages = (
        np.float64(x) for x in (batch.weights, batch.old_logprobs, batch.ref_logprobs, batch.advantages)
    )
    for n in range(ROWS):
        columns = np.flatnonzero(MASK[n])
        mean = np.mean([logprobs[n, t] - old[n, t] for t in columns])
        for t in columns:
            ratio = math.exp(logprobs[n, t] - old[n, t]) if level == "token" else math.exp(mean)
            a = advantages[n, t]
            free = ratio if delta is None else min(ratio, delta)
            bound = min(max(ratio, 1 - low), 1 + high)
            loss -= weights[n, t] * min(free * a, bound * a)
            moves = free * a <= bound * a and free == ratio
            if moves and level == "token":
                gradient[n, t] -= weights[n, t] * a * ratio
            elif moves:
                gradient[n, columns] -= weights[n, t] * a * ratio / len(columns)
            clipped["low"] += a < 0 and ratio < 1 - low
            clipped["high"] += a > 0 and ratio > 1 + high
            gap = logprobs[n, t] - ref[n, t]
            loss += beta * weights[n, t] * (math.exp(-gap) - 1 + gap)
            gradient[n, t] += beta * weights[n, t] * (1 - math.exp(-gap))
    return loss, gradient, {name: count / MASK.sum() for name, count in clipped.items()}


@pytest.mark.parametrize("over", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"high": 0.28},
        {"low": 0.1, "high": 0.4, "delta": 1.6},
        {"level": "sequence", "low": 0.05, "high": 0.05},
        {"beta": 0.3},
    ],
    ids=str,
)
def test_the_policy_loss_is_its_formula(given_scores, model, options, over):
    options = {"low": 0.2, "high": 0.2, "delta": None, "level": "token", "beta": 0.0} | options
    weights = token_weights(jnp.asarray(MASK), over=over, length=COLUMNS - PROMPT)
    batch = policy_batch(beta=options["beta"], weights=weights)
    logprobs = np.asarray(batch.old_logprobs) + np.random.default_rng(2).normal(size=MASK.shape) * 0.5
    entropy = np.where(MASK, 1.5, np.nan)
    objective = PolicyObjective(
        completion_columns=COLUMNS - PROMPT,
        clip_low=options["low"],
        clip_high=options["high"],
        delta=options["delta"],
        level=options["level"],
    )
    call = lambda lp: objective(
        {"policy": {"logprobs": lp, "entropy": jnp.float32(entropy)}}, Frozen(), batch, model=model
    )
    (loss, metrics), gradient = jax.jit(jax.value_and_grad(call, has_aux=True))(jnp.float32(logprobs))
    expected, expected_gradient, clipped = plain_policy_loss(np.float64(np.float32(logprobs)), batch, **options)
    assert float(loss) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    found = result(metrics)
    assert found["clip_ratio/low_mean"] == pytest.approx(clipped["low"])
    assert found["clip_ratio/high_mean"] == pytest.approx(clipped["high"])
    assert found["clip_ratio/region_mean"] == pytest.approx(clipped["low"] + clipped["high"])
    assert clipped["low"] > 0
    assert clipped["high"] > 0
    assert found["entropy"] == 1.5


def test_sampler_metrics_compare_the_sampler_with_the_old_policy(given_scores, model):
    batch = policy_batch()
    logprobs = {"logprobs": batch.old_logprobs - 0.25, "entropy": batch.old_logprobs}
    call = jax.jit(lambda p: PolicyObjective(completion_columns=5)({"policy": p}, Frozen(), batch, model=model)[1])
    found = result(call(logprobs))
    gap = (np.float64(batch.old_logprobs) - np.float64(batch.sampler_logprobs))[MASK]
    assert found["sampling/logp_difference/mean"] == pytest.approx(np.abs(gap).mean(), rel=1e-4)
    assert found["sampling/logp_difference/max"] == pytest.approx(np.abs(gap).max(), rel=1e-4)
    assert found["sampling/importance_ratio/mean"] == pytest.approx(np.exp(gap).mean(), rel=1e-6)
    assert found["sampling/importance_ratio/min"] == pytest.approx(np.exp(gap).min(), rel=1e-6)
    assert found["sampling/importance_ratio/max"] == pytest.approx(np.exp(gap).max(), rel=1e-6)
    ref = np.float64(batch.ref_logprobs)[MASK] - np.float64(logprobs["logprobs"])[MASK]
    assert found["kl"] == pytest.approx((np.exp(ref) - ref - 1).mean(), rel=1e-5)


@pytest.mark.parametrize("given", [True, False], ids=["recomputed", "none"])
def test_the_first_update_has_ratio_one_and_clips_nothing(model, params, given):
    """With old log-probs recomputed under the same weights, and without any. The gradient is then that of −w A log pi."""
    batch = policy_batch(ref_logprobs=None, old_logprobs=None)
    objective = PolicyObjective(completion_columns=COLUMNS - PROMPT)

    @jax.jit
    def run(params):
        scores = score(
            params, batch.tokens, batch.segment_ids, model=model, temperature=batch.temperature, start=PROMPT
        )
        full = batch._replace(sampler_logprobs=scores.logprobs, old_logprobs=scores.logprobs if given else None)
        return objective({"policy": params}, Frozen(), jax.lax.stop_gradient(full), model=model)

    loss, metrics = run(params)
    found = result(metrics)
    assert "kl" not in found
    for name in ("low_mean", "high_mean", "region_mean"):
        assert found[f"clip_ratio/{name}"] == 0
    for name in ("mean", "min", "max"):
        assert found[f"sampling/importance_ratio/{name}"] == 1
    assert found["sampling/logp_difference/max"] == 0
    advantages = np.where(MASK, batch.advantages, 0.0)
    assert float(loss) == pytest.approx(-np.sum(np.float64(batch.weights) * advantages), rel=1e-5)


# --- supervised -------------------------------------------------------------------------------------------------------


def test_the_supervised_loss_is_the_weighted_cross_entropy(model, params):
    tokens = policy_batch().tokens
    weights = np.where(MASK, np.random.default_rng(4).uniform(0.1, 1.0, MASK.shape), 0.0).astype(np.float32)
    weights[5] = 0
    batch = SFTBatch(tokens, jnp.asarray(SEGMENTS), jnp.asarray(weights))

    @jax.jit
    def run(params):
        loss, metrics = SFTObjective(score_chunk=16)({"policy": params}, Frozen(), batch, model=model)
        return loss, metrics, score(params, tokens, batch.segment_ids, model=model)

    loss, metrics, scores = run(params)
    assert float(loss) == pytest.approx(-np.sum(np.float64(weights) * np.float64(scores.logprobs)), rel=1e-5)
    found = result(metrics)
    assert found["trained_tokens"] == MASK.sum() - LENGTHS[5]
    assert found["entropy"] == pytest.approx(np.asarray(scores.entropy)[weights > 0].mean(), rel=1e-5)


# --- batches and keys (steps.py) ----------------------------------------------------------------------------------------


def test_a_minibatch_has_the_weights_of_exactly_its_rows():
    batch = policy_batch()
    number = jnp.asarray(np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS), jnp.int32)
    rollout = Rollout(
        tokens=number,
        segment_ids=batch.segment_ids,
        action_mask=batch.action_mask,
        logprobs=batch.sampler_logprobs,
        behaviour_logprobs=None,
        truncated=jnp.asarray(np.arange(ROWS) == 4),
        turn_ids=batch.action_mask.astype(jnp.int32),
        policy_step=batch.action_mask.astype(jnp.int32),
    )
    rows = [6, 1, 4, 2]
    valid = np.arange(ROWS) != 1
    advantages = jnp.where(batch.action_mask, jnp.arange(ROWS, dtype=jnp.float32)[:, None], 0.0)
    rated = Rated(
        rollout=rollout,
        temperature=batch.temperature,
        credit=Credit(advantages, None, jnp.asarray(valid), None),
        old=Scores(batch.old_logprobs, batch.old_logprobs),
        values=None,
        ref_logprobs=None,
    )
    coefficients = Coefficients(*(jnp.float32(x) for x in (0.0, 0.0, 1.0)))

    def take(mask_truncated):
        rule = BatchRule(over="token-mean", mask_truncated=mask_truncated, keep_old=True)
        return steps.minibatch_rows(
            rated, coefficients, jax.random.key(0), jnp.int32(0), jnp.asarray(rows, jnp.int32), rule
        )

    for mask_truncated, learning in ((False, [6, 4, 2]), (True, [6, 2])):
        mini = take(mask_truncated)
        np.testing.assert_array_equal(mini.tokens, np.asarray(number)[rows])
        np.testing.assert_array_equal(mini.sampler_logprobs, np.asarray(batch.sampler_logprobs)[rows])
        np.testing.assert_array_equal(mini.old_logprobs, np.asarray(batch.old_logprobs)[rows])
        assert mini.ref_logprobs is None
        np.testing.assert_array_equal(mini.valid, np.isin(rows, learning))
        expected = MASK[rows] & np.isin(rows, learning)[:, None]
        np.testing.assert_array_equal(mini.advantages, np.where(expected, np.float32(rows)[:, None], 0))
        np.testing.assert_allclose(mini.weights, expected / expected.sum(), rtol=1e-6)


def test_no_two_rows_steps_or_purposes_share_a_key():
    seen = set()
    for seed, purpose, step in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1)]:
        keys = steps.row_keys(jax.random.key(seed), jnp.int32(purpose), jnp.int32(step), rows=16)
        seen |= {tuple(data) for data in np.asarray(jax.random.key_data(keys)).tolist()}
    assert len(seen) == 5 * 16
