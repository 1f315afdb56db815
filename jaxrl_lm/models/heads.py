"""Value heads: one number a token from the hidden states, for critics and reward models.

A head is a tree of its own, {"kernel": [D, 1]}, and reads the hidden states after the last norm, as the unembedding
does; so it works with tied embeddings, and beside a policy's weights (shared trunk) as well as on a critic's own,
{"trunk": params, "head": head}. Such a trunk holds no unembedding: it is a model with tie_embeddings=True, which
computes the same hidden states. Values at the columns of tokens: `score.py`.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int
from transformers import PreTrainedTokenizerFast

from jaxrl_lm.models.config import ModelConfig
from jaxrl_lm.models.decoder import Model, build, positions
from jaxrl_lm.models.hf import check_vocabulary, load_tokenizer, resolve
from jaxrl_lm.models.hf_config import ARCHITECTURES, config_from_hf, read_json
from jaxrl_lm.models.hf_files import Safetensors
from jaxrl_lm.models.hf_table import read_params
from jaxrl_lm.models.layers import ParamSpec
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import Params

SCORE = "score.weight"  # transformers' name of the head


def value_specs(config: ModelConfig) -> dict[str, Any]:
    """The declaration of a head: one row of an unembedding, without a bias as in TRL and transformers."""
    return {"kernel": ParamSpec((config.hidden_size, 1), ("vocab_embed", None), "zeros")}


def init_value_head(config: ModelConfig, dtype: str = "float32") -> Params:
    """A fresh head, zero: all values are 0, so the first advantages are returns and a shared trunk is left alone.

    TRL draws it from a normal of std initializer_range instead, which adds noise of that size times |hidden|.
    """
    return {name: jnp.zeros(spec.shape, dtype) for name, spec in value_specs(config).items()}


def apply(head: Params, hidden: Float[Array, "*n D"]) -> Float[Array, "*n"]:
    """The head's number at each hidden state; float32 whatever the dtype of the states."""
    return (hidden.astype(jnp.float32) @ head["kernel"].astype(jnp.float32))[..., 0]


def critic_specs(model: Model) -> dict[str, Any]:
    """The declaration of a critic of `trunk_model(model)`."""
    return {"trunk": trunk_model(model).specs, "head": value_specs(model.config)}


def trunk_model(model: Model) -> Model:
    """The same model without an unembedding of its own."""
    return dataclasses.replace(model, config=dataclasses.replace(model.config, tie_embeddings=True))


def critic(model: Model, params: Params) -> tuple[Model, dict[str, Params]]:
    """A critic that starts from a language model's weights, with a fresh head; for `trunk_model(model)`, given too."""
    trunk = {name: leaf for name, leaf in params.items() if name != "lm_head"}
    return trunk_model(model), {"trunk": trunk, "head": init_value_head(model.config)}


def row_scores(
    critic: dict[str, Params], tokens: Int[Array, "N T"], segment_ids: Int[Array, "N T"], *, model: Model
) -> Float[Array, "N"]:
    """A reward model's score of each row: the head at its last token that is no padding; 0 for a row of padding.

    Source: transformers' *ForSequenceClassification with one label. It finds the last token by the padding token's id;
    here it is the last column with a segment.
    """
    hidden, _ = model.hidden(critic["trunk"], tokens, positions(segment_ids), segment_ids)
    real = segment_ids > 0
    last = jnp.max(jnp.where(real, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], 0), axis=1)
    scores = apply(critic["head"], jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
    return jnp.where(real.any(1), scores, 0.0)


def load_reward_model(
    path_or_hub_id: str | os.PathLike,
    *,
    plan: Plan | None = None,
    dtype: str = "float32",
    compute_dtype: str | None = None,
) -> tuple[Model, dict[str, Params], PreTrainedTokenizerFast]:
    """The model, {"trunk", "head"} in `dtype` and the tokenizer of a sequence-classification directory with one label.

    Raises ValueError or FileNotFoundError as `load`, and for another architecture or number of labels.
    """
    path = resolve(path_or_hub_id)
    raw = read_json(path / "config.json") if path.is_dir() else {}
    kinds = [name.replace("ForCausalLM", "ForSequenceClassification") for name in ARCHITECTURES.values()]
    found = raw.get("architectures") or []
    if len(found) != 1 or found[0] not in kinds:
        raise ValueError(f"{path}: architectures {found} is no reward model; supported: {', '.join(kinds)}")
    labels = raw.get("num_labels") or len(raw.get("id2label") or (0, 1))  # transformers' default is two labels
    if labels != 1:
        raise ValueError(f"{path}: a head with {labels} labels (id2label); a reward model has one")
    config = config_from_hf(raw | {"architectures": None, "tie_word_embeddings": True})
    tokenizer, source = load_tokenizer(path), _WithHead(path, config)
    check_vocabulary(config.vocab_size, tokenizer, path)
    model = build(dataclasses.replace(config, dtype=compute_dtype or dtype), plan=plan)
    head = {"kernel": source.head().astype(jnp.dtype(dtype))}
    device = SingleDeviceSharding(jax.devices()[0])
    layouts = plan.tree(critic_specs(model)) if plan else jax.tree.map(lambda _: device, critic_specs(model))
    trunk = read_params(source, model.specs, layouts["trunk"], dtype)
    return model, {"trunk": trunk, "head": jax.device_put(head, layouts["head"])}, tokenizer


class _WithHead(Safetensors):
    """The tensors of a decoder, the head set aside."""

    def __init__(self, directory, config: ModelConfig):
        super().__init__(directory)
        shape = super().shapes().get(SCORE)
        if shape != (1, config.hidden_size):
            raise ValueError(f"{directory}: {SCORE} has shape {shape}, expected {(1, config.hidden_size)}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in super().shapes().items() if name != SCORE}

    def head(self) -> np.ndarray:
        """[D, 1]."""
        return np.ascontiguousarray(self.read(SCORE, (slice(None), slice(None))).T)
