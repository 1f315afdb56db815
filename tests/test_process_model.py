"""Process reward models as step functions: their scores are transformers' token classification on the same tokens."""

import json
import shutil
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from jaxrl_lm.algos import process_advantages
from jaxrl_lm.models import load_process_model, save_process_model
from jaxrl_lm.prepare import build_plan
from jaxrl_lm.process_model import ProcessModel, split_steps

NAMES = ["<pad>", "<s>", "<eot>", "<unk>", "\n", *"0123456789+-=;# ", *string.ascii_letters[:27]]
IDS = {name: number for number, name in enumerate(NAMES)}
BOS, EOT, LINE = 1, 2, 4
TEMPLATE = "<s>{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }}<eot>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}a={% endif %}"
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module", autouse=True)
def cached(tmp_path_factory):
    """Each model has programs of its own, of few shapes."""
    with tiny_run.compile_cache(tmp_path_factory.mktemp("xla")):
        yield


def save(directory, *, kind=AutoModelForTokenClassification, chat_template=TEMPLATE, **settings):
    """A random Llama of transformers with a tokenizer of characters that puts a BOS before plain text."""
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.2}
    config = LlamaConfig(vocab_size=len(NAMES), pad_token_id=0, **shape | {"step_separator": "\n"} | settings)
    model = kind.from_config(config).float().eval()
    with torch.no_grad():
        model.score.bias is not None and model.score.bias.copy_(torch.tensor([0.3, -0.4]))
    model.save_pretrained(directory)
    backend = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    special = {"bos_token": "<s>", "eos_token": "<eot>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **special).save_pretrained(directory)
    return model.double()


def chars(text):
    return [IDS.get(character, IDS["<unk>"]) for character in text]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory, and transformers' softmax of "right" at every token of a row of ids."""
    directory = tmp_path_factory.mktemp("process") / "model"
    model = save(directory)

    def chances(ids):
        with torch.no_grad():
            return torch.softmax(model(torch.tensor([ids])).logits[0], -1)[:, 1].numpy()

    return directory, chances


@pytest.fixture(scope="module")
def plan():
    return build_plan(MESH)


@pytest.fixture(scope="module")
def process(saved, plan):
    return ProcessModel(f"prm:{saved[0]}", plan=plan)


def check(found, expected):
    """Pairs of (end, probability), row by row."""
    assert [[end for end, _ in row] for row in found] == [[end for end, _ in row] for row in expected]
    flat = lambda rows: [chance for row in rows for _, chance in row]
    np.testing.assert_allclose(flat(found), flat(expected), atol=1e-5)


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("a\nb\n", [("a", 2), ("b", 4)]),
        ("a\nb", [("a", 2), ("b", 3)]),  # the separator is added for scoring
        ("a", [("a", 1)]),
        ("a\n \t", [("a", 2)]),  # a last piece that is blank is no step
        ("a\n\nb\n", [("a\n", 3), ("b", 5)]),  # a blank one belongs to the step before
        ("a\n  \n\n", [("a\n  \n", 6)]),
        ("\n \na b\nc", [("\n \na b", 7), ("c", 8)]),  # at the beginning to the one after
        ("", []),
        ("\n \n", []),
    ],
)
def test_steps_end_just_after_their_separator(text, steps):
    assert split_steps(text, "\n") == steps
    pieces, start = [], 0
    for step, end in steps:
        pieces.append(text[start:end])
        assert pieces[-1].removesuffix("\n") == step or pieces[-1] == step
        start = end
    assert not text[start:].strip()  # nothing but blanks is left out


def test_a_separator_may_have_several_characters():
    assert split_steps("1; 2;; 3", ";; ") == [("1; 2", 7), ("3", 8)]
    assert split_steps("ab", "ab") == []


# --- scores -----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_token_classification_at_the_ends_of_steps(saved, process):
    """Plain text and chats, of every padded length; tokens are the prompt's, then each step's and its separator's."""
    chances = saved[1]
    chat = [{"role": "user", "content": "1+2="}]
    asked = [BOS, *chars("u=1+2="), EOT, *chars("a=")]
    steps = "1+1=2\n2+2=4\n#5"
    long = "1+1=2\n" * 25
    rows = [
        ("1+1+2=", steps, [BOS, *chars("1+1+2=" + steps), LINE]),
        ("<s>1+1+2=", steps + "\n", [BOS, *chars("1+1+2=" + steps), LINE]),  # one BOS; and no other separator
        ("1=", "", None),
        ("1=", " ", None),
        (chat, [{"role": "assistant", "content": steps}], [*asked, *chars(steps), LINE]),
        ("1=", long, [BOS, *chars("1=" + long)]),  # 153 tokens
        ("1=", long[:84], [BOS, *chars("1=" + long[:84])]),  # 87
        *[(f"{a}+{b}=", f"{a}\n{b}\n", [BOS, *chars(f"{a}+{b}={a}\n{b}\n")]) for a in range(4) for b in range(5)],
    ]
    prompts, completions, ids = zip(*rows, strict=True)
    found = process(prompts, completions)
    expected = []
    for completion, row in zip(completions, ids, strict=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        ends = [end + 1 for end, character in enumerate(text) if character == "\n"]
        ends += [len(text)] if text.strip() and text[-1] != "\n" else []
        scores = [] if row is None else [chances(row)[place] for place, token in enumerate(row) if token == LINE]
        expected.append(list(zip(ends, scores, strict=True)))
    check(found, expected)
    assert all(type(end) is int and type(chance) is float for row in found for end, chance in row)
    assert np.std([chance for row in found for _, chance in row]) > 0.05
    assert [chance for _, chance in found[0]] == [chance for _, chance in found[1]]  # equal rows are scored once
    process(prompts[:3], completions[:3])
    assert process._chances._cache_size() == 3  # 64, 128, 160
    assert process.cut == 0
    assert process([], []) == []


def test_a_step_is_judged_by_what_stands_before_it(process):
    whole = process(["1+1="], ["1\n2\n3\n"])[0]
    changed = process(["1+1="], ["1\n2\n4\n"])[0]
    assert whole[:2] == changed[:2]
    assert whole[2] != changed[2]
    assert process(["1+1="], ["1\n2\n"])[0] == whole[:2]
    assert process(["1+2="], ["1\n2\n3\n"])[0][0] != whole[0]


def test_settings_and_the_separator_of_the_directory(saved, plan):
    other = ProcessModel(f"prm:{saved[0]}?separator=%3B%0A&batch_size=3&name=math", plan=plan)
    assert (other.separator, other.rows, other.__name__, other.max_length) == (";\n", 4, "math", 160)
    ids = [BOS, *chars("1=1\n2;\n3;\n")]
    places = [place for place, token in enumerate(ids) if token == LINE and ids[place - 1] == IDS[";"]]
    check(
        other(["1="], ["1\n2;\n3;"]), [[(5, saved[1](ids)[places[0]]), (7, saved[1]([*ids[:-1], IDS[";"], LINE])[-1])]]
    )
    table = other._weights["trunk"]["embed"]["table"]
    assert table.sharding.mesh == plan.mesh
    assert not table.is_fully_replicated


def test_steps_beyond_max_length_have_no_score_and_are_counted(saved, plan):
    """The prompt is kept, and the tokens that are left are those of the whole row."""
    short = ProcessModel(f"prm:{saved[0]}?max_length=8", plan=plan)
    prompts, completions = ["1+1=", "1+1=", "1+1+1+1+1="], ["1\n2\n3\n", "1\n\n", "1\n2\n"]
    with pytest.warns(UserWarning, match=r"max_length=8': 4 of 6 steps end beyond max_length=8 and have no score"):
        found = short(prompts, completions)
    first = saved[1]([BOS, *chars("1+1=1\n")])[-1]
    check(found, [[(2, first)], [(3, saved[1]([BOS, *chars("1+1=1\n\n")])[-1])], []])
    short(prompts, completions)  # said once
    assert short.cut == 8


def test_a_head_without_a_bias(tmp_path, plan):
    model = save(tmp_path / "plain", token_classification_bias=False)
    process = ProcessModel(f"prm:{tmp_path / 'plain'}", plan=plan)
    assert set(process._weights["head"]) == {"kernel"}
    ids = [BOS, *chars("1=2\n")]
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([ids])).logits[0, -1], -1)[1].item()
    check(process(["1="], ["2"]), [[(1, expected)]])


def test_a_saved_model_scores_as_before(saved, process, tmp_path, plan):
    model, classifier, tokenizer = load_process_model(saved[0])
    save_process_model(tmp_path / "again", model, classifier, tokenizer, step_separator="\n")
    again = ProcessModel(f"prm:{tmp_path / 'again'}", plan=plan)
    rows = ["1+1="] * 2, ["1\n2", "3\n"]
    assert again(*rows) == process(*rows)


def test_the_scores_are_credits_of_steps(process):
    """What `process_advantages` takes: chances at the ends of steps."""
    found = process(["1+1="] * 2, ["1\n2", "3\n4"])
    rewards, ends = np.zeros((2, 4), np.float32), np.zeros((2, 4), bool)
    for number, row in enumerate(found):
        for end, chance in row:
            rewards[number, end - 1], ends[number, end - 1] = chance, True
    arrays = jnp.asarray(rewards), jnp.asarray(ends), jnp.zeros(2), jnp.ones((2, 4), bool)
    advantages = np.asarray(process_advantages(*arrays, group_size=2, credit="min"))
    worst = [min(chance for _, chance in row) for row in found]
    assert np.sign(advantages[0, 0]) == np.sign(worst[0] - worst[1]) != 0


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    directory = tmp_path_factory.mktemp("broken")
    save(directory / "one", chat_template=None, step_separator=None)
    save(directory / "three", num_labels=3, token_classification_bias=False)
    save(directory / "narrow", num_key_value_heads=1, num_attention_heads=1)
    shutil.copytree(directory / "one", directory / "headless")
    tensors = load_file(directory / "one" / "model.safetensors")
    tensors.pop("score.weight")
    save_file(tensors, directory / "headless" / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(directory / "one", directory / "reward")
    config = json.loads((directory / "reward" / "config.json").read_text())
    architectures = [AutoModelForSequenceClassification.from_config(LlamaConfig(**config)).__class__.__name__]
    (directory / "reward" / "config.json").write_text(json.dumps(config | {"architectures": architectures}))
    return directory


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ("prm:", ValueError, "names no reward model; give prm:DIRECTORY"),
        ("prm:{dir}/absent", FileNotFoundError, "absent: no such file or directory"),
        ("prm:{dir}/reward", ValueError, r"architectures \['LlamaForSequenceClassification'\] is no process reward mo"),
        ("prm:{dir}/three", ValueError, "three: a head with 3 labels"),
        ("prm:{dir}/headless", ValueError, "headless: the head is missing: no tensor score.weight"),
        ("prm:{dir}/narrow", ValueError, "tensor=2 does not divide the model's num_heads=1"),
        (
            "prm:{dir}/one",
            ValueError,
            r"no separator of steps: config.json has no step_separator; give it as \?separator",
        ),
        ("prm:{dir}/one?separator=", ValueError, "separator=: must not be empty"),
        ("prm:{dir}/one?seperator=;", ValueError, "unknown setting 'seperator'; did you mean 'separator'"),
        ("prm:{dir}/one?separator=;&max_length=0", ValueError, "max_length=0: must be an integer of at least 1"),
        ("prm:{dir}/one?separator=;&max_length=161", ValueError, "max_length=161, and the model reads 160 tokens"),
    ],
)
def test_errors_name_the_option(broken, plan, option, error, message):
    option = option.format(dir=broken)
    with pytest.raises(error, match=message) as caught:
        ProcessModel(option, plan=plan)
    assert str(caught.value).startswith(f"step_reward={option!r}")


def test_rows_that_cannot_be_read_are_refused(broken, plan):
    process = ProcessModel(f"prm:{broken}/one?separator=%3B", plan=plan)
    with pytest.raises(ValueError, match=r"prm:.*row 1: the prompt is a chat, and the tokenizer has no chat template"):
        process(["1=", [{"role": "user", "content": "1="}]], ["1", "2"])
    with pytest.raises(ValueError, match=r"prm:.*row 0: the prompt is empty"):
        process([""], ["1"])
    with pytest.raises(ValueError, match=r"prm:.*a completion of 2 messages"):
        process(["1="], [[{"role": "assistant", "content": "1"}] * 2])
    process._separator_ids = []
    process._tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("x", behavior="removed")
    with pytest.raises(ValueError, match=r"prm:.*the step 'x' has no token"):
        process(["1="], ["x;"])


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_score_that_is_not_finite_names_option_and_row(saved, plan, number):
    """Of a head that overflows σ would make a chance of 1."""
    process = ProcessModel(f"prm:{saved[0]}", plan=plan)
    bias = process._weights["head"]["bias"]
    process._weights["head"]["bias"] = jax.device_put(jnp.array([0.0, number]), bias.sharding)
    message = r"prm:.*the score of a step of the row with prompt '1\+3=' and completion '4\\n5' is not a finite number"
    with pytest.raises(ValueError, match=message):
        process(["1+2=", "1+3="], ["", "4\n5"])
