"""Low-rank adapters as functions on trees (Hu et al., 2021): y = x W + scale · (x A) B.

The adapter is a tree of its own with the paths of the base's targeted layers, {"layers": {"attn": {"q_proj": {"lora_a",
"lora_b"}}}}, stacked over layers as the base is: optimisers, shardings and checkpoints treat it as any parameters, and
the base stays frozen and is the reference model. `attach` puts both into one tree, which says by its leaves that it is
adapted: one Model computes base, attached and merged weights. Files: `peft.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxrl_lm.models.config import LoraConfig
from jaxrl_lm.models.decoder import Model, decoder_specs, initial
from jaxrl_lm.models.layers import fold
from jaxrl_lm.types import Params

FACTORS = ("lora_a", "lora_b")


def specs(model: Model, config: LoraConfig) -> dict[str, Any]:
    """The declaration of every factor, in the shape of the adapter: A [layers, in, rank], B [layers, rank, out]."""
    return _factors(decoder_specs(model.config, config))


def _factors(tree: dict[str, Any]) -> dict[str, Any]:
    """The factors of a tree that holds other leaves too."""
    inner = {name: _factors(node) for name, node in tree.items() if isinstance(node, dict)}
    return {name: node for name, node in inner.items() if node} | {name: tree[name] for name in FACTORS if name in tree}


def init(key: Shaped[Array, ""], model: Model, config: LoraConfig, dtype: str = "float32") -> Params:
    """A fresh adapter: A uniform within ±1/√in, as in PEFT, and B zero, so that it changes no bit of the base."""
    return initial(specs(model, config), key, model.config.initializer_range, dtype)


def attach(base: Params, adapter: Params, config: LoraConfig) -> Params:
    """One tree for `hidden`, `score` and `prepare_decode`: the base with the factors beside their kernels.

    No merged weight is made: the scale goes into B here, which is small, and the layers add (x A) B. Gradients flow to
    what is differentiated: to the adapter alone where the base is not an argument. Raises ValueError, with the path,
    for an adapter that does not fit.
    """
    return _attach(base, adapter, config, "")


def _attach(base: Any, adapter: Params, config: LoraConfig, path: str) -> Params:
    if not adapter.keys() & set(FACTORS):
        unknown = [name for name in adapter if not isinstance(base.get(name), dict)]
        if unknown:
            raise ValueError(f"the adapter has {path}{unknown[0]}, the base has no such layers")
        return base | {name: _attach(base[name], node, config, f"{path}{name}.") for name, node in adapter.items()}
    if adapter.keys() != set(FACTORS) or "kernel" not in base:
        raise ValueError(f"{path[:-1]}: an adapter is {' and '.join(FACTORS)} beside a kernel, not {sorted(adapter)}")
    (*stack, inputs, outputs), a, b = base["kernel"].shape, *(adapter[name] for name in FACTORS)
    wanted = (*stack, inputs, config.rank), (*stack, config.rank, outputs)
    if (a.shape, b.shape) != wanted:
        raise ValueError(f"{path[:-1]}: the adapter has shapes {a.shape} and {b.shape}, expected {wanted}")
    return base | {"lora_a": a, "lora_b": b * config.scale}


def merge(base: Params, adapter: Params, config: LoraConfig) -> Params:
    """Plain weights, W + scale · A B in float32 and cast back to the base's dtype: for export as one model.

    Raises ValueError as `attach`.
    """
    return fold(attach(base, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), adapter), config))
