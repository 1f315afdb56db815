"""The strict session: 8 CPU devices, warnings are errors, implicit rank promotion raises, a key used twice raises.

Shapes are checked by jaxtyping and beartype (`--jaxtyping-packages` in pyproject.toml).
"""

import dataclasses
import os
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Programs here are compiled for a second's use: LLVM's optimisation costs more than it saves, and so do XLA's fusion
# emitters. JAX 0.12 has no flag for them, and ends at one that it does not know. Subprocesses inherit it.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """XLA's results are kept while the tests of a file run: for files that make whole runs of the same steps."""
    import tiny_run

    with tiny_run.compile_cache(tmp_path_factory.getbasetemp() / "xla"):
        yield


@pytest.fixture(scope="session")
def tiny_config():
    """A small decoder with every part of the family in it."""
    from jaxrl_lm.models import ModelConfig

    return ModelConfig(
        family="qwen3",
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qkv_bias=True,
        qk_norm=True,
        initializer_range=0.3,
    )


@pytest.fixture(scope="module")
def model(tiny_config):
    """The small decoder with two layers; a file that needs another model has its own fixture of this name."""
    from jaxrl_lm.models import build

    return build(dataclasses.replace(tiny_config, num_layers=2))


@pytest.fixture(scope="module")
def params(model):
    """Weights that all count, of the file's model."""
    from tiny_engine import random_params

    return random_params(model)


@pytest.fixture(scope="module")
def weights(model, params):
    """The same, as generation reads them."""
    from jaxrl_lm.generate import prepare_decode

    return prepare_decode(params, model=model)
