"""Distillation beside reinforcement learning on the small lab model, at equal sampled completions, and RL after it.

    python examples/learn_distillation.py runs/learn

The teacher is the small lab model after GRPO with rewards of steps. The student starts where the teacher did. Arms: GRPO;
SFT on completions of the teacher that the verifier accepts; the teacher's distribution at the student's own samples; GRPO
after that. All sample 30 × 128 completions but the last, which samples as many again.
"""

import sys
from pathlib import Path

from _tables import show

import jaxrl_lm
from jaxrl_lm.inference import run_eval, run_export
from jaxrl_lm.lab.run import REWARD
from jaxrl_lm.lab.small import small_start
from jaxrl_lm.tools_config import MakeTracesConfig
from jaxrl_lm.traces import run_make_traces

LENGTH, PROMPTS, GROUP, STEPS = 32, 16, 8, 30
STEP_REWARD = "jaxrl_lm.lab.task:lab_step_rewards"


def reinforced(directory: Path, name: str, files: dict[str, str], model: str, **changes) -> str:
    """The exported policy of a GRPO run, which is made once."""
    output = directory / name
    if not (output / "model").exists():
        options = {
            "dataset": files["train"], "eval_dataset": {"test": files["test"]}, "reward": (REWARD,), "preset": "grpo",
            "output_dir": str(output), "prompts_per_step": PROMPTS, "num_generations": GROUP, "learning_rate": 3e-4,
            "max_completion_length": LENGTH, "lr_scheduler": "linear", "max_steps": STEPS, "eval_steps": 0,
            "probe_prompts": 0, "completions_steps": 0, "save_steps": 0, "logging_steps": STEPS, "model": model,
        }  # fmt: skip
        jaxrl_lm.train(jaxrl_lm.GRPOConfig(**options | changes))
        run_export(jaxrl_lm.ExportConfig(run=str(output), directory=str(output / "model")))
    return str(output / "model")


def imitated(directory: Path, files: dict[str, str], teacher: str) -> str:
    """SFT on the teacher's accepted completions, two passes."""
    output, rows = directory / "distil_sft", directory / "traces.jsonl"
    if not (output / "model").exists():
        traces = MakeTracesConfig(
            model=teacher, dataset=files["train"], limit=STEPS * PROMPTS, num_generations=GROUP, prompts_per_step=32,
            max_completion_length=LENGTH, reward=(REWARD,), output=str(rows), deduplicate=False,
        )  # fmt: skip
        print(run_make_traces(traces))
        config = jaxrl_lm.SFTConfig(
            model=files["model"], dataset=str(rows), output_dir=str(output), max_length=64, rows_per_step=64,
            num_epochs=2.0, learning_rate=1e-3, lr_scheduler="linear", eval_steps=0, save_steps=0, logging_steps=50,
        )  # fmt: skip
        jaxrl_lm.train_sft(config)
        run_export(jaxrl_lm.ExportConfig(run=str(output), directory=str(output / "model")))
    return str(output / "model")


def main(directory: Path) -> None:
    files = small_start(directory)
    start = files["model"]
    teacher = reinforced(directory, "teacher", files, start, step_reward=STEP_REWARD, max_steps=80)
    on_policy = reinforced(directory, "distil_on_policy", files, start, teacher=teacher, teacher_only=True)
    arms = {
        "start": start,
        "teacher": teacher,
        "GRPO": reinforced(directory, "distil_grpo", files, start),
        "SFT on the teacher's accepted completions": imitated(directory, files, teacher),
        "the teacher at the student's own samples": on_policy,
        "… and GRPO after it": reinforced(directory, "distil_then_grpo", files, on_policy),
    }
    names, table = ("pass@1", "greedy_accuracy", "pass@8", "entropy"), []
    for name, model in arms.items():
        found = run_eval(
            jaxrl_lm.EvalConfig(
                model=model,
                eval_dataset={"test": files["test"]},
                eval_reward_functions=(REWARD,),
                eval_num_generations=8,
                num_generations=9,
                prompts_per_step=32,
                max_completion_length=LENGTH,
            )
        )
        table.append((name, *(f"{found[f'eval/test/{metric}']:.3f}" for metric in names)))
    show(f"{STEPS} × {PROMPTS * GROUP} completions", ("", *names), table)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
