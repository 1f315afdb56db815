"""Rewards: what functions are called with, every failure with its name and row, abstention, routing, combination."""

import asyncio
import functools
import json
import math
import sys
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm.rewards import (
    RewardError,
    RewardFunction,
    columns_of,
    combine,
    compute_rewards,
    from_verl,
    resolve,
    resolve_all,
    reward_metrics,
    route,
)
from jaxrl_lm.rewards.arithmetic import addition_words, arithmetic, extract_number, format_think
from jaxrl_lm.rewards.reasoning import reasoning_gym, reasoning_gym_rows


def score(*functions, prompts=("p0", "p1", "p2", "p3"), completions=None, **columns):
    """compute_rewards on a few rows."""
    count = len(prompts)
    return compute_rewards(
        resolve_all(functions),
        prompts=list(prompts),
        completions=completions or [f"c{n}" for n in range(count)],
        completion_ids=[[n] for n in range(count)],
        columns=columns,
        group_ids=[n // 2 for n in range(count)],
    )


# --- finding --------------------------------------------------------------------------------------------------------


def half(completions, **columns):
    return [0.5] * len(completions)


async def slow(completions):
    await asyncio.sleep(0)
    return [2.0] * len(completions)


def test_resolve_finds_shipped_modules_files_and_callables(tmp_path):
    assert resolve("arithmetic") == RewardFunction("arithmetic", arithmetic, 1.0)
    assert resolve("format_think").function is format_think
    assert resolve("reasoning_gym").function is reasoning_gym
    named = resolve("jaxrl_lm.rewards.arithmetic:format_think", weight=0.5)
    assert named == RewardFunction("format_think", format_think, 0.5)
    (tmp_path / "mine.py").write_text("def mine(completions):\n    return [3] * len(completions)\n")
    mine = resolve(f"{tmp_path}/mine.py:mine")
    assert mine.name == "mine"
    assert mine.function(completions=["a"]) == [3]
    assert resolve(half) == RewardFunction("half", half, 1.0)
    assert resolve(functools.partial(half, x=1)).name == "half"
    assert resolve(RewardFunction("other", half, 2.0)) == RewardFunction("other", half, 2.0)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("arithmetics", ValueError, "reward='arithmetics' is unknown; did you mean 'arithmetic'"),
        ("qq", ValueError, "'qq' is unknown; did you mean .* Shipped: arithmetic, format_think, reasoning_gym"),
        ("no_such_module:f", ImportError, "reward: 'no_such_module:f': there is no module"),
        ("jaxrl_lm.rewards.arithmetic:arithmetik", ValueError, "did you mean 'arithmetic'"),
        ("nowhere.py:f", FileNotFoundError, "reward: there is no file"),
        (3, TypeError, "neither a name nor a callable"),
    ],
)
def test_resolve_names_what_is_wrong(spec, error, message):
    with pytest.raises(error, match=message):
        resolve_all([spec])


def test_resolve_all_pairs_weights_and_refuses_equal_names():
    assert [f.weight for f in resolve_all([half, slow], [0.0, 2.0])] == [0.0, 2.0]
    assert [f.weight for f in resolve_all([half, slow])] == [1.0, 1.0]
    with pytest.raises(ValueError, match="two reward functions are named 'half'"):
        resolve_all([half, functools.partial(half, x=1)])
    with pytest.raises(ValueError, match="reward_weights has 1 values for 2 reward functions"):
        resolve_all([half, slow], [1.0])
    with pytest.raises(ValueError, match="every weight must be finite"):
        resolve_all([half], [math.nan])


# --- calling --------------------------------------------------------------------------------------------------------


def test_functions_get_what_their_signature_accepts():
    seen = {}

    def everything(prompts, completions, completion_ids, **columns):
        seen["everything"] = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            **columns,
        }
        return [0] * len(prompts)

    def two(completions, answer):
        seen["two"] = (completions, answer)
        return [0] * len(completions)

    def with_default(*, group_ids, level=3):
        seen["with_default"] = (group_ids, level)
        return [0] * len(group_ids)

    score(everything, two, with_default, answer=["1", "2", "3", "4"])
    assert seen["everything"] == {
        "prompts": ["p0", "p1", "p2", "p3"],
        "completions": ["c0", "c1", "c2", "c3"],
        "completion_ids": [[0], [1], [2], [3]],
        "group_ids": [0, 0, 1, 1],
        "answer": ["1", "2", "3", "4"],
    }
    assert seen["two"] == (["c0", "c1", "c2", "c3"], ["1", "2", "3", "4"])
    assert seen["with_default"] == ([0, 0, 1, 1], 3)


def test_chat_rows_get_messages_as_in_trl():
    seen = {}

    def look(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [0] * len(prompts)

    user = {"role": "user", "content": "hi"}
    begun = [user, {"role": "assistant", "content": "So "}]
    score(look, prompts=([user], begun, "plain"), completions=["yes", "no", "text"])
    assert seen["prompts"] == [[user], [user], "plain"]
    assert seen["completions"] == [
        [{"role": "assistant", "content": "yes"}],
        [{"role": "assistant", "content": "So no"}],
        "text",
    ]
    assert len(begun) == 2  # the dataset's own row is as it was


def test_values_of_every_kind_of_number():
    def numbers(completions):
        return [True, np.float32(0.25), Fraction(1, 3), Decimal("0.1"), np.bool_(True), np.int64(3), None, np.array(2)]

    got = score(numbers, prompts=["p"] * 8)
    np.testing.assert_array_equal(got[:, 0], [1.0, 0.25, 1 / 3, 0.1, 1.0, 3.0, np.nan, 2.0])
    assert got.dtype == np.float64
    got = score(lambda completions: np.arange(4))
    np.testing.assert_array_equal(got[:, 0], [0, 1, 2, 3])


def test_async_functions_are_awaited_together_and_beside_the_others():
    """Each waits for the other two: run one after the other, none would end."""
    met, entered = threading.Barrier(2, timeout=10), []

    async def first(completions):
        entered.append("first")
        while len(entered) < 2:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(met.wait)
        return [1.0] * len(completions)

    async def second(completions):
        entered.append("second")
        while len(entered) < 2:
            await asyncio.sleep(0.001)
        return [2.0] * len(completions)

    def plain(completions):
        met.wait()
        return [3.0] * len(completions)

    got = score(first, plain, second, half)
    np.testing.assert_array_equal(got, [[1.0, 3.0, 2.0, 0.5]] * 4)


def test_async_functions_run_under_a_running_event_loop_and_in_any_wrapping():
    class Judge:
        async def __call__(self, completions):
            return [4.0] * len(completions)

    async def notebook():
        return score(slow, functools.partial(slow), lambda completions: slow(completions), Judge())

    with pytest.raises(ValueError, match="two reward functions are named 'slow'"):
        asyncio.run(notebook())

    async def notebook_with_names():
        parts = [RewardFunction("partial", functools.partial(slow)), lambda completions: slow(completions), Judge()]
        return score(slow, *parts)

    np.testing.assert_array_equal(asyncio.run(notebook_with_names()), [[2.0, 2.0, 2.0, 4.0]] * 4)


def raises_on_row_2(completions):
    if any(text == "c2" for text in completions):
        raise KeyError("the judge is away")
    return [1.0] * len(completions)


async def raises_on_row_2_async(completions):
    return raises_on_row_2(completions)


@pytest.mark.parametrize("function", [raises_on_row_2, raises_on_row_2_async, lambda **k: raises_on_row_2_async(**k)])
def test_a_function_that_raises_is_named_with_its_row(function):
    named = RewardFunction("judge", lambda completions: function(completions=completions))
    with pytest.raises(RewardError, match=r"reward 'judge' raised KeyError.*away.* on row 2 \(prompt 'p2'\)") as caught:
        score(half, named)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_failure_of_the_whole_batch_names_no_row_as_guilty():
    def pairs(completions):
        if len(completions) > 1:
            raise RuntimeError(f"{len(completions)} at once are too many")
        return [0.0]

    with pytest.raises(RewardError, match=r"4 at once are too many on a call with rows 0 to 3; the first is row 0"):
        score(pairs)


def test_the_sync_error_is_not_lost_behind_async_ones():
    with pytest.raises(RewardError, match="'raises_on_row_2' raised"):
        score(slow, raises_on_row_2, raises_on_row_2_async)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0] * 3, r"reward 'bad' returned 3 values for 4 completions; first row: row 0 \(prompt 'p0'\)"),
        ([1.0] * 5, "returned 5 values for 4 completions"),
        ([0, 0, math.nan, 0], r"returned nan for row 2 \(prompt 'p2'\); it must be finite"),
        ([0, math.inf, 0, 0], "returned inf for row 1"),
        ([0, -math.inf, 0, 0], "returned -inf for row 1"),
        ([0, 0, 0, 10**400], "returned inf for row 3"),
        ([0, "1.0", 0, 0], r"returned a str \('1.0'\) for row 1 \(prompt 'p1'\); it must be a number, or None"),
        ([0, [1.0], 0, 0], r"returned a list \(\[1.0\]\) for row 1"),
        ([0, 1j, 0, 0], "returned a complex .* for row 1"),
        ([0, {"score": 1}, 0, 0], "returned a dict .* for row 1"),
        (np.zeros((4, 1)), "returned a ndarray .* for row 0"),
        (None, "returned a NoneType, not a list of 4 numbers"),
        (1.0, "returned a float, not a list of 4 numbers"),
        ("1234", "returned a str, not a list of 4 numbers"),
        (dict.fromkeys(range(4), 1.0), "returned a dict, not a list of 4 numbers"),
    ],
)
def test_bad_values_are_named_with_their_row(result, message):
    with pytest.raises(RewardError, match=message):
        score(RewardFunction("bad", lambda completions: result))


def test_a_long_chat_prompt_is_shown_by_its_beginning():
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q" * 100}]
    with pytest.raises(RewardError, match=rf"row 0 \(prompt '{'q' * 60}'…\)"):
        score(lambda completions: [math.nan], prompts=[prompt])


def test_a_missing_column_is_named():
    with pytest.raises(RewardError, match=r"'arithmetic' needs the column 'answer'.*\(its further columns: solution\)"):
        score("arithmetic", solution=["1"] * 4)
    with pytest.raises(RewardError, match="its further columns: none"):
        score("arithmetic")


def test_columns_must_fit():
    with pytest.raises(ValueError, match="answer has 3 values for 4 rows"):
        score(half, answer=[1, 2, 3])
    with pytest.raises(ValueError, match="dataset columns may not be named group_ids"):
        score(half, group_ids=[0] * 4)


def test_columns_of_repeats_rows_and_fills_gaps():
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "source": "x", "completion": "c"}]
    assert columns_of(rows, num_generations=2) == {"answer": [1, 1, None, None], "source": [None, None, "x", "x"]}
    assert columns_of([{"prompt": "a"}]) == {}


def test_the_reward_column_routes_rows():
    seen = []

    def first(completions, answer):
        seen.append((completions, answer))
        return [float(a) for a in answer]

    column = ["first", ["half"], None, ["first", "half"]]
    got = score(first, half, reward=column, answer=["1", None, "3", "4"])
    nan = math.nan
    np.testing.assert_array_equal(got, [[1, nan], [nan, 0.5], [3, 0.5], [4, 0.5]])
    assert seen == [(["c0", "c2", "c3"], ["1", "3", "4"])]  # a function never sees rows that are not its own


def test_a_routed_failure_names_the_row_of_the_batch():
    with pytest.raises(RewardError, match="returned nan for row 3"):
        score(half, RewardFunction("bad", lambda completions: [0, math.nan]), reward=["half", "bad", "half", "bad"])


def test_a_function_without_rows_is_not_called():
    def never(completions, a_column_of_other_rows):
        raise AssertionError

    assert np.isnan(score(half, never, reward=["half"] * 4)[:, 1]).all()


def test_routing_to_an_unknown_name():
    with pytest.raises(ValueError, match="row 1: its column 'reward' names 'haf', and the reward functions are half"):
        route(resolve_all([half]), ["half", "haf"])
    with pytest.raises(ValueError, match="row 0: its column 'reward' names 'x'"):
        score(half, reward=[["x"], None, None, None])


# --- combining ------------------------------------------------------------------------------------------------------


def combine_by_loops(values, weights, group_size, aggregation):
    returns, valid = [], []
    for n, row in enumerate(values):
        total, any_given = 0.0, False
        for f, value in enumerate(row):
            if weights[f] == 0 or math.isnan(value):
                continue
            any_given = True
            if aggregation == "normalize_then_sum":
                start = n // group_size * group_size
                group = [v[f] for v in values[start : start + group_size] if not math.isnan(v[f])]
                mean = sum(group) / len(group)
                if max(group) == min(group):
                    value = 0.0
                else:
                    value = (value - mean) / math.sqrt(sum((v - mean) ** 2 for v in group) / (len(group) - 1))
            total += weights[f] * value
        returns.append(total)
        valid.append(any_given)
    return returns, valid


VALUE = st.one_of(st.just(math.nan), st.sampled_from([0.0, 0.1, 1.0]), st.floats(-100, 100).map(lambda x: round(x, 3)))


@settings(max_examples=150, deadline=None)
@given(table=st.data(), aggregation=st.sampled_from(["sum_then_normalize", "normalize_then_sum"]))
def test_combine_equals_loops(table, aggregation):
    groups, size, count = (table.draw(st.integers(1, n)) for n in (3, 4, 3))
    rows = st.lists(VALUE, min_size=count, max_size=count)
    values = table.draw(st.lists(rows, min_size=groups * size, max_size=groups * size))
    weights = table.draw(st.lists(st.sampled_from([0.0, 1.0, -0.5, 2.0]), min_size=count, max_size=count).filter(any))
    returns, valid = combine(np.array(values), weights, group_size=size, aggregation=aggregation)
    expected, expected_valid = combine_by_loops(values, weights, size, aggregation)
    np.testing.assert_allclose(returns, expected, rtol=1e-9, atol=1e-9)
    assert valid.tolist() == expected_valid


def test_combine_on_known_numbers():
    nan = math.nan
    values = np.array([[1.0, 100.0, 7.0], [0.0, nan, nan], [nan, nan, 7.0], [nan, 300.0, nan]])
    returns, valid = combine(values, [2.0, 0.01, 0.0], group_size=2)
    np.testing.assert_allclose(returns, [3.0, 0.0, 0.0, 3.0])
    assert valid.tolist() == [True, True, False, True]  # row 2 has only a value of weight 0


def test_normalising_first_keeps_a_large_reward_from_drowning_a_small_one():
    values = np.array([[0.0, 100.0], [1.0, 0.0]])
    returns, _ = combine(values, [1.0, 1.0], group_size=2, aggregation="normalize_then_sum")
    np.testing.assert_allclose(returns, [0.0, 0.0], atol=1e-15)
    returns, _ = combine(values, [1.0, 1.0], group_size=2)
    np.testing.assert_allclose(returns, [100.0, 1.0])


def test_equal_rewards_have_no_spread_whatever_their_rounding():
    """The mean of three 0.1 is not 0.1 in floating point."""
    returns, valid = combine(np.full((3, 1), 0.1), [1.0], group_size=3, aggregation="normalize_then_sum")
    assert returns.tolist() == [0.0, 0.0, 0.0]
    assert valid.all()


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([1.0], {"group_size": 2}, "reward_weights has 1 values for 2 reward functions"),
        ([1.0, 1.0], {"group_size": 3}, "4 rows are not a whole number of groups of 3"),
        ([0.0, 0.0], {"group_size": 2}, "every weight is 0"),
    ],
)
def test_combine_refuses_what_does_not_fit(weights, options, message):
    with pytest.raises(ValueError, match=message):
        combine(np.zeros((4, 2)), weights, **options)


def test_metrics():
    nan = math.nan
    functions = [RewardFunction("a", half, 1.0), RewardFunction("truth", half, 0.0), RewardFunction("none", half, 1.0)]
    values = np.array([[1.0, 0.0, nan], [0.0, 1.0, nan], [nan, 1.0, nan], [0.5, nan, nan]])
    returns, _ = combine(values, [1.0, 0.0, 1.0], group_size=2)
    got = reward_metrics(functions, values, returns, sources=["x", "x", "y", None], true_reward="truth")
    assert got.pop("rewards/a/std") == pytest.approx(0.5)
    assert got.pop("rewards/truth/std") == pytest.approx(math.sqrt(1 / 3))
    assert all(math.isnan(got.pop(f"rewards/none/{kind}")) for kind in ("mean", "std"))
    assert got == {
        "rewards/a/mean": 0.5,
        "rewards/a/x/mean": 0.5,
        "rewards/truth/mean": pytest.approx(2 / 3),
        "rewards/truth/x/mean": 0.5,
        "rewards/truth/y/mean": 1.0,
        "reward_gap": 0.0,  # over rows 0 and 1 only
    }
    with pytest.raises(ValueError, match="true_reward='truht' is none of the reward functions: a, truth, none"):
        reward_metrics(functions, values, returns, true_reward="truht")


# --- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 + 5 = 12", "12"),
        ("#### 42", "42"),
        ("3 + 4\n#42", "42"),
        ("# Step 1\nIt is 9", "9"),
        ("#### 1,234 apples", "1234"),
        (r"so \boxed{42}, not 43", "42"),
        (r"\boxed{\frac{1}{2}} of 3", "1/2"),
        (r"\boxed{x = {7}} 8", "7"),
        ("<answer>42</answer> or 43", "42"),
        ("<answer> 7 + 5 = 12 </answer>", "12"),
        ("<answer>42", "42"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("The answer is 12. I am 100 % sure", "12"),
        ("The answer is 7 + 5 = 12.", "12"),
        ("The Answer: 3.50!", "7/2"),
        ("answer is 1. No: the answer is 2", "2"),
        ("The answer is as follows\n 5", "5"),
        ("10-3", "3"),
        ("it is -3", "-3"),
        ("it is \u22123", "-3"),
        ("= $1,000.50", "2001/2"),
        (".5", "1/2"),
        ("3/4", "3/4"),
        ("1.5/3", "1/2"),
        ("100,200,30", "30"),
        ("<answer>none</answer> 4", None),
        (r"\boxed{x} 4", None),
        ("1/0", None),
        ("no digits", None),
        ("", None),
        ("9" * 5000, None),  # Python would raise on it
        ("٣", None),
    ],
)
def test_extract_number(text, number):
    assert extract_number(text) == (None if number is None else Fraction(number))


@settings(max_examples=100, deadline=None)
@given(
    number=st.decimals(-(10**9), 10**9, places=3), form=st.sampled_from(["plain", "separators"]), mark=st.integers(0, 5)
)
def test_every_marked_number_is_read_exactly(number, form, mark):
    shown = f"{number:,}" if form == "separators" else f"{number}"
    text = ["#### {}", "#{}", "\\boxed{{{}}}", "<answer>{}</answer>", "the answer is {}.", "5 and then {}"][mark]
    assert extract_number("First 3, then 4.\n" + text.format(shown)) == Fraction(number)


def test_arithmetic_scores():
    completions = ["#### 1,000", [{"role": "assistant", "content": "0.5"}], "12", "none", "0.1"]
    answers = ["1000.0", Fraction(1, 2), 13, "4", 0.1]
    assert arithmetic(completions=completions, answer=answers) == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert arithmetic(completions=["72"], answer=["48/2 = 24\n48+24 = 72\n#### 72"], other=["x"]) == [1.0]


@pytest.mark.parametrize("answer", ["none", True, [1], math.nan])
def test_an_answer_column_without_a_number_is_an_error(answer):
    with pytest.raises(RewardError, match=r"'arithmetic' raised ValueError: the column 'answer' holds .* on row 2"):
        score("arithmetic", answer=["1", "2", answer, "4"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>7+5\n=12</think>\n<answer>12</answer>", 1.0),
        (" <think></think><answer></answer> ", 1.0),
        ("<think>a</think><answer>12", 0.0),
        ("<answer>12</answer><think>a</think>", 0.0),
        ("<think>a</think>b<answer>12</answer>", 0.0),
        ("<think>a</think><think>a</think><answer>12</answer>", 0.0),
        ("<think>a</think><answer>12</answer> and more", 0.0),
        ("12", 0.0),
    ],
)
def test_format_think(text, value):
    assert format_think(completions=[text, [{"role": "assistant", "content": text}]]) == [value, value]


def operands(row):
    a, b = (int(word) for word in "".join(c if c.isdigit() else " " for c in row["prompt"]).split())
    return frozenset((a, b))


def test_word_problems_are_unique_right_and_never_shared_between_splits():
    made = {split: addition_words(150, seed=3, max_operand=9, split=split, chat=False) for split in ("train", "test")}
    for rows in made.values():
        assert len({row["prompt"] for row in rows}) == 150
        for row in rows:
            pair = sorted(operands(row))
            low, high = pair[0], pair[-1]
            assert int(row["answer"]) in (low + high, high - low)
            assert int(row["answer"]) >= 0
    assert not {operands(row) for row in made["train"]} & {operands(row) for row in made["test"]}
    assert addition_words(150, seed=3, max_operand=9, chat=False) == made["train"]
    assert addition_words(150, seed=4, max_operand=9, chat=False) != made["train"]


def test_every_word_problem_of_a_small_space():
    """5 phrasings; 3 numbers give 9 ordered pairs for sums, and 6 pairs for differences."""
    rows = []
    for split in ("train", "test"):
        with pytest.raises(
            ValueError, match=rf"the {split} split has only \d+ problems with operands up to 2"
        ) as caught:
            addition_words(76, seed=0, max_operand=2, split=split)
        rows += addition_words(int(str(caught.value).split("only ")[1].split()[0]), seed=0, max_operand=2, split=split)
    assert len(rows) == 5 * (9 + 6)
    assert len({row["prompt"][0]["content"] for row in rows}) == 75


def test_word_problem_options():
    (row,) = addition_words(1, seed=0, max_operand=99, operations=("-",), instruction="Be brief.")
    assert row["prompt"][0]["role"] == "user"
    assert row["prompt"][0]["content"].endswith(" Be brief.")
    with pytest.raises(ValueError, match=r"operations=\('\*',\): use some of \+, -"):
        addition_words(1, seed=0, max_operand=9, operations=("*",))


# --- adapters -------------------------------------------------------------------------------------------------------


def test_reasoning_gym_rows_score_their_own_answers():
    # arc_1d's entries hold tuples, which JSON has not.
    rows = reasoning_gym_rows("chain_sum", size=3, seed=1, min_terms=2, max_terms=2) + reasoning_gym_rows(
        "arc_1d", size=1, seed=1
    )
    rows = json.loads(json.dumps(rows))
    assert [row["data_source"] for row in rows] == ["chain_sum"] * 3 + ["arc_1d"]
    assert all(isinstance(row["prompt"], str) for row in rows)
    completions = [f"<think>1</think><answer> {row['answer']} </answer>" for row in rows]
    columns = columns_of([*rows, {"prompt": "x"}])
    got = score(
        "reasoning_gym", prompts=[row["prompt"] for row in rows] + ["x"], completions=[*completions, "12"], **columns
    )
    np.testing.assert_array_equal(got[:, 0], [1.0, 1.0, 1.0, 1.0, np.nan])
    entries = [row["reasoning_gym"] for row in rows[:2]]
    assert reasoning_gym(completions=[rows[0]["answer"] + "\n", "wrong"], reasoning_gym=entries) == [1.0, 0.0]


def test_a_reasoning_gym_verifier_that_raises_on_an_answer_warns():
    (row,) = reasoning_gym_rows("prime_factorization", size=1, seed=0)
    with pytest.warns(
        UserWarning, match="verifier of 'prime_factorization' raises ValueError on answers of the wrong form"
    ):
        assert reasoning_gym(completions=["hello"], reasoning_gym=[row["reasoning_gym"]]) == [0.0]


@pytest.mark.parametrize("reference", ["hello", None])
def test_a_reasoning_gym_verifier_that_is_out_of_order_stops_the_run(reference):
    """It does not give the entry's own answer full marks, so nothing is known about the model's."""
    (row,) = reasoning_gym_rows("prime_factorization", size=1, seed=0)
    task = json.loads(row["reasoning_gym"])
    task["entry"]["answer"] = reference
    with pytest.raises(ValueError, match="invalid literal for int"):
        reasoning_gym(completions=["hello"], reasoning_gym=[json.dumps(task)])


def test_reasoning_gym_errors(monkeypatch):
    with pytest.raises(ValueError, match="'no_such_task' not registered"):
        reasoning_gym_rows("no_such_task", size=1, seed=0)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxrl-lm\[reasoning-gym\]'"):
        reasoning_gym_rows("chain_sum", size=1, seed=12345)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    value = float(solution_str == ground_truth) + (extra_info or {}).get("bonus", 0)
    return {"score": value, "acc": 1} if data_source == "dict" else value


VERL = {"data_source": ["dict", "x", "x", "x"], "ground_truth": ["c0", "c1", "no", "no"]}


def test_verl_functions():
    function = from_verl(compute_score)
    assert resolve(function).name == "compute_score"
    np.testing.assert_array_equal(score(function, **VERL)[:, 0], [1, 1, 0, 0])
    got = score(function, **VERL, extra_info=[None, {"bonus": 2}, None, {"bonus": 3}], other=[0] * 4)
    np.testing.assert_array_equal(got[:, 0], [1, 3, 0, 3])
    chat = [[{"role": "user", "content": "q"}]] * 4
    np.testing.assert_array_equal(score(function, prompts=chat, **VERL)[:, 0], [1, 1, 0, 0])


def test_verl_functions_by_name(tmp_path):
    (tmp_path / "score.py").write_text(
        "def mine(data_source, solution_str, ground_truth, extra_info=None):\n    return 2\n"
    )
    named = resolve(f"verl:{tmp_path}/score.py:mine")
    assert named.name == "mine"
    np.testing.assert_array_equal(score(named, **VERL)[:, 0], [2, 2, 2, 2])


def test_verl_errors():
    with pytest.raises(RewardError, match="'compute_score' needs the column 'ground_truth'"):
        score(from_verl(compute_score), data_source=["x"] * 4)
    with pytest.raises(RewardError, match="the row has no 'data_source' on row 1"):
        score(from_verl(compute_score), **{**VERL, "data_source": ["x", None, "x", "x"]})
    with pytest.raises(RewardError, match=r"returned a dict without 'score', with \['acc'\] on row 0"):
        score(RewardFunction("bad", from_verl(lambda **row: {"acc": 1})), **VERL)
    with pytest.raises(RewardError, match="'bad' returned a str"):
        score(RewardFunction("bad", from_verl(lambda **row: "1")), **VERL)


def test_random_reward_is_repeatable_independent_of_the_text_and_fair():
    from jaxrl_lm.rewards.controls import random_reward

    rows = 2000
    asked = {"prompts": ["p"] * rows, "completion_ids": [[1, 2]] * rows}
    first = random_reward(**asked)
    assert first == random_reward(**asked)
    assert set(first) == {0.0, 1.0}
    # 2000 fair coins: five standard deviations are 0.056
    assert abs(sum(first) / rows - 0.5) < 0.056
