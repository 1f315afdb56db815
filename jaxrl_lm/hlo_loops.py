"""What stands inside the loops of a compiled program: which loop is in which, copies of large arrays, and
one iteration as a program of its own, for the collectives and the memory traffic of `hlo.py`.

Pure functions of a parsed text, as those.
"""

import re
from typing import NamedTuple

from jaxrl_lm import hlo
from jaxrl_lm.hlo import Instruction, Module


class Loop(NamedTuple):
    """A while loop."""

    name: str
    body: str  # its computation
    trips: int | None  # how often it runs, or at most; None where the program does not say
    op_name: str  # the JAX operation that it comes from
    outer: str | None  # the loop around it, by its name


class Copy(NamedTuple):
    """An instruction that makes a copy of a large array and computes nothing."""

    kind: str  # copy or transpose: within one memory, or in another layout; fetch, evict: to and from the chip's memory
    shape: str
    bytes: float
    runs: float  # an iteration; inner loops as often as they run
    op_name: str


def loops(module: Module) -> list[Loop]:
    """The program's loops, outer ones before those within them."""
    found: list[Loop] = []

    def visit(computation: str, outer: str | None, seen: tuple[str, ...]) -> None:
        for one in module.computations[computation].values():
            inside = outer
            if one.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", one.rest)[1]
                found.append(Loop(one.name, body, hlo.trip_count(module, one), one.op_name, outer))
                inside = one.name
            for called in one.called:
                if called not in seen:
                    visit(called, inside, (*seen, called))

    visit(module.entry, None, (module.entry,))
    return found


def iteration(module: Module, loop: Loop) -> Module:
    """The program of one iteration: `hlo.collectives`, `hlo.memory_traffic` and so on of it count an iteration's."""
    return module._replace(entry=loop.body)


def main_loop(module: Module) -> Loop:
    """The loop with the most iterations of those in no other. Raises ValueError for a program without a loop."""
    outer = [loop for loop in loops(module) if loop.outer is None]
    if not outer:
        raise ValueError("this program has no loop")
    return max(outer, key=lambda loop: loop.trips or 0)


def copies(module: Module, *, least: float) -> list[Copy]:
    """Copies of arrays of at least so many bytes in a program, the largest total first.

    Of a loop give its `iteration`. An instruction counts that copies or transposes, alone or as all that a fusion does.
    """
    counts, _ = hlo.runs(module)
    found = []
    for name, count in counts.items():
        for one in module.computations[name].values():
            kind = _copies(module, one)
            size = max(hlo.arrays(one.shape), default=0.0)
            if kind and size >= least and not _fused(module, name):
                found.append(Copy(kind, one.shape, size, count, one.op_name))
    return sorted(found, key=lambda one: -one.bytes * one.runs)


def _copies(module: Module, one: Instruction) -> str | None:
    """The kind of copy that an instruction is."""
    if one.opcode == "copy-start":
        result, source = _ARRAY.findall(one.shape)[:2]
        if _plain(result[1]) != _plain(source[1]):
            return "copy"
        moved = ("S(1)" in result[1]) - ("S(1)" in source[1])
        return {1: "fetch", -1: "evict", 0: "copy"}[moved]
    if one.opcode in ("copy", "transpose"):
        return one.opcode
    if one.opcode == "fusion":
        inside = module.computations[one.called[0]].values()
        work = {x.opcode for x in inside} - {"parameter", "bitcast", "tuple", "get-tuple-element", "constant"}
        if work and work <= {"copy", "transpose"}:
            return "transpose" if "transpose" in work else "copy"
    return None


_ARRAY = re.compile(r"(\w+\[[\d,]*\])(\{[^}]*\})?")


def _plain(layout: str) -> str:
    """A layout without the memory that it is in."""
    return re.sub(r"S\(\d+\)", "", layout)


def _fused(module: Module, name: str) -> bool:
    """Whether a computation is a part of a fusion, or what another instruction applies, and no body of its own."""
    callers = (one.opcode for inside in module.computations.values() for one in inside.values() if name in one.called)
    return name != module.entry and not any(
        opcode in ("while", "conditional", "call", "async-start") for opcode in callers
    )
