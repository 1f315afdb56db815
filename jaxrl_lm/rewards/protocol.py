"""The reward protocol: finding reward functions, and calling them.

A reward function has TRL's signature, `reward(prompts, completions, completion_ids, **columns) -> list[float | None]`,
is called by keyword with what its signature accepts, and may be `async`. None means that it does not apply to the row.
A failure is a `RewardError` and never becomes a number. The shipped functions are in `arithmetic.py` and
`reasoning.py`, the adapter for verl's in `verl.py`. Next to read: `aggregate.py`, from these values to returns.
"""

import asyncio
import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from jaxrl_lm.data import Row, load_function

SHIPPED = {
    "arithmetic": "jaxrl_lm.rewards.arithmetic:arithmetic",
    "format_think": "jaxrl_lm.rewards.arithmetic:format_think",
    "reasoning_gym": "jaxrl_lm.rewards.reasoning:reasoning_gym",
    "random": "jaxrl_lm.rewards.controls:random_reward",
}
"""Shipped reward functions by name."""

_RESERVED = ("prompts", "completions", "completion_ids", "group_ids")


class RewardError(ValueError):
    """A reward function failed; the message names it, the row and the beginning of the row's prompt."""


class Everywhere:
    """What several processes compute together, such as a model on the mesh: a function of this class gets all rows on
    every process, where others get those of their own process.
    """


class RewardFunction(NamedTuple):
    """A reward function with its name in metrics and its weight in the sum; weight 0 is computed and logged only."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    @property
    def everywhere(self) -> bool:
        """Whether all processes must call it together."""
        return isinstance(getattr(self.function, "func", self.function), Everywhere)  # functools.partial has a func


# --- finding --------------------------------------------------------------------------------------------------------


def resolve(spec: Any, *, weight: float = 1.0) -> RewardFunction:
    """The reward function that `spec` names.

    `spec`: a shipped name, "package.module:function", "path/file.py:function", one of these two after "verl:" (a
    compute_score of verl's), a callable (its `__name__` is its name), or a RewardFunction, which is returned as it is.
    Raises ValueError with the nearest name for an unknown one, TypeError for anything else, and what
    `data.load_function` raises.
    """
    if isinstance(spec, RewardFunction):
        return spec
    if not isinstance(spec, str):
        return RewardFunction(_name(spec), spec, weight)
    if spec in SHIPPED:
        return RewardFunction(spec, load_function(SHIPPED[spec], option="reward"), weight)
    if spec.startswith("verl:"):
        from jaxrl_lm.rewards.verl import from_verl

        function = from_verl(load_function(spec.removeprefix("verl:"), option="reward"))
    elif ":" in spec:
        function = load_function(spec, option="reward")
    else:
        near = difflib.get_close_matches(spec, SHIPPED, n=1, cutoff=0.0)
        raise ValueError(
            f"reward={spec!r} is unknown; did you mean {near[0]!r}? Shipped: {', '.join(SHIPPED)}; your own are given "
            "as package.module:function or path/file.py:function, a reward model as reward_model:DIRECTORY"
        )
    return RewardFunction(_name(function), function, weight)


def resolve_all(specs: Sequence[Any], weights: Sequence[float] = ()) -> tuple[RewardFunction, ...]:
    """The reward functions of a run; `weights` empty: all 1.

    Raises ValueError where the weights do not fit, or where two functions have the same name.
    """
    if weights and len(weights) != len(specs):
        raise ValueError(f"reward_weights has {len(weights)} values for {len(specs)} reward functions")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"reward_weights={tuple(weights)}: every weight must be finite")
    functions = tuple(
        resolve(spec, weight=float(w)) for spec, w in zip(specs, weights or [1.0] * len(specs), strict=True)
    )
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"reward: two reward functions are named {name!r}: rename one, metrics go by name")
    return functions


def _name(function: Any) -> str:
    if not callable(function):
        raise TypeError(f"reward: {function!r} is of type {type(function).__name__}, neither a name nor a callable")
    inner = getattr(function, "func", function)  # functools.partial
    return getattr(inner, "__name__", type(inner).__name__)


# --- calling --------------------------------------------------------------------------------------------------------


def columns_of(rows: Sequence[Row], *, num_generations: int = 1) -> dict[str, list[Any]]:
    """The rows' columns as lists, each row repeated `num_generations` times; a column that a row lacks is None there.

    `prompt` and `completion` are left out: reward functions get them as `prompts` and `completions`.
    """
    names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "completion"))
    return {name: [row.get(name) for row in rows for _ in range(num_generations)] for name in names}


def route(functions: Sequence[RewardFunction], column: Sequence[Any]) -> Bool[np.ndarray, "N F"]:
    """Which functions score which rows, by the rows' `reward` column: a name, a list of names, or None for all.

    Raises ValueError with the row for a name that no function has.
    """
    names = [function.name for function in functions]
    routed = np.zeros((len(column), len(names)), bool)
    for row, value in enumerate(column):
        wanted = names if value is None else [value] if isinstance(value, str) else list(value)
        for name in wanted:
            if name not in names:
                raise ValueError(
                    f"row {row}: its column 'reward' names {name!r}, and the reward functions are {', '.join(names)}"
                )
            routed[row, names.index(name)] = True
    return routed


def compute_rewards(
    functions: Sequence[RewardFunction],
    *,
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    group_ids: Sequence[int],
    mine: Collection[int] | None = None,
    which: Literal["all", "own", "everywhere"] = "all",
) -> Float64[np.ndarray, "N F"]:
    """Each function's value for each row; NaN where it abstains (None) or is not routed to the row.

    A row whose prompt is a list of messages gets its completion as [{"role": "assistant", "content": text}], as in TRL.
    Async functions run together while the others run one after the other. A `reward` column routes rows, see `route`;
    a function sees only its own rows. `mine`: the rows that this process judges; of the others only functions that are
    computed `Everywhere` give values. `which`: these functions alone, or the others alone ("own").

    Raises RewardError where a function raises, asks for a column that is not there, or returns a wrong count, a NaN, an
    infinity or something that is not a number.
    """
    data = arguments(prompts, completions, completion_ids, columns, group_ids)
    count = len(prompts)
    routed = route(functions, columns["reward"]) if "reward" in columns else np.ones((count, len(functions)), bool)
    calls = [Call(function, np.flatnonzero(routed[:, f]).tolist(), data) for f, function in enumerate(functions)]
    for call in calls:
        if call.rows:
            call.check_columns()
    if mine is not None:  # after the checks, which every process must pass before any calls something together
        for call in calls:
            call.rows = call.rows if call.everywhere else [row for row in call.rows if row in mine]
    for call in calls:
        if which != "all" and call.everywhere != (which == "everywhere"):
            call.rows = []
    values = np.full((count, len(functions)), np.nan)
    outcomes = run_all(calls)
    # What is computed together first: a search for the row at fault must be made by all.
    for f in sorted(range(len(calls)), key=lambda f: not calls[f].everywhere):
        if calls[f].rows:
            values[calls[f].rows, f] = calls[f].values(outcomes[f])
    return values


def arguments(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    group_ids: Sequence[int],
) -> dict[str, list[Any]]:
    taken = sorted(set(columns) & set(_RESERVED))
    if taken:
        raise ValueError(
            f"dataset columns may not be named {', '.join(taken)}: reward functions get these from the run"
        )
    shown, texts = [], []
    for prompt, text in zip(prompts, completions, strict=True):
        if not isinstance(prompt, str):
            # A prompt that ends with the beginning of the answer: that belongs to the answer (TRL's rule).
            begun = prompt[-1]["content"] if prompt[-1]["role"] == "assistant" else ""
            prompt = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
            text = [{"role": "assistant", "content": begun + text}]
        shown.append(prompt)
        texts.append(text)
    data = {"prompts": shown, "completions": texts, "completion_ids": list(completion_ids)}
    data |= {"group_ids": list(group_ids), **{name: list(column) for name, column in columns.items()}}
    for name, column in data.items():
        if len(column) != len(prompts):
            raise ValueError(f"{name} has {len(column)} values for {len(prompts)} rows")
    return data


class Call:
    """A function, the rows it scores, and the arguments that its signature accepts."""

    what, gives = "reward", "numbers"  # in error messages

    def __init__(self, reward: RewardFunction, rows: list[int], data: dict[str, list[Any]]):
        self.name, self.function, self.rows, self.data = reward.name, reward.function, rows, data
        self.everywhere = reward.everywhere
        parameters = inspect.signature(reward.function).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.required = [p.name for p in parameters if p.kind in named and p.default is p.empty]
        everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        accepted = {p.name for p in parameters if p.kind in named}
        self.accepted = [name for name in data if everything or name in accepted]
        inner = getattr(reward.function, "func", reward.function)
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)

    def check_columns(self) -> None:
        for name in self.required:
            if name not in self.data:
                known = ", ".join(n for n in self.data if n not in _RESERVED) or "none"
                raise RewardError(
                    f"{self.what} {self.name!r} needs the column {name!r}, which the dataset does not have (its further "
                    f"columns: {known})"
                )

    def start(self, rows: list[int]) -> Any:
        return self.function(**{name: [self.data[name][row] for row in rows] for name in self.accepted})

    def row(self, index: int) -> str:
        prompt = self.data["prompts"][index]
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"] if prompt else ""
        return f"row {index} (prompt {text[:60]!r}{'…' if len(text) > 60 else ''})"

    def values(self, outcome: Any) -> list[Any]:
        """The checked values."""
        if isinstance(outcome, Exception):
            raise RewardError(self._describe(outcome)) from outcome
        if isinstance(outcome, str | bytes | Mapping) or not hasattr(outcome, "__len__"):
            raise RewardError(
                f"{self.what} {self.name!r} returned a {type(outcome).__name__}, not a list of {len(self.rows)} "
                f"{self.gives}; first row: {self.row(self.rows[0])}"
            )
        if len(outcome) != len(self.rows):
            raise RewardError(
                f"{self.what} {self.name!r} returned {len(outcome)} values for {len(self.rows)} completions; first row: "
                f"{self.row(self.rows[0])}"
            )
        return [self.value(value, row) for value, row in zip(outcome, self.rows, strict=True)]

    def value(self, value: Any, row: int) -> Any:
        """The checked value of one row; None becomes NaN."""
        if value is None:
            return math.nan
        number = number_of(value)
        if number is None:
            raise RewardError(
                f"reward {self.name!r} returned a {type(value).__name__} ({repr(value)[:60]}) for {self.row(row)}; it "
                "must be a number, or None where the function does not apply"
            )
        if not math.isfinite(number):
            raise RewardError(f"reward {self.name!r} returned {number} for {self.row(row)}; it must be finite")
        return number

    def _describe(self, error: Exception) -> str:
        found = _narrow(self, self.rows, error)
        place = self.row(found[0])
        if len(found) > 1:
            place = f"a call with rows {found[0]} to {found[-1]}; the first is {place}"
        return f"{self.what} {self.name!r} raised {type(error).__name__}: {error} on {place}"


def run_all(calls: Sequence[Call]) -> list[Any]:
    """What each call returned, or the exception that it raised."""
    outcomes: list[Any] = [None] * len(calls)
    waiting = [i for i, call in enumerate(calls) if call.is_async and call.rows]
    with ThreadPoolExecutor(1) as pool:
        # A thread of its own, so that the async functions wait for their servers while the others compute, and so that
        # a caller that already runs an event loop (a notebook) can be served.
        together = pool.submit(asyncio.run, _gather([calls[i] for i in waiting])) if waiting else None
        for i, call in enumerate(calls):
            if call.rows and not call.is_async:
                outcomes[i] = _attempt(call, call.rows)
        if together is not None:
            for i, outcome in zip(waiting, together.result(), strict=True):
                outcomes[i] = outcome
    return outcomes


async def _gather(calls: Sequence[Call]) -> list[Any]:
    return await asyncio.gather(*(_finish(call) for call in calls), return_exceptions=True)


async def _finish(call: Call) -> Any:
    return await call.start(call.rows)


def _attempt(call: Call, rows: list[int]) -> Any:
    """What the call returns for these rows, or the exception it raised, which the caller reports."""

    async def awaited(value: Any) -> Any:
        return await value

    try:
        result = call.start(rows)
        if inspect.isawaitable(result):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(asyncio.run, awaited(result)).result()
        return result
    except Exception as error:
        return error


def _narrow(call: Call, rows: list[int], error: Exception) -> list[int]:
    """The fewest rows, by halving, on which the call still raises the same error.

    The run is ending anyway, and knowing the row is worth some calls more. A function whose failure is about the whole
    batch raises another error on a part of it, or none; then the rows of the last call that raised this one are named.
    """
    while len(rows) > 1:
        middle = len(rows) // 2
        for part in (rows[:middle], rows[middle:]):
            other = _attempt(call, part)
            if type(other) is type(error) and str(other) == str(error):
                rows = part
                break
        else:
            break
    return rows


def number_of(value: Any) -> float | None:
    """A number as float; None for anything else."""
    if isinstance(value, numbers.Real | Decimal):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str | bytes | Sequence | Mapping):
        return None
    array = np.asarray(value)  # numpy's bool, and scalar arrays of torch and JAX
    return float(array) if array.ndim == 0 and array.dtype.kind in "biuf" else None
