"""The rules between rewards and the loss: which estimator, which rows, which weights an option stands for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_presets import G, N, T, arrays

from jaxrl_lm import algos, masked
from jaxrl_lm.batch import BatchRule, Coefficients, Implicit, Rated
from jaxrl_lm.credit import Credit, CreditRule, Outcomes, action_ids
from jaxrl_lm.metrics import result
from jaxrl_lm.models import build
from jaxrl_lm.objectives import ImplicitObjective, PolicyObjective
from jaxrl_lm.rows import credit_rows, implicit_rows
from jaxrl_lm.score import score
from jaxrl_lm.types import Frozen, Rollout, Scores

X = arrays()
MASK = np.asarray(X["mask"])
GREEDY = jnp.asarray(np.linspace(0, 1, N), jnp.float32)
PLAIN = Outcomes(X["returns"], X["valid"], X["mask"], X["logprobs"], X["turn_ids"], None, None, X["values"], GREEDY)


def credit(outcomes=PLAIN, **options):
    return CreditRule(**{"group_size": G, "max_length": T} | options)(outcomes)


def per_row(rows):
    return np.where(MASK & np.asarray(X["valid"])[:, None], np.asarray(rows)[:, None], 0.0)


# --- credit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"advantage": "group"}, lambda r, v: algos.group_advantages(r, group_size=G, valid=v)),
        ({"advantage": "group", "scale": "none"},
         lambda r, v: algos.group_advantages(r, group_size=G, scale="none", valid=v)),
        ({"advantage": "leave-one-out"}, lambda r, v: algos.leave_one_out_advantages(r, group_size=G, valid=v)),
        ({"advantage": "greedy"}, lambda r, v: algos.greedy_baseline_advantages(r, GREEDY, valid=v)),
        ({"advantage": "constant", "baseline": 0.3},
         lambda r, v: algos.constant_baseline_advantages(r, baseline=0.3, valid=v)),
        ({"advantage": "max-rl"}, lambda r, v: algos.max_rl_advantages(r, group_size=G, valid=v)),
        ({"advantage": "pass-at-k", "pass_k": 2}, lambda r, v: algos.pass_at_k_advantages(r, group_size=G, k=2, valid=v)),
        ({"advantage": "accepted"}, lambda r, v: algos.accepted_advantages(r, valid=v)),
        ({"own": lambda r, *, group_size, valid: 2.0 * r}, lambda r, v: 2.0 * r),
    ],
    ids=["group", "unscaled group", "leave-one-out", "greedy", "constant", "max-rl", "pass-at-k", "accepted", "own"],
)  # fmt: skip
def test_every_row_estimator_by_its_name(options, expected):
    found = credit(**options)
    np.testing.assert_allclose(found.advantages, per_row(expected(X["returns"], X["valid"])), rtol=1e-6)
    assert found.targets is None
    np.testing.assert_array_equal(found.learns, X["valid"])


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(ValueError, match="advantage='mean' is unknown"):
        credit(advantage="mean")


@pytest.mark.parametrize("actions", ["token", "ngram", "turn", "sequence"])
@pytest.mark.parametrize("discount_per", ["action", "token"])
def test_token_estimators_pay_the_return_at_the_end_and_the_kl_where_it_arises(actions, discount_per):
    kl = jnp.where(X["mask"], X["old"] - X["ref"], jnp.nan)
    outcomes = PLAIN._replace(kl=kl, kl_coefficient=jnp.float32(0.1))
    mask = X["mask"] & X["valid"][:, None]
    rewards = algos.token_rewards(X["returns"], mask) - 0.1 * masked.select(kl, mask)
    ids = action_ids(mask, X["turn_ids"], actions=actions, n=2)
    options = {"discount": 0.9, "discount_per": discount_per, "actions": actions, "ngram": 2}
    how = {"discount": 0.9, "discount_per": discount_per, "action_ids": ids}
    found = credit(outcomes, advantage="gae", lam=0.8, **options)
    advantages, targets = algos.gae(rewards, X["values"], mask, lam=0.8, **how)
    np.testing.assert_allclose(found.advantages, masked.whiten(advantages, mask), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.targets, targets, rtol=1e-6)
    found = credit(outcomes, advantage="batch", **options)
    togo = algos.returns_to_go(rewards, mask, **how)
    np.testing.assert_allclose(found.advantages, masked.whiten(togo, mask), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.kl, np.where(MASK, kl, 0).sum(1), rtol=1e-5)


def test_a_kl_is_taken_off_whole_returns():
    kl = jnp.where(X["mask"], X["old"] - X["ref"], jnp.nan)
    found = credit(PLAIN._replace(kl=kl, kl_coefficient=jnp.float32(0.1)), advantage="constant")
    np.testing.assert_allclose(
        found.advantages, per_row(np.asarray(X["returns"]) - 0.1 * np.where(MASK, kl, 0).sum(1)), rtol=1e-5, atol=1e-6
    )


def test_filters_judge_raw_returns_and_shaping_follows():
    lengths = X["mask"].sum(1)
    options = {"overlong_buffer": 4, "length_penalty": 0.5, "unlikeliness": 0.25, "advantage": "constant"}
    found = credit(drop="equal", **options)
    kept = np.asarray(X["valid"]) & ~np.isin(np.arange(N), range(4, 8))
    np.testing.assert_array_equal(found.learns, kept)
    group = {"group_size": G, "valid": X["valid"]}
    sums = jnp.where(X["mask"], X["logprobs"], 0).sum(1)
    expected = (
        algos.unlikeliness_rewards(X["returns"], sums, beta=0.25, **group)
        + algos.overlong_penalty(lengths, max_length=T, cache=4)
        + 0.5 * algos.length_penalty(X["returns"], lengths, **group)
    )
    np.testing.assert_allclose(
        found.advantages, np.where(MASK & kept[:, None], np.asarray(expected)[:, None], 0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("options", [{"overlong_buffer": 3}, {"length_penalty": 0.5}])
def test_forced_tokens_count_in_lengths_as_they_take_room(options):
    """Completions of 1 to 8 tokens, the first two of which are forced into every other row."""
    room, columns = 8, 10
    lengths = np.arange(N) % room + 1
    forced = np.where(np.arange(N) % 2, np.minimum(2, lengths), 0)
    place = np.arange(columns) - (columns - room)
    written = np.broadcast_to(place, (N, columns)) < lengths[:, None]  # with the prompt's columns
    mask = (place >= forced[:, None]) & written
    zeros = jnp.zeros((N, columns))
    rollout = Rollout(
        zeros.astype(jnp.int32), jnp.asarray(written, jnp.int32), jnp.asarray(mask), zeros, None, jnp.zeros(N, bool),
        jnp.asarray(mask, jnp.int32), zeros.astype(jnp.int32),
    )  # fmt: skip
    rule = CreditRule(advantage="constant", group_size=G, max_length=room, **options)
    ones = jnp.ones(N, bool)
    found = credit_rows(
        X["returns"], ones, rollout, None, None, jnp.float32(0), None, None, rule=rule, estimator="k1"
    ).advantages
    if "overlong_buffer" in options:
        paid = algos.overlong_penalty(jnp.asarray(lengths), max_length=room, cache=3)
        assert np.asarray(paid)[lengths == room].max() == -1  # a full row, whatever was forced into it
    else:
        paid = 0.5 * algos.length_penalty(X["returns"], jnp.asarray(lengths), group_size=G, valid=ones)
    np.testing.assert_allclose(found, np.where(mask, np.asarray(X["returns"] + paid)[:, None], 0), rtol=1e-6)


def test_outliers_and_wrong_rows_do_not_learn():
    returns = jnp.asarray([0, 1, 0, 1, 1, 0, 1, 0, 50, 1, 0, 1], jnp.float32)
    outcomes = PLAIN._replace(returns=returns, valid=jnp.ones(N, bool))
    found = credit(outcomes, outlier_limit=5.0)
    assert np.flatnonzero(~np.asarray(found.learns)).tolist() == [8]
    without = credit(outcomes._replace(valid=jnp.arange(N) != 8))  # an outlier leaves its group's baseline too
    np.testing.assert_array_equal(found.advantages, without.advantages)
    both = credit(outcomes, outlier_limit=5.0, drop="wrong").learns
    np.testing.assert_array_equal(both, (np.asarray(returns) == 1))


# --- rewards of steps -------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(7)
ENDS = RNG.random((N, T)) < 0.5
ENDS[2] = False  # a row without steps, or that the function does not apply to
SEEN = ENDS & MASK & np.asarray(X["valid"])[:, None]
CHANCES = np.where(SEEN, RNG.integers(0, 9, (N, T)) / 8.0, np.nan).astype(np.float32)
KL = jnp.where(X["mask"], X["old"] - X["ref"], jnp.nan)
STEPS = PLAIN._replace(step_rewards=jnp.asarray(CHANCES), step_ends=jnp.asarray(ENDS))
TURNS = jnp.asarray(np.where(MASK, 1 + (np.arange(T) > 3), 0), jnp.int32)
PER_ROW = ("mean", "min", "product", "last")
REDUCE = {"mean": np.mean, "min": np.min, "product": np.prod, "last": lambda x: x[-1]}


def of_rows(how):
    """One number a row from its steps, by a loop."""
    return np.array(
        [REDUCE[how](c[e].astype(np.float64)) if e.any() else 0.0 for c, e in zip(CHANCES, SEEN, strict=True)]
    )


def process(returns, mask=MASK, **options):
    return algos.process_advantages(
        STEPS.step_rewards, STEPS.step_ends, returns, jnp.asarray(mask), group_size=G, valid=X["valid"], **options
    )


@pytest.mark.parametrize("how", ["sum-to-go", *PER_ROW])
def test_in_groups_outcome_and_steps_are_normalised_and_then_weighed(how):
    found = credit(STEPS, step_credit=how, step_weight=0.5, outcome_weight=2.0)
    whole = credit().advantages
    alone = process(jnp.zeros(N, jnp.float32), credit=how)
    np.testing.assert_allclose(found.advantages, 2.0 * whole + 0.5 * alone, rtol=1e-5, atol=1e-6)
    assert np.abs(alone).max() > 0.1
    assert not np.asarray(alone)[2].any()
    np.testing.assert_array_equal(found.learns, X["valid"])
    scaled = credit(STEPS._replace(step_rewards=100.0 * STEPS.step_rewards), step_credit=how, outcome_weight=0.0)
    if how != "product":
        np.testing.assert_allclose(scaled.advantages, alone, rtol=1e-3, atol=1e-4)  # std + 1e-6
    paid = credit(STEPS._replace(kl=KL, kl_coefficient=jnp.float32(0.1)), step_credit=how)
    less = X["returns"] - 0.1 * np.where(MASK, KL, 0).sum(1)
    np.testing.assert_allclose(paid.advantages, process(less, credit=how), rtol=1e-5, atol=1e-5)


def test_without_step_rewards_nothing_reads_the_options_of_steps():
    found = credit(step_credit="min", step_weight=3.0, outcome_weight=0.0)
    np.testing.assert_array_equal(found.advantages, credit().advantages)


@pytest.mark.parametrize("actions", ["ngram", "turn", "sequence"])
def test_a_larger_action_gets_what_its_first_token_does(actions):
    outcomes = STEPS._replace(turn_ids=TURNS)
    ids = action_ids(X["mask"] & X["valid"][:, None], TURNS, actions=actions, n=2)
    found = np.asarray(credit(outcomes, actions=actions, ngram=2).advantages)
    tokens = np.asarray(process(X["returns"]))
    for row in range(N):
        for key in set(np.asarray(ids)[row].tolist()):
            inside = np.flatnonzero((np.asarray(ids)[row] == key) & MASK[row] & X["valid"][row])
            if len(inside):
                np.testing.assert_allclose(found[row, inside], tokens[row, inside[0]], rtol=1e-6)
    assert not found[~(MASK & np.asarray(X["valid"])[:, None])].any()
    assert not np.allclose(found, tokens)


@pytest.mark.parametrize("how", PER_ROW)
def test_estimators_of_rows_read_one_number_more(how):
    kl = {"kl": KL, "kl_coefficient": jnp.float32(0.1)}
    options = {"step_credit": how, "step_weight": 0.5, "outcome_weight": 2.0}
    returns = 2.0 * np.asarray(X["returns"]) + 0.5 * of_rows(how)
    less = jnp.asarray(returns - 0.1 * np.where(MASK, KL, 0).sum(1), jnp.float32)
    found = credit(STEPS._replace(**kl), advantage="leave-one-out", **options)
    expected = algos.leave_one_out_advantages(less, group_size=G, valid=X["valid"])
    np.testing.assert_allclose(found.advantages, per_row(expected), rtol=1e-5, atol=1e-6)
    found = credit(STEPS, advantage="constant", baseline=0.25, **options)
    np.testing.assert_allclose(found.advantages, per_row(returns - 0.25), rtol=1e-5, atol=1e-6)
    own = credit(STEPS, own=lambda r, *, group_size, valid: 3.0 * r, **options)
    np.testing.assert_allclose(own.advantages, per_row(3.0 * returns), rtol=1e-5, atol=1e-6)


def test_filters_judge_the_outcome_alone():
    found = credit(STEPS, drop="equal", step_credit="mean")
    np.testing.assert_array_equal(found.learns, credit(drop="equal").learns)


def placed(how, **guard):
    """The rewards of tokens that an estimator of tokens should see, by loops."""
    rewards = np.zeros((N, T))
    for row in range(N):
        inside = np.flatnonzero(MASK[row] & X["valid"][row])
        if not len(inside):
            continue
        rewards[row, inside[-1]] += 2.0 * float(X["returns"][row])
        if how != "sum-to-go":
            rewards[row, inside[-1]] += 0.5 * of_rows(how)[row]
            continue
        scores = CHANCES[row].astype(np.float64)
        before = 0.0
        for t in inside:
            if guard.get("step_shaping"):
                after = scores[t] if SEEN[row, t] else before
                rewards[row, t] += 0.5 * (0.9 * (after if t != inside[-1] else 0.0) - before)
                before = after
            elif SEEN[row, t]:
                rewards[row, t] += 0.5 * scores[t] / (SEEN[row].sum() if guard else 1)
    return jnp.asarray(rewards, jnp.float32)


GUARDS = [{}, {"step_normalise": True}, {"step_shaping": True}]


@pytest.mark.parametrize(
    ("how", "guard"),
    [*(("sum-to-go", guard) for guard in GUARDS), *((how, {}) for how in PER_ROW)],
    ids=["sum", "sum normalised", "sum shaped", *PER_ROW],
)
def test_estimators_of_tokens_are_paid_where_steps_end_or_at_the_end(how, guard):
    outcomes = STEPS._replace(kl=KL, kl_coefficient=jnp.float32(0.1))
    mask = X["mask"] & X["valid"][:, None]
    rewards = placed(how, **guard) - 0.1 * masked.select(KL, mask)
    options = {"step_credit": how, "step_weight": 0.5, "outcome_weight": 2.0, "discount": 0.9} | guard
    found = credit(outcomes, advantage="gae", lam=0.8, **options)
    advantages, targets = algos.gae(rewards, X["values"], mask, lam=0.8, discount=0.9)
    np.testing.assert_allclose(found.targets, targets, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.advantages, masked.whiten(advantages, mask), rtol=1e-4, atol=1e-5)
    found = credit(outcomes, advantage="batch", **options)
    togo = algos.returns_to_go(rewards, mask, discount=0.9)
    np.testing.assert_allclose(found.advantages, masked.whiten(togo, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("discount_per", ["action", "token"])
@pytest.mark.parametrize("actions", ["token", "ngram", "turn", "sequence"])
def test_shaping_to_come_is_what_the_state_before_an_action_is_worth(actions, discount_per):
    """So that no action from it on can change it: for larger actions too."""
    mask = X["mask"] & X["valid"][:, None]
    ids = action_ids(mask, TURNS, actions=actions, n=2)
    how = {"discount": 0.9, "discount_per": discount_per, "action_ids": ids}
    potentials = algos.step_potentials(STEPS.step_rewards, STEPS.step_ends, mask, start=0.5)
    paid = algos.potential_shaping(potentials, mask, **how)
    togo = algos.returns_to_go(paid, mask, **how)
    np.testing.assert_allclose(togo, -algos.from_start(potentials, mask, ids), atol=1e-6)
    # The same in a run: returns to go with shaping are those without, minus the potential.
    options = {"advantage": "gae", "lam": 1.0, "discount": 0.9, "discount_per": discount_per, "actions": actions}
    outcomes = STEPS._replace(turn_ids=TURNS)
    shaped = credit(outcomes, step_shaping=True, ngram=2, **options).targets
    plain = credit(outcomes, step_weight=0.0, ngram=2, **options).targets
    start = algos.step_potentials(STEPS.step_rewards, STEPS.step_ends, mask)
    np.testing.assert_allclose(shaped, plain - algos.from_start(start, mask, ids), atol=1e-5)


def test_more_steps_of_one_score_pay_in_plain_sums_alone():
    """Rows of one to four steps, each of the score 0.9; the last row of each group is wrong in all of its steps."""
    mask = jnp.ones((4, 5), bool)
    ends = jnp.asarray(np.tri(4, 5, 0), bool)
    good = jnp.where(jnp.arange(4)[:, None] == 3, 0.1, 0.9) * jnp.ones((4, 5), jnp.float32)
    outcomes = Outcomes(
        jnp.zeros(4), jnp.ones(4, bool), mask, jnp.zeros((4, 5)), mask.astype(jnp.int32), values=jnp.zeros((4, 5)),
        step_rewards=good, step_ends=ends,
    )  # fmt: skip
    rising = lambda x: np.diff(np.asarray(x)[:3]) > 0.05  # from one step to two, from two to three
    at_start = lambda **options: credit(outcomes, group_size=4, **options).advantages[:, 0]
    assert rising(at_start()).all()
    totals = lambda **options: credit(outcomes, advantage="gae", lam=1.0, **options).targets[:, 0]
    assert rising(totals()).all()
    for paid in (at_start(step_normalise=True), totals(step_normalise=True), totals(step_shaping=True)):
        np.testing.assert_allclose(paid[:3], paid[0], atol=1e-5)
    np.testing.assert_allclose(totals(step_normalise=True), [0.9, 0.9, 0.9, 0.1], rtol=1e-6)
    np.testing.assert_allclose(totals(step_shaping=True), 0.0, atol=1e-6)
    for how in ("mean", "min", "product", "last"):
        assert not rising(at_start(step_credit=how)).any()


# --- weights ----------------------------------------------------------------------------------------------------------

RATED = Rated(
    rollout=Rollout(
        tokens=X["tokens"],
        segment_ids=jnp.ones((N, T), jnp.int32),
        action_mask=X["mask"],
        logprobs=X["logprobs"],
        behaviour_logprobs=None,
        truncated=jnp.asarray(np.arange(N) == 2),
        turn_ids=X["turn_ids"],
        policy_step=jnp.zeros((N, T), jnp.int32),
    ),
    temperature=jnp.ones(N, jnp.float32),
    credit=credit(),
    old=Scores(X["old"], X["entropy"]),
    values=None,
    ref_logprobs=X["ref"],
)
ROWS = jnp.arange(N, dtype=jnp.int32)


def batch(rated=RATED, *, kl=0.1, entropy=0.01, policy=1.0, **options):
    coefficients = Coefficients(*(jnp.float32(value) for value in (kl, entropy, policy)))
    return BatchRule(**{"group_size": G, "entropy_bonus": True} | options)(rated, coefficients, jax.random.key(0), ROWS)


MINE = X["mask"] & X["valid"][:, None]
BASE = np.asarray(algos.token_weights(MINE))


def test_each_term_has_weights_of_its_own():
    found = batch()
    np.testing.assert_allclose(found.weights, BASE)
    np.testing.assert_allclose(found.kl_weights, 0.1 * BASE, rtol=1e-6)
    np.testing.assert_allclose(found.entropy_weights, 0.01 * BASE, rtol=1e-6)
    assert found.old_kl_weights is None
    assert batch(entropy_bonus=False).entropy_weights is None
    assert batch(RATED._replace(ref_logprobs=None)).kl_weights is None


def test_nothing_of_the_policy_learns_while_the_critic_warms_up():
    found = batch(policy=0.0, entropy_clip="kl_cov", cov_share=0.5)
    for weights in (found.weights, found.kl_weights, found.entropy_weights, found.old_kl_weights):
        assert not np.any(weights)


def test_a_correction_multiplies_the_weights_of_the_policy_alone():
    ratio = algos.sampler_correction(X["old"], X["logprobs"], MINE, mode="token_truncate", cap=1.001)
    found = batch(sampler_correction="token_truncate", correction_cap=1.001)
    np.testing.assert_allclose(found.weights, BASE * np.asarray(ratio), rtol=1e-6)
    np.testing.assert_allclose(found.kl_weights, 0.1 * BASE, rtol=1e-6)
    behaviour = RATED._replace(rollout=RATED.rollout._replace(behaviour_logprobs=X["old"]))
    np.testing.assert_allclose(batch(behaviour, sampler_correction="token_truncate").weights, BASE, rtol=1e-6)


def test_masked_tokens_stay_in_the_denominators():
    top = np.asarray(algos.top_entropy_mask(X["entropy"], MINE, share=0.3))
    found = batch(top_entropy_share=0.3)
    np.testing.assert_allclose(found.weights, np.where(top, BASE, 0))
    np.testing.assert_allclose(found.kl_weights, 0.1 * BASE, rtol=1e-6)
    found = batch(entropy_clip="clip_cov", cov_share=0.2, cov_low=-1e9, cov_high=1e9)
    assert (np.asarray(found.weights) == 0).sum() == (BASE == 0).sum() + np.ceil(
        np.float32(0.2) * np.asarray(MINE).sum()
    )
    found = batch(entropy_clip="kl_cov", cov_share=0.2, kl_cov_coef=3.0)
    chosen = np.asarray(algos.kl_cov_mask(X["old"], found.advantages, MINE, share=0.2))
    np.testing.assert_allclose(found.old_kl_weights, np.where(chosen, 3 * BASE, 0), rtol=1e-6)
    np.testing.assert_allclose(found.weights, BASE)


@pytest.mark.parametrize("name", ["entropy_shaped", "entropy", "planning", "low_probability"])
def test_a_token_scale_multiplies_the_advantages(name):
    options = {"scale_alpha": 0.3, "scale_kappa": 2.5, "scale_token_ids": (1, 2, 3)}
    found = batch(token_scale=name, **options)
    advantages = np.where(MINE, RATED.credit.advantages, 0.0)
    given = X["entropy"], jnp.asarray(advantages), MINE
    scale = {
        "entropy_shaped": lambda: algos.entropy_shaped_scale(*given, alpha=0.3, kappa=2.5),
        "entropy": lambda: algos.gtpo_scale(*given, group_size=G, share=0.3),
        "planning": lambda: algos.planning_token_scale(X["tokens"], MINE, token_ids=(1, 2, 3), weight=2.5),
        "low_probability": lambda: algos.low_probability_scale(X["old"], MINE, alpha=0.3),
    }[name]()  # fmt: skip
    if name != "entropy_shaped":
        scale = algos.normalise_scale(scale, MINE)
        sizes = np.asarray(MINE).sum(1)
        np.testing.assert_allclose(np.where(MINE, scale, 0).sum(1)[sizes > 0], sizes[sizes > 0], rtol=1e-5)
    np.testing.assert_allclose(found.advantages, advantages * np.asarray(scale), rtol=1e-5, atol=1e-7)
    assert not np.allclose(found.advantages, advantages)


def test_critical_tokens_have_a_kl_of_their_own():
    found = batch(kl_power=2.0)
    expected = 0.1 * BASE * np.asarray(algos.critical_kl_weight(X["ref"], MINE, power=2.0))
    np.testing.assert_allclose(found.kl_weights, expected, rtol=1e-5)


def test_larger_actions_weigh_as_one():
    ids = action_ids(MINE, X["turn_ids"], actions="ngram", n=3)
    found = batch(actions="ngram", ngram=3)
    np.testing.assert_array_equal(found.action_ids, ids)
    np.testing.assert_allclose(found.weights, algos.token_weights(MINE, action_ids=ids))


def test_truncated_rows_leave_the_batch():
    found = batch(mask_truncated=True)
    mask = MINE & (jnp.arange(N) != 2)[:, None]
    np.testing.assert_allclose(found.weights, algos.token_weights(mask))
    assert not found.valid[2]


def test_what_reads_scores_says_so():
    plain = BatchRule()
    assert not plain.needs_old
    reads = {
        "sampler_correction": "token_mask",
        "token_scale": "entropy",
        "entropy_clip": "clip_cov",
        "top_entropy_share": 0.5,
    }
    for name, value in reads.items():
        assert dataclasses.replace(plain, **{name: value}).needs_old, name
    assert batch(RATED._replace(old=None)).old_logprobs is None
    kept = batch(RATED._replace(old=None), keep_old=True)
    np.testing.assert_array_equal(kept.old_logprobs, X["logprobs"])
    np.testing.assert_array_equal(batch(keep_old=True).old_logprobs, X["old"])
    for name in ("token_scale", "entropy_clip", "top_entropy_share"):  # the scores are there for these alone
        kept = batch(keep_old=True, sampler_ratio=True, **{name: reads[name]})
        np.testing.assert_array_equal(kept.old_logprobs, X["logprobs"])


def test_a_critic_learns_at_the_first_token_of_each_action():
    targets = jnp.where(X["mask"], X["values"] + 1.0, jnp.nan)
    rated = RATED._replace(values=X["values"], credit=Credit(RATED.credit.advantages, targets, X["valid"], None))
    coefficients = Coefficients(jnp.float32(0), jnp.float32(0), jnp.float32(1))
    found = BatchRule(actions="ngram", ngram=3).critic(rated, coefficients, jax.random.key(0), ROWS)
    starts = algos.action_starts(MINE, action_ids(MINE, X["turn_ids"], actions="ngram", n=3))
    np.testing.assert_allclose(found.value_weights, algos.token_weights(starts))
    np.testing.assert_array_equal(found.returns, np.where(MINE, targets, 0))
    np.testing.assert_array_equal(found.old_values, X["values"])


@pytest.mark.parametrize("surrogate", ["clip", "clipped-weight", "soft-gate", "policy-gradient"])
@pytest.mark.parametrize("actions", ["ngram", "sequence"])
def test_at_ratio_one_every_surrogate_has_the_gradient_of_whole_actions(surrogate, actions):
    found = batch(RATED._replace(ref_logprobs=None), actions=actions, ngram=3, entropy_bonus=False)
    objective = PolicyObjective(completion_columns=T - 1, surrogate=surrogate, level="action", clip_high=4.0)
    loss = lambda current: objective.loss(Scores(current, X["entropy"]), found)[0]
    grad = jax.jit(jax.grad(loss))(X["logprobs"])
    # Σ over the action's tokens of weight · advantage, at each of its tokens.
    expected = algos.action_sum(-found.weights * found.advantages, MINE, found.action_ids)
    np.testing.assert_allclose(grad, np.where(MINE, expected, 0), rtol=1e-4, atol=1e-7)


# --- an implicit process reward model ---------------------------------------------------------------------------------


def test_an_implicit_model_learns_from_valid_rows_whether_the_policy_does_or_not():
    """Row 0 has no token, row 9 no outcome; the rest of their group is filtered out for the policy alone."""
    implicit = Implicit(X["ref"], X["returns"] * 0.5, X["valid"])
    learns = X["valid"] & (jnp.arange(N) < 4)
    rated = RATED._replace(implicit=implicit, credit=RATED.credit._replace(learns=learns))
    rows = jnp.arange(4, 12, dtype=jnp.int32)
    found = BatchRule(group_size=G).implicit(rated, batch(rated), rows)
    weights = np.where(np.arange(4, 12) == 9, 0.0, 1 / 7)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-6)
    np.testing.assert_array_equal(found.labels, np.where(weights > 0, np.asarray(X["returns"])[4:], 0.0))
    np.testing.assert_array_equal(found.ref_logprobs, X["ref"][4:])
    first = BatchRule(group_size=G).implicit(rated, batch(rated), jnp.arange(4, dtype=jnp.int32))
    np.testing.assert_allclose(first.weights, [0, 1 / 3, 1 / 3, 1 / 3], rtol=1e-6)


def test_its_loss_is_the_cross_entropy_of_the_sum_of_its_log_ratios(tiny_config):
    model = build(tiny_config)
    params = {name: model.init(jax.random.key(seed)) for name, seed in (("policy", 0), ("prm", 1))}
    policy = PolicyObjective(completion_columns=T - 2)
    objective = ImplicitObjective(policy=policy, completion_columns=T - 2, beta=0.25, coef=3.0)
    rated = RATED._replace(ref_logprobs=None, implicit=Implicit(X["ref"], X["returns"], X["valid"]))
    mask = X["mask"] & (np.arange(T) >= 2)[None]
    rated = rated._replace(rollout=rated.rollout._replace(action_mask=mask))
    rows = batch(rated, entropy_bonus=False)
    given = BatchRule(group_size=G).implicit(rated, rows, ROWS)
    loss, metrics = jax.jit(functools.partial(objective, model=model))(params, Frozen(), given)
    alone, _ = jax.jit(functools.partial(policy, model=model))(params, Frozen(), rows)
    logprobs = score(params["prm"], rows.tokens, rows.segment_ids, model=model, start=2).logprobs
    gaps = np.where(mask, np.asarray(logprobs, np.float64) - np.asarray(X["ref"], np.float64), 0.0)
    logits, counted = 0.25 * gaps.sum(1), np.asarray(X["valid"]) & np.asarray(mask).any(1)
    labels = np.asarray(X["returns"], np.float64)
    terms = np.log1p(np.exp(np.where(labels > 0.5, -logits, logits)))
    assert counted.sum() < N
    np.testing.assert_allclose(loss - alone, 3.0 * terms[counted].mean(), rtol=1e-4)
    measured = result(metrics)
    assert measured["implicit_prm/loss"] == pytest.approx(terms[counted].mean(), rel=1e-4)
    assert measured["implicit_prm/accuracy"] == pytest.approx(((logits > 0) == (labels > 0.5))[counted].mean())
    paid, ref = implicit_rows(
        params["prm"], params["policy"], rated.rollout, 2, model=model, beta=0.25, chunk=64, size=N
    )
    policy_logprobs = score(params["policy"], rows.tokens, rows.segment_ids, model=model, start=2).logprobs
    np.testing.assert_allclose(ref, policy_logprobs, atol=1e-5)
    np.testing.assert_allclose(paid, np.where(mask, 0.25 * (logprobs - policy_logprobs), 0.0), atol=1e-5)
