"""Rewards of completions that have ended, computed in a thread while later chunks of the same batch decode.

A reward function is called several times a step, each time with whole groups; what it gives a group is what it would
give it among all. Functions that are computed `Everywhere` (reward models on the mesh) wait for the end and get all rows:
every process must call them at one place, and their programs would run beside the decoding ones.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Float64

from jaxrl_lm.distributed import share, spread
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.evaluate import judge_groups
from jaxrl_lm.rewards import RewardError, RewardFunction, columns_of, compute_rewards
from jaxrl_lm.rollout import Sampled


class Beside:
    """The rewards of one call of the sampler, which calls `watch` as rows end. To be used as a context manager, which
    ends with the thread. Of several processes each judges its share of the groups."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        prompts: EncodedPrompts,
        indices: Sequence[int],
        *,
        tokenizer: Any,
        group_size: int,
    ):
        rows = [prompts.rows[index] for index in indices for _ in range(group_size)]
        self._functions, self._tokenizer, self._group = functions, tokenizer, group_size
        self._given = {
            "prompts": [row["prompt"] for row in rows],
            "columns": columns_of(rows),
            "group_ids": [row // group_size for row in range(len(rows))],
        }
        self._texts, self._ids = [""] * len(rows), [[] for _ in rows]
        self._missing = set(share(len(indices)))  # groups
        self._pool, self._calls = ThreadPoolExecutor(1, "rewards"), []
        self._failed, self.seconds = False, 0.0

    def __enter__(self) -> "Beside":
        return self

    def __exit__(self, *error) -> None:
        self._pool.shutdown(cancel_futures=True)

    def watch(self, ended: np.ndarray, tokens: np.ndarray, written: np.ndarray) -> None:
        """Hands over the groups whose rows have all ended since the last call, in the order of the batch."""
        whole = ended[: len(self._texts)].reshape(-1, self._group).all(1)
        groups = sorted(group for group in self._missing if whole[group])
        if not groups:
            return
        self._missing -= set(groups)
        rows = [group * self._group + n for group in groups for n in range(self._group)]
        for row in rows:
            self._ids[row] = tokens[row, written[row]].tolist()
        found = self._tokenizer.batch_decode([self._ids[row] for row in rows], skip_special_tokens=True)
        for row, text in zip(rows, found, strict=True):
            self._texts[row] = text
        self._calls.append((rows, self._pool.submit(self._judge, rows)))

    def _judge(self, rows: list[int]) -> np.ndarray | None:
        """[len(rows) F], or None after a failure: the run is ending."""
        if self._failed:
            return None
        start = time.perf_counter()
        try:
            # Lists of all rows, so that messages number them as ever; of those that go on nothing is read.
            given = {**self._given, "completions": self._texts, "completion_ids": self._ids}
            return compute_rewards(self._functions, mine=rows, which="own", **given)[rows]
        except BaseException:
            self._failed = True
            raise
        finally:
            self.seconds += time.perf_counter() - start

    def texts(self) -> list[str]:
        """Every completion, when all have ended."""
        return spread(len(self._texts) // self._group, lambda own: self._of(own, self._texts))

    def _of(self, groups: range, values: Sequence[Any]) -> list[Any]:
        return list(values[groups.start * self._group : groups.stop * self._group])

    def table(self, sampled: Sampled) -> Float64[np.ndarray, "n F"]:
        """Rewards [count F] as `reward_table` gives them, when all rows have ended. Raises RewardError, for the first call
        that failed."""
        values = np.full((len(self._texts), len(self._functions)), np.nan)

        def judged(own: range) -> list[list[float]]:
            for rows, call in self._calls:
                values[rows] = call.result()
            return self._of(own, values.tolist())

        table = np.array(spread(len(self._texts) // self._group, judged, raises=RewardError), np.float64)
        table = table.reshape(values.shape)
        together = [function.everywhere for function in self._functions]
        if any(together):

            def everywhere(*, mine: range, **given: Any) -> list[list[float]]:
                found = compute_rewards(self._functions, mine=mine, which="everywhere", **given)
                return found[mine.start : mine.stop].tolist()

            whole = np.array(judge_groups(everywhere, sampled, self._group), np.float64).reshape(values.shape)
            table[:, together] = whole[:, together]
        return table
