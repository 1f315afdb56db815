"""What a plan says of each step: memory, collectives, FLOPs, traffic, the roofline, and of the run its time and cost.

`measure` reads a compiled step, `out_of_memory` XLA's report of one that cannot be; `run_numbers` adds them up.
Estimates without a compiler: `plan_estimate.py`. How each number comes about: docs/scale_plan.md.
"""

import dataclasses
import math
from typing import Any

from jaxrl_lm import hlo
from jaxrl_lm.flops import count_flops
from jaxrl_lm.memory import device_bytes, named_leaves, origin, read_shortage
from jaxrl_lm.plan_config import PlanConfig
from jaxrl_lm.plan_steps import PlannedStep, decode_passes
from jaxrl_lm.topologies import GIB, Chip, Topology

SHOWN = 6  # buffers and collectives of a step in the report


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The numbers of one step, of one device; bytes and seconds are those of one run of the step."""

    name: str
    runs: int  # in a step of training
    fits: bool
    used: float  # bytes: the program's and what stands beside it
    available: float
    arguments: float = 0.0
    temporaries: float = 0.0
    outputs: float = 0.0  # that take no argument's place
    code: float = 0.0
    beside: float = 0.0  # what the run holds meanwhile
    largest: tuple[tuple[str, str, float], ...] = ()  # (name, shape on a device, bytes)
    collectives: tuple[tuple[str, int, float, float], ...] = ()  # (kind, devices of a group, runs, bytes in all)
    flops: float = 0.0
    flops_ratio: float | None = None  # of generate: the compiler's count over ours, one token; above 1 is repeated work
    traffic: float = 0.0  # bytes from and to main memory
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # compute, HBM, network
    compile_seconds: float = 0.0
    error: str | None = None
    uncounted_loops: tuple[str, ...] = ()
    mesh: str = "mesh"  # whose devices run it: mesh or rollout_mesh
    compiled_for: str = ""  # the slice that has these devices, or one that stands in for it; empty: estimated

    @property
    def roofline(self) -> float:
        """Seconds if all three overlap wholly: the slowest alone."""
        return max(self.seconds.values(), default=math.nan)

    @property
    def limit(self) -> str:
        return max(self.seconds, key=self.seconds.get, default="")


def network_seconds(collectives: list[hlo.Collective], chip: Chip) -> float:
    """Seconds on the wires, each collective alone, as rings: (n−1)/n of the array, twice for an all-reduce.

    A permute is one array over one link. On GPUs a group beyond `fast_group` runs at the network's rate.
    """
    total = 0.0
    for one in collectives:
        n = one.devices
        share = {"all-reduce": 2 * (n - 1) / n}.get(one.kind, (n - 1) / n)
        if one.kind == "collective-permute":
            total += one.bytes * one.runs / chip.link
        else:
            rate = chip.slow_ring if chip.fast_group and n > chip.fast_group else chip.ring
            total += share * one.bytes * one.runs / rate
    return total


def summed(collectives: list[hlo.Collective]) -> tuple[tuple[str, int, float, float], ...]:
    """Collectives of one kind and group size together: (kind, devices, runs, bytes), the largest first."""
    found: dict[tuple[str, int], list[float]] = {}
    for one in collectives:
        runs_bytes = found.setdefault((one.kind, one.devices), [0.0, 0.0])
        runs_bytes[0] += one.runs
        runs_bytes[1] += one.runs * one.bytes
    return tuple(sorted(((*key, *value) for key, value in found.items()), key=lambda row: -row[3]))


def largest(step: PlannedStep, module: hlo.Module | None) -> tuple[tuple[str, str, float], ...]:
    """The largest arrays of a step: arguments and what stands beside by our names, temporaries by their operation."""
    rows = named_leaves(step.arguments | step.beside)[:SHOWN]
    if module is not None:
        for one in hlo.largest_buffers(module, count=SHOWN):
            times = f" ×{one.count}" if one.count > 1 else ""
            rows.append((f"temporary of {origin(one.op_name)}{times}", one.shape, one.bytes))
    return tuple(sorted(rows, key=lambda row: -row[2])[:SHOWN])


def traced_flops(step: PlannedStep, traced: Any, config: PlanConfig, devices: int, *, once: bool = False) -> float:
    """FLOPs of a traced step on one device; the decode loop and the blocks of its caches as often as they run, or once."""
    trips = (1.0, 1.0) if once else (float(decode_passes(config)), step.blocks)
    return count_flops(traced.jaxpr, while_trips=trips) / devices


def measure(
    step: PlannedStep,
    traced: Any,
    compiled: Any,
    config: PlanConfig,
    topology: Topology,
    *,
    devices: int,
    seconds: float,
) -> StepReport:
    """The numbers of a step that is compiled for so many devices."""
    chip, memory = topology.chip, compiled.memory_analysis()
    module = hlo.parse(compiled.as_text())
    found, uncounted = hlo.collectives(module), hlo.runs(module)[1]
    arguments, temporaries = float(memory.argument_size_in_bytes), float(memory.temp_size_in_bytes)
    outputs = float(memory.output_size_in_bytes - memory.alias_size_in_bytes)
    beside = math.fsum(map(device_bytes, step.beside.values()))
    code = float(memory.generated_code_size_in_bytes)
    used = arguments + temporaries + outputs + code + beside
    flops, traffic = traced_flops(step, traced, config, devices), hlo.memory_traffic(module)
    return StepReport(
        name=step.name,
        runs=step.runs,
        fits=used <= chip.hbm,
        used=used,
        available=chip.hbm,
        arguments=arguments,
        temporaries=temporaries,
        outputs=outputs,
        code=code,
        beside=beside,
        largest=largest(step, module),
        collectives=summed(found),
        flops=flops,
        traffic=traffic,
        seconds={
            "compute": flops / chip.flops,
            "HBM": traffic / chip.hbm_bandwidth,
            "network": network_seconds(found, chip),
        },
        compile_seconds=seconds,
        uncounted_loops=tuple(uncounted),
        mesh=step.mesh,
        compiled_for=topology.name,
    )


def out_of_memory(step: PlannedStep, message: str, topology: Topology, *, seconds: float) -> StepReport:
    """XLA's out-of-memory report as ours. Raises ValueError for another error's message."""
    short = read_shortage(message)
    if short is None or short.available is None:
        raise ValueError(f"{step.name} does not compile for {topology.name}: {message.strip().splitlines()[0][:400]}")
    arguments, beside = (math.fsum(map(device_bytes, trees.values())) for trees in (step.arguments, step.beside))
    rows = [*named_leaves(step.arguments | step.beside)[:SHOWN], *short.temporaries]
    return StepReport(
        name=step.name,
        runs=step.runs,
        fits=False,
        used=short.needed + beside,
        available=short.available,
        arguments=arguments,
        temporaries=max(short.needed - arguments, 0.0),
        beside=beside,
        largest=tuple(sorted(rows, key=lambda row: -row[2])[:SHOWN]),
        compile_seconds=seconds,
        mesh=step.mesh,
        compiled_for=topology.name,
        error=f"the compiler ran out of memory: {short.needed / GIB:.1f} of {short.available / GIB:.1f} GiB",
    )


def run_numbers(
    steps: list[StepReport], config: PlanConfig, topology: Topology, *, moving: float = 0.0
) -> dict[str, float]:
    """Step time, tokens a second and device-hours at the roofline: what the run cannot be faster than.

    Steps come one after the other, on two meshes too, with `moving` seconds of weights from one to the other; all
    devices are paid for all the time. Every completion is counted at its full length. Rewards, data and checkpoints are
    not in it.
    """
    rows = config.prompts_per_step * config.num_generations
    tokens, steps_in_all = rows * config.max_completion_length, config.max_steps or 100
    seconds = moving + sum(step.runs * step.roofline for step in steps if step.runs)
    generate = moving + sum(step.roofline for step in steps if step.name in ("prepare_decode", "generate"))
    learn = sum(step.runs * step.roofline for step in steps if step.name not in ("prepare_decode", "generate"))
    return {
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second/generate": tokens / generate,
        "tokens_per_second/train": tokens / learn,
        "tokens_per_second_per_device": tokens / seconds / topology.count,
        "steps": float(steps_in_all),
        "device_hours": seconds * steps_in_all * topology.count / 3600,
    }
