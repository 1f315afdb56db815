"""jaxrl_lm: reinforcement learning of language models as pure functions on sharded pytrees."""

from jaxrl_lm import algos, models, sharding
from jaxrl_lm.config import (
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    GRPOConfig,
    PPOConfig,
    RLOOConfig,
    SamplingConfig,
    SFTConfig,
)
from jaxrl_lm.generate import generate, prepare_decode
from jaxrl_lm.loop import Run, train
from jaxrl_lm.score import score
from jaxrl_lm.seeds import train_seeds
from jaxrl_lm.steps import Steps, compile_steps
from jaxrl_lm.types import CriticBatch, Frozen, PolicyBatch, Requests, Rollout, Scores, SFTBatch, TrainState
from jaxrl_lm.update import update

__all__ = [
    "CriticBatch",
    "EvalConfig",
    "ExportConfig",
    "Frozen",
    "GRPOConfig",
    "GenerateConfig",
    "PPOConfig",
    "PolicyBatch",
    "RLOOConfig",
    "Requests",
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
    "generate",
    "models",
    "prepare_decode",
    "score",
    "sharding",
    "train",
    "train_seeds",
    "update",
]
