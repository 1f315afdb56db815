"""The commands that a recipe may have as stages, and what each hands to the stages after it (`recipe.py`)."""

from pathlib import Path
from typing import Any

from jaxrl_lm import checks, dpo, fit_prepare, label_steps, search, traces
from jaxrl_lm.config import EvalConfig, ExportConfig, GenerateConfig, GRPOConfig, PPOConfig, RLOOConfig
from jaxrl_lm.fit_config import DPOConfig, PRMConfig, RewardConfig, SFTConfig, idle_options
from jaxrl_lm.inference import run_eval, run_export, run_generate
from jaxrl_lm.loop import train
from jaxrl_lm.mix import check_mix, check_teacher
from jaxrl_lm.placement import check_placement, open_placement
from jaxrl_lm.prepare import microbatches_of, plan_of
from jaxrl_lm.recipe_file import Command
from jaxrl_lm.reward_fit import train_prm, train_reward
from jaxrl_lm.sft import train_sft
from jaxrl_lm.tools_config import LabelStepsConfig, MakeTracesConfig, SearchConfig


def _exported(config: Any, directory: Path) -> str:
    """What a training stage hands on: its last checkpoint as a Hugging Face directory."""
    return str(run_export(ExportConfig(run=str(directory), directory=str(directory / "model"), overwrite=True)))


def _check_policy(config: GRPOConfig) -> None:
    """The options that a policy-gradient run checks before it loads anything."""
    placement = open_placement(config)
    ways = placement.train.batch_ways
    checks.check(config, ways)
    kept = {"reference": checks.needs_reference(config), "moves": checks.moves_reference(config)}
    check_placement(config, placement, **kept)
    check_mix(config, ways, microbatches_of(config))
    check_teacher(config)
    if config.seeds != 1:
        raise ValueError(f"seeds={config.seeds}: a stage of a recipe is one run; leave the option out")


def _check_fit(config: Any) -> None:
    fit_prepare.check(config, plan_of(config))


def _check_dpo(config: DPOConfig) -> None:
    _check_fit(config)
    dpo.check(config, config.rows_per_step // (config.microbatch_rows or config.rows_per_step))


def _evaluated(config: EvalConfig, directory: Path) -> str:
    return str(directory / ("probe.json" if config.probe else "metrics.json"))


def _rows(config: Any, directory: Path) -> str:
    return config.output


STAGES: dict[str, Command] = {
    "sft": Command(SFTConfig, train_sft, _exported, check=_check_fit),
    "dpo": Command(
        DPOConfig,
        dpo.train_dpo,
        _exported,
        check=_check_dpo,
        idle=lambda options: idle_options(options.get("refresh_steps")),
    ),
    "reward": Command(RewardConfig, train_reward, _exported, check=_check_fit),
    "prm": Command(PRMConfig, train_prm, _exported, check=_check_fit),
    "grpo": Command(GRPOConfig, train, _exported, check=_check_policy),
    "rloo": Command(RLOOConfig, train, _exported, check=_check_policy),
    "ppo": Command(PPOConfig, train, _exported, check=_check_policy),
    "traces": Command(MakeTracesConfig, traces.run_make_traces, _rows, {"output": "rows.jsonl"}, traces.check_options),
    "label-steps": Command(
        LabelStepsConfig, label_steps.run_label_steps, _rows, {"output": "rows.jsonl"}, label_steps.check_options
    ),
    "generate": Command(GenerateConfig, run_generate, _rows, {"output": "rows.jsonl"}),
    "search": Command(SearchConfig, search.run_search, _rows, {"output": "search.json"}, search.check_options),
    "eval": Command(EvalConfig, run_eval, _evaluated, {"output": "."}),
    "export": Command(ExportConfig, run_export, lambda config, directory: config.directory, {"directory": "model"}),
}
