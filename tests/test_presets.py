"""One contract over the table of presets, from returns to the loss: credit, weights and objective without a model.

The scores of a current policy stand in for the model's, so that every preset is differentiated by its log-probs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_lm import algos
from jaxrl_lm.batch import BatchRule, Coefficients, Rated
from jaxrl_lm.credit import CreditRule, Outcomes
from jaxrl_lm.metrics import result
from jaxrl_lm.objectives import PolicyObjective
from jaxrl_lm.types import PolicyBatch, Rollout, Scores
from jaxrl_lm.update import cut

P, G, T = 3, 4, 7
N = P * G
PRESETS = sorted(algos.PRESETS)


def arrays(seed=0, *, poison=None, gap=0.3):
    """A rollout with ragged masks and holes, what was scored of it, and its returns."""
    rng = np.random.default_rng(seed)
    mask = rng.random((N, T)) < 0.7
    mask[0] = False  # a row without a token
    mask[1] = [0, 0, 0, 1, 0, 0, 0]  # one token
    near = lambda: (rng.normal(-1.0, 0.4, (N, T)) + 0.0).astype(np.float32)
    sampled = near()
    fields = {
        "logprobs": sampled,
        "old": sampled + rng.normal(0, 0.01, (N, T)).astype(np.float32),
        "current": sampled + rng.normal(0, gap, (N, T)).astype(np.float32),
        "ref": near(),
        "entropy": rng.uniform(0.1, 2.0, (N, T)).astype(np.float32),
        "values": rng.normal(0, 1, (N, T)).astype(np.float32),
    }
    if poison is not None:
        fields = {name: np.where(mask, x, np.float32(poison)) for name, x in fields.items()}
    returns = rng.integers(0, 2, N).astype(np.float32)
    returns[4:8] = 1.0  # a group of equal returns
    valid = np.ones(N, bool)
    valid[9] = False
    return {name: jnp.asarray(x) for name, x in fields.items()} | {
        "mask": jnp.asarray(mask),
        "returns": jnp.asarray(returns),
        "valid": jnp.asarray(valid),
        "turn_ids": jnp.asarray(np.where(mask, 1, 0).astype(np.int32)),
        "tokens": jnp.asarray(rng.integers(0, 9, (N, T)).astype(np.int32)),
    }


def parts(preset, **changes):
    """The rules and the objective that a preset stands for."""
    chosen = dataclasses.replace(algos.PRESETS[preset], **changes)
    high = chosen.epsilon if chosen.epsilon_high is None else chosen.epsilon_high
    credit = CreditRule(
        advantage=chosen.advantage,
        group_size=G,
        scale=chosen.scale_rewards,
        baseline=chosen.advantage_baseline,
        drop=chosen.drop,
        max_length=T,
    )
    rule = BatchRule(
        group_size=G,
        over=chosen.loss_agg_mode,
        length=T,
        keep_old=True,
        sampler_correction=chosen.sampler_correction or "token_truncate",
        correction_cap=chosen.sampler_correction_cap,
        entropy_bonus=True,
    )
    objective = PolicyObjective(
        completion_columns=T - 1,
        surrogate=chosen.surrogate,
        clip_low=chosen.epsilon,
        clip_high=high,
        dual_clip=chosen.dual_clip,
        delta=chosen.delta,
        level=chosen.importance_sampling_level,
    )
    return chosen, credit, rule, objective


def batch_of(preset, x, *, rows=None, entropy=0.01, **changes):
    """The batch of an update, and the rows of the current scores that go with it."""
    chosen, credit, rule, _ = parts(preset, **changes)
    in_reward = chosen.kl_in == "reward"
    kl = algos.kl_estimate(x["old"], x["ref"], x["mask"], estimator="k1") if in_reward else None
    outcomes = Outcomes(
        returns=x["returns"],
        valid=x["valid"],
        mask=x["mask"],
        logprobs=x["logprobs"],
        turn_ids=x["turn_ids"],
        kl=kl,
        kl_coefficient=jnp.float32(0.05),
        values=x["values"],
        greedy_returns=jnp.full(N, 0.25, jnp.float32),
    )
    rollout = Rollout(
        tokens=x["tokens"],
        segment_ids=jnp.ones((N, T), jnp.int32),
        action_mask=x["mask"],
        logprobs=x["logprobs"],
        behaviour_logprobs=None,
        truncated=jnp.zeros(N, bool),
        turn_ids=x["turn_ids"],
        policy_step=jnp.zeros((N, T), jnp.int32),
    )
    rated = Rated(
        rollout=rollout,
        temperature=jnp.ones(N, jnp.float32),
        credit=credit(outcomes),
        old=Scores(x["old"], x["entropy"]),
        values=x["values"],
        ref_logprobs=None if in_reward else x["ref"],
    )
    coefficients = Coefficients(jnp.float32(0.04), jnp.float32(entropy), jnp.float32(1.0))
    rows = jnp.arange(N, dtype=jnp.int32) if rows is None else rows
    return rule(rated, coefficients, jax.random.key(0), rows)


def loss_of(preset, x, current, entropy=None, **changes):
    _, _, _, objective = parts(preset, **changes)
    scores = Scores(current, x["entropy"] if entropy is None else entropy)
    return objective.loss(scores, batch_of(preset, x, **changes))


@functools.cache
def compiled(preset):
    """Value, metrics and gradients in the log-probs and the entropy, as one program."""

    def call(x):
        value = lambda current, entropy: loss_of(preset, x, current, entropy)
        return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(x["current"], x["entropy"])

    return jax.jit(call)


@pytest.mark.parametrize("preset", PRESETS)
def test_contract(preset):
    x = arrays()
    (value, metrics), grads = compiled(preset)(x)
    with jax.disable_jit():
        plain, _ = loss_of(preset, x, x["current"])
    np.testing.assert_allclose(value, plain, rtol=1e-5, atol=1e-6)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)
    assert (np.abs(grads[0]) > 0).any()
    assert all((np.asarray(g)[~np.asarray(x["mask"])] == 0).all() for g in grads)  # nothing flows off the mask
    assert np.isfinite([v for name, v in result(metrics).items()]).all()
    assert (np.asarray(grads[0])[9] == 0).all()  # a row without a return teaches nothing

    # Whatever lies under the mask changes no bit.
    for poison in (np.nan, np.inf, -np.inf):
        (poisoned, _), found = compiled(preset)(arrays(poison=poison))
        assert poisoned == value
        for one, other in zip(found, grads, strict=True):
            np.testing.assert_array_equal(one, other)

    # All masked: no loss, no gradient.
    (value, _), grads = compiled(preset)(x | {"mask": jnp.zeros((N, T), bool)})
    assert value == 0
    assert all((np.asarray(g) == 0).all() for g in grads)

    # Gaps of a hundred nats in both directions, rewards of a million.
    for sign in (1.0, -1.0):
        far = x | {"current": x["current"] + sign * 100.0, "returns": x["returns"] * 1e6}
        (value, _), grads = compiled(preset)(far)
        assert np.isfinite(value)
        assert all(np.isfinite(g).all() for g in grads)
    assert compiled(preset)._cache_size() == 1  # one compile served them all


@functools.cache
def vmapped(preset):
    return jax.jit(jax.vmap(lambda x: loss_of(preset, x, x["current"])[0]))


@pytest.mark.parametrize("preset", PRESETS)
def test_identities(preset):
    """vmap is a loop; groups may come in any order."""
    x, other = arrays(0), arrays(1)
    order = np.concatenate([np.arange(G) + G * p for p in (2, 0, 1)])
    shuffled = {name: leaf[order] for name, leaf in x.items()}
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), x, other, shuffled)
    together = vmapped(preset)(stacked)
    alone = [float(compiled(preset)(one)[0][0]) for one in (x, other)]
    np.testing.assert_allclose(together, [*alone, alone[0]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_padding_columns_change_nothing(preset):
    x = arrays()
    wide = {name: jnp.pad(leaf, ((0, 0), (2, 3))) if leaf.ndim == 2 else leaf for name, leaf in x.items()}
    found = jax.jit(lambda x: loss_of(preset, x, x["current"])[0])(wide)
    np.testing.assert_allclose(found, compiled(preset)(x)[0][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_microbatches_only_add(preset):
    """Policy, KL and entropy have denominators of their own; the parts sum to the whole."""
    x = arrays()
    objective = parts(preset)[3]

    def pieces(x):
        batch = batch_of(preset, x)
        value = lambda current, part: objective.loss(Scores(current, part[1]), part[0])[0]
        one = lambda part: jax.value_and_grad(value)(part[0], part[1:])
        values, grads = jax.lax.map(one, cut((x["current"], batch, x["entropy"]), 4))
        return values.sum(), grads.swapaxes(0, 1).reshape(N, T)

    (whole, _), (grad, _) = compiled(preset)(x)
    values, grads = jax.jit(pieces)(x)
    np.testing.assert_allclose(values, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads, grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_ragged_microbatches_add_too(preset):
    x = arrays()
    batch, objective = batch_of(preset, x), parts(preset)[3]
    value = lambda rows: objective.loss(
        Scores(x["current"][rows], x["entropy"][rows]), jax.tree.map(lambda leaf: leaf[rows], batch)
    )[0]
    found = sum(float(value(rows)) for rows in (np.arange(1), np.arange(1, 8), np.arange(8, N)))
    assert found == pytest.approx(float(compiled(preset)(x)[0][0]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(preset):
    """−Σ w A ∇l, token by token; a sequence's ratio spreads the sum of its tokens' terms over them."""
    x = arrays()
    x = x | {"old": x["logprobs"], "current": x["logprobs"]}
    objective = parts(preset)[3]

    @jax.jit
    def call(x):
        batch = batch_of(preset, x)._replace(kl_weights=None, entropy_weights=None)
        value = lambda current: objective.loss(Scores(current, x["entropy"]), batch)
        return batch, jax.grad(value, has_aux=True)(x["current"])

    batch, (grad, metrics) = call(x)
    mask = np.asarray(batch.action_mask & batch.valid[:, None])
    expected = np.where(mask, np.asarray(-batch.weights * batch.advantages, np.float64), 0.0)
    if objective.level in ("sequence", "sequence-sum"):
        totals = expected.sum(1, keepdims=True)
        sizes = np.maximum(mask.sum(1, keepdims=True), 1) if objective.level == "sequence" else 1.0
        expected = np.where(mask, totals / sizes, 0.0)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-7)
    found = result(metrics)
    assert found["clip_ratio/region_mean"] == 0
    assert found["approx_kl"] == 0


def test_what_the_presets_are():
    """The parts that the names stand for in their papers."""
    table = algos.PRESETS
    assert len(table) == 16
    assert table["rloo"].advantage == "leave-one-out"
    assert (table["rloo"].kl_in, table["rloo"].beta) == ("reward", 0.05)
    assert table["gspo"].importance_sampling_level == "sequence"
    assert table["dapo"].dynamic_sampling
    assert table["decoupled_ppo"].sampler_correction_cap is None
    assert table["raft"].drop == "wrong"
    assert table["reinforce_rej"].drop == "equal"


def test_a_dropped_group_leaves_the_denominators():
    """Reinforce-Rej and GPG: the weights are those of the batch without its groups of equal returns."""
    x = arrays()
    kept = [n for n in range(N) if not 4 <= n < 8]
    for preset in ("gpg", "reinforce_rej"):
        batch = batch_of(preset, x)
        assert (np.asarray(batch.weights)[4:8] == 0).all()
        mask = np.asarray(x["mask"])[kept] & np.asarray(x["valid"])[kept, None]
        if algos.PRESETS[preset].loss_agg_mode == "token-mean":
            assert float(batch.kl_weights.sum()) == pytest.approx(0.04)
            np.testing.assert_allclose(np.asarray(batch.kl_weights)[kept][mask], 0.04 / mask.sum(), rtol=1e-6)


def test_raft_learns_from_right_rows_alone():
    batch = batch_of("raft", arrays())
    right = np.asarray(arrays()["returns"]) >= 0.5
    assert (np.asarray(batch.weights)[~right] == 0).all()
    assert (np.asarray(batch.advantages)[right][np.asarray(batch.weights)[right] > 0] == 1).all()


def expected_gradient(batch_of_action, objective):
    """Σ_a π_old(a) ∂ loss(a) / ∂ logits: one action of three, enumerated, in the current policy's logits."""
    old = jnp.log(jnp.array([0.5, 0.3, 0.2], jnp.float32))
    logits = jnp.array([0.2, -0.4, 0.3], jnp.float32)

    def loss(logits):
        current = jax.nn.log_softmax(logits)
        rows = Scores(current[:, None], jnp.zeros((3, 1), jnp.float32))
        # Action a in row a, weighted by how often the old policy takes it.
        return objective.loss(rows, batch_of_action(old[:, None]))[0]

    return old, logits, jax.value_and_grad(loss)(logits)


def one_action(old, **fields):
    zero, some = jnp.zeros((3, 1), jnp.float32), jnp.ones((3, 1), bool)
    defaults = {
        "tokens": jnp.zeros((3, 1), jnp.int32),
        "segment_ids": jnp.ones((3, 1), jnp.int32),
        "action_mask": some,
        "weights": zero,
        "temperature": jnp.ones(3, jnp.float32),
        "old_logprobs": old,
        "sampler_logprobs": old,
        "advantages": zero,
        "ref_logprobs": None,
        "truncated": jnp.zeros(3, bool),
        "valid": jnp.ones(3, bool),
    }
    return PolicyBatch(**defaults | fields)


def test_the_kl_to_the_old_policy_is_exact_on_average():
    """KL-Cov's term: value and gradient of KL(old ‖ π), whose tokens are the old policy's."""
    objective = PolicyObjective(completion_columns=1)
    batch = lambda old: one_action(old, old_kl_weights=jnp.exp(old))
    old, logits, (value, grad) = expected_gradient(batch, objective)
    exact = lambda z: jnp.sum(jnp.exp(old) * (old - jax.nn.log_softmax(z)))
    assert float(value) == pytest.approx(float(exact(logits)), rel=1e-5)
    np.testing.assert_allclose(grad, jax.grad(exact)(logits), atol=1e-6)


@pytest.mark.parametrize("importance", [True, False])
def test_with_its_ratio_the_kl_loss_is_exact_off_policy(importance):
    """E_old[ρ k3] is KL(π ‖ ref), value and gradient, wherever π has moved from the old policy; k3 alone is not."""
    ref = jnp.log(jnp.array([0.25, 0.25, 0.5], jnp.float32))
    objective = PolicyObjective(completion_columns=1, kl_importance=importance)
    batch = lambda old: one_action(old, ref_logprobs=ref[:, None], kl_weights=jnp.exp(old))
    _, logits, (value, grad) = expected_gradient(batch, objective)
    exact = lambda z: jnp.sum(jax.nn.softmax(z) * (jax.nn.log_softmax(z) - ref))
    close = np.allclose(value, exact(logits), atol=1e-6) and np.allclose(grad, jax.grad(exact)(logits), atol=1e-6)
    assert close == importance
