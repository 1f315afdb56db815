"""The arithmetic lab: exact problems, working and checks; splits; rewards on any text; the tokenizer; the figure."""

import itertools
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from jaxrl_lm.lab import figure, task
from jaxrl_lm.lab.task import Problem, check, solution
from jaxrl_lm.lab.tokenizer import CHARACTERS, lab_tokenizer

TWO = Problem((47, 385))
THREE = Problem((47, 385, 6))


# --- problems and text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operands", "prompt", "completion"),
    [
        ((47, 385), "47+385=", "7+5=12;4+8+1=13;0+3+1=4;#432"),
        ((47, 385, 6), "47+385+6=", "7+5+6=18;4+8+0+1=13;0+3+0+1=4;#438"),
        ((0, 0), "0+0=", "0+0=0;#0"),
        ((9, 9, 9), "9+9+9=", "9+9+9=27;#27"),
        ((999, 1), "999+1=", "9+1=10;9+0+1=10;9+0+1=10;#1000"),
        ((100, 200), "100+200=", "0+0=0;0+0=0;1+2=3;#300"),
    ],
)
def test_prompt_and_solution(operands, prompt, completion):
    problem = Problem(operands)
    assert task.prompt(problem) == prompt
    assert solution(problem) == completion
    assert problem.answer == sum(operands)


def test_problems_are_deterministic_unique_and_of_the_size_asked_for():
    problems = task.make_problems(500, seed=3, digits=3, addends=(2, 3))
    assert problems == task.make_problems(500, seed=3, digits=3, addends=(2, 3))
    assert problems != task.make_problems(500, seed=4, digits=3, addends=(2, 3))
    assert len(set(problems)) == 500
    assert {len(problem.operands) for problem in problems} == {2, 3}
    assert {len(str(number)) for problem in problems for number in problem.operands} == {1, 2, 3}


def test_no_test_problem_is_trained_on_in_any_order():
    train, test, ood = (
        {tuple(sorted(problem.operands)) for problem in task.make_problems(count, seed=0, split=split, digits=2)}
        for split, count in (("train", 1500), ("test", 200), ("ood", 200))
    )
    assert not train & test
    assert not (train | test) & ood
    assert all(100 <= max(operands) < 1000 for operands in ood)
    assert task.held_out((385, 47)) == task.held_out((47, 385))


def test_the_training_split_is_nine_tenths():
    problems = [(a, b) for a in range(100) for b in range(a, 100)]
    assert sum(map(task.held_out, problems)) / len(problems) == pytest.approx(0.1, abs=0.01)


def test_operands_have_the_least_number_of_digits():
    numbers = [number for one in task.make_problems(200, seed=0, digits=4, least_digits=3) for number in one.operands]
    assert {len(str(number)) for number in numbers} == {3, 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 101, "digits": 1, "addends": (2,)}, "count=101: only .* different train problems"),
        ({"count": 1, "split": "valid"}, "split='valid' is unknown: use train, test or ood"),
        ({"count": 1, "digits": 0}, "digits at least 1"),
        ({"count": 1, "addends": ()}, "addends"),
        ({"count": 1, "addends": (1, 2)}, "every number of addends at least 2"),
        ({"count": -1}, "count must be at least 0"),
        ({"count": 1, "digits": 2, "least_digits": 3}, "least_digits between 1 and digits"),
    ],
)
def test_impossible_problems_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        task.make_problems(**{"seed": 0} | arguments)


# --- the demonstrator -------------------------------------------------------------------------------------------------


def test_a_dropped_carry_is_the_only_wrong_step_and_is_carried_into_the_answer():
    text = task.demonstration(TWO, random.Random(0), slip=0.0, drop=1.0)
    assert text == "7+5=12;4+8=12;0+3=3;#322"
    assert check(TWO, text) == task.Check(correct=False, answer=322, steps=[True, False, False], ends=[6, 13, 19])


def test_a_demonstrator_without_working_gives_its_answer_alone():
    assert task.demonstration(TWO, random.Random(0), slip=0.0, drop=0.0, skip=1.0) == "#432"
    assert task.demonstration(TWO, random.Random(0), slip=0.0, drop=1.0, skip=1.0) == "#322"


def test_slips_are_charged_to_their_own_steps_at_the_rate_asked_for():
    problems = task.make_problems(1000, seed=0, digits=4)
    texts = [row["completion"] for row in task.demonstration_rows(problems, seed=0, slip=0.2, drop=0.0)]
    checks = [check(problem, text) for problem, text in zip(problems, texts, strict=True)]
    steps = [step for one in checks for step in one.steps]
    assert 1 - sum(steps) / len(steps) == pytest.approx(0.2, abs=0.02)
    assert all(one.answer is not None for one in checks)
    # An answer is right exactly when every step is: slips alone never cancel.
    assert [one.correct for one in checks] == [all(one.steps) for one in checks]


def test_a_forgotten_carry_and_a_slip_can_cancel():
    problems = task.make_problems(1000, seed=0, digits=4)
    texts = [row["completion"] for row in task.demonstration_rows(problems, seed=0, slip=0.2, drop=0.3)]
    checks = [check(problem, text) for problem, text in zip(problems, texts, strict=True)]
    lucky = sum(one.correct and not all(one.steps) for one in checks)
    assert 0 < lucky < 50  # right answers behind wrong working exist, and are rare


def test_without_mistakes_a_demonstration_is_the_solution():
    problems = task.make_problems(200, seed=1)
    rows = task.demonstration_rows(problems, seed=5, slip=0.0, drop=0.0)
    assert [row["completion"] for row in rows] == [solution(problem) for problem in problems]
    assert task.demonstration_rows(problems, seed=5) == task.demonstration_rows(problems, seed=5)
    assert task.demonstration_rows(problems, seed=5) != task.demonstration_rows(problems, seed=6)


# --- checking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "correct", "answer", "steps"),
    [
        ("7+5=12;4+8+1=13;0+3+1=4;#432", True, 432, [True, True, True]),
        ("5+7=12;1+8+4=13;3+1=4;#432", True, 432, [True, True, True]),  # any order, zeros left out
        ("7+5=12;4+8+1=13;#432", True, 432, [True, True]),  # too little working
        ("#432", True, 432, []),
        ("7+5=13;4+8+1=13;0+3+1=4;#432", True, 432, [False, True, True]),  # right answer, wrong working
        ("7+5=22;4+8+2=14;0+3+1=4;#442", False, 442, [False, True, True]),  # consistent after a slip
        ("7+5=12;4+8+1=13;0+3+1=4;0+0=0;#432", True, 432, [True, True, True, False]),  # beyond the last column
        ("7+5+0+0=12;#432", True, 432, [False]),  # more terms than operands and a carry
        ("7+5=012;#432", True, 432, [False]),
        ("7+5=12;4+8+1=13;0+3+1=4;#0432", False, 432, [True, True, True]),
        ("7+5=12;4+8+1=13;0+3+1=4;#43", False, 43, [True, True, True]),  # cut
        ("7+5=12;4+8+1=1", False, None, [True, False]),
        ("7+5=12;4+8+1=13", False, None, [True, False]),  # the step did not come to its ;
        ("7+5=12;", False, None, [True]),
        ("7+5=12#432", False, 432, [False]),
        ("7+5=12;#432#", False, 432, [True]),
        ("7+5=12;#432\n", False, 432, [True]),
        ("7+5=12;;#432", False, 432, [True, False]),
        (" 7+5=12;#432", False, 432, [False]),
        ("７+５=12;#４32", False, None, [False]),  # digits of another alphabet
        ("#" + "9" * 10_000, False, int("9" * 18), []),
        ("", False, None, []),
        ("#", False, None, []),
    ],
)
def test_check(completion, correct, answer, steps):
    result = check(TWO, completion)
    assert (result.correct, result.answer, result.steps) == (correct, answer, steps)
    assert task.lab_answer(prompts=["47+385="], completions=[completion], answer=[432]) == [float(correct)]


def test_ends_are_the_last_characters_of_the_steps():
    text = "7+5=12;4+8+1=13;0+3+1=4;#432"
    assert [text[: end + 1] for end in check(TWO, text).ends] == [
        "7+5=12;",
        "7+5=12;4+8+1=13;",
        "7+5=12;4+8+1=13;0+3+1=4;",
    ]
    assert check(TWO, "7+5=12;4+8").ends == [6, 9]


def test_every_solution_checks():
    for split in ("train", "test", "ood"):
        for problem in task.make_problems(60, seed=0, split=split, digits=4, addends=(2, 3)):
            result = check(problem, solution(problem))
            assert result.correct
            assert result.answer == problem.answer
            assert result.steps == [True] * len(str(max(problem.operands)))


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_rows_carry_what_the_rewards_read():
    rows = task.rows([TWO, THREE])
    assert rows == [
        {"prompt": "47+385=", "answer": 432, "operands": [47, 385]},
        {"prompt": "47+385+6=", "answer": 438, "operands": [47, 385, 6]},
    ]
    columns = {name: [row[name] for row in rows] for name in ("answer", "operands")}
    prompts = [row["prompt"] for row in rows]
    completions = [solution(TWO), "7+5+6=18;#438"]
    given_by_keyword = {"prompts": prompts, "completions": completions, "completion_ids": [[1], [1]], **columns}
    assert task.lab_answer(**given_by_keyword) == [1.0, 1.0]
    assert task.lab_steps(**given_by_keyword) == [1.0, 1 / 3]


@pytest.mark.parametrize(
    ("completion", "share"),
    [("", 0.0), ("#432", 0.0), ("7+5=12;", 1 / 3), (solution(TWO), 1.0), (solution(TWO)[:-4] + "0+0=0;#432", 3 / 4)],
)
def test_lab_steps(completion, share):
    assert task.lab_steps(prompts=["47+385="], completions=[completion], operands=[[47, 385]]) == [share]


def test_lab_step_rewards_stand_just_after_the_steps():
    completions = ["7+5=12;4+8=12;0+3=3;#322", "", "#432", "7+5=12;4+8"]
    rewards = task.lab_step_rewards(prompts=["47+385="] * 4, completions=completions, operands=[[47, 385]] * 4)
    assert rewards == [[(7, 1.0), (14, 0.0), (20, 0.0)], [], [], [(7, 1.0), (10, 0.0)]]
    assert completions[0][:7] == "7+5=12;"


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.text(alphabet=CHARACTERS + "<\n", max_size=60)))
def test_any_text_gets_a_reward(completion):
    result = check(THREE, completion)
    assert len(result.steps) == len(result.ends)
    assert all(0 <= end < max(len(completion), 1) for end in result.ends)
    assert result.ends == sorted(result.ends)
    arguments = {"prompts": ["47+385+6="], "completions": [completion]}
    assert task.lab_answer(**arguments, answer=[438]) == [float(result.correct)]
    assert 0.0 <= task.lab_steps(**arguments, operands=[[47, 385, 6]])[0] <= 1.0
    ends = [0] + [end for end, _ in task.lab_step_rewards(**arguments, operands=[[47, 385, 6]])[0]]
    assert all(before < end <= len(completion) for before, end in itertools.pairwise(ends))


def test_a_reward_refuses_columns_of_another_length():
    with pytest.raises(ValueError, match="zip"):
        task.lab_answer(prompts=["1+1=", "1+2="], completions=["#2", "#3"], answer=[2])


# --- tokenizer --------------------------------------------------------------------------------------------------------

TOKENIZER = lab_tokenizer()


def test_the_vocabulary_is_a_multiple_of_eight_without_gaps():
    tokenizer = lab_tokenizer()
    assert len(tokenizer) == 24
    assert sorted(tokenizer.get_vocab().values()) == list(range(24))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.bos_token_id is None


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=CHARACTERS))
def test_encoding_and_decoding_are_inverse(text):
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_tokens_are_characters_and_unknown_ones_are_marked():
    tokenizer = lab_tokenizer()
    assert tokenizer("47+385=")["input_ids"] == [7, 10, 13, 6, 11, 8, 15]
    assert tokenizer("4x\n5")["input_ids"] == [7, 2, 2, 8]
    assert tokenizer("#432<eos>")["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode([17, 7, 6, 5, 1], skip_special_tokens=True) == "#432"
    assert tokenizer.decode([7, 19]) == "4<r0>"
    assert 19 not in tokenizer("<r0>")["input_ids"]
    padded = tokenizer(["1+1=", "47+385="], padding=True)
    assert padded["input_ids"][0][:3] == [0, 0, 0]


def test_a_saved_tokenizer_loads_with_the_same_ids(tmp_path):
    tokenizer = lab_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = CHARACTERS + "x" + solution(TWO) + "<eos>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(tokenizer(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)
    assert loaded.padding_side == "left"
    assert loaded(["1=", "11="], padding=True)["input_ids"][0] == [0, 4, 15]


# --- figure -----------------------------------------------------------------------------------------------------------


def _metrics(step):
    return {"time": 2.0 * step, "reward": 0.1 * step, "eval/test/pass@1": 0.5, "entropy": float("nan")}


def test_curves_writes_a_png(tmp_path):
    runs = {"GRPO": [_metrics(step) for step in range(8)], "supervised": [{"time": 1.0e9}]}
    path = figure.curves(tmp_path / "curves.png", runs, title="a run")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_curves_refuses_rows_without_a_time_and_too_many_runs(tmp_path):
    with pytest.raises(KeyError, match="row 1 of 'GRPO' has no 'time'"):
        figure.curves(tmp_path / "a.png", {"GRPO": [_metrics(0), {"reward": 1.0}]})
    with pytest.raises(ValueError, match="series holds 0 runs"):
        figure.curves(tmp_path / "a.png", {})
    assert list(tmp_path.iterdir()) == []


def test_curves_names_the_extra_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"jaxrl-lm\[plot\]"):
        figure.curves(tmp_path / "a.png", {"GRPO": [_metrics(0)]})
