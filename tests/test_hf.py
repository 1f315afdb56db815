"""Loading and saving Hugging Face directories, against transformers and torch on small random models."""

import json
import logging
import shutil

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from jaxrl_lm.models import LinearRope, Llama3Rope, hf, hf_config
from jaxrl_lm.models.decoder import positions
from jaxrl_lm.models.hf_config import config_from_hf, config_to_hf
from jaxrl_lm.models.hf_table import flatten
from jaxrl_lm.sharding import Plan, make_mesh

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": {"model_type": "llama"},
    "llama tied, head_dim 12": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 12},
    "llama llama3 rope": {"model_type": "llama", "rope_parameters": LLAMA3, "num_hidden_layers": 3},
    "llama linear rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
    "llama biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 tied, window": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 0,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "qwen3 biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "mistral window": {"model_type": "mistral", "sliding_window": 4},
    "mistral tied": {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": True},
}


def tiny_tokenizer(size=96):
    names = ["<unk>", "<bos>", "<eos>", *(f"w{number}" for number in range(3, size))]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}w3 {{ m['content'] }} w4 {% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", chat_template=template
    )


def torch_model(**settings):
    """A random model of transformers, its norms and biases random too."""
    settings = SMALL | settings
    torch.manual_seed(0)
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(0.3 * torch.randn_like(weight))
    return model


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request, tmp_path_factory):
    """A torch model and the directory that transformers wrote of it."""
    directory = tmp_path_factory.mktemp("model")
    model = torch_model(**request.param)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return model, directory


@pytest.fixture
def directory(tmp_path):
    """A tied llama of our own to break."""
    path = tmp_path / "model"
    torch_model(**CASES["llama tied, head_dim 12"]).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def batch():
    """Token ids and attention mask, rows left-padded."""
    ids = np.random.default_rng(0).integers(3, 96, (4, 12))
    mask = np.arange(12)[None] >= np.array([0, 3, 7, 11])[:, None]
    return np.where(mask, ids, 0), mask


def torch_logits(model):
    ids, mask = batch()
    places = np.where(mask, np.cumsum(mask, axis=1) - 1, 0)
    with torch.no_grad():
        out = model(torch.tensor(ids), attention_mask=torch.tensor(mask).long(), position_ids=torch.tensor(places))
    return out.logits.numpy()[mask]


def our_logits(model, params):
    ids, mask = batch()
    segment_ids = jnp.asarray(mask, jnp.int32)

    @jax.jit
    def run(params, ids, segment_ids):
        hidden = model.hidden(params, ids, positions(segment_ids), segment_ids)
        return model.unembed(params, hidden)

    return np.asarray(run(params, jnp.asarray(ids, jnp.int32), segment_ids))[mask]


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def edit_json(path, **changes):
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def edit_tensors(directory, edit):
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


# --- agreement with transformers --------------------------------------------------------------------------------------


def test_logits_and_round_trip(case, tmp_path):
    reference, source = case
    model, params, tokenizer = hf.load(source)
    expected = torch_logits(reference)
    assert np.abs(expected).max() > 1.0
    np.testing.assert_allclose(our_logits(model, params), expected, atol=1e-4, rtol=1e-5)

    hf.save(tmp_path / "out", model, params, tokenizer)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", dtype="auto"
    )
    assert not any(info.values()), info
    assert loaded.dtype == torch.float32
    np.testing.assert_array_equal(torch_logits(loaded.eval()), expected)

    again, params_again, _ = hf.load(tmp_path / "out")
    assert again == model
    assert_same(params_again, params)


def test_sharded_files(tmp_path):
    reference = torch_model(model_type="llama")
    tiny_tokenizer().save_pretrained(tmp_path / "sharded")
    reference.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    model, params, tokenizer = hf.load(tmp_path / "sharded")
    np.testing.assert_array_equal(params["embed"]["table"], reference.model.embed_tokens.weight.detach().numpy())

    hf.save(tmp_path / "out", model, params, tokenizer, max_shard_bytes=60_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 62_000 for file in files)
    assert_same(hf.load(tmp_path / "out")[1], params)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files(tmp_path, dtype):
    reference = torch_model(model_type="llama").to(getattr(torch, dtype))
    reference.save_pretrained(tmp_path / "half")
    tiny_tokenizer().save_pretrained(tmp_path / "half")
    model, params, tokenizer = hf.load(tmp_path / "half")
    kernel = reference.model.layers[1].mlp.down_proj.weight.detach().float().numpy().T
    assert params["layers"]["mlp"]["down_proj"]["kernel"].dtype == jnp.float32
    np.testing.assert_array_equal(params["layers"]["mlp"]["down_proj"]["kernel"][1], kernel)

    # Back to the file's dtype without loss, by save(dtype=) and by load(dtype=).
    hf.save(tmp_path / "a", model, params, tokenizer, dtype=dtype)
    half, half_params, _ = hf.load(tmp_path / "half", dtype=dtype, compute_dtype="float32")
    assert half.config.dtype == "float32"
    hf.save(tmp_path / "b", half, half_params, tokenizer)
    for name in "ab":
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert loaded.dtype == reference.dtype
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), reference.parameters(), strict=True))


def test_load_on_a_mesh(tmp_path):
    directory = tmp_path / "model"
    torch_model(**CASES["qwen2"]).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    _, whole, _ = hf.load(directory)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    model, params, tokenizer = hf.load(directory, mesh=mesh)
    assert model.plan == Plan(mesh)
    expected = flatten(Plan(mesh).tree(model.specs))
    for path, leaf in flatten(params).items():
        assert leaf.sharding == expected[path], path
    assert not params["layers"]["attn"]["q_proj"]["kernel"].is_fully_replicated
    assert_same(params, whole)
    hf.save(tmp_path / "out", model, params, tokenizer)
    assert_same(hf.load(tmp_path / "out")[1], whole)

    rules = dict(Plan(mesh).rules) | {"embed": None}
    _, params, _ = hf.load(directory, mesh=mesh, rules=rules)
    assert params["layers"]["mlp"]["up_proj"]["kernel"].sharding.spec[2] == "tensor"
    with pytest.raises(ValueError, match="rules need a mesh"):
        hf.load(directory, rules=rules)
    with pytest.raises(ValueError, match="not both"):
        hf.load(directory, mesh=mesh, plan=Plan(mesh))


# --- config.json ------------------------------------------------------------------------------------------------------


def test_config_reads_both_forms_of_rope():
    old = {"model_type": "llama", **SMALL, "rope_theta": 500.0}
    new = {"model_type": "llama", **SMALL, "rope_parameters": LLAMA3}
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    expected = Llama3Rope(8.0, 1.0, 4.0, 32)
    assert config_from_hf(old).rope_theta == 500.0
    assert config_from_hf(old).rope_scaling is None
    assert config_from_hf(old | {"rope_scaling": scaling}) == config_from_hf(new)
    assert config_from_hf(new).rope_scaling == expected
    linear = config_from_hf(old | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert linear.rope_scaling == LinearRope(2.0)
    assert linear.rope_theta == 500.0


def test_config_defaults_are_those_of_the_family():
    absent = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    llama = config_from_hf({"model_type": "llama", **absent, "head_dim": None})
    assert (llama.num_kv_heads, llama.head_dim, llama.tie_embeddings) == (4, 16, False)
    qwen3 = {"model_type": "qwen3", **SMALL}
    assert config_from_hf(qwen3).head_dim == 128
    assert config_from_hf(qwen3 | {"head_dim": None}).head_dim == 16
    assert config_from_hf({"model_type": "mistral", **SMALL}).sliding_window == 4096
    assert config_from_hf({"model_type": "qwen2", **SMALL, "sliding_window": 8}).sliding_window is None
    assert config_from_hf({"model_type": "qwen2", **SMALL}).qkv_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, qwen2, qwen3, mistral"),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architecture 'LlamaForTokenClassification'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope type 'yarn' .*supported: default, linear, llama3",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "by layer type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias=True .*'mistral'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "mix of attention layers"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            "mix of attention layers .*max_window_layers=1",
        ),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types 'chunked_attention'"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({"model_type": "llama", **SMALL} | changes)


@pytest.mark.parametrize(
    ("family", "option"),
    [("llama", "qk_norm"), ("qwen2", "mlp_bias"), ("qwen3", "output_bias"), ("mistral", "qkv_bias")],
)
def test_config_that_no_family_expresses(family, option):
    config = config_from_hf({"model_type": family, **SMALL})
    with pytest.raises(ValueError, match=f"{option}=True cannot be written as model_type '{family}'"):
        config_to_hf(hf_config.ModelConfig(**{**vars(config), option: True}))


# --- files that do not fit --------------------------------------------------------------------------------------------


def test_tensors_that_do_not_fit_are_listed(directory):
    def edit(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.extra"] = torch.zeros(2)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(80, 63)

    edit_tensors(directory, edit)
    with pytest.raises(ValueError, match="does not fit its config") as error:
        hf.load(directory)
    assert "missing tensors: model.norm.weight;" in str(error.value)
    assert "unknown tensors: model.layers.0.self_attn.extra;" in str(error.value)
    assert "model.layers.1.mlp.up_proj.weight has shape (80, 63), expected (80, 64)" in str(error.value)


def test_only_ten_names_are_listed(directory):
    edit_tensors(directory, lambda tensors: [tensors.pop(name) for name in list(tensors)[:13]])
    with pytest.raises(ValueError, match="and 3 more"):
        hf.load(directory)


def test_ignorable_buffers(directory):
    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)

    _, params, _ = hf.load(directory)
    edit_tensors(directory, edit)
    assert_same(hf.load(directory)[1], params)


def test_output_table_of_a_tied_checkpoint(directory):
    def copy(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def change(tensors):
        tensors["lm_head.weight"][95, 63] += 1.0

    edit_tensors(directory, copy)
    assert "lm_head" not in hf.load(directory)[1]
    edit_tensors(directory, change)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        hf.load(directory)


def test_tensors_that_are_not_floats(directory):
    edit_tensors(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=r"model.norm.weight has dtype I8"):
        hf.load(directory)


@pytest.mark.parametrize("keep", [4, 200, -100])
def test_truncated_file(directory, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors: not a whole safetensors file"):
        hf.load(directory)


def test_missing_files(directory):
    for name, message in [
        ("model.safetensors", "neither model.safetensors nor"),
        ("config.json", "config.json: no such file"),
    ]:
        (directory / name).rename(directory / "away")
        with pytest.raises(FileNotFoundError, match=message):
            hf.load(directory)
        (directory / "away").rename(directory / name)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"{directory}: no tokenizer"):
        hf.load(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{directory}: the tokenizer cannot be read"):
        hf.load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        hf.load(directory)


def test_incomplete_shards(directory):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-00002.safetensors: no such file"):
        hf.load(directory)
    index["weight_map"] = {"model.nothing": "other.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"not there: model.nothing \(other.safetensors\)"):
        hf.load(directory)


def test_vocabulary(directory, caplog):
    big = tiny_tokenizer()
    big.add_tokens(["<extra>"])
    big.save_pretrained(directory)
    with pytest.raises(ValueError, match="the tokenizer has 97 tokens, the embedding only 96 rows"):
        hf.load(directory)
    tiny_tokenizer(90).save_pretrained(directory)
    with caplog.at_level(logging.INFO, logger="jaxrl_lm.models.hf"):
        hf.load(directory)
    assert "96 embedding rows for 90 tokens" in caplog.text


def test_paths_and_hub_ids(directory, monkeypatch):
    for path in (directory / "absent", "./absent", "absent.gguf", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="no such file or directory"):
            hf.load(path)
    with pytest.raises(ValueError, match="a file that is not GGUF"):
        hf.load(directory / "model.safetensors")

    def fetch(name, allow_patterns):
        assert name == "someone/model"
        assert "*.safetensors" in allow_patterns
        assert "*.bin" not in allow_patterns
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert hf.resolve("someone/model") == directory

    def unreachable(name, allow_patterns):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"someone/model: .*hub could not give it \(no route to host\)"):
        hf.load("someone/model")


# --- end of sequence, export ------------------------------------------------------------------------------------------


def test_eos_token_ids(directory):
    tokenizer = hf.load_tokenizer(directory)
    assert hf.generation_config(directory)["eos_token_id"] == 2
    assert hf.eos_token_ids(hf.generation_config(directory), tokenizer) == (2,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 7], "top_k": 20}))
    assert hf.eos_token_ids(hf.generation_config(directory), tokenizer) == (5, 2, 7)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": None, "top_k": 20}))
    assert hf.generation_config(directory) == {"bos_token_id": 1, "eos_token_id": 2, "top_k": 20}
    (directory / "generation_config.json").unlink()
    edit_json(directory / "config.json", eos_token_id=9)
    assert hf.eos_token_ids(hf.generation_config(directory), tokenizer) == (9, 2)
    tokenizer.eos_token = None
    assert hf.eos_token_ids({"eos_token_id": 0}, tokenizer) == (0,)
    with pytest.raises(ValueError, match="no end-of-sequence token is known"):
        hf.eos_token_ids({}, tokenizer)


def test_tokenizer_is_kept(directory, tmp_path):
    model, params, tokenizer = hf.load(directory)
    hf.save(tmp_path / "out", model, params, tokenizer, generation_config={"eos_token_id": [2, 7], "top_k": 20})
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "w9 w10"}]
    assert saved("w5 nothing w95").input_ids == [5, 0, 95] == tokenizer("w5 nothing w95").input_ids
    assert saved.apply_chat_template(chat, tokenize=False) == "w3 w9 w10 w4 "
    assert saved.eos_token == "<eos>"
    assert hf.generation_config(tmp_path / "out") == {"bos_token_id": 1, "eos_token_id": [2, 7], "top_k": 20}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [2, 7])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [2, 7]


def test_save_replaces_only_when_asked(directory, tmp_path):
    model, params, tokenizer = hf.load(directory)
    out = tmp_path / "out"
    out.mkdir()
    hf.save(out, model, params, tokenizer)  # an empty directory is no obstacle
    with pytest.raises(FileExistsError, match="out: exists and is not empty"):
        hf.save(out, model, params, tokenizer)
    (out / "stale").touch()
    double = jax.tree.map(lambda leaf: 2 * leaf, params)
    hf.save(out, model, double, tokenizer, overwrite=True)
    assert not (out / "stale").exists()
    assert_same(hf.load(out)[1], double)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_failed_save_leaves_what_was_there(directory, tmp_path, monkeypatch):
    model, params, tokenizer = hf.load(directory)

    def full(path, *args):
        path.joinpath("model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    hf.save(tmp_path / "out", model, params, tokenizer)
    monkeypatch.setattr(hf, "write_shards", full)
    with pytest.raises(OSError, match="No space left"):
        hf.save(tmp_path / "new" / "deep", model, params, tokenizer)
    with pytest.raises(OSError, match="No space left"):
        hf.save(tmp_path / "out", model, params, tokenizer, overwrite=True)
    assert not any((tmp_path / "new").iterdir())
    shutil.rmtree(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert_same(hf.load(tmp_path / "out")[1], params)


def test_save_refuses_parameters_that_do_not_fit(directory, tmp_path):
    model, params, tokenizer = hf.load(directory)
    with pytest.raises(ValueError, match=r"parameters do not fit the model: final_norm.scale"):
        hf.save(tmp_path / "out", model, {k: v for k, v in params.items() if k != "final_norm"}, tokenizer)
    wrong = params | {"final_norm": {"scale": jnp.ones(63)}}
    with pytest.raises(ValueError, match=r"final_norm.scale has shape \(63,\), the model declares \(64,\)"):
        hf.save(tmp_path / "out", model, wrong, tokenizer)
    with pytest.raises(ValueError, match="the tokenizer has 97 tokens"):
        hf.save(tmp_path / "out", model, params, tiny_tokenizer(97))
    assert not (tmp_path / "out").exists()
