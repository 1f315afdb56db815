"""Reward functions written for verl, used here.

verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)` scores one completion. The protocol
that it is adapted to is in `protocol.py`; on the command line it is `--reward verl:path/file.py:compute_score`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_lm.rewards.arithmetic import text_of


def from_verl(compute_score: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A reward function that calls `compute_score` on each row; it has its name.

    Needs the columns `data_source` and `ground_truth` (`data.read_rows` takes the latter out of `reward_model`), and
    passes `extra_info` where there is one. Of a dict the value at "score" counts, all else in it is ignored. Raises
    ValueError for a row without ground truth and a dict without "score".
    """

    def reward(
        completions: Sequence[Any],
        data_source: Sequence[Any],
        ground_truth: Sequence[Any],
        extra_info: Sequence[Any] | None = None,
    ) -> list[Any]:
        scores = []
        extras = extra_info if extra_info is not None else [None] * len(completions)
        for completion, source, truth, extra in zip(completions, data_source, ground_truth, extras, strict=True):
            for column, value in (("data_source", source), ("ground_truth", truth)):
                if value is None:
                    raise ValueError(f"the row has no {column!r}")
            score = compute_score(
                data_source=source, solution_str=text_of(completion), ground_truth=truth, extra_info=extra
            )
            if isinstance(score, dict):
                if "score" not in score:
                    raise ValueError(f"compute_score returned a dict without 'score', with {sorted(score)}")
                score = score["score"]
            scores.append(score)
        return scores

    # Not functools.wraps: its __wrapped__ would show the signature of compute_score to the protocol.
    reward.__name__ = compute_score.__name__
    return reward
