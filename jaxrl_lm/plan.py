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

from jaxrl_lm.memory import read_shortage
from jaxrl_lm.models import ModelConfig
from jaxrl_lm.plan_changes import changes
from jaxrl_lm.plan_config import PlanConfig, open_model_config
from jaxrl_lm.plan_estimate import choose_mesh, estimate, parameters
from jaxrl_lm.plan_memory import model_memory, savings
from jaxrl_lm.plan_places import Place, mesh_sizes, places_of, plans_of, stand_in, weights_transfer
from jaxrl_lm.plan_report import StepReport, measure, out_of_memory, run_numbers, traced_flops
from jaxrl_lm.plan_steps import PlannedStep, check_plannable, planned_placement, trace_steps
from jaxrl_lm.topologies import GIB, Topology, parse_topology

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
    sizes = mesh_sizes(config, topology)
    plans = plans_of(config, sizes)
    planned_placement(config, *plans)  # options are checked before anything is compiled
    if config.num_speculative_tokens:
        notes.append(speculation_note(config, topology))
    if topology.compiled:
        steps = compile_steps_for(config, model, topology, say=say)
        notes += stand_in_notes(steps, topology)
    else:
        steps = estimate(config, model, topology)
        notes.append("ESTIMATE by arithmetic: nothing was compiled for these devices")
    fits = all(step.fits for step in steps)
    transfer = weights_transfer(config, model, *plans, topology) if sizes.rollout_mesh else None
    moving = transfer.seconds if transfer else 0.0
    return {
        "model": config.model,
        "parameters": parameters(model),
        "topology": topology.name,
        "chip": topology.chip.name,
        "devices": topology.count,
        "compiled": topology.compiled,
        "mesh": sizes.mesh,
        "rollout_mesh": sizes.rollout_mesh,
        "completions": config.prompts_per_step * config.num_generations,
        "notes": notes,
        "fits": fits,
        "steps": steps,
        "transfer": transfer,
        "memory": model_memory(config, model, *plans),
        "savings": savings(config, model, *plans),
        "run": run_numbers(steps, config, topology, moving=moving) if fits else None,
        "suggestions": [] if fits else suggest(config, model, topology, steps, say=say),
    }


def speculation_note(config: PlanConfig, topology: Topology) -> str:
    """What the time of generation knows of guesses: nobody knows how many come true."""
    ahead = config.num_speculative_tokens
    reads = f"each reading {1 + ahead} tokens a row" if topology.compiled else "and what guesses take is not counted"
    return (
        f"num_speculative_tokens={ahead}: the time of generate is that of a pass for each token, as if no guess came true, "
        f"{reads}; divide it by the speculation/tokens_per_pass of a measured run, from 1 to {1 + ahead}"
    )


def compile_steps_for(
    config: PlanConfig, model: ModelConfig, topology: Topology, *, say: Say, only: tuple[str, ...] = ()
) -> list[StepReport]:
    """The steps' numbers, each compiled for the devices of its mesh, two at a time; `only` names some.

    A mesh on a part of the slice that the compiler refuses programs for is compiled for a slice of its own instead.
    """
    sizes, places = mesh_sizes(config, topology), places_of(config, topology)
    found: dict[str, StepReport] = {}
    while True:
        planned = trace_steps(config, model, *plans_of(config, sizes, places))
        names = [name for name in planned if not only or name in only]
        todo = [planned[name] for name in names if name not in found]
        reports = _compile_all(todo, config, places, say)
        refused = {step.mesh for step, report in zip(todo, reports, strict=True) if report is None}
        found |= {one.name: one for one in reports if one is not None and one.mesh not in refused}
        if not refused:
            return [found[name] for name in names]
        for mesh in refused:
            places[mesh] = stand_in(places[mesh])
            other = places[mesh].topology.name
            say(f"{mesh}: the compiler refuses programs for this part of {topology.name}; compiling for {other}")


def _compile_all(
    steps: list[PlannedStep], config: PlanConfig, places: dict[str, Place], say: Say
) -> list[StepReport | None]:
    """The steps' numbers; None where the compiler refuses a part of a slice."""
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        jobs = []
        for step in steps:
            traced = step.trace()  # tracing stays in this thread: compiling does not hold it up
            jobs.append(pool.submit(_compile, step, traced, traced.lower(), config, places[step.mesh], say))
        return [job.result() for job in jobs]


def _compile(
    step: PlannedStep, traced: Any, lowered: Any, config: PlanConfig, place: Place, say: Say
) -> StepReport | None:
    topology, devices = place.topology, len(place.devices)
    part = "" if place.whole else f"{devices} devices of "
    say(f"{step.name}: compiling for {part}{topology.name}")
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not place.whole and read_shortage(str(error)) is None:
            say(f"{step.name}: {str(error).strip().splitlines()[0][:300]}")
            return None
        report = out_of_memory(step, str(error), topology, seconds=time.perf_counter() - start)
        say(f"{step.name}: {report.error} ({report.compile_seconds:.0f} s)")
        return report
    seconds = time.perf_counter() - start
    report = measure(step, traced, compiled, config, topology, devices=devices, seconds=seconds)
    say(f"{step.name}: {report.used / GIB:.1f} of {report.available / GIB:.1f} GiB ({seconds:.0f} s)")
    if (
        step.name != "generate"
    ):  # the only one whose layers are no loop: of a loop the compiler counts one run, or several
        return report
    counted = (compiled.cost_analysis() or {}).get("flops")
    ours = traced_flops(step, traced, config, devices, once=True)
    return dataclasses.replace(report, flops_ratio=counted / ours if counted else None)


def stand_in_notes(steps: list[StepReport], topology: Topology) -> list[str]:
    """What to say of meshes that were compiled for another slice than they would run on."""
    others = {step.mesh: step.compiled_for for step in steps if step.compiled_for != topology.name}
    return [
        f"{mesh}: the TPU compiler refuses programs for these devices of {topology.name}; compiled for {other}, and a run "
        "may be refused too: take two slices"
        for mesh, other in others.items()
    ]


def suggest(
    config: PlanConfig, model: ModelConfig, topology: Topology, steps: list[StepReport], *, say: Say
) -> list[dict[str, Any]]:
    """Changes that were tried on the steps that do not fit, those of each mesh for itself, and what became of them; of a
    mesh the last is the first that helps.
    """
    found = []
    for mesh in ("mesh", "rollout_mesh"):
        failed = tuple(step.name for step in steps if step.mesh == mesh and not step.fits)
        for change in changes(config, model, topology, failed)[: config.max_suggestions] if failed else ():
            found.append(_tried(config, change, model, topology, failed, say))
            if found[-1]["fits"]:
                break
    return found


def _tried(
    config: PlanConfig,
    change: dict[str, Any],
    model: ModelConfig,
    topology: Topology,
    failed: tuple[str, ...],
    say: Say,
) -> dict[str, Any]:
    """What became of a change."""
    words = " ".join(f"--{name} {value}" for key, given in change.items() for name, value in _flat(key, given))
    say(f"does not fit: trying {words}")
    other = dataclasses.replace(config, **change)
    if topology.compiled:
        tried = compile_steps_for(other, model, topology, say=say, only=failed)
    else:
        tried = [one for one in estimate(other, model, topology) if one.name in failed]
    still = [f"{one.name} {one.used / GIB:.1f} GiB" for one in tried if not one.fits]
    rest = ", ".join(f"{one.name} {one.used / GIB:.1f} GiB" for one in tried)
    result = f"does not fit: {', '.join(still)}" if still else f"fits: {rest} of {topology.chip.hbm / GIB:.1f} GiB"
    return {"change": words, "options": change, "fits": not still, "result": result}


def _flat(key: str, value: Any) -> list[tuple[str, Any]]:
    """An option as the command line has it."""
    return [(f"{key}.{name}", one) for name, one in value.items()] if isinstance(value, dict) else [(key, value)]
