"""Every preset on the arithmetic lab from the same start, over seeds: a table, and pass@k up to 256 as a figure.

    python benchmarks/lab_presets.py runs/presets [--presets grpo dr_grpo …] [--seeds 5] [--steps 60] [--deep 1]

The lab's model and task in a smaller size, so that the whole table takes about an hour on 2 CPU cores. A preset that is
there is not trained again. `--deep`: seeds of each preset that are sampled 256 times a prompt for the figure.
docs/results.md holds the output.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np

import jaxrl_lm
from jaxrl_lm import algos
from jaxrl_lm.config import EvalConfig
from jaxrl_lm.inference import run_eval
from jaxrl_lm.lab.run import REWARD
from jaxrl_lm.lab.small import small_start
from jaxrl_lm.report import load_metrics
from jaxrl_lm.seeds import estimate

SHOWN = (
    "eval/test/pass@1",
    "eval/test/pass@8",
    "eval/test/greedy_accuracy",
    "eval/test/mean_length",
    "eval/test/entropy",
)


def options(preset: str, directory: Path, files: dict[str, str], args: argparse.Namespace) -> jaxrl_lm.GRPOConfig:
    return jaxrl_lm.GRPOConfig(
        model=files["model"],
        dataset=files["train"],
        eval_dataset={"test": files["test"]},
        reward=(REWARD,),
        output_dir=str(directory / preset),
        preset=preset,
        critic="separate" if preset == "ppo" else "none",
        prompts_per_step=16,
        num_generations=8,
        max_completion_length=32,
        learning_rate=3e-4,
        lr_scheduler="linear",
        max_steps=args.steps,
        eval_steps=args.steps,
        probe_prompts=0,
        completions_steps=0,
        logging_steps=args.steps,
        save_steps=0,
        seeds=args.seeds,
    )


def histories(directory: Path, seeds: int) -> list[list[dict]]:
    return [load_metrics(directory / f"seed_{seed}" / "metrics.jsonl") for seed in range(seeds)]


def row(name: str, runs: list[list[dict]], before: bool = False) -> str:
    """A line of the table."""
    at = 0 if before else -1
    cells = [estimate([run[at][metric] for run in runs]) for metric in SHOWN]
    seconds = estimate([sum(line.get("step_time", 0.0) for line in run) for run in runs])
    shown = [f"{one.mean:.3f} ± {one.half:.3f}" for one in cells] + [f"{0.0 if before else seconds.mean:.0f}"]
    return f"| {name} | {' | '.join(shown)} |"


def deep(directory: Path, run: str, files: dict[str, str]) -> dict[int, float]:
    """pass@k for k = 1, 2, 4 … 256 on 32 held-out prompts."""
    kept = directory / f"deep_{run.replace('/', '_')}.json"
    if not kept.exists():
        config = EvalConfig(
            model=str(directory / run),
            eval_dataset={"test": files["test"]},
            eval_reward_functions=(REWARD,),
            eval_limit=32,
            eval_num_generations=256,
            prompts_per_step=16,
            num_generations=16,
            max_completion_length=32,
        )
        found = run_eval(config)
        kept.write_text(json.dumps({2**i: found[f"eval/test/pass@{2**i}"] for i in range(9)}))
    return {int(k): value for k, value in json.loads(kept.read_text()).items()}


def crossing(start: dict[int, float], tuned: dict[int, float]) -> str:
    """The first k at which the start model has overtaken the tuned one."""
    return next((f"k = {k}" for k in start if start[k] > tuned[k]), "not up to k = 256")


def draw(path: Path, curves: dict[str, dict[int, float]]) -> None:
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), "k--" if name == "start" else "-", label=name, linewidth=1.2)
    axes.set(xscale="log", xlabel="k", ylabel="pass@k on 32 held-out prompts")
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)


def draw_lengths(path: Path, runs: dict[str, list[list[dict]]]) -> None:
    """Mean length of completions by step, the mean over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, histories in runs.items():
        lengths = np.array([[line["completions/mean_length"] for line in run if line["step"]] for run in histories])
        axes.plot(np.arange(1, lengths.shape[1] + 1), lengths.mean(0), label=name)
    axes.set(xlabel="step", ylabel="mean length, tokens")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--presets", nargs="*", default=sorted(algos.PRESETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--deep", type=int, default=1)
    args = parser.parse_args()
    files, runs = small_start(args.directory), {}
    for preset in args.presets:
        began = time.perf_counter()
        config = options(preset, args.directory, files, args)
        if not (Path(config.output_dir) / "seeds.json").exists():
            jaxrl_lm.train_seeds(config) if args.seeds > 1 else jaxrl_lm.train(
                dataclasses.replace(config, output_dir=f"{config.output_dir}/seed_0")
            )
        runs[preset] = histories(Path(config.output_dir), args.seeds)
        print(row(preset, runs[preset]), f"{time.perf_counter() - began:.0f} s", flush=True)
    print(f"\n{args.seeds} seeds, {args.steps} steps of 16 x 8 completions; mean ± half of the 95 % interval\n")
    print("| preset | pass@1 | pass@8 | greedy | length | entropy | seconds |\n|---|---|---|---|---|---|---|")
    print(row("start", next(iter(runs.values())), before=True))
    print("\n".join(row(preset, found) for preset, found in runs.items()))
    gain = lambda preset: [run[-1]["eval/test/pass@1"] - run[0]["eval/test/pass@1"] for run in runs[preset]]
    if {"raft", "grpo", "reinforce_rej"} <= runs.keys():
        for seed, (grpo, raft, rej) in enumerate(zip(gain("grpo"), gain("raft"), gain("reinforce_rej"), strict=True)):
            print(f"seed {seed}: gain of GRPO {grpo:.3f}, of RAFT {raft:.3f} ({raft / grpo:.0%}), "
                  f"of Reinforce-Rej {rej:.3f} ({rej / grpo:.0%})")  # fmt: skip
    if {"grpo", "dr_grpo"} <= runs.keys():
        draw_lengths(args.directory / "lengths.png", {name: runs[name] for name in ("grpo", "dr_grpo")})
    if args.deep:
        curves = {"start": deep(args.directory, "sft", files)}
        for preset in args.presets:
            curves[preset] = deep(args.directory, f"{preset}/seed_0", files)
            print(f"{preset}: pass@k of the start model is larger from {crossing(curves['start'], curves[preset])}")
        draw(args.directory / "pass_at_k.png", curves)


if __name__ == "__main__":
    main()
