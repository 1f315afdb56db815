"""The replay buffer: what it takes in, what it gives back and in which order, and a state that keeps every bit."""

import json

import jax
import numpy as np
import pytest
from test_select import PAD, rollout_of

from jaxrl_lm.rollout.replay import Replay
from jaxrl_lm.rollout.select import join

NAN = float("nan")
G = 4
DATASET = [{"prompt": f"prompt {i}", "answer": i, "when": object()} for i in range(20)]  # not all of it is JSON


def step_of(seed, rights, *, columns=3, behaviour=False, on_device=True):
    """A step's rollout whose group p has rights[p] right rows (the last ones), sampled at policy step 10 + seed."""
    sampled = rollout_of(
        len(rights), group_size=G, prompt_columns=columns, seed=seed, behaviour=behaviour, on_device=on_device
    )
    indices = [(seed + p) % len(DATASET) for p in range(len(rights))]
    rows = [DATASET[index] for index in indices for _ in range(G)]
    sampled = sampled._replace(rows=rows, prompts=[row["prompt"] for row in rows])
    right = np.array([n >= G - count for count in rights for n in range(G)])
    rewards = np.stack([right.astype(float), np.random.default_rng(seed).random(len(right))], axis=1)
    return sampled, rewards, right, np.ones(len(right), bool), indices


def put(replay, *step):
    sampled, rewards, right, valid, indices = step
    return replay.put(sampled, rewards, right, valid, indices=indices, group_size=G)


def equal(left, right):
    """Bit for bit, NaN and signs of zero included."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (a.tobytes() == b.tobytes()) if a.dtype != object else (a == b).all()


def test_only_mixed_groups_are_kept_whole():
    replay = Replay(10, 5)
    sampled, rewards, right, valid, indices = step_of(0, [0, 1, 4, 3], behaviour=True)
    assert put(replay, sampled, rewards, right, valid, indices) == 2
    groups = replay.take(9, policy_step=10)
    assert [group.index for group in groups] == [indices[1], indices[3]]
    assert [group.solve_rate for group in groups] == [0.25, 0.75]
    assert [group.policy_step for group in groups] == [10, 10]
    for group, first in zip(groups, (4, 12), strict=True):
        rows = list(range(first, first + G))
        equal(group.sampled, join([(sampled, rows)], rows=G, pad_token_id=PAD))
        np.testing.assert_array_equal(group.rewards, rewards[rows])
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(group.sampled.rollout))
    assert len(replay) == 0


def test_rows_that_are_not_valid_make_no_group_mixed():
    sampled, rewards, right, valid, indices = step_of(0, [1, 3, 2])
    valid[3] = valid[4] = valid[8] = False  # the only right row; the only wrong row; one of two wrong rows
    replay = Replay(10, 5)
    assert put(replay, sampled, rewards, right, valid, indices) == 1
    assert replay.take(1, policy_step=10)[0].solve_rate == 2 / 3
    assert put(replay, sampled, rewards, right, np.zeros_like(valid), indices) == 0


def test_the_oldest_come_first_and_a_full_buffer_loses_them():
    replay = Replay(3, 100)
    for seed in range(3):
        assert put(replay, *step_of(seed, [2, 0, 1])) == 2
    assert len(replay) == 3  # of six: (0, 2 right) … (2, 1 right)
    groups = replay.take(2, policy_step=12)
    assert [(g.policy_step, g.solve_rate) for g in groups] == [(11, 0.25), (12, 0.5)]
    assert [(g.policy_step, g.solve_rate) for g in replay.take(2, policy_step=12)] == [(12, 0.25)]
    assert replay.take(2, policy_step=12) == []


def test_those_solved_half_the_time_come_first_where_asked():
    replay = Replay(10, 100)
    put(replay, *step_of(0, [1, 2, 3]))
    put(replay, *step_of(1, [2, 1]))
    rates = lambda groups: [(g.policy_step, g.solve_rate) for g in groups]
    assert rates(replay.take(0, policy_step=11, order="half")) == []
    assert rates(replay.take(1, policy_step=11, order="half")) == [(10, 0.5)]
    assert rates(replay.take(1, policy_step=11)) == [(10, 0.25)]  # the others stay in the order they came in
    assert rates(replay.take(2, policy_step=11, order="half")) == [(11, 0.5), (10, 0.75)]
    assert rates(replay.take(3, policy_step=11)) == [(11, 0.25)]


def test_groups_that_are_too_old_are_dropped():
    replay = Replay(10, 2)
    put(replay, *step_of(0, [1]))
    put(replay, *step_of(1, [2]))
    assert [g.policy_step for g in replay.take(0, policy_step=12)] == []
    assert len(replay) == 2  # just not too old
    assert [g.policy_step for g in replay.take(5, policy_step=13)] == [11]
    assert len(replay) == 0


def test_the_age_is_that_of_the_oldest_token():
    sampled, *rest = step_of(5, [2], on_device=False)
    steps = np.where(sampled.rollout.action_mask, 15, 0).astype(np.int32)
    steps[2, 3] = 12  # a first token that older weights sampled
    replay = Replay(10, 2)
    put(replay, sampled._replace(rollout=sampled.rollout._replace(policy_step=steps)), *rest)
    assert replay.take(0, policy_step=14) == []
    assert len(replay) == 1
    assert replay.take(1, policy_step=15) == []


def test_a_restored_buffer_goes_on_with_the_same_bits():
    first = Replay(5, 4)
    for seed in range(3):
        sampled, rewards, *rest = step_of(seed, [2, 3], columns=2 + seed)
        rewards[0, 1], rewards[1, 1] = NAN, -0.0  # abstained; a sign to lose
        put(first, sampled, rewards, *rest)
    state = first.state()
    second = Replay(5, 4)
    put(second, *step_of(9, [1]))  # what it had is replaced
    second.load(json.loads(json.dumps(state, allow_nan=False)), rows=DATASET)
    assert second.state() == state
    assert len(second) == len(first) == 5
    for replay in (first, second):
        put(replay, *step_of(3, [1, 0], columns=4))
    for order in ("half", "oldest"):
        taken = [replay.take(2, policy_step=14, order=order) for replay in (first, second)]
        assert len(taken[0]) == 2
        equal(*taken)
        assert taken[1][0].sampled.rows[0] is DATASET[taken[0][0].index]
    assert first.state() == second.state()


@pytest.mark.parametrize("behaviour", [False, True])
def test_replayed_groups_join_with_fresh_ones(behaviour):
    replay = Replay(4, 4)
    put(replay, *step_of(0, [2], columns=2, behaviour=behaviour))
    restored = Replay(4, 4)
    restored.load(replay.state(), rows=DATASET)
    fresh = step_of(1, [1, 3], columns=5, behaviour=behaviour)[0]
    (group,) = restored.take(1, policy_step=11)
    joined = join([(fresh, range(G, 2 * G)), (group.sampled, range(G))], rows=3 * G, pad_token_id=PAD)
    assert joined.count == 2 * G
    assert joined.rollout.tokens.shape == (3 * G, 8)
    assert joined.prompts == ["prompt 2"] * G + ["prompt 0"] * G
    assert set(joined.rollout.policy_step[:G][joined.rollout.action_mask[:G]]) == {11}
    assert set(joined.rollout.policy_step[G : 2 * G][joined.rollout.action_mask[G : 2 * G]]) == {10}
    for n in range(2 * G):
        assert joined.rollout.tokens[n, joined.rollout.action_mask[n]].tolist() == joined.completion_ids[n]
    joined.rollout.tokens[0] = 0  # arrays of its own, that can be written to


def test_a_smaller_buffer_keeps_the_newest_of_a_saved_one():
    replay = Replay(4, 9)
    for seed in range(4):
        put(replay, *step_of(seed, [2]))
    smaller = Replay(2, 9)
    smaller.load(replay.state(), rows=DATASET)
    assert [group.policy_step for group in smaller.take(9, policy_step=13)] == [12, 13]


def test_what_does_not_fit_is_refused():
    for size, age in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="both must be at least 1"):
            Replay(size, age)
    replay = Replay(2, 2)
    sampled, rewards, right, valid, indices = step_of(3, [1, 2])
    with pytest.raises(ValueError, match="8 rows, but 8 rewards, 8 and 8 verdicts, and 1 groups of 4"):
        replay.put(sampled, rewards, right, valid, indices=indices[:1], group_size=G)
    put(replay, sampled, rewards, right, valid, indices)
    with pytest.raises(ValueError, match="k=-1"):
        replay.take(-1, policy_step=0)
    with pytest.raises(ValueError, match="saved prompt 3 is not among the 3 of the dataset"):
        Replay(2, 2).load(replay.state(), rows=DATASET[:3])
