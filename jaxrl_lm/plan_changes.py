"""Changes of a run that a plan tries where a step does not fit."""

import dataclasses
import math
from typing import Any

from jaxrl_lm.models import ModelConfig
from jaxrl_lm.plan_config import PlanConfig
from jaxrl_lm.plan_estimate import candidate_meshes
from jaxrl_lm.plan_memory import moment_changes
from jaxrl_lm.plan_places import Sizes, mesh_sizes
from jaxrl_lm.plan_steps import ROLLOUT_STEPS
from jaxrl_lm.topologies import Topology

SCORING = {"score", "score_reference", "update", "values", "implicit"}  # pass by pass
DECODING = {"prepare_decode", "generate"}  # which have no microbatches


def changes(
    config: PlanConfig, model: ModelConfig, topology: Topology, failed: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Changes worth a try for these steps: those first that cost nothing but time. No mesh takes devices of the other."""
    sizes, steps = mesh_sizes(config, topology), set(failed)
    far = steps & set(ROLLOUT_STEPS) if sizes.rollout_mesh else set()
    found: list[dict[str, Any]] = []
    if steps & SCORING and not steps & DECODING:
        found += _smaller_passes(config, sizes)
    if "update" in failed and config.remat not in (None, "full", "offload"):
        found.append({"remat": "full"})
    if steps - far:
        found += _wider_meshes(config, model, sizes, scoring=bool(steps & SCORING))
    if far:
        found += _wider_rollout_meshes(config, model, sizes)
    if topology.compiled and (far or not sizes.rollout_mesh) and steps & DECODING:
        found += _split_further(config, model, sizes.rollout_mesh or sizes.mesh)
    if "generate" in failed and config.kv_cache_dtype is None:
        found.append({"kv_cache_dtype": "int8"})
    if steps - far:
        found += moment_changes(config)  # every step on the devices of training has them in memory
    if config.param_dtype == "float32" and (steps - far or config.reference_placement == "rollout_mesh"):
        found.append({"param_dtype": "bfloat16"})
    return found


def _ways(mesh: dict[str, int]) -> int:
    return mesh.get("data", 1) * mesh.get("fsdp", 1)


def _far_ways(config: PlanConfig, sizes: Sizes) -> int:
    """Over how many devices of the rollout mesh the rows of a pass are split."""
    return _ways(sizes.rollout_mesh) if config.reference_placement == "rollout_mesh" else 1


def _passes(config: PlanConfig) -> tuple[int, int]:
    """Rows of an update, and of one pass of it."""
    whole = config.minibatch_completions or config.prompts_per_step * config.num_generations
    return whole, config.microbatch_completions or whole


def _smaller_passes(config: PlanConfig, sizes: Sizes) -> list[dict[str, Any]]:
    """A quarter of a pass, and as few rows as the devices allow."""
    whole, micro = _passes(config)
    batch = math.lcm(_ways(sizes.mesh), _far_ways(config, sizes))
    tried = dict.fromkeys(size for size in (micro // 4, batch) if batch <= size < micro)
    return [{"microbatch_completions": size} for size in tried if size % batch == 0 and whole % size == 0]


def _wider_meshes(config: PlanConfig, model: ModelConfig, sizes: Sizes, *, scoring: bool) -> list[dict[str, Any]]:
    """Wider tensor axes on the devices of training, with the microbatch that goes with each."""
    (_, micro), least, found = _passes(config), _ways(sizes.mesh), []
    smaller = {"microbatch_completions": least} if scoring and micro > least else {}
    for other in candidate_meshes(dataclasses.replace(config, **smaller), model, sizes.training):
        ways = math.lcm(_ways(other), _far_ways(config, sizes))
        if other["tensor"] > sizes.mesh.get("tensor", 1) and micro % ways == 0:
            found.append({"mesh": other} | ({"microbatch_completions": ways} if scoring and micro > ways else {}))
    return found


def _wider_rollout_meshes(config: PlanConfig, model: ModelConfig, sizes: Sizes) -> list[dict[str, Any]]:
    """Wider tensor axes on the devices of generation, which has no microbatches; a reference there has."""
    whole = {"microbatch_completions": None, "minibatch_completions": None}
    asked = config if config.reference_placement == "rollout_mesh" else dataclasses.replace(config, **whole)
    others = candidate_meshes(asked, model, math.prod(sizes.rollout_mesh.values()))
    return [{"rollout_mesh": one} for one in others if one["tensor"] > sizes.rollout_mesh.get("tensor", 1)]


def _split_further(config: PlanConfig, model: ModelConfig, mesh: dict[str, int]) -> list[dict[str, Any]]:
    """Feed-forward weights of generation over fsdp too."""
    tensor, fsdp = (mesh.get(axis, 1) for axis in ("tensor", "fsdp"))
    if fsdp == 1 or config.decode_sharding_rules or model.intermediate_size % (tensor * fsdp):
        return []
    return [{"decode_sharding_rules": {"mlp": "tensor+fsdp"}}]
