"""Labels of steps by completing them: stepwise rows for a process reward model from nothing but a verifier.

From the prompt and the steps up to one, n completions are sampled and verified as whole completions; the step's label
is what `algos.monte_carlo_labels` makes of their outcomes. Source: Math-Shepherd (Wang et al., 2024). What a label is
worth: docs/reward_models.md.
"""

import bisect
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxrl_lm.algos import monte_carlo_labels
from jaxrl_lm.completions import Completer, Prompts, encode_rows, judge_texts, open_tool, output_file, verdicts
from jaxrl_lm.data import Row, default_buckets
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.process_model import split_steps as steps_with_ends
from jaxrl_lm.rewards import RewardFunction
from jaxrl_lm.rollout import Sampled
from jaxrl_lm.rule_tables import refuse_from_the_start
from jaxrl_lm.tools_config import LabelStepsConfig
from jaxrl_lm.trunks import after_prefixes

SAMPLE, ROLLOUT = 0, 1  # numbers of draws


class Prefix(NamedTuple):
    """What a rollout goes on from, after its prompt."""

    text: str
    ids: tuple[int, ...]


class Solution(NamedTuple):
    """A completion in steps."""

    prompt: int  # of the encoded prompts
    text: str
    ids: list[int]
    steps: list[str]  # separators between them left out
    prefixes: list[Prefix]  # through each step, but the last one of a completion that has ended
    cut: bool  # there are more steps than these


# --- steps ------------------------------------------------------------------------------------------------------------


def split_steps(completion: str, separator: str) -> list[str]:
    """The steps of a completion, as a process model reads them (`process_model.split_steps`), without separators.

    Joined by the separator they are the completion, but for a separator and blanks at its end. Raises ValueError for an
    empty separator.
    """
    if not separator:
        raise ValueError("step_separator='': give the text that steps end with")
    return [step for step, _ in steps_with_ends(completion, separator)]


def sampled_prefixes(steps: Sequence[str], separator: str, ids: Sequence[int], decode: Any) -> list[Prefix]:
    """What the policy had written, in its own tokens, when each step but the last was complete.

    The fewest of its tokens whose text holds the steps and their separators: a token may hold the beginning of the next
    step too, and then the prefix does. `decode` is ids to text.
    """
    prefixes, text = [], ""
    for step in steps[:-1]:
        text += step + separator
        holds = lambda count, text=text: decode(ids[:count]).startswith(text)
        count = bisect.bisect_left(range(len(ids) + 1), True, key=holds)
        prefixes.append(Prefix(decode(ids[:count]), tuple(ids[:count])))
    return prefixes


def _whole_characters(ids: Sequence[int], decode: Any) -> Prefix:
    """A completion that was cut off, without the bytes of a last character that is not whole: they decode to another
    text once a continuation follows."""
    count = len(ids)
    while count and decode(ids[:count]).endswith("\ufffd"):
        count -= 1
    return Prefix(decode(ids[:count]), tuple(ids[:count]))


def given_prefixes(steps: Sequence[str], separator: str, encode: Any) -> list[Prefix]:
    """The same for steps that came as text: each step and each separator is tokenised on its own, as `prm` does."""
    prefixes, before = [], Prefix("", ())
    for step in steps[:-1]:
        before = Prefix(before.text + step + separator, (*before.ids, *encode(step), *encode(separator)))
        prefixes.append(before)
    return prefixes


def _given_steps(row: Row, separator: str, where: str) -> list[str] | None:
    """The steps that a row brings; None where it brings none."""
    steps, completion = row.get("completions"), row.get("completion")
    if steps is not None:
        if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step for step in steps):
            raise ValueError(f"{where}: 'completions' must be a list of steps, each a text that is not empty")
        return steps
    if completion is None:
        return None
    if isinstance(completion, list) and len(completion) == 1 and completion[0].get("role") == "assistant":
        completion = completion[0]["content"]
    if not isinstance(completion, str):
        raise ValueError(f"{where}: 'completion' must be a string or one assistant message")
    steps = split_steps(completion, separator)
    if not steps:
        raise ValueError(f"{where}: 'completion' holds no step: {completion!r}")
    return steps


# --- completions to label ---------------------------------------------------------------------------------------------


def _given(config: LabelStepsConfig, completer: Completer, prompts: Prompts) -> dict[int, Solution]:
    """The completions that rows bring, by prompt."""
    encode = lambda text: completer.tokenizer(text, add_special_tokens=False)["input_ids"]
    separator, found = config.step_separator, {}
    for number, (row, place) in enumerate(zip(prompts.encoded.rows, prompts.places, strict=True)):
        where = f"dataset: row {place}"
        steps = _given_steps(row, separator, where)
        if steps is None:
            continue
        kept = steps[: config.max_steps_per_row]
        # A cut completion has not ended with its last kept step: that one is completed like the others.
        prefixes = given_prefixes([*kept, ""] if len(kept) < len(steps) else kept, separator, encode)
        if any(token in completer.eos for prefix in prefixes for token in prefix.ids):
            raise ValueError(f"{where}: a step holds an end-of-sequence token; take it out")
        text = separator.join(steps)
        found[number] = Solution(number, text, list(encode(text)), kept, prefixes, len(kept) < len(steps))
    return found


def _sampled(
    config: LabelStepsConfig, completer: Completer, prompts: EncodedPrompts, missing: list[int]
) -> tuple[list[Solution], Counter[str]]:
    """`num_generations` completions of each prompt that has none."""
    decode = lambda ids: completer.tokenizer.decode(ids, skip_special_tokens=True)
    found, counts = [], Counter()
    if not missing:
        return found, counts
    sampler = completer.sampler([prompts])
    for batch, sampled in completer.draw(sampler, prompts, missing, number=SAMPLE):
        for n, (text, ids) in enumerate(zip(sampled.texts, sampled.completion_ids, strict=True)):
            counts["tokens"] += len(ids)
            steps = split_steps(text, config.step_separator)
            if not steps:
                counts["without_steps"] += 1
                continue
            kept = steps[: config.max_steps_per_row]
            cut = len(kept) < len(steps)
            prefixes = sampled_prefixes([*kept, ""] if cut else kept, config.step_separator, ids, decode)
            if sampled.truncated[n] and not cut:
                prefixes.append(_whole_characters(ids, decode))
            prompt = batch[n // config.num_generations]
            found.append(Solution(prompt, text, ids, kept, prefixes, cut))
    return found, counts


# --- rollouts and labels ----------------------------------------------------------------------------------------------


Key = tuple[int, tuple[int, ...]]  # a prompt, and the tokens that follow it


def roll_out(
    completer: Completer,
    functions: Sequence[RewardFunction],
    prompts: EncodedPrompts,
    solutions: Sequence[Solution],
    rollouts: int,
) -> tuple[dict[Key, Float[np.ndarray, " n"]], Counter[str]]:
    """The verdicts on the completions of each prefix (NaN: not judged), and counts. Equal prefixes are completed once.

    Each prompt is read once and so is each solution after it; rollouts go on from its cache at the ends of steps
    (`trunks.py`). The reward functions see the dataset's prompt and the whole completion, prefix and continuation, as text
    and tokens.
    """
    texts = {(solution.prompt, prefix.ids): prefix.text for solution in solutions for prefix in solution.prefixes}
    most: Counter[int] = Counter()
    for prompt, prefix in texts:
        most[prompt] = max(most[prompt], len(prompts.ids[prompt]) + len(prefix))
    keys = sorted(texts, key=lambda key: (most[key[0]], key))  # short ones together, and those of one trunk
    counts: Counter[str] = Counter(prefixes=len(keys))
    if not keys:
        return {}, counts
    ids = [[*prompts.ids[prompt], *prefix] for prompt, prefix in keys]
    rows = [{name: v for name, v in prompts.rows[prompt].items() if name != "completions"} for prompt, _ in keys]
    extended = EncodedPrompts(rows, ids, [prompts.texts[p] + texts[p, prefix] for p, prefix in keys], 0, 0)
    given = completer.config.prompt_buckets  # they hold the prompts, prefixes may need a longer one
    buckets = (*given, *default_buckets([len(row) for row in ids])) if given else ()
    sampler, found = completer.sampler([extended], num_generations=rollouts, prompt_buckets=buckets), {}
    forks = completer.forks(num_generations=rollouts)
    starts = given or default_buckets([len(prompts.ids[prompt]) for prompt, _ in keys])
    sampler, reader = after_prefixes(sampler, forks, prompts.ids, keys, starts)
    for batch, sampled in completer.draw(sampler, extended, list(range(len(keys))), number=ROLLOUT):
        counts["tokens"] += sum(map(len, sampled.completion_ids))
        counts["prefix_tokens"] += sum(len(ids[number]) for number in batch)
        whole = _whole(completer.tokenizer, sampled, [keys[n] for n in batch for _ in range(rollouts)], texts)
        values = verdicts(functions, whole, rollouts).reshape(len(batch), rollouts)
        found |= {keys[number]: values[place] for place, number in enumerate(batch)}
    counts["prefilled_tokens"] = reader.tokens
    return found, counts


def _whole(tokenizer: Any, sampled: Sampled, keys: Sequence[Key], texts: dict[Key, str]) -> Sampled:
    """The rows with prefix and continuation as their completion.

    Decoded together, since a tokenizer may decode the first token of a text in another way.
    """
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    ids = [[*key[1], *new] for key, new in zip(keys, sampled.completion_ids, strict=True)]
    heads, wholes = {key: decode(key[1]) for key in set(keys)}, [decode(row) for row in ids]
    for key, whole in zip(keys, wholes, strict=True):
        if not whole.startswith(heads[key]):
            raise ValueError(
                f"step_separator: the tokenizer decodes the steps {heads[key][-40:]!r} in another way once a "
                "continuation follows; choose a separator that it keeps"
            )
    joined = [texts[key] + whole[len(heads[key]) :] for key, whole in zip(keys, wholes, strict=True)]
    return sampled._replace(texts=joined, completion_ids=ids)


def step_values(
    solution: Solution, outcome: float, found: dict[Key, Float[np.ndarray, " n"]], rollouts: int
) -> Float[np.ndarray, "S n"]:
    """The outcomes of each step's completions; NaN where there is none. A completion that has ended is its own only one."""
    values = np.full((len(solution.steps), rollouts), np.nan)
    for number, prefix in enumerate(solution.prefixes):
        values[number] = found[solution.prompt, prefix.ids]
    if len(solution.prefixes) < len(solution.steps):
        values[-1, 0] = outcome
    return values


def labels_of(values: Float[np.ndarray, "S n"], *, kind: str, beta: float | None) -> list[float]:
    """`monte_carlo_labels` of outcomes, NaN ones left out."""
    valid = ~np.isnan(values)
    outcomes = jnp.asarray(np.where(valid, values, 0.0), jnp.float32)
    labels = monte_carlo_labels(outcomes, kind=kind, beta=beta, valid=jnp.asarray(valid))
    return [round(label, 6) for label in np.asarray(labels, np.float64).tolist()]  # float32 knows no more


def _stepwise_rows(
    config: LabelStepsConfig,
    prompts: Prompts,
    solutions: Sequence[Solution],
    outcomes: Float[np.ndarray, " S"],
    found: dict[Key, Float[np.ndarray, " n"]],
) -> tuple[list[Row], Counter[str]]:
    """One row a completion all of whose steps have a label."""
    rows, counts = [], Counter(completions=len(solutions), cut=sum(solution.cut for solution in solutions))
    kind = {"kind": config.label, "beta": config.label_beta}
    for solution, outcome in zip(solutions, outcomes.tolist(), strict=True):
        values = step_values(solution, outcome, found, config.rollouts)
        if ((values < 0) | (values > 1)).any():
            raise ValueError(
                f"reward: an outcome of {values[(values < 0) | (values > 1)][0]} cannot be a label, which is in [0, 1]; "
                "use a verifier of 0 and 1, or scale it by reward_weights"
            )
        labels = labels_of(values, **kind)
        if math.isnan(outcome) or any(math.isnan(label) for label in labels):
            counts["unjudged"] += 1
            continue
        row = {name: value for name, value in prompts.encoded.rows[solution.prompt].items() if name != "completion"}
        made = {"completions": solution.steps, "labels": labels, "values": labels_of(values, kind="soft", beta=None)}
        rows.append({**row, **made, "outcome": outcome, "row": prompts.places[solution.prompt]})
        counts["steps"] += len(labels)
    return rows, counts


def label_steps(
    config: LabelStepsConfig, completer: Completer, functions: Sequence[RewardFunction], rows: list[Row]
) -> tuple[list[Row], dict[str, int | float]]:
    """Stepwise rows with `labels`, `values` (mean outcomes), `outcome` and `row`, and a summary.

    Raises ValueError for options that do not fit, a row with a malformed completion, an outcome outside [0, 1], and as
    rewards do.
    """
    check_options(config)
    prompts = encode_rows(config, completer.tokenizer, rows, "dataset")
    given = _given(config, completer, prompts)
    missing = [number for number in range(len(prompts.places)) if number not in given]
    solutions, counts = _sampled(config, completer, prompts.encoded, missing)
    solutions = sorted([*given.values(), *solutions], key=lambda solution: solution.prompt)  # stable
    mine = [prompts.encoded.rows[solution.prompt] for solution in solutions]
    outcomes = judge_texts(functions, mine, [one.text for one in solutions], [one.ids for one in solutions])
    found, more = roll_out(completer, functions, prompts.encoded, solutions, config.rollouts)
    written, last = _stepwise_rows(config, prompts, solutions, outcomes, found)
    counts += more + last
    names = ("completions", "steps", "prefixes", "tokens", "prefix_tokens", "prefilled_tokens")
    names += ("unjudged", "without_steps", "cut")
    mean = lambda values: float(np.mean(values)) if len(values) else math.nan
    summary = {"rows": len(written)} | {name: counts[name] for name in names}
    summary |= {"outcome_mean": mean([row["outcome"] for row in written])}
    summary |= {"label_mean": mean([label for row in written for label in row["labels"]])}
    return written, summary


def check_options(config: LabelStepsConfig) -> None:
    """Raises ValueError, naming the option, for values that are out of range or do not go together."""
    for name in ("rollouts", "num_generations", "max_steps_per_row"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    refuse_from_the_start(config, "label-steps")
    split_steps("", config.step_separator)
    labels_of(np.zeros((1, 1)), kind=config.label, beta=config.label_beta)


def run_label_steps(config: LabelStepsConfig) -> dict[str, int | float]:
    """The summary; the stepwise rows go to `output`.

    Raises ValueError, naming option or row, for what does not fit, and where no completion could be labelled.
    """
    check_options(config)
    output = output_file(config.output)
    config, plan, functions, rows = open_tool(config, from_prefixes=True)
    written, summary = label_steps(config, Completer(config, plan), functions, rows)
    if not written:
        raise ValueError(f"label-steps: no completion has labels, nothing is written to {output}: {summary}")
    partial = output.with_name(output.name + ".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in written))
    partial.replace(output)
    output.with_name(output.name + ".summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def labels_message(summary: dict[str, int | float]) -> str:
    """The summary in words."""
    return (
        f"{summary['rows']} rows with {summary['steps']} labelled steps (mean label {summary['label_mean']:.3f}, mean "
        f"outcome {summary['outcome_mean']:.3f}); {summary['tokens']} tokens sampled after {summary['prefixes']} prefixes "
        f"of {summary['prefix_tokens']} tokens, of which {summary['prefilled_tokens']} were computed; left out: "
        f"{summary['unjudged']} unjudged, {summary['without_steps']} without steps; {summary['cut']} cut to "
        "max_steps_per_row"
    )
