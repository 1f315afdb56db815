"""Which groups and rows are kept: against brute force; and batches joined of several rollouts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm.rollout.sampler import Sampled
from jaxrl_lm.rollout.select import choose_rows, join, unequal_groups
from jaxrl_lm.types import Rollout

NAN, PAD = float("nan"), 9


def rollout_of(groups, *, group_size, prompt_columns, new=3, seed=0, behaviour=False, count=None, on_device=True):
    """A Sampled whose rows all differ: prompt p has 1 + p mod prompt_columns tokens."""
    rng, rows = np.random.default_rng(seed), groups * group_size
    lengths = rng.integers(1, new + 1, rows)
    mask = np.zeros((rows, prompt_columns + new), bool)
    segments = np.zeros(mask.shape, np.int32)
    for n in range(rows):
        mask[n, prompt_columns : prompt_columns + lengths[n]] = True
        segments[n, prompt_columns - 1 - (n // group_size) % prompt_columns : prompt_columns + lengths[n]] = 1
    tokens = np.where(segments > 0, rng.integers(0, 8, mask.shape), PAD).astype(np.int32)
    logprobs = np.where(mask, -rng.random(mask.shape), 0).astype(np.float32)
    rollout = Rollout(
        tokens=tokens,
        segment_ids=segments,
        action_mask=mask,
        logprobs=logprobs,
        behaviour_logprobs=logprobs / 2 if behaviour else None,
        truncated=lengths == new,
        turn_ids=mask.astype(np.int32),
        policy_step=np.where(mask, 10 + seed, 0).astype(np.int32),
    )
    temperature = rng.random(rows).astype(np.float32)
    count = rows if count is None else count
    dataset = [{"prompt": f"{seed}:{n // group_size}", "answer": n // group_size} for n in range(count)]
    put = (lambda tree: jax.tree.map(jnp.asarray, tree)) if on_device else (lambda tree: tree)
    return Sampled(
        rollout=put(rollout),
        temperature=put(temperature),
        count=count,
        rows=dataset,
        prompts=[row["prompt"] for row in dataset],
        texts=[f"text {seed}:{n}" for n in range(count)],
        completion_ids=[tokens[n, mask[n]].tolist() for n in range(count)],
        logprob_sums=np.where(mask, logprobs, 0.0).sum(1)[:count],
        truncated=rollout.truncated[:count],
    )


# --- dynamic sampling -----------------------------------------------------------------------------------------------


def test_groups_of_equal_rewards_are_dropped():
    returns = np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 0.1, 0.1, 0.1])
    assert unequal_groups(returns, np.ones(12, bool), 3).tolist() == [False, True, False, False]
    assert unequal_groups(returns.astype(np.float32), np.ones(12, bool), 4).tolist() == [True, True, True]


def test_only_valid_rows_decide():
    returns = np.array([1, 0, 1, 1, 0, NAN, 1, np.inf, 0])
    valid = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1], bool)
    # a wrong row that does not count; one row alone; two that differ beside an infinite one that does not count
    assert unequal_groups(returns, valid, 3).tolist() == [False, False, True]
    assert unequal_groups(returns, np.zeros(9, bool), 3).tolist() == [False, False, False]
    # a NaN must show, not vanish, where there is a group at all
    assert unequal_groups(np.array([NAN, NAN, NAN, 1]), np.array([1, 1, 1, 0], bool), 2).tolist() == [True, False]


def test_rows_that_are_no_whole_groups_are_refused():
    with pytest.raises(ValueError, match="5 rows are not a whole number of groups of 2"):
        unequal_groups(np.zeros(5), np.ones(5, bool), 2)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_dropped_groups_are_those_without_a_gradient(data):
    size, groups = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    shape = size * groups
    returns = np.array(data.draw(st.lists(st.sampled_from([0.1, 0.3, 1e6]), min_size=shape, max_size=shape)))
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=shape, max_size=shape)))
    kept = unequal_groups(np.where(valid, returns, NAN), valid, size)
    for p in range(groups):
        mine = [returns[n] for n in range(p * size, (p + 1) * size) if valid[n]]
        assert kept[p] == (len(set(mine)) > 1)


# --- oversampling ---------------------------------------------------------------------------------------------------


def best_variance(values, keep):
    return max(np.var(subset) for subset in itertools.combinations(values, keep))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_max_variance_subset_is_the_best_of_all_subsets(data):
    size = data.draw(st.integers(1, 9))
    keep = data.draw(st.integers(1, size))
    values = [v / 8 for v in data.draw(st.lists(st.integers(-20, 20), min_size=size, max_size=size))]
    offset = data.draw(st.sampled_from([0.0, 2.0**20]))
    chosen = choose_rows(np.array([values]) + offset, np.ones((1, size), bool), keep)[0]
    assert sorted(set(chosen.tolist())) == chosen.tolist()
    assert np.var([values[c] for c in chosen]) == pytest.approx(best_variance(values, keep), abs=1e-12)


def test_max_variance_takes_from_both_ends():
    returns = np.array([[0.5, 0.0, 1.0, 0.4, 0.9, 0.1], [3.0, 0.0, 0.0, 0.1, 0.1, 0.0]])
    chosen = choose_rows(returns, np.ones((2, 6), bool), 4)
    assert chosen.tolist() == [[1, 2, 4, 5], [0, 1, 2, 5]]
    # binary: two right of six are fewer than half, so both stay
    assert choose_rows(np.array([[0, 0, 1, 0, 0, 1.0]]), np.ones((1, 6), bool), 4).tolist() == [[0, 1, 2, 5]]


def test_equal_candidates_are_taken_in_the_order_of_their_rows():
    everywhere = np.ones((1, 6), bool)
    for how in ("max_variance", "balanced"):
        for value in (0.1, 0.0, 1e6):
            assert choose_rows(np.full((1, 6), value), everywhere, 3, how=how).tolist() == [[0, 1, 2]]
    assert choose_rows(np.array([[1, 0, 1, 0, 1, 0.0]]), everywhere, 4).tolist() == [[0, 1, 2, 3]]
    # 1 right + 2 wrong has the variance of 2 right + 1 wrong: the smaller number from below, whatever the scale
    for right in (1.0, 0.1, 0.3, 1 / 3, 1e6):
        assert choose_rows(np.array([[0, 0, 0, right, right, right]]), everywhere, 3).tolist() == [[0, 3, 4]]


def test_of_two_subsets_of_one_variance_the_one_with_equal_halves_is_taken():
    values = np.array([[0, 2.5, 3.5, 4, 5]])  # with or without 2.5 in place of 3.5: both are 0.5 from the others' mean
    assert np.var(values[0, [0, 1, 3, 4]]) == np.var(values[0, [0, 2, 3, 4]])
    assert choose_rows(values, np.ones((1, 5), bool), 4).tolist() == [[0, 1, 3, 4]]


def test_balanced_is_as_equal_as_it_can_be():
    everywhere = np.ones((1, 8), bool)
    choose = lambda right, keep: choose_rows(np.array([right], float), everywhere, keep, how="balanced")[0].tolist()
    assert choose([1, 1, 1, 0, 0, 0, 1, 0], 4) == [0, 1, 3, 4]
    assert choose([1, 1, 1, 0, 0, 0, 1, 0], 5) == [0, 1, 2, 3, 4]  # the odd one is right
    assert choose([0, 0, 0, 0, 0, 0, 0, 1], 4) == [0, 1, 2, 7]
    assert choose([1, 1, 1, 1, 1, 1, 0, 1], 4) == [0, 1, 2, 6]
    assert choose([1, 1, 1, 1, 1, 1, 1, 1], 4) == [0, 1, 2, 3]
    partial = np.array([[0.4, 0.4, 0.6, 0.6]])
    kept = lambda threshold: choose_rows(partial, np.ones((1, 4), bool), 2, how="balanced", threshold=threshold)
    assert kept(0.5).tolist() == [[0, 2]]
    assert kept(0.7).tolist() == [[0, 1]]


@pytest.mark.parametrize("how", ["max_variance", "balanced"])
def test_rows_that_are_not_valid_come_last(how):
    returns = np.array([[NAN, 0.0, 1.0, 1.0, np.inf, 0.0]])
    valid = np.array([[False, True, True, True, False, True]])
    assert choose_rows(returns, valid, 2, how=how).tolist() == [[1, 2]]
    assert choose_rows(returns, valid, 4, how=how).tolist() == [[1, 2, 3, 5]]
    assert choose_rows(returns, valid, 5, how=how).tolist() == [[0, 1, 2, 3, 5]]
    assert choose_rows(returns, np.zeros((1, 6), bool), 3, how=how).tolist() == [[0, 1, 2]]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_balanced_choice_is_the_nearest_to_half_that_there_is(data):
    size = data.draw(st.integers(1, 9))
    keep = data.draw(st.integers(1, size))
    right = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    chosen = choose_rows(right[None].astype(float), np.ones((1, size), bool), keep, how="balanced")[0]
    possible = [r for r in range(keep + 1) if r <= right.sum() and keep - r <= (~right).sum()]
    assert len(set(chosen.tolist())) == keep
    assert abs(2 * right[chosen].sum() - keep) == min(abs(2 * r - keep) for r in possible)


def test_choices_that_cannot_be_made_are_refused():
    returns, valid = np.zeros((1, 3)), np.ones((1, 3), bool)
    for keep in (0, 4):
        with pytest.raises(ValueError, match=f"keep={keep}: must be from 1 to the 3"):
            choose_rows(returns, valid, keep)
    with pytest.raises(ValueError, match="not finite"):
        choose_rows(np.array([[0, NAN, 1]]), valid, 2)


# --- joining --------------------------------------------------------------------------------------------------------


def check_row(joined, n, source, row):
    """Row n of the joined batch is `row` of the source, with more padding on the left."""
    wide, narrow = joined.rollout, jax.device_get(source.rollout)
    extra = wide.tokens.shape[1] - narrow.tokens.shape[1]
    for name, array in narrow._asdict().items():
        got = getattr(wide, name)
        if array is None:
            assert got is None
            continue
        assert isinstance(got, np.ndarray)
        assert got.dtype == array.dtype
        if array.ndim == 1:
            assert got[n] == array[row]
            continue
        np.testing.assert_array_equal(got[n, extra:], array[row], err_msg=name)
        assert (got[n, :extra] == (PAD if name == "tokens" else 0)).all()
    assert joined.temperature[n] == source.temperature[row]
    for name in ("rows", "prompts", "texts", "completion_ids", "logprob_sums", "truncated"):
        assert getattr(joined, name)[n] == getattr(source, name)[row], name


@pytest.mark.parametrize("behaviour", [False, True])
def test_join_takes_the_rows_and_pads_the_prompts(behaviour):
    first = rollout_of(3, group_size=2, prompt_columns=2, seed=1, behaviour=behaviour)
    second = rollout_of(2, group_size=2, prompt_columns=5, seed=2, behaviour=behaviour, on_device=False)
    parts = [(first, [4, 5]), (second, [0]), (first, []), (second, [1]), (first, [1])]
    joined = join(parts, rows=5, pad_token_id=PAD)
    assert joined.count == 5
    assert joined.rollout.tokens.shape == (5, 8)
    for n, (source, row) in enumerate([(first, 4), (first, 5), (second, 0), (second, 1), (first, 1)]):
        check_row(joined, n, source, row)
    for n in range(5):  # what holds of a sampler's batch
        mask = joined.rollout.action_mask[n]
        assert joined.rollout.tokens[n, mask].tolist() == joined.completion_ids[n]


def test_all_rows_of_one_rollout_are_that_rollout():
    sampled = rollout_of(2, group_size=3, prompt_columns=4, behaviour=True)
    joined = join([(sampled, range(6))], rows=6, pad_token_id=PAD)
    for got, had in zip(jax.tree.leaves(joined), jax.tree.leaves(sampled), strict=True):
        np.testing.assert_array_equal(got, had)


@pytest.mark.parametrize("behaviour", [False, True])
def test_a_short_batch_is_filled_with_rows_that_never_count(behaviour):
    sampled = rollout_of(2, group_size=2, prompt_columns=3, behaviour=behaviour)
    sampled = sampled._replace(
        rollout=sampled.rollout._replace(logprobs=sampled.rollout.logprobs.at[2, -1].set(jnp.nan))
    )
    joined = join([(sampled, [2, 3])], rows=7, pad_token_id=PAD)
    assert joined.count == 2
    assert len(joined.rows) == len(joined.texts) == len(joined.truncated) == len(joined.logprob_sums) == 2
    rollout = joined.rollout
    assert rollout.tokens.shape == (7, 6)
    assert joined.temperature.shape == (7,)
    for n in (0, 1):
        check_row(joined, n, sampled, 2 + n)
    for n in range(2, 7):
        np.testing.assert_array_equal(rollout.tokens[n, :3], rollout.tokens[n % 2, :3])
        np.testing.assert_array_equal(rollout.segment_ids[n, :3], rollout.segment_ids[n % 2, :3])
        assert (rollout.tokens[n, 3:] == PAD).all()
        assert not rollout.segment_ids[n, 3:].any()
        for name in ("action_mask", "logprobs", "behaviour_logprobs", "truncated", "turn_ids", "policy_step"):
            array = getattr(rollout, name)
            assert (array is None and not behaviour) or not array[n].any(), name
    assert [x.dtype for x in jax.tree.leaves(rollout)] == [x.dtype for x in jax.tree.leaves(sampled.rollout)]


def test_joins_that_cannot_be_are_refused():
    sampled = rollout_of(2, group_size=2, prompt_columns=2, count=2)
    with pytest.raises(ValueError, match="0 chosen rows"):
        join([(sampled, [])], rows=4, pad_token_id=PAD)
    with pytest.raises(ValueError, match="3 chosen rows for a batch of 2"):
        join([(sampled, [0, 1, 0])], rows=2, pad_token_id=PAD)
    for row in (2, -1):  # a row that only filled its batch; one counted from the end
        with pytest.raises(ValueError, match=rf"rows \[{row}\] are not among the 2 real ones"):
            join([(sampled, [0, row])], rows=4, pad_token_id=PAD)
    other = rollout_of(2, group_size=2, prompt_columns=2, behaviour=True)
    with pytest.raises(ValueError, match="behaviour_logprobs"):
        join([(sampled, [0]), (other, [0])], rows=4, pad_token_id=PAD)
