"""The command line: `jaxrl-lm COMMAND`, one of `COMMANDS`. Options in, a run directory, rows or a table out.

Every command takes `--config FILE.toml` and any key as `--key value`; `--help` shows them all. The same commands are
`scripts/*.py`.
"""

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl_lm.config import (
    DistributedOptions,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    GRPOConfig,
    PPOConfig,
    RLOOConfig,
)
from jaxrl_lm.distributed import writes
from jaxrl_lm.dpo import train_dpo
from jaxrl_lm.fit import FitRun
from jaxrl_lm.fit_config import DPOConfig, PRMConfig, RewardConfig, SFTConfig
from jaxrl_lm.inference import run_eval, run_export, run_generate
from jaxrl_lm.lab.config import LabConfig
from jaxrl_lm.lab.run import run_lab
from jaxrl_lm.label_steps import labels_message, run_label_steps
from jaxrl_lm.launch import ending_together, start
from jaxrl_lm.loop import train
from jaxrl_lm.options import nearest, parse
from jaxrl_lm.plan import run_plan
from jaxrl_lm.plan_config import PlanConfig
from jaxrl_lm.plan_table import to_json, to_text
from jaxrl_lm.recipe import run_recipe
from jaxrl_lm.recipe_file import parse_recipe
from jaxrl_lm.reward_fit import train_prm, train_reward
from jaxrl_lm.runs import command_of
from jaxrl_lm.search import run_search, search_table
from jaxrl_lm.seeds import table, train_seeds
from jaxrl_lm.sft import train_sft
from jaxrl_lm.stages import STAGES
from jaxrl_lm.tools_config import LabelStepsConfig, MakeTracesConfig, SearchConfig
from jaxrl_lm.traces import run_make_traces, traces_message


def _read(config_class: type, argv: Sequence[str], command: Callable[..., None], *, several: bool = True) -> Any:
    """The config of a command, once the processes of the run have found each other.

    The options by which they did are this process's own, and no part of the run. `several=False`: for a command that
    is one process; raises ValueError where several are asked for.
    """
    name = next(name for name, one in COMMANDS.items() if one is command)
    config = parse(config_class, argv, prog=f"jaxrl-lm {name}", description=command.__doc__)
    own = {field.name: field.default for field in dataclasses.fields(DistributedOptions)}
    given = {option: getattr(config, option) for option in own}
    if several:
        start(**given)
    elif given["num_processes"] not in (None, 1) or given["coordinator_address"] is not None:
        raise ValueError(f"num_processes, coordinator_address: {name} runs in one process: leave them out")
    return dataclasses.replace(config, **own)


def _say(text: str) -> None:
    """Prints, on one of several processes."""
    if writes():
        print(text)


def grpo(argv: Sequence[str]) -> None:
    """Train with GRPO, or with any algorithm of the family (--preset)"""
    _train(_read(GRPOConfig, argv, grpo))


def rloo(argv: Sequence[str]) -> None:
    """Train with RLOO"""
    _train(_read(RLOOConfig, argv, rloo))


def ppo(argv: Sequence[str]) -> None:
    """Train with PPO and a critic"""
    _train(_read(PPOConfig, argv, ppo))


def _train(config: GRPOConfig) -> None:
    if config.seeds > 1:
        _say(table(train_seeds(config)))
        _say(f"{config.output_dir}: {config.seeds} seeds, mean ± half of the 95 % interval; see seeds.json there")
        return
    run = train(config)
    _say(f"{run.directory}: step {run.step}. Next: jaxrl-lm export --run {run.directory} --directory OUT")


def sft(argv: Sequence[str]) -> None:
    """Train on demonstrations: prompt-completion, messages or text"""
    _fitted(train_sft(_read(SFTConfig, argv, sft)))


def dpo(argv: Sequence[str]) -> None:
    """Train on preferences: pairs, judged completions, or pairs of own samples"""
    _fitted(train_dpo(_read(DPOConfig, argv, dpo)))


def reward(argv: Sequence[str]) -> None:
    """Train a reward model on comparisons or outcomes"""
    _fitted(train_reward(_read(RewardConfig, argv, reward)))


def prm(argv: Sequence[str]) -> None:
    """Train a process reward model on labels of steps"""
    _fitted(train_prm(_read(PRMConfig, argv, prm)))


def _fitted(run: FitRun) -> None:
    _say(f"{run.directory}: step {run.step}. Next: jaxrl-lm export --run {run.directory} --directory OUT")


def generate(argv: Sequence[str]) -> None:
    """Sample completions from a model or a run"""
    config = _read(GenerateConfig, argv, generate, several=False)
    rows = run_generate(config)
    if config.output:
        print(f"{len(rows)} rows written to {config.output}")
        return
    for row in rows:
        print(f"--- {row['prompt'] if isinstance(row['prompt'], str) else row['prompt'][-1]['content']}")
        print("\n".join(row["completions"]))


def evaluate(argv: Sequence[str]) -> None:
    """Evaluate a model or a run on held-out prompts, or probe training prompts"""
    for name, value in run_eval(_read(EvalConfig, argv, evaluate)).items():
        _say(f"{name:40} {value:.4f}")


def export(argv: Sequence[str]) -> None:
    """Write a run's policy or reward model as a Hugging Face directory"""
    config = parse(ExportConfig, argv, prog="jaxrl-lm export", description=export.__doc__)
    path = run_export(config)
    kinds = {"reward": "AutoModelForSequenceClassification", "prm": "AutoModelForTokenClassification"}
    kind = kinds.get(command_of(config.run), "AutoModelForCausalLM")
    member = path / "member_0"  # of an ensemble
    shown = str(member if member.exists() else path)
    print(f"{path}: load it with transformers.{kind}.from_pretrained({shown!r})")


def traces(argv: Sequence[str]) -> None:
    """Write a teacher's completions that a verifier accepts as rows for sft"""
    config = _read(MakeTracesConfig, argv, traces, several=False)
    print(f"{config.output}: {traces_message(run_make_traces(config))}")


def label_steps(argv: Sequence[str]) -> None:
    """Label the steps of completions by completing them, as rows for prm"""
    config = _read(LabelStepsConfig, argv, label_steps, several=False)
    print(f"{config.output}: {labels_message(run_label_steps(config))}")


def search(argv: Sequence[str]) -> None:
    """Choose among completions by a scorer: best-of-n, votes, beams"""
    print(search_table(run_search(_read(SearchConfig, argv, search, several=False))))


def plan(argv: Sequence[str]) -> None:
    """Say what a run would need on a TPU slice or on GPUs, without either"""
    config = parse(PlanConfig, argv, prog="jaxrl-lm plan", description=plan.__doc__)
    jax.config.update("jax_platforms", "cpu")  # the devices of a plan are descriptions: no accelerator is opened
    report = run_plan(config)
    print(json.dumps(to_json(report), indent=2) if config.json else to_text(report))


def recipe(argv: Sequence[str]) -> None:
    """Run the stages of a file, one after another, from where they stopped"""
    stages, until = parse_recipe(argv)
    run_recipe(stages, STAGES, until=until)


def lab(argv: Sequence[str]) -> None:
    """Run the arithmetic lab: a model from nothing, supervised, then GRPO"""
    run_lab(parse(LabConfig, argv, prog="jaxrl-lm lab", description=lab.__doc__))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "sft": sft,
    "dpo": dpo,
    "reward": reward,
    "prm": prm,
    "grpo": grpo,
    "rloo": rloo,
    "ppo": ppo,
    "generate": generate,
    "eval": evaluate,
    "export": export,
    "traces": traces,
    "label-steps": label_steps,
    "search": search,
    "plan": plan,
    "recipe": recipe,
    "lab": lab,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. A mistake in options, files or rows ends with a message and code 2.

    JAXRL_LM_TRACEBACK=1 shows where it was met.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax reports its own errors at length; ours name them
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: jaxrl-lm COMMAND [--config FILE.toml] [--key value ...]\n")
        print("\n".join(f"  {name:12} {command.__doc__}" for name, command in COMMANDS.items()))
        print("\njaxrl-lm COMMAND --help shows every option.")
        raise SystemExit(0 if argv else 2)
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        print(f"jaxrl-lm: no command {name!r}; the nearest is {nearest(name, COMMANDS)!r}", file=sys.stderr)
        raise SystemExit(2)
    try:
        with ending_together(f"jaxrl-lm {name}"):
            COMMANDS[name](rest)
    except (ValueError, OSError, ImportError, FloatingPointError, MemoryError) as error:
        if os.environ.get("JAXRL_LM_TRACEBACK"):
            raise
        print(f"jaxrl-lm {name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
