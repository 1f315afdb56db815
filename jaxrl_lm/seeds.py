"""The same options under several seeds: runs of their own that share compiled steps, and their means with intervals."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.distributed import writes
from jaxrl_lm.loop import run
from jaxrl_lm.prepare import prepare
from jaxrl_lm.report import load_metrics


class Estimate(NamedTuple):
    """A mean over seeds, and half of its 95 % interval."""

    mean: float
    half: float
    values: tuple[float, ...]  # one a seed


def estimate(values: Sequence[float]) -> Estimate:
    """Mean ± t_{0.975, n−1} · s / √n (Student); the half is NaN for one seed. Raises ValueError without any."""
    if not len(values):
        raise ValueError("no values to take a mean of")
    array = np.asarray(values, np.float64)
    spread = array.std(ddof=1) / math.sqrt(len(array)) if len(array) > 1 else math.nan
    half = float(stats.t.ppf(0.975, max(len(array) - 1, 1)) * spread)
    return Estimate(float(array.mean()), half, tuple(array.tolist()))


def train_seeds(
    config: GRPOConfig,
    *,
    reward_functions: Sequence[Callable[..., Any]] | None = None,
    dataset: Any = None,
    advantages: Callable[..., Any] | None = None,
    objective: Any = None,
) -> dict[str, Estimate]:
    """Trains `config.seeds` times, with seed, seed + 1, … in output_dir/seed_<n>; the estimates of the last metrics.

    They are written to output_dir/seeds.json too. A run that is there goes on, as in `train`; a stopped one ends all.
    Raises as `train`.
    """
    parts = {"reward_functions": reward_functions, "dataset": dataset, "advantages": advantages, "objective": objective}
    directory, shared, last = Path(config.output_dir), None, []
    for number in range(config.seeds):
        own = {"seed": config.seed + number, "seeds": 1, "output_dir": str(directory / f"seed_{config.seed + number}")}
        setup = prepare(dataclasses.replace(config, **own), **parts)
        # A seed is an argument of the compiled steps, so they serve every run.
        shared = shared or (setup.steps, setup.stream_steps)
        sampler = dataclasses.replace(setup.sampler, steps=shared[0])
        setup = setup._replace(steps=shared[0], stream_steps=shared[1], sampler=sampler)
        finished = run(setup)
        if finished.interrupted:
            raise SystemExit(f"{own['output_dir']}: {finished.stopped}; the same command goes on from there")
        last.append(load_metrics(Path(own["output_dir"]) / "metrics.jsonl"))
        del finished, setup  # the next run needs the devices
    found = {name: estimate([values[name] for values in map(_ends, last)]) for name in _names(last)}
    table = {name: one._asdict() for name, one in found.items()}
    if writes():
        (directory / "seeds.json").write_text(json.dumps(table, indent=2) + "\n")
    return found


def _ends(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The last value of every metric."""
    return {name: value for row in history for name, value in row.items() if value is not None}


def _names(histories: list[list[dict[str, Any]]]) -> list[str]:
    """Metrics that every run has a number for, in the order of the first."""
    ends = [_ends(history) for history in histories]
    return [name for name in ends[0] if all(isinstance(end.get(name), float) for end in ends)]


def table(found: dict[str, Estimate]) -> str:
    """Evaluations and rewards as lines of text."""
    shown = [name for name in found if name.startswith(("eval/", "rewards/")) or name in ("reward", "entropy", "kl")]
    return "\n".join(f"{name:40} {found[name].mean:.4f} ± {found[name].half:.4f}" for name in shown)
