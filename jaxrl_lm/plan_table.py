"""A plan as a table for the terminal, and as JSON."""

import dataclasses
import math
from typing import Any

from jaxrl_lm.plan_memory import Part, Saving
from jaxrl_lm.plan_places import Transfer
from jaxrl_lm.plan_report import StepReport
from jaxrl_lm.topologies import GIB


def to_json(report: dict[str, Any]) -> dict[str, Any]:
    """The report with plain values; a number that is not finite is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, StepReport):
            return plain(dataclasses.asdict(value) | {"roofline": value.roofline, "limit": value.limit})
        if isinstance(value, Part | Saving | Transfer):
            return plain(value._asdict())
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return plain(report)


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def step_lines(step: StepReport) -> list[str]:
    """What is said of one step."""
    share, on = step.used / step.available, "" if step.mesh == "mesh" else f" on {step.mesh}"
    lines = [
        f"{step.name}{on}: {'fits' if step.fits else 'DOES NOT FIT'}, {gib(step.used)} of {gib(step.available)} GiB "
        f"({share:.0%}): arguments {gib(step.arguments)}, temporaries {gib(step.temporaries)}, "
        f"outputs {gib(step.outputs)}, code {gib(step.code)}, held beside it {gib(step.beside)}"
    ]
    if step.error:
        lines.append(f"  {step.error}")
    lines += [f"  {gib(size):>8} GiB  {name}  {shape}" for name, shape, size in step.largest]
    if step.seconds:
        parts = ", ".join(f"{name} {_seconds(value)} s" for name, value in step.seconds.items())
        lines.append(
            f"  {step.flops / 1e12:.3g} TFLOP, {step.traffic / 1e9:.3g} GB of HBM traffic: {parts}; "
            f"at best {_seconds(step.roofline)} s, limited by {step.limit}"
        )
    lines += [
        f"  {kind} over {devices} devices: {size / 1e9:.3g} GB in {runs:.0f} runs"
        for kind, devices, runs, size in step.collectives
        if size >= 1e6
    ]
    if step.flops_ratio is not None and step.flops_ratio > 1.1:
        lines.append(f"  the compiler counts {step.flops_ratio:.2f} times these FLOPs: work is repeated on devices")
    if step.uncounted_loops:
        lines.append(f"  counted once, for their length is unknown: loops {', '.join(step.uncounted_loops)}")
    return lines


def memory_lines(parts: list[Part], savings: list[Saving]) -> list[str]:
    """The models' memory, one a line, and what changes would save of it."""
    lines = ["models, GiB of one device (gradients while an update runs; decode, a copy, while it generates):"]
    where = {"mesh": "", "rollout_mesh": " on rollout_mesh", "host": " in host memory"}
    own: dict[str, list[str]] = {}
    for part in parts:
        own.setdefault(part.model, []).append(f"{part.part} {gib(part.bytes)}{where[part.place]}")
    lines += [f"  {name}: {', '.join(of)}" for name, of in own.items()]
    for one in savings:
        more = f", and {gib(one.gradients)} while an update runs" if one.gradients else ""
        there = f" on mesh and {gib(one.rollout_held)} on rollout_mesh" if one.rollout_held else ""
        lines.append(f"  {one.change} would save {gib(one.held)}{there}{more}")
    return lines


def transfer_lines(transfer: Transfer | None) -> list[str]:
    """What is said of the weights' way between two meshes."""
    if transfer is None:
        return []
    return [
        "",
        f"weights of generation from mesh to rollout_mesh: {gib(transfer.weights)} GiB, {gib(transfer.received)} GiB "
        f"received by its devices together; ESTIMATE: {_seconds(transfer.seconds)} s at least",
    ]


def to_text(report: dict[str, Any]) -> str:
    """The report for the terminal."""
    lines = [f"{report['model']} ({report['parameters'] / 1e9:.3g} B parameters) on {report['topology']}: "
             f"{report['devices']} × {report['chip']}, mesh {report['mesh']}"]  # fmt: skip
    if report["rollout_mesh"]:
        lines[0] += f", rollout_mesh {report['rollout_mesh']}"
    lines += [f"  {note}" for note in report["notes"]]
    for step in report["steps"]:
        lines += ["", *step_lines(step)]
    lines += transfer_lines(report["transfer"])
    lines += ["", *memory_lines(report["memory"], report["savings"])]
    numbers = report["run"]
    lines.append("")
    if numbers is None:
        lines.append("no estimate of the run: not every step fits")
    else:
        lines += [
            f"a step of {report['completions']} completions at best {numbers['step_seconds']:.3g} s: "
            f"{numbers['tokens_per_second']:.4g} tokens/s ({numbers['tokens_per_second/generate']:.4g} generating, "
            f"{numbers['tokens_per_second/train']:.4g} training)",
            f"{numbers['steps']:.0f} steps: {numbers['device_hours']:.4g} device-hours at best, all completions at "
            "their full length",
        ]
    for one in report["suggestions"]:
        lines.append(f"tried {one['change']}: {one['result']}")
    return "\n".join(lines)
