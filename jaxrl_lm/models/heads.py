"""Heads: numbers from the hidden states, for critics, reward models and process reward models.

A head is a tree of its own, {"kernel": [D, C]} with or without {"bias": [C]}, and reads the hidden states after the
last norm, as the unembedding does; so it works with tied embeddings, and beside a policy's weights (shared trunk) as
well as on a model's own, {"trunk": params, "head": head}, a *classifier*. Such a trunk holds no unembedding: it is a
model with tie_embeddings=True, which computes the same hidden states. A critic's values stand before their token
(`score.py`), scores of reward models after it. Their directories: `classifiers.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_lm.models.config import ModelConfig
from jaxrl_lm.models.decoder import Model, positions
from jaxrl_lm.models.layers import ParamSpec
from jaxrl_lm.types import Params


def head_specs(config: ModelConfig, *, labels: int = 1, bias: bool = False) -> dict[str, Any]:
    """The declaration of a head: rows of an unembedding, one a label.

    transformers has no bias in its sequence classification, and one in its token classification.
    """
    specs = {"kernel": ParamSpec((config.hidden_size, labels), ("vocab_embed", None), "zeros")}
    return specs | ({"bias": ParamSpec((labels,), (None,), "zeros")} if bias else {})


def value_specs(config: ModelConfig) -> dict[str, Any]:
    """The declaration of a critic's head: one label, without a bias as in TRL and transformers."""
    return head_specs(config)


def init_head(
    config: ModelConfig,
    *,
    labels: int = 1,
    bias: bool = False,
    key: Shaped[Array, ""] | None = None,
    dtype: str = "float32",
) -> Params:
    """A fresh head: zero, or with a key a kernel drawn from a normal of std 1 / √(D + 1) and a bias of zero.

    Zero leaves a shared trunk alone at first; the draw makes the members of an ensemble differ.
    Source of the draw: Stiennon et al., 2020. TRL and transformers draw with std initializer_range.
    """
    head = {name: jnp.zeros(spec.shape, dtype) for name, spec in head_specs(config, labels=labels, bias=bias).items()}
    if key is None:
        return head
    drawn = jax.random.normal(key, head["kernel"].shape, jnp.float32) / (config.hidden_size + 1) ** 0.5
    return head | {"kernel": drawn.astype(dtype)}


def init_value_head(config: ModelConfig, dtype: str = "float32") -> Params:
    """A critic's fresh head, zero: all values are 0, so the first advantages are returns."""
    return init_head(config, dtype=dtype)


def apply(head: Params, hidden: Float[Array, "*n D"]) -> Float[Array, "*n"] | Float[Array, "*n C"]:
    """The head's number at each hidden state, or its C numbers; float32 whatever the dtype of the states."""
    out = hidden.astype(jnp.float32) @ head["kernel"].astype(jnp.float32)
    if "bias" in head:
        out = out + jnp.broadcast_to(head["bias"].astype(jnp.float32), out.shape)
    return out[..., 0] if out.shape[-1] == 1 else out


def classifier_specs(model: Model, *, labels: int = 1, bias: bool = False) -> dict[str, Any]:
    """The declaration of a classifier of `trunk_model(model)`."""
    return {"trunk": trunk_model(model).specs, "head": head_specs(model.config, labels=labels, bias=bias)}


def critic_specs(model: Model) -> dict[str, Any]:
    """The declaration of a critic of `trunk_model(model)`: a classifier with one label."""
    return classifier_specs(model)


def stacked(specs: dict[str, Any], count: int) -> dict[str, Any]:
    """The declaration of `count` trees of the same declaration, stacked on a leading axis that every device has whole."""
    stack = lambda spec: ParamSpec((count, *spec.shape), (None, *spec.axes), spec.init)
    return jax.tree.map(stack, specs, is_leaf=lambda node: isinstance(node, ParamSpec))


def trunk_model(model: Model) -> Model:
    """The same model without an unembedding of its own."""
    return dataclasses.replace(model, config=dataclasses.replace(model.config, tie_embeddings=True))


def critic(model: Model, params: Params) -> tuple[Model, dict[str, Params]]:
    """A critic that starts from a language model's weights, with a fresh head; for `trunk_model(model)`, given too."""
    return trunk_model(model), {"trunk": trunk_params(params), "head": init_value_head(model.config)}


def trunk_params(params: Params) -> Params:
    """A language model's weights without an unembedding of their own."""
    return {name: leaf for name, leaf in params.items() if name != "lm_head"}


def row_scores(
    critic: dict[str, Params], tokens: Int[Array, "N T"], segment_ids: Int[Array, "N T"], *, model: Model
) -> Float[Array, "N"]:
    """A reward model's score of each row: the head at its last token that is no padding; 0 for a row of padding.

    Source: transformers' *ForSequenceClassification with one label. It finds the last token by the padding token's id;
    here it is the last column with a segment.
    """
    hidden = model.hidden(critic["trunk"], tokens, positions(segment_ids), segment_ids)
    real = segment_ids > 0
    last = jnp.max(jnp.where(real, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], 0), axis=1)
    states = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    scores = apply(critic["head"], jnp.where(real.any(1)[:, None], states, 0.0))
    return jnp.where(real.any(1), scores, 0.0)


def token_logits(
    classifier: dict[str, Params], tokens: Int[Array, "N T"], segment_ids: Int[Array, "N T"], *, model: Model
) -> Float[Array, "N T"] | Float[Array, "N T C"]:
    """The head at every token, which it has read, unlike a critic's values; 0 on padding. C numbers for C > 1 labels.

    Source: transformers' *ForTokenClassification.
    """
    hidden = model.hidden(classifier["trunk"], tokens, positions(segment_ids), segment_ids)
    real = segment_ids > 0
    # Selected before the head too: else a NaN of padding would reach the head's gradient.
    logits = apply(classifier["head"], jnp.where(real[:, :, None], hidden, 0.0))
    return jnp.where(real if logits.ndim == 2 else real[:, :, None], logits, 0.0)
