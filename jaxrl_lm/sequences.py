"""Rows to token sequences with a mask: demonstrations and preferences. And examples to arrays.

A row becomes a tuple of `Example`s (`example.py`, which has the rule for long ones), its sides: chosen and rejected of a
pair, else one. What an example's mask marks is decided here, from the row, and never again from token values. How a
prompt or completion becomes tokens is in `encode.py`; rows for reward and process models are in `reward_sequences.py`,
several examples in one row in `packing.py`. All processes of a run encode together, with the same rows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32

from jaxrl_lm.data import Row, validate
from jaxrl_lm.encode import _completion_ids, _encode_plain, _messages, _prompt_ids, _template
from jaxrl_lm.example import Example, Examples, LongRows, collect

SIDES = ("chosen", "rejected")


# --- demonstrations -------------------------------------------------------------------------------------------------

_SFT_KINDS = (("prompt", "completion"), ("messages",), ("text",))


def encode_sft(
    rows: Sequence[Row],
    tokenizer: Any,  # a transformers PreTrainedTokenizerFast
    *,
    max_length: int,
    eos_token_id: int,
    long_rows: LongRows = "drop",
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    name: str,
) -> Examples:
    """One side a row; the mask marks the tokens that are trained. Every row has the same kind of columns:

    `prompt` and `completion`: as `encode.encode_completions`; trained are the completion and its one eos.

    `messages`: the chat template's text of the whole conversation, tokenised once. Trained are the tokens that lie
    wholly in an assistant turn: what the template adds to its generation prompt for that turn, up to and with the
    turn's eos (the newline after it is not trained), or all of it where the turn has none. A column `tools` goes to the
    template.

    `text`: by the tokenizer's own rule for special tokens, with one BOS, and one eos at the end. Trained is everything
    but the first token, which nothing predicts. An eos inside the text is the writer's own and stays.

    Raises ValueError with the row for missing or mixed columns, what `encode_completions` refuses, options that do not
    fit the kind, a conversation that has no assistant turn or begins with one, a template that rewrites earlier turns,
    an eos inside a turn, and where no row is left.
    """
    kind = _sft_kind(rows, name)
    template = _template(prompt_template)
    if kind != ("prompt", "completion") and template is not None:
        raise ValueError(f"{name}: prompt_template is for plain string prompts, and the rows have {kind[0]!r}")
    if kind == ("text",) and system_prompt is not None:
        raise ValueError(f"{name}: system_prompt is for chats, and the rows have 'text'")

    def encode(row: Row, where: str) -> tuple[Example, ...]:
        if kind == ("messages",):
            return (_conversation(row, tokenizer, eos_token_id, system_prompt, where),)
        if kind == ("text",):
            return (_document(row["text"], tokenizer, eos_token_id, where),)
        _, prompt = _prompt_ids(row["prompt"], tokenizer, template, system_prompt, where)
        return (_response_example(prompt, _completion_ids(row["completion"], tokenizer, eos_token_id, where)),)

    return collect(rows, encode, max_length=max_length, long_rows=long_rows, name=name)


def _sft_kind(rows: Sequence[Row], name: str) -> tuple[str, ...]:
    found: tuple[str, ...] | None = None
    for index, row in enumerate(rows):
        kinds = [kind for kind in _SFT_KINDS if all(row.get(column) is not None for column in kind)]
        if len(kinds) != 1:
            columns = sorted(str(key) for key, value in row.items() if value is not None)
            raise ValueError(
                f"{name}: row {index} has the columns {columns}: it needs one of 'prompt' with 'completion', "
                "'messages', or 'text', and not several of them"
            )
        found = found or kinds[0]
        if kinds[0] != found:
            raise ValueError(
                f"{name}: row {index} has {' and '.join(kinds[0])}, and row 0 has {' and '.join(found)}: all rows of "
                "a dataset must be of one kind"
            )
    return found or _SFT_KINDS[0]


def _response_example(prompt: list[int], response: list[int]) -> Example:
    return Example([*prompt, *response], [False] * len(prompt) + [True] * len(response))


def _document(text: Any, tokenizer: Any, eos_token_id: int, where: str) -> Example:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}: 'text' must be a string that is not empty, not {text!r}")
    ids = _encode_plain(text, tokenizer)
    if not ids or ids[-1] != eos_token_id:
        ids = [*ids, eos_token_id]
    # Nothing stands before the first token, so it has no log-prob; in a packed row it must not have its neighbour's.
    return Example(ids, [False] + [True] * (len(ids) - 1))


def _conversation(row: Row, tokenizer: Any, eos_token_id: int, system_prompt: str | None, where: str) -> Example:
    messages, tools = _messages(row["messages"], "messages", where), row.get("tools")
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError(f"{where}: 'messages' has no assistant turn, so nothing of it can be trained")
    if turns[0] == 0:
        raise ValueError(f"{where}: 'messages' begins with an assistant turn; put a system or user message before it")
    whole = chat_text(messages, tokenizer, where, tools=tools)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, mask = list(encoded["input_ids"]), [False] * len(encoded["input_ids"])
    starts, ends = ([offset[edge] for offset in encoded["offset_mapping"]] for edge in (0, 1))
    for turn in turns:
        before = chat_text(messages[:turn], tokenizer, where, tools=tools, add_generation_prompt=True)
        until = chat_text(messages[: turn + 1], tokenizer, where, tools=tools)
        if not (whole.startswith(before) and whole.startswith(until)):
            raise ValueError(
                f"{where}: the chat template writes the conversation up to message {turn} in another way once more "
                "messages follow, or its generation prompt is not how the turn begins (templates that drop earlier "
                "thinking do so), so the turn's tokens in the whole are not those that are sampled; give "
                "prompt-completion rows, one for each turn"
            )
        first, last = bisect_left(starts, len(before)), bisect_right(ends, len(until))
        eos = [index for index in range(first, last) if ids[index] == eos_token_id]
        if len(eos) > 1:
            raise ValueError(
                f"{where}: message {turn} has the end-of-sequence token ({eos_token_id}) before its end; take it out"
            )
        for index in range(first, eos[0] + 1 if eos else last):
            mask[index] = True
    return Example(ids, mask)


def chat_text(
    messages: Sequence[Any], tokenizer: Any, where: str, *, tools: Any = None, add_generation_prompt: bool = False
) -> str:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where}: the row is a chat, and the tokenizer has no chat template. Use a model whose tokenizer has one, "
            "or give plain strings"
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:
        raise ValueError(f"{where}: the tokenizer's chat template refuses the chat: {error}") from error


# --- preferences ----------------------------------------------------------------------------------------------------


def encode_pairs(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_length: int,
    eos_token_id: int,
    long_rows: LongRows = "keep_start",
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    name: str,
) -> Examples:
    """Two sides a row, chosen and rejected; the mask marks the response and its one eos.

    Rows have `prompt`, `chosen` and `rejected` (a prompt as in `encode.encode_prompts`; a response is a string or one
    assistant message), or all of them only `chosen` and `rejected`, and the prompt is what these share: the leading
    messages, or the longest common beginning of the strings, without the space at its end (as TRL's `extract_prompt`).
    Something is left to both sides even where one begins with all of the other.

    The prompt is tokenised once, and each response on its own. A cut takes the end of the response, never of the
    prompt: a row with a side whose response would be gone is dropped and counted in `no_response`.

    Raises ValueError with the row for a missing or malformed column, an option that does not fit the kind of prompt, an
    eos inside a response, sides that share no prompt; where no row is left, and where both sides of every row are equal.
    """
    template = _template(prompt_template)
    validate(rows, pair_columns(rows), name=name)

    def encode(row: Row, where: str) -> tuple[Example, ...]:
        prompt, *responses = pair_of(row, where)
        _, ids = _prompt_ids(prompt, tokenizer, template, system_prompt, where)
        sides = []
        for column, response in zip(SIDES, responses, strict=True):
            text = one_text(response, column, where)
            encoded = _completion_ids(text, tokenizer, eos_token_id, f"{where}, {column!r}")
            sides.append(_response_example(ids, encoded))
        return tuple(sides)

    return collect(rows, encode, max_length=max_length, long_rows=long_rows, name=name)


def encode_unpaired(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_length: int,
    eos_token_id: int,
    long_rows: LongRows = "keep_start",
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    name: str,
) -> Examples:
    """One side a row of `prompt`, `completion` and `label` (True: desirable), which stays in the rows.

    Tokens, mask and cuts are those of `encode_pairs`. Raises ValueError with the row as `encode_completions`, and for a
    label that is not True, False, 1 or 0.
    """
    template = _template(prompt_template)
    validate(rows, ("prompt", "completion", "label"), name=name)

    def encode(row: Row, where: str) -> tuple[Example, ...]:
        if row["label"] not in (0, 1):
            raise ValueError(f"{where}: 'label' is {row['label']!r}: it must be true or false")
        _, prompt = _prompt_ids(row["prompt"], tokenizer, template, system_prompt, where)
        return (_response_example(prompt, _completion_ids(row["completion"], tokenizer, eos_token_id, where)),)

    return collect(rows, encode, max_length=max_length, long_rows=long_rows, name=name)


def pair_columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """A row that lacks the prompt that others have is a mistake, not a row with an implicit one."""
    explicit = any(row.get("prompt") is not None for row in rows)
    return ("prompt", "chosen", "rejected") if explicit else ("chosen", "rejected")


def pair_of(row: Row, where: str) -> tuple[Any, Any, Any]:
    """The prompt and both responses of a row."""
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    if prompt is not None:
        return prompt, chosen, rejected
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(f"{where}: of 'chosen' and 'rejected', one is a string and the other one is not")
    if not isinstance(chosen, str):
        chosen, rejected = _messages(chosen, "chosen", where), _messages(rejected, "rejected", where)
    shared = min(shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if isinstance(chosen, str) and shared > 0 and chosen[shared - 1] == " ":
        shared -= 1
    if shared < 1:
        raise ValueError(
            f"{where}: there is no 'prompt', and 'chosen' and 'rejected' do not begin with the same "
            f"{'text' if isinstance(chosen, str) else 'message'} that could be it"
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the longest common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def one_text(response: Any, column: str, where: str) -> str:
    if isinstance(response, str):
        return response
    messages = _messages(response, column, where)
    roles = [message["role"] for message in messages]
    if roles != ["assistant"]:
        raise ValueError(
            f"{where}: after the prompt, {column!r} must be a string or one assistant message; its messages are of "
            f"{roles}. (Whole conversations are rows without a 'prompt', whose sides differ in the last message.)"
        )
    return messages[0]["content"]


# --- arrays ---------------------------------------------------------------------------------------------------------


def layout(sides: Sequence[tuple[Example, ...]]) -> tuple[int, int]:
    """The `start` and `columns` of `align` that hold every example. Raises ValueError as `align`."""
    examples = [example for row in sides for example in row]
    if not examples:
        raise ValueError("layout: there are no examples")
    before = [_first(example, index) for index, example in enumerate(examples)]
    # Every shape compiles its own program: in steps of 8, datasets and batches that differ a little share one. At least
    # 1, since column 0 has no log-prob.
    rounded = lambda length: -(-length // 8) * 8
    start = rounded(max(1, *before))
    after = max(len(example.ids) - first for example, first in zip(examples, before, strict=True))
    return start, rounded(start + after)


def align(
    examples: Sequence[Example], *, start: int | None, columns: int, pad_id: int
) -> tuple[Int32[np.ndarray, "N T"], Int32[np.ndarray, "N T"], Bool[np.ndarray, "N T"], Float32[np.ndarray, "N T"]]:
    """Tokens, segment ids, mask and labels, T = columns; the first marked token of every row stands at column `start`, or
    with start=None its first token at column 0.

    Nothing before `start` needs a score. Padding on both sides has `pad_id`, segment id 0, no mark and label 0, which
    rows without labels have everywhere. Raises ValueError with the example (0-based) that has no mark or does not fit.
    """
    tokens = np.full((len(examples), columns), pad_id, np.int32)
    segment_ids = np.zeros(tokens.shape, np.int32)
    mask = np.zeros(tokens.shape, bool)
    labels = np.zeros(tokens.shape, np.float32)
    for index, example in enumerate(examples):
        first = _first(example, index)
        left = 0 if start is None else start - first
        place = (index, slice(left, left + len(example.ids)))
        if left < 0 or left + len(example.ids) > columns:
            raise ValueError(
                f"example {index} of {len(example.ids)} tokens, {first} of them before the first marked one, "
                f"does not fit start={start} and columns={columns}"
            )
        tokens[place] = example.ids
        segment_ids[place] = 1 if example.segments is None else example.segments
        mask[place] = example.mask
        labels[place] = 0.0 if example.labels is None else example.labels
    return tokens, segment_ids, mask, labels


def _first(example: Example, index: int) -> int:
    if not any(example.mask):
        raise ValueError(f"example {index} has no marked token")
    return example.mask.index(True)
