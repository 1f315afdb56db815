"""THE table between our parameters and the tensors of Hugging Face and GGUF files, and the walk along it, both ways.

Torch and GGUF keep a matrix as [out, in], we as [in, out]; one file tensor a layer is one row of our stacked array.
Nothing is skipped: a missing, unknown or misshapen tensor is an error that names it. The files themselves are in
`hf_files.py` (safetensors) and `gguf.py`.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jaxrl_lm.models.layers import ParamSpec
from jaxrl_lm.types import Params

Index = tuple[slice, ...]


class Names(NamedTuple):
    """One parameter's name in each kind of file, `{}` standing for the layer."""

    hf: str
    gguf: str
    transposed: bool = False


def _linear(ours: str, hf: str, gguf: str) -> dict[str, Names]:
    return {
        f"{ours}.kernel": Names(f"{hf}.weight", f"{gguf}.weight", transposed=True),
        f"{ours}.bias": Names(f"{hf}.bias", f"{gguf}.bias"),
    }


TABLE: dict[str, Names] = {
    "embed.table": Names("model.embed_tokens.weight", "token_embd.weight"),
    "layers.input_norm.scale": Names("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    **_linear("layers.attn.q_proj", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    **_linear("layers.attn.k_proj", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    **_linear("layers.attn.v_proj", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    **_linear("layers.attn.o_proj", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    "layers.attn.q_norm.scale": Names("model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"),
    "layers.attn.k_norm.scale": Names("model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"),
    "layers.post_norm.scale": Names("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    **_linear("layers.mlp.gate_proj", "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    **_linear("layers.mlp.up_proj", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    **_linear("layers.mlp.down_proj", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
    "final_norm.scale": Names("model.norm.weight", "output_norm.weight"),
    "lm_head.table": Names("lm_head.weight", "output.weight"),
}

# Buffers that hold no weights: recomputed from the config.
IGNORABLE = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|model\.layers\.\d+\.self_attn\.masked_bias"
)

_SHOWN = 10  # names an error lists at most, of each kind


@runtime_checkable
class Source(Protocol):
    """Tensors by name, read slice by slice."""

    kind: Literal["hf", "gguf"]  # the column of the table
    where: str  # for messages

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """That part of a tensor, in any float dtype."""
        ...


class Tensor(NamedTuple):
    """One tensor of a file: its name, which layer of our array it is (None: all of it), and its shape in the file."""

    name: str
    layer: int | None
    shape: tuple[int, ...]


def flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """The leaves of a nested dict by dotted path."""
    out = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= {f"{key}.{path}": leaf for path, leaf in flatten(value).items()}
        else:
            out[key] = value
    return out


def unflatten(leaves: dict[str, Any]) -> dict[str, Any]:
    """The nested dict of leaves by dotted path."""
    out: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = out
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return out


def tensors_of(path: str, spec: ParamSpec, kind: Literal["hf", "gguf"]) -> list[Tensor]:
    """The file tensors that one of our parameters is made of."""
    names = TABLE[path]
    pattern = getattr(names, kind)
    stacked = "{}" in pattern
    shape = spec.shape[1:] if stacked else spec.shape
    shape = shape[::-1] if names.transposed else shape
    if not stacked:
        return [Tensor(pattern, None, shape)]
    return [Tensor(pattern.format(layer), layer, shape) for layer in range(spec.shape[0])]


def check(source: Source, specs: dict[str, Any]) -> None:
    """Raises ValueError unless the source has exactly the tensors that the declarations ask for."""
    expected = {t.name: t.shape for path, spec in flatten(specs).items() for t in tensors_of(path, spec, source.kind)}
    found = {name: shape for name, shape in source.shapes().items() if not IGNORABLE.fullmatch(name)}
    head, table = (getattr(TABLE[path], source.kind) for path in ("lm_head.table", "embed.table"))
    if head in found and head not in expected:
        _check_tied(source, head, table, found)
        del found[head]
    shapes = [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    complaints = [
        _list("missing tensors", [name for name in expected if name not in found]),
        _list("unknown tensors", [name for name in found if name not in expected]),
        _list("wrong shapes", shapes),
    ]
    if any(complaints):
        raise ValueError(f"{source.where} does not fit its config: " + "; ".join(filter(None, complaints)))


def _list(title: str, items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{title}: {', '.join(items[:_SHOWN])}{more}" if items else ""


def _check_tied(source: Source, head: str, table: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """A tied checkpoint may hold the output table too, provided it is the same."""
    same = shapes[head] == shapes.get(table)
    rows = 1 << 14  # at a time, for memory
    for start in range(0, shapes[head][0] if same else 0, rows):
        index = (slice(start, min(start + rows, shapes[head][0])), slice(None))
        same = same and np.array_equal(source.read(head, index), source.read(table, index))
    if not same:
        raise ValueError(
            f"{source.where}: the config ties the output table to the embedding, but {head} differs from {table}; "
            "set tie_word_embeddings to false in config.json if the model is untied"
        )


def read_params(source: Source, specs: dict[str, Any], shardings: dict[str, Any], dtype: str) -> Params:
    """The parameters, each device's part read straight into its dtype and place.

    At any time the host holds the parts of one parameter beside what is already on devices.
    """
    check(source, specs)
    places = flatten(shardings)
    return unflatten(
        {path: _read_one(source, path, spec, places[path], dtype) for path, spec in flatten(specs).items()}
    )


def _read_one(source: Source, path: str, spec: ParamSpec, sharding: jax.sharding.Sharding, dtype: str) -> jax.Array:
    tensors = tensors_of(path, spec, source.kind)
    transposed = TABLE[path].transposed

    def part(index: Index) -> np.ndarray:
        index = tuple(slice(*one.indices(size)[:2]) for one, size in zip(index, spec.shape, strict=True))
        out = np.empty([one.stop - one.start for one in index], jax.numpy.dtype(dtype))
        stacked = tensors[0].layer is not None
        chosen, inner = (tensors[index[0]], index[1:]) if stacked else (tensors, index)
        for row, tensor in enumerate(chosen):
            values = source.read(tensor.name, inner[::-1] if transposed else inner)
            # Assignment converts, layer by layer, from the file's dtype.
            out[row if stacked else ...] = values.T if transposed else values
        return out

    return jax.make_array_from_callback(spec.shape, sharding, part, dtype=jax.numpy.dtype(dtype))


def write_plan(params: Params, specs: dict[str, Any], dtype: str) -> Iterator[tuple[Tensor, Callable[[], np.ndarray]]]:
    """Each Hugging Face tensor with a function that fetches it to the host, laid out and typed as the file has it.

    Raises ValueError naming a parameter that is missing, unknown or misshapen, or not wholly on this process.
    """
    leaves, declared = flatten(params), flatten(specs)
    if leaves.keys() != declared.keys():
        raise ValueError(f"parameters do not fit the model: {', '.join(sorted(leaves.keys() ^ declared.keys()))}")
    for path, spec in declared.items():
        leaf = leaves[path]
        if leaf.shape != spec.shape:
            raise ValueError(f"parameter {path} has shape {leaf.shape}, the model declares {spec.shape}")
        if not leaf.is_fully_addressable:
            raise ValueError(f"parameter {path} is spread over several processes: gather it before saving")
    for path, spec in declared.items():
        for tensor in tensors_of(path, spec, "hf"):
            yield tensor, functools.partial(_fetch, leaves[path], tensor.layer, TABLE[path].transposed, dtype)


def _fetch(leaf: Shaped[Array, "..."], layer: int | None, transposed: bool, dtype: str) -> np.ndarray:
    value = np.asarray(leaf if layer is None else leaf[layer])
    return np.ascontiguousarray(value.T if transposed else value, dtype=jax.numpy.dtype(dtype))
