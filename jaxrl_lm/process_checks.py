"""What the options of step rewards must satisfy; called by `checks.py`. Every error names the option and what to do."""

import dataclasses
from typing import Any

from jaxrl_lm import algos
from jaxrl_lm.algorithm_config import ProcessOptions
from jaxrl_lm.config import GRPOConfig

LEAST = {"step_weight": 0, "outcome_weight": 0, "implicit_prm_coef": 0}
# Advantages of each token, which sums of rewards to go can be made of.
OF_TOKENS = ("group", "gae", "batch")


def check(config: GRPOConfig, chosen: algos.Preset) -> None:
    """Raises ValueError where options of step rewards contradict each other, or nothing reads them."""
    given = {"step_reward": config.step_reward, "implicit_prm": config.implicit_prm}
    for field in dataclasses.fields(ProcessOptions):
        reads = ["implicit_prm"] if field.name.startswith("implicit") else list(given)
        idle = field.name not in given and all(given[name] is None for name in reads)
        if idle and getattr(config, field.name) != field.default:
            raise ValueError(
                f"{field.name}={getattr(config, field.name)!r} has no effect without {' or '.join(reads)}: give "
                f"{reads[0]}, or leave it out"
            )
    if not gives_steps(config):
        return
    _check_credit(config, chosen)
    _check_guards(config, chosen)
    _check_implicit(config)


def gives_steps(config: GRPOConfig) -> bool:
    """Whether tokens are paid for steps: those of a function, or of an implicit process reward model."""
    return config.step_reward is not None or config.implicit_prm is not None


def _check_credit(config: GRPOConfig, chosen: algos.Preset) -> None:
    name = "step_reward" if config.implicit_prm is None else "implicit_prm"
    if not config.step_weight and not config.outcome_weight:
        raise ValueError("step_weight and outcome_weight are both 0: nothing would be trained")
    if chosen.advantage in ("accepted", "pass-at-k", "max-rl"):
        raise ValueError(
            f"{name} changes the rewards that advantage={chosen.advantage!r} judges: leave one of them out"
        )
    if chosen.advantage == "group" and config.outcome_weight != 1 and chosen.beta and chosen.kl_in == "reward":
        raise ValueError(
            f"outcome_weight={config.outcome_weight}: with advantage='group' it would weigh the KL in the reward too; use "
            "kl_in='loss', or step_weight alone"
        )
    if chosen.advantage == "greedy":
        raise ValueError(
            f"{name}: the greedy answer that advantage='greedy' compares with has no step rewards: use group, "
            "leave-one-out, constant, batch or gae"
        )
    if config.step_credit == "sum-to-go" and chosen.advantage not in OF_TOKENS:
        raise ValueError(
            f"step_credit='sum-to-go' gives each token its own credit, and advantage={chosen.advantage!r} one number a "
            "completion: use mean, min, product or last, or advantage group, gae or batch"
        )


def _check_guards(config: GRPOConfig, chosen: algos.Preset) -> None:
    for name in ("step_normalise", "step_shaping"):
        if getattr(config, name) and config.step_credit != "sum-to-go":
            raise ValueError(
                f"{name} guards the sums of step_credit='sum-to-go' against their number of steps; "
                f"step_credit={config.step_credit!r} is no sum: leave one of them out"
            )
    if config.step_normalise and config.step_shaping:
        raise ValueError("step_normalise and step_shaping are two guards against the same: choose one of them")
    if config.step_shaping and chosen.advantage == "group":
        raise ValueError(
            "step_shaping pays differences whose sums only a return to go keeps as they are, and advantage='group' "
            "normalises each: use advantage gae or batch, or step_normalise"
        )


def _check_implicit(config: GRPOConfig) -> None:
    if config.implicit_prm is None:
        return
    if config.step_reward is not None:
        raise ValueError("step_reward and implicit_prm are both given: steps have one reward; leave one of them out")
    if config.step_credit == "product":
        raise ValueError(
            "step_credit='product' multiplies chances in [0, 1], and implicit_prm pays log-ratios: use another credit"
        )
    if config.step_shaping:
        raise ValueError(
            "step_shaping pays differences of values, and what implicit_prm pays are such differences: leave it out"
        )


def check_own(config: GRPOConfig, *, advantages: Any, objective: Any) -> None:
    """Raises ValueError where a part of the caller's cannot have what the options of steps ask for: an advantages
    function reads one return a row, an objective has no loss of an implicit process reward model."""
    if objective is not None and config.implicit_prm is not None:
        raise ValueError("implicit_prm: its loss is added to the run's own, which an objective of yours replaces")
    if advantages is not None and gives_steps(config) and config.step_credit == "sum-to-go":
        raise ValueError(
            "step_credit='sum-to-go' gives each token its own credit, and an advantages function of your own one number "
            "a completion: use mean, min, product or last"
        )
