"""The commands that a recipe may have as stages, and what each hands to the stages after it (`recipe.py`)."""

from pathlib import Path
from typing import Any

from jaxrl_lm.config import EvalConfig, ExportConfig, GenerateConfig, GRPOConfig, PPOConfig, RLOOConfig
from jaxrl_lm.dpo import train_dpo
from jaxrl_lm.fit_config import DPOConfig, PRMConfig, RewardConfig, SFTConfig
from jaxrl_lm.inference import run_eval, run_export, run_generate
from jaxrl_lm.label_steps import run_label_steps
from jaxrl_lm.loop import Run, train
from jaxrl_lm.recipe_file import Command
from jaxrl_lm.reward_fit import train_prm, train_reward
from jaxrl_lm.search import run_search
from jaxrl_lm.sft import train_sft
from jaxrl_lm.tools_config import LabelStepsConfig, MakeTracesConfig, SearchConfig
from jaxrl_lm.traces import run_make_traces


def _exported(config: Any, directory: Path) -> str:
    """What a training stage hands on: its last checkpoint as a Hugging Face directory."""
    return str(run_export(ExportConfig(run=str(directory), directory=str(directory / "model"), overwrite=True)))


def _one_run(config: GRPOConfig) -> Run:
    if config.seeds != 1:
        raise ValueError(f"seeds={config.seeds}: a stage of a recipe is one run; leave the option out")
    return train(config)


def _rows(config: Any, directory: Path) -> str:
    return config.output


STAGES: dict[str, Command] = {
    "sft": Command(SFTConfig, train_sft, _exported),
    "dpo": Command(DPOConfig, train_dpo, _exported),
    "reward": Command(RewardConfig, train_reward, _exported),
    "prm": Command(PRMConfig, train_prm, _exported),
    "grpo": Command(GRPOConfig, _one_run, _exported),
    "rloo": Command(RLOOConfig, _one_run, _exported),
    "ppo": Command(PPOConfig, _one_run, _exported),
    "traces": Command(MakeTracesConfig, run_make_traces, _rows, places={"output": "rows.jsonl"}),
    "label-steps": Command(LabelStepsConfig, run_label_steps, _rows, places={"output": "rows.jsonl"}),
    "generate": Command(GenerateConfig, run_generate, _rows, places={"output": "rows.jsonl"}),
    "search": Command(SearchConfig, run_search, _rows, places={"output": "search.json"}),
    "eval": Command(EvalConfig, run_eval, lambda config, directory: str(directory / "metrics.json"), {"output": "."}),
    "export": Command(
        ExportConfig, run_export, lambda config, directory: config.directory, places={"directory": "model"}
    ),
}
