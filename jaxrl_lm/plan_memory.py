"""What each model of a run takes of a device's memory, and what a run would save by doing without: from shapes alone.

Next to read: `plan_steps.py` (the steps that these stand beside).
"""

import dataclasses
import importlib.util
import math
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
from jaxrl_lm.steps import state_shardings, trained_specs

LORA_RANK = 16  # of the adapter that a reference would be shared through


class Part(NamedTuple):
    """Bytes of one device."""

    model: str  # by its name in a run: policy, critic, prm, reference, base, prm_reference, decode, a reward model's option
    part: str  # weights, moments (of the optimiser), gradients (while an update runs)
    bytes: float


class Saving(NamedTuple):
    """What a change would save of one device's memory, in bytes."""

    change: str
    options: dict[str, Any]
    held: float  # all the time
    gradients: float  # and while an update runs


def model_memory(config: PlanConfig, model_config: ModelConfig, plan: Plan) -> list[Part]:
    """The parts of every model of the run.

    Raises ValueError or FileNotFoundError for a reward model whose shape cannot be read, ImportError as `optim.py`.
    """
    model = build(with_machine_defaults(config, model_config), plan=plan)
    specs = trained_specs(model, lora=lora_of(config), critic=config.critic, prm=config.implicit_prm is not None)
    found = [part for name, tree in specs.items() for part in _trained(config, name, tree, plan)]
    of = {part.model: part.bytes for part in found if part.part == "weights"}
    if lora_of(config) is not None:
        found.append(Part("base", "weights", device_bytes(weights_of(model.specs, plan, config.param_dtype))))
    if needs_reference(config) or moves_reference(config):
        found.append(Part("reference", "weights", of["policy"]))
    if "prm" in of:
        found.append(Part("prm_reference", "weights", of["prm"]))
    decode = weights_of(decode_specs(model.config), plan.for_decode(), model.config.dtype)
    found.append(Part("decode", "weights", device_bytes(decode)))
    rewards = reward_models(config, model, plan)
    return found + [Part(name, "weights", device_bytes(tree)) for name, tree in rewards.items()]


def _trained(config: PlanConfig, name: str, specs: Any, plan: Plan) -> list[Part]:
    """The parts of a tree that is trained; gradients are, with several microbatches, their float32 sum and one's own."""
    _, tx = optimizer_of(config, total_steps=1 + config.warmup_steps)
    state, _ = state_shardings({name: specs}, plan, tx, config.param_dtype)
    weights = device_bytes(state.params)
    moments = device_bytes([leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim])
    sums = weights * 4 / jnp.dtype(config.param_dtype).itemsize if microbatches_of(config) > 1 else 0.0
    return [Part(name, "weights", weights), Part(name, "moments", moments), Part(name, "gradients", weights + sums)]


def savings(config: PlanConfig, model_config: ModelConfig, plan: Plan) -> list[Saving]:
    """What each change that this run could make would save: the difference of two countings."""
    now, found = model_memory(config, model_config, plan), []
    for words, options in _changes(config):
        other = model_memory(dataclasses.replace(config, **options), model_config, plan)
        held, gradients = (_total(now, kind) - _total(other, kind) for kind in ("held", "gradients"))
        found.append(Saving(words, options, held, gradients))
    return found


def _total(parts: list[Part], kind: str) -> float:
    """Bytes of gradients, or of what is held all the time: all but those and the copy that decoding makes."""
    chosen = lambda one: one.part == "gradients" if kind == "gradients" else one.part != "gradients"
    return math.fsum(one.bytes for one in parts if chosen(one) and one.model != "decode")


def _changes(config: PlanConfig) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    if config.critic != "none":
        found.append(("no critic (an algorithm without values)", {"critic": "none"}))
    if needs_reference(config) and config.lora_rank is None:
        words = f"the reference shared with the policy through LoRA (lora_rank {LORA_RANK})"
        found.append((words, {"lora_rank": LORA_RANK}))
    without = {"beta": 0.0, "reference_ema": None, "reference_reset_steps": None}
    if needs_reference(config) and not needs_reference(dataclasses.replace(config, **without)):
        found.append(("beta 0 (no reference)", without))
    return found + [(f"moments_dtype {one['moments_dtype']}", one) for one in moment_changes(config)]


def moment_changes(config: PlanConfig) -> list[dict[str, str]]:
    """Options for smaller moments than the config's; int8 where its extra is installed."""
    dtypes = ["float32", "bfloat16", "int8"][: 3 if importlib.util.find_spec("qwix") else 2]
    return [{"moments_dtype": name} for name in dtypes[dtypes.index(config.moments_dtype) + 1 :]]
