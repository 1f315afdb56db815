"""One or a few new columns a row into a cache, in place: on TPUs by a Pallas kernel, elsewhere by XLA.

XLA for TPUs turns a write at a place of each row's own into a loop over the rows, one small copy after another, a layer. The
kernel reads the tile of a row that the column lies in, replaces the column and writes it back, the rows in a pipeline; of
several columns, as speculation has, the one or two tiles that they lie in. Read and written by `decode.extend`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

from jaxrl_lm.sharding import Plan, platform_of

LANES, SUBLANES = 128, 32  # columns of a tile where they come last, and where they do not (of any dtype)
FEW = 16  # columns that the kernel writes at most, one after another


def _on_tpu(plan: Plan | None) -> bool:
    return platform_of(plan) == "tpu"


def write_columns(
    cache: Shaped[Array, "W c a b"],
    new: Shaped[Array, "W c d e"],
    starts: Int32[Array, "W"],
    *,
    axis: int,
    plan: Plan | None = None,
    looped: bool = False,
) -> Shaped[Array, "W c a b"]:
    """The cache with `new` at the columns from each row's start up; columns lie along this axis, 2 or 3.

    In a loop (`looped`) it stays in main memory between passes: XLA for TPUs would bring a cache that fits into the chip's
    memory there and back. Of an argument that is donated XLA refuses to be told so, and no pass follows.
    """
    new = new.astype(cache.dtype)
    if new.shape[axis] <= min(FEW, cache.shape[axis]) and _on_tpu(plan):
        return _on_mesh(cache, new, starts, axis, plan, looped)
    one = lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=axis - 1)
    return jax.vmap(one)(cache, new, starts)


def narrow(cache: Any, plan: Plan | None) -> Any:
    """Of each array of a cache, whether XLA lays it with its columns last though its last axis is another.

    It does so on TPUs where that axis has fewer than 128 numbers: they would be filled up to 128 in memory.
    """
    on_tpu = _on_tpu(plan)
    return jax.tree.map(lambda x: on_tpu and x.ndim == 4 and x.shape[3] < min(LANES, x.shape[2]), cache)


def turned(cache: Any, which: Any) -> Any:
    """The cache with the last two axes of these arrays exchanged, as it lies in memory: a loop over it so copies nothing."""
    return jax.tree.map(lambda x, turn: x.swapaxes(2, 3) if turn else x, cache, which)


def _on_mesh(cache, new, starts, axis: int, plan: Plan | None, looped: bool):
    """The kernel, on each device for its own rows and heads."""
    if axis == 2 and narrow(cache, plan):
        return _on_mesh(cache.swapaxes(2, 3), new.swapaxes(2, 3), starts, 3, plan, looped).swapaxes(2, 3)
    write = functools.partial(write_few_columns, axis=axis, looped=looped)
    if plan is None:
        return write(cache, new, starts)
    spec = lambda x, axes: plan.sharding(axes, x.shape, "a cache").spec
    four = ("batch", "kv_heads", None, None)
    specs = (spec(cache, four), spec(new, four), spec(starts, ("batch",)))
    return jax.shard_map(write, mesh=plan.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(cache, new, starts)


def write_few_columns(
    cache: Shaped[Array, "W c a b"],
    new: Shaped[Array, "W c d e"],
    starts: Int32[Array, "W"],
    *,
    axis: int,
    looped: bool = False,
    interpret: bool = False,
) -> Shaped[Array, "W c a b"]:
    """The kernel. A start too far up is the last from which all columns are inside, as in `dynamic_update_slice`; one
    below 0 is 0."""
    rows, heads, *rest = cache.shape
    room, columns = cache.shape[axis], new.shape[axis]
    size = min({2: SUBLANES, 3: LANES}[axis], room)
    if room % size:
        size = room
    tile = (1, heads, *(size if place == axis else extent for place, extent in enumerate(rest, 2)))
    starts = jnp.clip(starts, 0, room - columns)

    def number(row, part, starts):
        """Of a row's first or last tile, which may be the same: then it is written as it already is."""
        return jnp.minimum(starts[row] // size + part, (starts[row] + columns - 1) // size)

    def kernel(starts, old, new, out):
        row, part = pl.program_id(0), pl.program_id(1)
        first = starts[row] - number(row, part, starts) * size
        there = jax.lax.broadcasted_iota(jnp.int32, tile[2:], axis - 2)

        def one(head, _):  # for those of many heads, all spread over their tiles at once, do not fit
            given, found = new[0, head], old[0, head]
            for column in range(columns):
                spread = jnp.broadcast_to(jax.lax.slice_in_dim(given, column, column + 1, axis=axis - 2), tile[2:])
                found = jnp.where(there == first + column, spread, found)
            out[0, head] = found

        jax.lax.fori_loop(0, heads, one, None)

    def place(row, part, starts):
        found = number(row, part, starts)
        return (row, 0, found, 0) if axis == 2 else (row, 0, 0, found)

    row = pl.BlockSpec((1, *new.shape[1:]), lambda row, part, _: (row, 0, 0, 0))
    tiles = 1 if size == room else 1 + (columns - 1) / size  # a row: now and then a second one
    moved = int(2 * rows * tiles * math.prod(tile) * cache.dtype.itemsize)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, 1 if columns == 1 else 2),
            in_specs=[pl.BlockSpec(tile, place), row],
            out_specs=pl.BlockSpec(tile, place),
        ),
        out_shape=pltpu.HBM(cache.shape, cache.dtype) if looped else jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={1: 0},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        name="write_few_columns",
        interpret=interpret,
    )(starts, pltpu.with_memory_space_constraint(cache, pltpu.HBM) if looped else cache, new)
