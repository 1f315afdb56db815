"""What a compiled program does, read from its text: loops and how often they run, collectives, memory traffic, buffers.

Pure functions of the text that `compiled.as_text()` gives. `cost_analysis()` counts the body of a loop once; here every
instruction counts as often as it runs. Next to read: `plan_report.py`.
"""

import math
import re
from collections import Counter
from typing import NamedTuple

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

# Instructions that move nothing: names for parts of other buffers, or the second half of a pair.
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "call", "iota"}
_FREE |= {"after-all", "partition-id", "replica-id", "opt-barrier", "async-start", "async-update", "rng-bit-generator"}

# In a fusion: what passes through, such as the buffers of a collective that goes on meanwhile.
_PASSED = {"parameter", "tuple", "get-tuple-element", *COLLECTIVES}

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")


class Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes; of a constant its value, of a parameter its number, before them
    root: bool

    @property
    def called(self) -> list[str]:
        """Computations that it runs."""
        found = []
        for one, several in _CALLED.findall(self.rest):
            found += [one] if one else [name.strip().lstrip("%") for name in several.split(",")]
        return found

    @property
    def op_name(self) -> str:
        """The JAX operation that it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


class Module(NamedTuple):
    computations: dict[str, dict[str, Instruction]]
    entry: str


class Collective(NamedTuple):
    """One communication of a program, summed over its runs."""

    kind: str
    bytes: float  # of the whole array, on one device: gathered, reduced, or before it is scattered
    devices: int  # that take part in one group
    runs: float
    op_name: str


class Buffer(NamedTuple):
    shape: str
    bytes: float  # of one
    count: int  # instructions of this shape and origin
    op_name: str


def parse(text: str) -> Module:
    """The computations of a compiled program, by name. Raises ValueError for a text without an entry computation."""
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            found = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            current = computations[found[2]] = {}
            entry = found[2] if found[1] else entry
        elif line.startswith(" ") and current is not None and " = " in line:
            one = _instruction(line)
            current[one.name] = one
    if entry is None:
        raise ValueError("this is no text of a compiled program: it has no ENTRY computation")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    name, _, value = line.strip().partition(" = ")
    end = _closing(value, 0) + 1 if value.startswith("(") else value.index(" ")
    shape, value = value[:end], value[end:].lstrip()
    opening = value.index("(")
    closing = _closing(value, opening)
    inside, rest = value[opening + 1 : closing], value[closing + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    root = name.startswith("ROOT ")
    name = name.removeprefix("ROOT ").lstrip("%")
    return Instruction(name, shape, value[:opening], operands, rest if operands else inside + rest, root)


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis at `opening` is closed."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def arrays(shape: str, *, fast: bool = True) -> list[float]:
    """Bytes of each array of a shape, without padding. `fast=False`: only those in main memory (space 0)."""
    found = []
    for dtype, sizes, layout in _ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        if dtype in BYTES and (fast or space is None or space[1] == "0"):
            found.append(float(BYTES[dtype]) * math.prod(int(size) for size in sizes.split(",") if size))
    return found


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often a while loop runs, or at most runs; None where the program does not say.

    Read from known_trip_count, or as the bound that the condition compares a counter from 0 with.
    """
    known = re.search(r'known_trip_count[^\d]*"?(\d+)', loop.rest)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]
    inside = list(module.computations[condition].values())
    for one in list(inside):
        inside += [x for name in one.called for x in module.computations[name].values()]
    counts_up = any(one.opcode == "compare" and "direction=LT" in one.rest for one in inside)
    bounds = [int(found[1]) for one in inside if one.opcode == "constant" and (found := re.match(r"(\d+)", one.rest))]
    return max(bounds, default=0) or None if counts_up else None


def runs(module: Module) -> tuple[dict[str, float], list[str]]:
    """How often each computation runs, and the loops that do not say how often: their bodies count once."""
    counts, unknown = Counter({module.entry: 1.0}), []
    for name in reversed(_callees_first(module)):
        for one in module.computations[name].values():
            times = 1
            if one.opcode == "while":
                times = trip_count(module, one)
                if times is None:
                    unknown.append(one.op_name or one.name)
            for called in one.called:
                counts[called] += counts[name] * (times or 1)
    return dict(counts), unknown


def _callees_first(module: Module) -> list[str]:
    """The computations that are reached from the entry, each after those that it calls."""
    done: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in done:
            for one in module.computations[name].values():
                for called in one.called:
                    visit(called)
            done[name] = None

    visit(module.entry)
    return list(done)


def collectives(module: Module) -> list[Collective]:
    """Every communication of the program with its runs, the largest total first."""
    counts, _ = runs(module)
    owners = _owners(module)
    found: dict[tuple, Collective] = {}
    for name in counts:
        for one in module.computations[name].values():
            kind = one.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            if "all-reduce-scatter" in name:  # the TPU compiler's form of a reduce-scatter
                kind = "reduce-scatter"
            # The TPU compiler writes an asynchronous collective into every fusion and inner loop that it overlaps with:
            # one channel is one collective, that runs as often as the loop body where it starts.
            channel = re.search(r"channel_id=(\d+)", one.rest)
            key = (kind, channel[1]) if channel else (kind, name, one.name)
            devices = _group_size(one.rest)
            whole = max((size for size in arrays(one.shape)), default=0.0)
            if one.opcode == kind:  # a synchronous one may take several arrays
                whole = math.fsum(arrays(one.shape))
            if one.opcode == "reduce-scatter":
                whole *= devices
            one = Collective(kind, whole, devices, counts[owners[name]], one.op_name)
            found[key] = min(found.get(key, one), one, key=lambda one: one.runs)
    return sorted(found.values(), key=lambda one: -one.bytes * one.runs)


def _owners(module: Module) -> dict[str, str]:
    """The loop body or entry that each computation is a part of."""
    parents = {}
    for name, inside in module.computations.items():
        for one in inside.values():
            for called in one.called:
                parents[called] = called if one.opcode in ("while", "conditional", "call") else name
    owners = {}
    for name in module.computations:
        at = name
        while at in parents and parents[at] != at:
            at = parents[at]
        owners[name] = at
    return owners


def _group_size(rest: str) -> int:
    """Devices in a group of a collective, in each of the ways that groups are written."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{('[^}]*)\}", rest):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])  # an axis, or :(inner)size for a part of it
        return math.prod(int(part) if part else sizes[axis] for axis, part in used)
    return 2 if "source_target_pairs" in rest else 1


def memory_traffic(module: Module) -> float:
    """Bytes that move between main memory and the chip: what each instruction reads and writes, times its runs.

    A fusion that reads a slice of its operand reads the slice; one that updates a slice in place writes the slice.
    """
    counts, _ = runs(module)
    fused = {
        called
        for inside in module.computations.values()
        for one in inside.values()
        if one.opcode not in ("while", "conditional", "call")
        for called in one.called
    }
    return math.fsum(
        count * math.fsum(_moved(module, name, one) for one in module.computations[name].values())
        for name, count in counts.items()
        if name not in fused
    )


def _moved(module: Module, name: str, one: Instruction) -> float:
    """Bytes of one run of an instruction that stands in a loop body or in the entry."""
    if one.opcode in _FREE or one.opcode.endswith("-done"):
        return 0.0
    inside = module.computations[name]
    if one.opcode == "slice-start":  # its shape holds the whole operand beside the slice
        return sorted(arrays(one.shape))[-2]
    if one.opcode.endswith("-start"):  # its shape holds the operand and the result
        return math.fsum(arrays(one.shape, fast=False))
    if one.opcode == "custom-call" and (
        said := re.search(r'"bytes_accessed":"(\d+)"', one.rest)
    ):  # a kernel's own estimate
        return float(said[1])
    in_memory = lambda operand: math.fsum(arrays(inside[operand].shape, fast=False)) > 0
    if one.opcode == "fusion":
        fusion = one.called[0]
        read = math.fsum(_read(module, fusion, n) for n, operand in enumerate(one.operands) if in_memory(operand))
        return read + min(math.fsum(arrays(one.shape, fast=False)), _written(module, fusion))
    if one.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * math.fsum(arrays(one.shape, fast=False))
    if one.opcode in ("dynamic-update-slice", "scatter"):
        update = one.operands[1 if one.opcode == "dynamic-update-slice" else 2]
        return 2 * math.fsum(arrays(inside[update].shape))
    read = math.fsum(math.fsum(arrays(inside[operand].shape, fast=False)) for operand in one.operands)
    return read + math.fsum(arrays(one.shape, fast=False))


def _read(module: Module, computation: str, number: int) -> float:
    """Bytes that a fused computation reads of its operand of this number."""
    inside = module.computations[computation]
    parameter = next(x for x in inside.values() if x.opcode == "parameter" and re.match(rf"{number}\b", x.rest))
    whole, total = math.fsum(arrays(parameter.shape)), 0.0
    updated = {parameter.name: False}  # names of the operand, and whether it has been updated in place under this one
    for one in inside.values():  # in order: an alias stands before its uses
        uses = [place for place, operand in enumerate(one.operands) if operand in updated]
        if not uses:
            continue
        changed = updated[one.operands[uses[0]]]
        if one.opcode == "bitcast" or (one.opcode == "fusion" and _retiles(module, one)):
            updated[one.name] = changed
            if one.root and not changed:  # handed to the surrounding fusion, which works on it
                return whole
        elif one.opcode == "dynamic-update-slice" and uses == [0]:
            updated[one.name] = True
        elif one.opcode in ("dynamic-slice", "slice", "gather") and uses == [0]:
            total += math.fsum(arrays(one.shape))
        elif one.opcode == "fusion":
            total += math.fsum(_read(module, one.called[0], place) for place in uses)
        elif one.opcode not in _PASSED:
            return whole
    return min(total, whole)


def _retiles(module: Module, one: Instruction) -> bool:
    """Whether a fusion in another copies its operand onto itself: nothing moves, and it is read by tiles of another size.

    The TPU compiler writes so of int8, which lies in tiles of 32 × 128 and is multiplied in tiles of 8 × 128.
    """
    work = {x.opcode for x in module.computations[one.called[0]].values()}
    return "output_to_operand_aliasing={{}: (0, {})}" in one.rest and work <= {"parameter", "bitcast", "copy"}


def _written(module: Module, computation: str) -> float:
    """Bytes that a fused computation writes: of an array that is updated in place only the update."""
    inside = module.computations[computation]

    def of(one: Instruction) -> float:
        if one.opcode == "tuple":
            return math.fsum(of(inside[operand]) for operand in one.operands)
        if one.opcode in ("bitcast", "copy") and one.operands[0] in inside:
            return of(inside[one.operands[0]])
        if one.opcode == "dynamic-update-slice":
            return math.fsum(arrays(inside[one.operands[1]].shape))
        if one.opcode == "fusion":
            return min(math.fsum(arrays(one.shape, fast=False)), _written(module, one.called[0]))
        return 0.0 if one.opcode in _PASSED else math.fsum(arrays(one.shape, fast=False))

    return of(next(one for one in inside.values() if one.root))


def largest_buffers(module: Module, *, count: int = 8) -> list[Buffer]:
    """The largest arrays in main memory that the program makes, those of one shape and origin together.

    Not all of them live at once: what the program needs at a time is the compiler's to say.
    """
    fused = {
        called
        for inside in module.computations.values()
        for one in inside.values()
        if one.opcode not in ("while", "conditional", "call")
        for called in one.called
    }
    found = Counter()
    for name, inside in module.computations.items():
        if name not in fused:
            found.update(
                (plain, one.op_name)
                for one in inside.values()
                if one.opcode not in _FREE and not one.opcode.endswith("-start")
                for plain in _main_memory(one.shape)
            )
    buffers = [Buffer(shape, math.fsum(arrays(shape)), times, origin) for (shape, origin), times in found.items()]
    return sorted(buffers, key=lambda one: -one.bytes)[:count]


def _main_memory(shape: str) -> list[str]:
    """The arrays of a shape that stand in main memory, written without their layout."""
    return [
        f"{found[1]}[{found[2]}]"
        for found in _ARRAY.finditer(shape)
        if arrays(found[0], fast=False) and found[1] in BYTES
    ]
