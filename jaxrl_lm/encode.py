"""Rows to token ids: chat templates, prompt templates, the rule for long prompts, supervised pairs.

A prompt is a string, or a list of {"role", "content"} messages that the tokenizer's chat template turns into text. A
BOS comes from exactly one place: from the chat template, or from the tokenizer's own rule for plain strings. Rows are
read by `data.py`, which also pads what comes out of here. Next to read: `rewards/protocol.py`.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrl_lm.data import Row, validate
from jaxrl_lm.distributed import join_lists, split_lists, spread_rows

LongPrompts = Literal["drop", "keep_start", "keep_end", "error"]

PROMPT_TEMPLATES = {
    "think": (
        "Solve the following task. First work it out step by step between <think> and </think>, then give only the "
        "final answer between <answer> and </answer>.\n\nTask: {prompt}\n\nSolution: "
    ),
}
"""Prompt templates by name, for models without a chat template."""


class EncodedPrompts(NamedTuple):
    """The prompts that were kept, in order."""

    rows: list[Row]
    ids: list[list[int]]
    texts: list[str]  # the exact text that was tokenised, before a cut
    dropped: int  # longer than the limit, left out
    cut: int  # longer than the limit, cut


class EncodedPairs(NamedTuple):
    """The prompt-completion rows that were kept, in order."""

    rows: list[Row]
    pairs: list[tuple[list[int], list[int]]]  # prompt ids, completion ids with their one eos
    dropped: int  # longer than the limit, left out


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: Any,  # a transformers PreTrainedTokenizerFast
    *,
    max_prompt_length: int,
    long_prompts: LongPrompts = "drop",
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    name: str,
) -> EncodedPrompts:
    """Token ids and texts of the rows' prompts; no padding.

    `prompt_template` (a string with one {prompt}, or a name in PROMPT_TEMPLATES) is for plain string prompts,
    `system_prompt` for chat prompts that bring no system message. A prompt of more than `max_prompt_length` tokens is
    dropped, cut to its first or last tokens, or an error. `name` is what errors call the dataset.

    All processes call it together, with the same rows: each encodes its share of them.

    Raises ValueError with the row for a missing, malformed or empty prompt, for a chat prompt without a chat template,
    for an option that does not fit the kind of prompt, and where no prompt is left.
    """
    if max_prompt_length < 1:
        raise ValueError(f"max_prompt_length={max_prompt_length}: must be at least 1")
    if long_prompts not in ("drop", "keep_start", "keep_end", "error"):
        raise ValueError(f"long_prompts={long_prompts!r} is unknown: use drop, keep_start, keep_end or error")
    validate(rows, name=name)
    template = _template(prompt_template)

    def read(own: range) -> list[_Prompt]:
        found = []
        for index in own:
            where = f"{name}: row {index}"
            text, ids = _prompt_ids(rows[index]["prompt"], tokenizer, template, system_prompt, where)
            found.append(_within(text, ids, max_prompt_length, long_prompts, where))
        return found

    found = spread_rows(rows, read, to_arrays=_prompts_to_arrays, from_arrays=_prompts_from_arrays, name=name)
    kept = [(row, prompt) for row, prompt in zip(rows, found, strict=True) if prompt.ids]
    if not kept:
        raise ValueError(
            f"{name}: no prompt is left: all {len(rows)} have more than max_prompt_length={max_prompt_length} tokens; "
            "raise it, or set long_prompts to keep_start or keep_end"
        )
    return EncodedPrompts(
        [row for row, _ in kept],
        [prompt.ids for _, prompt in kept],
        [prompt.text for _, prompt in kept],
        dropped=len(rows) - len(kept),
        cut=sum(prompt.long for _, prompt in kept),
    )


def encode_completions(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_length: int,
    eos_token_id: int,
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    name: str,
) -> EncodedPairs:
    """Token ids of prompt-completion rows, for supervised training on the completions.

    The prompt is encoded as `encode_prompts` does it, and the completion on its own, so that the boundary is the one
    that sampling meets: the completion's tokens without special tokens of the tokenizer's rule, then one eos. A
    completion is a string or a list with one assistant message. Rows of more than `max_length` tokens are dropped.

    All processes call it together, with the same rows: each encodes its share of them.

    Raises ValueError with the row as `encode_prompts` does, for a malformed completion, for an eos inside of one, and
    where no row is left.
    """
    validate(rows, ("prompt", "completion"), name=name)
    template = _template(prompt_template)

    def read(own: range) -> list[tuple[list[int], list[int]]]:
        """Tokens of prompt and completion; none where the row is dropped."""
        found = []
        for index in own:
            where = f"{name}: row {index}"
            _, prompt_ids = _prompt_ids(rows[index]["prompt"], tokenizer, template, system_prompt, where)
            completion_ids = _completion_ids(rows[index]["completion"], tokenizer, eos_token_id, where)
            fits = len(prompt_ids) + len(completion_ids) <= max_length
            found.append((prompt_ids, completion_ids) if fits else ([], []))
        return found

    found = spread_rows(rows, read, to_arrays=_pairs_to_arrays, from_arrays=_pairs_from_arrays, name=name)
    kept = [index for index, (prompt_ids, _) in enumerate(found) if prompt_ids]
    if not kept:
        raise ValueError(f"{name}: no row is left: all {len(rows)} have more than max_length={max_length} tokens")
    return EncodedPairs([rows[index] for index in kept], [found[index] for index in kept], len(rows) - len(kept))


# --- what processes tell each other ---------------------------------------------------------------------------------


class _Prompt(NamedTuple):
    """A prompt under the rule for long ones."""

    text: str
    ids: list[int]  # none where it is dropped
    long: bool


def _prompts_to_arrays(prompts: list[_Prompt]) -> dict[str, np.ndarray]:
    texts = json.dumps([prompt.text for prompt in prompts]).encode()
    return {
        "texts": np.frombuffer(texts, np.uint8),
        "long": np.array([prompt.long for prompt in prompts], bool),
        **join_lists("ids", [prompt.ids for prompt in prompts], np.int32),
    }


def _prompts_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[_Prompt]:
    texts = json.loads(arrays["texts"].tobytes())
    return list(map(_Prompt, texts, split_lists("ids", arrays), arrays["long"].tolist()))


def _pairs_to_arrays(pairs: list[tuple[list[int], list[int]]]) -> dict[str, np.ndarray]:
    return {
        **join_lists("prompts", [prompt for prompt, _ in pairs], np.int32),
        **join_lists("completions", [completion for _, completion in pairs], np.int32),
    }


def _pairs_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[tuple[list[int], list[int]]]:
    return list(zip(*(split_lists(name, arrays) for name in ("prompts", "completions")), strict=True))


# --- one row --------------------------------------------------------------------------------------------------------


def _template(prompt_template: str | None) -> str | None:
    if prompt_template is None:
        return None
    template = PROMPT_TEMPLATES.get(prompt_template, prompt_template)
    count = template.count("{prompt}")
    if count != 1:
        near = difflib.get_close_matches(prompt_template, PROMPT_TEMPLATES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f" (shipped: {', '.join(PROMPT_TEMPLATES)})"
        raise ValueError(
            f"prompt_template={prompt_template!r} holds {{prompt}} {count} times: give a string that holds it once, "
            f"or the name of a shipped template{hint}"
        )
    return template


def _within(text: str, ids: list[int], most: int, long_prompts: LongPrompts, where: str) -> _Prompt:
    if len(ids) <= most:
        return _Prompt(text, ids, False)
    if long_prompts == "error":
        raise ValueError(
            f"{where}: the prompt has {len(ids)} tokens, more than max_prompt_length={most}; raise it, or set long_prompts "
            "to drop, keep_start or keep_end"
        )
    if long_prompts == "drop":
        return _Prompt("", [], True)
    return _Prompt(text, ids[:most] if long_prompts == "keep_start" else ids[-most:], True)


def _prompt_ids(
    prompt: Any, tokenizer: Any, template: str | None, system_prompt: str | None, where: str
) -> tuple[str, list[int]]:
    if isinstance(prompt, str):
        if system_prompt is not None:
            raise ValueError(
                f"{where}: system_prompt is for chat prompts, and this prompt is a plain string; put the text into "
                "prompt_template, or make the prompt a list of messages"
            )
        text = prompt if template is None else template.replace("{prompt}", prompt)
        ids = _encode_plain(text, tokenizer)
        empty = not prompt
    else:
        messages = _messages(prompt, "prompt", where)
        if template is not None:
            raise ValueError(f"{where}: prompt_template is for plain string prompts, and this prompt is a chat")
        if system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        text = _render(messages, tokenizer, where)
        # The template's text has the BOS where the model wants one.
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        empty = False
    if empty or not ids:
        raise ValueError(f"{where}: the prompt is empty")
    return text, list(ids)


def _encode_plain(text: str, tokenizer: Any) -> list[int]:
    """Ids by the tokenizer's own rule, but with one BOS where the text brings its own, and no eos at the end."""
    encoded = tokenizer(text, return_special_tokens_mask=True)
    ids, added = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
    # The mask marks what the rule added, not special tokens that stand in the text. An eos of the rule would end the
    # sequence before the completion.
    content = [index for index, mark in enumerate(added) if not mark]
    if not content:
        return []
    ids = ids[: content[-1] + 1]
    bos = tokenizer.bos_token_id
    if bos is not None and len(ids) > 1 and added[0] and ids[0] == ids[1] == bos:
        ids = ids[1:]
    return ids


def _messages(value: Any, column: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or not value:
        raise ValueError(
            f"{where}: {column!r} is {_short(value)}, neither a string nor a list of "
            '{"role": …, "content": …} messages'
        )
    for number, message in enumerate(value):
        parts = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(
                f"{where}: message {number} of {column!r} is {_short(message)}: it needs a 'role' and a 'content', "
                "both strings"
            )
    return [dict(message) for message in value]


def _render(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> str:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where}: the prompt is a chat, and the tokenizer has no chat template. Use a model whose tokenizer has "
            "one, or give plain string prompts (with prompt_template, if they need one)"
        )
    # A prompt that ends with the beginning of an answer is continued, as in TRL.
    continued = messages[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not continued, continue_final_message=continued
        )
    except Exception as error:
        raise ValueError(f"{where}: the tokenizer's chat template refuses the prompt: {error}") from error


def _completion_ids(completion: Any, tokenizer: Any, eos_token_id: int, where: str) -> list[int]:
    if not isinstance(completion, str):
        messages = _messages(completion, "completion", where)
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            raise ValueError(
                f"{where}: 'completion' must be a string or one assistant message; its messages are of "
                f"{[message['role'] for message in messages]}"
            )
        completion = messages[0]["content"]
    ids = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    while ids and ids[-1] == eos_token_id:
        ids.pop()
    if eos_token_id in ids:
        raise ValueError(
            f"{where}: the completion has the end-of-sequence token ({eos_token_id}) before its end; take it out"
        )
    return [*ids, eos_token_id]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
