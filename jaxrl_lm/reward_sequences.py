"""Rows to token sequences for what reads text and scores it: comparisons, outcomes and steps, for reward models.

A reward model reads prompt and completion as one text (`reward_ids`), a process reward model reads step by step. The mask
marks the tokens where a score is read. Types and cuts are those of `example.py`, arrays those of `sequences.py`.
"""

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl_lm.data import Row, validate
from jaxrl_lm.encode import _messages, _prompt_ids
from jaxrl_lm.example import Example, Examples, LongRows, collect
from jaxrl_lm.sequences import SIDES, chat_text, one_text, pair_columns, pair_of, shared_length

# --- whole texts ----------------------------------------------------------------------------------------------------


def reward_ids(
    prompt: Any, completion: Any, tokenizer: Any, *, append_eos: bool, where: str = "reward model"
) -> list[int]:
    """The tokens that a reward model reads of a prompt with its completion.

    Strings: prompt + completion as one text, by the tokenizer's own rule for special tokens, with one BOS where the
    text brings its own; `append_eos` ends it with tokenizer.eos_token_id unless it ends so already. Messages: the chat
    template's text of both, which holds the special tokens; nothing is appended.

    Raises ValueError, beginning with `where`, for malformed messages, a chat without a chat template, an eos that the
    tokenizer does not have, and no token at all.
    """
    return _read_whole(prompt, completion, tokenizer, append_eos, where)[1]


def encode_comparisons(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_length: int,
    append_eos: bool,
    long_rows: LongRows = "keep_start",
    name: str,
) -> Examples:
    """Two sides a row, chosen and rejected, with the tokens of `reward_ids`; the mask marks the last one.

    Columns as in `encode_pairs`, but the response to a chat may have several messages, the last an assistant's. A cut
    takes the end, which here is where the score is read: of a long row, training compares what the limit lets see. (A
    model that scores text cuts the beginning.) A side that would have nothing but the prompt is `no_response`.

    Raises ValueError as `encode_pairs` and `reward_ids`.
    """
    validate(rows, pair_columns(rows), name=name)

    def encode(row: Row, where: str) -> tuple[Example, ...]:
        prompt, *responses = pair_of(row, where)
        return tuple(
            _whole_example(prompt, response, tokenizer, append_eos, where, column)
            for column, response in zip(SIDES, responses, strict=True)
        )

    return collect(rows, encode, max_length=max_length, long_rows=long_rows, last_only=True, name=name)


def encode_outcomes(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_length: int,
    append_eos: bool,
    long_rows: LongRows = "keep_start",
    per_token: bool,
    name: str,
) -> Examples:
    """One side a row of `prompt`, `completion` and `label` (a bool, or a number from 0 to 1); tokens of `reward_ids`.

    Mask and label stand on the last token, or with `per_token` on every token with text of the completion, and its eos.
    For a chat, the completion is where the text departs from that of the prompt with its generation prompt. Cuts as in
    `encode_comparisons`; what is left of a row has the label of the whole.

    Raises ValueError with the row for missing columns, a label outside [0, 1], and as `reward_ids`.
    """
    validate(rows, ("prompt", "completion", "label"), name=name)

    def encode(row: Row, where: str) -> tuple[Example, ...]:
        label = _unit(row["label"], f"{where}: 'label'")
        example = _whole_example(row["prompt"], row["completion"], tokenizer, append_eos, where, "completion")
        return (example._replace(labels=[label if read else 0.0 for read in example.mask]),)

    return collect(rows, encode, max_length=max_length, long_rows=long_rows, last_only=not per_token, name=name)


def _read_whole(
    prompt: Any, completion: Any, tokenizer: Any, append_eos: bool, where: str, column: str = "completion"
) -> tuple[str, list[int], list[int]]:
    """The text, its tokens, and for each token where in the text it ends."""
    plain = isinstance(prompt, str)
    text = (
        prompt + one_text(completion, column, where)
        if plain
        else chat_text(_whole_chat(prompt, completion, column, where), tokenizer, where)
    )
    encoded = tokenizer(text, add_special_tokens=plain, return_offsets_mapping=True)
    ids, ends = list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if plain and bos is not None and ids[:2] == [bos, bos]:
        ids, ends = ids[1:], ends[1:]
    if not ids:
        raise ValueError(f"{where}: prompt and {column} have no token")
    if plain and append_eos:
        if eos is None:
            raise ValueError(f"{where}: append_eos, and the tokenizer has no end-of-sequence token")
        if ids[-1] != eos:
            ids, ends = [*ids, eos], [*ends, 0]
        ends[-1] = len(text) + 1  # also of an eos that the tokenizer's rule put there
    return text, ids, ends


def _whole_chat(prompt: Any, completion: Any, column: str, where: str) -> list[dict[str, Any]]:
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    messages, answer = _messages(prompt, "prompt", where), _messages(answer, column, where)
    if answer[-1]["role"] != "assistant":
        raise ValueError(f"{where}: the last message of {column!r} is not the assistant's")
    if answer[: len(messages)] == messages:
        raise ValueError(f"{where}: {column!r} begins with the messages of 'prompt'; take them out of one of the two")
    return [*messages, *answer]


def _whole_example(prompt: Any, completion: Any, tokenizer: Any, append_eos: bool, where: str, column: str) -> Example:
    """The mask marks the completion: everything from the first token with a character of it."""
    if isinstance(prompt, str) and not prompt:
        raise ValueError(f"{where}: the prompt is empty")
    text, ids, ends = _read_whole(prompt, completion, tokenizer, append_eos, where, column)
    if isinstance(prompt, str):
        begin = len(prompt)
    else:
        begin = shared_length(text, chat_text(prompt, tokenizer, where, add_generation_prompt=True))
    first = next((index for index, end in enumerate(ends) if end > begin), len(ids))
    return Example(ids, [index >= first for index in range(len(ids))])


# --- steps ----------------------------------------------------------------------------------------------------------


def encode_steps(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_length: int,
    step_separator: str,
    long_rows: LongRows = "keep_start",
    name: str,
) -> Examples:
    """One side a row of `prompt`, `completions` (the steps) and `labels`, one of each step: a bool, or 0 to 1.

    Tokens are the prompt's, as in `encode.encode_prompts`, then each step's and the separator's, each tokenised on its
    own as in TRL's PRMTrainer, so that a step's tokens do not depend on its neighbours. Mask and label stand on the last
    token of step and separator. A cut keeps the labels that are left; a row left with none is `no_response`.

    Raises ValueError with the row for missing columns, steps that are not strings or have no token, another number of
    labels than of steps, a label outside [0, 1] (with its step), and where no row is left.
    """
    validate(rows, ("prompt", "completions", "labels"), name=name)
    separator = list(tokenizer(step_separator, add_special_tokens=False)["input_ids"])

    def encode(row: Row, where: str) -> tuple[Example, ...]:
        _, ids = _prompt_ids(row["prompt"], tokenizer, None, None, where)
        mask, labels = [False] * len(ids), [0.0] * len(ids)
        for number, (step, label) in enumerate(_steps(row, where)):
            tokens = [*tokenizer(step, add_special_tokens=False)["input_ids"], *separator]
            if not tokens:
                raise ValueError(f"{where}: step {number} of 'completions' has no token")
            ids = [*ids, *tokens]
            mask += [*[False] * (len(tokens) - 1), True]
            labels += [*[0.0] * (len(tokens) - 1), _unit(label, f"{where}: the label of step {number}")]
        return (Example(ids, mask, labels=labels),)

    return collect(rows, encode, max_length=max_length, long_rows=long_rows, name=name)


def _steps(row: Row, where: str) -> Iterable[tuple[str, Any]]:
    steps, labels = row["completions"], row["labels"]
    for column, value in (("completions", steps), ("labels", labels)):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"{where}: {column!r} is of type {type(value).__name__}, not a list")
    if len(steps) != len(labels) or not steps:
        raise ValueError(
            f"{where}: 'labels' has {len(labels)} entries and 'completions' {len(steps)} steps: each step needs its "
            "label, and a row at least one step"
        )
    for number, step in enumerate(steps):
        if not isinstance(step, str):
            raise ValueError(f"{where}: step {number} of 'completions' is of type {type(step).__name__}, not a string")
    return zip(steps, labels, strict=True)


def _unit(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real | np.bool_) or not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"{what} is {value!r}: it must be true, false, or a number from 0 to 1")
    return float(value)
