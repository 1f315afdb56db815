"""Arrays from one place to another: between meshes of other devices, and between devices and their host's memory.

A change of layout on the same devices is a compiled step instead (`steps.py`). How arrays go from process to process:
`across.py`.
"""

import collections
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxrl_lm.sharding.across import Box, across, box_of, settled

HOST = "pinned_host"  # the kind of memory that devices read and write without a copy of the host's own
DEVICE = "device"


def has_host_memory(device: Any) -> bool:
    """Whether arrays can lie in a device's host memory as they lie on the devices."""
    return HOST in [memory.kind for memory in device.addressable_memories()]


def on_host(layouts: Any) -> Any:
    """The same layouts in host memory: each device's part stands in the memory of its host."""
    return jax.tree.map(lambda layout: layout.with_memory_kind(HOST), layouts)


def move(tree: Any, layouts: Any, *, delete: bool = False) -> Any:
    """The arrays of a tree where the layouts say: on other devices, or in another memory of the same ones, laid out as
    before. One that is there already is given back as it is.

    Between devices parts go directly: nothing is gathered, neither on a device nor on the host. `delete`: what has been
    moved is deleted where it was.
    """

    def one(x, layout):
        if x.sharding.is_equivalent_to(layout, x.ndim):
            return x
        moved = _moved(x, layout)
        if delete:
            x.delete()
        return moved

    return jax.tree.map(one, tree, layouts)


def keep(tree: Any, layouts: Any) -> Any:
    """A second copy of the arrays of a tree, where the layouts say."""
    there = lambda x, layout: x.sharding.is_equivalent_to(layout, x.ndim)
    return jax.tree.map(lambda x, layout: jnp.copy(x) if there(x, layout) else _moved(x, layout), tree, layouts)


def moved_bytes(tree: Any, source: Any, target: Any) -> int:
    """Bytes that all devices together receive when arrays go from one layout to another: what of its new part each does
    not have in its old one. The tree's leaves are arrays or shapes.
    """

    def one(x, before, after) -> int:
        shape, same_memory, count = x.shape, before.memory_kind == after.memory_kind, 0
        had = before.devices_indices_map(shape) if same_memory else {}
        for device, index in after.devices_indices_map(shape).items():
            box = box_of(index, shape)
            shared = _overlap(box, box_of(had[device], shape)) if device in had else None
            count += _size(box) - (0 if shared is None else _size(shared))
        return count * jnp.dtype(x.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(one, tree, source, target)))


def _moved(x: jax.Array, layout: Sharding) -> jax.Array:
    several, is_key = jax.process_count() > 1, jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    # Keys are few bytes, and JAX takes them apart itself.
    if x.sharding.device_set == layout.device_set or (is_key and not several):
        moved = jax.device_put(x, layout)
        return settled(moved) if several and not is_key else moved
    if not several:
        return _reassembled(x, layout)
    if is_key:
        return jax.random.wrap_key_data(_moved(jax.random.key_data(x), layout), impl=jax.random.key_impl(x))
    # Only devices send and receive.
    source, target = (one.with_memory_kind(DEVICE) for one in (x.sharding, layout))
    x = settled(jax.device_put(settled(x), source))
    return settled(jax.device_put(across(x, target), layout))


def _reassembled(x: jax.Array, layout: Sharding) -> jax.Array:
    """x on other devices, in parts of theirs. A device_put of the whole would go through the host wherever these differ.

    Each part is put together on the first device that needs it, from pieces that come straight from the devices that
    have them; other devices with the same part get a copy.
    """
    source = {box_of(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    made: dict[Box, jax.Array] = {}
    parts = []
    for device, index in layout.addressable_devices_indices_map(x.shape).items():
        box = box_of(index, x.shape)
        if box not in made:
            shared = {have: _overlap(box, have) for have in source}
            made[box] = _joined(
                {
                    tuple(first for first, _ in piece): jax.device_put(_cut(source[have], have, piece), device)
                    for have, piece in shared.items()
                    if piece is not None
                }
            )
        parts.append(jax.device_put(made[box], device))
    return jax.make_array_from_single_device_arrays(x.shape, layout, parts)


def _cut(part: jax.Array, have: Box, piece: Box) -> jax.Array:
    if piece == have:
        return part
    starts = [first - start for (first, _), (start, _) in zip(piece, have, strict=True)]
    return jax.lax.dynamic_slice(part, starts, [last - first for first, last in piece])


def _joined(pieces: dict[tuple[int, ...], jax.Array]) -> jax.Array:
    """The pieces of a grid, by the index that each begins at, as one array."""
    for axis in reversed(range(len(next(iter(pieces))))):
        lines = collections.defaultdict(list)
        for start in sorted(pieces):
            lines[start[:axis]].append(pieces[start])
        pieces = {head: jnp.concatenate(line, axis) if len(line) > 1 else line[0] for head, line in lines.items()}
    return pieces[()]


def _overlap(one: Box, other: Box) -> Box | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(first < last for first, last in both) else None


def _size(box: Box) -> int:
    return math.prod(last - first for first, last in box)
