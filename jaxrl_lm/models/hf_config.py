"""Hugging Face's config.json to `ModelConfig` and back, for model_type llama, qwen2, qwen3 and mistral.

A setting that would change the arithmetic and that our model does not have is an error that names it; nothing is
dropped in silence. Defaults of absent keys are those of the family's transformers class. Dropout is not read: we train
without. Next to read: `hf_table.py` (names of tensors), `hf.py` (load and save).
"""

import json
import os
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from jaxrl_lm.models.config import LinearRope, Llama3Rope, ModelConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
SEQUENCE, TOKEN = (
    {family: name.replace("CausalLM", f"{kind}Classification") for family, name in ARCHITECTURES.items()}
    for kind in ("Sequence", "Token")
)
"""The architectures of reward models and of process reward models by family; `config_from_hf` reads neither."""

ROPE_TYPES = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
"""Supported types of rope, and the numbers that each needs."""

# Settings of other models that change the arithmetic, each with the values under which it does not.
_INACTIVE = {
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "no_rope_layers": (None, []),
    "quantization_config": (None, {}),
}

# Settings that a family's transformers class does not read: if they are on, the file means another model.
_UNREAD = {
    "llama": ("use_sliding_window", "qk_norm", "use_qk_norm"),
    "mistral": ("attention_bias", "mlp_bias", "qk_norm", "use_qk_norm", "use_sliding_window"),
    "qwen2": ("mlp_bias", "qk_norm", "use_qk_norm"),
    "qwen3": ("mlp_bias",),
}


def config_from_hf(source: dict[str, Any] | str | os.PathLike) -> ModelConfig:
    """The ModelConfig of a config.json, given as a dict or as the directory that holds it.

    Raises ValueError naming an unsupported model_type, architecture, rope type or setting.
    """
    raw = source if isinstance(source, dict) else read_json(Path(source) / "config.json")
    family = _family(raw)
    _refuse_unsupported(family, raw)
    # A null means "absent" in the files of older transformers; newer classes refuse it for some keys.
    given = {key: value for key, value in raw.items() if value is not None or key in ("sliding_window", "eos_token_id")}
    full = CONFIG_MAPPING[family](**given)
    if full.hidden_act != "silu":
        raise ValueError(f"hidden_act={full.hidden_act!r} is not supported: only silu is")
    head_dim = getattr(full, "head_dim", None) if raw.get("head_dim", ...) is not None else None
    rope_theta, rope_scaling = _rope(full)
    biased = bool(getattr(full, "attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=full.vocab_size,
        hidden_size=full.hidden_size,
        intermediate_size=full.intermediate_size,
        num_layers=full.num_hidden_layers,
        num_heads=full.num_attention_heads,
        num_kv_heads=full.num_key_value_heads,
        head_dim=head_dim or full.hidden_size // full.num_attention_heads,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=full.rms_norm_eps,
        tie_embeddings=full.tie_word_embeddings,
        qkv_bias=family == "qwen2" or biased,
        output_bias=family != "qwen2" and biased,
        mlp_bias=bool(getattr(full, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(family, raw, full),
        max_position_embeddings=full.max_position_embeddings,
        initializer_range=full.initializer_range,
    )


def config_to_hf(config: ModelConfig, *, dtype: str = "float32", special_ids: dict[str, Any] | None = None) -> dict:
    """The config.json of a model whose weights are stored as `dtype`.

    `special_ids` are bos_token_id, eos_token_id and pad_token_id. Rope and dtype are written in the forms of
    transformers 5 and of 4. Raises ValueError for a model that the family's transformers class cannot express.
    """
    _refuse_inexpressible(config)
    scaling, rope = _rope_to_hf(config)
    out = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.family in ("llama", "qwen3"):
        out["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        out["mlp_bias"] = config.mlp_bias
    if config.family == "mistral":
        out["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3"):
        windowed = config.sliding_window is not None
        out["use_sliding_window"] = windowed
        out["sliding_window"] = config.sliding_window
        # The layers from this one on see the window; layer_types says the same to newer versions.
        out["max_window_layers"] = 0 if windowed else config.num_layers
        out["layer_types"] = ["sliding_attention" if windowed else "full_attention"] * config.num_layers
    return out | (special_ids or {})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises FileNotFoundError or ValueError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {path.parent} is not a model directory in Hugging Face format")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); the file is damaged") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _family(raw: dict[str, Any]) -> str:
    family = raw.get("model_type")
    supported = ", ".join(ARCHITECTURES)
    if family not in ARCHITECTURES:
        raise ValueError(f"model_type {family!r} is not supported; supported: {supported}")
    for name in raw.get("architectures") or ():
        if name != ARCHITECTURES[family]:
            raise ValueError(
                f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES.values())} "
                f"(model_type {supported})"
            )
    return family


def _refuse_unsupported(family: str, raw: dict[str, Any]) -> None:
    ropes = [raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}]
    for rope in ropes:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(f"rope_parameters by layer type ({', '.join(rope)}) are not supported: use one for all")
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        absent = [name for name in ROPE_TYPES[kind] if name not in rope]
        if absent:
            raise ValueError(f"rope type {kind!r} needs {absent[0]}, which config.json does not give")
    for settings in (raw, *ropes):
        for key, inactive in _INACTIVE.items():
            if settings.get(key) not in inactive:
                raise ValueError(f"setting {key}={settings[key]!r} is not supported: it changes the arithmetic")
    for key in _UNREAD[family]:
        if raw.get(key):
            raise ValueError(f"setting {key}={raw[key]!r} is not supported for model_type {family!r}")


def _rope(full: PreTrainedConfig) -> tuple[float, Llama3Rope | LinearRope | None]:
    rope = full.rope_parameters
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    if kind == "linear":
        return theta, LinearRope(float(rope["factor"]))
    if kind == "llama3":
        factors = [float(rope[name]) for name in ROPE_TYPES["llama3"]]
        return theta, Llama3Rope(*factors, int(rope["original_max_position_embeddings"]))
    return theta, None


def _rope_to_hf(config: ModelConfig) -> tuple[dict | None, dict]:
    """rope_scaling as transformers 4 reads it, and rope_parameters as 5 does."""
    match config.rope_scaling:
        case None:
            scaling = None
        case LinearRope(factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3Rope(factor, low, high, original):
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return scaling, {"rope_type": "default"} | (scaling or {}) | {"rope_theta": config.rope_theta}


def _sliding_window(family: str, raw: dict[str, Any], full: PreTrainedConfig) -> int | None:
    """The window that every layer has, or None. Raises where layers differ."""
    window = getattr(full, "sliding_window", None) if family != "llama" else None
    kinds = raw.get("layer_types") or getattr(full, "layer_types", None)
    if kinds is None:  # a family without kinds of layer
        return window
    if len(set(kinds)) > 1:
        raise ValueError(
            f"a mix of attention layers is not supported: layer_types has {', '.join(sorted(set(kinds)))} "
            f"(max_window_layers={raw.get('max_window_layers')}); all layers must be of one kind"
        )
    if kinds[0] == "full_attention" and (family != "mistral" or window is None):
        return None
    if kinds[0] == "sliding_attention" and window is not None:
        return window
    raise ValueError(
        f"layer_types {kinds[0]!r} with sliding_window={window} is not supported for model_type {family!r}"
    )


def _refuse_inexpressible(config: ModelConfig) -> None:
    if config.family not in ARCHITECTURES:
        raise ValueError(f"family {config.family!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    qwen2, qwen3, llama = (config.family == name for name in ("qwen2", "qwen3", "llama"))
    wrong = {
        "qkv_bias": (config.qkv_bias and config.family == "mistral") or (qwen2 and not config.qkv_bias),
        "output_bias": config.output_bias != (config.qkv_bias if llama or qwen3 else False),
        "mlp_bias": config.mlp_bias and not llama,
        "qk_norm": config.qk_norm != qwen3,
        "sliding_window": config.sliding_window is not None and llama,
    }
    for name, bad in wrong.items():
        if bad:
            value = getattr(config, name)
            raise ValueError(
                f"{name}={value} cannot be written as model_type {config.family!r}: transformers has no such model"
            )
