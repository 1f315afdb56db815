"""Directories of reward models and process reward models: Hugging Face's classification classes, in and out.

A reward model is a *ForSequenceClassification directory with one label, a process reward model a
*ForTokenClassification directory with two (0 wrong, 1 right, as TRL's PRMTrainer), an ensemble a directory that holds
member_0, member_1, …, each a reward model. A head that is missing or has another shape is an error, never a random one.
Beside transformers' keys config.json holds ours, `append_eos` and `step_separator`, which transformers keeps.
"""

import copy
import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Shaped
from transformers import PreTrainedTokenizerFast

from jaxrl_lm.distributed import place_tree
from jaxrl_lm.models.config import ModelConfig
from jaxrl_lm.models.decoder import Model, build
from jaxrl_lm.models.heads import classifier_specs, head_specs, init_head, stacked, trunk_model, trunk_params
from jaxrl_lm.models.hf import (
    check_vocabulary,
    free_place,
    load,
    load_tokenizer,
    replacing,
    resolve,
    special_ids,
    write_model,
)
from jaxrl_lm.models.hf_config import SEQUENCE, TOKEN, config_from_hf, config_to_hf, read_json
from jaxrl_lm.models.hf_files import Fetch, Safetensors
from jaxrl_lm.models.hf_table import Tensor, flatten, read_params, write_plan
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import Params

KERNEL, BIAS = "score.weight", "score.bias"  # transformers' names of the head
MEMBER = "member_"

Loaded = tuple[Model, dict[str, Params], PreTrainedTokenizerFast]


class Kind(NamedTuple):
    """A kind of classification directory."""

    name: str
    architectures: Mapping[str, str]  # by family
    labels: tuple[str, ...]
    bias: bool  # whether transformers' class has one, unless its config says otherwise


REWARD = Kind("reward model", SEQUENCE, ("reward",), bias=False)
PROCESS = Kind("process reward model", TOKEN, ("wrong", "right"), bias=True)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_reward_model(
    path_or_hub_id: str | os.PathLike,
    *,
    plan: Plan | None = None,
    dtype: str = "float32",
    compute_dtype: str | None = None,
) -> Loaded:
    """The model, {"trunk", "head"} in `dtype` and the tokenizer of a reward model's directory.

    Raises ValueError or FileNotFoundError as `load`, and for another architecture, number of labels or head.
    """
    return _load(resolve(path_or_hub_id), REWARD, plan, dtype, compute_dtype)


def load_process_model(
    path_or_hub_id: str | os.PathLike,
    *,
    plan: Plan | None = None,
    dtype: str = "float32",
    compute_dtype: str | None = None,
) -> Loaded:
    """The model, {"trunk", "head"} in `dtype` and the tokenizer of a process reward model's directory.

    The head has a bias unless config.json says token_classification_bias: false. Raises as `load_reward_model`.
    """
    return _load(resolve(path_or_hub_id), PROCESS, plan, dtype, compute_dtype)


def load_reward_models(
    path_or_hub_id: str | os.PathLike,
    *,
    plan: Plan | None = None,
    dtype: str = "float32",
    compute_dtype: str | None = None,
) -> Loaded:
    """The model, {"trunk", "head"} with every leaf stacked over K members, and the tokenizer; K = 1 for a single model.

    Raises as `load_reward_model`, and ValueError for members that are missing, or differ in anything but weights.
    """
    path = resolve(path_or_hub_id)
    places = members_of(path)
    members = []
    for place in places:
        model, params, tokenizer = _load(place, REWARD, plan, dtype, compute_dtype)
        facts = (model, tokenizer.get_vocab(), tokenizer.chat_template, special_ids(tokenizer))
        facts = (*facts, classifier_settings(place))
        if not members:
            first = facts
        elif facts != first:
            names = ("config", "vocabulary", "chat template", "special tokens", "append_eos")
            differs = next(name for name, a, b in zip(names, facts, first, strict=True) if a != b)
            raise ValueError(
                f"{place}: its {differs} differs from {places[0].name}'s; an ensemble shares all but weights"
            )
        members.append(params)
    layouts = _layouts(stacked(classifier_specs(model), len(members)), plan)
    return model, _stack(members, layouts), tokenizer


def members_of(path: Path) -> list[Path]:
    """The directories of an ensemble's members in order, or the directory itself, of a single model.

    Raises ValueError where a number is missing.
    """
    found = [place for place in path.glob(f"{MEMBER}*") if place.is_dir()]
    expected = [path / f"{MEMBER}{number}" for number in range(len(found))]
    absent = [place.name for place in expected if place not in found]
    if absent:
        raise ValueError(f"{path}: has {len(found)} directories {MEMBER}*, and no {absent[0]}; they count from 0")
    return expected or [path]


def classifier_settings(path_or_hub_id: str | os.PathLike) -> dict[str, Any]:
    """What a model was trained with: `append_eos` and `step_separator`, None where its config.json does not say; an
    ensemble's are those of its first member.

    Raises ValueError for values of another type.
    """
    place = members_of(resolve(path_or_hub_id))[0]
    raw = read_json(place / "config.json") if place.is_dir() else {}
    append, separator = raw.get("append_eos"), raw.get("step_separator")
    if append is not None and not isinstance(append, bool):
        raise ValueError(f"{place}: append_eos={append!r} in config.json: must be true or false")
    if separator is not None and not (isinstance(separator, str) and separator):
        raise ValueError(f"{place}: step_separator={separator!r} in config.json: must be a text that is not empty")
    return {"append_eos": append, "step_separator": separator}


def load_classifier_start(
    path_or_hub_id: str | os.PathLike,
    *,
    plan: Plan | None = None,
    dtype: str = "float32",
    compute_dtype: str | None = None,
    labels: int = 1,
    bias: bool = False,
    key: Shaped[Array, ""] | None = None,
) -> tuple[Model, dict[str, Params], PreTrainedTokenizerFast, bool]:
    """What training of a classifier starts from: the model without unembedding, {"trunk", "head"}, the tokenizer, and
    whether the head is fresh.

    `labels`: 1 for a reward model, 2 for a process reward model. A language model (directory, GGUF file, hub id) gives
    its trunk, with a fresh head (`init_head`, with `bias` and `key`); a directory of the same kind gives its own head
    as it is.

    Raises ValueError for a directory of the other kind, for other labels and for a reward model's bias, which
    transformers cannot hold; what `load` and `load_reward_model` raise.
    """
    kinds = {len(kind.labels): kind for kind in (REWARD, PROCESS)}
    if labels not in kinds:
        raise ValueError(f"labels={labels}: 1 for a reward model, 2 for a process reward model")
    kind = kinds[labels]
    if bias and not kind.bias:
        raise ValueError(f"bias={bias}: the head of a {kind.name} has none in transformers")
    path = resolve(path_or_hub_id)
    raw = read_json(path / "config.json") if path.is_dir() else {}
    for found in (REWARD, PROCESS):
        if set(raw.get("architectures") or ()) & set(found.architectures.values()):
            if found is not kind:
                raise ValueError(f"{path}: a {found.name}; a {kind.name} starts from a language model or its own kind")
            return *_load(path, kind, plan, dtype, compute_dtype), False
    model, params, tokenizer = load(path, plan=plan, dtype=dtype, compute_dtype=compute_dtype)
    head = init_head(model.config, labels=labels, bias=bias, key=key, dtype=dtype)
    head = place_tree(head, _layouts(head_specs(model.config, labels=labels, bias=bias), plan))
    return trunk_model(model), {"trunk": trunk_params(params), "head": head}, tokenizer, True


def load_critic(
    path_or_hub_id: str | os.PathLike,
    *,
    plan: Plan | None = None,
    dtype: str = "float32",
    compute_dtype: str | None = None,
) -> tuple[Model, dict[str, Params], PreTrainedTokenizerFast]:
    """A critic to start from, for `trunk_model`: a reward model with its head, or a language model with a head of zero;
    and its tokenizer.

    A reward model scores what it has read, a value stands before its token: the same head on the same states.
    Raises as `load_classifier_start`.
    """
    return load_classifier_start(path_or_hub_id, plan=plan, dtype=dtype, compute_dtype=compute_dtype)[:3]


def _load(path: Path, kind: Kind, plan: Plan | None, dtype: str, compute_dtype: str | None) -> Loaded:
    raw = read_json(path / "config.json") if path.is_dir() else {}
    found, supported = raw.get("architectures") or [], kind.architectures
    if found != [supported.get(raw.get("model_type"))]:
        raise ValueError(
            f"{path}: architectures {found} is no {kind.name}; supported: {', '.join(supported.values())}, each with "
            "its model_type"
        )
    labels, expected = raw.get("num_labels") or len(raw.get("id2label") or (0, 1)), len(kind.labels)
    if labels != expected:  # transformers' default is two labels
        raise ValueError(f"{path}: a head with {labels} labels (id2label); a {kind.name} has {expected}")
    config = config_from_hf(raw | {"architectures": None, "tie_word_embeddings": True})
    bias = kind.bias and bool(raw.get("token_classification_bias", True))
    tokenizer, source = load_tokenizer(path), _WithHead(path, kind, config, bias)
    check_vocabulary(config.vocab_size, tokenizer, path)
    model = build(dataclasses.replace(config, dtype=compute_dtype or dtype), plan=plan)
    layouts = _layouts(classifier_specs(model, labels=labels, bias=bias), plan)
    trunk = read_params(source, model.specs, layouts["trunk"], dtype)
    head = {name: value.astype(jnp.dtype(dtype)) for name, value in source.head().items()}
    return model, {"trunk": trunk, "head": place_tree(head, layouts["head"])}, tokenizer


def _layouts(specs: dict[str, Any], plan: Plan | None) -> dict[str, Any]:
    if plan is not None:
        return plan.tree(specs)
    device = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda _: device, specs, is_leaf=lambda node: hasattr(node, "axes"))


def _stack(members: list[dict[str, Params]], layouts: dict[str, Any]) -> dict[str, Params]:
    """One tree of stacked leaves; each leaf of the members goes as soon as it is stacked."""
    leaves = [jax.tree.leaves(member) for member in members]
    structure = jax.tree.structure(members[0])
    members.clear()
    out = []
    for number, layout in enumerate(jax.tree.leaves(layouts)):
        out.append(jax.device_put(jnp.stack([own[number] for own in leaves]), layout))
        for own in leaves:
            own[number] = None
    return jax.tree.unflatten(structure, out)


class _WithHead(Safetensors):
    """The tensors of a decoder, the head set aside."""

    def __init__(self, directory: Path, kind: Kind, config: ModelConfig, bias: bool):
        super().__init__(directory)
        labels, found = len(kind.labels), super().shapes()
        self._head = {KERNEL: (labels, config.hidden_size)} | ({BIAS: (labels,)} if bias else {})
        for name, shape in self._head.items():
            if name not in found:
                raise ValueError(f"{directory}: the head is missing: no tensor {name}, which a {kind.name} needs")
            if found[name] != shape:
                raise ValueError(f"{directory}: {name} has shape {found[name]}, expected {shape}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in super().shapes().items() if name not in self._head}

    def head(self) -> dict[str, np.ndarray]:
        """kernel [D, C], bias [C]."""
        names = {KERNEL: "kernel", BIAS: "bias"}
        whole = lambda name, shape: self.read(name, (slice(None),) * len(shape))
        return {names[name]: np.ascontiguousarray(whole(name, shape).T) for name, shape in self._head.items()}


# --- saving -----------------------------------------------------------------------------------------------------------


def save_reward_model(
    directory: str | os.PathLike,
    model: Model,
    params: dict[str, Params],
    tokenizer: PreTrainedTokenizerFast,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    append_eos: bool = False,
) -> None:
    """Writes {"trunk", "head"} as a directory that AutoModelForSequenceClassification reads, with one label.

    `append_eos`: whether plain texts are scored with an end-of-sequence token after them. transformers finds the last
    token of a row by the padding token's id; where the tokenizer has no padding token, or its eos is it, the
    directory's tokenizer and config get another special token for it. Written as `save` does.

    Raises ValueError where no other special token is there, and for parameters or a head that do not fit.
    """
    _save(free_place(directory, overwrite=overwrite), REWARD, model, params, tokenizer, dtype, append_eos=append_eos)


def save_process_model(
    directory: str | os.PathLike,
    model: Model,
    params: dict[str, Params],
    tokenizer: PreTrainedTokenizerFast,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    step_separator: str,
) -> None:
    """Writes {"trunk", "head"} as a directory that AutoModelForTokenClassification reads, labels 0 wrong and 1 right.

    A head without a bias is written with one of zero, as transformers' class has one. Raises as `save_reward_model`.
    """
    target = free_place(directory, overwrite=overwrite)
    if not step_separator:
        raise ValueError(f"{target}: step_separator must not be empty")
    _save(target, PROCESS, model, params, tokenizer, dtype, step_separator=step_separator)


def save_ensemble(
    directory: str | os.PathLike,
    model: Model,
    stacked_params: dict[str, Params],
    tokenizer: PreTrainedTokenizerFast,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    append_eos: bool = False,
) -> None:
    """Writes reward models whose leaves are stacked on a leading axis K as K directories member_0, member_1, …

    All of them or none. Raises as `save_reward_model`, and ValueError where leading axes differ.
    """
    target = free_place(directory, overwrite=overwrite)
    counts = {leaf.shape[0] if leaf.ndim else None for leaf in jax.tree.leaves(stacked_params)}
    if len(counts) != 1 or None in counts:
        raise ValueError(f"{target}: the leaves' leading axes are of different sizes, {counts}: no stacked ensemble")
    with replacing(target) as partial:
        for number in range(counts.pop()):
            place = partial / f"{MEMBER}{number}"
            place.mkdir()
            member = jax.tree.map(lambda leaf, number=number: leaf[number], stacked_params)
            write_model(place, *_contents(REWARD, model, member, tokenizer, dtype, target, append_eos=append_eos))


def _save(target: Path, kind: Kind, model, params, tokenizer, dtype: str | None, **settings: Any) -> None:
    contents = _contents(kind, model, params, tokenizer, dtype, target, **settings)
    with replacing(target) as partial:
        write_model(partial, *contents)


def _contents(
    kind: Kind,
    model: Model,
    params: dict[str, Params],
    tokenizer: PreTrainedTokenizerFast,
    dtype: str | None,
    target: Path,
    **settings: Any,
) -> tuple[dict[str, Any], PreTrainedTokenizerFast, list[tuple[Tensor, Fetch]], str]:
    """The config, tokenizer, tensors and dtype of a directory. Nothing is written before all of it fits."""
    trunk = trunk_model(model)
    check_vocabulary(trunk.config.vocab_size, tokenizer, target)
    dtype = dtype or str(flatten(params["trunk"])["embed.table"].dtype)
    padded = _with_padding(tokenizer, target)
    config = config_to_hf(trunk.config, dtype=dtype, special_ids=special_ids(padded)) | {
        "architectures": [kind.architectures[trunk.config.family]],
        "id2label": {str(number): name for number, name in enumerate(kind.labels)},
        "label2id": {name: number for number, name in enumerate(kind.labels)},
    }
    tensors = [*write_plan(params["trunk"], trunk.specs, dtype), *_head_tensors(kind, model, params["head"], dtype)]
    return config | settings, padded, tensors, dtype


def _head_tensors(kind: Kind, model: Model, head: Params, dtype: str) -> list[tuple[Tensor, Fetch]]:
    width, labels = model.config.hidden_size, len(kind.labels)
    shapes = {name: tuple(leaf.shape) for name, leaf in head.items()}
    fits = ({"kernel": (width, labels)}, {"kernel": (width, labels), "bias": (labels,)})
    if shapes not in fits[: 1 + kind.bias]:
        raise ValueError(f"head {shapes}: the head of a {kind.name} of this model is {fits[kind.bias]}")
    value = lambda leaf: np.ascontiguousarray(np.asarray(leaf).T, dtype=jnp.dtype(dtype))
    kernel = (Tensor(KERNEL, None, (labels, width)), functools.partial(value, head["kernel"]))
    bias = (Tensor(BIAS, None, (labels,)), functools.partial(value, head.get("bias", np.zeros(labels))))
    return [kernel, bias] if kind.bias else [kernel]


def _with_padding(tokenizer: PreTrainedTokenizerFast, target: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, or a copy with a padding token that ends no row: its bos, another special token, at last its unk."""
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return tokenizer
    added = (token.content for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special)
    written = tokenizer.chat_template or ""  # a template's tokens may end a row
    others = [name for name in added if name not in written and name != tokenizer.unk_token]
    for name in (tokenizer.bos_token, *others, tokenizer.unk_token):
        if name is not None and name != tokenizer.eos_token:
            padded = copy.deepcopy(tokenizer)
            padded.pad_token = name
            return padded
    raise ValueError(
        f"{target}: transformers finds the end of a row by its padding token, and the tokenizer has none but its "
        f"end-of-sequence token {tokenizer.eos_token!r}; add one: tokenizer.add_special_tokens({{'pad_token': '<pad>'}}), "
        "with an embedding row for it"
    )
