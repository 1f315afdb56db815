"""Batches of preferences: pairs with the reference's log-probs, and judged single completions with a KL estimate.

A reference scores each batch as it comes, or every row once before the first step (`Reference.precompute`). What is made
here is read by the objectives of `fit_objectives.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_lm.distributed import gather
from jaxrl_lm.example import Example
from jaxrl_lm.fit_steps import FitSteps
from jaxrl_lm.given import HostRows, Stateless, Table, pad_sides
from jaxrl_lm.types import Frozen, PreferenceBatch, TrainState, UnpairedBatch

SHIFT_DECAY = 0.9  # of BCO's moving mean of rewards


class Reference:
    """Log-probs of a reference policy: the frozen one, the weights below an adapter, or one that moves."""

    def __init__(self, steps: FitSteps):
        self._steps = steps
        # By dataset: of each row and side, from the first token read.
        self._kept: dict[int, list[list[np.ndarray]]] = {}

    def __call__(self, host: HostRows, table: Table, state: TrainState | None, frozen: Frozen) -> Any:
        """[N S T]: computed now, or put back from those that were kept."""
        kept = self._kept.get(id(table.data))
        if kept is None:
            return self.score(host.tokens, host.segment_ids, table.start, state, frozen)
        out = np.zeros(host.tokens.shape, np.float32)
        for row, index in enumerate(host.indices):
            for side, values in enumerate(kept[index]):
                out[row, side, table.start : table.start + len(values)] = values
        return self._steps.place(out)

    def score(self, tokens, segment_ids, start: int, state: TrainState | None, frozen: Frozen) -> jax.Array:
        """Log-probs [N S T] of these tokens."""
        moving = None if state is None else state.extra.get("reference")
        params = next(tree for tree in (moving, frozen.reference, frozen.base) if tree is not None)
        return self._steps.score_base(params, *self._steps.place((tokens, segment_ids)), start)

    def precompute(self, tables: Sequence[Table], frozen: Frozen) -> None:
        """Scores every row of these datasets and keeps the log-probs on the host."""
        for table in tables:
            rows, length = [], lambda one: len(one.ids) - _first(one)
            for host in table.held_out(len(table.data.sides)):
                scores = gather(self.score(host.tokens, host.segment_ids, table.start, None, frozen))
                for row, index in enumerate(host.indices):
                    sides = enumerate(table.data.sides[index])
                    rows.append([scores[row, s, table.start :][: length(one)].copy() for s, one in sides])
            self._kept[id(table.data)] = rows


def _first(example: Example) -> int:
    """Index of the first token that the loss reads."""
    return example.mask.index(True)


class PairBatches:
    """Pairs for `PreferenceObjective`; with BCO's δ, a moving mean of the implicit rewards."""

    def __init__(self, steps: FitSteps, reference: Reference | None, *, shifts: bool):
        self._steps, self._reference, self._shift = steps, reference, 0.0 if shifts else None

    def __call__(self, host: HostRows, table: Table, state: TrainState, frozen: Frozen) -> PreferenceBatch:
        """The batch of these pairs."""
        return self.batch(host, table, state, frozen, old_logprobs=None)

    def batch(
        self, host: HostRows, table: Table, state: TrainState, frozen: Frozen, *, old_logprobs: np.ndarray | None
    ) -> PreferenceBatch:
        """The same with the log-probs [N 2 T] of the policy that sampled the pairs."""
        place = self._steps.place
        ref = None if self._reference is None else self._reference(host, table, state, frozen)
        shift = None if self._shift is None else place(np.float32(self._shift))
        arrays = place((host.tokens, host.segment_ids, host.mask, host.valid))
        return self._steps.batch(*arrays, ref, None if old_logprobs is None else place(old_logprobs), shift)

    def observe(self, found: Mapping[str, float]) -> None:
        """Moves δ by the rewards of a step."""
        if self._shift is not None:
            mean = (found["rewards/chosen"] + found["rewards/rejected"]) / 2
            if np.isfinite(mean):
                self._shift = SHIFT_DECAY * self._shift + (1.0 - SHIFT_DECAY) * mean

    def state(self) -> dict[str, Any]:
        """δ."""
        return {"shift": self._shift}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `state`."""
        self._shift = state["shift"]


class UnpairedBatches(Stateless):
    """Judged completions for `UnpairedObjective`, with the KL that KTO compares with."""

    def __init__(self, steps: FitSteps, reference: Reference):
        self._steps, self._reference = steps, reference

    def __call__(self, host: HostRows, table: Table, state: TrainState, frozen: Frozen) -> UnpairedBatch:
        """The batch of these rows. The KL is that of the policy now, over the whole batch, from other rows' completions.

        Source: KTO (Ethayarajh et al., 2024), section 4: each prompt with the completion of the next row.
        """
        steps, place = self._steps, self._steps.place
        labels = host.numbers([float(table.data.rows[index]["label"]) for index in host.indices]) > 0.5
        rows = [table.data.sides[index][0] for index in host.indices]
        if len(rows) == 1:  # the last of an evaluation: with the dataset's next row
            rows.append(table.data.sides[(host.indices[0] + 1) % len(table.data.sides)][0])
        others = mismatched(rows)[: len(host.indices)]
        other = pad_sides([(one,) for one in others], host.indices, table)
        shapes = place((other.tokens, other.segment_ids))
        policy = steps.score(state.params["policy"], frozen.base, *shapes, table.start)
        reference = self._reference.score(other.tokens, other.segment_ids, table.start, state, frozen)
        own = self._reference(host, table, state, frozen)
        flat = lambda x: x[:, 0]
        return steps.batch(
            *place((flat(host.tokens), flat(host.segment_ids), flat(host.mask), labels, host.valid)),
            flat(own),
            flat(policy),
            flat(reference),
            *place((flat(other.mask) & other.valid[:, None],)),
        )


def mismatched(rows: Sequence[Example]) -> list[Example]:
    """Each row's prompt with the completion of the row after it, the last one's with that of the first.

    The completion is the other row's as it was cut, so that a row may be longer than max_length by the difference of the
    two prompts.
    """
    out = []
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        prompt, completion = row.ids[: _first(row)], other.ids[_first(other) :]
        out.append(Example([*prompt, *completion], [False] * len(prompt) + other.mask[_first(other) :]))
    return out
