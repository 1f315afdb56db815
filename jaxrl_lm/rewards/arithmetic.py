"""Verifiers of text with a number in it, and word problems to train on: no model judges anything here.

`arithmetic` compares the completion's answer with the column `answer` as exact rational numbers; `format_think` checks
the form of a think/answer completion; `addition_words` makes the rows. How these are called: `protocol.py`.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

# A sign belongs to the number unless it stands between two operands, as in 10-3. Thousands separators must be whole.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]])[-+])?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?"
    r"|(?:(?<![0-9A-Za-z)\]])[-+])?\$?\.[0-9]+"
)
_MARK = re.compile(
    r"<answer>(?P<tag>.*?)(?:</answer>|\Z)"
    r"|\\boxed\s*\{(?P<boxed>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    r"|(?<!#)#+[ \t]*(?=[-+$]?\.?[0-9])(?=(?P<hash>[^\n]{0,500}))"
    r"|\banswer(?:\s+is\b|\s*[:=])(?=(?P<words>[^\n]{0,500}))",  # a look ahead: the same line may hold a later mark
    re.DOTALL | re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?;](?:\s|$)")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
_MAX_DIGITS = 1000  # Python refuses to convert very long numbers; none is an answer


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the content of its messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def extract_number(text: str) -> Fraction | None:
    """The number that a text gives as its answer, exactly; None where it gives none.

    The last marked answer counts: <answer>42</answer>, \\boxed{42}, #### 42, #42, "answer is 42", "answer: 42". Of the
    tags and the box it is the last number inside, of the others the last number of their sentence. A tag or box without
    a number gives none. Without a mark it is the last number of the text.
    """
    text = _FRACTION.sub(r"\1/\2", text.replace("\u2212", "-"))
    for match in reversed(list(_MARK.finditer(text))):
        inside = match["tag"] if match["tag"] is not None else match["boxed"]
        if inside is not None:
            return _last_number(inside)
        sentence = _SENTENCE_END.split(match["hash"] if match["hash"] is not None else match["words"], maxsplit=1)[0]
        number = _last_number(sentence)
        if number is not None:  # "the answer is as follows" marks nothing
            return number
    return _last_number(text)


def _last_number(text: str) -> Fraction | None:
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    digits = numbers[-1].replace(",", "").replace("$", "")
    _, slash, denominator = digits.partition("/")
    if len(digits) > _MAX_DIGITS or (slash and not denominator.strip("0")):
        return None
    if "/" in digits and "." in digits:
        top, bottom = digits.split("/")
        return Fraction(top) / Fraction(bottom)
    return Fraction(digits)


def _expected(answer: Any) -> Fraction:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal | Fraction):
        raise ValueError(f"the column 'answer' holds {answer!r}, neither a number nor a text with one")
    # A float's decimal digits are what its author wrote; GSM8K's answers are a text that ends in "#### 42".
    number = answer if isinstance(answer, Fraction) else extract_number(str(answer))
    if number is None:
        raise ValueError(f"the column 'answer' holds {str(answer)[:60]!r}, which has no number")
    return number


def arithmetic(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 where the completion's answer (`extract_number`) equals the column `answer`, else 0.0.

    `answer` holds numbers, or texts with one. Compared as rational numbers: 1,000 = 1000.0 and 0.5 = 1/2, exactly.
    Raises ValueError where `answer` has no number.
    """
    expected = [_expected(value) for value in answer]
    return [float(extract_number(text_of(c)) == e) for c, e in zip(completions, expected, strict=True)]


_THINK = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*", re.DOTALL
)


def format_think(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 where the completion is <think>…</think><answer>…</answer> and nothing else, each tag once; else 0.0."""
    return [float(_THINK.fullmatch(text_of(c)) is not None) for c in completions]


# --- rows -----------------------------------------------------------------------------------------------------------

_PHRASINGS = {
    "+": (
        "What is {a} plus {b}?",
        "What is the sum of {a} and {b}?",
        "Add {b} to {a}. What is the result?",
        "Mia has {a} apples and picks {b} more. How many apples does she have now?",
        "There are {a} red balls and {b} blue balls in a box. How many balls are in the box?",
    ),
    "-": (
        "What is {a} minus {b}?",
        "What is the difference between {a} and {b}?",
        "Take {b} away from {a}. What is the result?",
        "Mia has {a} apples and gives away {b}. How many apples does she have left?",
        "There are {a} birds in a tree and {b} fly away. How many birds are left in the tree?",
    ),
}
_TEST_SHARE = 0.25


def addition_words(
    count: int,
    *,
    seed: int,
    max_operand: int,
    operations: Sequence[str] = ("+", "-"),
    chat: bool = True,
    split: Literal["train", "test"] = "train",
    instruction: str = "Answer with the number only.",
) -> list[dict[str, Any]]:
    """`count` different word problems: rows {"prompt", "answer"} with operands 0 … max_operand and answers from 0 up.

    `chat`: prompts of one user message, else strings. Each ends with `instruction`. Train and test never share a pair
    of operands, in either order, under either operation, in any phrasing: a quarter of the pairs, by a hash that
    depends on nothing else, is the test's. Raises ValueError where the split has fewer problems than `count`.
    """
    unknown = [operation for operation in operations if operation not in _PHRASINGS]
    if unknown or not operations:
        raise ValueError(f"operations={tuple(operations)!r}: use some of {', '.join(_PHRASINGS)}")
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} is unknown: use train or test")
    kinds = [(operation, phrasing) for operation in dict.fromkeys(operations) for phrasing in _PHRASINGS[operation]]
    size = max_operand + 1
    total = len(kinds) * size * size
    rng, seen, rows = random.Random(seed), set(), []
    while len(rows) < count:
        if len(seen) == total:
            raise ValueError(
                f"count={count}: the {split} split has only {len(rows)} problems with operands up to {max_operand}"
            )
        index = rng.randrange(total)
        if index in seen:
            continue
        seen.add(index)
        pair, kind = divmod(index, len(kinds))
        a, b = divmod(pair, size)
        operation, phrasing = kinds[kind]
        if (operation == "-" and a < b) or _in_test(a, b) != (split == "test"):
            continue
        text = f"{phrasing.format(a=a, b=b)} {instruction}".strip()
        prompt = [{"role": "user", "content": text}] if chat else text
        rows.append({"prompt": prompt, "answer": str(a + b if operation == "+" else a - b)})
    return rows


def _in_test(a: int, b: int) -> bool:
    digest = hashlib.sha256(f"{min(a, b)},{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < _TEST_SHARE * 2**32
