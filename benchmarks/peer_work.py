"""The work that ours and the peers are given: equal for all of them, from a seed. Needs numpy and nothing else."""

import numpy as np

VOCABULARY = range(100, 49000)  # SmolLM2's ids without the special ones


def prompts(*, rows: int, columns: int, group: int = 1, seed: int = 0) -> list[list[int]]:
    """Random ids, one list a row; each prompt stands in `group` neighbouring rows."""
    if rows % group:
        raise ValueError(f"rows={rows} is no multiple of group={group}")
    rng = np.random.default_rng(seed)
    distinct = rng.integers(VOCABULARY.start, VOCABULARY.stop, (rows // group, columns))
    return np.repeat(distinct, group, axis=0).tolist()


def long_tail(*, requests: int = 64, mean: float = 40, cap: int = 256, seed: int = 0) -> list[int]:
    """New tokens of each request: geometric with this mean, cut at the cap."""
    return np.minimum(np.random.default_rng(seed).geometric(1 / mean, requests), cap).tolist()


def sequences(*, rows: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    """Rows of random ids to score or train on, lengths uniform from `low` to `high`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(low, high + 1, rows)
    return [rng.integers(VOCABULARY.start, VOCABULARY.stop, n).tolist() for n in lengths]


def batches(items: list, size: int) -> list[list]:
    """The items in their order, `size` at a time."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def questions(count: int, *, seed: int = 0) -> list[str]:
    """Prompts of a GRPO step as plain text, about 40 tokens each."""
    rng = np.random.default_rng(seed)
    pairs = rng.integers(10, 100, (count, 2))
    return [
        f"A basket holds {a} red apples and {b} green apples. Somebody counts all of them twice, to be sure. "
        "Question: how many apples are in the basket? Answer:"
        for a, b in pairs
    ]


def letters(*, completions: list[str], **_) -> list[float]:
    """A reward that differs within a group: how many different characters a completion has."""
    return [float(len(set(text))) for text in completions]
