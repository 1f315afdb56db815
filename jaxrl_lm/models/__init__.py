"""Models as pure functions, and their way to and from Hugging Face directories and GGUF files."""

from jaxrl_lm.models.config import LinearRope, Llama3Rope, ModelConfig
from jaxrl_lm.models.decoder import Cache, Model, build, decode_specs, decoder_specs, positions, unstack_layers
from jaxrl_lm.models.hf import eos_token_ids, generation_config, load, save

__all__ = [
    "Cache",
    "LinearRope",
    "Llama3Rope",
    "Model",
    "ModelConfig",
    "build",
    "decode_specs",
    "decoder_specs",
    "eos_token_ids",
    "generation_config",
    "load",
    "positions",
    "save",
    "unstack_layers",
]
