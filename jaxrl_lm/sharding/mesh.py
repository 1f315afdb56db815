"""Device meshes: always the same four axes, always Auto, never a global.

The axes are ordered from the one that talks least to the one that talks most: data, fsdp, sequence, tensor. Of several
TPU slices the outer axes are split over the network between them (DCN), the rest lies on the links of a slice (ICI).
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "sequence", "tensor")
RESERVED = ("expert",)  # for mixtures of experts; of size 1 until there are any
BETWEEN_SLICES = ("data", "fsdp")  # axes that may be split over DCN, in this order


def make_mesh(sizes: dict[str, int], *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes data, fsdp, sequence and tensor; absent ones have size 1, one may be -1 (what is left).

    Raises ValueError for an unknown axis, an axis expert above 1, sizes that do not multiply to the number of devices,
    slices that the outer axes do not divide over, and a part of a TPU slice that is no box of it.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = mesh_shape(sizes, len(devices))
    return Mesh(arrange(shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_shape(sizes: dict[str, int], count: int) -> dict[str, int]:
    """The size of every axis on `count` devices. Raises ValueError as `make_mesh`."""
    unknown = sorted(set(sizes) - {*AXES, *RESERVED})
    if unknown:
        raise ValueError(f"mesh: unknown axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
    for axis in RESERVED:
        if sizes.get(axis, 1) != 1:
            raise ValueError(f"mesh: {axis}={sizes[axis]}: this axis is reserved and nothing is split over it yet")
    shape = {axis: sizes.get(axis, 1) for axis in AXES}
    free = [axis for axis, size in shape.items() if size == -1]
    fixed = math.prod(size for size in shape.values() if size != -1)
    if len(free) > 1 or fixed < 1 or any(size == 0 or size < -1 for size in shape.values()):
        raise ValueError(f"mesh={sizes}: sizes are positive, and at most one of them is -1")
    if free:
        shape[free[0]] = count // fixed
    if math.prod(shape.values()) != count:
        raise ValueError(f"mesh={sizes} does not multiply to the {count} devices that there are")
    return shape


def arrange(shape: dict[str, int], devices: Sequence[Any]) -> np.ndarray:
    """The devices as an array of this shape: neighbours of the inner axes are near to each other.

    Devices of several slices: the outer axes go over the slices (`between_slices`). Otherwise JAX's own choice, which on
    a single TPU slice follows its torus, and elsewhere is the order of the devices, host by host.
    """
    options = {"allow_split_physical_axes": True}  # an axis may be a part of one of the torus, where no other way fits
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) == 1:
        if not is_box(devices):
            raise ValueError(
                f"mesh: these {len(devices)} devices are no box of the TPU's torus, and a mesh on one slice needs a box: "
                "take other sizes, such as whole rows of the slice"
            )
        return mesh_utils.create_device_mesh(tuple(shape.values()), devices, **options)
    sizes = [sum(getattr(device, "slice_index", 0) == one for device in devices) for one in slices]
    if len(set(sizes)) > 1:
        raise ValueError(f"mesh: the {len(slices)} slices have {sorted(sizes)} devices: a mesh needs equal slices")
    outer = between_slices(shape, len(slices))
    inner = tuple(shape[axis] // outer[axis] for axis in shape)
    return mesh_utils.create_hybrid_device_mesh(inner, tuple(outer.values()), devices, **options)


def is_box(devices: Sequence[Any]) -> bool:
    """Whether TPUs of one slice fill a box of its torus, as JAX needs to lay a mesh on them; other devices lie on none."""
    places = {tuple(device.coords) for device in devices if getattr(device, "platform", None) == "tpu"}
    return not places or math.prod(extent(places)) == len(places)


def extent(places: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    """The sizes of the least box that holds these coordinates."""
    return tuple(max(axis) - min(axis) + 1 for axis in zip(*places, strict=True))


def between_slices(shape: dict[str, int], slices: int) -> dict[str, int]:
    """Over how many slices each axis goes: data as far as it divides, then fsdp.

    Raises ValueError where that does not use up the slices: sequence and tensor talk within each layer, and stay inside.
    """
    outer, left = dict.fromkeys(shape, 1), slices
    for axis in BETWEEN_SLICES:
        outer[axis] = math.gcd(shape[axis], left)
        left //= outer[axis]
    if left > 1:
        raise ValueError(
            f"mesh: {slices} slices do not divide over data={shape['data']} and fsdp={shape['fsdp']}; sequence and "
            f"tensor stay inside of a slice, so data × fsdp must be a multiple of {slices}"
        )
    return outer
