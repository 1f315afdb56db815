"""Process reward models as functions that score steps: the option prm:DIRECTORY.

A process reward model is a Hugging Face *ForTokenClassification directory with the labels 0 wrong and 1 right
(`models/classifiers.py`). It lies frozen on the run's mesh and reads text, with its own tokenizer. Scores of whole rows:
`reward_model.py`.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_lm.data import pad_rows
from jaxrl_lm.distributed import gather, place
from jaxrl_lm.encode import _prompt_ids
from jaxrl_lm.models import classifier_settings, load_process_model
from jaxrl_lm.placement import tree_bytes
from jaxrl_lm.reward_model import (
    by_length,
    longest,
    machine_dtype,
    naming,
    parse_option,
    positive,
    rested,
    rows_at_once,
    shown,
)
from jaxrl_lm.rewards import Everywhere
from jaxrl_lm.sharding import Plan, move
from jaxrl_lm.steps import compile_token_scores

PREFIX = "prm:"


def _separator(value: str) -> str:
    if not value:
        raise ValueError("must not be empty")
    return value


_SETTINGS: dict[str, Callable[[str], Any]] = {
    "separator": _separator,
    "max_length": positive,
    "batch_size": positive,
    "name": str,
}


class ProcessModel(Everywhere):
    """Scores of the steps of completions: (prompts, completions) -> for each row its (end, probability) in order.

    `end` is the index in the completion's text just after the step with its separator, the probability σ(z) that the
    step is right, read at the last token of step and separator. The tokens are those of training: the prompt's as
    `encode_prompts` makes them, then each step's and the separator's, each tokenised on its own.

    `option` is "prm:DIRECTORY", or a hub id in place of the directory, with settings after a question mark, written as
    in a URL (a line break is %0A): `separator` (by default config.json's step_separator), `max_length` in the model's
    tokens (None: what its config and tokenizer allow), `batch_size` (rows scored at once, rounded up to divide over the
    mesh) and `name`. `dtype` is that of weights and computation; None: bfloat16 on accelerators, float32 on CPU. `hosted`:
    the weights lie in host memory, and on the mesh during a call.

    Raises ValueError or FileNotFoundError, naming option and directory, for what `load_process_model` refuses, a model
    that the mesh does not divide, no separator, and unknown or wrong settings.
    """

    def __init__(self, option: str, *, plan: Plan, dtype: str | None = None, hosted: bool = False):
        self.where = f"step_reward={option!r}"
        directory, given = parse_option(option, prefix=PREFIX, settings=_SETTINGS, where=self.where)
        with naming(self.where):
            loaded = load_process_model(directory, plan=plan, dtype=dtype or machine_dtype())
            self.separator = given.get("separator") or classifier_settings(directory)["step_separator"]
        if self.separator is None:
            raise ValueError(
                f"{self.where}: no separator of steps: config.json has no step_separator; give it as ?separator=%0A"
            )
        self._model, self._weights, self._tokenizer = loaded
        self._separator_ids = self._ids(self.separator)
        self.option, self.plan, self.cut = option, plan, 0  # `cut` counts the steps that end beyond max_length
        self.max_length = longest(given, self._model, self._tokenizer, self.where)
        self.rows = rows_at_once(given, plan)
        self.__name__ = given.get("name", "process_model")  # by which a reward function goes
        self._chances = compile_token_scores(self._model, plan, bias="bias" in self._weights["head"])
        self.nbytes = tree_bytes(self._weights)
        self._weights, self._layouts = rested(self._weights, hosted=hosted)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[list[tuple[int, float]]]:
        """The scored steps of each row. Equal rows of a call are scored once, so that their scores are the same.

        Steps are those of `split_steps`. A step whose last token lies beyond max_length has no score and is not in the
        list; the first time, a warning says how many there were.

        Raises ValueError for what `encode_prompts` refuses, a completion of several messages, a step without a token,
        and a score that is not finite.
        """
        texts = [self._text(completion) for completion in completions]
        where = lambda index: f"{self.where}: row {index}"
        ids = [_prompt_ids(one, self._tokenizer, None, None, where(index))[1] for index, one in enumerate(prompts)]
        steps = [split_steps(text, self.separator) for text in texts]
        whole = [self.encode(*row) for row in zip(ids, steps, strict=True)]
        rows = [self._cut_end(*row) for row in whole]
        kept, count = sum(len(ends) for _, ends in rows), sum(map(len, steps))
        self._count(count - kept, count)
        chances = {((), ()): []}
        unique = set(rows) - chances.keys()
        weights = move(self._weights, self._layouts)
        for part, padded in by_length(unique, lambda row: len(row[0]), longest=self.max_length, size=self.rows):
            chances |= zip(part, self._score(weights, part, padded), strict=True)
        for row, prompt, completion in zip(rows, prompts, texts, strict=True):
            if not all(map(math.isfinite, chances[row])):
                raise ValueError(
                    f"{self.where}: the score of a step of {shown(prompt, completion)} is not a finite number; the model "
                    "or its dtype is at fault"
                )
        found = zip(steps, (chances[row] for row in rows), strict=True)
        return [[(end, chance) for (_, end), chance in zip(own, scores, strict=False)] for own, scores in found]

    def _text(self, completion: Any) -> str:
        if isinstance(completion, str):
            return completion
        if len(completion) != 1:
            raise ValueError(f"{self.where}: a completion of {len(completion)} messages; steps are those of one")
        return completion[0]["content"]

    def encode(self, prompt: list[int], steps: Sequence[tuple[str, int]]) -> tuple[list[int], list[int]]:
        """The tokens of a row, and the index of each step's last one."""
        ids, ends = list(prompt), []
        for step, _ in steps:
            own = [*self._ids(step), *self._separator_ids]
            if not own:
                raise ValueError(f"{self.where}: the step {step[:60]!r} has no token")
            ids += own
            ends.append(len(ids) - 1)
        return ids, ends

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _cut_end(self, ids: list[int], ends: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The row up to its last step that ends within `max_length`; nothing where there is none."""
        kept = tuple(end for end in ends if end < self.max_length)
        return (tuple(ids[: kept[-1] + 1]), kept) if kept else ((), ())

    def _count(self, cut: int, count: int) -> None:
        if cut and not self.cut:
            warnings.warn(
                f"{self.where}: {cut} of {count} steps end beyond max_length={self.max_length} and have no score; this is "
                "said once",
                stacklevel=3,
            )
        self.cut += cut

    def _score(
        self, weights: Any, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], padded: int
    ) -> list[list[float]]:
        """One call of the compiled program, whose shape knows only the padded length."""
        filled = [*rows, *[((), ())] * (self.rows - len(rows))]
        tokens, segment_ids, _ = pad_rows([((), ids) for ids, _ in filled], 0, padded, 0)
        step_ends = np.zeros(tokens.shape, bool)
        for number, (_, ends) in enumerate(filled):
            step_ends[number, list(ends)] = True
        arrays = (place(array, self.plan.rows) for array in (tokens, segment_ids, step_ends))
        chances = gather(self._chances(weights, *arrays))
        return [chances[number, list(ends)].tolist() for number, (_, ends) in enumerate(rows)]


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    """The steps of a completion without their separators, each with the index just after its separator.

    A last piece without a separator is a step too, which ends with the text, unless it is blank. A blank piece makes no
    step of its own, for that would be one for free: it belongs to the step before it, at the beginning to the one after.
    """
    pieces = text.split(separator)
    steps: list[tuple[int, int, int]] = []  # start, stop, and end with the separator
    stop = start = 0
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        stop += len(piece)
        end = stop if is_last else stop + len(separator)
        if piece.strip():
            steps.append((start, stop, end))
            start = end
        elif steps and not is_last:
            steps[-1] = (steps[-1][0], stop, end)
            start = end
        stop = end
    return [(text[first:last], end) for first, last, end in steps]
