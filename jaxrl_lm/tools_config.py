"""Options of the tools on scores: traces that a verifier accepts, labels of steps, choosing among completions.

Frozen dataclasses, the same keys in TOML files and on the command line. What the tools do: `traces.py`,
`label_steps.py`, `search.py`.
"""

import dataclasses
from typing import Literal

from jaxrl_lm.config import MachineOptions, PromptOptions, SamplingOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolOptions(SamplingOptions, PromptOptions, MachineOptions):
    """What every tool that samples a model and judges its completions has."""

    model: str
    """Run directory, directory in Hugging Face format, GGUF file, or hub id."""
    dataset: str
    """JSONL, JSON, CSV or Parquet file, a directory of them, a hub dataset id, or package.module:function."""
    limit: int | None = None
    """Rows of the dataset that are used; None: all."""
    reward: tuple[str, ...] = ()
    """The verifier: a shipped name, package.module:function, file.py:function or reward_model:DIRECTORY."""
    reward_weights: tuple[float, ...] = ()
    """One weight a reward function; empty: all 1. The verdict is the weighted sum."""
    seed: int = 0
    """Of everything that is sampled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeTracesConfig(ToolOptions):
    """Options of writing a model's judged completions as rows to train on."""

    output: str
    """JSONL file for the rows; a summary goes to <output>.summary.json."""
    write: Literal["completions", "pairs", "outcomes"] = "completions"
    """Accepted completions (sft), the best against the worst of a prompt (dpo, reward), or all of them with labels
    (reward --loss_type outcome)."""
    min_reward: float = 0.5
    """A completion is accepted, or labelled right, from this verdict up."""
    keep_per_prompt: int | None = None
    """The best so many of a prompt, of equal ones the first; None: all that are accepted."""
    deduplicate: bool = True
    """Keep equal completions of a prompt once, white space around them aside."""
    min_completion_tokens: int = 1
    """Shorter completions are left out; the end-of-sequence token counts."""
    max_completion_tokens: int | None = None
    """Longer completions are left out; None: max_completion_length is the only limit."""
    drop_truncated: bool = True
    """Leave out completions that ran into their limit."""
    format: str | None = None
    """Regular expression that the whole completion must match."""
    hint_template: str | None = None
    """Prompt, with {prompt} and any column such as {answer}, for a second try at prompts without a kept completion."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelStepsConfig(ToolOptions):
    """Options of labelling steps by completing them."""

    output: str
    """JSONL file for the stepwise rows; a summary goes to <output>.summary.json."""
    num_generations: int = 4
    """Completions a prompt, for rows that bring none."""
    rollouts: int = 8
    """Completions that go on from each step."""
    label: Literal["soft", "hard", "log-mean-exp"] = "soft"
    """Mean outcome, whether any is right, or between the two by label_beta."""
    label_beta: float | None = None
    """Of log-mean-exp: the best outcome towards 0, the mean towards infinity."""
    step_separator: str = "\n"
    """Where a completion is cut into steps."""
    max_steps_per_row: int | None = None
    """The first so many steps of a completion are labelled and written; None: all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig(ToolOptions):
    """Options of choosing among completions by a scorer, judged by a verifier."""

    scorer: str
    """What ranks completions: reward_model:DIRECTORY, prm:DIRECTORY, or a reward function."""
    methods: tuple[str, ...] = ("best_of_n", "majority", "weighted_majority")
    """Some of best_of_n, majority, weighted_majority, beam."""
    answer_function: str = "jaxrl_lm.rewards.arithmetic:extract_number"
    """Text to its final answer (None: it has none), for votes; package.module:function or file.py:function."""
    credit: Literal["last", "min", "product", "mean"] = "last"
    """Of prm: from the scores of steps to that of a completion."""
    beam_width: int = 4
    """Beams of a prompt that are kept."""
    beam_expand: int = 4
    """Continuations of each beam by one step."""
    step_separator: str = "\n"
    """What ends a step of beam search."""
    max_step_length: int = 128
    """Tokens of one step of beam search at most."""
    max_steps: int = 16
    """Steps of beam search at most."""
    beam_prompts: int = 64
    """Prompts whose beams are searched at once; the caches of their last step are held."""
    output: str | None = None
    """JSON file for the curves and a record a prompt; None: the terminal only."""
