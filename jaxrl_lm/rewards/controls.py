"""Rewards that know nothing, as controls: a gain under them is a warning about the measurement."""

import hashlib
from collections.abc import Sequence
from typing import Any


def random_reward(prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """0.0 or 1.0 with equal chance, from a hash of the prompt, the completion's tokens and its place in the batch.

    The same run gives the same values, and equal completions of one group get independent ones.
    """

    def one(row: int) -> float:
        text = f"{row} {prompts[row]!r} {list(completion_ids[row])}"
        return float(hashlib.blake2b(text.encode(), digest_size=1).digest()[0] & 1)

    return [one(row) for row in range(len(prompts))]
