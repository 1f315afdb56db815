"""Tasks of the package reasoning-gym: rows to train on, and the reward that scores them with the task's own verifier.

The package is an extra: pip install 'jaxrl-lm[reasoning-gym]'. How the reward is called: `protocol.py`.
"""

import functools
import importlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_lm.rewards.arithmetic import text_of

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_rows(name: str, *, size: int, seed: int, **config: Any) -> list[dict[str, Any]]:
    """`size` rows of a reasoning-gym task: `prompt` (its text), `answer`, `data_source` (the task's name) and
    `reasoning_gym` (JSON text of the task, its options and the entry, which is what the reward reads).

    `config` are the task's own options. Raises ImportError without the package and ValueError for an unknown task.
    """
    dataset = _dataset(name, _to_json({"size": size, "seed": seed, **config}))
    rows = []
    for entry in dataset:
        held = _to_json({"name": name, "config": {"size": size, "seed": seed, **config}, "entry": entry})
        rows.append(
            {"prompt": entry["question"], "answer": entry["answer"], "data_source": name, "reasoning_gym": held}
        )
    return rows


def reasoning_gym(completions: Sequence[Any], reasoning_gym: Sequence[Any], **columns: Any) -> list[float | None]:
    """The task's own score of each completion, from 0 to 1; None for a row that has no `reasoning_gym` entry.

    The answer is what the last <answer>…</answer> holds, or else the whole completion, without outer white space. Some
    tasks give a small positive score to a wrong answer; that is theirs. Some verifiers raise on an answer of the wrong
    form: where the same verifier gives the entry's own answer full marks, such an answer scores 0 with a warning, and
    else the error stands.
    """
    scores: list[float | None] = []
    for completion, held in zip(completions, reasoning_gym, strict=True):
        if held is None:
            scores.append(None)
            continue
        text = text_of(completion)
        tagged = _ANSWER.findall(text)
        task = _from_json(held)
        dataset = _dataset(task["name"], _to_json(task["config"]))
        scores.append(_score(dataset, (tagged[-1] if tagged else text).strip(), task))
    return scores


def _score(dataset: Any, answer: str, task: Mapping[str, Any]) -> float:
    entry = task["entry"]
    try:
        return dataset.score_answer(answer, entry)
    except (ValueError, TypeError, LookupError, AttributeError, SyntaxError) as error:
        # prime_factorization calls int() on each part of whatever the model wrote. The verifier is known to be in order
        # only where it accepts the right answer; that, not the error's kind, is what makes the answer the wrong one.
        if entry["answer"] is None or dataset.score_answer(entry["answer"], entry) != 1.0:
            raise
        warnings.warn(
            f"reasoning_gym: the verifier of {task['name']!r} raises {type(error).__name__} on answers of the wrong "
            "form; they score 0",
            stacklevel=2,
        )
        return 0.0


@functools.lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> Any:
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError(
            "reasoning-gym tasks need the package reasoning-gym: pip install 'jaxrl-lm[reasoning-gym]'"
        ) from error
    return gym.create_dataset(name, **_from_json(config))


# Verifiers compare with the entry's own tuples and number keys, which JSON has not: they are marked.


def _to_json(value: Any) -> str:
    return json.dumps(_mark(value), ensure_ascii=False)


def _from_json(text: str) -> Any:
    return _unmark(json.loads(text))


def _mark(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"__tuple__": [_mark(item) for item in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not value.keys() & {"__tuple__", "__items__"}:
            return {key: _mark(item) for key, item in value.items()}
        return {"__items__": [[_mark(key), _mark(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [_mark(item) for item in value]
    return value


def _unmark(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmark(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(_unmark(item) for item in value["__tuple__"])
        if value.keys() == {"__items__"}:
            return {_unmark(key): _unmark(item) for key, item in value["__items__"]}
        return {key: _unmark(item) for key, item in value.items()}
    return value
