"""Several examples in one row, so that fewer columns are padding. They do not see each other: attention and positions go
by segment ids. `sequences.py` makes the examples and the arrays.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from jaxrl_lm.example import Example


def pack(examples: Sequence[Example], *, max_length: int) -> list[Example]:
    """Rows of at most `max_length` tokens that hold every example once, as segments 1, 2, … of one row.

    Best fit decreasing: from the longest example to the shortest, each goes into the row with the least free space that
    holds it, or into a new one; ties go to the earlier example and the earlier row. As TRL's packing_strategy="bfd". At
    most 11/9 of the least number of rows, plus 4. O(n log n): a sort, and for each example a bisection over the free
    spaces that occur (at most `max_length`) and a heap of the rows that have it.

    Source: Worst-case performance bounds for simple one-dimensional packing algorithms (Johnson et al., 1974).

    A token at the beginning of a segment has no log-prob, as at the beginning of a row, so its mask must not be set.

    Raises ValueError with the example (0-based) that is longer than `max_length`, empty, packed already, or marks its
    first token.
    """
    for index, example in enumerate(examples):
        _check(example, index, max_length)
    rows = best_fit([len(example.ids) for example in examples], max_length)
    return [_join([examples[index] for index in row]) for row in rows]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The indices of the lengths, each at most `capacity`, in rows whose sum is at most that; the way is that of `pack`."""
    rows: list[list[int]] = []
    buckets: dict[int, list[int]] = {}  # free space -> rows that have it, a heap
    spaces: list[int] = []  # the keys, in order
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):  # stable
        length = lengths[index]
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row, space = len(rows), capacity
            rows.append([])
        else:
            space = spaces[at]
            row = heapq.heappop(buckets[space])
            if not buckets[space]:
                del buckets[space], spaces[at]
        rows[row].append(index)
        if space > length:
            if space - length not in buckets:
                buckets[space - length] = []
                insort(spaces, space - length)
            heapq.heappush(buckets[space - length], row)
    return rows


def packing_share(packed: Sequence[Example], max_length: int) -> float:
    """The share of the rows' tokens that is filled. Raises ValueError without rows."""
    if not packed:
        raise ValueError("packing_share: there are no rows")
    return sum(len(example.ids) for example in packed) / (len(packed) * max_length)


def _check(example: Example, index: int, max_length: int) -> None:
    if not 0 < len(example.ids) <= max_length:
        raise ValueError(f"example {index} has {len(example.ids)} tokens: 1 to max_length={max_length} can be packed")
    if example.segments is not None:
        raise ValueError(f"example {index} is packed already")
    if example.mask[0]:
        raise ValueError(f"example {index} marks its first token, which nothing predicts")


def _join(examples: Sequence[Example]) -> Example:
    labelled = any(example.labels is not None for example in examples)
    labels = [label for example in examples for label in example.labels or [0.0] * len(example.ids)]
    return Example(
        [token for example in examples for token in example.ids],
        [mark for example in examples for mark in example.mask],
        [number for number, example in enumerate(examples, start=1) for _ in example.ids],
        labels if labelled else None,
    )
