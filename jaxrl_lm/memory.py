"""Memory of devices: bytes of trees by layout, and XLA's page about memory that ran out, read and told in our words.

Used by runs (`loop.py`, `fit.py`) and by plans (`plan_report.py`).
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

GIB = float(1 << 30)
SHOWN = 4  # arrays that a message lists
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"([\d.]+)([KMGT]?)"
# (needed, available) as compilers and runtimes say it: the TPU compiler twice, the TPU runtime twice, CPU and GPU.
_SHORTAGES = (
    rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)",
    rf"Used {_SIZE} of {_SIZE} hbm",
    rf"Attempting to (?:allocate|reserve) {_SIZE}(?: at the bottom of memory)?\. That was not possible\. "
    rf"There are {_SIZE} free",
    rf"Out of memory (?:while trying to allocate|allocating) {_SIZE} bytes",
)


class OutOfMemory(MemoryError):
    """The devices' memory did not suffice for a step."""


class Shortage(NamedTuple):
    """What a message says of memory that ran out, in bytes of one device."""

    needed: float  # arguments and results too, though the TPU compiler's message speaks of temporaries
    available: float | None
    temporaries: list[tuple[str, str, float]]  # (operation, shape, bytes) of the largest


def read_shortage(message: str) -> Shortage | None:
    """What XLA's message says; None where it is no such message."""
    found = next((match for pattern in _SHORTAGES if (match := re.search(pattern, message))), None)
    if found is None:
        return None
    sizes = [
        float(number) * _UNITS[unit] for number, unit in zip(found.groups()[::2], found.groups()[1::2], strict=True)
    ]
    pattern = rf'Size: {_SIZE}\s+Operator: op_name="([^"]*)"[^\n]*\s+Shape: (\S+)'
    rows = [
        (f"temporary of {origin(name)}", shape.split("{")[0], float(size) * _UNITS[unit])
        for size, unit, name, shape in re.findall(pattern, message)
    ]
    return Shortage(sizes[0], sizes[1] if len(sizes) > 1 else None, rows)


def origin(op_name: str) -> str:
    """The end of a JAX operation's name, which says what it is."""
    parts = [part for part in op_name.split("/") if part not in ("while", "body", "closed_call", "checkpoint")]
    return "/".join(parts[-2:]) or "made by the compiler"


def shard_shape(leaf: Any) -> tuple[int, ...]:
    """The shape that one device has of an array, or of a shape with a layout."""
    return tuple(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape)


def device_bytes(tree: Any) -> float:
    """Bytes of a tree of arrays, or of shapes with layouts, on one device."""

    def one(leaf) -> float:
        size = 8 if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
        return float(math.prod(shard_shape(leaf)) * size)

    return float(sum(one(leaf) for leaf in jax.tree.leaves(tree)))


def named_leaves(trees: dict[str, Any]) -> list[tuple[str, str, float]]:
    """(our name, shape on a device, bytes on a device) of every array, the largest first."""
    found = []
    for root, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
            found.append((".".join([root, *parts]), f"{leaf.dtype}{list(shard_shape(leaf))}", device_bytes(leaf)))
    return sorted(found, key=lambda row: -row[2])


def run_arrays(state: Any, frozen: Any) -> dict[str, Any]:
    """The trees of a run by the names that its checkpoints and plans use."""
    return {"params": state.params, "opt_state": state.opt_state, "extra": state.extra, "frozen": frozen}


@contextlib.contextmanager
def explained(doing: Callable[[], str], arrays: Callable[[], dict[str, Any]], config: Any) -> Iterator[None]:
    """Memory that runs out in the body is told as `OutOfMemory`: what was being done, how much was missing, the run's
    largest arrays by name, and what to change. `doing` ends in the part of the step."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(out_of_memory_message(doing(), str(error), arrays(), config)) from error


def out_of_memory_message(doing: str, message: str, arrays: dict[str, Any], config: Any) -> str:
    """One message for memory that ran out, from XLA's."""
    short, gib = read_shortage(message), lambda size: f"{size / GIB:.2f} GiB"
    if short is None:
        said = message.strip().splitlines()[0][:300]
    else:
        said = f"{gib(short.needed)} at once" + (f", {gib(short.available)} available" if short.available else "")
    held = math.fsum(map(device_bytes, arrays.values()))
    largest = [*named_leaves(arrays)[:SHOWN], *(short.temporaries[:SHOWN] if short else ())]
    lines = [
        f"{doing}: the devices' memory does not suffice: {said}; the run's own arrays take {gib(held)} of each device"
    ]
    lines += [f"  {gib(size)}  {name}  {shape}" for name, shape, size in largest]
    return "\n".join([*lines, "Change one of: " + "; ".join(remedies(config, doing.split(", ")[-1]))])


def remedies(config: Any, part: str) -> list[str]:
    """What may be changed about a run whose memory does not suffice in this part, those first that cost only time."""
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    micro = next(name for name in ("microbatch_completions", "microbatch_rows") if name in given)
    found = []
    if part in ("generate", "evaluate") and "max_completion_length" in given:
        found.append("fewer prompts_per_step, or a shorter max_completion_length")
    elif part != "start":
        found.append(f"a smaller {micro} (now {given[micro] or 'the whole batch'})")
    if part == "update" and given["remat"] != "offload":
        found.append("remat offload" if given["remat"] == "full" else "remat full")
    found.append("a mesh with more devices on fsdp or tensor")
    if given["moments_dtype"] != "int8":
        found.append("moments_dtype " + ("bfloat16 or int8" if given["moments_dtype"] == "float32" else "int8"))
    if given["param_dtype"] == "float32":
        found.append("param_dtype bfloat16")
    if micro == "microbatch_completions":
        found.append(f"`jaxrl-lm plan --config {given['output_dir']}/config.toml --topology …` tries such changes")
    return found
