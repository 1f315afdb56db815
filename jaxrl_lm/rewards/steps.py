"""Rewards of steps: the protocol of a `step_reward` function, and from its characters to tokens.

    step_reward(prompts, completions, completion_ids, **columns) -> list[list[tuple[int, float]] | None]

It is called as reward functions are (`protocol.py`), on every row, and gives the steps of each completion as (end,
value), in their order: `end` is the index in the completion's text just after the step's last character. An empty list
says that there is no step, None that the function does not apply to the row. A turn is a step that ends with the
turn's last character. Where the values go: `step_rewards.py`.
"""

import bisect
import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxrl_lm.data import load_function
from jaxrl_lm.rewards.protocol import Call, RewardError, RewardFunction, arguments, number_of, resolve, run_all

RowSteps = list[tuple[int, float]] | None


def resolve_steps(spec: Any) -> RewardFunction:
    """The step function that `spec` names: "package.module:function" or "path/file.py:function", or a callable.

    Raises ValueError for a name without a function, and what `data.load_function` raises.
    """
    if isinstance(spec, str) and ":" not in spec:
        raise ValueError(
            f"step_reward={spec!r} is unknown: give package.module:function, path/file.py:function, or a process reward "
            "model as prm:DIRECTORY"
        )
    return resolve(load_function(spec, option="step_reward") if isinstance(spec, str) else spec)


def compute_step_rewards(
    function: RewardFunction,
    *,
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    group_ids: Sequence[int],
    chances: bool = False,
    mine: range | None = None,
) -> list[RowSteps]:
    """Each completion's steps; None where the function does not apply.

    Where a prompt brings the beginning of the answer, the function gets it with the completion (as reward functions
    do): ends are moved back by it, and steps that end within it are left out, for the policy did not write them.
    `mine`: the rows that this process judges, whose steps are returned; one that is computed `Everywhere` gets all.

    Raises RewardError where the function raises, asks for a column that is not there, or returns a wrong count, ends
    that do not ascend within the text, or a value that is no finite number; with `chances` for one outside [0, 1] too.
    """
    mine = range(len(prompts)) if mine is None else mine
    call = _StepCall(
        function,
        list(range(len(prompts)) if function.everywhere else mine),
        arguments(prompts, completions, completion_ids, columns, group_ids),
        chances=chances,
    )
    call.check_columns()
    if not call.rows:
        return []
    found = dict(zip(call.rows, call.values(run_all([call])[0]), strict=True))
    return [_moved(found[row], len(call.text(row)) - len(completions[row])) for row in mine]


def _moved(steps: RowSteps, begun: int) -> RowSteps:
    """The steps without those of the first `begun` characters, counted from there."""
    if not begun or steps is None:
        return steps
    return [(end - begun, value) for end, value in steps if end > begun]


class _StepCall(Call):
    what, gives = "step_reward", "lists of (end, value)"

    def __init__(self, function: RewardFunction, rows: list[int], data: dict[str, list[Any]], *, chances: bool):
        super().__init__(function, rows, data)
        self.chances = chances

    def text(self, row: int) -> str:
        """The completion as the function got it."""
        completion = self.data["completions"][row]
        return completion if isinstance(completion, str) else completion[0]["content"]

    def value(self, value: Any, row: int) -> RowSteps:
        """The checked steps of one row."""
        if value is None:
            return None
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
            self._refuse(row, f"a {type(value).__name__} ({repr(value)[:60]}) for", "it must be a list of (end, value)")
        steps, least, length = [], 1, len(self.text(row))
        for number, step in enumerate(value):
            end, paid = self._pair(step, number, row)
            if not least <= end <= length:
                self._refuse(
                    row,
                    f"step {number} with end {end} for",
                    f"ends must ascend, from 1 to the {length} characters of the completion: an end is the index after "
                    "the step's last character",
                )
            if self.chances and not 0 <= paid <= 1:
                self._refuse(
                    row, f"step {number} with value {paid} for", "step_credit='product' multiplies chances in [0, 1]"
                )
            steps.append((end, paid))
            least = end + 1
        return steps

    def _pair(self, step: Any, number: int, row: int) -> tuple[int, float]:
        pair = tuple(step) if hasattr(step, "__len__") and not isinstance(step, str | bytes | Mapping) else ()
        if len(pair) != 2 or isinstance(pair[0], bool) or not isinstance(pair[0], numbers.Integral):
            self._refuse(row, f"step {number} as {repr(step)[:60]} for", "it must be (end, value) with a whole end")
        paid = number_of(pair[1])
        if paid is None or not abs(paid) < float("inf"):
            self._refuse(row, f"step {number} with value {repr(pair[1])[:60]} for", "it must be a finite number")
        return int(pair[0]), paid

    def _refuse(self, row: int, found: str, rule: str) -> NoReturn:
        raise RewardError(f"{self.what} {self.name!r} returned {found} {self.row(row)}; {rule}")


def step_tokens(ids: Sequence[int], text: str, ends: Sequence[int], tokenizer: Any) -> list[int]:
    """For each end the index in `ids` of the first token with which the decoded text reaches it.

    `text` is what `ids` decode to without special tokens, an end from 1 to its length. A token that holds only a part
    of a character's bytes decodes to a replacement mark, which is not the character: it does not reach it. Several ends
    may have one token. About s log(t / s) decodes for s ends in t tokens.

    Raises ValueError where the ids decode to another text.
    """
    decode = lambda count: tokenizer.decode(list(ids[:count]), skip_special_tokens=True)
    if not ends:
        return []
    if decode(len(ids)) != text:
        raise ValueError(f"step_tokens: the ids decode to {decode(len(ids))[:60]!r}, and the text is {text[:60]!r}")
    reached = functools.cache(lambda token: _common(decode(token + 1), text))
    return [bisect.bisect_left(range(len(ids)), end, key=reached) for end in ends]


def _common(shown: str, text: str) -> int:
    """How many characters of `text` are there."""
    for beginning in (shown, shown[:-1]):  # the last one may be a mark for a character that is not there yet
        if text.startswith(beginning):
            return len(beginning)
    # Several marks, or a decoder that has second thoughts: one by one.
    differ = (place for place, (a, b) in enumerate(zip(shown, text, strict=False)) if a != b)
    return next(differ, min(len(shown), len(text)))
