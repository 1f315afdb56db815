"""Learning from steps on the small lab model: a process reward model, and reinforcement learning with rewards of steps.

    python examples/learn_process.py prm      runs/learn   labels by completing steps; best-of-n against outcome models
    python examples/learn_process.py mistakes runs/learn   which mistakes such a model tells from right working
    python examples/learn_process.py rl       runs/learn   samples to an accuracy, rewards of steps against outcomes, 5 seeds
    python examples/learn_process.py credit   runs/learn   ways of credit in PPO and in the group method, easy and hard

The models that they start from (`jaxrl_lm/lab/small.py`) are made on the first call. docs/results.md holds what was printed.
"""

import itertools
import json
import random
import sys
from pathlib import Path

import numpy as np
from _tables import save_figure, show

import jaxrl_lm
from jaxrl_lm.config import PPOConfig
from jaxrl_lm.inference import run_export, run_generate
from jaxrl_lm.lab.run import REWARD
from jaxrl_lm.lab.small import careless_start
from jaxrl_lm.lab.task import Problem, check, demonstration, make_problems, prompt
from jaxrl_lm.label_steps import run_label_steps
from jaxrl_lm.report import load_metrics
from jaxrl_lm.search import run_search
from jaxrl_lm.tools_config import LabelStepsConfig, SearchConfig

LENGTH = 64  # tokens of a completion at most
SEPARATOR = ";"


def read(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def flawed_share(found: list[tuple[dict, str]]) -> str:
    """Of the completions whose answer is right, the share with a wrong step."""
    checks = [check(Problem(tuple(row["operands"])), text) for row, text in found]
    right = [one for one in checks if one.correct]
    flawed = sum(not all(one.steps) or not one.steps for one in right)
    return f"{flawed / max(len(right), 1):.3f} ({flawed} of {len(right)})"


# --- process and outcome reward models --------------------------------------------------------------------------------


def labelled(directory: Path, files: dict[str, str], *, prompts: int = 400, count: int = 4, rollouts: int = 8) -> str:
    """Stepwise rows: each step's label is the mean outcome of 8 completions that go on from it."""
    output = directory / "steps.jsonl"
    if not output.exists():
        config = LabelStepsConfig(
            model=files["model"], dataset=files["train"], limit=prompts, output=str(output), reward=(REWARD,),
            num_generations=count, rollouts=rollouts, step_separator=SEPARATOR, max_completion_length=LENGTH,
            prompts_per_step=64,
        )  # fmt: skip
        print(run_label_steps(config))
    return str(output)


def trained(directory: Path, name: str, config, train) -> str:
    """The exported directory of a run, which is made once."""
    model = directory / f"{name}_model"
    if not model.exists():
        train(config)
        run_export(jaxrl_lm.ExportConfig(run=config.output_dir, directory=str(model)))
    return str(model)


def scorers(directory: Path, files: dict[str, str]) -> dict[str, str]:
    """A process model on labelled steps, outcome models on the same completions and on as many samples as labelling took."""
    stepwise = labelled(directory, files)
    whole = lambda row: SEPARATOR.join(row["completions"])
    same = [{"prompt": row["prompt"], "completion": whole(row), "label": row["outcome"]} for row in read(stepwise)]
    summary = json.loads(Path(stepwise + ".summary.json").read_text())
    count = summary["completions"] + 8 * summary["prefixes"]
    drawn = run_generate(
        jaxrl_lm.GenerateConfig(
            model=files["model"], dataset=files["train"], limit=count // 8, num_generations=8, prompts_per_step=64,
            max_completion_length=LENGTH, seed=1,
        )
    )  # fmt: skip
    judge = lambda row, text: float(check(Problem(tuple(row["operands"])), text).correct)
    many = [
        {"prompt": r["prompt"], "completion": t, "label": judge(r, t)} for r in drawn for t in r["completions"] if t
    ]
    shared = {
        "model": files["careful"], "rows_per_step": 64, "max_steps": 300, "learning_rate": 3e-4, "warmup_steps": 20,
        "lr_scheduler": "linear", "eval_steps": 0, "save_steps": 0, "logging_steps": 100,
    }  # fmt: skip
    process = jaxrl_lm.PRMConfig(
        dataset=stepwise, output_dir=str(directory / "prm"), step_separator=SEPARATOR, **shared
    )
    found = {"process model": f"prm:{trained(directory, 'prm', process, jaxrl_lm.train_prm)}"}
    for name, title, data in (("orm", "the same {} completions", same), ("orm_many", "as many samples ({})", many)):
        config = jaxrl_lm.RewardConfig(
            dataset=write(directory / f"{name}.jsonl", data), output_dir=str(directory / name), loss_type="outcome", **shared
        )  # fmt: skip
        model = trained(directory, name, config, jaxrl_lm.train_reward)
        found["outcome model, " + title.format(len(data))] = f"reward_model:{model}"
    return found


def prm(directory: Path) -> None:
    """The accuracy of what each scorer chooses of n completions, and how many right choices have a wrong step."""
    files, output = careless_start(directory / "long"), directory / "search.json"
    problems = {row["prompt"]: row for row in read(files["test"])}
    curves, chosen, found, records = {}, [], {}, []
    for name, scorer in scorers(directory, files).items():
        process = scorer.startswith("prm:")
        for credit in ("last", "min", "product", "mean") if process else ("last",):
            found = run_search(
                SearchConfig(
                    model=files["model"], dataset=files["test"], reward=(REWARD,), scorer=scorer, credit=credit,
                    num_generations=16, prompts_per_step=32, max_completion_length=LENGTH, seed=2, output=str(output),
                )
            )  # fmt: skip
            records = json.loads(output.read_text())["records"]
            title = f"{name}, {credit}" if process else name
            curves[title] = found["best_of_n"]
            best = [max(range(16), key=lambda n, r=record: r["scores"][n]) for record in records]
            picks = [(problems[r["prompt"]], r["completions"][n]) for r, n in zip(records, best, strict=True)]
            chosen.append((title, flawed_share(picks)))
    every = [(problems[record["prompt"]], text) for record in records for text in record["completions"]]
    curves |= {name: found[name] for name in ("majority", "pass@n")}
    ks = found["n"]
    table = [(name, *(f"{x:.3f}" for x in curve)) for name, curve in curves.items()]
    show("Held-out accuracy of the chosen completion of n", ("scorer", *(f"n = {k}" for k in ks)), table)
    show(
        "Right answers with a wrong step",
        ("chosen by", "share"),
        [("nothing (every sample)", flawed_share(every)), *chosen],
    )

    def draw(figure) -> None:
        axes = figure.subplots()
        for name, curve in curves.items():
            axes.plot(ks, curve, ":" if name in ("majority", "pass@n") else "-", label=name)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="completions to choose from", ylabel="held-out accuracy of the chosen one")
        axes.legend(fontsize=8)

    save_figure(str(directory / "prm.png"), draw, width=6)


def mistakes(directory: Path, count: int = 20000) -> None:
    """Whether a process model of this size tells forgotten carries, and miscounted columns, when every label is right."""
    files, table = careless_start(directory / "long"), []
    for name, chances in (
        ("forgotten carries", {"drop": 0.5, "slip": 0.0}),
        ("miscounted", {"drop": 0.0, "slip": 0.35}),
    ):
        rng, rows = random.Random(0), []
        for problem in make_problems(count + 500, seed=5, digits=5, least_digits=5):
            text = demonstration(problem, rng, **chances)
            labels = list(itertools.accumulate(check(problem, text).steps, lambda before, right: before and right))
            steps = text.split(SEPARATOR)[: len(labels)]
            rows.append({"prompt": prompt(problem), "completions": steps, "labels": [float(one) for one in labels]})
        data = {
            split: write(directory / f"{split}_{name.split()[0]}.jsonl", part)
            for split, part in (("train", rows[:count]), ("test", rows[count:]))
        }
        output = directory / f"tells_{name.split()[0]}"
        config = jaxrl_lm.PRMConfig(
            model=files["careful"], dataset=data["train"], eval_dataset={"test": data["test"]}, output_dir=str(output),
            step_separator=SEPARATOR, rows_per_step=64, max_steps=300, learning_rate=1e-3, warmup_steps=20,
            lr_scheduler="linear", eval_steps=300, eval_limit=500, save_steps=0, logging_steps=100,
        )  # fmt: skip
        if not (output / "checkpoints" / "300").exists():
            jaxrl_lm.train_prm(config)
        last = load_metrics(output / "metrics.jsonl")[-1]
        wrong = [label == 0.0 for row in rows[count:] for label in row["labels"]]
        values = (last["eval/test/accuracy"], max(np.mean(wrong), 1 - np.mean(wrong)), last["eval/test/loss"])
        table.append((name, *(f"{value:.3f}" for value in values)))
    show(
        f"Process models of {count} right labelled rows", ("mistake", "accuracy", "by the larger class", "loss"), table
    )


# --- reinforcement learning -------------------------------------------------------------------------------------------

STEPS = "jaxrl_lm.lab.task:lab_step_rewards"
PROMPTS, GROUP = 16, 8


def options(files: dict[str, str], output: Path, seed: int, **changes) -> dict:
    return {
        "model": files["model"], "dataset": files["train"], "eval_dataset": {"test": files["test"]}, "reward": (REWARD,),
        "output_dir": str(output), "seed": seed, "prompts_per_step": PROMPTS, "num_generations": GROUP,
        "max_completion_length": LENGTH, "learning_rate": 3e-4, "eval_steps": 5, "eval_limit": 128,
        "eval_num_generations": 7, "probe_prompts": 0, "completions_steps": 0, "save_steps": 0, "logging_steps": 20,
        "preset": "grpo",
    } | changes  # fmt: skip


def samples_to(history: list[dict], accuracy: float) -> float:
    """Completions sampled until the held-out pass@1 first reached the accuracy; infinite where it never did."""
    steps = [row["step"] for row in history if row.get("eval/test/pass@1", 0.0) >= accuracy]
    return steps[0] * PROMPTS * GROUP if steps else float("inf")


ARMS = {"outcome alone": {}, "outcome and steps, sum to go": {"step_reward": STEPS}}


def rl(directory: Path, seeds: int = 5, accuracy: float = 0.3, steps: int = 60) -> None:
    """GRPO with the verifier's outcome, and with a program's verdict on each step beside it.

    The start miscounts two columns in three: one answer in fifty is right, and few groups tell right from wrong.
    """
    files, table, curves = careless_start(directory / "long", slip=0.65, drop=0.0), [], {}
    for name, changes in ARMS.items():
        runs = []
        for seed in range(seeds):
            output = directory / f"rl_{'steps' if changes else 'outcome'}_{seed}"
            if not (output / "checkpoints" / str(steps)).exists():
                jaxrl_lm.train(jaxrl_lm.GRPOConfig(**options(files, output, seed, max_steps=steps, **changes)))
            runs.append(load_metrics(output / "metrics.jsonl"))
        drawn = run_generate(
            jaxrl_lm.GenerateConfig(
                model=str(output),
                dataset=files["test"],
                num_generations=8,
                prompts_per_step=32,
                max_completion_length=LENGTH,
            )
        )
        texts = [(row, text) for row in drawn for text in row["completions"]]
        needed = [samples_to(run, accuracy) for run in runs]
        last = [run[-1]["eval/test/pass@1"] for run in runs]
        spread = lambda values, form: f"{form.format(min(values))} to {form.format(max(values))}"
        table.append((name, spread(needed, "{:.0f}"), spread(last, "{:.3f}"), flawed_share(texts)))
        curves[name] = runs
    show(
        f"Samples to a held-out pass@1 of {accuracy}, {seeds} seeds (range)",
        ("reward", "samples", "pass@1 at the end", "right answers with a wrong step"),
        table,
    )

    def draw(figure) -> None:
        axes = figure.subplots()
        for color, (name, runs) in enumerate(curves.items()):
            for number, run in enumerate(runs):
                rows = [row for row in run if "eval/test/pass@1" in row]
                at = [row["step"] * PROMPTS * GROUP for row in rows]
                axes.plot(at, [row["eval/test/pass@1"] for row in rows], f"C{color}", label=None if number else name)
        axes.axhline(accuracy, color="grey", linestyle=":")
        axes.set(xlabel="completions sampled", ylabel="held-out pass@1")
        axes.legend()

    save_figure(str(directory / "process_rl.png"), draw, width=6)


def credit(directory: Path) -> None:
    """Ways of credit with both methods, from an easy start (a column in three is miscounted) and a hard one (two in three).

    With verdicts of 0 and 1 the product is the minimum.
    """
    starts = {"easy": careless_start(directory / "long", slip=0.35, drop=0.0),
              "hard": careless_start(directory / "long", slip=0.65, drop=0.0)}  # fmt: skip
    table = []
    for method, config_class, own in (
        ("group", jaxrl_lm.GRPOConfig, {}),
        ("PPO", PPOConfig, {"preset": "ppo", "num_generations": 1, "prompts_per_step": PROMPTS * GROUP, "num_iterations": 2,
                            "critic_warmup_steps": 3}),
    ):  # fmt: skip
        for name in ("none", "sum-to-go", "mean", "min", "last"):
            steps = {} if name == "none" else {"step_reward": STEPS, "step_credit": name}
            cells = []
            for split, files in starts.items():
                output = directory / f"credit_{method}_{name}_{split}"
                if not (output / "checkpoints" / "30").exists():
                    changes = {**own, **steps, "max_steps": 30, "eval_steps": 30}
                    jaxrl_lm.train(config_class(**options(files, output, 0, **changes)))
                history = load_metrics(output / "metrics.jsonl")
                cells.append(f"{history[0]['eval/test/pass@1']:.3f} -> {history[-1]['eval/test/pass@1']:.3f}")
            table.append((method, "outcome alone" if name == "none" else name, *cells))
    show("30 steps of 128 completions, pass@1", ("method", "credit of steps", *starts), table)


if __name__ == "__main__":
    {"prm": prm, "mistakes": mistakes, "rl": rl, "credit": credit}[sys.argv[1]](Path(sys.argv[2]))
