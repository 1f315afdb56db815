"""Which devices of a topology the meshes of a planned run take, what stands in for a part of a slice that the compiler
refuses, and what the weights' way from one part to the other takes.

Next to read: `plan_steps.py` (what runs where).
"""

import itertools
import math
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxrl_lm.memory import device_bytes
from jaxrl_lm.models import ModelConfig, decode_specs
from jaxrl_lm.placement import split_devices, tree_bytes
from jaxrl_lm.plan_config import PlanConfig
from jaxrl_lm.plan_steps import weights_of, with_machine_defaults
from jaxrl_lm.sharding import Plan, make_mesh, ruled
from jaxrl_lm.sharding.mesh import extent, is_box, mesh_shape
from jaxrl_lm.topologies import Topology, parse_topology, topology_devices


class Sizes(NamedTuple):
    """The axes of the two meshes with the free one resolved."""

    mesh: dict[str, int]
    rollout_mesh: dict[str, int]  # empty: generation on the devices of training

    @property
    def training(self) -> int:
        """Devices of training."""
        return math.prod(self.mesh.values())


class Place(NamedTuple):
    """The devices that a mesh is compiled for."""

    topology: Topology  # that has them
    devices: list[Any]

    @property
    def whole(self) -> bool:
        return len(self.devices) == self.topology.count


def mesh_sizes(config: PlanConfig, topology: Topology) -> Sizes:
    """The sizes of both meshes. Raises ValueError as `make_mesh` and `split_devices`."""
    where, count = topology.name, topology.count
    try:
        own = split_devices(config, count) if config.rollout_mesh else count
        train = mesh_shape(config.mesh, own)
        where += f": rollout_mesh={config.rollout_mesh}"
        rollout = mesh_shape(config.rollout_mesh, count - own) if config.rollout_mesh else {}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    short = lambda shape, given: {axis: size for axis, size in shape.items() if size > 1 or axis in given}
    return Sizes(short(train, config.mesh), short(rollout, config.rollout_mesh))


def places_of(config: PlanConfig, topology: Topology) -> dict[str, Place]:
    """The devices of the slice that each mesh takes, as in a run: `mesh` the first ones, `rollout_mesh` the others.

    Raises ValueError, naming the sizes that would do, where one of the two is no box of the torus, and as
    `topology_devices`.
    """
    devices = topology_devices(topology)
    if not config.rollout_mesh:
        return {"mesh": Place(topology, devices)}
    boxes = lambda count: is_box(devices[:count]) and is_box(devices[count:])
    count = mesh_sizes(config, topology).training
    if not boxes(count):
        found = [str(one) for one in range(1, len(devices)) if boxes(one)]
        raise ValueError(
            f"{topology.name}: mesh={config.mesh} takes the first {count} devices and rollout_mesh={config.rollout_mesh} "
            f"the other {len(devices) - count}, which are no two boxes of the torus: give mesh {', '.join(found)} devices"
        )
    return {"mesh": Place(topology, devices[:count]), "rollout_mesh": Place(topology, devices[count:])}


def stand_in(place: Place) -> Place:
    """A slice of its own with as many chips as a part that the compiler refuses, of the same shape if there is one.

    Raises ValueError where no slice has so many chips.
    """
    kind, dimensions = place.topology.name.partition(":")[0], place.topology.chip.dimensions
    box = extent({tuple(device.coords) for device in place.devices})[:dimensions]
    for shape in [
        *sorted(set(itertools.permutations(box)), key=lambda one: one != box),
        *_boxes(math.prod(box), dimensions),
    ]:
        other = parse_topology(f"{kind}:{'x'.join(map(str, shape))}")
        try:
            return Place(other, topology_devices(other))
        except ValueError:
            continue
    raise ValueError(
        f"the compiler refuses programs for {len(place.devices)} of the devices of {place.topology.name}, and knows no "
        f"{kind} slice of {len(place.devices)} chips: change mesh and rollout_mesh"
    )


def _boxes(count: int, dimensions: int) -> list[tuple[int, ...]]:
    """The shapes of so many chips, sizes ascending, the most compact first."""
    if dimensions == 1:
        return [(count,)]
    parts = [first for first in range(1, count + 1) if count % first == 0]
    found = {tuple(sorted((first, *rest))) for first in parts for rest in _boxes(count // first, dimensions - 1)}
    return sorted(found, key=lambda shape: (sum(shape), shape))


def plans_of(config: PlanConfig, sizes: Sizes, places: dict[str, Place] | None = None) -> tuple[Plan, Plan | None]:
    """The plans of training and, where it has a mesh of its own, of generation; without `places` without devices.

    Raises ValueError, naming the option, for rules that do not fit.
    """
    rules = {"preset": config.sharding_preset, "rules": config.sharding_rules}
    decode = {"decode_rules": config.decode_sharding_rules}
    mesh = lambda name, given: _described(given) if places is None else make_mesh(given, devices=places[name].devices)
    train = ruled(mesh("mesh", sizes.mesh), **rules, **decode)
    if not sizes.rollout_mesh:
        return train, None
    try:
        return train, ruled(mesh("rollout_mesh", sizes.rollout_mesh), preset=None, rules={}, **decode)
    except ValueError as error:
        raise ValueError(f"rollout_mesh={config.rollout_mesh}: {error}") from error


def _described(sizes: dict[str, int]) -> Mesh | AbstractMesh:
    shape = mesh_shape(sizes, math.prod(sizes.values()))
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


# --- from one mesh to the other ---------------------------------------------------------------------------------------


class Transfer(NamedTuple):
    """The weights of generation on their way from the devices of training to its own, once a step."""

    weights: float  # bytes, each once: all of them cross between the two sets of devices
    received: float  # bytes that the devices of generation receive together, copies among themselves included
    seconds: float  # a lower bound


def weights_transfer(
    config: PlanConfig, model_config: ModelConfig, plan: Plan, rollout: Plan, topology: Topology
) -> Transfer:
    """What the weights' way takes at least: the links between the two sets carry each byte once, those of a device all
    that it receives.
    """
    model = with_machine_defaults(config, model_config)
    tree = weights_of(decode_specs(model), rollout.for_decode(), model.dtype)
    between, into = link_rates(topology, plan.mesh.size)
    weights, own = float(tree_bytes(tree)), device_bytes(tree)
    return Transfer(weights, own * rollout.mesh.size, max(weights / between, own / into))


def link_rates(topology: Topology, count: int) -> tuple[float, float]:
    """Bytes a second between the first `count` devices and the others, and into one device, one way, at most.

    A torus is taken as closed along every axis, which a slice need not be.
    """
    chip, rest = topology.chip, topology.count - count
    if topology.compiled:
        devices = topology_devices(topology)
        places = [tuple(device.coords) for device in devices]
        return links_between(places[:count], places[count:]) * chip.link, 2 * chip.dimensions * chip.link
    near = not chip.fast_group or topology.count <= chip.fast_group
    return min(count, rest) * (chip.link if near else chip.slow_ring), chip.link


def links_between(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> int:
    """Pairs of neighbours, one of each set, in the torus that the two fill."""
    sizes, others = extent({*first, *second}), set(second)
    pairs = set()
    for place in first:
        for axis, size in enumerate(sizes):
            for step in (-1, 1):
                near = (*place[:axis], (place[axis] + step) % size, *place[axis + 1 :])
                if near in others:
                    pairs.add((place, near))
    return len(pairs)
