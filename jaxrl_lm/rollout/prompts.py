"""Which prompts are drawn next: in shuffled order, by a solve-rate curriculum, or by a bandit over categories.

Each way is a function of (seed, its state), and the state is a JSON table: restoring it and going on gives the draws of
a run that never stopped. Which of the sampled groups are kept: `select.py`; which come back later: `replay.py`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float64, Shaped

from jaxrl_lm.data import batch_indices, permutation


class PromptSampling(Protocol):
    """What the loop asks of a way of drawing prompts."""

    def draw(self, step: int, count: int) -> list[int]:
        """Dataset indices of the next `count` prompts. Several draws of one step are one draw in parts."""

    def observe(
        self,
        indices: Sequence[int],
        solve_rates: Shaped[np.ndarray, " P"],
        mean_abs_advantages: Shaped[np.ndarray, " P"],
    ) -> None:
        """Takes in what the groups of `indices` gave, dropped ones included; NaN = nothing could be judged."""

    def state(self) -> dict[str, Any]:
        """A JSON table; `load` of it goes on from here, draw for draw."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where the state is one of another way of sampling or another dataset."""


# --- the dataset's order --------------------------------------------------------------------------------------------


class Shuffled:
    """Every prompt once an epoch, in the order of `data.batch_indices`; nothing is learned from the outcomes."""

    name = "shuffled"

    def __init__(self, count: int, seed: int):
        _check_size(count, seed)
        self._count, self._seed, self._position = count, seed, 0

    def draw(self, step: int, count: int) -> list[int]:
        """The next `count` prompts of the order, whatever the step."""
        found = batch_indices(self._count, seed=self._seed, position=self._position, count=count)
        self._position += count
        return found.tolist()

    def observe(
        self,
        indices: Sequence[int],
        solve_rates: Shaped[np.ndarray, " P"],
        mean_abs_advantages: Shaped[np.ndarray, " P"],
    ) -> None:
        """Changes nothing."""

    def state(self) -> dict[str, Any]:
        """The position, which is all there is."""
        return {"kind": self.name, "count": self._count, "position": self._position}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`. Raises ValueError where it is not of this way of sampling and this many prompts."""
        _check_state(state, self.name, count=self._count)
        self._position = state["position"]


# --- curriculum -----------------------------------------------------------------------------------------------------


class SolveRates:
    """The solve-rate table: for each prompt a moving average p, how often it was seen, and whether it was ever solved.

    p ← decay · p + (1 − decay) · rate, from p = rate at the first sight. Any way of sampling can be run beside one.
    """

    def __init__(self, count: int, *, decay: float = 0.9):
        if not 0 <= decay < 1:
            raise ValueError(f"prompt_sampling: decay={decay}: must be in [0, 1)")
        self._decay = decay
        self.rates = np.zeros(count)  # means nothing where `seen` is 0
        self.seen = np.zeros(count, np.int64)
        self.solved = np.zeros(count, bool)

    def observe(self, indices: Sequence[int], solve_rates: Shaped[np.ndarray, " P"]) -> None:
        """Takes in the share of right completions of some prompts, in this order; NaN is passed over.

        Raises ValueError for a rate outside [0, 1], an index outside the dataset, or numbers that do not match.
        """
        rates = _outcomes(indices, solve_rates, len(self.rates))
        if ((rates < 0) | (rates > 1)).any():
            raise ValueError(f"prompt_sampling: solve rates must be shares, in [0, 1]; got {rates.tolist()}")
        for index, rate in zip(indices, rates.tolist(), strict=True):
            if math.isnan(rate):
                continue
            before = self.rates[index]
            self.rates[index] = self._decay * before + (1 - self._decay) * rate if self.seen[index] else rate
            self.seen[index] += 1
            self.solved[index] |= rate > 0

    def never_solved(self, index: int) -> bool:
        """Whether a prompt was sampled and no completion of it was ever right."""
        return bool(self.seen[index] and not self.solved[index])

    def state(self) -> dict[str, Any]:
        """The rows of the prompts seen, as lists."""
        indices = np.flatnonzero(self.seen)
        columns = {"rates": self.rates, "seen": self.seen, "solved": self.solved}
        rows = {name: column[indices].tolist() for name, column in columns.items()}
        return {"count": len(self.rates), "indices": indices.tolist(), **rows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Replaces the table. Raises ValueError where the state's dataset has another number of prompts."""
        if state["count"] != len(self.rates):
            raise ValueError(
                f"prompt_sampling: the saved solve rates are of {state['count']} prompts, the dataset has "
                f"{len(self.rates)}: restore the dataset, or start a new run"
            )
        for name in ("rates", "seen", "solved"):
            column = getattr(self, name)
            column[:] = 0
            column[state["indices"]] = state[name]


def never_solved_share(table: SolveRates) -> float:
    """The share of the prompts seen so far of which no completion was ever right; NaN before the first."""
    seen = table.seen > 0
    return float((seen & ~table.solved).sum() / seen.sum()) if seen.any() else math.nan


class Curriculum:
    """Prompts that are solved about half of the time come more often; `table` is its solve-rate table.

    Drawn without replacement within a step, with probability proportional to

        w_i = p_i (1 − p_i) / 0.25 + floor    seen before, with p_i of the table
        w_i = 1                               not yet seen

    Source: sampling for learnability, p (1 − p): Foster et al. (2025), "Learning to Reason at the Frontier of
    Learnability". Departs: p is a moving average over the training groups, where the paper measures it with further
    rollouts; `floor` keeps in the draw what was too hard or is done, as both may change.

    A step that asks for more prompts than there are gets all of them before any twice. Raises ValueError for a floor
    that is not positive, a decay outside [0, 1), no prompts or a negative seed.
    """

    name = "curriculum"

    def __init__(self, count: int, seed: int, *, floor: float = 0.1, decay: float = 0.9):
        _check_size(count, seed)
        if not (floor > 0 and math.isfinite(floor)):
            raise ValueError(f"prompt_sampling='curriculum': floor={floor}: must be positive, or some never come back")
        self._count, self._seed, self._floor = count, seed, floor
        self.table = SolveRates(count, decay=decay)
        self._step: int | None = None
        self._races = 0  # how many were begun
        self._drawn: list[int] = []  # in the race under way

    def weights(self) -> Float64[np.ndarray, " count"]:
        """w of every prompt."""
        p = self.table.rates
        return np.where(self.table.seen > 0, p * (1 - p) / 0.25 + self._floor, 1.0)

    def draw(self, step: int, count: int) -> list[int]:
        """The next `count` prompts; those of earlier draws of the same step are left out.

        The order of arrival in a race of exponential clocks with rates w is that of draws without replacement
        proportional to w (Efraimidis and Spirakis, 2006), and what is left of a race is again one.
        """
        if count < 0:
            raise ValueError(f"prompt_sampling: count={count}: may not be negative")
        if step != self._step:
            self._step, self._drawn = step, []
            self._races += 1
        found: list[int] = []
        while len(found) < count:
            if len(self._drawn) == self._count:
                self._drawn = []
                self._races += 1
            arrival = -np.log1p(-_uniforms([self._seed, self._races], 0, self._count)) / self.weights()
            arrival[self._drawn] = np.inf
            here = min(count - len(found), self._count - len(self._drawn))
            chosen = np.argsort(arrival, kind="stable")[:here].tolist()
            self._drawn += chosen
            found += chosen
        return found

    def observe(
        self,
        indices: Sequence[int],
        solve_rates: Shaped[np.ndarray, " P"],
        mean_abs_advantages: Shaped[np.ndarray, " P"],
    ) -> None:
        """Takes the solve rates into the table; advantages are not looked at."""
        self.table.observe(indices, solve_rates)

    def state(self) -> dict[str, Any]:
        """The table, and where the race of the step stands."""
        place = {"step": self._step, "races": self._races, "drawn": list(self._drawn)}
        return {"kind": self.name, "count": self._count, "table": self.table.state(), **place}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`. Raises ValueError where it is not of this way of sampling and this many prompts."""
        _check_state(state, self.name, count=self._count)
        self.table.load(state["table"])
        self._step, self._races, self._drawn = state["step"], state["races"], list(state["drawn"])


# --- bandit over categories -----------------------------------------------------------------------------------------


def categories_of(rows: Sequence[Mapping[str, Any]], column: str) -> list[str]:
    """Each row's category, as text. Raises ValueError naming the row (0-based) that has none."""
    for k, row in enumerate(rows):
        if row.get(column) is None:
            columns = sorted(str(key) for key, value in row.items() if value is not None)
            raise ValueError(f"category_column={column!r}: row {k} has no such value; its columns are {columns}")
    return [str(row[column]) for row in rows]


class CategoryBandit:
    """A softmax bandit over categories of prompts, for the ones whose groups have the largest advantages.

    For each prompt a category c is drawn with probability softmax(Q / temperature)_c, then the next prompt of c in the
    shuffled order of c, which begins anew when it has ended. Q_c begins at 0, and after each step in which c came up

        Q_c ← Q_c + step · (mean over its groups of mean |A| − Q_c)

    Source: Self-Evolving Curriculum (Chen et al., 2025), which calls the update TD(0), with step 0.5 and temperatures
    from 0.2 to 1 in its runs. Departs: prompts of a category take turns rather than being drawn at random.

    `categories` holds one a prompt. Raises ValueError for no prompts, a negative seed, a temperature that is not
    positive or a step outside (0, 1].
    """

    name = "bandit"

    def __init__(self, categories: Sequence[str], seed: int, *, temperature: float = 1.0, step: float = 0.5):
        _check_size(len(categories), seed)
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"prompt_sampling='bandit': temperature={temperature}: must be positive")
        if not 0 < step <= 1:
            raise ValueError(f"prompt_sampling='bandit': step={step}: must be in (0, 1]")
        self._seed, self._temperature, self._size_of_step = seed, temperature, step
        self.categories = list(dict.fromkeys(categories))  # in the order of the dataset, not of a hash
        numbers = {category: c for c, category in enumerate(self.categories)}
        self._category_of = np.array([numbers[category] for category in categories])
        self._members = [np.flatnonzero(self._category_of == c) for c in range(len(self.categories))]
        self.values = np.zeros(len(self.categories))
        self._positions = [0] * len(self.categories)
        self._draws = 0
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # category -> (epoch, its order): recomputed, not saved

    def probabilities(self) -> Float64[np.ndarray, " C"]:
        """softmax(Q / temperature), in the order of `categories`."""
        raised = np.exp((self.values - self.values.max()) / self._temperature)
        return raised / raised.sum()

    def draw(self, step: int, count: int) -> list[int]:
        """The next `count` prompts, whatever the step. One comes twice where its category has run out between."""
        if count < 0:
            raise ValueError(f"prompt_sampling: count={count}: may not be negative")
        uniforms = _uniforms([self._seed, 0, 1], self._draws, count)  # of a stream that no permutation reads
        self._draws += count
        edges = np.cumsum(self.probabilities())
        # The last edge may lie a rounding below 1.
        chosen = np.minimum(np.searchsorted(edges, uniforms, side="right"), len(edges) - 1)
        return [self._next(c) for c in chosen.tolist()]

    def _next(self, c: int) -> int:
        members = self._members[c]
        epoch, place = divmod(self._positions[c], len(members))
        if self._orders.get(c, (None,))[0] != epoch:
            number = epoch * len(self.categories) + c  # so that categories of one size are shuffled differently
            self._orders[c] = epoch, members[permutation(len(members), seed=self._seed, epoch=number)]
        self._positions[c] += 1
        return int(self._orders[c][1][place])

    def observe(
        self,
        indices: Sequence[int],
        solve_rates: Shaped[np.ndarray, " P"],
        mean_abs_advantages: Shaped[np.ndarray, " P"],
    ) -> None:
        """One update of each category that came up; solve rates are not looked at, NaN is passed over.

        Raises ValueError for a negative or infinite value, an index outside the dataset, or numbers that do not match.
        """
        found = _outcomes(indices, mean_abs_advantages, len(self._category_of))
        if ((found < 0) | np.isinf(found)).any():
            raise ValueError(f"prompt_sampling: mean |advantage| must be finite and not negative; got {found.tolist()}")
        categories = self._category_of[np.asarray(indices, np.int64)]
        for c in range(len(self.categories)):
            mine = found[(categories == c) & ~np.isnan(found)]
            if len(mine):
                self.values[c] += self._size_of_step * (mine.mean() - self.values[c])

    def state(self) -> dict[str, Any]:
        """Values and positions of the categories, by name, and the number of draws."""
        table = {
            "categories": list(self.categories),
            "values": self.values.tolist(),
            "positions": list(self._positions),
        }
        return {"kind": self.name, "count": len(self._category_of), "draws": self._draws, **table}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`. Raises ValueError where it is not of this way of sampling and these categories."""
        _check_state(state, self.name, count=len(self._category_of))
        if state["categories"] != self.categories:
            raise ValueError(
                f"category_column: the saved state has the categories {state['categories']}, the dataset "
                f"{self.categories}: restore the column, or start a new run"
            )
        self.values = np.array(state["values"], np.float64)
        self._positions, self._draws = list(state["positions"]), state["draws"]


# --- shared ---------------------------------------------------------------------------------------------------------


def _uniforms(entropy: Sequence[int], start: int, count: int) -> Float64[np.ndarray, " count"]:
    """Numbers start … start + count − 1 of a stream of uniforms in [0, 1).

    Made of raw draws, as in `data.permutation`: these stay the same under a newer numpy.
    """
    raw = np.random.PCG64(np.random.SeedSequence(entropy)).advance(start).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _check_size(count: int, seed: int) -> None:
    if count < 1 or seed < 0:
        raise ValueError(f"prompt_sampling: {count} prompts, seed={seed}: needs a prompt, and a seed not below 0")


def _check_state(state: Mapping[str, Any], name: str, *, count: int) -> None:
    if state.get("kind") != name:
        raise ValueError(
            f"prompt_sampling={name!r}: the saved state is one of prompt_sampling={state.get('kind')!r}: restore the "
            "option, or start a new run"
        )
    if state["count"] != count:
        raise ValueError(
            f"prompt_sampling={name!r}: the saved state is of {state['count']} prompts, the dataset has {count}: restore "
            "the dataset, or start a new run"
        )


def _outcomes(indices: Sequence[int], values: Shaped[np.ndarray, " P"], count: int) -> Float64[np.ndarray, " P"]:
    """The values of some prompts in float64, checked to be one each, of prompts that exist."""
    if len(indices) != len(values):
        raise ValueError(f"prompt_sampling: {len(values)} outcomes for {len(indices)} prompts")
    outside = [index for index in indices if not 0 <= index < count]
    if outside:
        raise ValueError(
            f"prompt_sampling: outcomes of prompts {outside}, which are not among the {count} of the dataset"
        )
    return np.asarray(values, np.float64)
