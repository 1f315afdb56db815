"""Reading GGUF files that are written here with the gguf package, against transformers and its tokenizers."""

import json
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from jaxrl_lm.models import LinearRope, Llama3Rope, ModelConfig, hf
from jaxrl_lm.models.decoder import positions
from jaxrl_lm.models.gguf import GGUFFile
from jaxrl_lm.models.hf_table import TABLE, flatten
from jaxrl_lm.models.layers import rope_frequencies
from jaxrl_lm.sharding import Plan, make_mesh

TEXTS = ["hello low lower", "  two  spaces\n\n\ttab ", "12345 + 678 = 3.14", "naïve 你好 😀", "don't <|end|>low", ""]
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
ROWS = 320  # of the embedding; a multiple of Q8_0's block


def smollm_tokenizer():
    """A byte-level BPE tokenizer with SmolLM's way of cutting text, built independently of gguf.py."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello low lower lowest newer wider " * 4], trainer)
    return backend


def torch_model(family, **settings):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](
        vocab_size=ROWS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
        **settings,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(0.3 * torch.randn_like(weight))
    return model


def interleave(weight, heads):
    """llama.cpp's order of the rows of q and k: the two halves of a head alternate (convert_hf_to_gguf.py)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write(path, model, *, kind="F32", tokens=None, metadata=None, drop=(), extra=None, pre="smollm"):
    """Writes the model as llama.cpp would, matrices in `kind`, and returns it with the rounded weights."""
    config, quantisation = model.config, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_value_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (metadata or {}).items():
        getattr(writer, f"add_{key}")(value)
    write_tokenizer(writer, tokens or smollm_tokenizer(), pre)

    state = model.state_dict()
    for names in TABLE.values():
        for layer in range(config.num_hidden_layers):
            name = names.gguf.format(layer)
            if names.hf.format(layer) not in state or name in drop or (layer and "{}" not in names.hf):
                continue
            if names.hf == "lm_head.weight" and config.tie_word_embeddings:
                continue
            weight = state[names.hf.format(layer)]
            value = weight.numpy()
            if config.model_type == "llama" and ("attn_q" in name or "attn_k" in name):
                heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
                value = interleave(value, heads)
            if value.ndim == 2 and kind != "F32":
                data = gguf.quants.quantize(value, quantisation)
                writer.add_tensor(name, data, raw_dtype=quantisation)
                # Rows keep their own blocks, so rounding before and after the interleaving is the same.
                rounded = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), quantisation), quantisation)
                weight.copy_(torch.tensor(rounded))
            else:
                writer.add_tensor(name, value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_tokenizer(writer, backend, pre):
    vocabulary = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    special = {"<|start|>", "<|end|>"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


CASES = {
    "llama tied": ("llama", {"tie_word_embeddings": True}, "F32"),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}, "F32"),
    "llama Q8_0": ("llama", {}, "Q8_0"),
    "qwen2 Q8_0": ("qwen2", {"tie_word_embeddings": True}, "Q8_0"),
    "qwen3 BF16": ("qwen3", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}, "BF16"),
}


@pytest.mark.parametrize(("family", "settings", "kind"), CASES.values(), ids=CASES.keys())
def test_logits_match_transformers(tmp_path, family, settings, kind):
    reference = write(tmp_path / "m.gguf", torch_model(family, **settings), kind=kind)
    model, params, _ = hf.load(tmp_path / "m.gguf")
    assert model.config.tie_embeddings == reference.config.tie_word_embeddings
    assert model.config.rms_norm_eps == reference.config.rms_norm_eps
    ids = np.random.default_rng(0).integers(0, ROWS, (2, 9))
    with torch.no_grad():
        expected = reference(torch.tensor(ids)).logits.numpy()
    segment_ids = jnp.ones(ids.shape, jnp.int32)

    @jax.jit
    def run(params, tokens):
        hidden = model.hidden(params, tokens, positions(segment_ids), segment_ids)
        return model.unembed(params, hidden)

    assert np.abs(expected).max() > 1.0
    np.testing.assert_allclose(run(params, jnp.asarray(ids, jnp.int32)), expected, atol=1e-4, rtol=1e-5)


def test_mesh_and_export(tmp_path):
    reference = write(tmp_path / "m.gguf", torch_model("llama"), kind="Q8_0")
    _, whole, tokenizer = hf.load(tmp_path / "m.gguf")
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    model, params, _ = hf.load(tmp_path / "m.gguf", mesh=mesh, dtype="bfloat16")
    shardings = flatten(Plan(mesh).tree(model.specs))
    for path, leaf in flatten(params).items():
        assert leaf.sharding == shardings[path], path
        np.testing.assert_array_equal(leaf, flatten(whole)[path].astype(jnp.bfloat16))

    hf.save(tmp_path / "out", model, whole, tokenizer, generation_config=hf.generation_config(tmp_path / "m.gguf"))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), reference.parameters(), strict=True))
    assert loaded.generation_config.eos_token_id == 1
    assert_same_tokens(hf.load(tmp_path / "out")[2], smollm_tokenizer())


def assert_same_tokens(tokenizer, backend):
    for text in TEXTS:
        assert tokenizer(text).input_ids == backend.encode(text).ids, text
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizer(tmp_path):
    write(tmp_path / "m.gguf", torch_model("llama"))
    tokenizer = GGUFFile(tmp_path / "m.gguf").tokenizer()
    assert_same_tokens(tokenizer, smollm_tokenizer())
    assert tokenizer("<|end|>low").input_ids[0] == 1
    assert tokenizer.decode([0, 1], skip_special_tokens=True) == ""
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|start|>", 1, 1)
    chat = [{"role": "user", "content": "low"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|start|>low<|end|>"
    generation = hf.generation_config(tmp_path / "m.gguf")
    assert generation == {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1}
    assert hf.eos_token_ids(generation, tokenizer) == (1,)


def test_tokenizers_cut_text_as_their_models_do(tmp_path):
    def cut(pre, text):
        write(tmp_path / f"{pre}.gguf", torch_model("llama"), pre=pre)
        backend = GGUFFile(tmp_path / f"{pre}.gguf").tokenizer().backend_tokenizer
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

    assert cut("smollm", "is 1234 don't\n\nx") == ["is", "Ġ", "1", "2", "3", "4", "Ġdon", "'t", "Ċ", "Ċ", "x"]
    assert cut("llama-bpe", "is 1234 DON'T\n\nx") == ["is", "Ġ", "123", "4", "ĠDON", "'T", "ĊĊ", "x"]
    assert cut("qwen2", "is 1234 DON'T\n\nx") == ["is", "Ġ", "1", "2", "3", "4", "ĠDON", "'T", "ĊĊ", "x"]
    with pytest.raises(
        ValueError, match="pre-tokenizer 'falcon' is not supported; supported: smollm, llama-bpe, qwen2"
    ):
        cut("falcon", "")


def test_beginning_of_sequence_is_added_where_the_file_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_add_bos_token", lambda self, value: self.add_bool("tokenizer.ggml.add_bos_token", True)
    )
    write(tmp_path / "m.gguf", torch_model("llama"))
    tokenizer = GGUFFile(tmp_path / "m.gguf").tokenizer()
    assert tokenizer("low").input_ids[0] == 0
    assert tokenizer("low", add_special_tokens=False).input_ids[0] != 0


def test_rope(tmp_path):
    settings = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
    write(tmp_path / "linear.gguf", torch_model("llama"), metadata=settings)
    assert GGUFFile(tmp_path / "linear.gguf").config().rope_scaling == LinearRope(4.0)

    plain = ModelConfig(
        vocab_size=ROWS, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
    )
    scaled = Llama3Rope(8.0, 1.0, 4.0, 8192)
    factors = rope_frequencies(plain) / rope_frequencies(ModelConfig(**vars(plain) | {"rope_scaling": scaled}))
    assert factors.max() == 8.0
    factors = factors.astype(np.float32)
    write(tmp_path / "llama3.gguf", torch_model("llama"), extra={"rope_freqs.weight": factors})
    model, _, _ = hf.load(tmp_path / "llama3.gguf")
    assert model.config.rope_scaling == scaled
    write(tmp_path / "other.gguf", torch_model("llama"), extra={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight are not those of rope type llama3"):
        hf.load(tmp_path / "other.gguf")
    write(tmp_path / "yarn.gguf", torch_model("llama"), metadata={"rope_scaling_type": gguf.RopeScalingType.YARN})
    with pytest.raises(ValueError, match="rope type 'yarn' is not supported"):
        hf.load(tmp_path / "yarn.gguf")


def test_files_that_do_not_fit(tmp_path):
    path = tmp_path / "m.gguf"
    model = torch_model("llama")
    write(path, model, drop={"blk.1.ffn_up.weight"}, extra={"blk.0.strange": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match=r"missing tensors: blk\.1\.ffn_up\.weight; unknown tensors: blk\.0\.strange"):
        hf.load(path)
    write(path, model, metadata={"expert_count": 8})
    with pytest.raises(ValueError, match="mixture of experts"):
        hf.load(path)
    write(path, model, metadata={"rope_dimension_count": 8})
    with pytest.raises(ValueError, match=r"rope\.dimension_count=8"):
        hf.load(path)
    write(path, model)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"m\.gguf: not a whole GGUF file"):
        hf.load(path)
    path.write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"m\.gguf: not a whole GGUF file"):
        hf.load(path)
    writer = gguf.GGUFWriter(path, "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'falcon' is not supported; supported: llama, qwen2, qwen3"):
        hf.load(path)


def test_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxrl-lm\[gguf\]'"):
        GGUFFile(tmp_path / "m.gguf")
