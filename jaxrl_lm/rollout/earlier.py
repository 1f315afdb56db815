"""What each prompt was last completed with: the drafts of its next completions, kept on the host and in the checkpoint.

The samples do not depend on drafts but for the rounding of log-probs (`speculate.py`). A resumed run shall have their very
bits, so that they are part of its state.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_lm.rollout.replay import pack_array, unpack_array


class Earlier:
    """The last G completions of each prompt that has any."""

    def __init__(self):
        self._rows: dict[int, list[np.ndarray]] = {}  # by the prompt's index in the dataset

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, indices: Sequence[int], completion_ids: Sequence[Sequence[int]]) -> None:
        """The completions of these prompts, a prompt's adjacent, take the place of their earlier ones.

        Raises ValueError for a number of completions that is no multiple of the prompts.
        """
        group, rest = divmod(len(completion_ids), len(indices))
        if rest:
            raise ValueError(f"{len(completion_ids)} completions are not a multiple of {len(indices)} prompts")
        for place, index in enumerate(indices):
            own = completion_ids[place * group : (place + 1) * group]
            self._rows[int(index)] = [np.asarray(ids, np.int32) for ids in own]

    def of(self, indices: Sequence[int], group: int) -> list[np.ndarray]:
        """A completion for each of the G rows of these prompts, empty ones where there is none."""
        empty = [np.zeros((0,), np.int32)] * group
        return [row for index in indices for row in (self._rows.get(int(index), []) + empty)[:group]]

    def state(self) -> dict[str, Any]:
        """A JSON table."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """What makes the table of the completions that are there now; nothing is packed before it is called."""
        return functools.partial(_table, dict(self._rows))  # a prompt's completions are replaced, never written to

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved table."""
        ends = np.cumsum(unpack_array(state["lengths"]))
        flat = iter(np.split(unpack_array(state["tokens"]), ends)[:-1])
        self._rows = {
            index: [next(flat) for _ in range(count)]
            for index, count in zip(state["indices"], state["counts"], strict=True)
        }


def _table(rows: Mapping[int, Sequence[np.ndarray]]) -> dict[str, Any]:
    flat = [ids for row in rows.values() for ids in row]
    return {
        "indices": list(rows),
        "counts": [len(row) for row in rows.values()],
        "lengths": pack_array(np.asarray([len(ids) for ids in flat], np.int32)),
        "tokens": pack_array(np.concatenate([np.zeros((0,), np.int32), *flat])),
    }
