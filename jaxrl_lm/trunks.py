"""Prefixes that lie in caches: samples go on from any place of a row that was read or written, and nothing is read twice.

`Trunks` are states of the engine, each with the rows of one batch, that are made when a prefix of theirs is first asked
for and dropped after the last; `fork` (`slots.py`) takes prefixes out of them. Labels of steps fork solutions at the
ends of their steps, beams fork the rows that wrote them. The compiled parts: `decode_steps.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_lm.data import choose_bucket, left_pad
from jaxrl_lm.decode_steps import Forks
from jaxrl_lm.rollout import Sampler
from jaxrl_lm.slots import DecodeState, Prefixes
from jaxrl_lm.types import Requests, Rollout


class Place(NamedTuple):
    """Where a prefix lies: the first `count` tokens that a row of a trunk has beyond what it began with."""

    trunk: int
    row: int
    count: int


class Trunks:
    """States by number, `held` as long as prefixes of theirs are to come.

    `make` gives one, of weights and its number; without it they are those that `hold` was given.
    """

    def __init__(self, forks: Forks, make: Callable[[Any, int], DecodeState] | None = None):
        self._forks, self._make = forks, make
        self.held: dict[int, DecodeState] = {}
        self._places: Sequence[Place] = ()
        self._first: list[int] = []

    def hold(self, states: Sequence[DecodeState]) -> None:
        """These states from now on, and no others."""
        self.held = dict(enumerate(states))

    def expect(self, places: Sequence[Place]) -> None:
        """The prefixes that will be asked for, in this order, by their index."""
        self._places, self._first = places, [0] * len(places)
        for index in reversed(range(len(places))):
            later = self._first[index + 1] if index + 1 < len(places) else places[index].trunk
            self._first[index] = min(places[index].trunk, later)

    def fork(self, weights: Any, indices: Sequence[int], columns: int) -> Prefixes:
        """The prefixes of these indices; states that no later index needs are dropped."""
        places = [self._places[index] for index in indices]
        first = self._first[min(indices)]
        self.held = {number: state for number, state in self.held.items() if number >= first}
        row, count = (np.array([place[field] for place in places], np.int32) for field in (1, 2))
        found = None
        for number in sorted({place.trunk for place in places}):
            if number not in self.held and self._make is not None:
                self.held[number] = self._make(weights, number)
            here = np.array([place.trunk == number for place in places])
            asked = (np.where(here, row, 0), np.where(here, count, 0), here)
            found = self._forks.fork(self.held[number], *asked, found, columns=columns)
        return found


class Source:
    """What a sampler samples from in place of prompts: prefixes by their index among those that are expected."""

    def __init__(self, forks: Forks, trunks: Trunks, *, keep: bool = False):
        self._forks, self._keep = forks, keep
        self.trunks = trunks
        self.states: list[DecodeState] = []  # of each batch, where they are kept

    def __call__(self, indices: Sequence[int], weights: Any, requests: Requests, stops: Any) -> Rollout:
        prefixes = self.trunks.fork(weights, indices, requests.tokens.shape[1])
        state, rollout = self._forks.sample(weights, prefixes, requests, stops, self._keep)
        self.states += [state] if self._keep else []
        return rollout


class Reader:
    """Makes trunks by reading, and counts the tokens that it reads for them."""

    def __init__(self, forks: Forks, place: Callable[[Any], Any], *, rows: int, pad_token_id: int):
        self._forks, self._place, self._rows, self._pad = forks, place, rows, pad_token_id
        self.tokens = 0

    def prompts(self, ids: Sequence[Sequence[int]], buckets: Sequence[int]) -> tuple[Trunks, list[Place]]:
        """Trunks of prompts, and where the end of each lies."""

        def make(weights: Any, number: int) -> DecodeState:
            own = ids[number * self._rows :][: self._rows]
            self.tokens += sum(map(len, own))
            filled = [*own, *[[self._pad]] * (self._rows - len(own))]
            padded = left_pad(filled, choose_bucket(max(map(len, own)), buckets), self._pad)
            return self._forks.read(weights, *self._place(padded))

        return Trunks(self._forks, make), [Place(*divmod(index, self._rows), 0) for index in range(len(ids))]

    def solutions(
        self, ids: Sequence[Sequence[int]], after: Sequence[Sequence[int]], buckets: Sequence[int]
    ) -> tuple[Trunks, list[Place]]:
        """The same of solutions, each after its prompt; those of one prompt are adjacent, and it is read once for them."""
        starts = [index for index in range(len(after)) if not index or after[index] is not after[index - 1]]
        numbers = np.searchsorted(starts, np.arange(len(after)), side="right") - 1
        prompts, ends = self.prompts([after[index] for index in starts], buckets)
        prompts.expect([ends[number] for number in numbers])

        def make(weights: Any, number: int) -> DecodeState:
            mine = list(range(number * self._rows, min((number + 1) * self._rows, len(ids))))
            self.tokens += sum(len(ids[index]) for index in mine)
            longest = max(len(ids[index]) for index in mine)
            columns = max(16, 1 << (longest - 1).bit_length())  # a program for each power of two
            tokens, lengths = np.full((self._rows, columns), self._pad, np.int32), np.zeros(self._rows, np.int32)
            for row, index in enumerate(mine):
                tokens[row, : len(ids[index])], lengths[row] = ids[index], len(ids[index])
            width = choose_bucket(max(len(after[index]) for index in mine), buckets)
            filled = [*mine, *[mine[0]] * (self._rows - len(mine))]
            return self._forks.give(weights, prompts.fork(weights, filled, width), *self._place((tokens, lengths)))

        places = [Place(*divmod(index, self._rows), len(one)) for index, one in enumerate(ids)]
        return Trunks(self._forks, make), places


def reader_of(sampler: Sampler, forks: Forks) -> Reader:
    """What makes trunks of as many rows as a call of the sampler has prompts."""
    return Reader(forks, sampler.steps.place_rollout, rows=sampler.prompts_per_call, pad_token_id=sampler.pad_token_id)


def after_prefixes(
    sampler: Sampler,
    forks: Forks,
    prompts: Sequence[Sequence[int]],
    prefixes: Sequence[tuple[int, tuple[int, ...]]],
    buckets: Sequence[int],
) -> tuple[Sampler, Reader]:
    """The sampler, which takes prompt i for what prefix i stands for, (prompt, tokens after it), and reads nothing twice.

    Prefixes of one prompt are adjacent and sorted. Each prompt, and each prefix that no other one begins with, is read once.
    """
    kept, numbers = longest([(prompt, *ids) for prompt, ids in prefixes])
    reader = reader_of(sampler, forks)
    trunks, ends = reader.solutions([one[1:] for one in kept], [prompts[one[0]] for one in kept], buckets)
    trunks.expect([ends[n]._replace(count=len(ids)) for n, (_, ids) in zip(numbers, prefixes, strict=True)])
    return dataclasses.replace(sampler, source=Source(forks, trunks)), reader


def longest(sequences: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Of sorted sequences those that no other one begins with, and for each one which of these it is the beginning of."""
    kept: list[tuple[Any, ...]] = []
    numbers = []
    for own in reversed(sequences):
        if not kept or kept[-1][: len(own)] != own:
            kept.append(own)
        numbers.append(len(kept))
    return kept[::-1], [len(kept) - number for number in reversed(numbers)]
