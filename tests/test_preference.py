"""Losses on preferences against float64 loops, exact values, optima on finite sets, and games with cycles."""

import math
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_preference as reference
from hypothesis import given, settings
from test_algos import f32, plain

from jaxrl_lm.algos import nash, preference
from jaxrl_lm.algos.f_divergence import Divergence, divergence_score
from jaxrl_lm.algos.preference_variants import LOSSES, Variant
from jaxrl_lm.metrics import result

EXAMPLE = Path(__file__).parents[1] / "examples" / "preference_game.py"
LN2 = math.log(2)
NEEDS = {"exo_pair": {"label_smoothing": 0.01}}
# Beside every variant with its defaults, every option at a value that acts.
OPTIONS = [{"variant": name, **NEEDS.get(name, {})} for name in Variant.__args__] + [
    {"variant": "sigmoid", "label_smoothing": 0.2, "beta": 0.7},
    {"variant": "sigmoid", "length_alpha": 0.03},
    {"variant": "sigmoid", "ld_alpha": 0.4},
    {"variant": "sigmoid_norm", "label_smoothing": 0.1, "beta": 2.0, "f_divergence": "js_divergence"},
    {"variant": "hinge", "beta": 0.5, "f_divergence": "forward_kl"},
    {"variant": "ipo", "ld_alpha": 0.0, "f_divergence": "alpha_divergence"},
    {"variant": "robust", "label_smoothing": 0.3, "f_divergence": "alpha_divergence", "f_alpha": 1.7},
    {"variant": "exo_pair", "label_smoothing": 0.1, "length_alpha": 0.1, "f_divergence": "js_divergence"},
    {"variant": "nca_pair", "beta": 0.5, "ld_alpha": 0.3},
    {"variant": "bco_pair", "reward_shift": 0.3, "beta": 0.5},
    {"variant": "aot", "label_smoothing": 0.1, "ld_alpha": 0.7},
    {"variant": "aot_unpaired", "label_smoothing": 0.1, "beta": 0.5},
    {"variant": "discopop", "discopop_tau": 0.6, "beta": 0.5},
    {"variant": "simpo", "gamma": 1.2, "beta": 2.0, "label_smoothing": 0.1},
    {"variant": "cpo", "sft_length": 7.0, "sft_weight": 0.3, "label_smoothing": 0.1},
    {"variant": "orpo", "sft_length": 3.0, "sft_weight": 0.5, "beta": 0.4},
    {"variant": "sft", "sft_length": 2.5},
]
NAMES = [" ".join(map(str, options.values())) for options in OPTIONS]
KTO = {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}
INPO = {"eta": 0.8, "tau": 0.3}


def all_losses(x, logprobs):
    """Every loss [number, N] of one batch."""
    ref, mask = x["ref"], x["mask"]
    rows = lambda array: array[:, 0]
    values = [preference.dpo_loss(logprobs, ref, mask, **options) for options in OPTIONS]
    values.append(preference.dpo_loss(logprobs, None, mask))
    values.append(preference.mpo_loss(logprobs, ref, mask, beta=0.2, reward_shift=0.1))
    values.append(nash.inpo_loss(logprobs, ref, x["old"], mask, **INPO))
    kl = preference.kto_kl(rows(logprobs), rows(ref), rows(mask))
    values.append(preference.kto_loss(rows(logprobs), rows(ref), rows(mask), x["labels"], kl, **KTO))
    return jnp.stack(values)


@jax.jit
def losses_and_slopes(x):
    values, pull = jax.vjp(lambda logprobs: all_losses(x, logprobs), x["logprobs"])
    return values, jax.vmap(lambda one: pull(one[:, None] * x["weights"][None, :])[0])(jnp.eye(len(values)))


def expected_losses(x):
    """The same as functions of the log-probs."""
    ref, mask = x["ref"], x["mask"]
    for options in OPTIONS:
        yield lambda logprobs, options=options: reference.dpo(logprobs, ref, mask, **options)
    yield lambda logprobs: reference.dpo(logprobs, None, mask)
    parts = {"sigmoid": (0.8, {}), "bco_pair": (0.2, {"reward_shift": 0.1}), "sft": (1.0, {})}
    part = lambda logprobs, name, o: reference.dpo(logprobs, ref, mask, variant=name, beta=0.2, **o)
    yield lambda logprobs: sum(weight * part(logprobs, name, o) for name, (weight, o) in parts.items())
    yield lambda logprobs: reference.inpo(logprobs, ref, x["old"], mask, **INPO)
    kl = reference.kto_kl(x["logprobs"][:, 0], ref[:, 0], mask[:, 0])
    yield lambda logprobs: reference.kto(logprobs[:, 0], ref[:, 0], mask[:, 0], x["labels"], kl, **KTO)


@given(x=reference.batches())
@settings(max_examples=15, deadline=None)
def test_every_loss_and_its_gradient_are_those_of_the_loops(x):
    with jax.enable_x64(True):
        values, slopes = map(np.asarray, losses_and_slopes(jax.tree.map(jnp.asarray, x)))
    names = [*NAMES, "no reference", "mpo", "inpo", "kto"]
    for name, value, slope, function in zip(names, values, slopes, expected_losses(x), strict=True):
        np.testing.assert_allclose(value, function(x["logprobs"]), rtol=1e-10, atol=1e-12, err_msg=name)
        expected = reference.slopes(function, x["logprobs"], x["mask"], x["weights"])
        scale = max(1.0, np.abs(value).max(), np.abs(expected).max())
        np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-8 * scale, err_msg=name)


@jax.jit
def rewards_and_metrics(x):
    given = (x["logprobs"], x["ref"], x["mask"])
    call = lambda **o: preference.implicit_rewards(*given, beta=0.5, **o)
    return call(), call(ld_alpha=0.3), call(average=True), preference.preference_metrics(*given, beta=0.5)


@given(x=reference.batches())
@settings(max_examples=10, deadline=None)
def test_rewards_and_metrics_are_those_of_the_loops(x):
    facts = lambda n, **o: reference.facts(x["logprobs"][n], x["ref"][n], x["mask"][n], o)
    rows = range(len(x["mask"]))
    with jax.enable_x64(True):
        rewards, tail, means, metrics = rewards_and_metrics(jax.tree.map(jnp.asarray, x))
    rewards = np.asarray(rewards)
    np.testing.assert_allclose(rewards, [[0.5 * g for g in facts(n)["g"]] for n in rows], atol=1e-12)
    np.testing.assert_allclose(tail, [[0.5 * g for g in facts(n, ld_alpha=0.3)["g"]] for n in rows], atol=1e-12)
    of_mean = [[0.5 * g / max(c, 1) for g, c in zip(f["g"], f["lengths"], strict=True)] for f in map(facts, rows)]
    np.testing.assert_allclose(means, of_mean, atol=1e-12)
    whole = [n for n in rows if facts(n)["whole"]]
    mean = lambda values: np.mean(values) if whole else math.nan
    expected = {
        "rewards/chosen": mean([rewards[n, 0] for n in whole]),
        "rewards/rejected": mean([rewards[n, 1] for n in whole]),
        "rewards/margins": mean([rewards[n, 0] - rewards[n, 1] for n in whole]),
        "rewards/accuracies": mean([rewards[n, 0] > rewards[n, 1] for n in whole]),
        "logps/chosen": mean([facts(n)["pi"][0] for n in whole]),
        "logps/rejected": mean([facts(n)["pi"][1] for n in whole]),
    }
    assert result(metrics) == pytest.approx(expected, rel=1e-6, abs=1e-12, nan_ok=True)


def test_equal_rewards_are_no_accuracy():
    x = f32([[[1.0], [1.0]], [[1.0], [0.0]]])
    metrics = result(preference.preference_metrics(x, None, jnp.ones((2, 2, 1), bool), beta=0.1))
    assert metrics["rewards/accuracies"] == 0.5


# --- exact values ------------------------------------------------------------------------------------------------------

# At zero margin with β = 0.1, ε = 0.01 in exo_pair: KL([½, ½] ‖ [0.99, 0.01]) = −½ ln(4 · 0.99 · 0.01).
ZERO = {
    "sigmoid": LN2, "sigmoid_norm": LN2, "hinge": 1.0, "ipo": 25.0, "robust": LN2,
    "exo_pair": -0.5 * math.log(4 * 0.99 * 0.01), "nca_pair": 2 * LN2, "bco_pair": 2 * LN2, "aot": LN2,
    "aot_unpaired": LN2, "apo_zero": 1.0, "apo_down": 1.0, "sppo_hard": 50.0, "discopop": 0.5 * LN2 + 0.5,
    "simpo": LN2, "cpo": LN2, "orpo": 0.1 * LN2, "sft": 0.0,
}  # fmt: skip


@jax.jit
def variants(logprobs, ref, mask):
    """Each variant's losses [variant, N] at its defaults, and the gradient of their sum over the rows."""
    call = lambda logprobs: jnp.stack(
        [preference.dpo_loss(logprobs, ref, mask, variant=name, **NEEDS.get(name, {})) for name in ZERO]
    )
    values, pull = jax.vjp(call, logprobs)
    return values, jax.vmap(lambda one: pull(jnp.broadcast_to(one[:, None], values.shape))[0])(jnp.eye(len(values)))


@pytest.mark.parametrize("under", [0.0, math.nan, math.inf])
def test_a_pair_that_lacks_a_side_has_the_loss_of_zero_margin_and_changes_no_other(under):
    assert ZERO.keys() == LOSSES.keys()
    mask = np.ones((4, 2, 3), bool)
    mask[1] = False  # fully masked
    mask[3, 0] = False  # the chosen side was cut away
    rng = np.random.default_rng(0)
    logprobs, ref = (f32(np.where(mask, x, under)) for x in rng.normal(-3.0, 1.0, (2, *mask.shape)))
    lacking, whole = np.array([1, 3]), np.array([0, 2])
    values, slopes = map(np.asarray, variants(logprobs, ref, jnp.asarray(mask)))
    np.testing.assert_allclose(values[:, lacking], np.tile(list(ZERO.values()), (2, 1)).T, rtol=1e-6, atol=1e-7)
    twice = np.tile(whole, 2)  # of the same shape, so that nothing is compiled again
    alone, alone_slopes = variants(logprobs[twice], ref[twice], jnp.asarray(mask[twice]))
    np.testing.assert_allclose(values[:, whole], alone[:, :2], rtol=1e-6)
    assert not slopes[:, lacking].any()
    assert np.isfinite(slopes).all()
    np.testing.assert_allclose(slopes[:, whole], alone_slopes[:, :2], rtol=1e-5, atol=1e-7)
    assert np.abs(slopes[:, whole]).max((1, 2, 3)).min() > 1e-4


def one_pair(margin):
    """Log-probs of a pair of single tokens, reference 0, whose margin is given."""
    return jnp.stack([f32(margin), jnp.zeros_like(f32(margin))], axis=-1)[..., None]


def test_the_gradient_is_beta_times_the_chance_of_a_wrong_order():
    margins = jnp.linspace(-30.0, 30.0, 13)
    x, zeros, mask = one_pair(margins), jnp.zeros((13, 2, 1)), jnp.ones((13, 2, 1), bool)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(preference.dpo_loss(x, zeros, mask, beta=0.3))))(x)
    np.testing.assert_allclose(slope[:, 0, 0], -0.3 * jax.nn.sigmoid(-0.3 * margins), rtol=1e-5)  # = 1 − P(chosen)
    np.testing.assert_allclose(slope[:, 1, 0], -slope[:, 0, 0])


COMPARING = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "aot", "discopop", "simpo", "cpo", "orpo")


def test_identical_sides_have_zero_margin_and_no_gradient():
    rng = np.random.default_rng(1)
    mask = jnp.ones((3, 2, 4), bool)
    tokens = jnp.asarray(rng.integers(0, 5, (3, 1, 4)).repeat(2, 1))
    ref = f32(-rng.gamma(2.0, 0.5, (3, 1, 4)).repeat(2, 1))
    more = NEEDS | {"simpo": {"gamma": 0.0}, "cpo": {"sft_weight": 0.0}, "orpo": {"sft_weight": 0.0}}

    @jax.jit
    def losses_and_slopes(table):
        def losses(table):
            logprobs = jax.nn.log_softmax(table)[jnp.arange(4), tokens]
            call = lambda name: preference.dpo_loss(logprobs, ref, mask, variant=name, **more.get(name, {}))
            return jnp.stack([call(name) for name in COMPARING])

        return losses(table), jax.jacobian(lambda table: losses(table).sum(1))(table)

    values, slopes = losses_and_slopes(f32(rng.normal(size=(6, 5))))
    np.testing.assert_allclose(values, np.tile([ZERO[name] for name in COMPARING], (3, 1)).T, rtol=1e-6)
    np.testing.assert_allclose(slopes, 0.0, atol=1e-5)  # of terms of size β to 1/β that cancel


FAR_LIMITS = {  # margins +1e4 and −1e4 (chosen's or, in size, both sides'), β = 0.1
    "sigmoid": (0.0, 1e3), "sigmoid_norm": (0.0, 1e3), "hinge": (0.0, 1001.0), "robust": (0.0, 1e3),
    "aot": (0.0, 1e3), "apo_zero": (0.5, 1.5), "apo_down": (1.0, 1.0), "discopop": (0.0, 1e3),
    "exo_pair": (-math.log(0.99), -math.log(0.01)), "bco_pair": (LN2, 1e3 + LN2),
}  # fmt: skip


def test_margins_of_ten_thousand_nats_leave_values_and_gradients_finite():
    mask = jnp.ones((4, 2, 1), bool)
    x = f32([[[1e4], [0.0]], [[-1e4], [0.0]], [[0.0], [1e4]], [[0.0], [-1e4]]])

    @jax.jit
    def call(x):
        kinds = OPTIONS[: len(Variant.__args__)]
        kinds = kinds + [
            {"variant": v, "f_divergence": d} for v in ("sigmoid", "ipo", "discopop") for d in Divergence.__args__[1:]
        ]
        losses = lambda x: jnp.stack([preference.dpo_loss(x, jnp.zeros_like(x), mask, **o) for o in kinds])
        values, pull = jax.vjp(losses, x)
        slopes = jax.vmap(lambda one: pull(jnp.broadcast_to(one[:, None], values.shape))[0])(jnp.eye(len(kinds)))
        return values, slopes

    values, slopes = map(np.asarray, call(x))
    assert np.isfinite(values).all()
    assert np.isfinite(slopes).all()
    for index, name in enumerate(Variant.__args__):
        if name in FAR_LIMITS and name != "aot":
            np.testing.assert_allclose(values[index, :2], FAR_LIMITS[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for sign in (0, 1):  # alone in its batch, a pair is its own rank
        one = preference.dpo_loss(x[sign : sign + 1], jnp.zeros((1, 2, 1)), mask[:1], variant="aot")
        np.testing.assert_allclose(one, FAR_LIMITS["aot"][sign], atol=1e-6)


def test_a_certain_answer_has_finite_odds():
    x, mask = f32([[[0.0], [-1.0]], [[0.0], [0.0]], [[-1e4], [0.0]]]), jnp.ones((3, 2, 1), bool)
    loss = lambda x: preference.dpo_loss(x, None, mask, variant="orpo", beta=1.0, sft_weight=0.0)
    values, slopes = jax.jit(lambda x: (loss(x), jax.grad(lambda x: loss(x).sum())(x)))(x)
    assert np.isfinite(values).all()
    assert np.isfinite(slopes).all()
    assert float(values[1]) == pytest.approx(LN2)
    assert float(values[2]) == pytest.approx(1e4 + math.log(1e6), rel=1e-4)


# --- identities --------------------------------------------------------------------------------------------------------


def test_the_shared_prefix_does_not_reach_the_margin():
    """Bit for bit, whatever the prefix's log-probs, while the implicit rewards themselves move."""
    rng = np.random.default_rng(3)
    x, ref = f32(rng.normal(size=(5, 2, 7))), f32(rng.normal(size=(5, 2, 7)))
    mask = jnp.asarray(rng.random((5, 2, 7)) < 0.8).at[:, :, :3].set(True).at[:, :, 6].set(True)
    shared = f32(rng.normal(size=(5, 1, 3)) * 1e3)
    moved = x.at[:, :, :3].set(jnp.broadcast_to(shared, (5, 2, 3)))
    ref = ref.at[:, :, :3].set(f32(rng.normal(size=(5, 1, 3)).repeat(2, 1)))
    cut = mask.at[:, :, :3].set(False)
    for options in ({}, {"label_smoothing": 0.1}, {"variant": "hinge"}, {"variant": "discopop"}):
        found = preference.dpo_loss(moved, ref, mask, **options)
        np.testing.assert_array_equal(found, preference.dpo_loss(x, ref, cut, **options))
    rewards = lambda x, mask: preference.implicit_rewards(x, ref, mask, beta=0.1)
    gaps = [np.subtract(*rewards(a, m).T) for a, m in ((moved, mask), (x, cut))]
    np.testing.assert_allclose(*gaps, atol=1e-3)
    assert np.abs(rewards(moved, mask) - rewards(x, cut)).min() > 1.0


REF = np.array([0.080549, 0.062242, 0.134769, 0.078889, 0.041574, 0.101976, 0.261685, 0.183134, 0.035142, 0.020040])
REWARD = np.array([0.815854, 0.002739, 0.857404, 0.033586, 0.729655, 0.175656, 0.863179, 0.541461, 0.299712, 0.422687])
BOLTZMANN = [0.109715, 0.016674, 0.199473, 0.022478, 0.047660, 0.038604, 0.391822, 0.144092, 0.017050, 0.012434]
FIRST, SECOND = (side.ravel() for side in np.nonzero(~np.eye(10, dtype=bool)))  # all ordered pairs
COUNTS = np.arange(10) % 3 + 1  # tokens of each response


def population(z, order, *, counts=None, **options):
    """The mean loss over all ordered pairs, order[i, j] = P(i ≻ j); a response's log-prob is spread over its tokens."""
    counts = np.ones(10, int) if counts is None else counts
    mask = np.arange(counts.max())[None, :] < counts[:, None]
    spread = lambda log_p: jnp.where(mask, (log_p / counts)[:, None], 0.0)
    ordered = lambda x: jnp.stack([x[FIRST], x[SECOND]], axis=1)
    logprobs, ref = spread(jax.nn.log_softmax(z)), spread(jnp.log(REF))
    losses = preference.dpo_loss(ordered(logprobs), ordered(ref), ordered(jnp.asarray(mask)), **options)
    return jnp.mean(order[FIRST, SECOND] * losses)


def logistic(gaps):
    return 1 / (1 + np.exp(-gaps))


def test_the_optimum_of_dpo_is_the_boltzmann_policy():
    """Gradient descent on the population loss, labels from Bradley and Terry, β = 0.5: π_ref exp(r / β) / Z."""
    order = logistic(REWARD[:, None] - REWARD[None, :])
    slope = jax.grad(lambda z: population(z, order, beta=0.5))
    with jax.enable_x64(True):
        start = jnp.zeros(10, jnp.float64)
        z = jax.jit(lambda z: jax.lax.fori_loop(0, 3000, lambda _, z: z - 40.0 * slope(z), z))(start)
        found = np.asarray(jax.nn.softmax(z))
        optimum = REF * np.exp(REWARD / 0.5)
        optimum /= optimum.sum()
        np.testing.assert_allclose(found, optimum, atol=1e-12)
        np.testing.assert_allclose(found, BOLTZMANN, atol=1e-5)
        rewards = 0.5 * np.log(found / REF)  # = r − V*, V* = 0.661346
        np.testing.assert_allclose(REWARD - rewards, 0.661346, atol=1e-5)


Z = np.random.default_rng(5).normal(size=10)
LOG_PI = Z - np.log(np.exp(Z).sum())
LOG_RATIO = LOG_PI - np.log(REF)


# Options, the score of each response under the policy, and the share of labels that are flipped.
STATIONARY = [
    ({"f_divergence": "forward_kl"}, 0.4 * (1 - REF / np.exp(LOG_PI)), 0.0),
    ({"f_divergence": "js_divergence"}, 0.4 * np.log(2 / (1 + np.exp(-LOG_RATIO))), 0.0),
    ({"f_divergence": "alpha_divergence", "f_alpha": 0.3}, 0.4 * (np.exp(-0.7 * LOG_RATIO) - 1) / -0.7, 0.0),
    ({"f_divergence": "alpha_divergence", "f_alpha": 1.0}, 0.4 * LOG_RATIO, 0.0),
    ({"length_alpha": 0.2}, 0.4 * LOG_RATIO + 0.2 * COUNTS, 0.0),  # the reward whose optimum, less α|y|, is π
    ({"variant": "sigmoid_norm"}, 0.4 * LOG_RATIO / COUNTS, 0.0),
    ({"variant": "simpo", "gamma": 0.0}, 0.4 * LOG_PI / COUNTS, 0.0),
    ({"variant": "cpo", "sft_weight": 0.0}, 0.4 * LOG_PI, 0.0),
    ({"variant": "robust", "label_smoothing": 0.2}, 0.4 * LOG_RATIO, 0.2),  # right from labels flipped at that rate
]


def test_a_policy_is_stationary_where_its_scores_are_the_rewards():
    truths = np.stack([logistic(scores[:, None] - scores[None, :]) for _, scores, _ in STATIONARY])
    turned = truths.swapaxes(1, 2)
    flipped = np.array([share for *_, share in STATIONARY])[:, None, None]

    @jax.jit
    def slopes(orders):
        z, rest = jnp.asarray(Z), {"counts": COUNTS, "beta": 0.4}
        grads = [jax.grad(population)(z, orders[k], **rest, **options) for k, (options, *_) in enumerate(STATIONARY)]
        return jnp.abs(jnp.stack(grads)).max(1)

    with jax.enable_x64(True):
        right = slopes(jnp.asarray((1 - flipped) * truths + flipped * turned))
        wrong = slopes(jnp.asarray(np.where(flipped > 0, truths, turned)))
    assert np.asarray(right).max() < 1e-15
    assert np.asarray(wrong).min() > 1e-4  # it could have failed


def test_smoothed_labels_are_soft_labels():
    """cDPO from certain labels at ε has the optimum of DPO from labels right with 1 − ε; so has exo_pair."""
    for variant in ("sigmoid", "exo_pair"):
        margin = math.log(0.8 / 0.2) / 0.1
        loss = lambda m, v=variant: preference.dpo_loss(
            one_pair(m)[None], None, jnp.ones((1, 2, 1), bool), variant=v, label_smoothing=0.2
        )[0]
        slope = jax.jit(jax.grad(loss))
        assert abs(float(slope(f32(margin)))) < 1e-8
        assert float(slope(f32(margin + 1))) > 1e-5


def test_a_number_for_sft_length_makes_the_mean_over_pairs_a_mean_over_tokens():
    rng = np.random.default_rng(6)
    mask = jnp.arange(6)[None, None, :] < jnp.asarray(rng.integers(1, 7, (5, 2)))[:, :, None]
    x = f32(-rng.gamma(2.0, 0.5, mask.shape))
    mean_length = float(mask[:, 0].sum(1).mean())
    found = preference.dpo_loss(x, None, mask, variant="sft", sft_length=mean_length)
    np.testing.assert_allclose(np.mean(found), -np.asarray(x)[:, 0][np.asarray(mask)[:, 0]].mean(), rtol=1e-6)


def test_transport_compares_equal_ranks():
    # Log-ratios of chosen 3, 1, 2 and of rejected 0.5, 0.2, 0.1: ranks 3, 1, 2 against 0.1, 0.2, 0.5 in order.
    x = f32([[[3.0], [0.5]], [[1.0], [0.2]], [[2.0], [0.1]]])
    loss = lambda x: preference.dpo_loss(x, None, jnp.ones((3, 2, 1), bool), variant="aot_unpaired", beta=1.0)
    np.testing.assert_allclose(loss(x), -jax.nn.log_sigmoid(f32([2.5, 0.9, 1.8])), rtol=1e-6)
    slope = jax.jit(jax.grad(lambda x: loss(x)[1]))(x)  # row 1 meets the rejected of row 2
    assert (np.abs(slope[:, :, 0]) > 0).tolist() == [[False, False], [True, False], [False, True]]


def test_the_score_of_a_divergence():
    g = f32([-30.0, -1.0, 0.0, 1e-4, 2.0])
    np.testing.assert_allclose(divergence_score(g, divergence="alpha_divergence", alpha=1.0), g)
    forward = divergence_score(g, divergence="forward_kl")
    np.testing.assert_allclose(divergence_score(g, divergence="alpha_divergence", alpha=0.0), forward)
    near = divergence_score(g[1:], divergence="alpha_divergence", alpha=1.0 + 2.0**-20)
    np.testing.assert_allclose(near, g[1:], rtol=1e-5)
    for kind in Divergence.__args__:  # f′(1) = 0, slope 1 there but for the mixture of the two
        value, slope = jax.jit(jax.value_and_grad(lambda g, kind=kind: divergence_score(g, divergence=kind)))(f32(0.0))
        assert float(value) == pytest.approx(0.0, abs=1e-7)
        assert float(slope) == pytest.approx(0.5 if kind == "js_divergence" else 1.0)
    below = jax.jit(jax.grad(lambda g: divergence_score(g, divergence="forward_kl")))
    assert float(below(f32(-30.0))) == pytest.approx(math.exp(20), rel=1e-5)


# --- KTO and BCO -------------------------------------------------------------------------------------------------------


def test_kto_by_hand():
    x = f32([[2.0], [2.0], [0.0]])
    mask = jnp.array([[True], [True], [False]])
    loss = lambda x, kl: preference.kto_loss(x, jnp.zeros((3, 1)), mask, jnp.array([True, False, True]), kl, beta=1.0)
    sigma = lambda v: 1 / (1 + math.exp(-v))
    np.testing.assert_allclose(loss(x, 0.5), [1 - sigma(1.5), 1 - sigma(-1.5), 1 - sigma(-0.5)], rtol=1e-6)
    slope = jax.grad(lambda x: jnp.sum(loss(x, 0.5)))(x)
    np.testing.assert_allclose(slope[:, 0], [-sigma(1.5) * sigma(-1.5), sigma(1.5) * sigma(-1.5), 0.0], rtol=1e-5)
    assert float(jax.grad(lambda kl: jnp.sum(loss(x, kl)))(f32(0.5))) == 0.0
    far = jax.grad(lambda x: jnp.sum(loss(x, 0.0)))(f32([[1e4], [-1e4], [0.0]]))
    assert np.isfinite(far).all()


def test_kto_kl_is_never_negative_and_has_no_gradient():
    rng = np.random.default_rng(7)
    x, mask = f32(rng.normal(size=(4, 3))), jnp.array([[True] * 3, [True, False, True], [False] * 3, [True] * 3])
    low = jnp.where(mask, x, jnp.nan)
    kl = lambda x, ref: preference.kto_kl(x, ref, mask)
    assert float(kl(low, x - 1.0)) == pytest.approx((3 + 2 + 3) / 3)
    assert float(kl(low, x + 1.0)) == 0.0
    assert float(preference.kto_kl(low, x, jnp.zeros_like(mask))) == 0.0
    assert not np.any(jax.grad(kl)(x, x - 1.0))


def test_the_shift_of_rewards_moves_to_their_mean():
    rewards, valid = f32([[1.0, 3.0], [9.0, 9.0], [0.0, 2.0]]), jnp.array([True, False, True])
    shift = 0.0
    for expected in (0.15, 0.285):
        shift = preference.moving_reward_shift(shift, rewards, valid)
        assert float(shift) == pytest.approx(expected)
    assert float(preference.moving_reward_shift(0.7, rewards, ~jnp.ones(3, bool))) == pytest.approx(0.7)
    masked_rewards = jnp.where(valid[:, None], rewards, jnp.nan)
    assert float(preference.moving_reward_shift(0.0, masked_rewards, valid)) == pytest.approx(0.15)


# --- sums and refusals -------------------------------------------------------------------------------------------------


def test_a_sum_of_variants_gives_each_its_options():
    rng = np.random.default_rng(8)
    x, ref, mask = f32(rng.normal(size=(3, 2, 4))), f32(rng.normal(size=(3, 2, 4))), jnp.ones((3, 2, 4), bool)
    found = preference.mpo_loss(
        x, ref, mask, parts=(("robust", 0.5), ("sft", 2.0)), beta=0.3,
        label_smoothing=0.1, f_divergence="js_divergence", ld_alpha=0.5, sft_length=3.0,
    )  # fmt: skip
    one = lambda **o: preference.dpo_loss(x, ref, mask, beta=0.3, **o)
    robust = one(variant="robust", label_smoothing=0.1, f_divergence="js_divergence", ld_alpha=0.5)
    np.testing.assert_allclose(found, 0.5 * robust + 2.0 * one(variant="sft", sft_length=3.0), rtol=1e-6)


X = (jnp.zeros((1, 2, 1)), None, jnp.ones((1, 2, 1), bool))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"variant": "dpo"}, "unknown: use sigmoid"),
        ({"variant": "apo_zero", "label_smoothing": 0.1}, "does not read label_smoothing: sigmoid"),
        ({"variant": "bco_pair", "f_divergence": "forward_kl"}, "does not read f_divergence"),
        ({"variant": "ipo", "length_alpha": 0.1}, "does not read length_alpha"),
        ({"variant": "simpo", "ld_alpha": 0.5}, "does not read ld_alpha"),
        ({"reward_shift": 0.1}, "does not read reward_shift: bco_pair"),
        ({"sft_length": 3.0}, "does not read sft_length: cpo"),
        ({"beta": 0.0}, "beta=0.0"),
        ({"label_smoothing": 0.5}, "below 0.5"),
        ({"variant": "exo_pair"}, "above 0 for exo_pair"),
        ({"ld_alpha": 1.5}, "ld_alpha=1.5"),
        ({"variant": "discopop", "discopop_tau": 2.0}, "discopop_tau=2.0"),
        ({"f_divergence": "kl", "variant": "sigmoid"}, "f_divergence='kl' is unknown: use reverse_kl"),
    ],
)
def test_what_a_variant_cannot_do_is_refused(options, says, monkeypatch):
    monkeypatch.setattr(preference, "divergence_score", plain(divergence_score))
    monkeypatch.setattr(preference, "_sums", plain(preference._sums))
    monkeypatch.setattr(preference, "_check", plain(preference._check))
    with pytest.raises(ValueError, match=says):
        plain(preference.dpo_loss)(*X, **options)


def test_other_refusals():
    for options, says in (
        ({"parts": ()}, "pairs of a weight and a name"),
        ({"parts": (("sigmoid", 1.0), ("dpo", 1.0))}, "pairs of a weight and a name"),
        ({"parts": (("sigmoid", 1.0),), "sft_length": 2.0}, "no part of .* reads sft_length"),
        ({"f_divergence": "forward_kl"}, "'bco_pair' does not read f_divergence"),
    ):
        with pytest.raises(ValueError, match=says):
            preference.mpo_loss(*X, **options)
    rows = jnp.zeros((1, 1))
    with pytest.raises(ValueError, match="beta=0"):
        preference.kto_loss(rows, rows, rows == 0, jnp.array([True]), 0.0, beta=0.0)
    for eta, tau in ((0.5, 0.6), (0.0, 0.0), (0.5, -0.1)):
        with pytest.raises(ValueError, match="need 0 <= tau <= eta"):
            nash.inpo_loss(X[0], X[0], X[0], X[2], eta=eta, tau=tau)


# --- games -------------------------------------------------------------------------------------------------------------

CYCLE = np.array([[0.5, 0.9, 0.3], [0.1, 0.5, 0.8], [0.7, 0.2, 0.5]])  # 0 beats 1 beats 2 beats 0
GAME_REF = np.log([0.6, 0.3, 0.1])
TAU = 0.05


def equilibrium(tau=TAU):
    """π = π_ref exp(P π / τ) / Z by a damped fixed point in float64."""
    log_pi = GAME_REF.copy()
    for _ in range(20000):
        aim = GAME_REF + CYCLE @ np.exp(log_pi) / tau
        log_pi = 0.98 * log_pi + 0.02 * (aim - np.log(np.exp(aim).sum()))
        log_pi -= np.log(np.exp(log_pi).sum())
    aim = GAME_REF + CYCLE @ np.exp(log_pi) / tau
    np.testing.assert_allclose(aim - np.log(np.exp(aim).sum()), log_pi, atol=1e-13)
    return log_pi


def distances(step, size, count):
    """KL(π* ‖ π_t) [count + 1] of `step` with size(t)."""
    truth = jnp.asarray(equilibrium())
    kl = lambda z: jnp.sum(jnp.exp(truth) * (truth - jax.nn.log_softmax(z)))

    def one(z, t):
        z = step(z, jnp.asarray(GAME_REF), jnp.asarray(CYCLE), step_size=size(t), tau=TAU)
        return z, kl(z)

    start = jnp.asarray(GAME_REF)
    _, found = jax.jit(lambda z: jax.lax.scan(one, z, jnp.arange(count)))(start)
    return np.concatenate([[float(kl(start))], np.asarray(found)])


def test_nash_md_reaches_the_regularised_equilibrium_within_its_bound():
    with jax.enable_x64(True):
        found = distances(nash.nash_md_step, lambda t: 2 / (TAU * (t + 2)), 20000)
        constant = distances(nash.nash_md_step, lambda _: 1.0, 2000)
    steps = np.arange(1, len(found))
    assert (found[1:] <= 8 / (TAU**2 * (steps + 1))).all()
    assert found[0] > 0.1
    assert found[-1] < 1e-6 * found[0]
    assert 1 < math.log(found[2000] / found[20000]) / math.log(10) < 3  # a power of t
    assert constant[-1] == pytest.approx(constant[-100], rel=1e-6)
    assert constant[-1] > 1e-4  # a constant step ends beside it


def test_the_extragradient_steps_converge_linearly_to_it():
    size = 2.0
    with jax.enable_x64(True):
        found = distances(nash.extragradient_step, lambda _: size, 300)
        self_play = distances(lambda z, *rest, **o: nash.regularised_step(z, z, *rest, **o), lambda _: size, 100)
    assert np.abs(found[200:]).max() < 1e-14
    rates = [(found[t + 20] / found[t]) ** (1 / 20) for t in (10, 30, 50, 70)]
    assert max(rates) < 1 - size * TAU
    assert max(rates) - min(rates) < 0.08
    assert self_play[100] > 1e3 * found[100]
    with jax.enable_x64(True):
        game = (jnp.asarray(GAME_REF), jnp.asarray(CYCLE))
        at = nash.extragradient_step(jnp.asarray(equilibrium()), *game, step_size=size, tau=TAU)
    np.testing.assert_allclose(at, equilibrium(), atol=1e-12)  # the equilibrium stays


def test_a_step_of_each_method_by_the_formulas():
    rng, eta, tau = np.random.default_rng(11), 0.7, 0.3
    z = rng.normal(size=3)

    def normal(weights):
        return weights / weights.sum()

    def step(pi, opponent):
        return normal(pi ** (1 - eta * tau) * ref ** (eta * tau) * np.exp(eta * CYCLE @ opponent))

    pi, ref = normal(np.exp(z)), np.exp(GAME_REF)
    mixture = normal(pi ** (1 - eta * tau) * ref ** (eta * tau))
    expected = {nash.nash_md_step: step(pi, mixture), nash.extragradient_step: step(pi, step(pi, pi))}
    for method, policy in expected.items():
        found = method(f32(z), f32(GAME_REF + 5.0), f32(CYCLE), step_size=eta, tau=tau)  # logits in any scale
        np.testing.assert_allclose(np.exp(found), policy, rtol=1e-5)


def test_the_minimum_of_inpo_over_pairs_is_the_mirror_step():
    rng = np.random.default_rng(9)
    old, eta = rng.normal(size=3), 0.9
    first, second = (side.ravel() for side in np.indices((3, 3)))
    with jax.enable_x64(True):
        old = jax.nn.log_softmax(jnp.asarray(old))
        chance = jnp.exp(old[first] + old[second]) * CYCLE[first, second]  # two samples of π_t, then who wins
        ordered = lambda x: jnp.stack([x[first], x[second]], axis=1)[:, :, None]

        def loss(z):
            ref = ordered(jnp.asarray(GAME_REF))
            pairs = nash.inpo_loss(
                ordered(jax.nn.log_softmax(z)), ref, ordered(old), jnp.ones((9, 2, 1), bool), eta=eta, tau=TAU
            )
            return 2 * jnp.sum(chance * pairs)

        step = lambda tau: nash.regularised_step(
            old, old, jnp.asarray(GAME_REF), jnp.asarray(CYCLE), step_size=1 / eta, tau=tau
        )
        slope = jax.jit(jax.grad(loss))
        assert float(jnp.abs(slope(step(TAU))).max()) < 1e-14
        assert float(jnp.abs(slope(step(0.0))).max()) > 1e-3


def test_win_rates_within_a_group():
    p = CYCLE + np.diag([np.nan] * 3)  # nobody is asked to compare an answer with itself
    found = nash.pairwise_advantages(f32(p))
    np.testing.assert_allclose(found, [0.1, -0.05, -0.05], atol=1e-6)
    assert float(jnp.sum(found)) == pytest.approx(0.0, abs=1e-6)
    assert nash.pairwise_advantages(f32([[np.nan]])).tolist() == [0.0]
    # By enumeration: the mean of an answer's advantage is P(y ≻ π) − ½ (groups of 3 samples of π).
    pi, total = np.exp(GAME_REF), np.zeros(3)
    for y in range(3):
        for a in range(3):
            for b in range(3):
                group = np.array([y, a, b])
                total[y] += pi[a] * pi[b] * float(nash.pairwise_advantages(f32(CYCLE[np.ix_(group, group)]))[0])
    np.testing.assert_allclose(total, CYCLE @ pi - 0.5, atol=1e-6)


def test_the_example_shows_both(capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    runpy.run_path(str(EXAMPLE), run_name="preference_game")["main"]()
    printed = capsys.readouterr().out
    row = lambda name: next(line for line in printed.splitlines() if line.startswith(f"| {name}")).split("|")
    assert float(row("Nash-MD, η = 2 / ")[-2]) < 1e-7
    assert row("extragradient")[-4].strip() == "< 1e-15"
    assert float(row("self-play without the reference")[-2]) > 1.0
