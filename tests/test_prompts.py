"""Ways of drawing prompts: the documented probabilities, and a restored state that goes on draw for draw."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm.data import batch_indices
from jaxrl_lm.rollout.prompts import (
    CategoryBandit,
    Curriculum,
    Shuffled,
    SolveRates,
    categories_of,
    never_solved_share,
)

NAN = float("nan")
COUNT = 12
CATEGORIES = [["sums", "words", "logic"][i % 3] for i in range(COUNT)]
MAKERS = {
    "shuffled": lambda seed=3: Shuffled(COUNT, seed),
    "curriculum": lambda seed=3: Curriculum(COUNT, seed, floor=0.1, decay=0.7),
    "bandit": lambda seed=3: CategoryBandit(CATEGORIES, seed, temperature=0.4, step=0.5),
}


def outcome(step: int, indices: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Solve rates and mean |A| that depend on the prompt and the step; now and then none."""
    rates = np.array([NAN if (i + step) % 5 == 0 else ((3 * i + step) % 9) / 8 for i in indices])
    return rates, 2 * np.sqrt(rates * (1 - rates))


def run(sampling, steps, sizes=(5,)):
    """The draws of some steps, each taken in parts of `sizes` and observed at its end."""
    found = []
    for step in steps:
        drawn = [index for size in sizes for index in sampling.draw(step, size)]
        sampling.observe(drawn, *outcome(step, drawn))
        found.append(drawn)
    return found


# --- what holds for all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
def test_a_restored_state_goes_on_as_if_nothing_had_stopped(kind):
    whole = run(MAKERS[kind](), range(1, 21))
    for stop in (1, 7, 13):
        first = MAKERS[kind]()
        assert run(first, range(1, stop + 1)) == whole[:stop]
        state = json.loads(json.dumps(first.state(), allow_nan=False))
        second = MAKERS[kind]()
        run(second, range(1, 3))  # what it had is replaced
        second.load(state)
        assert run(second, range(stop + 1, 21)) == whole[stop:]
        assert second.state() != state
        run(first, range(stop + 1, 21))
        assert second.state() == first.state()


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_taken_within_a_step_goes_on_too(kind):
    first, second = MAKERS[kind](), MAKERS[kind]()
    first.draw(1, 3)
    second.load(json.loads(json.dumps(first.state())))
    assert second.draw(1, 6) == first.draw(1, 6)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_step_drawn_in_parts_is_the_step_drawn_at_once(kind):
    assert run(MAKERS[kind](), range(1, 9), (5,)) == run(MAKERS[kind](), range(1, 9), (2, 0, 3))


@pytest.mark.parametrize("kind", MAKERS)
def test_draws_depend_on_the_seed_and_on_nothing_global(kind):
    np.random.seed(0)
    first = run(MAKERS[kind](), range(1, 6))
    np.random.seed(1)
    assert run(MAKERS[kind](), range(1, 6)) == first
    assert run(MAKERS[kind](4), range(1, 6)) != first
    assert all(type(index) is int and 0 <= index < COUNT for step in first for index in step)


@pytest.mark.parametrize(("kind", "other"), list(itertools.permutations(MAKERS, 2)))
def test_a_state_of_another_kind_is_refused(kind, other):
    with pytest.raises(
        ValueError, match=f"prompt_sampling='{kind}': the saved state is one of prompt_sampling='{other}'"
    ):
        MAKERS[kind]().load(MAKERS[other]().state())


def test_a_state_of_another_dataset_is_refused():
    for made, other in [
        (Shuffled(3, 0), Shuffled(4, 0)),
        (Curriculum(3, 0), Curriculum(4, 0)),
        (CategoryBandit(["a"] * 3, 0), CategoryBandit(["a"] * 4, 0)),
    ]:
        with pytest.raises(ValueError, match="of 4 prompts, the dataset has 3"):
            made.load(other.state())
    with pytest.raises(ValueError, match=r"category_column.*\['a', 'b'\].*\['b', 'a'\]"):
        CategoryBandit(["b", "a"], 0).load(CategoryBandit(["a", "b"], 0).state())
    with pytest.raises(ValueError, match="of 4 prompts, the dataset has 3"):
        SolveRates(3).load(SolveRates(4).state())


def test_sizes_and_options_that_cannot_be_are_refused():
    for make in (Shuffled, Curriculum, lambda count, seed: CategoryBandit(["a"] * count, seed)):
        with pytest.raises(ValueError, match="prompt_sampling: 0 prompts"):
            make(0, 0)
        with pytest.raises(ValueError, match="seed=-1"):
            make(3, -1)
        with pytest.raises(ValueError, match="count=-1"):
            make(3, 0).draw(1, -1)
    for floor in (0.0, -1.0, math.inf, NAN):
        with pytest.raises(ValueError, match="prompt_sampling='curriculum': floor"):
            Curriculum(3, 0, floor=floor)
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match="decay"):
            Curriculum(3, 0, decay=decay)
    for temperature in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="prompt_sampling='bandit': temperature"):
            CategoryBandit(["a"], 0, temperature=temperature)
    for step in (0.0, 1.1):
        with pytest.raises(ValueError, match="prompt_sampling='bandit': step"):
            CategoryBandit(["a"], 0, step=step)


@pytest.mark.parametrize("kind", ["curriculum", "bandit"])
def test_outcomes_that_do_not_fit_are_refused(kind):
    sampling, rate = MAKERS[kind](), np.array([0.5])
    with pytest.raises(ValueError, match="1 outcomes for 2 prompts"):
        sampling.observe([0, 1], rate, rate)
    for index in (-1, COUNT):
        with pytest.raises(ValueError, match=rf"prompts \[{index}\]"):
            sampling.observe([index], rate, rate)
    with pytest.raises(ValueError, match="prompt_sampling"):
        sampling.observe([0], np.array([-0.1]), np.array([-0.1]))
    with pytest.raises(ValueError, match="prompt_sampling"):
        sampling.observe([0], np.array([1.5]), np.array([np.inf]))


# --- shuffled -------------------------------------------------------------------------------------------------------


def test_shuffled_is_the_order_of_the_dataset():
    sampling = Shuffled(7, 5)
    drawn = [index for step in range(1, 9) for index in sampling.draw(step, 4)]
    assert drawn == batch_indices(7, seed=5, position=0, count=32).tolist()
    assert sampling.state()["position"] == 32


# --- curriculum -----------------------------------------------------------------------------------------------------


def test_the_solve_rate_table_is_a_moving_average():
    table = SolveRates(4, decay=0.75)
    assert math.isnan(never_solved_share(table))
    table.observe([2, 0], np.array([0.5, 0.0]))
    table.observe([2, 3], np.array([1.0, NAN]))
    table.observe([2], np.array([0.0]))
    assert table.rates.tolist() == [0.0, 0.0, 0.75 * (0.75 * 0.5 + 0.25 * 1.0), 0.0]
    assert table.seen.tolist() == [1, 0, 3, 0]  # nothing was judged on 3
    assert table.solved.tolist() == [False, False, True, False]
    assert never_solved_share(table) == 0.5
    table.observe([0, 0], np.array([0.0, 1 / 8]))  # twice in a batch: one after the other
    assert table.rates[0] == 0.25 / 8
    assert never_solved_share(table) == 0.0


def test_a_prompt_solved_once_stays_solved():
    table = SolveRates(1, decay=0.0)
    table.observe([0], np.array([0.25]))
    table.observe([0], np.array([0.0]))
    assert table.rates[0] == 0
    assert never_solved_share(table) == 0


def test_weights_of_the_curriculum():
    sampling = Curriculum(5, 0, floor=0.2)
    assert sampling.weights().tolist() == [1.0] * 5
    sampling.observe([0, 1, 2, 3], np.array([0.0, 0.25, 0.5, 1.0]), np.zeros(4))
    np.testing.assert_allclose(sampling.weights(), [0.2, 0.95, 1.2, 0.2, 1.0], rtol=1e-15)


def chance_without_replacement(weights, count):
    """Probability of each prompt to be among the first `count`, by summing over all orders."""
    share = np.zeros(len(weights))
    for order in itertools.permutations(range(len(weights)), count):
        chance, rest = 1.0, sum(weights)
        for i in order:
            chance *= weights[i] / rest
            rest -= weights[i]
        share[list(order)] += chance
    return share


def test_the_curriculum_draws_without_replacement_in_proportion_to_the_weights():
    sampling, repeats = Curriculum(5, 11, floor=0.1), 4000
    sampling.observe([0, 1, 2, 3], np.array([0.0, 0.125, 0.5, 1.0]), np.zeros(4))
    weights = [0.1, 0.5375, 1.1, 0.1, 1.0]
    found, firsts = np.zeros(5), np.zeros(5)
    for step in range(repeats):
        drawn = sampling.draw(step, 2)
        assert len(set(drawn)) == 2
        found[drawn] += 1
        firsts[drawn[0]] += 1
    for counted, expected in (
        (firsts, np.array(weights) / sum(weights)),
        (found, chance_without_replacement(weights, 2)),
    ):
        deviation = np.sqrt(expected * (1 - expected) / repeats)
        assert (np.abs(counted / repeats - expected) < 4 * deviation).all(), (counted / repeats, expected)


def test_parts_of_a_step_do_not_repeat_a_prompt_though_rates_came_between():
    sampling = Curriculum(COUNT, 2)
    for step in range(1, 30):
        drawn = []
        for _ in range(4):
            part = sampling.draw(step, 3)
            sampling.observe(part, *outcome(step, part))
            drawn += part
        assert sorted(drawn) == list(range(COUNT))


def test_a_step_of_more_prompts_than_there_are_takes_all_before_any_twice():
    drawn = Curriculum(4, 1).draw(1, 10)
    assert sorted(drawn[:4]) == sorted(drawn[4:8]) == [0, 1, 2, 3]
    assert len(set(drawn[8:])) == 2
    assert drawn[:4] != drawn[4:8]


# --- bandit ---------------------------------------------------------------------------------------------------------


def test_values_of_the_bandit_are_moving_averages_over_steps():
    sampling = CategoryBandit(["x", "y", "x", "z"], 0, temperature=0.5, step=0.25)
    sampling.observe([0, 2, 1], np.zeros(3), np.array([1.0, 0.5, NAN]))
    np.testing.assert_allclose(sampling.values, [0.25 * 0.75, 0.0, 0.0])
    sampling.observe([2, 0, 1], np.zeros(3), np.array([0.0, NAN, 0.8]))
    values = np.array([0.75 * 0.25 * 0.75, 0.25 * 0.8, 0.0])
    np.testing.assert_allclose(sampling.values, values)
    np.testing.assert_allclose(sampling.probabilities(), np.exp(values / 0.5) / np.exp(values / 0.5).sum())


def test_the_bandit_draws_categories_by_softmax_and_their_prompts_in_turn():
    sampling = CategoryBandit(["x", "y", "x", "z", "x"], 7, temperature=0.5)
    sampling.observe([0, 1], np.zeros(2), np.array([1.0, 0.4]))
    expected, count = sampling.probabilities(), 6000
    drawn = [index for step in range(60) for index in sampling.draw(step, 100)]
    share = np.bincount([{"x": 0, "y": 1, "z": 2}["xyxzx"[i]] for i in drawn]) / count
    assert (np.abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / count)).all(), (share, expected)
    mine = [i for i in drawn if i in (0, 2, 4)]
    epochs = [tuple(mine[e : e + 3]) for e in range(0, len(mine) - 2, 3)]
    assert all(sorted(epoch) == [0, 2, 4] for epoch in epochs)
    assert len(set(epochs)) == 6  # every order comes up


def test_categories_of_one_size_have_orders_of_their_own():
    sampling = CategoryBandit(["x"] * 40 + ["y"] * 40, 0)
    drawn = sampling.draw(1, 60)
    first, second = [i for i in drawn if i < 40], [i - 40 for i in drawn if i >= 40]
    assert len(first) > 20
    assert len(second) > 20
    assert first[:20] != second[:20]


def test_a_cold_bandit_keeps_to_the_best_category_and_large_values_do_not_overflow():
    sampling = CategoryBandit(["a", "b"], 0, temperature=1e-3, step=1.0)
    sampling.observe([0, 1], np.zeros(2), np.array([1e6, 1.0]))
    assert set(sampling.draw(1, 50)) == {0}


def test_learning_moves_the_draws_to_where_the_advantages_are():
    sampling = CategoryBandit(["easy"] * 6 + ["fit"] * 6, 0, temperature=0.2)
    gain = np.array([0.0] * 6 + [0.9] * 6)
    for step in range(1, 21):
        drawn = sampling.draw(step, 4)
        sampling.observe(drawn, np.zeros(4), gain[drawn])
    assert np.mean(np.array(sampling.draw(21, 400)) >= 6) > 0.95


def test_a_row_without_a_category_is_named():
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b", "level": 2}, {"prompt": "c", "level": None}]
    assert categories_of(rows[:2], "level") == ["1", "2"]
    with pytest.raises(
        ValueError, match=r"category_column='level': row 2 has no such value; its columns are \['prompt'\]"
    ):
        categories_of(rows, "level")
    with pytest.raises(ValueError, match="category_column='topic': row 0"):
        categories_of(rows, "topic")


# --- any history ----------------------------------------------------------------------------------------------------

HISTORY = st.lists(
    st.tuples(st.lists(st.integers(0, 14), min_size=1, max_size=3), st.integers(0, 8), st.floats(0, 1e6)), max_size=6
)


@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(sorted(MAKERS)), seed=st.integers(0, 2**32), history=HISTORY, stop=st.integers(0, 6))
def test_any_history_can_be_stopped_and_goes_on(kind, seed, history, stop):
    whole, stopped = MAKERS[kind](seed), MAKERS[kind](seed)
    for step, (sizes, right, gain) in enumerate(history, start=1):
        if step == stop:
            saved, stopped = stopped.state(), MAKERS[kind](seed)
            stopped.load(json.loads(json.dumps(saved)))
        for sampling in (whole, stopped):
            drawn = [index for size in sizes for index in sampling.draw(step, size)]
            sampling.observe(drawn, np.full(len(drawn), right / 8), np.full(len(drawn), gain))
        assert whole.state() == stopped.state()
    assert whole.draw(99, 9) == stopped.draw(99, 9)
