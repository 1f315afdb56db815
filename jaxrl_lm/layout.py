"""Rows of a rollout packed for scoring and updates: short rows side by side, and a group's prompt once.

`pack_rows` is the host's part: from the rows' segments to index arrays (`types.Layout`), a function of these alone. What
reads them: `score.py`. Algorithms see [N T] arrays as ever. A token sees its own segment up to itself and, of a group, the
prompt's: segments are numbered so that those that continue one follow it (`models/decoder.py`, `visible`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.packing import best_fit
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import CriticBatch, ImplicitBatch, Layout, PolicyBatch

BLOCK = 128  # columns of a block of attention


class Cut(NamedTuple):
    """Rows that go through the model as one batch: `size` of them from `first` on, in `parts` microbatches."""

    first: int
    size: int
    parts: int


class Piece(NamedTuple):
    """Tokens of one row that stand next to each other in a packed one."""

    row: int
    columns: np.ndarray
    segment: int  # counted from the unit's first
    until: int
    position: int  # of the first token


class Unit(NamedTuple):
    """What stays together: a row, or a group with its prompt once."""

    rows: tuple[int, ...]
    pieces: tuple[Piece, ...]
    length: int


def share_of(config: GRPOConfig) -> int:
    """Neighbouring rows that stay together: a group that shares its prompt, or one."""
    return config.num_generations if config.share_prompt else 1


def check_layout(config: GRPOConfig, plan: Plan) -> None:
    """Raises ValueError, naming the option, for what packed rows do not go with."""
    name = "share_prompt" if config.share_prompt else "pack_completions" if config.pack_completions else None
    if name is None:
        return
    if config.share_prompt and config.num_generations == 1:
        raise ValueError(
            "share_prompt with num_generations=1: each row has its prompt for itself; leave it out, or use pack_completions"
        )
    if plan.ways("columns") > 1:
        raise ValueError(
            f"{name} moves tokens between columns, which the mesh's axis sequence={plan.mesh.shape['sequence']} splits over "
            f"devices: take another axis (fsdp, tensor), or leave {name} out"
        )
    if config.reference_placement == "rollout_mesh":
        raise ValueError(
            f"{name} lays rows out for the devices of mesh: use reference_placement='mesh' or 'host', or leave {name} out"
        )
    if config.attention_implementation not in ("auto", "xla"):
        raise ValueError(
            f"{name} with attention_implementation={config.attention_implementation!r}: it does not know what packed rows "
            "see; take auto or xla"
        )
    completions = config.prompts_per_step * config.num_generations
    microbatch = config.microbatch_completions or config.minibatch_completions or completions
    each = config.num_generations * plan.batch_ways
    if config.share_prompt and microbatch % each:
        raise ValueError(
            f"share_prompt keeps a group in one microbatch and on one device: microbatch_completions={microbatch} must be "
            f"a multiple of num_generations × devices of the mesh's data and fsdp axes = {each}"
        )


def pack_rows(
    tokens: Int32[np.ndarray, "N T"],
    segment_ids: Int32[np.ndarray, "N T"],
    action_mask: Bool[np.ndarray, "N T"],
    *,
    start: int,
    cuts: Sequence[Cut],
    ways: int = 1,
    group: int = 1,
    pack: bool = True,
    block: int = BLOCK,
) -> list[Layout]:
    """A layout for each cut of the rows, all of one shape; its scored tokens are those of `action_mask` from `start` on.

    `group` neighbours share the prompt that stands before column `start`. `pack`: several groups, or rows, may share a
    packed row of at least T columns; False: each has its own. Rows stay on their device (of `ways`, which N is split over
    in order) and in their microbatch: the part that `in_parts` and `cut` give them.

    Few shapes compile: without `pack` the number of packed rows is that of the units and widths are rounded up to an eighth
    of an octave (`bucket`); with it the number of rows is, and widths, which it fills all the same, to a half. Attention is
    computed in blocks of `block` columns where that leaves out a quarter of it or more and adds few columns.

    Raises ValueError for a cut that devices, microbatches and groups do not divide, for rows of a group that differ in their
    prompt, and for a row of several segments.
    """
    for cut in cuts:
        if cut.size % (ways * cut.parts * group):
            raise ValueError(
                f"{cut.size} rows do not divide into {cut.parts} microbatches on {ways} devices with whole groups of "
                f"{group}"
            )
    units = _units(tokens, segment_ids, start, group)
    longest, total = max((unit.length for unit in units), default=1), tokens.shape[1]
    most = start + group * (total - start)  # columns of a unit
    width = max(total, bucket(longest, steps=2, most=most)) if pack else bucket(longest, most=most)
    cells = [[_cell(units, cut, device, part, ways, group) for device, part in _order(ways, cut.parts)] for cut in cuts]
    filled = [[_rows(cell, width, pack) for cell in one] for one in cells]
    count = most = max(len(cell) for one in cells for cell in one)
    if pack:
        count = bucket(max(len(rows) for one in filled for rows in one), most=most)
    size = _block_size(filled, width, group, block)
    width = -(-width // block) * block if size else width
    return [
        _layout(tokens, action_mask, start, cut, ways, group, (count, width, size, block), rows)
        for cut, rows in zip(cuts, filled, strict=True)
    ]


def with_layout(batch: Any, layout: Layout) -> Any:
    """The batch, whose policy rows are packed so."""
    if isinstance(batch, PolicyBatch):
        return batch._replace(layout=layout)
    if isinstance(batch, CriticBatch | ImplicitBatch):
        return batch._replace(policy=with_layout(batch.policy, layout))
    raise TypeError(f"{type(batch).__name__} has no rows that are packed")


def layout_metrics(layouts: Sequence[Layout]) -> dict[str, float]:
    """What one pass over the layouts' rows computes, beside what it would of padded rows."""
    columns = sum(layout.tokens.size for layout in layouts)
    filled = sum(int((layout.segment_ids > 0).sum()) for layout in layouts)
    return {
        "packing/columns": float(columns),
        "packing/padded_columns": float(sum(layout.places.size for layout in layouts)),
        "packing/filled_share": filled / columns,
    }


def bucket(size: int, *, most: int, steps: int = 8) -> int:
    """The next size, of which there are `steps` (a power of 2) between 2^k and 2^(k+1); at least 1, at most `most`."""
    step = max(1, (1 << size.bit_length() >> 1) // steps)
    return max(1, min(-(-size // step) * step, most))


def _order(ways: int, parts: int) -> list[tuple[int, int]]:
    """Device and microbatch of each cell, in their order along the first axis of a layout."""
    return [(device, part) for device in range(ways) for part in range(parts)]


def _units(tokens, segment_ids, start: int, group: int) -> list[Unit]:
    units = []
    for first in range(0, len(tokens), group):
        rows = tuple(range(first, first + group))
        real = [np.flatnonzero(segment_ids[row]) for row in rows]
        for row, columns in zip(rows, real, strict=True):
            if len(np.unique(segment_ids[row, columns])) > 1:
                raise ValueError(f"row {row} is packed already: it has several segments")
        pieces = [Piece(first, real[0], 0, 0, 0)] if group == 1 else _group_pieces(tokens, rows, real, start)
        kept = tuple(piece for piece in pieces if len(piece.columns))
        units.append(Unit(rows, kept, sum(len(piece.columns) for piece in kept)))
    return units


def _group_pieces(tokens, rows: tuple[int, ...], real: list[np.ndarray], start: int) -> list[Piece]:
    prompts = [columns[columns < start] for columns in real]
    for row, prompt in zip(rows, prompts, strict=True):
        if not np.array_equal(tokens[row, prompt], tokens[rows[0], prompts[0]]):
            raise ValueError(f"share_prompt: rows {rows[0]} and {row} are of one group and have different prompts")
    pieces = [Piece(rows[0], prompts[0], 0, len(rows), 0)]
    for number, (row, columns) in enumerate(zip(rows, real, strict=True), start=1):
        pieces.append(Piece(row, columns[columns >= start], number, number, len(prompts[0])))
    return pieces


def _cell(units: list[Unit], cut: Cut, device: int, part: int, ways: int, group: int) -> list[Unit]:
    """The units of a device and microbatch, in the order of their rows there."""
    own = cut.size // (ways * group)
    first = cut.first // group + device * own
    return units[first + part : first + own : cut.parts]


def _rows(cell: list[Unit], width: int, pack: bool) -> list[list[tuple[int, Unit]]]:
    """The units of each packed row of a cell, with their places in the cell; empty ones stand in none."""
    real = [(place, unit) for place, unit in enumerate(cell) if unit.length]
    if not pack:
        return [[one] for one in real]
    return [[real[index] for index in row] for row in best_fit([unit.length for _, unit in real], width)]


def _layout(tokens, action_mask, start: int, cut: Cut, ways: int, group: int, shape: tuple[int, ...], rows) -> Layout:
    """The arrays of a cut, from the units of each packed row of each of its cells: `count` rows of `width` columns a cell.

    Packed rows and cells are numbered so that `cut` of update.py and the devices take their own.
    """
    count, width, most, block = shape
    size, parts = cut.size // (ways * cut.parts), cut.parts  # rows of a cell
    read = np.zeros((4, ways, count, parts, width), np.int32)  # tokens, segments, positions, until
    scored = np.zeros((3, ways, parts, size * (tokens.shape[1] - start)), np.int32)  # targets, before, rows
    scored[1] = -1
    reads = np.full((ways, count, parts, width // block, most), -1, np.int32)
    places = np.full((ways, size, parts, tokens.shape[1]), -1, np.int32)
    for (device, part), cell in zip(_order(ways, parts), rows, strict=True):
        done = 0
        for piece, row, at, base, tail, own in _pieces(cell, group):
            columns, numbers = piece.columns, np.arange(len(piece.columns))
            found, shift = tokens[piece.row, columns], np.full(len(columns), base)
            facts = (found, shift + piece.segment, piece.position + numbers, shift + piece.until)
            read[:, device, row, part, at : at + len(columns)] = facts
            before = np.where(numbers > 0, at + numbers - 1, tail)
            chosen = np.flatnonzero(action_mask[piece.row, columns] & (columns >= start) & (before >= 0))
            slots = np.arange(done, done + len(chosen))
            scored[:, device, part, slots] = found[chosen], row * width + before[chosen], np.full(len(chosen), own)
            places[device, own, part, columns[chosen]] = slots
            done += len(chosen)
        for row, units in enumerate(cell if most else ()):
            for number, seen in enumerate(_seen_blocks(units, group, block)):
                reads[device, row, part, number, : len(seen)] = seen
    ids, segments, positions, until = (x.reshape(-1, width) for x in read)
    targets, before, of = (x.reshape(ways * parts, -1) for x in scored)
    places = places.reshape(cut.size, -1)
    reads = reads.reshape(-1, width // block, most) if most else None
    return Layout(ids, segments, positions, until if group > 1 else None, targets, before, of, places, reads)


def _block_size(filled: list, width: int, group: int, block: int) -> int:
    """Blocks of keys that a block of columns reads at most, as a `bucket`; 0 where that is hardly fewer than all, or where
    whole blocks make the row longer by more than an eighth: all products pay for these columns."""
    every = -(-width // block)
    if 8 * (every * block - width) > width:
        return 0
    rows = (row for cells in filled for cell in cells for row in cell)
    most = max((len(seen) for row in rows for seen in _seen_blocks(row, group, block)), default=1)
    most = bucket(most, steps=2, most=every)
    return most if 4 * most <= 3 * every else 0


def _seen_blocks(units: list[tuple[int, Unit]], group: int, block: int) -> list[list[int]]:
    """Of a packed row's blocks of columns, those that hold what the tokens of each see: of their own segments up to
    themselves, and of the prompts that these go on from."""
    length = sum(unit.length for _, unit in units)
    found: list[set[int]] = [set() for _ in range(-(-length // block))]
    for piece, _, at, _, tail, _ in _pieces([units], group):
        stop, first = at + len(piece.columns), at // block
        head = range((tail + 1 - piece.position) // block, tail // block + 1) if tail >= 0 else ()
        for number in range(first, -(-stop // block)):
            found[number].update(range(first, number + 1), head)
    return [sorted(blocks) for blocks in found]


def _pieces(cell: list[list[tuple[int, Unit]]], group: int) -> Iterator[tuple[Piece, int, int, int, int, int]]:
    """Each piece of a cell with its packed row, its first column, its unit's first segment, the column that its first token
    goes on from (−1: none), and its row's number in the cell."""
    for row, units in enumerate(cell):
        at, base = 0, 1
        for place, unit in units:
            tail = -1
            for piece in unit.pieces:
                yield piece, row, at, base, tail, place * group + piece.row - unit.rows[0]
                at += len(piece.columns)
                if piece.until > piece.segment:  # a prompt
                    tail = at - 1
            base += max(piece.until for piece in unit.pieces) + 1
