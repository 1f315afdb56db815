"""The arithmetic lab, from nothing to an exported model: supervised steps on a careless demonstrator's working, then
GRPO against a verifier, beside the same time of further supervised steps.

The path is the one of a real model: a Hugging Face directory is loaded, `train` runs on JSONL files, a checkpoint is
exported. Task and verifier: `task.py`. What `make quickstart` shows is printed by `summary`.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxrl_lm.config import ExportConfig, GRPOConfig
from jaxrl_lm.evaluate import evaluate
from jaxrl_lm.fit import Fit, updates
from jaxrl_lm.fit_config import SFTConfig
from jaxrl_lm.inference import run_export
from jaxrl_lm.lab.config import LabConfig
from jaxrl_lm.lab.figure import curves
from jaxrl_lm.lab.task import demonstration_rows, make_problems, rows
from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.loop import train
from jaxrl_lm.models import ModelConfig, build, save
from jaxrl_lm.options import to_toml
from jaxrl_lm.prepare import Setup, prepare
from jaxrl_lm.report import load_metrics
from jaxrl_lm.sft import prepare_sft, train_sft, trained_policy
from jaxrl_lm.types import TrainState

REWARD = "jaxrl_lm.lab.task:lab_answer"


def model_config(config: LabConfig, vocab_size: int) -> ModelConfig:
    """A small Llama."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=8 * round(config.hidden_size * 8 / 3 / 8),
        num_layers=config.num_layers,
        num_heads=config.hidden_size // 40,
        num_kv_heads=config.hidden_size // 40,
        head_dim=40,
        tie_embeddings=True,
        max_position_embeddings=256,
        initializer_range=0.05,
    )


def write_data(config: LabConfig, directory: Path) -> dict[str, str]:
    """The problem sets as JSONL files, by name."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {}
    sizes = {"train": config.train_problems, "test": config.test_problems, "ood": config.ood_problems}
    for split, count in sizes.items():
        problems = make_problems(
            count, seed=config.seed, split=split, digits=config.digits, least_digits=config.least_digits
        )
        files[split] = str(directory / f"{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in rows(problems)))
        if split == "train":
            told = demonstration_rows(problems, seed=config.seed, slip=config.slip, drop=config.drop, skip=config.skip)
            files["demonstrations"] = str(directory / "demonstrations.jsonl")
            Path(files["demonstrations"]).write_text("".join(json.dumps(row) + "\n" for row in told))
    return files


def sft_config(config: LabConfig, files: dict[str, str], directory: Path, start: Path, steps: int) -> SFTConfig:
    return SFTConfig(
        model=str(start),
        dataset=files["demonstrations"],
        output_dir=str(directory / "sft_run"),
        seed=config.seed,
        rows_per_step=config.sft_rows,
        max_steps=steps,
        learning_rate=config.sft_learning_rate,
        lr_scheduler="cosine",
        warmup_steps=min(50, steps // 4),
        max_length=96,
        save_steps=0,
        logging_steps=100,
    )


def grpo_config(config: LabConfig, files: dict[str, str], directory: Path) -> GRPOConfig:
    """The GRPO run, which is also written to grpo.toml for `jaxrl-lm grpo --config`."""
    return GRPOConfig(
        model=str(directory / "sft"),
        dataset=files["train"],
        eval_dataset={"test": files["test"], "ood": files["ood"]},
        reward=(REWARD,),
        output_dir=str(directory / "grpo"),
        seed=config.seed,
        preset=config.preset,
        prompts_per_step=config.prompts_per_step,
        num_generations=config.num_generations,
        max_completion_length=config.max_completion_length,
        learning_rate=config.learning_rate,
        lr_scheduler="linear",
        max_steps=config.grpo_steps,
        eval_steps=config.eval_steps,
        eval_limit=config.test_problems,
        save_steps=0,
        completions_steps=config.grpo_steps,
        logging_steps=5,
    )


def run_lab(config: LabConfig) -> dict[str, Any]:
    """Runs everything and prints what was learned; returns the numbers, which are in summary.json too."""
    began = time.perf_counter()
    directory = Path(config.output_dir)
    _make_room(directory)
    files = write_data(config, directory / "data")
    tokenizer = lab_tokenizer()
    model = build(model_config(config, len(tokenizer)))
    params = model.init(jax.random.key(config.seed))
    print(f"1. a transformer of {sum(x.size for x in jax.tree.leaves(params)) / 1e6:.2f} M parameters, from nothing")
    save(directory / "start", model, params, tokenizer)

    print(f"2. {config.sft_steps} supervised steps on the working of a careless demonstrator")
    supervised(sft_config(config, files, directory, directory / "start", config.sft_steps), directory / "sft")

    print(f"3. {config.grpo_steps} steps of GRPO against a verifier")
    grpo = grpo_config(config, files, directory)
    (directory / "grpo.toml").write_text(to_toml(grpo))
    run = train(grpo)
    if run.stopped:
        raise SystemExit(f"{run.stopped}: the lab was ended; jaxrl-lm grpo --config {directory}/grpo.toml goes on")
    history = load_metrics(run.directory / "metrics.jsonl")

    control: list[dict[str, Any]] = []
    if config.control:
        seconds = training_seconds(history)
        print(f"4. for comparison, {seconds:.0f} s of further supervised steps from the same start")
        forever = sft_config(config, files, directory, directory / "sft", steps=10**9)
        # How many steps fit is not known beforehand: a constant rate, a quarter of the first phase's peak.
        steady = {"lr_scheduler": "constant", "learning_rate": config.sft_learning_rate / 4, "seed": config.seed + 1}
        control = continue_supervised(dataclasses.replace(forever, **steady), grpo, history[0], seconds)
    figure = curves(directory / "curves.png", {"GRPO": with_training_time(history), "supervised": control})
    export = run_export(ExportConfig(run=str(run.directory), directory=str(directory / "export")))
    found = summary(history, control, seconds=time.perf_counter() - began)
    (directory / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    print_summary(found, history, figure, export, directory)
    return found


def _make_room(directory: Path) -> None:
    """An empty directory with the lab's mark; an earlier lab there is removed, since each run of it is a whole one.

    Raises FileExistsError for a directory with anything else in it.
    """
    mark = directory / ".jaxrl_lm_lab"
    if mark.exists():
        shutil.rmtree(directory)
    elif directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"output_dir={directory} is not empty and no earlier lab: choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    mark.touch()


def supervised(config: SFTConfig, target: Path) -> None:
    """Takes the config's steps and saves the model."""
    run = train_sft(config)
    if run.interrupted:
        raise SystemExit("the lab was ended in its supervised steps; run it again")
    save(target, run.model, trained_policy(config, run.frozen.base, run.state), run.tokenizer,
         generation_config=run.generation)  # fmt: skip


def training_seconds(history: list[dict[str, Any]]) -> float:
    """Wall time of GRPO's steps, without evaluation; compilation counts, as it does on the other side."""
    return sum(row["step_time"] for row in history if "step_time" in row)


def with_training_time(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `time` as seconds of training."""
    total, out = 0.0, []
    for row in history:
        total += row.get("step_time", 0.0)
        out.append({**row, "time": total})
    return out


def continue_supervised(
    config: SFTConfig, grpo: GRPOConfig, first: dict[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """Further supervised steps for `seconds` of training, evaluated four times as GRPO is; `first` is its start."""
    setup, judge = prepare_sft(config), prepare(grpo)
    out = [{**{name: value for name, value in first.items() if name.startswith("eval/")}, "time": 0.0, "step": 0}]
    for used, step, state, metrics in timed(setup, seconds):
        if used >= seconds * len(out) / 4:
            out.append({"step": step, "time": used, **metrics, **_judge(judge, state)})
    return out


def timed(setup: Fit, seconds: float) -> Iterator[tuple[float, int, TrainState, dict[str, float]]]:
    """Supervised steps until their own time, without the caller's, is used up."""
    steps, used = updates(setup), 0.0
    while used < seconds:
        start = time.perf_counter()
        step, state, metrics = next(steps)
        used += time.perf_counter() - start
        yield used, step, state, metrics


def _judge(judge: Setup, state: TrainState) -> dict[str, float]:
    return evaluate(
        judge.sampler,
        judge.steps.prepare_decode(state.params["policy"], None),
        state.key,
        judge.eval_sets["test"],
        judge.eval_rewards,
        temperature=judge.config.temperature,
        samples=judge.config.eval_num_generations,
        limit=judge.config.eval_limit,
        policy_step=int(state.step),
        name="test",
    ).metrics


SHOWN = ("pass@1", "pass@8", "greedy_accuracy", "mean_length", "entropy")


def summary(history: list[dict[str, Any]], control: list[dict[str, Any]], *, seconds: float) -> dict[str, Any]:
    """Held-out numbers before and after, and those of the supervised continuation."""
    ends = {"before": history[0], "after": history[-1]} | ({"supervised": control[-1]} if control else {})
    return {
        **{name: {key: row[f"eval/test/{key}"] for key in SHOWN} for name, row in ends.items()},
        "ood_pass@1": [history[0]["eval/ood/pass@1"], history[-1]["eval/ood/pass@1"]],
        "grpo_seconds": training_seconds(history),
        "seconds": seconds,
    }


def print_summary(found: dict[str, Any], history, figure: Path, export: Path, directory: Path) -> None:
    """The table, and how to go on."""
    names = [name for name in ("before", "after", "supervised") if name in found]
    titles = {"before": "before", "after": "after GRPO", "supervised": "same time supervised"}
    print(f"\nheld-out          {''.join(f'{titles[name]:>22}' for name in names)}")
    for key in SHOWN:
        print(f"  {key:16}{''.join(f'{found[name][key]:22.3f}' for name in names)}")
    print(f"  one digit more, pass@1: {found['ood_pass@1'][0]:.3f} -> {found['ood_pass@1'][1]:.3f}")
    gap = max(row["sampling/logp_difference/max"] for row in history if "sampling/logp_difference/max" in row)
    print(f"  largest gap between sampler's and scorer's log-probs: {gap:.1e}")
    print(f"  {found['seconds']:.0f} s in all\n")
    print(f"curves             {figure}")
    print(f"Hugging Face model {export}")
    print(f"completions        {directory}/grpo/completions/, evaluations {directory}/grpo/eval/\n")
    print("How to go on:")
    print(f"  jaxrl-lm grpo --config {directory}/grpo.toml --output_dir runs/mine --preset dr_grpo")
    print(f"  jaxrl-lm generate --model {export} --prompt '47+385=' --max_completion_length 40")
    print("  README.md, 'The first hour': your own data and rewards, a pretrained model")
