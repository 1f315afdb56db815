"""Device meshes: always the same three axes, always Auto, never a global."""

import math

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")


def make_mesh(sizes: dict[str, int], *, devices=None) -> Mesh:
    """A mesh with the axes data, fsdp and tensor; absent ones have size 1, one may be -1 (what is left).

    Raises ValueError for an unknown axis or sizes that do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    unknown = sorted(set(sizes) - set(AXES))
    if unknown:
        raise ValueError(f"mesh: unknown axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
    shape = {axis: sizes.get(axis, 1) for axis in AXES}
    free = [axis for axis, size in shape.items() if size == -1]
    fixed = math.prod(size for size in shape.values() if size != -1)
    if len(free) > 1 or fixed < 1 or any(size == 0 or size < -1 for size in shape.values()):
        raise ValueError(f"mesh={sizes}: sizes are positive, and at most one of them is -1")
    if free:
        shape[free[0]] = len(devices) // fixed
    if math.prod(shape.values()) != len(devices):
        raise ValueError(f"mesh={sizes} does not multiply to the {len(devices)} devices that there are")
    return jax.make_mesh(tuple(shape.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
