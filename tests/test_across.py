"""The program that moves arrays between devices of several processes, here with those of one: what it sends, and what
arrives. That processes run it together: `test_distributed.py`."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_lm.sharding import Plan, make_mesh, move, moved_bytes, spread_layout
from jaxrl_lm.sharding.across import _compiled, _rounds, across, plan_exchange, sent_bytes

SHAPE = (12, 24)


def layout(sizes, first, last, *axes):
    shape = SHAPE[: len(axes)]
    return Plan(make_mesh(sizes, devices=jax.devices()[first:last])).sharding(axes, shape)


ROWS4, WHOLE3 = layout({"fsdp": 4}, 0, 4, "embed", None), layout({"fsdp": 3}, 0, 3, None, None)
GRID = layout({"fsdp": 2, "tensor": 2}, 0, 4, "embed", "mlp")
CASES = {  # source, target, pieces' shape, rounds: as many as the busiest device sends or receives
    "rows to columns": (ROWS4, layout({"tensor": 2}, 6, 8, None, "mlp"), (3, 12), 4),
    "3 parts to 2": (layout({"fsdp": 3}, 0, 3, "embed", None), layout({"tensor": 2}, 6, 8, "mlp", None), (2, 24), 3),
    "2 parts to 3": (layout({"tensor": 2}, 6, 8, "mlp", None), layout({"fsdp": 3}, 0, 3, "embed", None), (2, 24), 3),
    "a grid to a turned one": (GRID, layout({"tensor": 2, "data": 2}, 4, 8, "mlp", "batch"), (6, 12), 1),
    "a grid to copies": (GRID, layout({"tensor": 2, "data": 2}, 4, 8, None, "mlp"), (6, 12), 2),
    "copies to more copies": (WHOLE3, layout({"data": 5}, 3, 8, None, None), (12, 24), 2),
    "copies to parts": (WHOLE3, layout({"tensor": 4}, 4, 8, None, "mlp"), (12, 6), 2),
    "some devices to all": (ROWS4, layout({"tensor": 2, "fsdp": 4}, 0, 8, "mlp", "embed"), (3, 6), 4),
    "one dimension": (layout({"fsdp": 4}, 0, 4, "embed"), layout({"data": 4}, 4, 8, None), (3,), 4),
    "a number": (layout({"fsdp": 4}, 0, 4), layout({"data": 2}, 4, 6), (1,), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_each_device_gets_each_piece_of_its_part_once(name):
    source, target, piece, rounds = CASES[name]
    shape = SHAPE[: len(source.spec)]
    found = plan_exchange(shape, source, target)
    assert found.piece == piece
    assert len(found.rounds) == rounds
    devices = sorted(source.device_set | target.device_set, key=lambda device: device.id)
    has, gets = source.devices_indices_map(shape), target.devices_indices_map(shape)
    covered = {device: np.zeros(shape, int) for device in target.device_set}
    for edges in found.rounds:
        for side in (0, 1):
            assert max(Counter(edge[side] for edge in edges).values()) == 1
        for sender, receiver, start in edges:
            at = tuple(slice(first, first + size) for first, size in zip(start, piece, strict=True))[: len(shape)]
            there = np.zeros(shape, int)
            there[has[devices[sender]]] = 1
            assert there[at].all()
            covered[devices[receiver]][at] += 1
    for device, counts in covered.items():
        expected = np.zeros(shape, int)
        expected[gets[device]] = 1
        np.testing.assert_array_equal(counts, expected)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert sent_bytes(found, x.dtype) == moved_bytes(x, source, target) > 0


@pytest.mark.parametrize("name", CASES)
def test_what_arrives_is_what_a_move_in_one_process_brings(name):
    source, target, *_ = CASES[name]
    values = np.asarray(np.random.default_rng(0).normal(size=SHAPE[: len(source.spec)]), np.float32)
    x = jax.device_put(values, source)
    found = across(x, target)
    assert found.sharding == target
    for shard, other in zip(found.addressable_shards, move(x, target).addressable_shards, strict=True):
        assert shard.device == other.device
        np.testing.assert_array_equal(shard.data, values[shard.index])
        np.testing.assert_array_equal(shard.data, other.data)


def test_the_program_is_permutes_of_pieces_and_nothing_else():
    source, target, piece, rounds = CASES["rows to columns"]
    found, flat, program = _compiled(SHAPE, source, target)
    parts = jax.ShapeDtypeStruct((flat.mesh.size * found.source[0], *found.source[1:]), jnp.float32, sharding=flat)
    text = program.lower(parts).compile().as_text()
    names = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute"
    kinds = re.findall(rf"= (\S+?)(?:\{{[\d,]*\}})? ({names})(?:-start)?\(", text)
    assert kinds == [(f"u32[{','.join(map(str, piece))}]", "collective-permute")] * rounds
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"[fu]32\[([\d,]+)\]", text)]
    assert max(sizes) == max(math.prod(found.source), math.prod(found.target)) < math.prod(SHAPE)


def test_as_many_rounds_as_the_busiest_device_has_edges():
    rng = np.random.default_rng(0)
    for _ in range(50):
        edges = [(s, r, (n,)) for n, (s, r) in enumerate(rng.integers(0, 6, (rng.integers(1, 40), 2)).tolist())]
        rounds = _rounds(edges)
        assert sorted(edge for one in rounds for edge in one) == sorted(edges)
        assert len(rounds) == max(max(Counter(edge[side] for edge in edges).values()) for side in (0, 1))
        for one in rounds:
            assert all(len({edge[side] for edge in one}) == len(one) for side in (0, 1))


@pytest.mark.parametrize(
    ("shape", "count", "part"),
    [
        ((), 6, ()),
        ((7,), 6, (7,)),
        ((48, 100), 6, (8, 100)),
        ((14, 9), 6, (7, 3)),  # 2 of the 6 ways over one dimension, 3 over the other
        ((2, 8, 8), 8, (1, 2, 8)),
        ((5, 3), 1, (5, 3)),
    ],
)
def test_arrays_are_spread_over_all_devices_as_far_as_they_divide(shape, count, part):
    found = spread_layout(shape, jax.devices()[:count])
    assert found.shard_shape(shape) == part
    assert found.device_set == set(jax.devices()[:count])
