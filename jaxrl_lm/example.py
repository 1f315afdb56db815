"""What a row becomes: `Example`s, its sides. And how many rows become them, under the rule for long ones.

What an example's tokens and marks are is decided in `sequences.py` and `reward_sequences.py`, which is next to read.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrl_lm.data import Row
from jaxrl_lm.distributed import join_lists, split_lists, spread_rows

LongRows = Literal["drop", "keep_start", "error"]


class Example(NamedTuple):
    """Tokens, and which of them the loss reads."""

    ids: list[int]
    mask: list[bool]
    segments: list[int] | None = None  # 1, 2, … of packed examples; None: one
    labels: list[float] | None = None  # read where the mask is; None: the loss has none


class Examples(NamedTuple):
    """The rows that were kept, in order. Rows that went in = kept + dropped + no_response."""

    rows: list[Row]
    sides: list[tuple[Example, ...]]
    dropped: int  # longer than max_length, left out
    cut: int  # longer than max_length, kept without their end
    no_response: int = 0  # left out, since on some side the mask would have nothing within max_length
    identical: int = 0  # kept, and both sides have the same tokens


class _Read(NamedTuple):
    """A row after `encode`."""

    long: bool  # some side had more than max_length tokens
    sides: tuple[Example, ...]  # without what is beyond; none where the row is dropped


def collect(
    rows: Sequence[Row],
    encode: Callable[[Row, str], tuple[Example, ...]],
    *,
    max_length: int,
    long_rows: LongRows,
    last_only: bool = False,
    name: str,
) -> Examples:
    """The encoded rows under the rule for long ones. With `last_only` the mark of a response is that of its last token.

    All processes call it together, with the same rows: each encodes its share of them. No side is packed already.
    """
    if max_length < 1:
        raise ValueError(f"max_length={max_length}: must be at least 1")
    if long_rows not in ("drop", "keep_start", "error"):
        raise ValueError(f"long_rows={long_rows!r} is unknown: use drop, keep_start or error")

    def read(own: range) -> list[_Read]:
        where = lambda index: f"{name}: row {index}"
        return [_within(encode(rows[index], where(index)), max_length, long_rows, where(index)) for index in own]

    found = spread_rows(rows, read, to_arrays=_to_arrays, from_arrays=_from_arrays, name=name)
    kept, kept_sides, dropped, cut, no_response = [], [], 0, 0, 0
    for row, (long, sides) in zip(rows, found, strict=True):
        if not sides:
            dropped += 1
            continue
        if not all(any(side.mask) for side in sides):
            no_response += 1
            continue
        cut += long
        kept.append(row)
        kept_sides.append(tuple(_last_only(side) for side in sides) if last_only else sides)
    if not kept:
        raise ValueError(
            f"{name}: no row is left of {len(rows)}: {dropped} have more than max_length={max_length} tokens, and "
            f"{no_response} have no response within them; raise max_length"
        )
    identical = sum(len(sides) == 2 and sides[0].ids == sides[1].ids for sides in kept_sides)
    if identical == len(kept):
        raise ValueError(
            f"{name}: chosen and rejected have the same tokens in all {identical} rows, so that there is nothing to "
            f"learn; look at the columns, or raise max_length={max_length} if it cuts off what differs"
        )
    return Examples(kept, kept_sides, dropped, cut, no_response, identical)


def _within(sides: tuple[Example, ...], max_length: int, long_rows: LongRows, where: str) -> _Read:
    longest = max(len(side.ids) for side in sides)
    if longest > max_length and long_rows == "error":
        raise ValueError(
            f"{where} has {longest} tokens, more than max_length={max_length}; raise it, or set long_rows to drop or "
            "keep_start"
        )
    if longest > max_length and long_rows == "drop":
        return _Read(True, ())
    return _Read(longest > max_length, tuple(_cut(side, max_length) for side in sides))


def _cut(example: Example, length: int) -> Example:
    labels = None if example.labels is None else example.labels[:length]
    return example._replace(ids=example.ids[:length], mask=example.mask[:length], labels=labels)


def _last_only(example: Example) -> Example:
    length, labels = len(example.ids), example.labels
    mask = [index == length - 1 for index in range(length)]
    return example._replace(mask=mask, labels=None if labels is None else [*[0.0] * (length - 1), labels[-1]])


def _to_arrays(found: list[_Read]) -> dict[str, np.ndarray]:
    sides = [side for one in found for side in one.sides]
    return {
        "long": np.array([one.long for one in found], bool),
        "sides": np.array([len(one.sides) for one in found], np.int32),
        "labelled": np.array([side.labels is not None for side in sides], bool),
        **join_lists("ids", [side.ids for side in sides], np.int32),
        **join_lists("mask", [side.mask for side in sides], bool),
        **join_lists("labels", [side.labels or () for side in sides], np.float64),
    }


def _from_arrays(arrays: Mapping[str, Any]) -> list[_Read]:
    ids, mask, labels = (split_lists(name, arrays) for name in ("ids", "mask", "labels"))
    labelled = arrays["labelled"].tolist()
    sides = iter([
        Example(*one, labels=numbers if has else None)
        for *one, numbers, has in zip(ids, mask, labels, labelled, strict=True)
    ])  # fmt: skip
    counts = zip(arrays["long"].tolist(), arrays["sides"].tolist(), strict=True)
    return [_Read(long, tuple(islice(sides, count))) for long, count in counts]
