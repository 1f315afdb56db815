"""Reward models as reward functions: their scores are transformers' on the same tokens, and runs train on them."""

import json
import re
import shutil
import string

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny_run
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

import jaxrl_lm
from jaxrl_lm import cli
from jaxrl_lm.config import PPOConfig
from jaxrl_lm.models import load_reward_model, save_ensemble
from jaxrl_lm.options import to_toml
from jaxrl_lm.prepare import build_plan
from jaxrl_lm.report import load_metrics
from jaxrl_lm.reward_model import RewardModel, open_reward_models
from jaxrl_lm.rewards import RewardError, compute_rewards, resolve_all

# Ids that differ from those of the policies' tokenizer.
NAMES = ["<pad>", "<s>", "<eot>", "<unk>", *reversed("0123456789+-=;# "), *string.ascii_letters[:28]]
IDS = {name: number for number, name in enumerate(NAMES)}
BOS, EOT = 1, 2
TEMPLATE = "<s>{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }}<eot>{% endfor %}"
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module", autouse=True)
def cached(tmp_path_factory):
    """Each reward model has programs of its own, of few shapes."""
    with tiny_run.compile_cache(tmp_path_factory.mktemp("xla")):
        yield


def save(directory, *, kind=AutoModelForSequenceClassification, chat_template=TEMPLATE, **settings):
    """A random Llama of transformers with a tokenizer of characters that puts a BOS before plain text."""
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.2}
    config = LlamaConfig(vocab_size=len(NAMES), pad_token_id=0, **shape | {"num_labels": 1} | settings)
    model = kind.from_config(config).float().eval()
    model.save_pretrained(directory)
    backend = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    special = {"bos_token": "<s>", "eos_token": "<eot>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **special).save_pretrained(directory)
    return model


def chars(text):
    return [IDS.get(character, IDS["<unk>"]) for character in text]


def answer(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory, and transformers' score of a row of token ids."""
    directory = tmp_path_factory.mktemp("reward") / "model"
    model = save(directory)

    def score(ids):
        with torch.no_grad():
            return float(model(torch.tensor([ids])).logits[0, 0])

    return directory, score


@pytest.fixture(scope="module")
def plan():
    return build_plan(MESH)


@pytest.fixture(scope="module")
def reward(saved, plan):
    return RewardModel(f"reward_model:{saved[0]}", plan=plan)


# --- scores -----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_transformers_on_the_same_tokens(saved, reward):
    """Plain text and chats, of every padded length; compiled once a length, however many rows come."""
    chat = [{"role": "user", "content": "1+2="}]
    rows = [
        ("1+1=", "2", [BOS, *chars("1+1=2")]),
        ("<s>1+1=", "2", [BOS, *chars("1+1=2")]),  # the text brings the BOS
        ("1+1=", "", [BOS, *chars("1+1=")]),
        ("9" * 63, "", [BOS, *chars("9" * 63)]),  # 64 tokens
        ("9" * 63, "1", [BOS, *chars("9" * 63 + "1")]),  # 65
        ("abc" * 40, "=" * 39, [BOS, *chars("abc" * 40 + "=" * 39)]),  # 160, all that the model reads
        (chat, answer("3"), [BOS, *chars("u=1+2="), EOT, *chars("a=3"), EOT]),  # and not a second BOS
        (chat, answer("4?"), [BOS, *chars("u=1+2="), EOT, *chars("a=4?"), EOT]),
        *[(f"{a}+{b}=", str(a), [BOS, *chars(f"{a}+{b}={a}")]) for a in range(5) for b in range(5)],
    ]
    prompts, completions, ids = zip(*rows, strict=True)
    assert [reward.encode(*row[:2]) for row in rows] == list(ids)
    found = reward(prompts, completions)
    assert all(type(score) is float for score in found)
    expected = [saved[1](row) for row in ids]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.std(expected) > 0.1
    assert found[0] == found[1]
    reward(prompts[:3], completions[:3])
    assert reward._scores._cache_size() == 3  # 64, 128, 160
    assert reward.cut == 0


def test_the_weights_lie_on_the_mesh(reward, plan):
    table = reward._weights["trunk"]["embed"]["table"]
    assert table.sharding.mesh == plan.mesh
    assert not table.is_fully_replicated
    assert table.dtype == np.float32
    assert reward.rows == 16
    assert reward.max_length == 160


def test_equal_rows_have_equal_scores_whatever_is_beside_them(saved, plan):
    """To the last bit, for a group of equal answers has no advantage; and the order does not matter."""
    few = RewardModel(f"reward_model:{saved[0]}?batch_size=3&name=helpful", plan=plan)
    assert (few.rows, few.__name__) == (4, "helpful")
    texts = [*[str(number) for number in range(9)], "4", "4", "7" * 80]
    found = few(["1+3="] * 12, texts)
    assert found[4] == found[9] == found[10]
    assert len(set(found)) == 10
    order = np.random.default_rng(0).permutation(12)
    assert few(["1+3="] * 12, [texts[n] for n in order]) == [found[n] for n in order]
    assert few(["1+3="], ["4"]) == [found[4]]


def test_long_rows_lose_the_start_of_the_prompt_and_are_counted(saved, plan):
    short = RewardModel(f"reward_model:{saved[0]}?max_length=12", plan=plan)
    prompts = ["1+2+3+4+5=", "1+2+3+4+5+6=", [{"role": "user", "content": "1+2+3+4="}]]
    completions = ["6", "21", answer("10")]
    with pytest.warns(UserWarning, match=r"max_length=12': 2 of 3 rows are longer than max_length=12 and are"):
        found = short(prompts, completions)
    chat = [BOS, *chars("+3+4="), EOT, *chars("a=10"), EOT]
    ids = [[BOS, *chars("1+2+3+4+5=6")], [BOS, *chars("+3+4+5+6=21")], chat]
    assert [len(row) for row in ids] == [12, 12, 12]
    np.testing.assert_allclose(found, [saved[1](row) for row in ids], atol=1e-4)
    short(prompts, completions)  # said once
    assert short.cut == 4


def test_a_row_that_begins_without_the_bos_keeps_its_last_tokens_as_they_are(reward):
    ids = list(range(5, 5 + reward.max_length + 2))
    assert reward._cut_start(ids) == ids[2:]
    assert reward._cut_start([BOS, *ids]) == [BOS, *ids[3:]]
    assert reward._cut_start(ids[2:]) == ids[2:]


# --- ensembles, probabilities, the end of a text ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def members(saved, tmp_path_factory):
    """A directory of two, the second the first with another head, and transformers' scores of rows of ids, [2, N]."""
    model, classifier, tokenizer = load_reward_model(saved[0])
    kernel = classifier["head"]["kernel"]
    other = jnp.asarray(np.random.default_rng(1).permutation(np.asarray(kernel)))
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), classifier)
    both["head"]["kernel"] = jnp.stack([kernel, other])
    directory = tmp_path_factory.mktemp("ensemble") / "members"
    save_ensemble(directory, model, both, tokenizer, append_eos=True)
    of = [AutoModelForSequenceClassification.from_pretrained(directory / f"member_{n}").eval() for n in range(2)]

    def score(rows):
        with torch.no_grad():
            return np.array([[float(one(torch.tensor([ids])).logits[0, 0]) for ids in rows] for one in of])

    return directory, score


@pytest.mark.parametrize(
    ("settings", "combine"),
    [
        ("", lambda z: z.mean(0)),
        ("?ensemble=mean", lambda z: z.mean(0)),
        ("?ensemble=min", lambda z: z.min(0)),
        ("?ensemble=pessimistic", lambda z: z.mean(0) - z.std(0, ddof=1)),
        ("?ensemble=pessimistic&k=0.25", lambda z: z.mean(0) - 0.25 * z.std(0, ddof=1)),
        ("?sigmoid=true&ensemble=min", lambda z: (1 / (1 + np.exp(-z))).min(0)),
        ("?sigmoid=true&batch_size=4", lambda z: (1 / (1 + np.exp(-z))).mean(0)),
    ],
    ids=["default", "mean", "min", "pessimistic", "k", "sigmoid min", "sigmoid mean"],
)
def test_scores_of_an_ensemble_are_combined_as_asked(members, plan, settings, combine):
    directory, score = members
    reward = RewardModel(f"reward_model:{directory}{settings}", plan=plan)
    assert reward.members == 2
    completions = [str(number) for number in range(6)]
    single = score([[BOS, *chars("1+1="), *chars(text), EOT] for text in completions])
    assert np.abs(single[0] - single[1]).min() > 1e-3
    found = reward(["1+1="] * 6, completions)
    np.testing.assert_allclose(found, combine(single), atol=1e-4)


def test_an_eos_is_appended_if_the_directory_says_so(members, saved, plan):
    """To texts, once; a chat's template knows better."""
    reward = RewardModel(f"reward_model:{members[0]}", plan=plan)
    assert reward.append_eos
    assert reward.encode("1+1=", "2") == reward.encode("1+1=", "2<eot>") == [BOS, *chars("1+1=2"), EOT]
    chat = [{"role": "user", "content": "1+2="}]
    text = [BOS, *chars("u=1+2="), EOT, *chars("a=3"), EOT]
    assert reward.encode(chat, answer("3")) == text
    assert not RewardModel(f"reward_model:{saved[0]}", plan=plan).append_eos
    short = RewardModel(f"reward_model:{members[0]}?max_length=6", plan=plan)
    with pytest.warns(UserWarning, match="1 of 1 rows"):
        assert short(["1+1+1="], ["3"]) == pytest.approx(members[1]([[BOS, *chars("+1=3"), EOT]]).mean(0), abs=1e-4)


def test_a_single_model_gives_a_probability(saved, reward, plan):
    chance = RewardModel(f"reward_model:{saved[0]}?sigmoid=true", plan=plan)
    rows = ["1+1="] * 3, ["2", "3", "4"]
    np.testing.assert_allclose(chance(*rows), 1 / (1 + np.exp(-np.array(reward(*rows)))), rtol=1e-6)
    assert not RewardModel(f"reward_model:{saved[0]}?sigmoid=false", plan=plan).sigmoid


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("settings", ["?ensemble=min", "?sigmoid=true"])
def test_a_score_that_is_not_finite_names_option_and_row(members, plan, number, settings):
    """Of any member, also where σ or the min would hide it; the other rows' scores are fine."""
    reward = RewardModel(f"reward_model:{members[0]}{settings}", plan=plan)
    whole = reward._scores

    def broken(weights, tokens, segment_ids):
        bad = np.array([[False], [True]]) & np.asarray(tokens == IDS["#"]).any(1)[None]
        return jnp.where(bad, number, whole(weights, tokens, segment_ids))

    reward._scores = broken
    assert np.isfinite(reward(["1+1=", "1+2="], ["2", "3"])).all()
    given = {"completion_ids": [[4]] * 3, "columns": {}, "group_ids": [0] * 3}
    message = "the score of the row with prompt '1+3=' and completion '#4' is not a finite number"
    pattern = ".*".join(re.escape(part) for part in (f"members{settings}'", message, "on row 2"))
    prompts = ["1+1=", "1+2=", "1+3="]
    with pytest.raises(RewardError, match=pattern):
        compute_rewards(resolve_all([reward]), prompts=prompts, completions=["2", "3", "#4"], **given)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ("reward_model:", ValueError, "names no reward model"),
        ("reward_model:{dir}/absent", FileNotFoundError, "absent: no such file or directory"),
        ("reward_model:{dir}/policy", ValueError, r"policy: architectures \['LlamaForCausalLM'\] is no reward model"),
        ("reward_model:{dir}/labels", ValueError, "labels: a head with 2 labels"),
        ("reward_model:{dir}/narrow", ValueError, "tensor=2 does not divide the model's num_heads=1"),
        ("reward_model:{dir}/one?max_len=3", ValueError, "unknown setting 'max_len'; did you mean 'max_length'"),
        ("reward_model:{dir}/one?max_length=0", ValueError, "max_length=0: must be an integer of at least 1"),
        ("reward_model:{dir}/one?batch_size=x", ValueError, "batch_size=x: must be an integer of at least 1"),
        ("reward_model:{dir}/one?k=1", ValueError, "k=1.0 has no effect without ensemble=pessimistic"),
        ("reward_model:{dir}/one?ensemble=min", ValueError, "ensemble=min has no effect: the directory holds one"),
        ("reward_model:{dir}/one?ensemble=max", ValueError, "ensemble=max: must be one of mean, min, pessimistic"),
        ("reward_model:{dir}/one?k=-1", ValueError, "k=-1: must be a number of at least 0"),
        ("reward_model:{dir}/one?k=inf", ValueError, "k=inf: must be a number of at least 0"),
        ("reward_model:{dir}/one?sigmoid=1", ValueError, "sigmoid=1: must be one of true, false"),
        ("reward_model:{dir}/endless", ValueError, "append_eos, and its tokenizer has no end-of-sequence token"),
        ("reward_model:{dir}/headless", ValueError, "headless: the head is missing: no tensor score.weight"),
        ("reward_model:{dir}/one?max_length=161", ValueError, "max_length=161, and the model reads 160 tokens"),
    ],
)
def test_errors_name_the_option(broken, plan, option, error, message):
    option = option.format(dir=broken)
    with pytest.raises(error, match=message) as caught:
        open_reward_models([option], plan=plan, dtype=None)
    assert str(caught.value).startswith(f"reward={option!r}")


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    directory = tmp_path_factory.mktemp("broken")
    save(directory / "policy", kind=AutoModelForCausalLM)
    save(directory / "labels", num_labels=2)
    save(directory / "narrow", num_key_value_heads=1, num_attention_heads=1)
    save(directory / "one", chat_template=None)
    shutil.copytree(directory / "one", directory / "endless")
    edit = lambda file, **new: file.write_text(json.dumps(json.loads(file.read_text()) | new))
    edit(directory / "endless" / "config.json", append_eos=True)
    edit(directory / "endless" / "tokenizer_config.json", eos_token=None)
    shutil.copytree(directory / "one", directory / "headless")
    tensors = load_file(directory / "one" / "model.safetensors")
    tensors.pop("score.weight")
    save_file(tensors, directory / "headless" / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_chat_needs_a_template_and_a_row_a_token(broken, plan):
    reward = RewardModel(f"reward_model:{broken}/one", plan=plan)
    given = {"completion_ids": [[4]], "columns": {}, "group_ids": [0]}
    prompts = [[{"role": "user", "content": "1+1="}]]
    with pytest.raises(RewardError, match=r"reward_model:.*/one'.*no chat template.* on row 0 \(prompt '1\+1='"):
        compute_rewards(resolve_all([reward]), prompts=prompts, completions=["2"], **given)
    reward._tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(ValueError, match="have no token"):
        reward([""], [""])


def test_a_model_that_stands_twice_is_loaded_once(saved, plan):
    option = f"reward_model:{saved[0]}"
    lists = open_reward_models([option, "arithmetic", len], ["format_think", option], plan=plan, dtype="float32")
    assert lists[0][1:] == ["arithmetic", len]
    assert lists[0][0] is lists[1][1]
    with pytest.raises(ValueError, match="two reward functions are named 'reward_model'"):
        resolve_all([lists[0][0], RewardModel(option + "?batch_size=8", plan=plan)])


# --- runs -------------------------------------------------------------------------------------------------------------


def test_ppo_trains_on_a_reward_model_and_goes_on_from_the_command_line(saved, tmp_path):
    directory, score = saved
    model, data = tiny_run.save_model(tmp_path / "policy"), tiny_run.write_data(tmp_path)
    options = tiny_run.options(
        model,
        data,
        tmp_path / "run",
        reward=(f"reward_model:{directory}?max_length=64",),
        reward_weights=(),
        true_reward=None,
        eval_dataset={},
        eval_steps=0,
        probe_prompts=0,
        prompts_per_step=8,
        num_generations=1,
        num_iterations=1,
        minibatch_completions=None,
        prompt_buckets=(16,),
        max_steps=2,
    )
    run = jaxrl_lm.train(PPOConfig(**options))
    assert run.step == 2
    assert set(run.state.params) == {"policy", "critic"}
    for step, metrics in enumerate(run.metrics, start=1):
        rows = pq.read_table(run.directory / "completions" / f"step_{step:06d}.parquet").to_pylist()
        expected = [score([BOS, *chars(row["prompt"] + row["completion"])]) for row in rows]
        np.testing.assert_allclose([row["reward_model"] for row in rows], expected, atol=1e-4)
        assert metrics["rewards/reward_model/mean"] == pytest.approx(np.mean(expected), abs=1e-4)
        assert metrics["rewards/reward_model/std"] > 0
    assert {"objective/kl", "value_loss"} < run.metrics[-1].keys()

    file = tmp_path / "run.toml"
    file.write_text(to_toml(PPOConfig(**options | {"reward": ("arithmetic",)})))
    cli.main(["ppo", "--config", str(file), "--reward", *options["reward"], "--max_steps", "3"])
    history = load_metrics(run.directory / "metrics.jsonl")
    assert [values["step"] for values in history if "rewards/reward_model/mean" in values] == [1, 2, 3]
    with pytest.raises(SystemExit):  # another option would be another run
        cli.main(["ppo", "--config", str(file), "--reward", f"reward_model:{directory}", "--max_steps", "4"])
