"""Where the models of a policy-gradient run lie, each by its own option: devices of the mesh, those of generation's own
mesh, or host memory.

A `Placement` is what the options come to; `steps.py` compiles each part for the place where it runs and moves what does
not lie there (`sharding/moves.py`).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm.config import GRPOConfig, PlacementOptions
from jaxrl_lm.models import Model, build, decode_specs
from jaxrl_lm.sharding import HOST, Plan, build_plan, has_host_memory, move, moved_bytes, on_host, spread_layout
from jaxrl_lm.types import TrainState

OPTIONS = ("reference_placement", "reward_placement", "critic_placement", "optimizer_placement")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The two meshes' plans, and where each model lies: "mesh", "rollout_mesh" or "host"."""

    train: Plan
    rollout: Plan  # of generation; that of training where they share their devices
    reference: str = "mesh"
    reward: str = "mesh"
    critic: str = "mesh"
    optimizer: str = "mesh"

    @property
    def apart(self) -> bool:
        """Whether generation has devices of its own."""
        return self.rollout != self.train

    def crosses(self, *, rewards: bool) -> bool:
        """Whether sampling and learning in two threads would give programs to the same several devices. `rewards`: some
        are computed on devices.

        A program of several devices waits on each for its participants. Two threads may reach the devices in different
        orders, and then each program waits for devices that the other holds.
        """
        train, rollout = self.train.mesh.size > 1, self.rollout.mesh.size > 1
        if not self.apart:
            return train
        return (rollout and self.reference == "rollout_mesh") or (train and rewards and self.reward != "rollout_mesh")

    @property
    def trains_everywhere(self) -> bool:
        """Whether every process has devices of training."""
        return len({device.process_index for device in self.train.mesh.devices.flat}) == jax.process_count()

    @property
    def moves_state(self) -> bool:
        """Whether a part of the training state lies in host memory between a step's updates and those of the next."""
        return "host" in (self.critic, self.optimizer)

    def plan(self, where: str) -> Plan:
        """The plan of the devices that a model at this place computes on."""
        return self.rollout if where == "rollout_mesh" else self.train

    def on_rollout(self, model: Model) -> Model:
        """The model on generation's devices. Raises ValueError where their mesh would cut a head."""
        return build(model.config, plan=self.rollout) if self.apart else model

    def rest(self, params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The layouts of trained trees by name, and of their optimiser state, as they lie between updates."""
        critic = lambda name: name == "critic" and self.critic == "host"
        lay = lambda tree, host: on_host(tree) if host else tree
        at_rest = {name: lay(tree, critic(name)) for name, tree in params.items()}
        moments = {name: lay(tree, critic(name) or self.optimizer == "host") for name, tree in params.items()}
        return at_rest, moments


def open_placement(config: GRPOConfig) -> Placement:
    """The placement of a config. Raises ValueError, naming the options, for what there are no devices or memory for."""
    check_places(config)
    where = {name: getattr(config, name) for name in OPTIONS}
    for name, place in where.items():
        if place == "host" and not has_host_memory(jax.local_devices()[0]):
            kind = jax.local_devices()[0].device_kind
            raise ValueError(f"{name}='host': JAX reaches no pinned host memory of {kind} devices: use mesh")
    rules = {"preset": config.sharding_preset, "rules": config.sharding_rules}
    decode = {"decode_rules": config.decode_sharding_rules}
    places = {name.removesuffix("_placement"): place for name, place in where.items()}
    if not config.rollout_mesh:
        plan = build_plan(config.mesh, **rules, **decode)
        return Placement(plan, plan, **places)
    devices = jax.devices()
    count = split_devices(config, len(devices))
    train = build_plan(config.mesh, **rules, **decode, devices=devices[:count])
    try:
        return Placement(train, build_plan(config.rollout_mesh, **decode, devices=devices[count:]), **places)
    except ValueError as error:
        raise ValueError(f"rollout_mesh={config.rollout_mesh}: {error}") from error


def check_places(config: PlacementOptions) -> None:
    """Raises ValueError for a model that is to lie on a rollout mesh that is not given."""
    for name in OPTIONS:
        if getattr(config, name) == "rollout_mesh" and not config.rollout_mesh:
            raise ValueError(f"{name}='rollout_mesh': no rollout_mesh is given: give its axes, or use mesh or host")


def split_devices(config: PlacementOptions, count: int) -> int:
    """How many of `count` devices are those of training. Raises ValueError, naming both meshes, where they do not add up."""
    meshes = {"mesh": config.mesh, "rollout_mesh": config.rollout_mesh}
    said = " and ".join(f"{name}={sizes}" for name, sizes in meshes.items())
    free = [name for name, sizes in meshes.items() if -1 in sizes.values()]
    fixed = {name: math.prod(size for size in sizes.values() if size != -1) for name, sizes in meshes.items()}
    if len(free) > 1:
        raise ValueError(
            f"{said}: at most one of the two may have an axis of -1, which takes the devices that are left"
        )
    if free:
        other = fixed["rollout_mesh" if free == ["mesh"] else "mesh"]
        left = count - other
        if left < 1 or left % fixed[free[0]]:
            raise ValueError(f"{said}: {left} of the {count} devices are left for {free[0]}, which they do not fill")
        return left if free == ["mesh"] else other
    if sum(fixed.values()) != count:
        raise ValueError(
            f"{said}: they have {fixed['mesh']} and {fixed['rollout_mesh']} devices, and there are {count}: sizes must "
            "multiply and add up to them"
        )
    return fixed["mesh"]


def check_placement(config: GRPOConfig, placement: Placement, *, reference: bool, moves: bool) -> None:
    """Raises ValueError for an option that nothing reads, and for sizes that do not divide over generation's devices.

    `reference`: one is kept; `moves`: it is a part of the training state.
    """
    where = f"reference_placement={config.reference_placement!r}"
    if config.reference_placement != "mesh":
        if not reference:
            raise ValueError(f"{where} has no effect: no reference is kept; give beta, or leave it out")
        if moves:
            raise ValueError(
                f"{where}: a reference that moves (reference_ema, reference_reset_steps) is a part of the training state "
                "and lies with it: leave it out"
            )
        if config.lora_rank is not None:
            raise ValueError(
                f"{where} has no effect under lora_rank: the reference is the weights below the adapter, which the policy "
                "reads too: leave it out"
            )
        if "dpo" in config.mix:
            raise ValueError(f"{where}: the stream dpo of mix reads the reference at every update: leave it out")
    if config.critic_placement != "mesh" and config.critic != "separate":
        raise ValueError(
            f"critic_placement={config.critic_placement!r} has no effect on critic={config.critic!r}: it is for "
            "critic='separate'"
        )
    if not placement.apart:
        return
    ways, rows = placement.rollout.batch_ways, config.prompts_per_step * config.num_generations
    sizes = {"prompts_per_step": config.prompts_per_step}
    if config.reference_placement == "rollout_mesh":
        sizes["microbatch_completions"] = config.microbatch_completions or config.minibatch_completions or rows
    for name, size in sizes.items():
        if size % ways:
            raise ValueError(
                f"{name}={size} is not divisible by the {ways} devices of the data and fsdp axes of "
                f"rollout_mesh={config.rollout_mesh}"
            )


def saved_shapes(state: TrainState, placement: Placement) -> TrainState:
    """Shapes of the state, of shapes or arrays, with the layouts in which a checkpoint takes and gives it: as it lies.

    Where a process has no device of training, over the devices of all, in their hosts' memory where they have any: Orbax
    takes only arrays of which every process has a part, and the devices' memory may be needed.
    """
    layouts = jax.tree.map(lambda x: x.sharding, state)
    if not placement.trains_everywhere:
        devices = jax.devices()
        layouts = jax.tree.map(lambda x: spread_layout(x.shape, devices), state)
        layouts = on_host(layouts) if has_host_memory(jax.local_devices()[0]) else layouts
    with_layout = lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
    return jax.tree.map(with_layout, state, layouts)


def as_saved(state: TrainState, placement: Placement) -> TrainState:
    """The state as a checkpoint takes it."""
    return move(state, jax.tree.map(lambda x: x.sharding, saved_shapes(state, placement)))


# --- what a run says of it --------------------------------------------------------------------------------------------


def tree_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes, each counted once."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def weights_moved(model: Model, placement: Placement) -> tuple[int, int]:
    """Bytes of the weights that generation reads, and those that its devices receive when these are laid out anew."""
    specs, is_spec = decode_specs(model.config), lambda node: hasattr(node, "axes")
    shape = lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(model.config.dtype))
    shapes = jax.tree.map(shape, specs, is_leaf=is_spec)
    source, target = placement.train.tree(specs), placement.rollout.for_decode().tree(specs)
    return tree_bytes(shapes), moved_bytes(shapes, source, target)


def placement_notes(
    model: Model,
    placement: Placement,
    state: TrainState,
    rest: TrainState,
    *,
    reference: bool,
    base: Any = None,
    rewards: int = 0,
) -> list[str]:
    """Two lines: what is held where, and what a step moves.

    `state` is one of shapes with layouts, `rest` has the layouts between updates, `rewards` are the bytes of reward models.
    """
    policy, moments = tree_bytes(state.params["policy"]), tree_bytes(state.opt_state)
    weights, received = weights_moved(model, placement)
    in_memory = jax.tree.map(lambda leaf, at: leaf if at.memory_kind == HOST else None, state.opt_state, rest.opt_state)
    held = [
        ("policy", policy + tree_bytes(base), "mesh"),
        ("optimiser state", moments - tree_bytes(in_memory), "mesh"),
        ("optimiser state", tree_bytes(in_memory), "host"),
        ("reference", policy if reference else 0, placement.reference),
        ("critic", tree_bytes(state.params.get("critic")), placement.critic),
        ("reward models", rewards, placement.reward),
        ("weights of generation", weights, "rollout_mesh" if placement.apart else "mesh"),
    ]
    where = lambda place: "in host memory" if place == "host" else f"on {place}"
    moved = [(received, "of weights into generation's layout"), *_through_host(placement, state, rest, reference)]
    if placement.reward == "host":
        moved.append((rewards, "of reward models from host memory, at each call"))
    return [
        "held: " + ", ".join(f"{name} {size(count)} {where(place)}" for name, count, place in held if count),
        "moved a step, over all devices: " + ", ".join(f"{size(count)} {what}" for count, what in moved),
    ]


def _through_host(placement: Placement, state: TrainState, rest: TrainState, reference: bool) -> list[tuple[int, str]]:
    """Bytes of models and moments that a step moves between devices and host memory."""
    layouts, found = jax.tree.map(lambda leaf: leaf.sharding, state), []
    if placement.moves_state:
        params = moved_bytes(state.params, rest.params, layouts.params)
        moments = moved_bytes(state.opt_state, rest.opt_state, layouts.opt_state)
        found.append((params + moments, "of training state from host memory and as much back"))
        if params:
            found.append((params, "of the critic from host memory to score"))
    if reference and placement.reference == "host":
        policy = layouts.params["policy"]
        received = moved_bytes(state.params["policy"], on_host(policy), policy)
        found.append((received, "of the reference from host memory"))
    return found


def size(count: int) -> str:
    """Bytes in words."""
    scale = min(max(count, 1).bit_length() // 10, 3)
    return f"{count / (1 << 10 * scale):.4g} {('B', 'KiB', 'MiB', 'GiB')[scale]}"
