"""Runs of the kinds that `test_distributed.py` does not make itself: by two processes, and by one to compare with.

`make` is called by each process, the files are those of `save`.
"""

import jax
import numpy as np
import tiny_run

from jaxrl_lm import GRPOConfig, models
from jaxrl_lm.config import EvalConfig
from jaxrl_lm.dpo import train_dpo
from jaxrl_lm.fit_config import DPOConfig, RewardConfig, SFTConfig
from jaxrl_lm.inference import run_eval
from jaxrl_lm.loop import train
from jaxrl_lm.reward_fit import train_reward
from jaxrl_lm.sft import train_sft

NAMES = ("sft", "dpo", "reward", "steps", "prm")
MESH = {"fsdp": 2, "tensor": 2}

# Generation on devices of its own, of four: of two processes one trains and one generates, or the second one does both.
APART = {
    "whole": {
        "mesh": {"fsdp": 2}, "rollout_mesh": {"tensor": 2}, "reference_placement": "rollout_mesh",
        "reward_placement": "rollout_mesh", "reward": ("judge", "tiny_run:digits"), "reward_weights": (1.0, 0.5),
        "eval_steps": 1,
    },
    "divided": {
        "mesh": {"data": 3}, "rollout_mesh": {"data": 1}, "reference_placement": "host", "optimizer_placement": "host",
        "reward": ("tiny_run:digits",), "reward_weights": (), "prompts_per_step": 6, "minibatch_completions": 12,
        "eval_steps": 0,
    },
}  # fmt: skip


def signs(*, completions):
    """Every plus is a step; rows without one have none that could be judged."""
    return [[(place + 1, 0.5) for place, c in enumerate(text) if c == "+"] or None for text in completions]


def sums(count, seed):
    """Rows that sft, dpo and reward can all read."""
    rows = []
    for a, b in np.random.default_rng(seed).integers(0, 50, (count, 2)).tolist():
        rows.append({"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1 + a % 7)})
    return rows


def save(directory):
    """The model, another one, a reward model, a process reward model and data, in a directory."""
    name = tiny_run.save_model(directory / "tiny")
    tiny_run.save_model(directory / "short", num_layers=1)
    tiny_run.save_model(directory / "other", seed=1)  # a pair's margin is not 0 from it, and so no rounding's sign
    for labels, bias, write, option in (
        (1, False, models.save_reward_model, {"append_eos": True}),
        (2, True, models.save_process_model, {"step_separator": "+"}),
    ):
        key = jax.random.key(labels)
        model, params, tokenizer, _ = models.load_classifier_start(name, labels=labels, bias=bias, key=key)
        write(directory / ("judge", "prm")[labels - 1], model, params, tokenizer, **option)
    return name, tiny_run.write_data(directory)


def apart(files, output, kind):
    """The options of a run of a kind in APART, of one step, in output/<kind>."""
    names = {name: str(files / f"{name}.jsonl") for name in ("train", "test", "ood")}
    changes = {
        "eval_dataset": {"test": names["test"]}, "eval_limit": 3, "probe_prompts": 0, "prompt_buckets": (16,),
        "num_iterations": 1, "max_steps": 1, "true_reward": None, "dtype": "float32",
    } | APART[kind]  # fmt: skip
    changes["reward"] = tuple(f"reward_model:{files / name}" if name == "judge" else name for name in changes["reward"])
    return GRPOConfig(**tiny_run.options(str(files / "short"), names, output / kind, **changes))


def make(files, output):
    """A run of each kind in output/<kind>, and the metrics of an evaluation in output/eval."""
    name = str(files / "tiny")
    fit = {"model": name, "mesh": MESH, "dataset": "own", "rows_per_step": 8, "max_length": 16, "max_steps": 2}
    fit |= {"learning_rate": 1e-2, "adam_eps": 1e-3, "eval_steps": 2}
    kinds = {
        "sft": (train_sft, SFTConfig, {"packing": True}),
        "dpo": (train_dpo, DPOConfig, {"reference_model": str(files / "other"), "precompute_ref_log_probs": True}),
        "reward": (train_reward, RewardConfig, {"members": 2}),
    }
    for kind, (run, config, changes) in kinds.items():
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} if kind == "sft" else row for row in sums(24, 1)]
        if kind != "sft":
            changes["eval_dataset"] = {"held": str(files / "held.jsonl")}
        run(config(**fit, output_dir=str(output / kind), **changes), dataset=rows)
    judge = f"reward_model:{files / 'judge'}"
    data = {"train": str(files / "train.jsonl"), "test": str(files / "test.jsonl"), "ood": str(files / "ood.jsonl")}
    changes = {
        "mesh": MESH, "eval_dataset": {}, "eval_steps": 0, "probe_prompts": 0, "prompt_buckets": (16,), "beta": 0.0,
        "num_iterations": 1, "minibatch_completions": None, "max_steps": 1, "true_reward": None,
        "reward": (judge, "tiny_run:digits"), "reward_weights": (1.0, 0.5),
    }  # fmt: skip
    for kind, step_reward in (("steps", "distributed_runs:signs"), ("prm", f"prm:{files / 'prm'}")):
        own = changes | {"step_reward": step_reward}
        train(GRPOConfig(**tiny_run.options(name, data, output / kind, **own)))
    sampled = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 8, "prompt_buckets": (16,)}
    judged = {"eval_dataset": {"test": data["test"]}, "eval_reward_functions": (judge,), "eval_num_generations": 3}
    run_eval(EvalConfig(model=name, mesh=MESH, output=str(output / "eval"), **sampled, **judged))
