"""Beam search over steps, guided by a scorer of what is written so far.

Source: Snell et al., 2024, section 5.2: each round continues every beam by one step in several ways and keeps the best.
`beam_search` is the search on whatever continues and scores; `Continuations` continues by a loaded model.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_lm.algos import beam_step
from jaxrl_lm.completions import Completer
from jaxrl_lm.data import default_buckets
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.rule_tables import refuse_from_the_start
from jaxrl_lm.tools_config import SearchConfig
from jaxrl_lm.trunks import Place, Source, Trunks, reader_of

FIRST_DRAW = 1  # the number of the first round's draws; 0 is that of whole completions


class Beam(NamedTuple):
    """What is written of a completion."""

    ids: tuple[int, ...] = ()
    text: str = ""
    finished: bool = False  # by an end of sequence, a stop string or a length limit
    steps: int = 0
    score: float = 0.0


Continue = Callable[[int, list[int], list[Beam]], list[list[Beam]]]
"""(round, prompts, beams) to the continuations of each beam by one step, equally many of each."""
Score = Callable[[list[int], list[Beam]], Sequence[float]]
"""(prompts, beams) to their scores."""


def beam_search(
    continue_by_step: Continue, score: Score, prompts: int, *, width: int, max_steps: int
) -> list[list[Beam]]:
    """The beams of each prompt, at most `width`: those that have finished first, then by score, the best first.

    Every round continues each unfinished beam in w ways and keeps the `width` best of each prompt; a finished beam stays
    in the race with the score that it has. The first round continues `width` empty beams.
    """
    beams = [[Beam()] * width for _ in range(prompts)]
    for number in range(max_steps):
        places = [(p, slot) for p in range(prompts) for slot, beam in enumerate(beams[p]) if not beam.finished]
        if not places:
            break
        owners = [p for p, _ in places]
        grown = continue_by_step(number, owners, [beams[p][slot] for p, slot in places])
        ways = len(grown[0])
        flat = [beam for group in grown for beam in group]
        scores = score([p for p in owners for _ in range(ways)], flat)
        scored = [beam._replace(score=float(value)) for beam, value in zip(flat, scores, strict=True)]
        candidates = [{slot * ways: beam for slot, beam in enumerate(group) if beam.finished} for group in beams]
        for start, (p, slot) in enumerate(places):
            candidates[p] |= {slot * ways + way: scored[start * ways + way] for way in range(ways)}
        beams = [_best(group, width, ways) for group in candidates]
    return [sorted(group, key=lambda beam: not beam.finished) for group in beams]  # stable


def _best(candidates: dict[int, Beam], width: int, ways: int) -> list[Beam]:
    """The best of one prompt's candidates, by their places."""
    scores, valid = np.zeros((1, width * ways), np.float32), np.zeros((1, width * ways), bool)
    for place, beam in candidates.items():
        scores[0, place], valid[0, place] = beam.score, True
    chosen = np.asarray(beam_step(jnp.asarray(scores), width=width, valid=jnp.asarray(valid)))[0]
    return [candidates[place] for place in chosen.tolist() if place >= 0]


class Continuations:
    """Continues beams by one step, up to the separator, with samples of a loaded model; counts its tokens.

    Prompts are read once, however many beams begin with them, and a beam goes on from the cache of the row that wrote it
    (`trunks.py`): the rows of a round are held until those of the next have begun. With fewer `decode_slots` than rows they
    are gone by then, and each beam is read anew.

    A beam finishes by an end-of-sequence token, by one of the `stop` strings, by a step of `max_step_length` tokens that
    has not ended, and at the end of a step from `max_completion_length` tokens up.
    """

    def __init__(self, config: SearchConfig, completer: Completer, prompts: EncodedPrompts):
        refuse_from_the_start(config, "method beam")
        self.config, self.completer, self.prompts, self.tokens = config, completer, prompts, 0
        self._draws = 0
        lengths = [len(ids) for ids in prompts.ids]
        buckets = list(config.prompt_buckets) or list(default_buckets(lengths))
        while max(buckets) < max(lengths) + config.max_completion_length:
            buckets.append(2 * max(buckets))
        changes = {
            "num_generations": config.beam_expand,
            "stop": (config.step_separator, *config.stop),
            "max_completion_length": min(config.max_step_length, config.max_completion_length),
        }
        self._sampler = completer.sampler([prompts], prompt_buckets=tuple(buckets), **changes)
        rows = self._sampler.prompts_per_call * config.beam_expand
        self._forks = None if (config.decode_slots or rows) < rows else completer.forks(**changes)
        self._reader = None if self._forks is None else reader_of(self._sampler, self._forks)
        self._written: dict[tuple[int, tuple[int, ...]], Place] = {}  # where the beams of the last round lie
        self._rows: list[Any] = []  # its states

    @property
    def prefilled(self) -> int | None:
        """Tokens that were computed beside the sampled ones; None where each beam is read anew."""
        return None if self._reader is None else self._reader.tokens

    def _source(self, places: list[int], beams: list[Beam]) -> Source | None:
        """What the next round samples from; None: whole prefixes."""
        written, self._written = self._written, {}
        if self._forks is None:
            return None
        if beams[0].ids:  # then all are of the last round
            trunks = Trunks(self._forks)
            trunks.hold(self._rows)
            trunks.expect([written[place, beam.ids] for place, beam in zip(places, beams, strict=True)])
        else:
            first = sorted(set(places))
            trunks, ends = self._reader.prompts([self.prompts.ids[place] for place in first], self._sampler.buckets)
            end = dict(zip(first, ends, strict=True))
            trunks.expect([end[place] for place in places])
        self._rows = []
        return Source(self._forks, trunks, keep=True)

    def __call__(self, number: int, places: list[int], beams: list[Beam]) -> list[list[Beam]]:
        """`beam_expand` continuations of each beam. Rounds share no keys, those of other prompts neither."""
        source, draw = self._source(places, beams), FIRST_DRAW + self._draws
        sampler, self._draws = dataclasses.replace(self._sampler, source=source), self._draws + 1
        ids = [[*self.prompts.ids[place], *beam.ids] for place, beam in zip(places, beams, strict=True)]
        texts = [self.prompts.texts[place] + beam.text for place, beam in zip(places, beams, strict=True)]
        extended = EncodedPrompts([self.prompts.rows[place] for place in places], ids, texts, 0, 0)
        ways, grown = self.config.beam_expand, []
        drawn = self.completer.draw(sampler, extended, range(len(places)), number=draw)
        for shelf, (batch, sampled) in enumerate(drawn):
            self.tokens += sum(map(len, sampled.completion_ids))
            new = zip(sampled.completion_ids, sampled.truncated.tolist(), strict=True)
            longer = [self._longer(beams[batch[n // ways]], *one) for n, one in enumerate(new)]
            grown += [longer[start : start + ways] for start in range(0, len(longer), ways)]
            for row, (beam, ids) in enumerate(zip(longer, sampled.completion_ids, strict=True)):
                self._written[places[batch[row // ways]], beam.ids] = Place(shelf, row, len(ids))
        self._rows = [] if source is None else source.states
        return grown

    def _longer(self, beam: Beam, new: list[int], truncated: bool) -> Beam:
        ids = (*beam.ids, *new)
        text = self.completer.tokenizer.decode(ids, skip_special_tokens=True)
        stopped = any(stop in text for stop in self.config.stop)
        over = ids[-1] in self.completer.eos or len(ids) >= self.config.max_completion_length
        return Beam(ids, text, bool(truncated or stopped or over), beam.steps + 1)
