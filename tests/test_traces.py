"""Traces that a verifier accepts: the rules on given completions, hints, and whole calls against generation itself."""

import dataclasses
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import tiny_run

from jaxrl_lm import label_steps, search
from jaxrl_lm.completions import Completer, with_options_of_run
from jaxrl_lm.config import GenerateConfig, GRPOConfig
from jaxrl_lm.encode import encode_completions
from jaxrl_lm.inference import run_generate
from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.label_steps import run_label_steps
from jaxrl_lm.options import to_toml
from jaxrl_lm.search import run_search
from jaxrl_lm.tools_config import LabelStepsConfig, MakeTracesConfig, SearchConfig
from jaxrl_lm.traces import REASONS, Candidate, hinted_prompt, keep, run_make_traces, traces_message, written_rows

pytestmark = pytest.mark.usefixtures("cached")

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SEEN = []  # prompts that the verifier was called with


def has_pair(*, prompts, completions, answer, **_):
    """The share of the digit pairs wanted; an answer of 9 is judged by nobody."""
    SEEN.extend(prompts)
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [
        None if total == 9 else min(1.0, len(re.findall("[0-9]{2}", text)) / 2)
        for text, total in zip(texts, answer, strict=True)
    ]


def never(*, completions, **_):
    return [0.0] * len(completions)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny", num_layers=1)


def config(model="m", dataset="d", output="o", **changes):
    options = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 8, "mesh": MESH}
    options |= {"reward": ("test_traces:has_pair",)}
    return MakeTracesConfig(model=model, dataset=dataset, output=str(output), **options | changes)


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# --- the rule ---------------------------------------------------------------------------------------------------------

TABLE = [
    Candidate("#1", 3, 0.5, False),  # kept: from min_reward up
    Candidate("#2", 3, 0.49, False),
    Candidate(" #1 ", 4, 0.9, False),  # the first again, white space aside
    Candidate("#3", 8, 1.0, True),
    Candidate("#4", 1, 1.0, False),
    Candidate("#5", 7, 1.0, False),
    Candidate("5#", 3, 1.0, False),
    Candidate("#6", 3, math.nan, False),
    Candidate("#7", 3, 0.9, False),  # kept
    Candidate("#8", 6, 0.9, False),  # kept
]
RULES = {"min_completion_tokens": 2, "max_completion_tokens": 6, "format": "\\s*#[0-9]\\s*"}
LEFT_OUT = {"rejected": 1, "duplicates": 1, "truncated": 1, "too_short": 1, "too_long": 1, "format": 1, "unjudged": 1}


@pytest.mark.parametrize(
    ("changes", "kept", "counts"),
    [
        (RULES, [0, 8, 9], LEFT_OUT),
        (RULES | {"keep_per_prompt": 2}, [8, 9], LEFT_OUT | {"beyond_keep_per_prompt": 1}),
        (RULES | {"keep_per_prompt": 5}, [8, 9, 0], LEFT_OUT),
        (RULES | {"deduplicate": False, "keep_per_prompt": 3}, [2, 8, 9], None),
        ({"drop_truncated": False}, [0, 3, 4, 5, 6, 8, 9], {"rejected": 1, "duplicates": 1, "unjudged": 1}),
        ({"min_reward": 1.0}, [4, 5, 6], None),
        ({"min_reward": -1.0}, [0, 1, 4, 5, 6, 8, 9], {"duplicates": 1, "truncated": 1, "unjudged": 1}),
    ],
    ids=str,
)
def test_what_is_kept_by_hand(changes, kept, counts):
    found, left_out = keep(TABLE, config(**changes))
    assert found == kept
    assert len(kept) + sum(left_out.values()) == len(TABLE)  # each completion once
    assert set(left_out) <= set(REASONS)
    if counts is not None:
        assert +left_out == Counter(counts)


def test_the_first_rule_that_fails_counts():
    bad = Candidate("", 0, math.nan, True)
    order = [("truncated", {}), ("too_short", {"drop_truncated": False})]
    order += [("format", {"drop_truncated": False, "min_completion_tokens": 0})]
    for reason, changes in order:
        assert keep([bad], config(format="x", **changes))[1] == {reason: 1}


def test_what_is_written_by_hand():
    """Of the rows 0 (0.5), 1 (0.49), 8 (0.9) and 9 (0.9): all with labels, or the first best against the worst."""
    rules = {name: RULES[name] for name in RULES}
    row = {"prompt": "1+2=", "answer": 3}
    kept = lambda write: keep(TABLE, config(write=write, **rules))[0]
    assert kept("pairs") == kept("outcomes") == [0, 1, 8, 9]
    marks = {"row": 5, "hinted": False}
    labelled = written_rows(row, TABLE, kept("outcomes"), 5, False, config(write="outcomes"))
    assert labelled == [
        {**row, "completion": TABLE[n].text, "label": TABLE[n].value >= 0.5, "score": TABLE[n].value, **marks}
        for n in (0, 1, 8, 9)
    ]
    (pair,) = written_rows(row, TABLE, kept("pairs"), 5, False, config(write="pairs"))
    assert pair == {**row, "chosen": "#7", "rejected": "#2", "score_gap": pytest.approx(0.41), **marks}
    assert written_rows(row, TABLE, [8, 9], 5, False, config(write="pairs")) == []
    assert written_rows(row, TABLE, [], 5, False, config(write="pairs")) == []
    chat = {"prompt": [{"role": "user", "content": "1+2="}]}
    (pair,) = written_rows(chat, TABLE, [1, 9], 5, False, config(write="pairs"))
    assert pair["rejected"] == [{"role": "assistant", "content": "#2"}]


# --- hints ------------------------------------------------------------------------------------------------------------


def test_hints_fill_in_columns_and_leave_other_braces():
    row = {"prompt": "1+{answer}=", "answer": 3, "note": None}
    template = "{prompt} \\boxed{} {1} ({answer})"
    assert hinted_prompt(row, template, "row 0") == "1+{answer}= \\boxed{} {1} (3)"  # values are not read again
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+2="}]
    continued = [*messages, {"role": "assistant", "content": "#"}]
    hinted = hinted_prompt({"prompt": continued, "answer": 3}, "{prompt}({answer})", "row 0")
    assert hinted == [messages[0], {"role": "user", "content": "1+2=(3)"}, continued[2]]
    assert messages[1]["content"] == "1+2="
    with pytest.raises(ValueError, match=r"row 0: hint_template asks for \{answr\}.*did you mean \{answer\}\?"):
        hinted_prompt(row, "{prompt}{answr}", "row 0")
    with pytest.raises(ValueError, match=r"asks for \{note\}"):
        hinted_prompt(row, "{prompt}{note}", "row 0")
    with pytest.raises(ValueError, match="needs a user message"):
        hinted_prompt({"prompt": messages[:1]}, "{prompt}", "row 0")


# --- whole calls ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Seven problems, one of them with an answer that is not judged, and a column that goes along."""
    rows = [row | {"name": f"n{i}"} for i, row in enumerate(tiny_run.problems("train", 7))]
    rows[2]["answer"] = 9
    return tiny_run.write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def expected(rows, generated):
    """The traces by a loop over what `generate` sampled."""
    found = []
    for place, (row, made) in enumerate(zip(rows, generated, strict=True)):
        seen = set()
        for text, ids in zip(made["completions"], made["completion_ids"], strict=True):
            score = has_pair(prompts=[row["prompt"]], completions=[text], answer=[row["answer"]])[0]
            ended = ids[-1] == 1 or "9" in text or "7" in text  # 1: eos
            if not ended or score is None or score < 0.5 or text.strip() in seen:
                continue
            seen.add(text.strip())
            found.append({**row, "completion": text, "score": score, "row": place, "hinted": False})
    return found


def test_traces_are_the_accepted_completions_of_generate(model, dataset, tmp_path):
    """One batch of it: the keys of a batch are those of `generate`."""
    options = {"num_generations": 32, "limit": 4, "seed": 3, "temperature": 2.0, "stop": ("9", "7")}
    summary = run_make_traces(config(model, dataset, tmp_path / "new" / "traces.jsonl", **options))
    shape = {"prompts_per_step": 4, "max_completion_length": 8, "mesh": MESH}
    generated = run_generate(GenerateConfig(model=model, dataset=dataset, **shape | options))
    wanted = expected(lines(dataset)[:4], generated)
    traces = lines(tmp_path / "new" / "traces.jsonl")
    assert traces == wanted
    assert len(wanted) > 5
    assert {trace["row"] for trace in wanted} <= {0, 1, 3}
    assert summary["sampled"] == 128 == summary["accepted"] + sum(summary[name] for name in REASONS)
    assert summary["tokens"] == sum(len(ids) for row in generated for ids in row["completion_ids"])
    assert (summary["rows"], summary["prompts"], summary["accepted"]) == (4, 4, len(wanted))
    assert summary["prompts_without"] == 4 - len({trace["row"] for trace in wanted})
    assert all(summary[name] > 0 for name in ("truncated", "rejected", "unjudged"))
    assert json.loads((tmp_path / "new" / "traces.jsonl.summary.json").read_text()) == summary
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["traces.jsonl", "traces.jsonl.summary.json"]
    assert f"{len(wanted)} of 128 completions of 4 prompts kept" in traces_message(summary)
    encoded = encode_completions(traces, lab_tokenizer(), max_length=64, eos_token_id=1, name="sft")
    kept = {tuple(ids) for row in generated for ids in row["completion_ids"]}
    # sft trains on the tokens that were sampled, and an eos where a stop string had ended them. Special tokens in the
    # middle are not in the text, and reserved entries are not tokenised as themselves.
    plain = [tuple(ids) for row, (_, ids) in zip(traces, encoded.pairs, strict=True) if "<" not in row["completion"]]
    found = [ids for ids in plain if ids in kept or ids[:-1] in kept]
    assert len(found) > len(plain) / 2


def test_prompts_without_a_trace_are_tried_again_with_a_hint_and_keep_their_prompt(
    model, dataset, tmp_path, monkeypatch
):
    asked = []
    draw = Completer.draw

    def recorded(self, sampler, prompts, indices, *, number):
        for batch, sampled in draw(self, sampler, prompts, indices, number=number):
            asked.extend(
                (number, prompts.ids[index], sampled.texts[4 * n : 4 * n + 4]) for n, index in enumerate(batch)
            )
            yield batch, sampled

    monkeypatch.setattr(Completer, "draw", recorded)
    SEEN.clear()
    hint = {"hint_template": "{answer}#{prompt}", "drop_truncated": False, "min_reward": 1.0}
    summary = run_make_traces(config(model, dataset, tmp_path / "traces.jsonl", seed=3, temperature=1.5, **hint))
    rows, traces, tokenizer = lines(dataset), lines(tmp_path / "traces.jsonl"), lab_tokenizer()
    first, second = ([one for one in asked if one[0] == number] for number in (0, 1))
    assert [ids for _, ids, _ in first] == [tokenizer(row["prompt"])["input_ids"] for row in rows]
    solved = {trace["row"] for trace in traces if not trace["hinted"]}
    again = [place for place in range(7) if place not in solved]
    assert 2 in again
    assert 1 < len(again) < 7
    assert [ids for _, ids, _ in second] == [
        tokenizer(f"{rows[place]['answer']}#{rows[place]['prompt']}")["input_ids"] for place in again
    ]
    hinted = [trace for trace in traces if trace["hinted"]]
    assert len(hinted) > 0
    for trace in hinted:
        assert trace["completion"] in second[again.index(trace["row"])][2]
    for trace in traces:
        assert {name: trace[name] for name in rows[0]} == rows[trace["row"]]  # the original prompt, every column
    assert set(SEEN) == {row["prompt"] for row in rows}  # the verifier saw no hint
    assert summary["hinted_prompts"] == len(again)
    assert summary["hinted_accepted"] == len(hinted)
    assert summary["sampled"] == 4 * (7 + len(again))
    assert summary["prompts_without"] == 7 - len({trace["row"] for trace in traces})
    assert "second tries with a hint" in traces_message(summary)


def test_the_same_seed_gives_the_same_file_and_another_one_another(model, dataset, tmp_path):
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 5)):
        run_make_traces(config(model, dataset, tmp_path / name, seed=seed, drop_truncated=False))
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1] != texts[2]
    blocks = [{trace["completion"] for trace in lines(tmp_path / "a") if trace["row"] // 4 == n} for n in (0, 1)]
    assert all(blocks)
    assert blocks[0] != blocks[1]  # the second batch has keys of its own


def test_chats_get_a_message(tmp_path):
    model = tiny_run.save_model(tmp_path / "chat", chat_template=CHAT, num_layers=1)
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": n + 1} for n in range(4)]
    dataset = tiny_run.write_rows(tmp_path / "rows.jsonl", rows)
    run_make_traces(config(model, dataset, tmp_path / "out", drop_truncated=False, seed=1))
    traces = lines(tmp_path / "out")
    tokenizer = lab_tokenizer()
    tokenizer.chat_template = CHAT
    assert all(trace["prompt"] == rows[trace["row"]]["prompt"] for trace in traces)
    assert [trace["completion"][0]["role"] for trace in traces] == ["assistant"] * len(traces)
    assert len(encode_completions(traces, tokenizer, max_length=64, eos_token_id=1, name="sft").pairs) == len(traces)


def test_a_run_is_sampled_as_it_was_trained(tmp_path):
    """Its template, limits and stop strings, where the options here are left at their defaults; nothing else of it."""
    options = {"model": "m", "dataset": "d", "output_dir": "o", "prompt_template": "Q{prompt}", "stop": ("#",)}
    run = GRPOConfig(**options, max_completion_length=99, temperature=0.5, num_generations=64, seed=7)
    (tmp_path / "config.toml").write_text(to_toml(run))
    found = with_options_of_run(MakeTracesConfig(model=str(tmp_path), dataset="x", output="y", temperature=0.9))
    assert (found.prompt_template, found.stop, found.max_completion_length) == ("Q{prompt}", ("#",), 99)
    assert (found.temperature, found.num_generations, found.seed, found.dataset) == (0.9, 8, 0, "x")


OF_THE_RUN = {"min_new_tokens": 2, "forced_tokens": (5,), "max_thinking_tokens": 3, "end_of_thinking": "#"}
OF_THE_RUN |= {"vocabulary_mask": "a:b", "top_k": 4}


@pytest.mark.parametrize("command", ["label-steps", "search"])
def test_what_goes_on_from_prefixes_leaves_a_runs_rules_of_whole_completions_out(command, tmp_path, capsys):
    """The run's model is not there, so that the command ends once its options are known."""
    run = GRPOConfig(model="/nowhere", dataset="d", output_dir="o", **OF_THE_RUN)
    (tmp_path / "config.toml").write_text(to_toml(run))
    rows = tiny_run.write_rows(tmp_path / "rows.jsonl", tiny_run.problems("train", 1))
    own = {"model": str(tmp_path), "dataset": rows, "reward": ("arithmetic",), "mesh": {"data": 1}}
    if command == "search":
        made = SearchConfig(**own, scorer="arithmetic", methods=("best_of_n", "beam"))
        call, check = run_search, search.check_options
    else:
        made = LabelStepsConfig(**own, output=str(tmp_path / "out.jsonl"))
        call, check = run_label_steps, label_steps.check_options
    with pytest.raises((OSError, ValueError)) as failed:
        call(made)
    assert "from prefixes" not in str(failed.value)
    found = with_options_of_run(made, from_prefixes=True)
    check(found)
    assert (found.min_new_tokens, found.forced_tokens, found.vocabulary_mask, found.top_k) == (0, (), None, 4)
    said = capsys.readouterr().err.splitlines()
    note = f"not from {tmp_path}: min_new_tokens=2, forced_tokens=(5,), end_of_thinking='#', max_thinking_tokens=3, "
    assert (
        note + "vocabulary_mask='a:b': counted from the first token of a completion, and this goes on from prefixes"
        in said
    )
    whole = with_options_of_run(made)
    assert {name: getattr(whole, name) for name in OF_THE_RUN} == OF_THE_RUN
    with pytest.raises(ValueError, match="counts from the first token"):
        check(dataclasses.replace(made, min_new_tokens=2))


def test_speculation_of_a_run_is_turned_off_by_a_number_alone(tmp_path):
    run = GRPOConfig(model="m", dataset="d", output_dir="o", num_speculative_tokens=3, speculative_source="last_epoch")
    (tmp_path / "config.toml").write_text(to_toml(run))
    made = MakeTracesConfig(model=str(tmp_path), dataset="x", output="y")
    found = with_options_of_run(made)
    assert (found.num_speculative_tokens, found.speculative_source) == (3, "last_epoch")
    found = with_options_of_run(dataclasses.replace(made, num_speculative_tokens=0))
    assert (found.num_speculative_tokens, found.speculative_source) == (0, "prompt_lookup")


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "("}, r"format='\(' is not a regular expression"),
        ({"keep_per_prompt": 0}, "keep_per_prompt=0: must be at least 1"),
        ({"min_completion_tokens": 9}, "min_completion_tokens=9 and at most 8 tokens: no completion is kept"),
        ({"hint_template": "{answer}"}, r"hint_template='\{answer\}': it must hold \{prompt\}"),
        ({"reward": ()}, "reward: no reward function is given"),
        ({"reward_weights": (0.0,)}, "every weight is 0"),
        ({"limit": 0}, "limit=0: must be at least 1"),
        ({"dataset": "missing.jsonl"}, "dataset: there is no file"),
        ({"hint_template": "{prompt}{nam}"}, r"dataset: row 0: hint_template asks for \{nam\}.*did you mean \{name\}"),
        ({"prompt_buckets": (2,)}, "none holds a prompt"),
    ],
    ids=str,
)
def test_mistakes_are_named_and_nothing_is_written(changes, message, model, dataset, tmp_path):
    options = {"model": model, "dataset": dataset, "output": tmp_path / "out.jsonl"}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_make_traces(config(**options | changes))
    assert not (tmp_path / "out.jsonl").exists()


def test_no_accepted_completion_is_an_error_with_the_counts(model, dataset, tmp_path):
    with pytest.raises(ValueError, match="write='pairs' keeps right and wrong completions alike"):
        run_make_traces(config(model, dataset, tmp_path / "out.jsonl", write="pairs", keep_per_prompt=2))
    with pytest.raises(ValueError, match="no prompt has completions of different verdicts"):
        run_make_traces(config(model, dataset, tmp_path / "out.jsonl", write="pairs", reward=("test_traces:never",)))
    with pytest.raises(ValueError, match=r"no completion was accepted.*0 of 28 completions.*rejected\); 7 prompts"):
        run_make_traces(
            config(model, dataset, tmp_path / "out.jsonl", reward=("test_traces:never",), drop_truncated=False)
        )
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.summary.json"]
    (tmp_path / "dir").mkdir()
    with pytest.raises(ValueError, match="is a directory: give a file"):
        run_make_traces(config(model, dataset, tmp_path / "dir"))
