"""Several processes that make one run, on JAX's own distributed runtime.

Every process runs the same program and decides the same things from the same numbers. What only one of them knows is
shared by the functions here: `place` puts host arrays on the mesh (each process its own rows), `gather` brings whole
arrays to every host, `spread` and `spread_rows` divide work on the host, `agree` and `any_of` settle what could differ,
and `writes` says who writes files. With one process each of them does the plain thing.

How the processes start and end: `launch.py`.
"""

import collections
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding

# Bytes of a message between processes: the least of one, and the most of all together, for it lies on every device. What
# is between fills a power of two, and what is more goes in several rounds, so that few shapes compile.
_SMALLEST, _LARGEST = 1 << 10, 1 << 26


def several() -> bool:
    """Whether the run is made by more than one process."""
    return jax.process_count() > 1


def writes() -> bool:
    """Whether this process writes the run's files and prints."""
    return jax.process_index() == 0


def one_at_a_time() -> bool:
    """Whether the devices may be given a program only when the one before has ended.

    Several CPU devices are threads of one pool: where two programs with collectives run at once, each may hold threads
    that the other's participants wait for, and neither ends (XLA's rendezvous). Elsewhere programs queue on each device, in
    one order for those of one thread; for two threads see `Placement.crosses`.
    """
    return jax.default_backend() == "cpu" and jax.device_count() > 1


# --- arrays -----------------------------------------------------------------------------------------------------------


def place(x: Any, sharding: Sharding) -> jax.Array:
    """The host's array x on the devices of a sharding; every process has the whole of x and places its own part.

    Typed keys and arrays that lie on devices, this process's or all, may be given too.
    """
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(place(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index], dtype=host.dtype)


def place_tree(tree: Any, shardings: Any) -> Any:
    """`place` of every leaf."""
    return jax.tree.map(place, tree, shardings)


def gather(tree: Any) -> Any:
    """Every array of a tree whole on every host, as numpy arrays. All processes call it at the same place.

    Arrays on a mesh of which some processes have no device are made whole by those that have, and sent to all.
    """
    if not several():
        return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    found, sent = [_gather_one(leaf) for leaf in leaves], collections.defaultdict(list)
    for number, leaf in enumerate(leaves):
        have = _processes(leaf)
        if len(have) < jax.process_count():
            sent[min(have)].append(number)
    for source, numbers in sorted(sent.items()):
        for number, value in zip(numbers, _send([found[n] for n in numbers], source), strict=True):
            found[number] = value
    return jax.tree.unflatten(structure, found)


def _processes(leaf: Any) -> set[int]:
    """Those that have a part of an array on a mesh. What lies elsewhere is each process's own: all have it."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf.sharding, SingleDeviceSharding):
        return set(range(jax.process_count()))
    return {device.process_index for device in leaf.sharding.device_set}


def _gather_one(leaf: Any) -> Any:
    if jax.process_index() not in _processes(leaf):
        return np.zeros(leaf.shape, leaf.dtype)
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return jax.device_get(leaf)
    return multihost_utils.process_allgather(leaf, tiled=True)


def _send(arrays: list[np.ndarray], source: int) -> list[np.ndarray]:
    """The arrays that process `source` has, to the last bit; the others give some of the same shapes and dtypes."""
    sizes = np.cumsum([0, *(array.nbytes for array in arrays)])
    buffer = np.zeros(_room(sizes[-1]), np.uint8)
    for array, start, stop in zip(arrays, sizes, sizes[1:], strict=False):
        buffer[start:stop] = np.frombuffer(array.tobytes(), np.uint8)
    buffer = np.asarray(multihost_utils.broadcast_one_to_all(buffer, is_source=jax.process_index() == source))
    return [
        buffer[start:stop].copy().view(array.dtype).reshape(array.shape)
        for array, start, stop in zip(arrays, sizes, sizes[1:], strict=False)
    ]


def _room(size: int) -> int:
    """Bytes of a message that holds so many: few sizes, each of which compiles once."""
    return max(_SMALLEST, 1 << (int(size) - 1).bit_length())


# --- what hosts know --------------------------------------------------------------------------------------------------


def gather_bytes(data: bytes) -> list[bytes]:
    """The bytes of every process in their order, however many."""
    if not several():
        return [data]
    # The number of the process travels along: devices need not be listed in the order of processes. All are int32.
    heads = multihost_utils.process_allgather(np.array([jax.process_index(), *divmod(len(data), _SMALLEST)], np.int32))
    sizes = heads[:, 1].astype(np.int64) * _SMALLEST + heads[:, 2]
    most, largest = int(sizes.max()), max(_SMALLEST, 1 << ((_LARGEST // len(heads)).bit_length() - 1))
    rounds = []
    for start in range(0, most, largest):
        room = _room(min(most - start, largest))
        part = data[start : start + room].ljust(room, b"\0")
        rounds.append(multihost_utils.process_allgather(np.frombuffer(part, np.uint8)))
    whole = lambda place: b"".join(parts[place].tobytes() for parts in rounds)
    found = {int(head[0]): whole(place)[: sizes[place]] for place, head in enumerate(heads)}
    return [found[index] for index in range(len(heads))]


def gather_objects(value: Any) -> list[Any]:
    """The value of every process in their order; values are JSON, numbers come back bit for bit."""
    if not several():
        return [value]
    return [json.loads(one) for one in gather_bytes(json.dumps(value).encode())]


def agree(value: Any) -> Any:
    """The first process's value, JSON, on every process."""
    return gather_objects(value)[0]


def any_of(flag: bool) -> bool:
    """Whether it is so on any process."""
    return bool(np.any(multihost_utils.process_allgather(np.array([flag])))) if several() else flag


def share(count: int) -> range:
    """Which of `count` things this process does: neighbours, as equally many as possible."""
    index, processes = jax.process_index(), jax.process_count()
    return range(count * index // processes, count * (index + 1) // processes)


def spread(count: int, function: Callable[[range], list[Any]], *, raises: type[Exception] = ValueError) -> list[Any]:
    """`function(range(count))`, a list, of which each process computes its `share` and all get the whole.

    Values are JSON. Where the function raises `raises` on a process, every process raises it, naming that one.
    """
    if not several():
        return function(range(count))
    try:
        own = {"values": function(share(count))}
    except raises as error:
        own = {"error": str(error)}
    found = gather_objects(own)
    for index, one in enumerate(found):
        if "error" in one:
            raise raises(f"process {index}: {one['error']}")
    return [value for one in found for value in one["values"]]


def spread_rows(
    rows: Sequence[Any],
    function: Callable[[range], list[Any]],
    *,
    to_arrays: Callable[[list[Any]], dict[str, np.ndarray]],
    from_arrays: Callable[[Mapping[str, np.ndarray]], list[Any]],
    name: str,
) -> list[Any]:
    """`function(range(len(rows)))`, a list, of which each process computes its `share` and all get the whole.

    For rows of a dataset that every process has read, and too many values for JSON: `to_arrays` makes named arrays of
    a list, which travel bit for bit, and `from_arrays` makes it of them again. `function` goes through its rows in
    order; a ValueError is raised by every process as one process would raise it, so that of the first row that has one.

    Raises ValueError, naming the processes, where they have other rows in `name`.
    """
    if not several():
        return function(range(len(rows)))
    check_same({"number of rows": str(len(rows)), "digest of rows": _digest(rows)}, what=name)
    own, error = [], None
    try:
        own = function(share(len(rows)))
    except ValueError as raised:
        error = str(raised)
    for one in gather_objects(error):  # shares are in the order of rows
        if one is not None:
            raise ValueError(one)
    file = io.BytesIO()
    np.savez(file, **to_arrays(own))
    return [value for one in gather_bytes(file.getvalue()) for value in from_arrays(np.load(io.BytesIO(one)))]


def _digest(rows: Sequence[Any]) -> str:
    """A hash of what rows hold of JSON; of another value only the type, for an address may stand in its repr."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, skipkeys=True, default=lambda value: type(value).__name__).encode())
    return digest.hexdigest()


def join_lists(name: str, lists: Sequence[Sequence[Any]], dtype: Any) -> dict[str, np.ndarray]:
    """Arrays for `spread_rows` that hold lists of numbers, by names that begin with `name`."""
    lengths = np.array([len(one) for one in lists], np.int64)
    values = np.fromiter(itertools.chain.from_iterable(lists), dtype, int(lengths.sum()))
    return {name: values, f"{name}_lengths": lengths}


def split_lists(name: str, arrays: Mapping[str, np.ndarray]) -> list[list[Any]]:
    """The lists of `join_lists`."""
    values, ends = arrays[name], np.cumsum(arrays[f"{name}_lengths"]).tolist()
    return [values[start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]


def first_only(function: Callable[[], Any]) -> None:
    """Calls the function on the process that writes; every process goes on when it has returned.

    Where it raises OSError, every process does.
    """
    error = None
    if writes():
        try:
            function()
        except OSError as raised:
            if not several():
                raise
            error = str(raised)
    if several() and (error := agree(error)) is not None:
        raise OSError(error)


def check_same(facts: dict[str, str], *, what: str) -> None:
    """Raises ValueError, naming the fact and the processes, where a fact of this process is not that of the first one."""
    found = gather_objects(facts)
    for name in found[0]:
        differing = [index for index, one in enumerate(found) if one.get(name) != found[0][name]]
        if differing:
            other = found[differing[0]]
            raise ValueError(
                f"{what}: processes {', '.join(map(str, differing))} have {name} = {other.get(name)}, and process 0 has "
                f"{found[0][name]}: start every process with the same files and options"
            )


def check_shared(directory: Path) -> None:
    """Raises ValueError where a directory that the first process made is not seen by every process."""
    missing = [index for index, seen in enumerate(gather_objects(directory.is_dir())) if not seen]
    if missing:
        raise ValueError(
            f"output_dir: {directory}, made by process 0, is not there on processes {', '.join(map(str, missing))}: give a "
            "directory on a file system that all hosts share"
        )
