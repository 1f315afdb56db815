"""Datasets: every source, every error with its place, the order of rows, encoding with one BOS, padding."""

import json
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_lm import data
from jaxrl_lm.encode import PROMPT_TEMPLATES, encode_completions, encode_prompts

ROWS = [{"prompt": "a b", "answer": 1}, {"prompt": "b", "answer": 2}]
SPECIALS = ["<s>", "</s>", "<end>", "<unk>"]
WORDS = [*SPECIALS, "user", "assistant", "system", ":", "a", "b", "c"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} : {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def make_tokenizer(rule: str = "<s> $A", template: str | None = None) -> PreTrainedTokenizerFast:
    """A word-level tokenizer that adds special tokens by `rule`."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(SPECIALS)
    inner.post_processor = processors.TemplateProcessing(single=rule, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def encode(rows, tokenizer=None, **options):
    options = {"max_prompt_length": 20, "name": "dataset", **options}
    return encode_prompts(rows, tokenizer or make_tokenizer(), **options)


# --- reading --------------------------------------------------------------------------------------------------------


def write(path, rows=None, text=None):
    """A file of the kind its name says."""
    if text is not None:
        path.write_text(text, encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_files_give_their_rows_in_order(tmp_path, suffix):
    path = write(tmp_path / f"rows.{suffix}", ROWS)
    assert data.read_rows(str(path), name="dataset") == ROWS
    assert data.read_rows(path, name="dataset") == ROWS


def test_csv_values_are_text_and_may_hold_line_breaks(tmp_path):
    path = write(tmp_path / "rows.csv", text='\ufeffprompt,answer\n"a\nb",1\n"say ""hi""",2\n')
    assert data.read_rows(path, name="dataset") == [
        {"prompt": "a\nb", "answer": "1"},
        {"prompt": 'say "hi"', "answer": "2"},
    ]


def test_jsonl_passes_over_blank_lines_and_a_byte_order_mark(tmp_path):
    path = write(tmp_path / "rows.jsonl", text='\ufeff{"prompt": "é"}\n\n{"prompt": "b"}\n  \n')
    assert data.read_rows(path, name="dataset") == [{"prompt": "é"}, {"prompt": "b"}]


def test_a_directory_is_read_in_the_order_of_names(tmp_path):
    write(tmp_path / "b.jsonl", ROWS[1:])
    write(tmp_path / "a.jsonl", ROWS[:1])
    write(tmp_path / "README.md", text="about")
    (tmp_path / ".hidden.json").write_text("not read")
    assert data.read_rows(tmp_path, name="dataset") == ROWS


def test_rows_of_different_columns_get_all_of_them():
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "task": "x"}]
    assert data.read_rows(rows, name="dataset") == [
        {"prompt": "a", "answer": 1, "task": None},
        {"prompt": "b", "answer": None, "task": "x"},
    ]
    with pytest.raises(ValueError, match=r"row 1 has no 'answer'; its columns are \['prompt', 'task'\]"):
        data.validate(data.read_rows(rows, name="dataset"), ("answer",), name="dataset")


def make_rows(count=2, word="a"):
    return [{"prompt": word} for _ in range(count)]


def test_callables_and_lists():
    assert data.read_rows(make_rows, name="dataset") == make_rows()
    assert data.read_rows(iter(ROWS), name="dataset") == ROWS
    source = list(ROWS)
    assert data.read_rows(source, name="dataset")[0] is not source[0]  # the caller's rows are not shared


def test_functions_by_name_take_arguments(tmp_path, monkeypatch):
    (tmp_path / "task_of_this_test.py").write_text(
        "def rows(count=1, word='x'):\n    return [{'prompt': word}] * count\n"
    )
    assert data.read_rows(f"{tmp_path}/task_of_this_test.py:rows", name="dataset") == [{"prompt": "x"}]
    monkeypatch.syspath_prepend(str(tmp_path))
    got = data.read_rows("task_of_this_test:rows?count=2&word=a b", name="dataset")
    assert got == [{"prompt": "a b"}] * 2


def test_hub_ids_go_to_datasets(monkeypatch):
    asked = []
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda path, **options: asked.append((path, options)) or ROWS
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert data.read_rows("owner/set", name="dataset") == ROWS
    data.read_rows("owner/set?name=main&split=test", name="dataset")
    assert asked == [("owner/set", {"split": "train"}), ("owner/set", {"split": "test", "name": "main"})]


def test_a_hub_id_without_the_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"eval_dataset: 'owner/set' is neither a file.*jaxrl-lm\[hub-datasets\]"):
        data.read_rows("owner/set", name="eval_dataset")


def test_verl_parquet_is_prompt_only(tmp_path):
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "a"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 0},
    }
    (got,) = data.read_rows(write(tmp_path / "train.parquet", [row]), name="dataset")
    assert got == {**row, "ground_truth": "72"}
    (own,) = data.read_rows([{**row, "ground_truth": "71"}], name="dataset")
    assert own["ground_truth"] == "71"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"dataset: .*a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", '{"prompt": "a"}\n[1]\n', r"line 2 is a list, not an object"),
        ("a.json", '{"prompt": "a"}\n{"prompt": "b"}\n', r"a\.json is not JSON: .*belongs in a \.jsonl file"),
        ("a.json", '{"prompt": "a"}', r"a\.json holds a dict, not a list"),
        ("a.json", '[{"prompt": "a"}, 3]', r"a\.json: row 1 is of type int, not a dict"),
        ("a.csv", "prompt,answer\na,1\nb\n", r"a\.csv, line 3 does not have the 2 fields"),
        ("a.csv", "prompt,answer\na,1,2\n", r"a\.csv, line 2 does not have the 2 fields"),
        ("a.csv", 'prompt\n"a\n', r"a\.csv, line \d is not CSV"),
        ("a.parquet", "nonsense", r"a\.parquet is not a readable Parquet file"),
        ("a.txt", "a", r"a\.txt': the kinds of file that are read are \.jsonl, \.json, \.csv, \.parquet"),
        ("a.jsonl", "\n", r"dataset: '.*a\.jsonl' holds no rows"),
        ("a.json", "[]", r"dataset: '.*a\.json' holds no rows"),
        ("a.csv", "prompt\n", r"dataset: '.*a\.csv' holds no rows"),
    ],
)
def test_bad_files_are_named_with_their_place(tmp_path, file, text, message):
    with pytest.raises(ValueError, match=message):
        data.read_rows(write(tmp_path / file, text=text), name="dataset")


def test_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl' is not UTF-8"):
        data.read_rows(tmp_path / "a.jsonl", name="dataset")


def test_bad_directories(tmp_path):
    with pytest.raises(ValueError, match=r"holds no \.jsonl, \.json, \.csv, \.parquet file"):
        data.read_rows(tmp_path, name="dataset")
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.json", ROWS)
    with pytest.raises(ValueError, match=r"files of several kinds \(\.json, \.jsonl\)"):
        data.read_rows(tmp_path, name="dataset")
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=r"holds folders \(train\)"):
        data.read_rows(tmp_path, name="dataset")


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("nowhere/rows.jsonl", FileNotFoundError, "no file or directory 'nowhere/rows.jsonl'"),
        ("./nowhere", FileNotFoundError, "no file or directory './nowhere'"),
        ("nowhere.py:rows", FileNotFoundError, r"dataset: there is no file 'nowhere\.py'"),
        ("no_such_module:rows", ImportError, "there is no module 'no_such_module'. Put its directory on PYTHONPATH"),
        ("jaxrl_lm.data:read_row", ValueError, "did you mean 'read_rows'"),
        ("jaxrl_lm.encode:PROMPT_TEMPLATES", ValueError, "is of type dict, not a function"),
        (lambda: None, ValueError, "<lambda> gave a NoneType, not an iterable of dicts"),
        (lambda: [ROWS[0], "a"], ValueError, "<lambda>: row 1 is of type str, not a dict"),
        ([], ValueError, "dataset: list holds no rows"),
    ],
)
def test_bad_sources(source, error, message):
    with pytest.raises(error, match=message):
        data.read_rows(source, name="dataset")


def test_an_import_error_inside_a_module_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "broken_of_this_test.py").write_text("import not_a_module_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'not_a_module_at_all'"):
        data.read_rows("broken_of_this_test:rows", name="dataset")


def test_validate_names_source_and_row():
    data.validate(ROWS, ("prompt", "answer"), name="train.jsonl")
    with pytest.raises(ValueError, match=r"train\.jsonl: row 1 has no 'prompt'; its columns are \['question'\]"):
        data.validate([ROWS[0], {"question": "a"}], name="train.jsonl")
    with pytest.raises(ValueError, match="row 0 has no 'prompt'"):
        data.validate([{"prompt": None}], name="train.jsonl")


# --- order ----------------------------------------------------------------------------------------------------------


def test_the_order_is_pinned():
    """These values must never change: a run that resumes under a newer numpy would see other rows."""
    assert data.permutation(8, seed=0, epoch=0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert data.permutation(8, seed=0, epoch=1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]
    assert data.permutation(8, seed=1, epoch=0).tolist() == [2, 4, 7, 5, 0, 6, 3, 1]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    position=st.integers(0, 100),
    counts=st.lists(st.integers(0, 40), max_size=4),
)
def test_batches_are_slices_of_one_endless_order(size, seed, position, counts):
    epochs = (position + sum(counts)) // size + 1
    endless = np.concatenate([data.permutation(size, seed=seed, epoch=epoch) for epoch in range(epochs)])
    for epoch in range(epochs):
        assert sorted(endless[epoch * size : (epoch + 1) * size]) == list(range(size))
    for count in counts:
        got = data.batch_indices(size, seed=seed, position=position, count=count)
        np.testing.assert_array_equal(got, endless[position : position + count])
        position += count


def test_order_refuses_negatives():
    with pytest.raises(ValueError, match="seed=-1"):
        data.permutation(3, seed=-1, epoch=0)
    with pytest.raises(ValueError, match="position=-1"):
        data.batch_indices(3, seed=0, position=-1, count=1)


# --- encoding -------------------------------------------------------------------------------------------------------


def test_plain_prompts_get_the_tokenizers_one_bos():
    got = encode(ROWS)
    assert got.ids == [ids("<s> a b"), ids("<s> b")]
    assert got.texts == ["a b", "b"]
    assert (got.rows, got.dropped, got.cut) == (ROWS, 0, 0)


@pytest.mark.parametrize("rule", ["<s> $A", "<s> $A </s>", "$A </s>", "$A"])
@pytest.mark.parametrize("prompt", ["a b", "<s> a b"])
def test_bos_once_and_no_eos_whatever_the_rule(rule, prompt):
    expected = ids("<s> a b") if "<s>" in rule + prompt else ids("a b")
    assert encode([{"prompt": prompt}], make_tokenizer(rule)).ids == [expected]


def test_an_eos_that_the_prompt_itself_ends_with_stays():
    assert encode([{"prompt": "a </s>"}], make_tokenizer("<s> $A </s>")).ids == [ids("<s> a </s>")]


@pytest.mark.parametrize("rule", ["<s> $A", "<s> $A </s>", "$A"])
def test_chat_prompts_get_the_templates_one_bos(rule):
    got = encode([{"prompt": [{"role": "user", "content": "a b"}]}], make_tokenizer(rule, CHAT_TEMPLATE))
    assert got.texts == ["<s>user : a b <end> assistant : "]
    assert got.ids == [ids("<s> user : a b <end> assistant :")]


def test_system_prompt_goes_before_chats_that_have_none():
    own = [{"role": "system", "content": "c"}, {"role": "user", "content": "a"}]
    rows = [{"prompt": own}, {"prompt": own[1:]}]
    got = encode(rows, make_tokenizer(template=CHAT_TEMPLATE), system_prompt="b")
    assert got.ids == [
        ids("<s> system : c <end> user : a <end> assistant :"),
        ids("<s> system : b <end> user : a <end> assistant :"),
    ]
    assert got.rows == rows  # reward functions see the row as it is


def test_an_answer_begun_in_the_prompt_is_continued():
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    got = encode([{"prompt": prompt}], make_tokenizer(template=CHAT_TEMPLATE))
    assert got.ids == [ids("<s> user : a <end> assistant : b")]


def test_prompt_templates():
    got = encode([{"prompt": "{a} b"}], prompt_template="c {prompt} c")
    assert got.texts == ["c {a} b c"]
    (text,) = encode([{"prompt": "a"}], prompt_template="think", max_prompt_length=100).texts
    assert text == PROMPT_TEMPLATES["think"].replace("{prompt}", "a")
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in text


LONG = [{"prompt": "a b c"}, {"prompt": "a"}, {"prompt": "c b a"}]


def test_long_prompts_are_dropped_or_cut_and_counted():
    got = encode(LONG, max_prompt_length=2)
    assert (got.rows, got.ids, got.texts, got.dropped, got.cut) == ([LONG[1]], [ids("<s> a")], ["a"], 2, 0)
    got = encode(LONG, max_prompt_length=2, long_prompts="keep_start")
    assert (got.ids, got.dropped, got.cut) == ([ids("<s> a"), ids("<s> a"), ids("<s> c")], 0, 2)
    got = encode(LONG, max_prompt_length=2, long_prompts="keep_end")
    assert (got.ids, got.cut, got.texts[0]) == ([ids("b c"), ids("<s> a"), ids("b a")], 2, "a b c")
    assert encode(LONG, max_prompt_length=4).dropped == 0


CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            LONG,
            {"max_prompt_length": 2, "long_prompts": "error"},
            r"row 0: the prompt has 4 tokens.*max_prompt_length=2",
        ),
        (LONG, {"max_prompt_length": 1}, r"dataset: no prompt is left: all 3 have more than max_prompt_length=1"),
        (LONG, {"max_prompt_length": 0}, "max_prompt_length=0: must be at least 1"),
        (LONG, {"prompt_template": "c"}, r"prompt_template='c' holds \{prompt\} 0 times"),
        (LONG, {"prompt_template": "thinks"}, "did you mean 'think'"),
        (LONG, {"prompt_template": "{prompt} {prompt}"}, r"holds \{prompt\} 2 times"),
        (LONG, {"system_prompt": "c"}, "row 0: system_prompt is for chat prompts"),
        ([{"prompt": "a"}, {"prompt": ""}], {}, "row 1: the prompt is empty"),
        ([{"prompt": ""}], {"prompt_template": "c {prompt}"}, "row 0: the prompt is empty"),
        ([{"prompt": "   "}], {}, "row 0: the prompt is empty"),
        ([{"answer": 1}], {}, "row 0 has no 'prompt'"),
        ([{"prompt": 3}], {}, "row 0: 'prompt' is 3, neither a string nor a list"),
        ([{"prompt": []}], {}, r"row 0: 'prompt' is \[\], neither"),
        ([{"prompt": ["a"]}], {}, "row 0: message 0 of 'prompt' is 'a': it needs a 'role'"),
        ([{"prompt": [{"role": "user", "content": None}]}], {}, "message 0 of 'prompt'.*'content', both strings"),
        (
            [{"prompt": CHAT}],
            {},
            "row 0: the prompt is a chat, and the tokenizer has no chat template.*prompt_template",
        ),
        ([{"prompt": CHAT}], {"prompt_template": "c {prompt}"}, "row 0: prompt_template is for plain string prompts"),
    ],
)
def test_bad_prompts_and_options(rows, options, message):
    with pytest.raises(ValueError, match=message):
        encode(rows, **options)


def test_a_template_that_refuses_a_prompt_is_named_with_the_row():
    tokenizer = make_tokenizer(template="{{ raise_exception('users only') }}")
    with pytest.raises(
        ValueError, match="dataset: row 0: the tokenizer's chat template refuses the prompt: users only"
    ):
        encode([{"prompt": CHAT}], tokenizer)


def complete(rows, tokenizer=None, **options):
    options = {"max_length": 20, "eos_token_id": 1, "name": "sft", **options}
    return encode_completions(rows, tokenizer or make_tokenizer("<s> $A </s>"), **options)


@pytest.mark.parametrize("completion", ["c b", "c b </s>", "c b </s> </s>", [{"role": "assistant", "content": "c b"}]])
def test_completions_have_no_bos_and_one_eos(completion):
    got = complete([{"prompt": "a", "completion": completion}])
    assert got.pairs == [(ids("<s> a"), ids("c b </s>"))]


def test_chat_completions_follow_the_generation_prompt():
    row = {"prompt": CHAT, "completion": [{"role": "assistant", "content": "c"}]}
    got = complete([row], make_tokenizer(template=CHAT_TEMPLATE), eos_token_id=2)
    assert got.pairs == [(ids("<s> user : a <end> assistant :"), ids("c <end>"))]


def test_an_empty_completion_is_its_eos():
    assert complete([{"prompt": "a", "completion": ""}]).pairs == [(ids("<s> a"), ids("</s>"))]


def test_long_pairs_are_dropped_and_counted():
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b b"}]
    got = complete(rows, max_length=4)
    assert (got.rows, len(got.pairs), got.dropped) == (rows[:1], 1, 1)
    with pytest.raises(ValueError, match="sft: no row is left: all 2 have more than max_length=3 tokens"):
        complete(rows, max_length=3)


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("b </s> b", r"sft: row 0: the completion has the end-of-sequence token \(1\) before its end"),
        (3, "row 0: 'completion' is 3, neither"),
        ([{"role": "user", "content": "b"}], r"one assistant message; its messages are of \['user'\]"),
        ([{"role": "assistant", "content": "b"}] * 2, "one assistant message"),
        (None, "row 0 has no 'completion'"),
    ],
)
def test_bad_completions(completion, message):
    with pytest.raises(ValueError, match=message):
        complete([{"prompt": "a", "completion": completion}])


# --- padding --------------------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 3), max_size=5)


@settings(max_examples=50, deadline=None)
@given(pairs=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=4), pad=st.integers(0, 3))
def test_padding_is_known_by_place_not_by_value(pairs, pad):
    """The pad id may be any token of the text, an eos included."""
    tokens, segment_ids, mask = data.pad_rows(pairs, 6, 7, pad)
    assert tokens.shape == segment_ids.shape == mask.shape == (len(pairs), 13)
    for n, (prompt, completion) in enumerate(pairs):
        assert tokens[n, segment_ids[n] == 1].tolist() == prompt + completion
        assert tokens[n, mask[n]].tolist() == completion
        assert segment_ids[n].tolist() == [0] * (6 - len(prompt)) + [1] * (len(prompt) + len(completion)) + [0] * (
            7 - len(completion)
        )
        assert (tokens[n, segment_ids[n] == 0] == pad).all()
    left, left_segments = data.left_pad([pair[0] for pair in pairs], 6, pad)
    np.testing.assert_array_equal(left, tokens[:, :6])
    np.testing.assert_array_equal(left_segments, segment_ids[:, :6])


def test_padding_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="prompt 1 has 3 tokens, more than the 2"):
        data.left_pad([[1], [1, 2, 3]], 2, 0)
    with pytest.raises(ValueError, match="completion 0 has 2 tokens, more than the 1"):
        data.pad_rows([([1], [1, 2])], 2, 1, 0)


def test_buckets():
    assert data.default_buckets([3, 16]) == (16,)
    assert data.default_buckets([17]) == (24,)
    assert [data.choose_bucket(n, (64, 16, 32)) for n in (1, 16, 17, 64)] == [16, 16, 32, 64]
    with pytest.raises(ValueError, match=r"prompt_buckets=\(16, 32\): none holds a prompt of 33 tokens"):
        data.choose_bucket(33, (16, 32))
    with pytest.raises(ValueError, match="no lengths"):
        data.default_buckets([])
