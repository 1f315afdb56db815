"""Models as pure functions, and their way to and from Hugging Face directories, GGUF files and PEFT adapters."""

from jaxrl_lm.models.classifiers import (
    classifier_settings,
    load_classifier_start,
    load_critic,
    load_process_model,
    load_reward_model,
    load_reward_models,
    save_ensemble,
    save_process_model,
    save_reward_model,
)
from jaxrl_lm.models.config import LinearRope, Llama3Rope, LoraConfig, ModelConfig
from jaxrl_lm.models.decode import BLOCK, decode_specs, extend, fuse_layers, next_logits, prefill, room_for
from jaxrl_lm.models.decoder import Model, build, decoder_specs, positions
from jaxrl_lm.models.heads import (
    classifier_specs,
    critic_specs,
    head_specs,
    init_head,
    init_value_head,
    row_scores,
    stacked,
    token_logits,
    trunk_model,
    trunk_params,
    value_specs,
)
from jaxrl_lm.models.hf import eos_token_ids, generation_config, load, save
from jaxrl_lm.models.kv_cache import Cache
from jaxrl_lm.models.lora import attach, merge
from jaxrl_lm.models.lora import init as init_lora
from jaxrl_lm.models.lora import specs as lora_specs
from jaxrl_lm.models.peft import read_adapter, save_adapter

__all__ = [
    "BLOCK",
    "Cache",
    "LinearRope",
    "Llama3Rope",
    "LoraConfig",
    "Model",
    "ModelConfig",
    "attach",
    "build",
    "classifier_settings",
    "classifier_specs",
    "critic_specs",
    "decode_specs",
    "decoder_specs",
    "eos_token_ids",
    "extend",
    "fuse_layers",
    "generation_config",
    "head_specs",
    "init_head",
    "init_lora",
    "init_value_head",
    "load",
    "load_classifier_start",
    "load_critic",
    "load_process_model",
    "load_reward_model",
    "load_reward_models",
    "lora_specs",
    "merge",
    "next_logits",
    "positions",
    "prefill",
    "read_adapter",
    "room_for",
    "row_scores",
    "save",
    "save_adapter",
    "save_ensemble",
    "save_process_model",
    "save_reward_model",
    "stacked",
    "token_logits",
    "trunk_model",
    "trunk_params",
    "value_specs",
]
