"""Batches from rows that are given: which rows a step has, their padded arrays, and evaluation over held-out rows.

Rows come as `sequences.Examples`; what an objective reads is made of the arrays by the `make` of a kind of run (`sft.py`,
`dpo.py`, `reward_fit.py`). The loop is `fit.py`.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32

from jaxrl_lm import metrics as metric
from jaxrl_lm.clock import Clock
from jaxrl_lm.data import batch_indices
from jaxrl_lm.example import Example, Examples
from jaxrl_lm.fit_steps import FitSteps
from jaxrl_lm.sequences import align, layout
from jaxrl_lm.types import Frozen, TrainState


class HostRows(NamedTuple):
    """Rows as arrays on the host; S sides a row. Rows that only fill the batch stand at the end and are not valid."""

    tokens: Int32[np.ndarray, "N S T"]
    segment_ids: Int32[np.ndarray, "N S T"]
    mask: Bool[np.ndarray, "N S T"]
    labels: Float32[np.ndarray, "N S T"]
    valid: Bool[np.ndarray, " N"]
    indices: list[int]  # of the real rows, in their dataset

    def numbers(self, values: Sequence[float]) -> Float32[np.ndarray, " N"]:
        """A number of each real row as one of each row, 0 for those that fill the batch."""
        return np.asarray([*values, *[0.0] * (len(self.valid) - len(values))], np.float32)


@dataclasses.dataclass(frozen=True)
class Table:
    """A dataset's rows and the shapes that they are padded to."""

    data: Examples
    start: int  # no token before this column is read by the loss
    left: bool  # rows begin at column 0; else the first token that the loss reads stands at `start`
    buckets: tuple[int, ...]  # columns
    rows: int  # of a batch
    pad_id: int

    def batch(self, indices: Sequence[int]) -> HostRows:
        """The arrays of these rows, in the smallest bucket that holds them."""
        return pad_sides([self.data.sides[index] for index in indices], list(indices), self)

    def held_out(self, limit: int) -> Iterator[HostRows]:
        """The first `limit` rows in their order."""
        count = min(limit, len(self.data.sides))
        for first in range(0, count, self.rows):
            yield self.batch(range(first, min(first + self.rows, count)))


def pad_sides(sides: Sequence[tuple[Example, ...]], indices: list[int], table: Table) -> HostRows:
    """Rows as arrays of the table's shapes; the first row stands in for those that are missing."""
    filled = [*sides, *[sides[0]] * (table.rows - len(sides))]
    flat = [example for row in filled for example in row]
    before = lambda example: 0 if table.left else table.start - example.mask.index(True)
    needed = max(before(example) + len(example.ids) for example in flat)
    columns = min(bucket for bucket in table.buckets if bucket >= needed)
    arrays = align(flat, start=None if table.left else table.start, columns=columns, pad_id=table.pad_id)
    shaped = [x.reshape(len(filled), -1, columns) for x in arrays]
    return HostRows(*shaped, valid=np.arange(len(filled)) < len(sides), indices=indices)


def table_of(
    data: Examples,
    others: Sequence[Examples],
    *,
    rows: int,
    pad_id: int,
    buckets: tuple[int, ...],
    left: bool = False,
) -> Table:
    """The shapes that hold a dataset and those that are evaluated beside it.

    `left`: rows begin at column 0, for packed rows and for those of which only late tokens are read; else prompts end
    at one column, so that their scores need not be computed. Raises ValueError for length_buckets of which none holds
    the longest row.
    """
    sides = [side for one in (data, *others) for side in one.sides]
    if not left:
        start, columns = layout(sides)
    else:
        flat = [example for row in sides for example in row]
        start = max(1, min(example.mask.index(True) for example in flat))
        columns = -(-max(len(example.ids) for example in flat) // 8) * 8
    buckets = tuple(sorted(buckets)) or (columns,)
    if buckets[-1] < columns:
        raise ValueError(
            f"length_buckets={buckets}: the longest row takes {columns} columns; add a bucket that holds it"
        )
    return Table(data, start, left, buckets, rows, pad_id)


def fingerprint(data: Examples) -> str:
    """A hash of the encoded rows in order: a resumed run must see the same."""
    digest = hashlib.blake2b(digest_size=16)
    for side in data.sides:
        digest.update(repr(side).encode())
    for row in data.rows:  # what the loss reads beside the tokens
        digest.update(repr((row.get("label"), row.get("margin"))).encode())
    return digest.hexdigest()


@runtime_checkable
class Maker(Protocol):
    """Makes the batch that an objective reads, and follows what a run measures where its batches depend on it."""

    def __call__(self, host: HostRows, table: Table, state: TrainState, frozen: Frozen) -> Any:
        """The batch of these rows, on the devices."""

    def observe(self, found: Mapping[str, float]) -> None:
        """Sees the metrics of each step."""

    def state(self) -> dict[str, Any]:
        """A JSON table that `load` goes on from."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved table."""


class Stateless:
    """A maker whose batches depend on the rows and the state alone."""

    def observe(self, found: Mapping[str, float]) -> None:
        """Nothing follows the measurements."""

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


@dataclasses.dataclass
class Given:
    """The source of a run on given rows: row p of the order is a function of (seed, epoch, p)."""

    table: Table
    eval_tables: Mapping[str, Table]
    steps: FitSteps
    make: Maker
    seed: int
    eval_limit: int

    def take(self, step: int, state: TrainState, frozen: Frozen, clock: Clock) -> tuple[Any, dict[str, float]]:
        """The batch of a step, and what is to be logged of it."""
        size, count = len(self.table.data.sides), self.table.rows
        with clock("data"):
            host = self.table.batch(
                batch_indices(size, seed=self.seed, position=(step - 1) * count, count=count).tolist()
            )
        with clock("score"):
            batch = jax.block_until_ready(self.make(host, self.table, state, frozen))
        return batch, {"epoch": step * count / size, "tokens": float((host.segment_ids > 0).sum())}

    def observe(self, found: Mapping[str, float]) -> None:
        """Sees the metrics of each step."""
        self.make.observe(found)

    def evaluate(self, state: TrainState, frozen: Frozen) -> dict[str, float]:
        """eval/<set>/<metric> over the first rows of each set, by the means that training logs."""
        values: dict[str, float] = {}
        for name, table in self.eval_tables.items():
            merged = None
            for host in table.held_out(self.eval_limit):
                found = self.steps.measure(state.params, frozen, self.make(host, table, state, frozen))
                merged = found if merged is None else metric.merge(merged, found)
            values |= {f"eval/{name}/{key}": value for key, value in metric.result(merged).items()}
        return values

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the arrays; the step says which rows come next."""
        return self.make.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """See `state`."""
        self.make.load(state)
