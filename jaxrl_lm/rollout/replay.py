"""Groups of earlier steps that are trained on once more, kept on the host and in the checkpoint.

A replayed group brings the log-probs and the `policy_step` of the weights that sampled it, so that the algorithm's
importance ratio is against those. Next to read: `select.join`, which puts groups into a batch.
"""

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Shaped

from jaxrl_lm.distributed import gather
from jaxrl_lm.rollout.sampler import Sampled
from jaxrl_lm.rollout.select import join
from jaxrl_lm.types import Rollout


class Group(NamedTuple):
    """The completions of one prompt, all arrays on the host."""

    sampled: Sampled  # G rows, all real
    rewards: np.ndarray  # [G F], as the reward functions gave them; NaN = abstained
    index: int  # of the prompt in the dataset
    solve_rate: float
    policy_step: int  # the oldest weights that sampled a token of it


class Replay:
    """A buffer of at most `size` groups that are not older than `max_age` optimiser steps.

    Source: rollout replay, Sun et al. (2025), "Improving Data Efficiency for LLM Reinforcement Fine-tuning Through
    Difficulty-targeted Online Data Selection and Rollout Replay": a first-in-first-out buffer of recent rollouts.
    Departs: only groups with right and wrong completions are kept, and one that is taken leaves the buffer.

    Raises ValueError for a size or an age below 1.
    """

    def __init__(self, size: int, max_age: int):
        if size < 1 or max_age < 1:
            raise ValueError(f"replay: size={size}, max_age={max_age}: both must be at least 1")
        self._size, self._max_age = size, max_age
        self._groups: list[Group] = []  # in the order they were put in

    def __len__(self) -> int:
        return len(self._groups)

    def put(
        self,
        sampled: Sampled,
        rewards: Shaped[np.ndarray, "N F"],
        right: Bool[np.ndarray, " N"],
        valid: Bool[np.ndarray, " N"],
        *,
        indices: Sequence[int],
        group_size: int,
    ) -> int:
        """Takes in the groups in which some valid row is right and some is wrong; their number.

        N are the real rows, `indices` the dataset index of each group's prompt. A full buffer loses its first groups.
        Raises ValueError where the numbers of rows do not match.
        """
        counts = {len(rewards), len(right), len(valid), len(indices) * group_size}
        if counts != {sampled.count}:
            raise ValueError(
                f"replay: {sampled.count} rows, but {len(rewards)} rewards, {len(right)} and {len(valid)} verdicts, and "
                f"{len(indices)} groups of {group_size}"
            )
        before = len(self._groups)
        rollout, temperature = gather((sampled.rollout, sampled.temperature))  # once for all groups
        sampled = sampled._replace(rollout=rollout, temperature=temperature)
        for place, index in enumerate(indices):
            rows = np.arange(place * group_size, (place + 1) * group_size)
            judged = right[rows][valid[rows]]
            if judged.all() or not judged.any():
                continue
            one = join([(sampled, rows.tolist())], rows=group_size, pad_token_id=0)  # nothing is padded
            oldest = one.rollout.policy_step[one.rollout.action_mask].min()
            rate = float(judged.mean())
            self._groups.append(Group(one, np.array(rewards[rows], np.float64), int(index), rate, int(oldest)))
        added = len(self._groups) - before
        self._groups = self._groups[-self._size :]
        return added

    def take(self, k: int, *, policy_step: int, order: Literal["oldest", "half"] = "oldest") -> list[Group]:
        """Up to `k` groups, which leave the buffer; those sampled before `policy_step` − max_age are dropped first.

        "oldest": in the order they were put in; "half": those with the solve rate nearest ½ first, the oldest among
        equals. For `join`: [(group.sampled, range(G)) for group in groups]. Raises ValueError for a negative k or an
        unknown order.
        """
        if k < 0:
            raise ValueError(f"replay: k={k}: may not be negative")
        if order not in ("oldest", "half"):
            raise ValueError(f"replay: order={order!r} is unknown: use oldest or half")
        self._groups = [group for group in self._groups if policy_step - group.policy_step <= self._max_age]
        places = list(range(len(self._groups)))
        if order == "half":
            places.sort(key=lambda i: (abs(self._groups[i].solve_rate - 0.5), i))
        taken = [self._groups[i] for i in places[:k]]
        self._groups = [self._groups[i] for i in sorted(places[k:])]
        return taken

    def state(self) -> dict[str, Any]:
        """A JSON table of all groups, bit for bit; dataset rows are named by their index."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """What makes the table of the groups that are there now; nothing is packed before it is called."""
        groups = list(self._groups)  # which are never written to
        return lambda: {"groups": [_to_json(group) for group in groups]}

    def load(self, state: Mapping[str, Any], *, rows: Sequence[dict[str, Any]]) -> None:
        """Replaces the buffer by a saved one, or the last of it where `size` is smaller now; `rows` is the dataset.

        Raises ValueError where a group's prompt is not in the dataset.
        """
        self._groups = [_from_json(saved, rows) for saved in state["groups"]][-self._size :]


def _to_json(group: Group) -> dict[str, Any]:
    sampled = group.sampled
    arrays = {
        **{name: array for name, array in sampled.rollout._asdict().items() if array is not None},
        "temperature": sampled.temperature,
        "logprob_sums": sampled.logprob_sums,
        "rewards": group.rewards,
    }
    return {
        "index": group.index,
        "solve_rate": group.solve_rate,
        "policy_step": group.policy_step,
        "texts": list(sampled.texts),
        "arrays": {name: pack_array(array) for name, array in arrays.items()},
        "lengths": list(map(len, sampled.completion_ids)),
    }


def _from_json(saved: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> Group:
    index = saved["index"]
    if not 0 <= index < len(rows):
        raise ValueError(f"replay: the saved prompt {index} is not among the {len(rows)} of the dataset: restore it")
    arrays = {name: unpack_array(packed) for name, packed in saved["arrays"].items()}
    rollout = Rollout(*(arrays.get(name) for name in Rollout._fields))
    count, lengths = len(rollout.tokens), saved.get("lengths", rollout.action_mask.sum(1))
    sampled = Sampled(
        rollout=rollout,
        temperature=arrays["temperature"],
        count=count,
        rows=[rows[index]] * count,
        prompts=[rows[index]["prompt"]] * count,
        texts=list(saved["texts"]),
        completion_ids=last_tokens(rollout, lengths),
        logprob_sums=arrays["logprob_sums"],
        truncated=rollout.truncated,
    )
    return Group(sampled, arrays["rewards"], index, saved["solve_rate"], saved["policy_step"])


def last_tokens(rollout: Rollout, lengths: Sequence[int]) -> list[list[int]]:
    """So many last tokens of each row: of its completion, with those that the policy did not choose."""
    rows = zip(rollout.tokens, rollout.segment_ids > 0, lengths, strict=True)
    return [tokens[real][real.sum() - length :].tolist() for tokens, real, length in rows]


def pack_array(array: np.ndarray) -> dict[str, Any]:
    """An array as JSON with its very bits; padding compresses to nothing."""
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes())).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def unpack_array(packed: Mapping[str, Any]) -> np.ndarray:
    flat = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), packed["dtype"])
    return flat.reshape(packed["shape"])
