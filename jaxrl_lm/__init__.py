"""jaxrl_lm: reinforcement learning of language models as pure functions on sharded pytrees."""

from jaxrl_lm import algos, models, sharding
from jaxrl_lm.config import EvalConfig, ExportConfig, GenerateConfig, GRPOConfig, PPOConfig, RLOOConfig
from jaxrl_lm.dpo import train_dpo
from jaxrl_lm.fit import FitRun, fit
from jaxrl_lm.fit_config import DPOConfig, PRMConfig, RewardConfig, SFTConfig
from jaxrl_lm.generate import generate, prepare_decode
from jaxrl_lm.loop import Run, train
from jaxrl_lm.reward_fit import train_prm, train_reward
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.seeds import train_seeds
from jaxrl_lm.sft import train_sft
from jaxrl_lm.steps import Steps, compile_steps
from jaxrl_lm.types import CriticBatch, Frozen, PolicyBatch, Requests, Rollout, Scores, SFTBatch, TrainState
from jaxrl_lm.update import update

__all__ = [
    "CriticBatch",
    "DPOConfig",
    "EvalConfig",
    "ExportConfig",
    "FitRun",
    "Frozen",
    "GRPOConfig",
    "GenerateConfig",
    "PPOConfig",
    "PRMConfig",
    "PolicyBatch",
    "RLOOConfig",
    "Requests",
    "RewardConfig",
    "Rollout",
    "Run",
    "SFTBatch",
    "SFTConfig",
    "SamplingConfig",
    "Scores",
    "Steps",
    "TrainState",
    "algos",
    "compile_steps",
    "fit",
    "generate",
    "models",
    "prepare_decode",
    "score",
    "sharding",
    "train",
    "train_dpo",
    "train_prm",
    "train_reward",
    "train_seeds",
    "train_sft",
    "update",
]
