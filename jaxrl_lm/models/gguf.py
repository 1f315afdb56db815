"""Reading a GGUF file: config, weights (dequantised row by row) and tokenizer. Needs the extra `gguf`.

Architectures llama (which Mistral files name too), qwen2 and qwen3. llama.cpp interleaves the two halves of each
rotated head in the rows of q and k of llama files; that is undone here. Names of tensors: `hf_table.py`.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_lm.models.config import LinearRope, Llama3Rope, ModelConfig
from jaxrl_lm.models.hf_table import Index
from jaxrl_lm.models.layers import rope_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's rope scaling, as one divisor a frequency
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama.cpp's token types

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level])


# tokenizer.ggml.pre: how text is cut before merging, as in the tokenizer.json of the models that introduced each.
PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_QWEN2_SPLIT),
}


class GGUFFile:
    """A GGUF file: a source of tensors (`hf_table.Source`), and what its metadata says.

    Raises ImportError naming the extra, ValueError naming a damaged file or an unsupported architecture.
    """

    kind: Literal["gguf"] = "gguf"

    def __init__(self, path: str | os.PathLike):
        try:
            import gguf
        except ImportError as error:
            raise ImportError(f"{path}: reading GGUF needs an extra: pip install 'jaxrl-lm[gguf]'") from error
        self._dequantize = gguf.quants.dequantize
        self.where = str(path)
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            reader = gguf.GGUFReader(path)
            self._values = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
            raise ValueError(f"{path}: not a whole GGUF file ({error}); fetch it again") from error
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self._values.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path}: architecture {self.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )

    def _get(self, key: str, default: Any = ...) -> Any:
        """Metadata of the model ('.x') or of the tokenizer (a full key)."""
        key = f"{self.architecture}{key}" if key.startswith(".") else key
        if key not in self._values and default is ...:
            raise ValueError(f"{self.where}: metadata {key} is missing")
        return self._values.get(key, default)

    # --- weights ------------------------------------------------------------------------------------------------------
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by name, outermost dimension first; without the rope factors, which the config takes up."""
        return {name: tuple(map(int, t.shape[::-1])) for name, t in self.tensors.items() if name != _ROPE_FACTORS}

    def read(self, name: str, index: Index) -> np.ndarray:
        """That part of a tensor, dequantised to float32; only the rows asked for are."""
        tensor = self.tensors[name]
        rows = tensor.data
        if self.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = self._get(".attention.head_count")
            if ".attn_k." in name:
                heads = self._get(".attention.head_count_kv", heads)
            # As stored: head, position in the half, half. A row's bytes move with it, whatever the quantisation.
            rows = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
        rows, rest = (rows, index) if rows.ndim == 1 else (rows[index[0]], (slice(None), *index[1:]))
        try:
            return self._dequantize(np.ascontiguousarray(rows), tensor.tensor_type)[rest]
        except NotImplementedError as error:
            raise ValueError(f"{self.where}: tensor {name} cannot be dequantised: {error}") from error

    # --- config -------------------------------------------------------------------------------------------------------
    def config(self) -> ModelConfig:
        """The model's config. Raises ValueError naming an unsupported rope type or missing metadata."""
        heads, width = self._get(".attention.head_count"), self._get(".embedding_length")
        kv_heads = self._get(".attention.head_count_kv", heads)
        if not (isinstance(heads, int) and isinstance(kv_heads, int)):
            raise ValueError(f"{self.where}: head counts that differ between layers are not supported")
        head_dim = self._get(".attention.key_length", width // heads)
        for key, expected in ((".rope.dimension_count", head_dim), (".attention.value_length", head_dim)):
            if self._get(key, expected) != expected:
                raise ValueError(f"{self.where}: {key[1:]}={self._get(key)} with head size {head_dim} is not supported")
        if self._get(".attention.sliding_window", 0):
            raise ValueError(f"{self.where}: sliding-window attention in GGUF files is not supported")
        if self._get(".expert_count", 0):
            raise ValueError(
                f"{self.where}: a mixture of experts (expert_count={self._get('.expert_count')}) is not supported"
            )
        biased = {name for name in self.tensors if name.endswith(".bias")}
        config = ModelConfig(
            family=self.architecture,
            vocab_size=self.shapes().get("token_embd.weight", (0,))[0],
            hidden_size=width,
            intermediate_size=self._get(".feed_forward_length"),
            num_layers=self._get(".block_count"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=float(self._get(".rope.freq_base", 10_000.0)),
            rms_norm_eps=_shortest(self._get(".attention.layer_norm_rms_epsilon")),
            tie_embeddings="output.weight" not in self.tensors,
            qkv_bias=self.architecture == "qwen2" or "blk.0.attn_q.bias" in biased,
            output_bias="blk.0.attn_output.bias" in biased,
            mlp_bias="blk.0.ffn_gate.bias" in biased,
            qk_norm=self.architecture == "qwen3",
            max_position_embeddings=self._get(".context_length"),
        )
        return self._with_rope(config)

    def _with_rope(self, config: ModelConfig) -> ModelConfig:
        kind = self._get(".rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise ValueError(
                f"{self.where}: rope type {kind!r} is not supported; supported: none, linear, llama3's factors"
            )
        if kind == "linear":
            scaling = LinearRope(float(self._get(".rope.scaling.factor")))
            return dataclasses.replace(config, rope_scaling=scaling)
        if _ROPE_FACTORS not in self.tensors:
            return config
        # The file has Llama 3.1's divisors but not the numbers they come from: take the published ones and check.
        factors = np.asarray(self.tensors[_ROPE_FACTORS].data, np.float64)
        scaled = dataclasses.replace(config, rope_scaling=Llama3Rope(float(factors.max()), 1.0, 4.0, 8192))
        if not np.allclose(rope_frequencies(config) / rope_frequencies(scaled), factors, rtol=1e-4):
            raise ValueError(f"{self.where}: the divisors in {_ROPE_FACTORS} are not those of rope type llama3")
        return scaled

    def generation_config(self) -> dict[str, Any]:
        """The special ids, under transformers' names; end of text and end of turn are both eos."""
        ids = [self._get(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot")]
        ids = list(dict.fromkeys(number for number in ids if number is not None))
        out = {"eos_token_id": ids if len(ids) > 1 else next(iter(ids), None)}
        out["bos_token_id"] = self._get("tokenizer.ggml.bos_token_id", None)
        out["pad_token_id"] = self._get("tokenizer.ggml.padding_token_id", None)
        return {name: value for name, value in out.items() if value is not None}

    # --- tokenizer ----------------------------------------------------------------------------------------------------
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The byte-level BPE tokenizer in the file, with its special tokens and chat template.

        Raises ValueError naming a tokenizer model or pre-tokenizer that is not supported.
        """
        model, pre = self._get("tokenizer.ggml.model"), self._get("tokenizer.ggml.pre", None)
        if model != "gpt2":
            raise ValueError(
                f"{self.where}: tokenizer model {model!r} is not supported; supported: gpt2 (byte-level BPE)"
            )
        if pre not in PRE_TOKENIZERS:
            raise ValueError(
                f"{self.where}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
            )
        tokens = self._get("tokenizer.ggml.tokens")
        types = self._get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        merges = [tuple(merge.split(" ")) for merge in self._get("tokenizer.ggml.merges")]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        # Llama 3's own tokenizer takes a whole word that is a token before it tries the merges.
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
        backend.normalizer = normalizers.NFC() if pre == "qwen2" else None
        backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
        backend.decoder = decoders.ByteLevel()
        for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            chosen = [token for token, its in zip(tokens, types, strict=True) if its == kind]
            add = backend.add_special_tokens if special else backend.add_tokens
            add([AddedToken(token, normalized=False, special=special) for token in chosen])
        named = self._named_tokens(tokens)
        if self._get("tokenizer.ggml.add_bos_token", False):
            bos = named["bos_token"]
            start = (bos, vocabulary[bos])
            backend.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[start]
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            clean_up_tokenization_spaces=False,
            model_max_length=self._get(".context_length"),
            chat_template=self._get("tokenizer.chat_template", None),
            **named,
        )

    def _named_tokens(self, tokens: list[str]) -> dict[str, str | None]:
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {ours: self._get(f"tokenizer.ggml.{theirs}_token_id", None) for ours, theirs in keys.items()}
        return {name: None if number is None else tokens[number] for name, number in ids.items()}


def _shortest(value: float) -> float:
    """The decimal that a float32 was written from: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))
