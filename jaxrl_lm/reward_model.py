"""Reward models as reward functions: the option reward_model:DIRECTORY, which makes a run RLHF.

A reward model is a Hugging Face *ForSequenceClassification directory with one label, or a directory of several, an
ensemble (`models/classifiers.py`). It lies frozen on the run's mesh and reads text, with its own tokenizer, so it may be
of another family than the policy. How reward functions are called: `rewards/protocol.py`. Scores of steps:
`process_model.py`.
"""

import contextlib
import difflib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args
from urllib.parse import parse_qsl

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import algos
from jaxrl_lm.algos.reward_losses import Ensemble
from jaxrl_lm.data import pad_rows
from jaxrl_lm.distributed import gather, place
from jaxrl_lm.models import classifier_settings, load_reward_models
from jaxrl_lm.placement import tree_bytes
from jaxrl_lm.reward_sequences import reward_ids
from jaxrl_lm.rewards import Everywhere
from jaxrl_lm.sharding import Plan, move, on_host
from jaxrl_lm.steps import compile_row_scores

PREFIX = "reward_model:"
SHORTEST = 64  # tokens that the shortest rows are padded to

R = TypeVar("R")


def open_reward_models(*lists: Sequence[Any], plan: Plan, dtype: str | None, hosted: bool = False) -> list[list[Any]]:
    """The lists of reward options with a `RewardModel` in place of each "reward_model:…"; one that stands twice is
    loaded once. Raises as `RewardModel`.
    """
    named = dict.fromkeys(
        spec for specs in lists for spec in specs if isinstance(spec, str) and spec.startswith(PREFIX)
    )
    opened = {spec: RewardModel(spec, plan=plan, dtype=dtype, hosted=hosted) for spec in named}
    return [[opened.get(spec, spec) if isinstance(spec, str) else spec for spec in specs] for specs in lists]


class RewardModel(Everywhere):
    """A reward function: a reward model's score of each row's prompt with its completion.

    `option` is "reward_model:DIRECTORY", or a hub id in place of the directory, with settings after a question mark:
    `max_length` in the reward model's tokens (None: what its config and tokenizer allow), `batch_size` (rows scored at
    once, rounded up to divide over the mesh), `name` (in metrics), `sigmoid` (true: σ(score), the probability that an
    outcome reward model gives) and, for the members of an ensemble, `ensemble` (mean, min, pessimistic) with `k`
    (`algos.ensemble_reward`), of their scores or probabilities. `dtype` is that of weights and computation; None:
    bfloat16 on accelerators, float32 on CPU. `hosted`: the weights lie in host memory, and on the mesh during a call.

    Raises ValueError or FileNotFoundError, naming option and directory, for what `load_reward_models` refuses, a model
    that the mesh does not divide, and unknown, wrong or idle settings.
    """

    def __init__(self, option: str, *, plan: Plan, dtype: str | None = None, hosted: bool = False):
        self.where = f"reward={option!r}"
        directory, given = parse_option(option, prefix=PREFIX, settings=_SETTINGS, where=self.where)
        with naming(self.where):
            loaded = load_reward_models(directory, plan=plan, dtype=dtype or machine_dtype())
            self.append_eos = bool(classifier_settings(directory)["append_eos"])
        self._model, self._weights, self._tokenizer = loaded
        if self.append_eos and self._tokenizer.eos_token_id is None:
            raise ValueError(f"{self.where}: append_eos, and its tokenizer has no end-of-sequence token")
        self.option, self.plan, self.cut = option, plan, 0  # `cut` counts the rows that were longer than max_length
        self.members = self._weights["head"]["kernel"].shape[0]
        self._combine = _combination(given, self.members, self.where)
        self.sigmoid = given.get("sigmoid", False)
        self.max_length = longest(given, self._model, self._tokenizer, self.where)
        self.rows = rows_at_once(given, plan)
        self.__name__ = given.get("name", "reward_model")  # by which a reward function goes
        self._scores = compile_row_scores(self._model, plan, members=self.members)
        self.nbytes = tree_bytes(self._weights)
        self._weights, self._layouts = rested(self._weights, hosted=hosted)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """The scores. Equal rows of a call are scored once, so that their scores are the same to the last bit.

        Raises ValueError for a chat where the tokenizer has no chat template, for a row without a token, and for a
        score of any member that is not finite.
        """
        whole = [self.encode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        self._count(sum(len(ids) > self.max_length for ids in whole), len(whole))
        rows = [tuple(self._cut_start(ids)) for ids in whole]
        scores: dict[tuple[int, ...], float] = {}
        weights = move(self._weights, self._layouts)
        for part, padded in by_length(set(rows), len, longest=self.max_length, size=self.rows):
            scores |= zip(part, self._score(weights, part, padded), strict=True)
        for row, prompt, completion in zip(rows, prompts, completions, strict=True):
            if not math.isfinite(scores[row]):
                raise ValueError(
                    f"{self.where}: the score of {shown(prompt, completion)} is not a finite number; the model or its "
                    "dtype is at fault"
                )
        return [scores[row] for row in rows]

    def encode(self, prompt: Any, completion: Any) -> list[int]:
        """The reward model's tokens of a row, by `reward_ids`; with an eos if its config.json says append_eos.

        A completion that was cut off before its end gets that eos too: the text does not tell.
        """
        return reward_ids(prompt, completion, self._tokenizer, append_eos=self.append_eos, where=self.where)

    def _cut_start(self, ids: list[int]) -> list[int]:
        """The last `max_length` tokens, the first of them replaced by the BOS if the row began with it."""
        if len(ids) <= self.max_length:
            return ids
        kept = ids[-self.max_length :]
        return [ids[0], *kept[1:]] if ids[0] == self._tokenizer.bos_token_id else kept

    def _count(self, cut: int, count: int) -> None:
        if cut and not self.cut:
            warnings.warn(
                f"{self.where}: {cut} of {count} rows are longer than max_length={self.max_length} and are "
                "scored without their beginning; this is said once",
                stacklevel=3,
            )
        self.cut += cut

    def _score(self, weights: Any, rows: Sequence[tuple[int, ...]], padded: int) -> list[float]:
        """One call of the compiled program, whose shape knows only the padded length; NaN where a member's is not finite.

        So an infinity cannot hide behind the min of an ensemble, nor behind σ.
        """
        filled = [*rows, *[()] * (self.rows - len(rows))]
        tokens, segment_ids, _ = pad_rows([((), ids) for ids in filled], 0, padded, 0)
        scores = gather(self._scores(weights, place(tokens, self.plan.rows), place(segment_ids, self.plan.rows)))
        combined = self._combine(jax.nn.sigmoid(scores) if self.sigmoid else jnp.asarray(scores))
        return np.where(np.isfinite(scores).all(0), combined, np.nan)[: len(rows)].tolist()


def rested(weights: Any, *, hosted: bool) -> tuple[Any, Any]:
    """The weights of a model that scores as they lie between calls, in host memory if `hosted`, and their layouts on the
    mesh.
    """
    layouts = jax.tree.map(lambda leaf: leaf.sharding, weights)
    return (move(weights, on_host(layouts)) if hosted else weights), layouts


def _combination(given: dict[str, Any], members: int, where: str) -> Callable[[jax.Array], jax.Array]:
    """[K, N] -> [N], as the settings say."""
    if "ensemble" in given and members == 1:
        raise ValueError(f"{where}: ensemble={given['ensemble']} has no effect: the directory holds one reward model")
    how = given.get("ensemble", "mean")
    if "k" in given and how != "pessimistic":
        raise ValueError(f"{where}: k={given['k']} has no effect without ensemble=pessimistic")
    return functools.partial(algos.ensemble_reward, how=how, k=given.get("k", 1.0))


# --- options of models that score, and their batches ------------------------------------------------------------------


def positive(value: str) -> int:
    """An integer setting."""
    if not (value.isdecimal() and int(value) > 0):
        raise ValueError("must be an integer of at least 1")
    return int(value)


def _not_negative(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError("must be a number of at least 0")
    return number


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value

    return read


_SETTINGS: dict[str, Callable[[str], Any]] = {
    "max_length": positive,
    "batch_size": positive,
    "name": str,
    "ensemble": _one_of(*get_args(Ensemble)),
    "k": _not_negative,
    "sigmoid": lambda value: _one_of("true", "false")(value) == "true",
}


def parse_option(
    option: str, *, prefix: str, settings: Mapping[str, Callable[[str], Any]], where: str
) -> tuple[str, dict[str, Any]]:
    """The directory and the read settings of "prefix:DIRECTORY?setting=value&…", which are written as in a URL's query.

    Raises ValueError, beginning with `where`, for no directory and for unknown or wrong settings.
    """
    directory, _, query = option.removeprefix(prefix).partition("?")
    if not directory:
        raise ValueError(f"{where}: names no reward model; give {prefix}DIRECTORY, or a hub id")
    given: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in settings:
            near = difflib.get_close_matches(name, settings, n=1, cutoff=0.0)[0]
            raise ValueError(f"{where}: unknown setting {name!r}; did you mean {near!r}?")
        try:
            given[name] = settings[name](value)
        except ValueError as error:
            raise ValueError(f"{where}: {name}={value}: {error}") from error
    return directory, given


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Errors of loading a model get the option before them."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: {error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def machine_dtype() -> str:
    """The dtype of a model that scores, where none is asked for."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def longest(given: Mapping[str, Any], model: Any, tokenizer: Any, where: str) -> int:
    """The most tokens of a row. Raises ValueError for more than the model reads."""
    most = model.config.max_position_embeddings
    length = given.get("max_length", min(most, tokenizer.model_max_length))
    if length > most:
        raise ValueError(f"{where}: max_length={length}, and the model reads {most} tokens")
    return length


def rows_at_once(given: Mapping[str, Any], plan: Plan) -> int:
    """The batch size, rounded up to divide over the mesh."""
    return -(-given.get("batch_size", 16) // plan.batch_ways) * plan.batch_ways


def by_length(
    rows: Iterable[R], length_of: Callable[[R], int], *, longest: int, size: int
) -> Iterator[tuple[list[R], int]]:
    """The rows from short to long, at most `size` at once, with the length that they are padded to.

    That is a power of two from SHORTEST up, or `longest`: few lengths, for each compiles a program.
    """
    padded = lambda row: min(max(SHORTEST, 1 << (length_of(row) - 1).bit_length()), longest)
    for length, same in itertools.groupby(sorted(rows, key=lambda row: (length_of(row), row)), key=padded):
        while part := list(itertools.islice(same, size)):
            yield part, length


def shown(prompt: Any, completion: Any) -> str:
    """A row by its beginnings. Without its number: the caller finds it as the row that raises the same message alone."""
    text = lambda given: given if isinstance(given, str) else given[-1]["content"]
    short = lambda given: repr(text(given)[:60]) + ("…" if len(text(given)) > 60 else "")
    return f"the row with prompt {short(prompt)} and completion {short(completion)}"
