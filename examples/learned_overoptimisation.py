"""Over-optimisation of learned reward models: a language model gets better, then worse by what was wanted.

    python examples/learned_overoptimisation.py runs/learn

The gold reward is right steps and a right answer of sums of five columns. Reward models of three widths learn from 1000
comparisons by it of samples of one policy; then that policy's best-of-n and GRPO without a KL term climb each model, and
gold and proxy are read against d = √KL(π ‖ π_init). The pessimistic reward is mean − std of four models. The same study
where everything can be counted, and the source of the laws: `overoptimisation.py`.
"""

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import learn_preferences
import numpy as np
from _tables import save_figure, show
from learn_preferences import comparisons, samples, write
from overoptimisation import LAWS, fit, peak, spread

import jaxrl_lm
from jaxrl_lm.algos.selection import best_of_n_kl
from jaxrl_lm.inference import run_export
from jaxrl_lm.lab.small import LONG, careless_start, small_start
from jaxrl_lm.prepare import build_plan
from jaxrl_lm.report import load_metrics
from jaxrl_lm.reward_model import RewardModel
from jaxrl_lm.search import best_of_n_curve

WIDTHS = (40, 80, 160)
PAIRS, MEMBERS, LENGTH = 1000, 4, 64
SEEDS = {"one proxy": 3, "mean − std of 4": 1}  # of RL; one proxy is another of the four in each
STEPS, WINDOW = 60, 5  # a point of a curve of RL is the mean over a window of steps
BEST_OF = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
REWARDS = {"one proxy": "/member_{}", "mean − std of 4": "?ensemble=pessimistic&k=1"}


def proxies(directory: Path, files: dict[str, str], width: int) -> str:
    """A directory of four reward models that learned from the same comparisons, with heads and trunk of this width."""
    output = directory / f"proxy_{width}"
    if not (output / "models").exists():
        told = comparisons(samples(files["model"], files["train"], limit=PAIRS, count=4, length=LENGTH))
        careful = small_start(directory / "long" / f"careful_{width}", dataclasses.replace(LONG, hidden_size=width))
        config = jaxrl_lm.RewardConfig(
            model=careful["model"], dataset=write(directory / "proxy_pairs.jsonl", told[:PAIRS]), members=MEMBERS,
            output_dir=str(output / "run"), rows_per_step=64, num_epochs=4.0, learning_rate=1e-3, warmup_steps=10,
            lr_scheduler="linear", eval_steps=0, save_steps=0, logging_steps=20,
        )  # fmt: skip
        jaxrl_lm.train_reward(config)
        run_export(jaxrl_lm.ExportConfig(run=config.output_dir, directory=str(output / "models")))
    return str(output / "models")


def option(models: str, reward: str, seed: int) -> str:
    return f"reward_model:{models}{REWARDS[reward].format(seed)}"


# --- curves: d, gold and proxy, each [seeds points], both rewards 0 at the start, the proxy in units of its std there ---


class Start(NamedTuple):
    """Samples of the policy that all begin with, on test problems, and what a proxy says of them."""

    gold: np.ndarray  # [problems samples]
    scores: np.ndarray

    def relative(self, gold, proxy):
        """Both rewards from 0 at the start, the proxy in units of its std there."""
        return gold - self.gold.mean(), (proxy - self.scores.mean()) / self.scores.std()


def starts(files: dict[str, str], found: dict[str, str]) -> dict[tuple[str, str, int], Start]:
    """By width, reward and seed, of 64 samples of each of 64 problems."""
    rows = samples(files["model"], files["test"], limit=64, count=64, length=LENGTH)
    true, plan = np.array([row["gold"] for row in rows]), build_plan({"fsdp": 1})
    score = lambda scorer: np.array([scorer([row["prompt"]] * 64, row["completions"]) for row in rows])
    return {
        (width, reward, seed): Start(true, score(RewardModel(option(models, reward, seed), plan=plan)))
        for width, models in found.items()
        for reward in REWARDS
        for seed in range(SEEDS[reward])
    }


def best_of_n(start: Start) -> list[np.ndarray]:
    """d, gold and proxy of the best by proxy of n samples."""
    distance = np.sqrt([best_of_n_kl(n) for n in BEST_OF])
    return [distance, *(best_of_n_curve(start.scores, x, BEST_OF) for x in start.relative(start.gold, start.scores))]


def climbed(
    directory: Path, files: dict[str, str], models: str, start: Start, width: str, reward: str, seed: int
) -> list[np.ndarray]:
    """d, gold and proxy of one GRPO run, window by window."""
    output = directory / f"climb_{width}_{'one' if reward == 'one proxy' else 'four'}_{seed}"
    if not (output / "checkpoints" / str(STEPS)).exists():
        proxy = option(models, reward, seed)
        proxy += ("&" if "?" in proxy else "?") + "name=proxy"
        watched = f"{learn_preferences.__file__}:gold"  # of weight 0
        config = jaxrl_lm.GRPOConfig(
            model=files["model"], dataset=files["train"], output_dir=str(output), seed=seed, preset="grpo",
            reward=(proxy, watched), reward_weights=(1.0, 0.0),
            beta=1e-9,  # in effect none: it has the KL to the start measured
            prompts_per_step=16, num_generations=8, max_completion_length=LENGTH, learning_rate=2e-5, max_steps=STEPS,
            eval_steps=0, save_steps=0, logging_steps=STEPS, probe_prompts=0, completions_steps=0,
        )  # fmt: skip
        jaxrl_lm.train(config)
    rows = [row for row in load_metrics(output / "metrics.jsonl") if "sqrt_kl" in row]
    window = lambda name: np.array([row[name] for row in rows]).reshape(-1, WINDOW).mean(1)
    return [window("sqrt_kl"), *start.relative(window("rewards/gold/mean"), window("rewards/proxy/mean"))]


# --- tables and figure -----------------------------------------------------------------------------------------------


def tables(found: dict[tuple[str, str, str], list[np.ndarray]]) -> None:
    measured, fitted = [], []
    for (method, width, reward), (distance, true, proxy) in found.items():
        top = [np.take_along_axis(x, true.argmax(1)[:, None], 1)[:, 0] for x in (distance, true)]
        ends = (distance[:, -1], true[:, -1], proxy[:, -1])
        measured.append([method, width, reward, *map(spread, (*top, *ends))])
        for law in LAWS if reward == "one proxy" else ():
            alpha, beta, rest = np.array([fit(d, y, law) for d, y in zip(distance, true, strict=True)]).T
            tops = np.array([peak(a, b, law) for a, b in zip(alpha, beta, strict=True)]).T
            fitted.append([method, width, law, *map(spread, (alpha, beta, *tops)), f"{rest.mean():.3f}"])
    show("Against a learned reward model, mean [lowest, highest] of the seeds: where gold peaks, and the end",
         ["method", "width", "reward", "peak at d", "gold there", "d at the end", "gold", "proxy"], measured)  # fmt: skip
    show("Laws fitted to gold(d) of one proxy; rest: root of the mean square that is left",
         ["method", "width", "law", "α", "β", "peak at d", "gold there", "rest"], fitted)  # fmt: skip


def draw(figure, found) -> None:
    for axes, method in zip(figure.subplots(1, 2), ("best-of-n", "GRPO"), strict=True):
        for number, width in enumerate(map(str, WIDTHS)):
            distance, true, proxy = (x.mean(0) for x in found[method, width, "one proxy"])
            axes.plot(distance, true, f"C{number}", label=f"gold, proxy {width} wide")
            axes.plot(distance, proxy, f"C{number}:", label=None if number else "the proxy, in its std")
            distance, true, _ = (x.mean(0) for x in found[method, width, "mean − std of 4"])
            axes.plot(distance, true, f"C{number}--", linewidth=0.9, label=None if number else "gold, mean − std of 4")
        axes.set_xlabel("d = √KL(π ‖ π_init)")
        axes.set_title(method, fontsize=10.5, loc="left")
    figure.axes[0].set_ylabel("reward, 0 at the start")
    figure.axes[0].legend(fontsize=8, frameon=False)


def main(directory: Path) -> None:
    files = careless_start(directory / "long", slip=0.3, drop=0.3)
    models = {str(width): proxies(directory, files, width) for width in WIDTHS}
    begun, found = starts(files, models), {}
    stack = lambda runs: [np.stack(part) for part in zip(*runs, strict=True)]
    for method in ("best-of-n", "GRPO"):
        for width, place in models.items():
            for reward in REWARDS:
                each = {seed: begun[width, reward, seed] for seed in range(SEEDS[reward])}
                found[method, width, reward] = stack(
                    best_of_n(start)
                    if method == "best-of-n"
                    else climbed(directory, files, place, start, width, reward, seed)
                    for seed, start in each.items()
                )
    tables(found)
    save_figure(str(directory / "learned_overoptimisation.png"), lambda figure: draw(figure, found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
