"""Labels of steps: where steps end, and labels against the verifier on the continuations that were sampled."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm.completions import Completer
from jaxrl_lm.lab.task import make_problems, solution
from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.label_steps import (
    given_prefixes,
    labels_message,
    labels_of,
    run_label_steps,
    sampled_prefixes,
    split_steps,
)
from jaxrl_lm.tools_config import LabelStepsConfig

pytestmark = pytest.mark.usefixtures("cached")

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
SAMPLED = {"num_generations": 8, "step_separator": "+", "max_completion_length": 10, "prompt_buckets": (16,)}


def even(*, prompts, completions, completion_ids, answer, **columns):
    """1 where prompt and completion have an even number of characters that are digits above 4, times what row 0 wants."""
    assert "completions" not in columns
    whole = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
    values = [float(sum(c in "56789" for c in text) % 2 == 0) for text in whole]
    return [None if total == 0 else value for total, value in zip(answer, values, strict=True)]


def large(*, completions, **_):
    return [2.0] * len(completions)


def verify(prompt, text):
    return even(prompts=[prompt], completions=[text], completion_ids=[[]], answer=[1])[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny", num_layers=1)


@pytest.fixture
def drawn(monkeypatch):
    """Every (number of the draw, prompt ids, its texts, ids, truncated) that is sampled."""
    found = []
    draw = Completer.draw

    def recorded(self, sampler, prompts, indices, *, number):
        for batch, sampled in draw(self, sampler, prompts, indices, number=number):
            group = sampled.count // len(batch)
            for place, index in enumerate(batch):
                mine = slice(place * group, (place + 1) * group)
                kept = (sampled.texts[mine], sampled.completion_ids[mine], sampled.truncated[mine].tolist())
                found.append((number, prompts.ids[index], *kept))
            yield batch, sampled

    monkeypatch.setattr(Completer, "draw", recorded)
    return found


def config(model="m", dataset="d", output="o", **changes):
    options = {"prompts_per_step": 4, "max_completion_length": 8, "mesh": MESH, "step_separator": ";"}
    options |= {"reward": ("test_label_steps:even",), "rollouts": 4, "temperature": 2.0}
    return LabelStepsConfig(model=model, dataset=dataset, output=str(output), **options | changes)


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# --- steps ------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.text("ab; ", max_size=12), st.sampled_from([";", ";;", ";a", "; "]))
def test_steps_joined_by_the_separator_are_the_completion(text, separator):
    steps = split_steps(text, separator)
    joined = separator.join(steps)
    assert text.startswith(joined)
    assert not text[len(joined) :].replace(separator, "").strip()
    assert all(step.replace(separator, "").strip() for step in steps)


def test_steps_by_hand():
    assert split_steps("a;b;#3", ";") == ["a", "b", "#3"]
    assert split_steps("a;b;", ";") == ["a", "b"]
    assert split_steps("a\n\nb\n\n\n", "\n") == ["a\n", "b\n\n"]  # empty lines belong to the step before them
    assert split_steps("\n\na\n", "\n") == ["\n\na"]
    assert split_steps("a\n\nb", "\n\n") == ["a", "b"]
    assert split_steps("a\n \nb\n ", "\n") == ["a\n ", "b"]  # blanks make no step
    assert split_steps(";;", ";") == split_steps("", ";") == []
    with pytest.raises(ValueError, match="step_separator=''"):
        split_steps("a", "")


def test_sampled_prefixes_are_the_fewest_tokens_that_hold_the_steps():
    pieces = ["1+1", "=2;", "3", "+1=4;5", "", "+0", ";", ";", "#5"]
    decode = lambda ids: "".join(pieces[i] for i in ids)
    steps = split_steps(decode(range(9)), ";")
    assert steps == ["1+1=2", "3+1=4", "5+0;", "#5"]
    prefixes = sampled_prefixes(steps, ";", list(range(9)), decode)
    assert [prefix.ids for prefix in prefixes] == [(0, 1), (0, 1, 2, 3), tuple(range(8))]
    assert [prefix.text for prefix in prefixes] == ["1+1=2;", "1+1=2;3+1=4;5", "1+1=2;3+1=4;5+0;;"]
    assert sampled_prefixes(["all"], ";", [0], decode) == []


def test_given_prefixes_are_steps_tokenised_one_by_one():
    calls = []
    prefixes = given_prefixes(["a", "bc", "d"], ";", lambda text: calls.append(text) or [len(text), 0])
    assert calls == ["a", ";", "bc", ";"]
    assert prefixes == [("a;", (1, 0, 1, 0)), ("a;bc;", (1, 0, 1, 0, 2, 0, 1, 0))]


def test_labels_leave_out_what_was_not_judged():
    values = np.array([[1, 0, math.nan, 0], [math.nan] * 4, [0, 0, 0, 0], [0.5, math.nan, math.nan, math.nan]])
    np.testing.assert_allclose(labels_of(values, kind="soft", beta=None), [1 / 3, math.nan, 0, 0.5], atol=1e-6)
    np.testing.assert_array_equal(labels_of(values, kind="hard", beta=None), [1, math.nan, 0, 1])
    expected = 0.5 * math.log((math.exp(2) + 2) / 3)
    np.testing.assert_allclose(labels_of(values, kind="log-mean-exp", beta=0.5)[0], expected, atol=1e-6)


# --- rows that bring their completions --------------------------------------------------------------------------------


def given_rows():
    """Lab solutions as text, as steps, one step alone, and one that nobody judges."""
    rows = []
    for index, problem in enumerate(make_problems(5, seed=4, digits=3)):
        text = solution(problem)
        steps = text.split(";")
        brings = [{"completion": text}, {"completions": steps}, {"completion": steps[-1]}][index % 3]
        rows.append({"prompt": f"{problem.operands[0]}+{problem.operands[1]}=", "answer": 1, "note": index, **brings})
    rows[4]["answer"] = 0
    return rows


def steps_of(row):
    return row.get("completions") or row["completion"].split(";")


@pytest.mark.parametrize(("label", "beta"), [("soft", None), ("hard", None), ("log-mean-exp", 0.3)])
def test_labels_are_those_of_the_sampled_continuations(label, beta, model, tmp_path, drawn):
    rows, tokenizer = given_rows(), lab_tokenizer()
    dataset = tiny_run.write_rows(tmp_path / "rows.jsonl", rows)
    summary = run_label_steps(config(model, dataset, tmp_path / "out", label=label, label_beta=beta))
    found = lines(tmp_path / "out")
    assert [row["row"] for row in found] == [0, 1, 2, 3]
    rolled = {tuple(ids): texts for _, ids, texts, _, _ in drawn}
    means = []
    for row in found:
        source, steps = rows[row["row"]], steps_of(rows[row["row"]])
        assert row["completions"] == steps
        assert (row["prompt"], row["note"]) == (source["prompt"], source["note"])
        assert "completion" not in row
        outcome = verify(source["prompt"], ";".join(steps))
        assert row["outcome"] == outcome
        for number, (got, value) in enumerate(zip(row["labels"], row["values"], strict=True)):
            prefix = "".join(step + ";" for step in steps[: number + 1])
            if number == len(steps) - 1:
                outcomes = [outcome]  # the whole completion: nothing is sampled
            else:
                texts = rolled[tuple(tokenizer(source["prompt"] + prefix)["input_ids"])]
                outcomes = [verify(source["prompt"], prefix + text) for text in texts]
                assert len(outcomes) == 4
                means.append(np.mean(outcomes))
            wanted = {"soft": np.mean(outcomes), "hard": max(outcomes)}
            if beta is not None:
                wanted["log-mean-exp"] = beta * math.log(np.mean(np.exp(np.divide(outcomes, beta))))
            assert got == pytest.approx(wanted[label], abs=1e-6)
            assert value == pytest.approx(np.mean(outcomes), abs=1e-6)
    assert len(set(means)) > 1
    assert {number for number, *_ in drawn} == {1}  # nothing but rollouts
    assert len(drawn) == summary["prefixes"] == sum(len(steps_of(row)) - 1 for row in rows)
    assert summary["tokens"] == sum(len(ids) for _, _, _, group, _ in drawn for ids in group)
    assert summary["prefix_tokens"] == sum(len(ids) for _, ids, _, _, _ in drawn)
    assert (summary["rows"], summary["completions"], summary["unjudged"]) == (4, 5, 1)
    assert summary["steps"] == sum(len(row["labels"]) for row in found)
    assert summary["label_mean"] == pytest.approx(np.mean([label for row in found for label in row["labels"]]))
    assert json.loads((tmp_path / "out.summary.json").read_text()) == summary
    assert f"4 rows with {summary['steps']} labelled steps" in labels_message(summary)


def test_only_the_first_steps_are_labelled_and_the_last_of_them_is_completed_too(model, tmp_path, drawn):
    rows = given_rows()
    dataset = tiny_run.write_rows(tmp_path / "rows.jsonl", rows)
    buckets = (16,)  # hold the prompts and not every prefix
    summary = run_label_steps(config(model, dataset, tmp_path / "out", max_steps_per_row=2, prompt_buckets=buckets))
    found = lines(tmp_path / "out")
    rolled = {tuple(ids): texts for _, ids, texts, _, _ in drawn}
    long = [row for row in found if len(steps_of(rows[row["row"]])) > 2]
    assert summary["cut"] == sum(len(steps_of(row)) > 2 for row in rows) > 0
    assert max(len(ids) for ids in rolled) > 16
    for row in long:
        source, steps = rows[row["row"]], steps_of(rows[row["row"]])
        assert row["completions"] == steps[:2]
        assert row["outcome"] == verify(source["prompt"], ";".join(steps))  # of the whole completion
        prefix = ";".join(steps[:2]) + ";"
        texts = rolled[tuple(lab_tokenizer()(source["prompt"] + prefix)["input_ids"])]
        assert row["labels"][1] == np.mean([verify(source["prompt"], prefix + text) for text in texts])


# --- rows that bring none ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts_only(tmp_path_factory):
    rows = [{**row, "answer": 1} for row in tiny_run.problems("train", 5)]
    return tiny_run.write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def test_completions_are_sampled_where_a_row_has_none(model, prompts_only, tmp_path, drawn):
    """The separator is a character that the tiny model likes; its ended completions and the others differ at the end."""
    summary = run_label_steps(config(model, prompts_only, tmp_path / "out", **SAMPLED))
    rows, found = lines(prompts_only), lines(tmp_path / "out")
    first = [one for one in drawn if one[0] == 0]
    rolled = {tuple(ids): texts for number, ids, texts, _, _ in drawn if number == 1}
    assert [len(texts) for _, _, texts, _, _ in first] == [8] * 5
    completions = [(place, *one) for place, (_, _, *group) in enumerate(first) for one in zip(*group, strict=True)]
    completions = [one for one in completions if one[1].replace("+", "").strip()]
    assert summary["without_steps"] == 40 - len(completions)
    assert len(found) == len(completions)
    kinds = set()
    for row, (place, text, ids, truncated) in zip(found, completions, strict=True):
        prompt = rows[place]["prompt"]
        assert (row["row"], row["prompt"], row["outcome"]) == (place, prompt, verify(prompt, text))
        assert row["completions"] == split_steps(text, "+")
        begun = 0
        for number, (step, label) in enumerate(zip(row["completions"], row["labels"], strict=True)):
            begun += len(step) + 1
            whole = number == len(row["completions"]) - 1
            kinds.add((whole, truncated))
            if whole and not truncated:
                assert label == row["outcome"]
                continue
            prefix = text if whole else text[:begun]
            count = len(ids) if whole else next(n for n in range(len(ids)) if visible(ids[:n]) == prefix)
            kept = ids[:count]
            texts = rolled[(*lab_tokenizer()(prompt)["input_ids"], *kept)]
            assert label == np.mean([verify(prompt, prefix + more) for more in texts])
    assert len(kinds) == 4
    assert summary["prefixes"] == len(rolled) == len([one for one in drawn if one[0] == 1])  # equal ones once
    assert summary["tokens"] == sum(len(ids) for _, _, _, group, _ in drawn for ids in group)


def visible(ids):
    return lab_tokenizer().decode(ids, skip_special_tokens=True)


def test_the_same_seed_gives_the_same_file(model, prompts_only, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_label_steps(config(model, prompts_only, tmp_path / name, seed=seed, **SAMPLED))
    texts = [(tmp_path / name).read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollouts": 0}, "rollouts=0: must be at least 1"),
        ({"max_steps_per_row": 0}, "max_steps_per_row=0"),
        ({"step_separator": ""}, "step_separator=''"),
        ({"label": "log-mean-exp"}, "needs a beta above 0"),
        ({"label_beta": 0.5}, "beta=0.5"),
        ({"reward": ("test_label_steps:large",)}, r"an outcome of 2.0 cannot be a label.*\[0, 1\]"),
        ({"dataset": [{"prompt": "1=", "completions": []}]}, "dataset: row 0: 'completions' must be a list of steps"),
        ({"dataset": [{"prompt": "1=", "completions": ["1", ""]}]}, "each a text that is not empty"),
        ({"dataset": [{"prompt": "1=", "completion": ";"}]}, "dataset: row 0: 'completion' holds no step"),
        ({"dataset": [{"prompt": "1=", "completion": 3}]}, "must be a string or one assistant message"),
        ({"dataset": [{"prompt": "1=", "completion": "1<eos>;2"}]}, "row 0: a step holds an end-of-sequence token"),
        ({"dataset": [{"prompt": "1=", "completion": "1", "answer": 0}]}, "no completion has labels"),
    ],
    ids=str,
)
def test_mistakes_are_named_and_nothing_is_written(changes, message, model, prompts_only, tmp_path):
    changes = {"dataset": prompts_only} | changes
    if isinstance(changes["dataset"], list):
        rows = [{"answer": 1} | row for row in changes["dataset"]]
        changes["dataset"] = tiny_run.write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        run_label_steps(config(model, output=tmp_path / "out.jsonl", **changes))
    assert not (tmp_path / "out.jsonl").exists()
