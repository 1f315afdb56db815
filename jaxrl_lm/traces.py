"""Rejection sampling: a teacher's completions that a verifier accepts, as prompt-completion rows for `sft`; or the best
against the worst of each prompt as pairs, or all of them with the verdict as their label.

Sources: RAFT (Dong et al., 2023) and ReST-EM (Singh et al., 2023) for keeping what is accepted; STaR (Zelikman et al.,
2022) for the second try with a hint. `keep` is the rule on one prompt's completions, `rejection_sample` the loop.
"""

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl_lm.completions import Completer, Prompts, encode_rows, open_tool, output_file, verdicts
from jaxrl_lm.data import Row
from jaxrl_lm.rewards import RewardFunction
from jaxrl_lm.rollout import Sampled
from jaxrl_lm.tools_config import MakeTracesConfig

REASONS = (
    "truncated",
    "too_short",
    "too_long",
    "format",
    "unjudged",
    "rejected",
    "duplicates",
    "beyond_keep_per_prompt",
    "unpaired",
)
"""Why a completion is left out, in the order in which the rules are asked."""

_NOTHING = {
    "completions": "no completion was accepted",
    "pairs": "no prompt has completions of different verdicts",
    "outcomes": "no completion was judged",
}
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


class Candidate(NamedTuple):
    """A completion of a prompt with the verifier's verdict."""

    text: str
    tokens: int
    value: float  # NaN: no reward function judged it
    truncated: bool


class Traces(NamedTuple):
    """What rejection sampling kept, and the counts of what it met."""

    rows: list[Row]
    summary: dict[str, int]


# --- the rule ---------------------------------------------------------------------------------------------------------


def keep(candidates: Sequence[Candidate], config: MakeTracesConfig) -> tuple[list[int], Counter[str]]:
    """The indices of one prompt's kept completions, and how many were left out for each of `REASONS`.

    Each completion that is left out counts once, for the first rule that it fails. Kept ones are in the order they were
    sampled in; with `keep_per_prompt` the best come first.
    """
    counts: Counter[str] = Counter()
    kept: list[int] = []
    seen: set[str] = set()
    for index, candidate in enumerate(candidates):
        reason = _refusal(candidate, config)
        if reason is None and config.deduplicate and candidate.text.strip() in seen:
            reason = "duplicates"
        if reason is not None:
            counts[reason] += 1
            continue
        seen.add(candidate.text.strip())
        kept.append(index)
    if config.keep_per_prompt is not None:
        kept.sort(key=lambda index: -candidates[index].value)  # stable: of equal ones the first
        counts["beyond_keep_per_prompt"] += len(kept[config.keep_per_prompt :])
        kept = kept[: config.keep_per_prompt]
    return kept, counts


def _refusal(candidate: Candidate, config: MakeTracesConfig) -> str | None:
    if config.drop_truncated and candidate.truncated:
        return "truncated"
    if candidate.tokens < config.min_completion_tokens:
        return "too_short"
    if config.max_completion_tokens is not None and candidate.tokens > config.max_completion_tokens:
        return "too_long"
    if config.format is not None and re.fullmatch(config.format, candidate.text) is None:
        return "format"
    if math.isnan(candidate.value):
        return "unjudged"
    return "rejected" if config.write == "completions" and candidate.value < config.min_reward else None


# --- hints ------------------------------------------------------------------------------------------------------------


def hinted_prompt(row: Row, template: str, where: str) -> Any:
    """The row's prompt with the template around it; of a chat it is the last user message that is replaced.

    {prompt} is the prompt's text and {name} the column of that name; other braces stay as they are. Raises ValueError
    naming the row for a column that it lacks, and for a chat without a user message.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return _filled(template, {**row, "prompt": prompt}, where)
    users = [number for number, message in enumerate(prompt) if message["role"] == "user"]
    if not users:
        raise ValueError(f"{where}: hint_template needs a user message, and the prompt has none")
    last = users[-1]
    text = _filled(template, {**row, "prompt": prompt[last]["content"]}, where)
    return [*prompt[:last], {**prompt[last], "content": text}, *prompt[last + 1 :]]


def _filled(template: str, columns: Row, where: str) -> str:
    for name in _FIELD.findall(template):
        if columns.get(name) is None:
            near = difflib.get_close_matches(name, [key for key in columns if columns[key] is not None], n=1)
            hint = f"; did you mean {{{near[0]}}}?" if near else ""
            raise ValueError(f"{where}: hint_template asks for {{{name}}}, and the row has no such column{hint}")
    return _FIELD.sub(lambda match: str(columns[match[1]]), template)


def _hinted(config: MakeTracesConfig, tokenizer: Any, rows: list[Row]) -> Prompts:
    """The hinted prompts, encoded, beside the rows with the original ones: verifiers and traces see only those."""
    changed = [
        {**row, "prompt": hinted_prompt(row, config.hint_template, f"dataset: row {index}")}
        for index, row in enumerate(rows)
    ]
    encoded, places = encode_rows(config, tokenizer, changed, "dataset with hints")
    return Prompts(encoded._replace(rows=[rows[place] for place in places]), places)


# --- the loop ---------------------------------------------------------------------------------------------------------


def rejection_sample(
    config: MakeTracesConfig,
    completer: Completer,
    functions: Sequence[RewardFunction],
    rows: list[Row],
    *,
    write: Callable[[list[Row]], Any] = lambda rows: None,
) -> Traces:
    """Kept completions of the rows' prompts, `num_generations` of each, as prompt-completion rows.

    A trace is its dataset row with `completion` (one assistant message for a chat), `score` (the verdict), `row` (its
    place in the dataset) and `hinted`. Prompts without a kept completion get a second try under `hint_template`, whose
    traces have the original prompt. `write` gets each batch's traces.

    Raises ValueError for options that do not fit, with the row for a hint it cannot make, and as rewards do.
    """
    check_options(config)
    first = encode_rows(config, completer.tokenizer, rows, "dataset")
    hints = _hinted(config, completer.tokenizer, rows) if config.hint_template is not None else None
    sets = [first.encoded] if hints is None else [first.encoded, hints.encoded]
    sampler, found, counts = completer.sampler(sets), [], Counter()

    def attempt(prompts: Prompts, indices: list[int], hinted: bool) -> set[int]:
        """Samples these prompts; the places of rows that have a trace now."""
        solved = set()
        for batch, sampled in completer.draw(sampler, prompts.encoded, indices, number=int(hinted)):
            places = [prompts.places[index] for index in batch]
            traces, more = _traces(config, functions, sampled, places, hinted)
            counts.update(more)
            write(traces)
            found.extend(traces)
            solved.update(trace["row"] for trace in traces)
        return solved

    solved = attempt(first, list(range(len(first.places))), False)
    asked, helped = set(first.places), set()
    if hints is not None:
        again = [index for index, place in enumerate(hints.places) if place not in solved]
        counts["hinted_prompts"] = len(again)
        helped = attempt(hints, again, True)
        asked.update(hints.places)
    summary = {"rows": len(rows), "prompts": len(asked), "prompts_without": len(asked - solved - helped)}
    summary["written"] = len(found)
    names = ("sampled", "tokens", "accepted", *REASONS)
    names += ("hinted_prompts", "hinted_accepted") if hints is not None else ()
    return Traces(found, summary | {name: counts[name] for name in names})


def _traces(
    config: MakeTracesConfig, functions: Sequence[RewardFunction], sampled: Sampled, places: list[int], hinted: bool
) -> tuple[list[Row], Counter[str]]:
    """The kept completions of a batch, and its counts."""
    group = sampled.count // len(places)
    values = verdicts(functions, sampled, group)
    traces, counts = [], Counter(sampled=sampled.count, tokens=sum(map(len, sampled.completion_ids)))
    for start, place in zip(range(0, sampled.count, group), places, strict=True):
        group_rows = range(start, start + group)
        candidates = [
            Candidate(sampled.texts[n], len(sampled.completion_ids[n]), float(values[n]), bool(sampled.truncated[n]))
            for n in group_rows
        ]
        kept, left_out = keep(candidates, config)
        counts.update(left_out)
        written = written_rows(sampled.rows[start], candidates, kept, place, hinted, config)
        if config.write == "pairs":
            counts["unpaired"] += len(kept) - 2 * len(written)
        counts["accepted"] += 2 * len(written) if config.write == "pairs" else len(written)
        traces += written
    counts["hinted_accepted"] = len(traces) if hinted else 0
    return traces, counts


def written_rows(
    row: Row, candidates: Sequence[Candidate], kept: list[int], place: int, hinted: bool, config: MakeTracesConfig
) -> list[Row]:
    """A prompt's rows, as `write` says."""
    text = lambda index: candidates[index].text
    response = lambda index: text(index) if isinstance(row["prompt"], str) else [_assistant(text(index))]
    value = lambda index: candidates[index].value
    marks = {"row": place, "hinted": hinted}
    if config.write == "completions":
        return [{**row, "completion": response(n), "score": value(n), **marks} for n in kept]
    if config.write == "outcomes":
        right = lambda n: value(n) >= config.min_reward
        return [{**row, "completion": response(n), "label": right(n), "score": value(n), **marks} for n in kept]
    if not kept or max(map(value, kept)) == min(map(value, kept)):
        return []
    best, worst = max(kept, key=value), min(kept, key=value)
    return [
        {**row, "chosen": response(best), "rejected": response(worst), "score_gap": value(best) - value(worst), **marks}
    ]


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def check_options(config: MakeTracesConfig) -> None:
    """Raises ValueError, naming the option, for values that are out of range or do not go together."""
    if config.keep_per_prompt is not None and config.keep_per_prompt < 1:
        raise ValueError(f"keep_per_prompt={config.keep_per_prompt}: must be at least 1 (leave it out to keep all)")
    most = config.max_completion_length if config.max_completion_tokens is None else config.max_completion_tokens
    if not config.min_completion_tokens <= most:
        raise ValueError(
            f"min_completion_tokens={config.min_completion_tokens} and at most {most} tokens: no completion is kept"
        )
    if config.format is not None:
        try:
            re.compile(config.format)
        except re.error as error:
            raise ValueError(f"format={config.format!r} is not a regular expression: {error}") from error
    if config.write != "completions" and (config.hint_template is not None or config.keep_per_prompt is not None):
        raise ValueError(
            f"write={config.write!r} keeps right and wrong completions alike: leave hint_template and keep_per_prompt out"
        )
    if config.hint_template is not None and "{prompt}" not in config.hint_template:
        raise ValueError(f"hint_template={config.hint_template!r}: it must hold {{prompt}}")


def run_make_traces(config: MakeTracesConfig) -> dict[str, int]:
    """The summary; traces go to `output`, which appears when all are there, until then to <output>.partial.

    Raises ValueError, naming option or row, for what does not fit, and where no completion was accepted.
    """
    check_options(config)
    output = output_file(config.output)
    config, plan, functions, rows = open_tool(config)
    completer = Completer(config, plan)
    partial = output.with_name(output.name + ".partial")
    with partial.open("w") as file:

        def write(traces: list[Row]) -> None:
            file.writelines(json.dumps(trace) + "\n" for trace in traces)
            file.flush()

        summary = rejection_sample(config, completer, functions, rows, write=write).summary
    output.with_name(output.name + ".summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if not summary["accepted"]:
        partial.unlink()
        raise ValueError(f"traces: {_NOTHING[config.write]}, nothing is written to {output}: {traces_message(summary)}")
    partial.replace(output)
    return summary


def traces_message(summary: dict[str, int]) -> str:
    """The summary in words."""
    left_out = ", ".join(f"{summary[name]} {name}" for name in REASONS if summary[name]) or "none"
    text = (
        f"{summary['accepted']} of {summary['sampled']} completions of {summary['prompts']} prompts kept "
        f"({summary['tokens']} tokens; left out: {left_out}); {summary['prompts_without']} prompts have none"
    )
    if "hinted_prompts" in summary:
        text += f"; {summary['hinted_accepted']} from second tries with a hint at {summary['hinted_prompts']} prompts"
    return text
