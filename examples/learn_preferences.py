"""Learning from preferences on the small lab model: a reward model, DPO, and pairs that are sampled anew.

    python examples/learn_preferences.py reward runs/learn   a reward model from comparisons by a gold score
    python examples/learn_preferences.py dpo    runs/learn   right against wrong answers of its own: accuracy and KL by beta
    python examples/learn_preferences.py online runs/learn   offline, semi-online, online DPO and GRPO at equal samples

All start from one model (`jaxrl_lm/lab/small.py`), made on the first call. docs/results.md holds what `dpo` and `online`
printed.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from _tables import save_figure, show

import jaxrl_lm
from jaxrl_lm.config import EvalConfig
from jaxrl_lm.data import pad_rows
from jaxrl_lm.inference import load_any, run_eval, run_export, run_generate
from jaxrl_lm.lab.run import REWARD
from jaxrl_lm.lab.small import careless_start, small_start
from jaxrl_lm.lab.task import lab_answer, lab_steps
from jaxrl_lm.prepare import build_plan
from jaxrl_lm.report import load_metrics
from jaxrl_lm.seeds import estimate

LENGTH = 32  # tokens of a completion at most


def gold(
    *, prompts: list[str], completions: list[str], operands: list[Sequence[int]], answer: list[int]
) -> list[float]:
    """What is wanted: right steps, and above all a right answer. A reward function."""
    steps = lab_steps(prompts=prompts, completions=completions, operands=operands)
    right = lab_answer(prompts=prompts, completions=completions, answer=answer)
    return [share + 2.0 * one for share, one in zip(steps, right, strict=True)]


def judged(row: dict) -> list[float]:
    """The gold rewards of a row's completions."""
    count = len(row["completions"])
    return gold(
        prompts=[row["prompt"]] * count, completions=row["completions"], operands=[row["operands"]] * count,
        answer=[row["answer"]] * count,
    )  # fmt: skip


def samples(model: str, dataset: str, *, limit: int, count: int, length: int = LENGTH, seed: int = 0) -> list[dict]:
    """`count` completions of each of the first `limit` prompts, with their gold scores."""
    config = jaxrl_lm.GenerateConfig(
        model=model, dataset=dataset, limit=limit, num_generations=count, prompts_per_step=32, seed=seed,
        max_completion_length=length,
    )  # fmt: skip
    return [{**row, "gold": judged(row)} for row in run_generate(config)]


def write(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def comparisons(rows: list[dict], *, each: int = 1, least_gap: float = 0.0, seed: int = 0) -> list[dict]:
    """Up to `each` random pairs of completions of every prompt that the gold score tells apart."""
    rng, found = random.Random(seed), []
    for row in rows:
        count = len(row["gold"])
        pairs = [(i, j) for i in range(count) for j in range(count) if row["gold"][i] > row["gold"][j] + least_gap]
        for i, j in rng.sample(pairs, min(each, len(pairs))):
            found.append({"prompt": row["prompt"], "chosen": row["completions"][i], "rejected": row["completions"][j]})
    return found


def reward(directory: Path) -> None:
    """Bradley–Terry on comparisons of completions of training problems, held out on those of test problems."""
    files = careless_start(directory / "long", slip=0.0)
    tests = samples(files["model"], files["test"], limit=128, count=8, length=2 * LENGTH)
    told = comparisons(samples(files["model"], files["train"], limit=4000, count=4, length=2 * LENGTH), each=2)
    held = {
        name: write(directory / f"pairs_{name}.jsonl", comparisons(tests, each=4, least_gap=gap))
        for name, gap in (("all", 0.0), ("clear", 0.3))
    }
    config = jaxrl_lm.RewardConfig(
        model=files["careful"],
        dataset=write(directory / "pairs_train.jsonl", told),
        eval_dataset=held,
        output_dir=str(directory / "reward"),
        rows_per_step=64,
        max_steps=200,
        learning_rate=1e-3,
        warmup_steps=20,
        lr_scheduler="linear",
        eval_limit=512,
        eval_steps=25,
        save_steps=0,
        logging_steps=100,
    )
    if not (directory / "reward_model").exists():
        jaxrl_lm.train_reward(config)
        run_export(jaxrl_lm.ExportConfig(run=config.output_dir, directory=str(directory / "reward_model")))
    rows = [row for row in load_metrics(Path(config.output_dir) / "metrics.jsonl") if "eval/all/accuracy" in row]
    names = [f"{kind}/{name}" for kind in held for name in ("accuracy", "margin")]
    names += ["all/length_reward_correlation", "all/calibration_error"]
    show(f"A reward model from {len(told)} comparisons", ("step", *names), [
        (str(row["step"]), *(f"{row[f'eval/{name}']:.3f}" for name in names)) for row in rows
    ])  # fmt: skip

    def draw(figure) -> None:
        axes = figure.subplots()
        for kind, label in (("all", "all comparisons"), ("clear", "two steps or the answer apart")):
            axes.plot([row["step"] for row in rows], [row[f"eval/{kind}/accuracy"] for row in rows], label=label)
        axes.axhline(0.9, color="grey", linestyle=":")
        axes.set(xlabel="step", ylabel="held-out accuracy of comparisons", ylim=(0.4, 1.0))
        axes.legend()

    save_figure(str(directory / "reward.png"), draw, width=5)


def kl_and_accuracy(model: str, start: str, dataset: str) -> tuple[float, float, float]:
    """KL(model ‖ start) in nats a completion, by the mean of log-ratios of sampled completions; greedy accuracy; pass@1."""
    loaded, reference = (load_any(name, build_plan({"fsdp": 1})) for name in (model, start))
    options = {"model": model, "max_completion_length": LENGTH, "num_generations": 8, "prompts_per_step": 32}
    rows = run_generate(jaxrl_lm.GenerateConfig(dataset=dataset, **options))
    flat = [(row["prompt"], ids) for row in rows for ids in row["completion_ids"]]
    prompts = [loaded.tokenizer(prompt)["input_ids"] for prompt, _ in flat]
    tokens, segment_ids, mask = pad_rows(
        list(zip(prompts, [ids for _, ids in flat], strict=True)), max(map(len, prompts)), LENGTH, 0
    )
    score = lambda one: np.asarray(jaxrl_lm.score(one.params, tokens, segment_ids, model=loaded.model).logprobs)
    kl = np.where(mask, score(loaded) - score(reference), 0.0).sum(1).mean()
    found = run_eval(
        EvalConfig(eval_dataset={"test": dataset}, eval_reward_functions=(REWARD,), eval_num_generations=7, **options)
    )
    return float(kl), found["eval/test/greedy_accuracy"], found["eval/test/pass@1"]


def dpo(directory: Path, files: dict[str, str]) -> None:
    """A right against a wrong completion of the model itself, for three betas."""
    told = comparisons(samples(files["model"], files["train"], limit=2000, count=8), least_gap=1.5)
    dataset = write(directory / "dpo_train.jsonl", told)
    start = kl_and_accuracy(files["model"], files["model"], files["test"])
    table, points = [("start", "", "", *(f"{x:.3f}" for x in start))], [start]
    betas = (0.03, 0.1, 0.3)
    for beta in betas:
        output = directory / f"dpo_{beta}"
        if not (output / "model").exists():
            config = jaxrl_lm.DPOConfig(
                model=files["model"], dataset=dataset, output_dir=str(output), beta=beta, rows_per_step=32, max_steps=150,
                learning_rate=1e-4, lr_scheduler="linear", save_steps=0, logging_steps=50,
            )  # fmt: skip
            jaxrl_lm.train_dpo(config)
            run_export(jaxrl_lm.ExportConfig(run=str(output), directory=str(output / "model")))
        last = load_metrics(output / "metrics.jsonl")[-1]
        points.append(kl_and_accuracy(str(output / "model"), files["model"], files["test"]))
        table.append((f"{beta}", f"{last['rewards/margins']:.3f}", f"{last['rewards/accuracies']:.3f}",
                      *(f"{x:.3f}" for x in points[-1])))  # fmt: skip
    show(
        f"DPO on {len(told)} pairs, 150 steps of 32",
        ("beta", "margin", "accuracy of pairs", "KL, nats", "greedy", "pass@1"),
        table,
    )

    def draw(figure) -> None:
        axes = figure.subplots()
        for column, name in ((1, "greedy accuracy"), (2, "pass@1")):
            axes.plot([point[0] for point in points], [point[column] for point in points], "o", label=name)
        for point, name in zip(points, ("start", *(f"β = {beta}" for beta in betas)), strict=True):
            axes.annotate(
                name, (point[0], point[1]), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8
            )
        axes.set(xlabel="KL(policy ‖ start), nats a completion", ylabel="held-out", ylim=(0.4, 0.9))
        axes.legend(loc="lower right")

    save_figure(str(directory / "dpo.png"), draw, width=5)


STEPS, PROMPTS, GROUP = 48, 16, 8
LONGER = 73  # steps of GRPO that sample as much as online DPO's 48
ARMS = {"offline DPO": STEPS, "semi-online DPO, every 16": 16, "semi-online DPO, every 4": 4, "online DPO": 1}


def online(directory: Path, files: dict[str, str], seeds: int = 3) -> None:
    """The same number of steps and rows for each; only where the pairs come from differs.

    Prompts whose samples are all alike are replaced by others, so that DPO samples somewhat more than GRPO does.
    """
    shared = {
        "model": files["model"], "dataset": files["train"], "eval_dataset": {"test": files["test"]}, "reward": (REWARD,),
        "num_generations": GROUP, "max_completion_length": LENGTH, "lr_scheduler": "linear", "max_steps": STEPS,
        "eval_steps": STEPS, "save_steps": 0, "logging_steps": STEPS, "prompts_per_step": PROMPTS,
    }  # fmt: skip
    ends: dict[str, list[dict]] = {}
    for seed in range(seeds):
        for name, refresh in ARMS.items():
            output = directory / f"online_{refresh}_{seed}"
            if not (output / "checkpoints" / str(STEPS)).exists():
                config = jaxrl_lm.DPOConfig(
                    **shared, output_dir=str(output), seed=seed, refresh_steps=refresh, rows_per_step=PROMPTS, beta=0.1,
                    learning_rate=1e-4,
                )  # fmt: skip
                jaxrl_lm.train_dpo(config)
            ends.setdefault(name, []).append(load_metrics(output / "metrics.jsonl"))
        for name, steps in {"GRPO": STEPS, "GRPO, as many samples": LONGER}.items():
            output = directory / f"online_grpo_{steps}_{seed}"
            if not (output / "checkpoints" / str(steps)).exists():
                config = jaxrl_lm.GRPOConfig(
                    **{**shared, "max_steps": steps, "eval_steps": steps}, output_dir=str(output), seed=seed,
                    preset="grpo", learning_rate=3e-4, probe_prompts=0, completions_steps=0,
                )  # fmt: skip
                jaxrl_lm.train(config)
            ends.setdefault(name, []).append(load_metrics(output / "metrics.jsonl"))
    names = ("pass@1", "greedy_accuracy", "pass@8", "entropy")
    table = []
    for name, runs in {"start": ends["GRPO"], **ends}.items():
        at = 0 if name == "start" else -1
        cells = [estimate([run[at][f"eval/test/{metric}"] for run in runs]) for metric in names]
        drawn = "" if name == "start" else f"{np.mean([completions(run, ARMS.get(name)) for run in runs]):.0f}"
        table.append((name, *(f"{one.mean:.3f} ± {one.half:.3f}" for one in cells), drawn))
    show(f"{STEPS} steps of {PROMPTS} pairs or groups; {seeds} seeds", ("", *names, "completions"), table)


def completions(run: list[dict], refresh: int | None) -> float:
    """How many a run has sampled; `refresh` is None for GRPO."""
    if refresh is None:
        return run[-1]["step"] * PROMPTS * GROUP
    shares = [row["pairs/kept_share"] for row in run if "pairs/kept_share" in row]
    pairs = [row["pairs/share"] * PROMPTS * refresh for row in run if "pairs/kept_share" in row]
    return sum(pair / share for pair, share in zip(pairs, shares, strict=True)) * GROUP


if __name__ == "__main__":
    command, place = sys.argv[1], Path(sys.argv[2])
    if command == "reward":
        reward(place)
    else:
        {"dpo": dpo, "online": online}[command](place, small_start(place))
