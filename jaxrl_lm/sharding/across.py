"""Arrays from one set of devices to another where several processes have them.

No process can hand an array to a device of another one, so all of them run one compiled program over the devices of
both sides: rounds of collective permutes, in each of which a device sends at most one piece and receives at most one.
Nothing is gathered, neither on a device nor on a host. A process that has none of the devices of a side brings no part
of it and gets none.
"""

import collections
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

_DEVICE = "device"

Box = tuple[tuple[int, int], ...]  # first and last index + 1 of each dimension
Edge = tuple[int, int, tuple[int, ...]]  # sender and receiver by their places, and where the piece begins in the array


class Exchange(NamedTuple):
    """Who sends what to whom. All pieces of an array have one shape."""

    piece: tuple[int, ...]
    source: tuple[int, ...]  # shape of a part
    target: tuple[int, ...]
    rounds: tuple[tuple[Edge, ...], ...]  # in each, no device stands twice as a sender or as a receiver
    has: tuple[Box, ...]  # the part of each device, an empty one where it has none
    gets: tuple[Box, ...]


def across(x: jax.Array, layout: Sharding) -> jax.Array:
    """x on other devices. Every process calls it, those too that have a part on neither side; key arrays are not taken.

    Each device that gets a part gets every piece of it once, from the one that sends least of those that have it; what it
    has itself stays. Meanwhile all devices have room for a part of each side.
    """
    found, flat, program = _compiled(x.shape, x.sharding, layout)
    parts = {shard.device: shard.data.reshape(found.source) for shard in x.addressable_shards}
    for device in flat.addressable_devices - parts.keys():
        parts[device] = jnp.zeros(found.source, x.dtype, device=device)
    whole = (flat.mesh.size * found.source[0], *found.source[1:])
    made = settled(program(jax.make_array_from_single_device_arrays(whole, flat, list(parts.values()), dtype=x.dtype)))
    shape = layout.shard_shape(x.shape)
    own = [shard.data.reshape(shape) for shard in made.addressable_shards if shard.device in layout.device_set]
    return jax.make_array_from_single_device_arrays(x.shape, layout, own, dtype=x.dtype)


def settled(x: jax.Array) -> jax.Array:
    """x; on CPUs once it is there.

    Devices run programs one after another, CPUs some beside each other: where two wait for other processes, each can hold
    the threads that the other one needs there, and both wait for ever.
    """
    on_cpu = next(iter(x.sharding.device_set)).platform == "cpu"
    return x.block_until_ready() if on_cpu else x


@functools.cache
def _compiled(shape: tuple[int, ...], source: Sharding, target: Sharding) -> tuple[Exchange, NamedSharding, Any]:
    """The exchange, the layout of the parts of all devices one after the other, and the program from these to others."""
    found, devices = plan_exchange(shape, source, target), _devices(source, target)
    flat = NamedSharding(Mesh(np.array(devices), (_DEVICE,), axis_types=(AxisType.Auto,)), PartitionSpec(_DEVICE))
    specs = {"in_specs": flat.spec, "out_specs": flat.spec}
    run = jax.shard_map(functools.partial(_run, found=found), mesh=flat.mesh, **specs, check_vma=False)
    return found, flat, jax.jit(run)


def _run(part: jax.Array, *, found: Exchange) -> jax.Array:
    """The new part of a device, from its old one; what those without an old one bring is not read."""
    dtype, floats = part.dtype, jnp.issubdtype(part.dtype, jnp.floating)
    # As bits: XLA computes some float types in wider ones, which changes the bits of a NaN.
    part = part.view(f"uint{8 * dtype.itemsize}") if floats else part
    place, out = jax.lax.axis_index(_DEVICE), jnp.zeros(found.target, part.dtype)
    own = lambda table: jnp.asarray(table)[place]
    for edges in found.rounds:
        receives = np.zeros(len(found.gets), bool)
        receives[[receiver for _, receiver, _ in edges]] = True
        piece = jax.lax.dynamic_slice(part, list(own(_places(found.has, edges, 0))), found.piece)
        piece = jax.lax.ppermute(piece, _DEVICE, [edge[:2] for edge in edges])
        at = list(own(_places(found.gets, edges, 1)))
        kept = jax.lax.dynamic_slice(out, at, found.piece)
        out = jax.lax.dynamic_update_slice(out, jnp.where(own(receives), piece, kept), at)
    return out.view(dtype)


def _places(boxes: Sequence[Box], edges: Sequence[Edge], side: int) -> np.ndarray:
    """Where in its part each device has its piece of a round: the sender (side 0) the one it reads, the receiver (1) the
    one it writes.
    """
    starts = np.zeros((len(boxes), len(boxes[0])), np.int32)
    for edge in edges:
        starts[edge[side]] = [at - first for at, (first, _) in zip(edge[2], boxes[edge[side]], strict=True)]
    return starts


def spread_layout(shape: tuple[int, ...], devices: Sequence[Any]) -> NamedSharding:
    """The layout of an array that is cut over all of these devices as far as its dimensions divide."""
    sizes = _factors(len(devices))
    axes = [f"{_DEVICE}{number}" for number in range(len(sizes))]
    mesh = Mesh(np.array(devices).reshape(sizes), axes, axis_types=(AxisType.Auto,) * len(axes))
    spec, left = [], dict(zip(axes, sizes, strict=True))
    for size in shape:
        taken = []
        for axis, ways in tuple(left.items()):
            if size % ways == 0:
                size //= left.pop(axis)
                taken.append(axis)
        spec.append(tuple(taken) or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _factors(count: int) -> list[int]:
    """Prime factors."""
    for factor in range(2, count):
        if count % factor == 0:
            return [factor, *_factors(count // factor)]
    return [count]


# --- who sends what ---------------------------------------------------------------------------------------------------


def plan_exchange(shape: tuple[int, ...], source: Sharding, target: Sharding) -> Exchange:
    """The exchange of an array of this shape. Scalars count as arrays of one element."""
    devices = _devices(source, target)
    has, gets = (_boxes(layout, shape, devices) for layout in (source, target))
    shape = shape or (1,)
    parts = [_shape(next(box for box in boxes if box)) for boxes in (has, gets)]
    # A dimension cut into n parts and into m has lcm(n, m) pieces: each side's parts are whole numbers of them.
    piece = tuple(math.gcd(one, other) for one, other in zip(*parts, strict=True))
    holders = collections.defaultdict(list)
    for place, box in enumerate(has):
        for start in _starts(box, piece):
            holders[start].append(place)
    sends, edges = collections.Counter(), []
    for receiver, box in enumerate(gets):
        for start in _starts(box, piece):
            there = holders[start]
            sender = receiver if receiver in there else min(there, key=lambda place: (sends[place], place))
            sends[sender] += 1
            edges.append((sender, receiver, start))
    nothing = ((0, 0),) * len(shape)
    filled = [tuple(box or nothing for box in boxes) for boxes in (has, gets)]
    return Exchange(piece, *parts, _rounds(edges), *filled)


def _devices(*layouts: Sharding) -> list[Any]:
    return sorted(set().union(*(layout.device_set for layout in layouts)), key=lambda device: device.id)


def sent_bytes(found: Exchange, dtype: Any) -> int:
    """Bytes that go from one device to another."""
    count = sum(sender != receiver for edges in found.rounds for sender, receiver, _ in edges)
    return count * math.prod(found.piece) * jnp.dtype(dtype).itemsize


def _boxes(layout: Sharding, shape: tuple[int, ...], devices: Sequence[Any]) -> list[Box | None]:
    indices = layout.devices_indices_map(shape)
    one = lambda index: box_of(index, shape) or ((0, 1),)
    return [one(indices[device]) if device in indices else None for device in devices]


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The first and last index + 1 of each dimension."""
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(last - first for first, last in box)


def _starts(box: Box | None, piece: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """Where the pieces of a part begin."""
    if box is None:
        return []
    counts = [size // own for size, own in zip(_shape(box), piece, strict=True)]
    firsts = [first for first, _ in box]
    return [
        tuple(first + i * own for first, i, own in zip(firsts, index, piece, strict=True))
        for index in np.ndindex(*counts)
    ]


def _rounds(edges: Sequence[Edge]) -> tuple[tuple[Edge, ...], ...]:
    """The edges in as many rounds as the busiest device sends or receives pieces, none busy twice in one.

    The colouring of a bipartite graph (König): where no round is free on both sides, two rounds are exchanged along the
    path from the receiver on which they take turns.
    """
    busy: dict[tuple[int, int], dict[int, Edge]] = collections.defaultdict(dict)  # of (side, device): edge by round
    free = lambda node: next(number for number in range(len(edges)) if number not in busy[node])
    for edge in edges:
        first, second = free((0, edge[0])), free((1, edge[1]))
        path, side, node, number = [], 1, edge[1], first
        while number in busy[side, node]:  # `first` is free at the sender, so it is not on the path
            path.append((busy[side, node][number], number))
            side, number = 1 - side, second if number == first else first
            node = path[-1][0][side]
        for old, number in path:
            del busy[0, old[0]][number], busy[1, old[1]][number]
        for old, number in path:
            other = second if number == first else first
            busy[0, old[0]][other] = busy[1, old[1]][other] = old
        busy[0, edge[0]][first] = busy[1, edge[1]][first] = edge
    found = collections.defaultdict(list)
    for (side, _), own in busy.items():
        for number, edge in own.items() if side == 0 else ():
            found[number].append(edge)
    return tuple(tuple(found[number]) for number in sorted(found))
