"""The command line: `jaxrl-lm grpo|rloo|ppo|generate|eval|export|lab`. Options in, a run directory out.

Every command takes `--config FILE.toml` and any key as `--key value`; `--help` shows them all. The same commands are
`scripts/*.py`.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence

from jaxrl_lm.config import EvalConfig, ExportConfig, GenerateConfig, GRPOConfig, PPOConfig, RLOOConfig
from jaxrl_lm.inference import run_eval, run_export, run_generate
from jaxrl_lm.lab.config import LabConfig
from jaxrl_lm.lab.run import run_lab
from jaxrl_lm.loop import train
from jaxrl_lm.options import nearest, parse
from jaxrl_lm.seeds import table, train_seeds


def grpo(argv: Sequence[str]) -> None:
    """Train with GRPO, or with any algorithm of the family (--preset)"""
    _train(parse(GRPOConfig, argv, prog="jaxrl-lm grpo", description=grpo.__doc__))


def rloo(argv: Sequence[str]) -> None:
    """Train with RLOO"""
    _train(parse(RLOOConfig, argv, prog="jaxrl-lm rloo", description=rloo.__doc__))


def ppo(argv: Sequence[str]) -> None:
    """Train with PPO and a critic"""
    _train(parse(PPOConfig, argv, prog="jaxrl-lm ppo", description=ppo.__doc__))


def _train(config: GRPOConfig) -> None:
    if config.seeds > 1:
        print(table(train_seeds(config)))
        print(f"{config.output_dir}: {config.seeds} seeds, mean ± half of the 95 % interval; see seeds.json there")
        return
    run = train(config)
    print(f"{run.directory}: step {run.step}. Next: jaxrl-lm export --run {run.directory} --directory OUT")


def generate(argv: Sequence[str]) -> None:
    """Sample completions from a model or a run"""
    config = parse(GenerateConfig, argv, prog="jaxrl-lm generate", description=generate.__doc__)
    rows = run_generate(config)
    if config.output:
        print(f"{len(rows)} rows written to {config.output}")
        return
    for row in rows:
        print(f"--- {row['prompt'] if isinstance(row['prompt'], str) else row['prompt'][-1]['content']}")
        print("\n".join(row["completions"]))


def evaluate(argv: Sequence[str]) -> None:
    """Evaluate a model or a run on held-out prompts, or probe training prompts"""
    for name, value in run_eval(parse(EvalConfig, argv, prog="jaxrl-lm eval", description=evaluate.__doc__)).items():
        print(f"{name:40} {value:.4f}")


def export(argv: Sequence[str]) -> None:
    """Write a run's policy as a Hugging Face directory"""
    path = run_export(parse(ExportConfig, argv, prog="jaxrl-lm export", description=export.__doc__))
    print(f"{path}: load it with transformers.AutoModelForCausalLM.from_pretrained({str(path)!r})")


def lab(argv: Sequence[str]) -> None:
    """Run the arithmetic lab: a model from nothing, supervised, then GRPO"""
    run_lab(parse(LabConfig, argv, prog="jaxrl-lm lab", description=lab.__doc__))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "grpo": grpo,
    "rloo": rloo,
    "ppo": ppo,
    "generate": generate,
    "eval": evaluate,
    "export": export,
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
        print("\n".join(f"  {name:10} {command.__doc__}" for name, command in COMMANDS.items()))
        print("\njaxrl-lm COMMAND --help shows every option.")
        raise SystemExit(0 if argv else 2)
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        print(f"jaxrl-lm: no command {name!r}; the nearest is {nearest(name, COMMANDS)!r}", file=sys.stderr)
        raise SystemExit(2)
    try:
        COMMANDS[name](rest)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        if os.environ.get("JAXRL_LM_TRACEBACK"):
            raise
        print(f"jaxrl-lm {name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
