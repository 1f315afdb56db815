"""Directories of reward models and process reward models, against transformers, both ways, of every family."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as vocabularies
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from jaxrl_lm import models
from jaxrl_lm.models import heads, load_process_model, load_reward_model, load_reward_models
from jaxrl_lm.models.hf_table import flatten
from jaxrl_lm.sharding import Plan, make_mesh

SEQUENCE, TOKEN = AutoModelForSequenceClassification, AutoModelForTokenClassification
SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "initializer_range": 0.2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "llama": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24, "attention_bias": True},
    "mistral": {"sliding_window": 4},
}
SEGMENTS = np.array([[1] * 9, [0] * 3 + [1] * 6, [1] * 5 + [0] * 4, [0, 0, 1, 1, 1, 1, 1, 1, 0]], np.int32)
TOKENS = np.random.default_rng(0).integers(1, 48, SEGMENTS.shape).astype(np.int32) * (SEGMENTS > 0)
shapes = lambda tree: jax.tree.map(lambda leaf: tuple(leaf.shape), tree, is_leaf=lambda leaf: hasattr(leaf, "axes"))
equal = lambda one, two: jax.tree.map(np.testing.assert_array_equal, one, two)


def tokenizer(**special):
    """w0 … w47, separated by spaces; w1 is unknown, w0 padding unless `special` says otherwise."""
    backend = Tokenizer(vocabularies.WordLevel({f"w{number}": number for number in range(48)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{"unk_token": "w1", "pad_token": "w0"} | special)


def write_model(directory, family, kind=SEQUENCE, **settings):
    """A random model of transformers, its norms and biases random too, in a directory; as float64."""
    torch.manual_seed(0)
    model = kind.from_config(CONFIG_MAPPING[family](**SIZES | CASES[family] | settings)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return model.double()


def read(directory, kind):
    """A directory as transformers reads it, which must find all of its weights, in float64."""
    model, info = kind.from_pretrained(directory, output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.double().eval()


def theirs(model, tokens=TOKENS, segments=SEGMENTS):
    """transformers' logits of padded rows."""
    mask = segments > 0
    places = np.where(mask, np.cumsum(mask, axis=1) - 1, 0)
    with torch.no_grad():
        return model(torch.tensor(tokens), torch.tensor(mask).long(), position_ids=torch.tensor(places)).logits.numpy()


@jax.jit(static_argnums=1)
def scores(classifier, model, tokens=TOKENS, segments=SEGMENTS):
    return heads.row_scores(classifier, jnp.asarray(tokens), jnp.asarray(segments), model=model)


@jax.jit(static_argnums=1)
def logits(classifier, model):
    return heads.token_logits(classifier, jnp.asarray(TOKENS), jnp.asarray(SEGMENTS), model=model)


def close(found, expected):
    """To 1e-5 of the largest number."""
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def edit(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def with_tensors(directory, **changes):
    """The directory with some tensors changed, None: left out."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, file, metadata={"format": "pt"})


# --- both ways --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CASES)
def test_a_reward_model_scores_as_in_transformers_both_ways(tmp_path, family):
    reference = theirs(write_model(tmp_path / "theirs", family, num_labels=1))[:, 0]
    model, classifier, read_tokenizer = load_reward_model(tmp_path / "theirs")
    assert read_tokenizer.pad_token_id == 0
    assert shapes(classifier) == shapes(models.critic_specs(model))
    close(scores(classifier, model), reference)
    assert reference.std() > 0.1

    models.save_reward_model(tmp_path / "ours", model, classifier, read_tokenizer, append_eos=True)
    saved = read(tmp_path / "ours", SEQUENCE)
    close(theirs(saved)[:, 0], reference)
    assert (saved.config.num_labels, saved.config.append_eos, saved.config.pad_token_id) == (1, True, 0)
    assert saved.config.id2label == {0: "reward"}
    again, same, _ = load_reward_model(tmp_path / "ours")
    assert again == model
    equal(same, classifier)
    assert models.classifier_settings(tmp_path / "ours") == {"append_eos": True, "step_separator": None}
    assert models.classifier_settings(tmp_path / "theirs")["append_eos"] is None


@pytest.mark.parametrize("family", CASES)
def test_a_process_model_scores_as_in_transformers_both_ways(tmp_path, family):
    """With and without a bias, which transformers has unless its config says otherwise."""
    settings = {"token_classification_bias": False} if family == "qwen3" else {}
    reference = theirs(write_model(tmp_path / "theirs", family, TOKEN, **settings))[SEGMENTS > 0]
    model, classifier, read_tokenizer = load_process_model(tmp_path / "theirs")
    assert shapes(classifier) == shapes(models.classifier_specs(model, labels=2, bias=family != "qwen3"))
    found = logits(classifier, model)
    close(np.asarray(found)[SEGMENTS > 0], reference)
    assert (np.asarray(found)[SEGMENTS == 0] == 0).all()

    models.save_process_model(tmp_path / "ours", model, classifier, read_tokenizer, step_separator="\n\n")
    saved = read(tmp_path / "ours", TOKEN)
    close(theirs(saved)[SEGMENTS > 0], reference)
    assert saved.config.id2label == {0: "wrong", 1: "right"}
    again, same, _ = load_process_model(tmp_path / "ours")
    assert again == model
    equal(same, classifier | {"head": {"bias": np.zeros(2, np.float32)} | classifier["head"]})
    assert models.classifier_settings(tmp_path / "ours") == {"append_eos": None, "step_separator": "\n\n"}
    config = AutoConfig.from_pretrained(tmp_path / "ours")  # which keeps what it does not know
    config.save_pretrained(tmp_path / "ours")
    assert models.classifier_settings(tmp_path / "ours")["step_separator"] == "\n\n"


def test_a_classifier_on_a_mesh_and_in_bfloat16(tmp_path):
    write_model(tmp_path / "reward", "qwen2", num_labels=1)
    write_model(tmp_path / "process", "qwen2", TOKEN)
    plan = Plan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    for name, load in (("reward", load_reward_model), ("process", load_process_model)):
        _, whole, _ = load(tmp_path / name)
        model, split, read_tokenizer = load(tmp_path / name, plan=plan)
        specs = models.classifier_specs(model, labels=whole["head"]["kernel"].shape[1], bias=name == "process")
        assert model.plan == plan
        assert jax.tree.map(lambda leaf: leaf.sharding, split) == plan.tree(specs)
        assert not split["trunk"]["embed"]["table"].is_fully_replicated
        equal(split, whole)
        half, low, _ = load(tmp_path / name, dtype="bfloat16", compute_dtype="float32")
        assert half.config.dtype == "float32"
        equal(low, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), whole))
    models.save_reward_model(tmp_path / "half", *load_reward_model(tmp_path / "reward", plan=plan), dtype="bfloat16")
    assert {weight.dtype for weight in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    models.save_process_model(tmp_path / "split", model, split, read_tokenizer, step_separator="\n")
    equal(load_process_model(tmp_path / "split")[1], whole)


def test_the_embeddings_are_tied_and_the_head_is_not(tmp_path):
    """Neither takes the place of the other, from the language model to the directory."""
    write_model(tmp_path / "policy", "qwen2", AutoModelForCausalLM)
    model, classifier, read_tokenizer, _ = models.load_classifier_start(tmp_path / "policy", key=jax.random.key(0))
    models.save_reward_model(tmp_path / "reward", model, classifier, read_tokenizer)
    tensors = load_file(tmp_path / "reward" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    np.testing.assert_array_equal(tensors["score.weight"].T, classifier["head"]["kernel"])
    np.testing.assert_array_equal(
        tensors["model.embed_tokens.weight"],
        load_file(tmp_path / "policy" / "model.safetensors")["model.embed_tokens.weight"],
    )
    close(theirs(read(tmp_path / "reward", SEQUENCE))[:, 0], np.asarray(scores(classifier, model)))


# --- the padding token ------------------------------------------------------------------------------------------------

TEXTS = ["w5 w6 w7 w3", "w8 w3", "w9 w10 w11 w12 w13 w3", "w4 w14 w3 w3"]  # each ends in w3


@pytest.mark.parametrize(
    ("special", "template", "padding"),
    [
        ({"pad_token": "w3", "bos_token": "w4"}, None, "w4"),
        ({"pad_token": None, "bos_token": "w4"}, None, "w4"),
        ({"pad_token": "w3", "bos_token": None, "additional_special_tokens": ["w21", "w20"]}, None, "w20"),
        ({"pad_token": "w3", "bos_token": "w3", "extra_special_tokens": ["w20", "w21"]}, "{{ 'w20' }}", "w21"),
        ({"pad_token": None, "bos_token": None}, None, "w1"),  # the unknown token, at last
        ({"pad_token": "w2", "bos_token": "w4"}, None, "w2"),  # its own, which is fine
    ],
)
def test_padded_rows_that_end_in_eos_score_the_same_in_transformers(tmp_path, saved, special, template, padding):
    model, classifier = saved
    own = tokenizer(**{"eos_token": "w3"} | special)
    own.chat_template = template
    pad = own.pad_token
    models.save_reward_model(tmp_path / "reward", model, classifier, own)
    assert own.pad_token == pad  # the caller's is left alone
    padded = AutoTokenizer.from_pretrained(tmp_path / "reward")
    assert (padded.pad_token, padded.eos_token) == (padding, "w3")
    reference = read(tmp_path / "reward", SEQUENCE)
    assert reference.config.pad_token_id == int(padding[1:])
    assert reference.config.eos_token_id == 3
    for side in ("right", "left"):
        padded.padding_side = side
        batch = padded(TEXTS, return_tensors="pt", padding=True)
        segments = batch["attention_mask"].numpy().astype(np.int32)
        tokens = batch["input_ids"].numpy().astype(np.int32)
        expected = theirs(reference, tokens, segments)[:, 0]
        close(scores(classifier, model, tokens, segments), expected)
        reference.config.pad_token_id = 3  # what it would have been: the score of another token
        assert np.abs(theirs(reference, tokens, segments)[:, 0] - expected).max() > 0.1
        reference.config.pad_token_id = int(padding[1:])


def test_a_tokenizer_with_nothing_to_pad_with_is_refused(tmp_path, saved):
    model, classifier = saved
    for pad in ("w3", None):
        own = tokenizer(eos_token="w3", unk_token="w3", pad_token=pad)
        with pytest.raises(
            ValueError, match=r"reward: transformers finds .* but its end-of-sequence token 'w3'; add one"
        ):
            models.save_reward_model(tmp_path / "reward", model, classifier, own)
    own.add_special_tokens({"pad_token": "w7"})
    models.save_reward_model(tmp_path / "reward", model, classifier, own)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    write_model(directory, "llama", num_labels=1, initializer_range=0.4)
    return load_reward_model(directory)[:2]


# --- starts and critics -----------------------------------------------------------------------------------------------


def test_training_starts_from_a_language_model_or_from_its_own_kind(tmp_path):
    write_model(tmp_path / "policy", "llama", AutoModelForCausalLM)
    write_model(tmp_path / "reward", "llama", num_labels=1)
    write_model(tmp_path / "process", "llama", TOKEN)
    plan = Plan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    policy, params, _ = models.load(tmp_path / "policy")
    for given, options in (
        (None, {"labels": 1}),
        (plan, {"labels": 2, "bias": True, "key": jax.random.key(0), "dtype": "bfloat16", "compute_dtype": "float32"}),
    ):
        model, classifier, read_tokenizer, fresh = models.load_classifier_start(
            tmp_path / "policy", plan=given, **options
        )
        labels, bias, dtype = options["labels"], "bias" in options, options.get("dtype", "float32")
        assert fresh
        assert len(read_tokenizer) == 48
        assert model == dataclasses.replace(models.trunk_model(policy), plan=given)
        specs = models.classifier_specs(model, labels=labels, bias=bias)
        assert shapes(classifier) == shapes(specs)
        assert {leaf.dtype for leaf in jax.tree.leaves(classifier)} == {jnp.dtype(dtype)}
        equal(
            classifier["trunk"], jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), models.trunk_params(params))
        )
        key = {} if given is None else {"key": jax.random.key(0)}
        equal(classifier["head"], models.init_head(model.config, labels=labels, bias=bias, dtype=dtype, **key))
        if given is not None:
            assert jax.tree.map(lambda leaf: leaf.sharding, classifier) == plan.tree(specs)

    for name, labels, load in (("reward", 1, load_reward_model), ("process", 2, load_process_model)):
        model, classifier, _, fresh = models.load_classifier_start(
            tmp_path / name, labels=labels, key=jax.random.key(0)
        )
        assert not fresh
        equal(classifier, load(tmp_path / name)[1])
    with pytest.raises(ValueError, match=r"process: a process reward model; a reward model starts from a language"):
        models.load_classifier_start(tmp_path / "process", labels=1)
    with pytest.raises(
        ValueError, match=r"reward: a reward model; a process reward model starts from a language model"
    ):
        models.load_classifier_start(tmp_path / "reward", labels=2)
    with pytest.raises(ValueError, match="labels=3: 1 for a reward model, 2 for a process"):
        models.load_classifier_start(tmp_path / "policy", labels=3)
    with pytest.raises(ValueError, match="bias=True: the head of a reward model has none"):
        models.load_classifier_start(tmp_path / "policy", labels=1, bias=True)


def test_a_gguf_file_starts_a_classifier_as_any_language_model(tmp_path, monkeypatch):
    """It is `load` that reads it; see `test_gguf.py`."""
    write_model(tmp_path / "policy", "llama", AutoModelForCausalLM)
    whole = models.load(tmp_path / "policy")
    (tmp_path / "policy.gguf").write_bytes(b"")
    seen = []
    monkeypatch.setattr("jaxrl_lm.models.classifiers.load", lambda path, **options: (seen.append(path), whole)[1])
    _, classifier, _, fresh = models.load_classifier_start(tmp_path / "policy.gguf")
    assert seen == [tmp_path / "policy.gguf"]
    assert fresh
    equal(classifier["trunk"], models.trunk_params(whole[1]))


def test_a_critic_starts_from_a_reward_model_with_its_head(tmp_path):
    write_model(tmp_path / "reward", "qwen2", num_labels=1)
    write_model(tmp_path / "policy", "qwen2", AutoModelForCausalLM)
    model, critic, _ = models.load_critic(tmp_path / "reward", compute_dtype="bfloat16")
    assert model.config.dtype == "bfloat16"
    assert shapes(critic) == shapes(models.critic_specs(model))
    equal(critic, load_reward_model(tmp_path / "reward")[1])
    assert np.abs(critic["head"]["kernel"]).max() > 0.1
    other, fresh, _ = models.load_critic(tmp_path / "policy")
    assert other.config == dataclasses.replace(model.config, dtype="float32")
    assert (np.asarray(fresh["head"]["kernel"]) == 0).all()
    write_model(tmp_path / "process", "qwen2", TOKEN)
    with pytest.raises(ValueError, match="process: a process reward model; a reward model starts from"):
        models.load_critic(tmp_path / "process")


# --- ensembles --------------------------------------------------------------------------------------------------------


def ensemble(classifier, count):
    """Members that differ, stacked."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(
            np.float32(leaf) * rng.uniform(0.5, 1.5, (count, *[1] * leaf.ndim)).astype(np.float32)
        ),
        classifier,
    )


def test_an_ensemble_is_the_directories_of_its_members(tmp_path, saved):
    model, classifier = saved
    many = ensemble(classifier, 2)
    models.save_ensemble(tmp_path / "many", model, many, tokenizer(eos_token="w3"), append_eos=True)
    assert sorted(place.name for place in (tmp_path / "many").iterdir()) == ["member_0", "member_1"]
    for number in range(2):
        _, member, _ = load_reward_model(tmp_path / "many" / f"member_{number}")
        equal(member, jax.tree.map(lambda leaf, number=number: leaf[number], many))
        found = theirs(read(tmp_path / "many" / f"member_{number}", SEQUENCE))[:, 0]
        close(scores(member, model), found)
    plan = Plan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    for given in (None, plan):
        again, stacked, _ = load_reward_models(tmp_path / "many", plan=given)
        assert again == dataclasses.replace(model, plan=given)
        equal(stacked, many)
        specs = models.stacked(models.critic_specs(model), 2)
        assert shapes(stacked) == shapes(specs)
    assert jax.tree.map(lambda leaf: leaf.sharding, stacked) == plan.tree(specs)
    assert models.classifier_settings(tmp_path / "many")["append_eos"] is True
    _, one, _ = load_reward_models(tmp_path / "many" / "member_1", dtype="bfloat16")
    equal(one, jax.tree.map(lambda leaf: leaf[1:2].astype(jnp.bfloat16), many))


def test_members_that_do_not_belong_together_are_refused(tmp_path, saved):
    model, classifier = saved
    many = tmp_path / "many"
    models.save_ensemble(many, model, ensemble(classifier, 3), tokenizer())
    with pytest.raises(FileExistsError, match="many: exists and is not empty"):
        models.save_ensemble(many, model, ensemble(classifier, 2), tokenizer())
    broken = ensemble(classifier, 2) | {"head": ensemble(classifier["head"], 3)}
    with pytest.raises(ValueError, match=r"many: the leaves' leading axes are of different sizes, \{2, 3\}"):
        models.save_ensemble(many, model, broken, tokenizer(), overwrite=True)
    assert len(list(many.iterdir())) == 3
    models.save_ensemble(many, model, ensemble(classifier, 2), tokenizer(), overwrite=True)
    assert len(list(many.iterdir())) == 2

    other = tokenizer(chat_template="{{ messages }}")
    for number, write, message in (
        (1, lambda place: edit(place, append_eos=True), "member_1: its append_eos differs from member_0's"),
        (1, lambda place: edit(place, rms_norm_eps=0.5), "member_1: its config differs from member_0's"),
        (1, lambda place: tokenizer(eos_token="w3").save_pretrained(place), "member_1: its special tokens differs"),
        (1, lambda place: other.save_pretrained(place), "member_1: its chat template differs"),
        (
            1,
            lambda place: with_tensors(place, score__weight=None),
            "member_1: the head is missing: no tensor score.wei",
        ),
        (0, shutil.rmtree, "many: has 1 directories member_*, and no member_0"),
    ):
        shutil.rmtree(many)
        models.save_ensemble(many, model, ensemble(classifier, 2), tokenizer())
        write(many / f"member_{number}")
        with pytest.raises(ValueError, match=message.replace("*", r"\*")):
            load_reward_models(many)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_no_classifier_of_the_kind_is_refused(tmp_path):
    write_model(tmp_path / "labels", "llama", num_labels=3)
    with pytest.raises(ValueError, match=r"a head with 3 labels \(id2label\); a reward model has 1"):
        load_reward_model(tmp_path / "labels")
    write_model(tmp_path / "default", "llama")
    with pytest.raises(ValueError, match="a head with 2 labels"):
        load_reward_model(tmp_path / "default")
    write_model(tmp_path / "one", "llama", TOKEN, num_labels=1)
    with pytest.raises(ValueError, match=r"a head with 1 labels .*; a process reward model has 2"):
        load_process_model(tmp_path / "one")
    write_model(tmp_path / "policy", "llama", AutoModelForCausalLM)
    for name, load, found, kind in (
        ("policy", load_reward_model, "LlamaForCausalLM", "reward model; supported: LlamaForSequenceClassification"),
        ("policy", load_process_model, "LlamaForCausalLM", "process reward model; supported: LlamaForTokenClass"),
        ("default", load_process_model, "LlamaForSequenceClassification", "process reward model"),
        ("one", load_reward_model, "LlamaForTokenClassification", "reward model"),
    ):
        with pytest.raises(ValueError, match=rf"architectures \['{found}'\] is no {kind}"):
            load(tmp_path / name)
    edit(tmp_path / "labels", model_type="qwen2", id2label=None)
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification.* each with its model_type"):
        load_reward_model(tmp_path / "labels")
    with pytest.raises(FileNotFoundError):
        load_reward_model(tmp_path / "absent")
    with pytest.raises(ValueError, match="architecture 'LlamaForSequenceClassification' is not supported"):
        models.load(tmp_path / "default")  # as a policy


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "reward",
            {"score__weight": None},
            "reward: the head is missing: no tensor score.weight, which a reward model",
        ),
        ("reward", {"score__weight": torch.zeros(1, 31)}, r"score.weight has shape \(1, 31\), expected \(1, 32\)"),
        ("reward", {"score__weight": torch.zeros(2, 32)}, r"score.weight has shape \(2, 32\), expected \(1, 32\)"),
        ("reward", {"score__bias": torch.zeros(1)}, "unknown tensors: score.bias"),
        ("reward", {"model__norm__weight": None}, "missing tensors: model.norm.weight"),
        ("process", {"score__weight": None}, "process: the head is missing: no tensor score.weight, which a process"),
        ("process", {"score__bias": None}, "process: the head is missing: no tensor score.bias"),
        ("process", {"score__bias": torch.zeros(3)}, r"score.bias has shape \(3,\), expected \(2,\)"),
    ],
)
def test_a_head_that_is_missing_or_of_another_shape_is_refused(tmp_path, directories, kind, changes, message):
    shutil.copytree(directories / kind, tmp_path / kind)
    with_tensors(tmp_path / kind, **changes)
    with pytest.raises(ValueError, match=message):
        {"reward": load_reward_model, "process": load_process_model}[kind](tmp_path / kind)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    directory = tmp_path_factory.mktemp("directories")
    write_model(directory / "reward", "llama", num_labels=1)
    write_model(directory / "process", "llama", TOKEN)
    return directory


def test_a_bias_without_its_setting_is_unknown(tmp_path, directories):
    shutil.copytree(directories / "process", tmp_path / "process")
    edit(tmp_path / "process", token_classification_bias=False)
    with pytest.raises(ValueError, match=r"unknown tensors: score\.bias"):
        load_process_model(tmp_path / "process")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"append_eos": "yes"}, "reward: append_eos='yes' in config.json: must be true or false"),
        ({"step_separator": ""}, "reward: step_separator='' in config.json: must be a text that is not empty"),
        ({"step_separator": 3}, "reward: step_separator=3 in config.json"),
    ],
)
def test_settings_of_another_type_are_refused(tmp_path, directories, settings, message):
    shutil.copytree(directories / "reward", tmp_path / "reward")
    edit(tmp_path / "reward", **settings)
    with pytest.raises(ValueError, match=message):
        models.classifier_settings(tmp_path / "reward")


def test_what_cannot_be_saved_leaves_what_was_there(tmp_path, saved):
    model, classifier = saved
    place = tmp_path / "reward"
    save = models.save_reward_model
    save(place, model, classifier, tokenizer())
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    with pytest.raises(FileExistsError):
        save(place, model, classifier, tokenizer())
    kernel, trunk = classifier["head"]["kernel"], classifier["trunk"]
    for head in ({"kernel": jnp.zeros((32, 2))}, {"kernel": kernel, "bias": jnp.zeros(1)}, {"bias": jnp.zeros(1)}):
        with pytest.raises(ValueError, match=r"the head of a reward model of this model is \{'kernel': \(32, 1\)\}"):
            save(place, model, {"trunk": trunk, "head": head}, tokenizer(), overwrite=True)
    extra = trunk | {"lm_head": trunk["embed"]}
    with pytest.raises(ValueError, match=r"parameters do not fit the model: lm_head\.table"):
        save(place, model, classifier | {"trunk": extra}, tokenizer(), overwrite=True)
    with pytest.raises(ValueError, match="reward: step_separator must not be empty"):
        models.save_process_model(place, model, classifier, tokenizer(), overwrite=True, step_separator="")
    with pytest.raises(ValueError, match="the head of a process reward model of this model is"):
        models.save_process_model(place, model, classifier, tokenizer(), overwrite=True, step_separator="\n")
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["reward"]
    save(place, model, jax.tree.map(jnp.zeros_like, classifier), tokenizer(), overwrite=True)
    assert all((np.asarray(leaf) == 0).all() for leaf in flatten(load_reward_model(place)[1]).values())
