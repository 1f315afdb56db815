"""Completions of a loaded model and a verifier's verdicts on them: what the tools on scores share.

Loading and sampling are those of `inference.py`. Next to read: `traces.py`, `label_steps.py`, `search.py`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Float64

from jaxrl_lm.checks import check_routes
from jaxrl_lm.config import GenerateConfig, PromptOptions, SamplingOptions
from jaxrl_lm.data import Row, read_rows
from jaxrl_lm.decode_steps import Forks, compile_forks
from jaxrl_lm.distributed import place
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.evaluate import reward_table
from jaxrl_lm.inference import Loaded, load_any, make_inference, say, with_run_options
from jaxrl_lm.models import eos_token_ids
from jaxrl_lm.prepare import make_sampling, plan_of
from jaxrl_lm.prompt_sets import drop_notes, encode_with
from jaxrl_lm.reward_model import open_reward_models
from jaxrl_lm.rewards import RewardFunction, columns_of, combine, compute_rewards, resolve_all
from jaxrl_lm.rollout import EVAL, Sampled, Sampler
from jaxrl_lm.sharding import Plan
from jaxrl_lm.tools_config import ToolOptions

Options = TypeVar("Options", bound=ToolOptions)


_SHARED = tuple(field.name for base in (PromptOptions, SamplingOptions) for field in dataclasses.fields(base))


def _as_generation(config: ToolOptions, **changes: Any) -> GenerateConfig:
    """What the config says of prompts and sampling, as options of `inference.py`."""
    return GenerateConfig(model=config.model, **{name: getattr(config, name) for name in _SHARED} | changes)


def with_options_of_run(config: Options, *, from_prefixes: bool = False) -> Options:
    """The config with the prompt and sampling options of the run that its model names, see `with_run_options`."""
    taken = with_run_options(_as_generation(config), from_prefixes=from_prefixes)
    return dataclasses.replace(config, **{name: getattr(taken, name) for name in _SHARED})


def open_verifier(config: ToolOptions, plan: Plan) -> tuple[RewardFunction, ...]:
    """The reward functions of a config, reward models on the mesh.

    Raises ValueError where none is given or has a weight, and what `resolve_all` and `RewardModel` raise.
    """
    if not config.reward:
        raise ValueError("reward: no reward function is given, nothing can be verified")
    (opened,) = open_reward_models(config.reward, plan=plan, dtype=config.dtype)
    functions = resolve_all(opened, config.reward_weights)
    if not any(function.weight for function in functions):
        raise ValueError("reward_weights: every weight is 0, so that every verdict would be 0")
    return functions


def verdicts(functions: Sequence[RewardFunction], sampled: Sampled, group_size: int) -> Float64[np.ndarray, " n"]:
    """The weighted sum of what the functions give to each real row; NaN where all of them abstain."""
    values = reward_table(functions, sampled, group_size)
    returns, valid = combine(values, [function.weight for function in functions], group_size=1)
    return np.where(valid, returns, np.nan)


def judge_texts(
    functions: Sequence[RewardFunction], rows: Sequence[Row], texts: Sequence[str], ids: Sequence[Sequence[int]]
) -> Float64[np.ndarray, " n"]:
    """The same for a completion of each row, each a group of its own. Steps that a row brings are not shown to them."""
    values = compute_rewards(
        functions,
        prompts=[row["prompt"] for row in rows],
        completions=texts,
        completion_ids=ids,
        columns=columns_of([{name: value for name, value in row.items() if name != "completions"} for row in rows]),
        group_ids=list(range(len(rows))),
    )
    returns, valid = combine(values, [function.weight for function in functions], group_size=1)
    return np.where(valid, returns, np.nan)


class Prompts(NamedTuple):
    """Encoded prompts and where they stand in the dataset."""

    encoded: EncodedPrompts
    places: list[int]  # index of each kept prompt's row


def encode_rows(config: ToolOptions, tokenizer: Any, rows: list[Row], name: str) -> Prompts:
    """The rows' prompts, encoded as the options say; what was dropped is said on stderr."""
    encoded = encode_with(config, tokenizer, rows, name)
    say(drop_notes({name: encoded}, config.max_prompt_length))
    number = {id(row): index for index, row in enumerate(rows)}  # encoding keeps the row objects
    return Prompts(encoded, [number[id(row)] for row in encoded.rows])


def read_dataset(config: ToolOptions, functions: Sequence[RewardFunction]) -> list[Row]:
    """The first `limit` rows. Raises ValueError for a limit below 1 or a route to a reward that is not there."""
    if config.limit is not None and config.limit < 1:
        raise ValueError(f"limit={config.limit}: must be at least 1 (leave it out for all rows)")
    rows = read_rows(config.dataset, name="dataset")[: config.limit]
    check_routes(functions, rows, "dataset")
    return rows


class Completer:
    """A loaded model that samples completions of encoded prompts, a batch of `prompts_per_step` at a time.

    What is sampled is a function of the config, the weights and the prompts of a call, in their order.
    """

    def __init__(self, config: ToolOptions, plan: Plan):
        self.config, self.plan = config, plan
        self.loaded: Loaded = load_any(
            config.model, plan, dtype=config.dtype, attention=config.attention_implementation
        )
        self.tokenizer = self.loaded.tokenizer
        self.eos = eos_token_ids(self.loaded.generation, self.tokenizer)
        self._key = place(jax.random.key(config.seed), plan.replicated)
        self._weights: Any = None

    def sampler(self, sets: Sequence[EncodedPrompts], **changes: Any) -> Sampler:
        """A sampler for these prompts under the config with these changes.

        Raises ValueError where a prompt fits no bucket, or prompts_per_step does not divide over the devices.
        """
        sampler = make_inference(_as_generation(self.config, **changes), self.loaded, self.plan, list(sets))
        if self._weights is None:
            self._weights = sampler.steps.prepare_decode(self.loaded.params, None)
        return sampler

    def forks(self, **changes: Any) -> Forks:
        """What samples after prefixes that lie in caches, under the config with these changes."""
        options = _as_generation(self.config, **changes)
        return compile_forks(
            self.loaded.model, self.plan, make_sampling(options, self.tokenizer, self.loaded.generation)
        )

    def draw(
        self, sampler: Sampler, prompts: EncodedPrompts, indices: Sequence[int], *, number: int
    ) -> Iterator[tuple[list[int], Sampled]]:
        """Batches of prompts with their completions; two draws of a call need different numbers."""
        for step, start in enumerate(range(0, len(indices), sampler.prompts_per_call)):
            batch = list(indices[start : start + sampler.prompts_per_call])
            options = {"purpose": EVAL + number, "step": step, "policy_step": 0}
            heat = self.config.temperature
            yield batch, sampler(self._weights, self._key, prompts, batch, temperature=heat, **options)


def open_tool(
    config: Options, *, from_prefixes: bool = False
) -> tuple[Options, Plan, tuple[RewardFunction, ...], list[Row]]:
    """The config with the options of its run, the mesh, the verifier and the rows: everything before the model."""
    config = with_options_of_run(config, from_prefixes=from_prefixes)
    plan = plan_of(config)
    functions = open_verifier(config, plan)
    return config, plan, functions, read_dataset(config, functions)


def output_file(path: str) -> Path:
    """The path, in a directory that exists from now on. Raises ValueError where it is a directory."""
    output = Path(path).expanduser()
    if output.is_dir():
        raise ValueError(f"output={path!r} is a directory: give a file")
    output.parent.mkdir(parents=True, exist_ok=True)
    return output
