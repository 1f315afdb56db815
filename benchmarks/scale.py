"""What GRPO of models from 0.6 to 405 billion parameters needs on TPU slices, and how its step time scales.

    python benchmarks/scale.py models           # the table of models; hours on a small machine
    python benchmarks/scale.py scaling          # step times from 16 to 512 chips, weak and strong
    python benchmarks/scale.py models --only qwen3-0.6b
    python benchmarks/scale.py show [--figure docs/img/scale.png]

Every step is compiled for its topology by the TPU compiler (`jaxrl-lm plan`, docs/scale.md); no TPU is needed. A report
is kept as JSON in --directory as soon as it is there, and what is there is not compiled again. docs/scale.md holds what
`show` prints.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_lm.plan import run_plan
from jaxrl_lm.plan_config import PlanConfig, open_model_config
from jaxrl_lm.plan_estimate import step_memory
from jaxrl_lm.plan_table import to_json

GIB = float(1 << 30)
GROUP, PROMPT, NEW = 8, 1024, 3072


class Row(NamedTuple):
    """A run of GRPO."""

    model: str
    topology: str
    rollouts: int  # completions a step
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.model}_{self.topology.replace(':', '-')}_{self.rollouts}"


MODELS = (
    Row("qwen3-0.6b", "v5e:2x2", 64, {"mesh": {"fsdp": 4}, "microbatch_completions": 4}),
    Row("llama-3.1-8b", "v5e:8x8", 256, {"mesh": {"fsdp": 8, "tensor": 8}, "microbatch_completions": 8}),
    Row("llama-3.1-8b", "v5p:2x2x4", 256, {"mesh": {"fsdp": 16}, "microbatch_completions": 16}),
    Row("qwen3-32b", "v5p:4x4x4", 512, {"mesh": {"fsdp": 16, "tensor": 4}, "microbatch_completions": 16}),
    Row("llama-3.1-70b", "v5p:4x4x8", 512, {"mesh": {"fsdp": 16, "tensor": 8}, "microbatch_completions": 16}),
    Row(
        "llama-3.1-405b",
        "v5p:8x8x8",
        1024,
        {
            "mesh": {"data": 2, "fsdp": 32, "tensor": 8},  # 512 does not divide its vocabulary, 256 does
            "microbatch_completions": 64,
            # Over tensor alone the weights of generation would not fit.
            "decode_sharding_rules": {"mlp": "tensor+fsdp"},
        },
    ),
)

SLICES = {16: "v5p:2x2x4", 64: "v5p:4x4x4", 128: "v5p:4x4x8", 512: "v5p:8x8x8"}
SCALED, WEAK, STRONG = "llama-3.2-1b", 8, 512  # the model; completions a chip; completions in all


def scaling(kind: str) -> list[Row]:
    """The same model on more and more chips: with as much work for each chip, or as much in all."""
    found = []
    for chips, topology in SLICES.items():
        rollouts = WEAK * chips if kind == "weak" else STRONG
        ways = min(chips, rollouts // GROUP)  # prompts of generation divide over them
        mesh = {"data": ways // 16, "fsdp": 16, "tensor": chips // ways}
        found.append(Row(SCALED, topology, rollouts, {"mesh": mesh, "microbatch_completions": ways}))
    return found


def config_of(row: Row) -> PlanConfig:
    return PlanConfig(
        model=row.model,
        topology=row.topology,
        prompts_per_step=row.rollouts // GROUP,
        num_generations=GROUP,
        max_prompt_length=PROMPT,
        max_completion_length=NEW,
        max_suggestions=0,
        **row.options,
    )


def report(row: Row, directory: Path) -> dict[str, Any]:
    """The plan of a row, compiled now or read from the directory."""
    path = directory / f"{row.name}.json"
    if not path.exists():
        print(f"{row.name}: {row.options}", flush=True)
        path.write_text(json.dumps(to_json(run_plan(config_of(row))), indent=1))
    return json.loads(path.read_text())


def table(reports: list[dict[str, Any]]) -> str:
    """A line for each compiled step."""
    head = (
        "| model | on | mesh | rollouts | step | HBM | collectives, GB | s at best | limit | tokens/s | compiling, s |"
    )
    lines = [head, "|---" * head.count(" | ") + "|---|"]
    for one in reports:
        mesh = " × ".join(f"{axis} {size}" for axis, size in one["mesh"].items() if size > 1)
        steps = [step for step in one["steps"] if step["name"] != "prepare_decode"]
        for number, step in enumerate(steps):
            first = (one["model"], one["topology"], mesh, one["completions"]) if not number else ("",) * 4
            share = f"{step['used'] / step['available']:.0%}" + ("" if step["fits"] else " **does not fit**")
            moved = ", ".join(f"{kind} {size / 1e9:.3g}" for kind, _, _, size in step["collectives"][:3] if size >= 1e8)
            total = "" if number or one["run"] is None else f"{one['run']['tokens_per_second']:.3g}"
            row = (*first, step["name"], share, moved, f"{step['roofline'] or float('nan'):.3g}", step["limit"], total)
            lines.append(f"| {' | '.join(map(str, row))} | {step['compile_seconds']:.0f} |")
    return "\n".join(lines)


def scaling_table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Step times by chips."""
    lines = ["| scaling | chips | rollouts | s a step | tokens/s | tokens/s a chip |", "|---|---|---|---|---|---|"]
    for kind, reports in found.items():
        for one in reports:
            run, chips = one["run"], one["devices"]
            numbers = (run["step_seconds"], run["tokens_per_second"], run["tokens_per_second_per_device"])
            lines.append(
                f"| {kind} | {chips} | {one['completions']} | {' | '.join(f'{number:.4g}' for number in numbers)} |"
            )
    return "\n".join(lines)


def estimates(reports: list[tuple[Row, dict[str, Any]]]) -> str:
    """What the plan's arithmetic says of each program's memory, over what the compiler says."""
    names = ("prepare_decode", "generate", "score", "update")
    lines = [f"| model | on | rollouts | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for row, one in reports:
        if "decode_sharding_rules" in row.options:
            continue  # which the arithmetic does not know
        memory = step_memory(config_of(row), open_model_config(row.model), one["mesh"])
        compiled = {step["name"]: step["used"] for step in one["steps"]}
        ratios = [
            f"{sum(memory[name]) / GIB:.1f} / {compiled[name] / GIB:.1f} = {sum(memory[name]) / compiled[name]:.2f}"
            for name in names
        ]
        lines.append(f"| {row.model} | {row.topology} | {row.rollouts} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def figure(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Step time and its parts by chips, weak and strong."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plot, axes = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    for place, (kind, reports) in zip(axes, found.items(), strict=True):
        chips = [one["devices"] for one in reports]
        place.plot(chips, [one["run"]["step_seconds"] for one in reports], "o-", color="black", label="step")
        for name in ("generate", "update"):
            seconds = [next(s for s in one["steps"] if s["name"] == name)["roofline"] for one in reports]
            place.plot(chips, seconds, ".--", label=name)
        first = reports[0]["run"]["step_seconds"]
        ideal = [first if kind == "weak" else first * chips[0] / n for n in chips]
        place.plot(chips, ideal, ":", color="gray", label="ideal")
        what = f"{WEAK} completions a chip" if kind == "weak" else f"{STRONG} completions"
        place.set(xscale="log", xlabel="chips (v5p)", ylabel="seconds at best", title=f"{kind}: {what}")
        place.set(ylim=(0, None)) if kind == "weak" else place.set(yscale="log")
        place.set_xticks(chips, [str(n) for n in chips])
        place.minorticks_off()
        place.legend(frameon=False)
        place.spines[["top", "right"]].set_visible(False)
    plot.suptitle(f"GRPO of {SCALED}, prompts of {PROMPT} and completions of {NEW} tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.savefig(path, dpi=150)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=("models", "scaling", "show"))
    options.add_argument("--only", default="", help="rows whose name holds this")
    options.add_argument("--directory", type=Path, default=Path("runs/scale"))
    options.add_argument("--figure", type=Path)
    given = options.parse_args()
    jax.config.update("jax_platforms", "cpu")
    given.directory.mkdir(parents=True, exist_ok=True)
    curves = {kind: scaling(kind) for kind in ("weak", "strong")}
    rows = {"models": MODELS, "scaling": [*curves["weak"], *curves["strong"]], "show": ()}[given.what]
    for row in rows:
        if given.only in row.name:
            report(row, given.directory)
    have = lambda row: (given.directory / f"{row.name}.json").exists()
    models = [(row, report(row, given.directory)) for row in MODELS if have(row)]
    print(table([one for _, one in models]))
    found = {kind: [report(row, given.directory) for row in rows if have(row)] for kind, rows in curves.items()}
    scaled = {row.name: (row, report(row, given.directory)) for rows in curves.values() for row in rows if have(row)}
    print("\n" + estimates([*models, *scaled.values()]))
    if all(found.values()):
        print("\n" + scaling_table(found))
        if given.figure:
            figure(found, given.figure)


if __name__ == "__main__":
    main()
