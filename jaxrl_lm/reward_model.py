"""Reward models as reward functions: the option reward_model:DIRECTORY, which makes a run RLHF.

A reward model is a Hugging Face *ForSequenceClassification directory with one label (`models/heads.py`). It lies frozen
on the run's mesh and reads text, with its own tokenizer, so it may be of another family than the policy. How reward
functions are called: `rewards/protocol.py`.
"""

import difflib
import itertools
import warnings
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

import jax

from jaxrl_lm.data import pad_rows
from jaxrl_lm.models import load_reward_model
from jaxrl_lm.sharding import Plan
from jaxrl_lm.steps import compile_row_scores

PREFIX = "reward_model:"
SHORTEST = 64  # tokens that the shortest rows are padded to


def open_reward_models(*lists: Sequence[Any], plan: Plan, dtype: str | None) -> list[list[Any]]:
    """The lists of reward options with a `RewardModel` in place of each "reward_model:…"; one that stands twice is
    loaded once. Raises as `RewardModel`.
    """
    named = dict.fromkeys(
        spec for specs in lists for spec in specs if isinstance(spec, str) and spec.startswith(PREFIX)
    )
    opened = {spec: RewardModel(spec, plan=plan, dtype=dtype) for spec in named}
    return [[opened.get(spec, spec) if isinstance(spec, str) else spec for spec in specs] for specs in lists]


class RewardModel:
    """A reward function: a reward model's score of each row's prompt with its completion.

    `option` is "reward_model:DIRECTORY", or a hub id in place of the directory, with settings after a question mark:
    `max_length` in the reward model's tokens (None: what its config and tokenizer allow), `batch_size` (rows scored at
    once, rounded up to divide over the mesh) and `name` (in metrics). `dtype` is that of weights and computation; None:
    bfloat16 on accelerators, float32 on CPU.

    Raises ValueError or FileNotFoundError, naming option and directory, for what `load_reward_model` refuses, a model
    that the mesh does not divide, and unknown or wrong settings.
    """

    def __init__(self, option: str, *, plan: Plan, dtype: str | None = None):
        directory, given = _parse(option)
        dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
        try:
            loaded = load_reward_model(directory, plan=plan, dtype=dtype)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"reward={option!r}: {error}") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"reward={option!r}: {error}") from error
        self._model, self._weights, self._tokenizer = loaded
        most = self._model.config.max_position_embeddings
        self.max_length = given.get("max_length", min(most, self._tokenizer.model_max_length))
        if self.max_length > most:
            raise ValueError(f"reward={option!r}: max_length={self.max_length}, and the model reads {most} tokens")
        self.option, self.plan, self.cut = option, plan, 0  # `cut` counts the rows that were longer than max_length
        self.rows = -(-given.get("batch_size", 16) // plan.batch_ways) * plan.batch_ways
        self.__name__ = given.get("name", "reward_model")  # by which a reward function goes
        self._scores = compile_row_scores(self._model, plan)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """The scores. Equal rows of a call are scored once, so that their scores are the same to the last bit.

        Raises ValueError for a chat where the tokenizer has no chat template, and for a row without a token.
        """
        whole = [self.encode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        self._count(sum(len(ids) > self.max_length for ids in whole), len(whole))
        rows = [tuple(self._cut_start(ids)) for ids in whole]
        length = lambda ids: min(max(SHORTEST, 1 << (len(ids) - 1).bit_length()), self.max_length)
        scores: dict[tuple[int, ...], float] = {}
        for padded, same in itertools.groupby(sorted(set(rows), key=lambda ids: (len(ids), ids)), key=length):
            while part := list(itertools.islice(same, self.rows)):
                scores |= zip(part, self._score(part, padded), strict=True)
        return [scores[row] for row in rows]

    def encode(self, prompt: Any, completion: Any) -> list[int]:
        """The reward model's tokens of a row.

        Messages: its chat template's text of prompt and completion, which holds the special tokens. Strings: by the
        tokenizer's own rule for special tokens, as one text, with one BOS where the text brings its own.
        """
        if isinstance(prompt, str):
            ids, bos = list(self._tokenizer(prompt + completion)["input_ids"]), self._tokenizer.bos_token_id
            ids = ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
        elif self._tokenizer.chat_template is None:
            raise ValueError(
                f"reward={self.option!r}: the prompt is a chat, and the reward model's tokenizer has no chat template; "
                "give plain string prompts, or a reward model with a template"
            )
        else:
            text = self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
            ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise ValueError(f"reward={self.option!r}: prompt and completion have no token")
        return ids

    def _cut_start(self, ids: list[int]) -> list[int]:
        """The last `max_length` tokens, the first of them replaced by the BOS if the row began with it."""
        if len(ids) <= self.max_length:
            return ids
        kept = ids[-self.max_length :]
        return [ids[0], *kept[1:]] if ids[0] == self._tokenizer.bos_token_id else kept

    def _count(self, cut: int, count: int) -> None:
        if cut and not self.cut:
            warnings.warn(
                f"reward={self.option!r}: {cut} of {count} rows are longer than max_length={self.max_length} and are "
                "scored without their beginning; this is said once",
                stacklevel=3,
            )
        self.cut += cut

    def _score(self, rows: Sequence[tuple[int, ...]], padded: int) -> list[float]:
        """One call of the compiled program, whose shape knows only the padded length."""
        filled = [*rows, *[()] * (self.rows - len(rows))]
        tokens, segment_ids, _ = pad_rows([((), ids) for ids in filled], 0, padded, 0)
        scores = self._scores(self._weights, *jax.device_put((tokens, segment_ids), self.plan.rows))
        return jax.device_get(scores)[: len(rows)].tolist()


def _parse(option: str) -> tuple[str, dict[str, Any]]:
    """The directory and the settings of an option."""
    directory, _, query = option.removeprefix(PREFIX).partition("?")
    if not directory:
        raise ValueError(f"reward={option!r}: names no reward model; give reward_model:DIRECTORY, or a hub id")
    given: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        known = ("max_length", "batch_size", "name")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"reward={option!r}: unknown setting {name!r}; did you mean {near!r}?")
        if name != "name" and not (value.isdecimal() and int(value) > 0):
            raise ValueError(f"reward={option!r}: {name}={value}: must be an integer of at least 1")
        given[name] = value if name == "name" else int(value)
    return directory, given
