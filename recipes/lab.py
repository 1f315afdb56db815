"""Rows for the recipes, made from the arithmetic lab's problems: comparisons, and right solutions.

Sources of a dataset: `recipes/lab.py:comparisons?count=2000`. With split=test, for evaluation, no problem is one that
split=train, the default, can draw.
"""

import itertools
import random
from collections.abc import Iterator

from jaxrl_lm.lab.task import Problem, check, demonstration, make_problems, prompt, solution


def comparisons(
    *, count: int = 2000, seed: int = 1, split: str = "train", slip: float = 0.05, drop: float = 0.6, skip: float = 0.1
) -> Iterator[dict[str, str]]:
    """`count` rows with `prompt`, `chosen` and `rejected`: two attempts of the lab's demonstrator at a problem, of which the
    one with more right steps is chosen, the right answer counting as one. Attempts that are equally good are no row.
    """
    rng = random.Random(f"comparisons/{seed}")
    pairs = (
        (problem, [demonstration(problem, rng, slip=slip, drop=drop, skip=skip) for _ in range(2)])
        for problem in make_problems(5 * count, seed=seed, split=split)
    )
    rows = (
        {"prompt": prompt(problem), "chosen": max(texts, key=score), "rejected": min(texts, key=score)}
        for problem, texts in pairs
        for score in [lambda text, problem=problem: quality(problem, text)]
        if score(texts[0]) != score(texts[1])
    )
    return itertools.islice(rows, count)


def quality(problem: Problem, completion: str) -> int:
    """Right steps, and one more for a right answer."""
    found = check(problem, completion)
    return sum(found.steps) + found.correct


def solutions(*, count: int = 200, seed: int = 2) -> list[dict[str, str]]:
    """`count` rows with `prompt` and `completion`, without a mistake."""
    return [{"prompt": prompt(problem), "completion": solution(problem)} for problem in make_problems(count, seed=seed)]
