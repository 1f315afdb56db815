"""What each model of a run takes of a device's memory, and what a run would save by doing without: from shapes alone.

Next to read: `plan_steps.py` (the steps that these stand beside).
"""

import dataclasses
import importlib.util
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm.assemble import lora_of
from jaxrl_lm.checks import moves_reference, needs_reference
from jaxrl_lm.memory import device_bytes
from jaxrl_lm.models import ModelConfig, build, decode_specs
from jaxrl_lm.optim import optimizer_of
from jaxrl_lm.plan_config import PlanConfig
from jaxrl_lm.plan_steps import reward_models, weights_of, with_machine_defaults
from jaxrl_lm.prepare import microbatches_of
from jaxrl_lm.sharding import Plan
from jaxrl_lm.train_state import state_shardings, trained_specs

LORA_RANK = 16  # of the adapter that a reference would be shared through


class Part(NamedTuple):
    """Bytes of one device."""

    model: str  # by its name in a run: policy, critic, prm, reference, base, prm_reference, decode, a reward model's option
    part: str  # weights, moments (of the optimiser), gradients (while an update runs)
    bytes: float
    place: str = "mesh"  # whose devices: mesh or rollout_mesh; host: in the memory of the device's host


class Saving(NamedTuple):
    """What a change would save of one device's memory, in bytes."""

    change: str
    options: dict[str, Any]
    held: float  # all the time, of a device of training
    gradients: float  # and while an update runs
    rollout_held: float = 0.0  # all the time, of a device of the rollout mesh


def model_memory(config: PlanConfig, model_config: ModelConfig, plan: Plan, rollout: Plan | None = None) -> list[Part]:
    """The parts of every model of the run. `rollout`: the plan of the rollout mesh.

    Raises ValueError or FileNotFoundError for a reward model whose shape cannot be read, ImportError as `optim.py`.
    """
    apart, on_rollout = "mesh" if rollout is None else "rollout_mesh", rollout or plan
    model = build(with_machine_defaults(config, model_config, plan), plan=plan)
    specs = trained_specs(model, lora=lora_of(config), critic=config.critic, prm=config.implicit_prm is not None)
    found = [part for name, tree in specs.items() for part in _trained(config, name, tree, plan)]
    of = {part.model: part.bytes for part in found if part.part == "weights"}
    if lora_of(config) is not None:
        found.append(Part("base", "weights", device_bytes(weights_of(model.specs, plan, config.param_dtype))))
    if needs_reference(config) or moves_reference(config):
        place, size = config.reference_placement, of["policy"]
        if place == "rollout_mesh":
            size = device_bytes(weights_of(model.specs, on_rollout, config.param_dtype))
        found.append(Part("reference", "weights", size, place))
    if "prm" in of:
        found.append(Part("prm_reference", "weights", of["prm"]))
    decode = weights_of(decode_specs(model.config), on_rollout.for_decode(), model.config.dtype)
    found.append(Part("decode", "weights", device_bytes(decode), apart))
    place = config.reward_placement
    rewards = reward_models(config, model, on_rollout if place == "rollout_mesh" else plan)
    return found + [Part(name, "weights", device_bytes(tree), place) for name, tree in rewards.items()]


def _trained(config: PlanConfig, name: str, specs: Any, plan: Plan) -> list[Part]:
    """The parts of a tree that is trained; gradients are, with several microbatches, their float32 sum and one's own."""
    _, tx = optimizer_of(config, total_steps=1 + config.warmup_steps)
    state, _ = state_shardings({name: specs}, plan, tx, config.param_dtype)
    weights = device_bytes(state.params)
    moments = device_bytes([leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim])
    sums = weights * 4 / jnp.dtype(config.param_dtype).itemsize if microbatches_of(config) > 1 else 0.0
    place = config.critic_placement if name == "critic" else "mesh"
    moved = "host" if "host" in (place, config.optimizer_placement) else "mesh"
    return [
        Part(name, "weights", weights, place),
        Part(name, "moments", moments, moved),
        Part(name, "gradients", weights + sums),
    ]


def savings(config: PlanConfig, model_config: ModelConfig, plan: Plan, rollout: Plan | None = None) -> list[Saving]:
    """What each change that this run could make would save: the difference of two countings."""
    now, found = model_memory(config, model_config, plan, rollout), []
    for words, options in _changes(config):
        other = model_memory(dataclasses.replace(config, **options), model_config, plan, rollout)
        saved = lambda total, place, other=other: total(now, place) - total(other, place)
        numbers = (saved(_held, "mesh"), saved(_gradients, "mesh"), saved(_held, "rollout_mesh"))
        found.append(Saving(words, options, *numbers))
    return found


def _held(parts: list[Part], place: str) -> float:
    """Bytes that are held all the time on the devices of a mesh: no gradients, nor the copy that decoding makes."""
    return _sum(one for one in parts if one.part != "gradients" and one.model != "decode" and one.place == place)


def _gradients(parts: list[Part], place: str) -> float:
    return _sum(one for one in parts if one.part == "gradients" and one.place == place)


def _sum(parts: Iterable[Part]) -> float:
    return math.fsum(one.bytes for one in parts)


def _changes(config: PlanConfig) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    if config.critic != "none":
        on_mesh = {} if config.critic_placement == "mesh" else {"critic_placement": "mesh"}
        found.append(("no critic (an algorithm without values)", {"critic": "none"} | on_mesh))
    # A place of no reference, or of one that is shared, would be refused.
    on_mesh = {} if config.reference_placement == "mesh" else {"reference_placement": "mesh"}
    if needs_reference(config) and config.lora_rank is None:
        words = f"the reference shared with the policy through LoRA (lora_rank {LORA_RANK})"
        found.append((words, {"lora_rank": LORA_RANK} | on_mesh))
    without = {"beta": 0.0, "reference_ema": None, "reference_reset_steps": None}
    if needs_reference(config) and not needs_reference(dataclasses.replace(config, **without)):
        found.append(("beta 0 (no reference)", without | on_mesh))
    return found + [(f"moments_dtype {one['moments_dtype']}", one) for one in moment_changes(config)]


def moment_changes(config: PlanConfig) -> list[dict[str, str]]:
    """Options for smaller moments than the config's; int8 where its extra is installed."""
    dtypes = ["float32", "bfloat16", "int8"][: 3 if importlib.util.find_spec("qwix") else 2]
    return [{"moments_dtype": name} for name in dtypes[dtypes.index(config.moments_dtype) + 1 :]]
