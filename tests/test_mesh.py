"""Meshes over slices and hosts: which axes cross the slow network. The devices are made up; JAX's own code places them."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxrl_lm.sharding import AXES, make_mesh
from jaxrl_lm.sharding.mesh import arrange, between_slices, mesh_shape


@dataclasses.dataclass(frozen=True)
class Chip:
    """What JAX reads of a device when it arranges them."""

    id: int
    slice_index: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5p"


@dataclasses.dataclass(frozen=True)
class Card:
    """A device of a host without slices."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "H100"


def slices(count, torus=(2, 2, 2)):
    size = math.prod(torus)
    return [
        Chip(one * size + n, one, one * size // 4 + n // 4, tuple(int(i) for i in np.unravel_index(n, torus)))
        for one in range(count)
        for n in range(size)
    ]


def crossing(grid, of):
    """The mesh axes along which a device's neighbours have another value of `of`."""
    places = np.vectorize(of)(grid)
    return {axis for n, axis in enumerate(AXES) if (places != np.take(places, [0], axis=n)).any()}


@pytest.mark.parametrize(
    ("sizes", "count", "outer"),
    [
        ({"data": -1, "fsdp": 4, "tensor": 2}, 2, {"data"}),
        ({"data": 2, "fsdp": -1, "tensor": 2}, 4, {"data", "fsdp"}),
        ({"fsdp": -1, "tensor": 8}, 2, {"fsdp"}),
        ({"fsdp": 2, "sequence": 4, "tensor": 2}, 2, {"fsdp"}),
        ({"data": 8, "fsdp": 2, "sequence": 2}, 4, {"data"}),
        ({"data": 6, "fsdp": -1}, 3, {"data"}),
        ({"data": 2, "fsdp": 12}, 3, {"fsdp"}),
    ],
)
def test_only_the_outer_axes_cross_slices(sizes, count, outer):
    devices = slices(count)
    shape = mesh_shape(sizes, len(devices))
    grid = arrange(shape, devices)
    assert grid.shape == tuple(shape.values())
    assert sorted(device.id for device in grid.flat) == [device.id for device in devices]
    assert crossing(grid, lambda device: device.slice_index) == outer


def test_slices_are_found_in_any_order_of_devices():
    devices = slices(2)
    shape = mesh_shape({"data": 2, "fsdp": 4, "tensor": 2}, 16)
    shuffled = [devices[i] for i in np.random.default_rng(0).permutation(16)]
    assert crossing(arrange(shape, shuffled), lambda device: device.slice_index) == {"data"}


@pytest.mark.parametrize(
    ("sizes", "slices", "expected"),
    [
        ({"data": 4, "fsdp": 8}, 2, (2, 1)),
        ({"data": 2, "fsdp": 8}, 8, (2, 4)),
        ({"data": 3, "fsdp": 8}, 6, (3, 2)),
        ({"data": 4, "fsdp": 6}, 6, (2, 3)),
    ],
)
def test_data_takes_the_slices_first_then_fsdp(sizes, slices, expected):
    shape = dict.fromkeys(AXES, 1) | sizes
    assert between_slices(shape, slices) == dict.fromkeys(AXES, 1) | dict(zip(sizes, expected, strict=True))


def test_tensor_and_sequence_stay_inside_of_a_slice():
    with pytest.raises(ValueError, match=r"mesh: 2 slices do not divide over data=1 and fsdp=1; .* multiple of 2"):
        arrange(mesh_shape({"sequence": 4, "tensor": 4}, 16), slices(2))


def test_slices_of_different_size_are_refused():
    with pytest.raises(ValueError, match=r"mesh: the 2 slices have \[4, 8\] devices: a mesh needs equal slices"):
        arrange(mesh_shape({"data": -1}, 12), slices(2)[:12])


def test_on_one_slice_an_axis_may_be_a_part_of_an_axis_of_the_torus():
    grid = arrange(mesh_shape({"fsdp": -1, "tensor": 2}, 64), slices(1, (4, 4, 4)))
    first, second = grid.reshape(-1, 2)[0]
    assert sum(abs(a - b) for a, b in zip(first.coords, second.coords, strict=True)) == 1  # neighbours


def test_hosts_without_slices_hold_the_inner_axes():
    cards = [Card(n, n // 4) for n in range(8)]
    host = lambda device: device.process_index
    assert crossing(arrange(mesh_shape({"fsdp": 2, "tensor": 4}, 8), cards), host) == {"fsdp"}
    assert crossing(arrange(mesh_shape({"data": 2, "sequence": 2, "tensor": 2}, 8), cards), host) == {"data"}
    assert crossing(arrange(mesh_shape({"tensor": 8}, 8), cards), host) == {"tensor"}  # no other way, and NCCL can


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": -1}, {"sequence": 4, "fsdp": -1}])
def test_one_kind_of_device_is_arranged_as_jax_does(sizes):
    mesh = make_mesh(sizes)
    theirs = jax.make_mesh(tuple(mesh.shape.values()), AXES, axis_types=(AxisType.Auto,) * 4)
    assert mesh == theirs


def test_the_expert_axis_is_reserved():
    with pytest.raises(ValueError, match="mesh: expert=2: this axis is reserved and nothing is split over it yet"):
        make_mesh({"fsdp": -1, "expert": 2})
    assert make_mesh({"fsdp": -1, "expert": 1}) == make_mesh({"fsdp": -1})
    with pytest.raises(ValueError, match="expert=-1"):
        make_mesh({"expert": -1})


def test_a_part_of_a_slice_is_a_box_of_it():
    chips = slices(1, (4, 4, 1))
    assert arrange(mesh_shape({"fsdp": -1}, 12), chips[4:]).size == 12  # three rows
    with pytest.raises(ValueError, match="mesh: these 6 devices are no box of the TPU's torus"):
        arrange(mesh_shape({"fsdp": -1}, 6), chips[:6])
