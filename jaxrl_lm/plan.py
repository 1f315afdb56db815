"""`jaxrl-lm plan`: from options and a topology to a report of what a run would need, before anybody pays for it.

Every step is compiled for the topology by its own compiler (`plan_steps.py`), its numbers are read from what comes out
(`plan_report.py`); GPUs are estimated (`plan_estimate.py`). What does not fit is changed and tried again.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxrl_lm.models import ModelConfig
from jaxrl_lm.plan_config import PlanConfig, open_model_config
from jaxrl_lm.plan_estimate import candidate_meshes, choose_mesh, estimate, parameters
from jaxrl_lm.plan_memory import model_memory, moment_changes, savings
from jaxrl_lm.plan_report import StepReport, measure, out_of_memory, run_numbers, traced_flops
from jaxrl_lm.plan_steps import PlannedStep, check_plannable, trace_steps
from jaxrl_lm.sharding import Plan, make_mesh, ruled
from jaxrl_lm.sharding.mesh import mesh_shape
from jaxrl_lm.topologies import GIB, Topology, parse_topology, topology_devices

Say = Callable[[str], None]


def to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def run_plan(config: PlanConfig, *, say: Say = to_stderr) -> dict[str, Any]:
    """The report as a dict; `plan_table.py` writes it. `say` hears of the progress.

    Raises ValueError or FileNotFoundError for options, models and topologies that do not exist or do not go together,
    ImportError where the TPU compiler is needed and not installed.
    """
    topology, model = parse_topology(config.topology), open_model_config(config.model)
    check_plannable(config)
    notes = []
    if not config.mesh:
        config = dataclasses.replace(config, mesh=choose_mesh(config, model, topology))
        notes.append("the mesh is the least tensor axis that fits by estimate; give --mesh for another")
    if topology.compiled:
        steps = compile_steps_for(config, model, topology, say=say)
    else:
        steps = estimate(config, model, _sizes(config, topology), topology)
        notes.append("ESTIMATE by arithmetic: nothing was compiled for these devices")
    fits, plan = all(step.fits for step in steps), layouts(config, without_devices(config, topology))
    return {
        "model": config.model,
        "parameters": parameters(model),
        "topology": topology.name,
        "chip": topology.chip.name,
        "devices": topology.count,
        "compiled": topology.compiled,
        "mesh": _sizes(config, topology),
        "completions": config.prompts_per_step * config.num_generations,
        "notes": notes,
        "fits": fits,
        "steps": steps,
        "memory": model_memory(config, model, plan),
        "savings": savings(config, model, plan),
        "run": run_numbers(steps, config, topology) if fits else None,
        "suggestions": [] if fits else suggest(config, model, topology, steps, say=say),
    }


def _sizes(config: PlanConfig, topology: Topology) -> dict[str, int]:
    """The mesh with its free axis resolved. Raises ValueError as `make_mesh`."""
    try:
        shape = mesh_shape(config.mesh, topology.count)
    except ValueError as error:
        raise ValueError(f"{topology.name}: {error}") from error
    return {axis: size for axis, size in shape.items() if size > 1 or axis in config.mesh}


def layouts(config: PlanConfig, mesh: Mesh | AbstractMesh) -> Plan:
    """The plan of a mesh, or of one without its devices."""
    rules = {"rules": config.sharding_rules, "decode_rules": config.decode_sharding_rules}
    return ruled(mesh, preset=config.sharding_preset, **rules)


def without_devices(config: PlanConfig, topology: Topology) -> AbstractMesh:
    """The mesh's description. Raises ValueError where it does not multiply to the devices."""
    shape = mesh_shape(_sizes(config, topology), topology.count)
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def compile_steps_for(
    config: PlanConfig, model: ModelConfig, topology: Topology, *, say: Say, only: tuple[str, ...] = ()
) -> list[StepReport]:
    """The steps' numbers, each compiled for the topology, two at a time; `only` names some."""
    plan = layouts(config, make_mesh(_sizes(config, topology), devices=topology_devices(topology)))
    planned = [step for name, step in trace_steps(config, model, plan).items() if not only or name in only]
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        jobs = []
        for step in planned:
            traced = step.trace()  # tracing stays in this thread: compiling does not hold it up
            jobs.append(pool.submit(_compile, step, traced, traced.lower(), config, topology, say))
        return [job.result() for job in jobs]


def _compile(
    step: PlannedStep, traced: Any, lowered: Any, config: PlanConfig, topology: Topology, say: Say
) -> StepReport:
    say(f"{step.name}: compiling for {topology.name}")
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        report = out_of_memory(step, str(error), topology, seconds=time.perf_counter() - start)
        say(f"{step.name}: {report.error} ({report.compile_seconds:.0f} s)")
        return report
    seconds = time.perf_counter() - start
    report = measure(step, traced, compiled, config, topology, seconds=seconds)
    say(f"{step.name}: {report.used / GIB:.1f} of {report.available / GIB:.1f} GiB ({seconds:.0f} s)")
    if (
        step.name != "generate"
    ):  # the only one whose layers are no loop: of a loop the compiler counts one run, or several
        return report
    counted = (compiled.cost_analysis() or {}).get("flops")
    ours = traced_flops(traced, config, topology.count, once=True)
    return dataclasses.replace(report, flops_ratio=counted / ours if counted else None)


def suggest(
    config: PlanConfig, model: ModelConfig, topology: Topology, steps: list[StepReport], *, say: Say
) -> list[dict[str, Any]]:
    """Changes that were tried on the steps that do not fit, and what became of them; ends with the first that helps."""
    failed = tuple(step.name for step in steps if not step.fits)
    found = []
    for change in changes(config, model, topology, failed)[: config.max_suggestions]:
        words = " ".join(f"--{name} {value}" for key, given in change.items() for name, value in _flat(key, given))
        say(f"does not fit: trying {words}")
        other = dataclasses.replace(config, **change)
        if topology.compiled:
            tried = compile_steps_for(other, model, topology, say=say, only=failed)
        else:
            tried = [one for one in estimate(other, model, _sizes(other, topology), topology) if one.name in failed]
        still = [f"{one.name} {one.used / GIB:.1f} GiB" for one in tried if not one.fits]
        rest = ", ".join(f"{one.name} {one.used / GIB:.1f} GiB" for one in tried)
        result = f"does not fit: {', '.join(still)}" if still else f"fits: {rest} of {topology.chip.hbm / GIB:.1f} GiB"
        found.append({"change": words, "options": change, "fits": not still, "result": result})
        if not still:
            break
    return found


def _flat(key: str, value: Any) -> list[tuple[str, Any]]:
    """An option as the command line has it."""
    return [(f"{key}.{name}", one) for name, one in value.items()] if isinstance(value, dict) else [(key, value)]


def changes(
    config: PlanConfig, model: ModelConfig, topology: Topology, failed: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Changes worth a try for these steps: those first that cost nothing but time."""
    mesh, rows = _sizes(config, topology), config.prompts_per_step * config.num_generations
    batch = mesh.get("data", 1) * mesh.get("fsdp", 1)
    whole = config.minibatch_completions or rows
    micro = config.microbatch_completions or whole
    found: list[dict[str, Any]] = []
    learning = {"score", "update", "values", "implicit"} & set(failed)
    decodes = {"prepare_decode", "generate"} & set(failed)  # which have no microbatches
    if learning and micro > batch and not decodes:
        least = {"microbatch_completions": batch}
        found += [{"microbatch_completions": max(batch, micro // 4)}, least] if micro // 4 > batch else [least]
    if "update" in failed and config.remat not in (None, "full", "offload"):
        found.append({"remat": "full"})
    smaller = {} if micro <= batch or not learning else {"microbatch_completions": batch}
    for other in candidate_meshes(dataclasses.replace(config, **smaller), model, topology.count):
        if other["tensor"] > mesh.get("tensor", 1):
            ways = other.get("data", 1) * other["fsdp"]
            least = {"microbatch_completions": ways} if learning and micro > ways else {}
            found.append({"mesh": other} | least)
    split = mesh.get("tensor", 1) * mesh.get("fsdp", 1)
    if topology.compiled and decodes and not config.decode_sharding_rules and model.intermediate_size % split == 0:
        found.append({"decode_sharding_rules": {"mlp": "tensor+fsdp"}})
    found += moment_changes(config)  # every step has them in memory
    if config.param_dtype == "float32":
        found.append({"param_dtype": "bfloat16"})
    return found
