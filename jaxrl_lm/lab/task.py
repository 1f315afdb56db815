"""Sums with written working: problems, a demonstrator who slips, a program that checks the working, two rewards.

A prompt is `47+385=`; a completion adds the columns from the right, one step a column, then marks the answer:

    7+5=12;4+8+1=13;0+3+1=4;#432

A step names the digit of every operand (0 where an operand is too short), then the carry if there is one, and their
sum. Each step needs one digit of each operand and the step before, which a small transformer learns within minutes;
the answer reads the last digits back from the left. The working has as many steps as the longest operand has digits.

The demonstrator makes mistakes and then goes on from what is written, as a person would; sometimes it writes no
working at all. Supervised learning therefore levels off where the demonstrator is, while a verifier can lead further.
Plain Python without jax. Next to read: `tokenizer.py`.
"""

import hashlib
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_STEP = re.compile(r"([0-9](?:\+[0-9])*)=([0-9]{1,3})")
_ANSWER = re.compile(r"[0-9]{1,18}")
_WELL_FORMED = re.compile(rf"(?:{_STEP.pattern};)*#({_ANSWER.pattern})")
_TEST_SHARE = 10  # one problem in so many is held out
_PATIENCE = 2000  # draws without a new problem before there are taken to be no more


class Problem(NamedTuple):
    """Numbers to add."""

    operands: tuple[int, ...]

    @property
    def answer(self) -> int:
        """Their sum."""
        return sum(self.operands)


class Check(NamedTuple):
    """What the checker found in a completion."""

    correct: bool  # the form holds from the first character to the last, and the marked answer is the sum
    answer: int | None  # the number after the first #; None where no number stands there
    steps: list[bool]  # one a working step
    ends: list[int]  # index in the completion of each step's last character, its `;` where it has one


# --- problems ---------------------------------------------------------------------------------------------------------


def held_out(operands: Sequence[int]) -> bool:
    """Whether a problem belongs to the test split: a tenth of all, by a hash that ignores the operands' order."""
    digest = hashlib.blake2b("+".join(map(str, sorted(operands))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _TEST_SHARE == 0


def make_problems(
    count: int,
    *,
    seed: int,
    split: str = "train",
    digits: int = 3,
    addends: Sequence[int] = (2,),
    least_digits: int = 1,
) -> list[Problem]:
    """`count` different problems, the same for the same arguments.

    Each has a number of operands drawn from `addends`, each operand a length drawn from `least_digits` to `digits`.
    "train" and "test" share no problem, not even with its operands in another order; in "ood" the longest operand has
    `digits + 1` digits, one more than training ever shows.

    Raises ValueError when an option is out of range or there are not that many different problems.
    """
    if split not in ("train", "test", "ood"):
        raise ValueError(f"split={split!r} is unknown: use train, test or ood")
    if count < 0 or digits < 1 or not addends or min(addends) < 2 or not 1 <= least_digits <= digits:
        raise ValueError(
            f"count={count}, digits={digits}, addends={tuple(addends)}, least_digits={least_digits}: count must be at "
            "least 0, digits at least 1, every number of addends at least 2, and least_digits between 1 and digits"
        )
    rng = random.Random(f"{split}/{seed}/{digits}/{tuple(addends)}")
    found: dict[Problem, None] = {}
    misses = 0  # draws in a row that brought nothing new
    while len(found) < count and misses < _PATIENCE:
        problem = Problem(_draw(rng, least_digits, digits + (split == "ood"), rng.choice(list(addends))))
        if problem in found or not _belongs(problem, split, digits):
            misses += 1
        else:
            found[problem], misses = None, 0
    if len(found) < count:
        raise ValueError(
            f"count={count}: only {len(found)} different {split} problems were found with digits={digits}, "
            f"least_digits={least_digits} and addends={tuple(addends)}; ask for fewer, or for more digits"
        )
    return list(found)


def _draw(rng: random.Random, least: int, digits: int, addends: int) -> tuple[int, ...]:
    lengths = [rng.randint(least, digits) for _ in range(addends)]
    return tuple(rng.randint(10 ** (length - 1) if length > 1 else 0, 10**length - 1) for length in lengths)


def _belongs(problem: Problem, split: str, digits: int) -> bool:
    if split == "ood":
        return max(problem.operands) >= 10**digits
    return held_out(problem.operands) == (split == "test")


# --- text -------------------------------------------------------------------------------------------------------------


def prompt(problem: Problem) -> str:
    """The question, such as `47+385=`."""
    return "+".join(map(str, problem.operands)) + "="


def _columns(problem: Problem) -> list[list[int]]:
    """The digits of every operand, column by column from the right; 0 where an operand is too short."""
    width = len(str(max(problem.operands)))
    return [[operand // 10**place % 10 for operand in problem.operands] for place in range(width)]


def _write(columns: list[list[int]], sums: list[int], carries: list[int]) -> str:
    """The completion with these column sums and carries; the answer is read off the sums as written."""
    steps = []
    for column, total, carry in zip(columns, sums, carries, strict=True):
        terms = [*column, carry] if carry else column
        steps.append("+".join(map(str, terms)) + f"={total};")
    answer = int("".join([str(sums[-1]), *(str(total % 10) for total in reversed(sums[:-1]))]))
    return "".join(steps) + f"#{answer}"


def solution(problem: Problem) -> str:
    """The right working and answer, such as `7+5=12;4+8+1=13;0+3+1=4;#432`."""
    return demonstration(problem, random.Random(0), slip=0.0, drop=0.0, skip=0.0)


def demonstration(
    problem: Problem, rng: random.Random, *, slip: float = 0.1, drop: float = 0.2, skip: float = 0.0
) -> str:
    """A completion by someone who makes mistakes and goes on from what is written.

    `slip` is the probability a step that its sum is off by one, `drop` the probability a carry that it is forgotten,
    `skip` the probability a problem that the answer is written without any working; it is then the answer that the
    working would have given. With all three 0 this is `solution`.
    """
    columns = _columns(problem)
    sums, carries = [], []
    carry = 0
    for column in columns:
        if carry and rng.random() < drop:
            carry = 0
        total = sum(column) + carry
        if rng.random() < slip:
            total += rng.choice((-1, 1)) if total else 1
        carries.append(carry)
        sums.append(total)
        carry = total // 10
    text = _write(columns, sums, carries)
    return text[text.index("#") :] if rng.random() < skip else text


# --- checking ---------------------------------------------------------------------------------------------------------


def check(problem: Problem, completion: str) -> Check:
    """What is right in a completion; any text is accepted.

    A step is right when it adds its column's digits and the carry of the step before *as written there*, in any order,
    zeros left out or not, and its sum holds: a mistake is charged to the step that made it and not to those that
    follow from it. A step beyond the last column is wrong, as is a piece of working that is not of this form.
    """
    working, _, marked = completion.partition("#")
    number = _ANSWER.match(marked)
    columns = _columns(problem)
    steps, ends = [], []
    carry, start = 0, 0
    for index, piece in enumerate(working.split(";")):
        end = start + len(piece)  # where the `;` stands
        last = end >= len(working)
        if last and not piece:
            break
        column = columns[index] if index < len(columns) else None
        right, carry = _check_step(piece, column, carry)
        steps.append(right and not last)
        ends.append(end - last)
        start = end + 1
    return Check(
        correct=_marked_answer(completion) == str(problem.answer),
        answer=int(number.group()) if number else None,
        steps=steps,
        ends=ends,
    )


def _check_step(piece: str, column: list[int] | None, carry: int) -> tuple[bool, int]:
    """Whether the step is right, and the carry that it hands on: by its written sum, or 0 where there is none."""
    match = _STEP.fullmatch(piece)
    if match is None:
        return False, 0
    terms, total = [int(term) for term in match[1].split("+")], int(match[2])
    if column is None or len(terms) > len(column) + 1:
        return False, total // 10
    needed = sorted(digit for digit in [*column, carry] if digit)
    right = sorted(term for term in terms if term) == needed and sum(terms) == total and match[2] == str(total)
    return right, total // 10


def _marked_answer(completion: str) -> str | None:
    """The digits of the answer when the whole completion has the form, else None."""
    match = _WELL_FORMED.fullmatch(completion)
    return match[match.lastindex] if match else None


# --- rows and rewards -------------------------------------------------------------------------------------------------


def rows(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Prompt-only rows with the columns that the rewards read."""
    return [
        {"prompt": prompt(problem), "answer": problem.answer, "operands": list(problem.operands)}
        for problem in problems
    ]


def demonstration_rows(
    problems: Iterable[Problem], *, seed: int, slip: float = 0.1, drop: float = 0.2, skip: float = 0.0
) -> list[dict[str, str]]:
    """Prompt-completion rows, one demonstration a problem; see `demonstration` for the probabilities."""
    rng = random.Random(f"demonstration/{seed}")
    return [
        {"prompt": prompt(problem), "completion": demonstration(problem, rng, slip=slip, drop=drop, skip=skip)}
        for problem in problems
    ]


def lab_answer(*, prompts: list[str], completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1.0 for every completion of the right form whose marked answer is right, else 0.0. A wrong step costs nothing."""
    return [
        float(_marked_answer(completion) == str(int(total)))
        for completion, total in zip(completions, answer, strict=True)
    ]


def lab_steps(*, prompts: list[str], completions: list[str], operands: list[Sequence[int]], **_: Any) -> list[float]:
    """The share of right steps: of those written, or of those needed where fewer were written."""
    shares = []
    for completion, numbers in zip(completions, operands, strict=True):
        problem = Problem(tuple(int(number) for number in numbers))
        steps = check(problem, completion).steps
        shares.append(sum(steps) / max(len(steps), len(_columns(problem))))
    return shares


def lab_step_rewards(
    *, prompts: list[str], completions: list[str], operands: list[Sequence[int]], **_: Any
) -> list[list[tuple[int, float]]]:
    """For `step_reward`: 1.0 for each right step of the working and 0.0 for each wrong one, at its end."""
    found = []
    for completion, numbers in zip(completions, operands, strict=True):
        checked = check(Problem(tuple(int(number) for number in numbers)), completion)
        found.append([(end + 1, float(right)) for end, right in zip(checked.ends, checked.steps, strict=True)])
    return found
