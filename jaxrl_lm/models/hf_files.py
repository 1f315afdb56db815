"""Safetensors files: many read as one set of tensors, and written tensor by tensor.

The format (huggingface/safetensors): 8 bytes of header length, a JSON header of dtypes, shapes and offsets, the data.
It is written here because the library's writer wants a whole shard in memory; it is read by the library.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl_lm.models.hf_config import read_json
from jaxrl_lm.models.hf_table import Index, Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}

Fetch = Callable[[], np.ndarray]


class Safetensors:
    """The tensors of a directory with model.safetensors or its sharded form.

    Raises FileNotFoundError naming what is absent, ValueError naming a damaged file or a tensor that is not a float.
    """

    kind: Literal["hf"] = "hf"

    def __init__(self, directory: Path):
        self.where = str(directory)
        self._slices = {}
        if (directory / INDEX).is_file() and not (directory / SINGLE).is_file():
            weight_map = read_json(directory / INDEX).get("weight_map") or {}
            for file in sorted(set(weight_map.values())):
                self._open(directory / file)
            absent = [f"{name} ({file})" for name, file in weight_map.items() if name not in self._slices]
            if absent or not weight_map:
                raise ValueError(f"{directory / INDEX}: names tensors that are not there: {', '.join(absent[:10])}")
        elif (directory / SINGLE).is_file():
            self._open(directory / SINGLE)
        else:
            raise FileNotFoundError(f"{directory}: neither {SINGLE} nor {INDEX} is there; convert it to safetensors")

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file, but {INDEX} names it; the download is incomplete")
        try:
            file = safe_open(path, "numpy")
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error}); fetch it again") from error
        for name in file.keys():  # noqa: SIM118 (not a dict)
            part = file.get_slice(name)
            if part.get_dtype() not in _DTYPES.values():
                raise ValueError(
                    f"{path}: tensor {name} has dtype {part.get_dtype()}; supported: {', '.join(_DTYPES.values())}"
                )
            self._slices[name] = part

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by name, from the headers."""
        return {name: tuple(part.get_shape()) for name, part in self._slices.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        """That part of a tensor, in the file's dtype."""
        return self._slices[name][index]


def write_safetensors(path: Path, tensors: list[tuple[Tensor, Fetch]], dtype: str) -> None:
    """Writes one file, holding one tensor at a time. Metadata says "pt", as transformers asks."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor, _ in tensors:
        start, end = end, end + tensor_bytes(tensor, dtype)
        header[tensor.name] = {"dtype": _DTYPES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begins at a multiple of 8
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor, fetch in tensors:
            value = fetch()
            if value.dtype != jnp.dtype(dtype) or value.shape != tensor.shape:
                raise ValueError(f"{tensor.name}: {value.dtype}{value.shape} fetched, {dtype}{tensor.shape} declared")
            file.write(value.reshape(-1).view(np.uint8))
        file.flush()
        os.fsync(file.fileno())


def write_shards(directory: Path, tensors: list[tuple[Tensor, Fetch]], dtype: str, max_bytes: int | float) -> None:
    """Writes model.safetensors, or numbered files and their index where one would pass max_bytes."""
    shards, size = [[]], 0
    for tensor, fetch in tensors:
        if shards[-1] and size + tensor_bytes(tensor, dtype) > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append((tensor, fetch))
        size += tensor_bytes(tensor, dtype)
    if len(shards) == 1:
        write_safetensors(directory / SINGLE, shards[0], dtype)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / file, shard, dtype)
        weight_map |= {tensor.name: file for tensor, _ in shard}
    total = sum(tensor_bytes(tensor, dtype) for tensor, _ in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def tensor_bytes(tensor: Tensor, dtype: str) -> int:
    """Bytes of a tensor in a file."""
    return int(np.prod(tensor.shape)) * jnp.dtype(dtype).itemsize
