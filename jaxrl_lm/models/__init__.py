"""Models as pure functions, and their way to and from Hugging Face directories, GGUF files and PEFT adapters."""

from jaxrl_lm.models.config import LinearRope, Llama3Rope, LoraConfig, ModelConfig
from jaxrl_lm.models.decoder import Cache, Model, build, decode_specs, decoder_specs, positions, unstack_layers
from jaxrl_lm.models.heads import critic_specs, init_value_head, load_reward_model, row_scores, trunk_model, value_specs
from jaxrl_lm.models.hf import eos_token_ids, generation_config, load, save
from jaxrl_lm.models.lora import attach, merge
from jaxrl_lm.models.lora import init as init_lora
from jaxrl_lm.models.lora import specs as lora_specs
from jaxrl_lm.models.peft import read_adapter, save_adapter

__all__ = [
    "Cache",
    "LinearRope",
    "Llama3Rope",
    "LoraConfig",
    "Model",
    "ModelConfig",
    "attach",
    "build",
    "critic_specs",
    "decode_specs",
    "decoder_specs",
    "eos_token_ids",
    "generation_config",
    "init_lora",
    "init_value_head",
    "load",
    "load_reward_model",
    "lora_specs",
    "merge",
    "positions",
    "read_adapter",
    "row_scores",
    "save",
    "save_adapter",
    "trunk_model",
    "unstack_layers",
    "value_specs",
]
