"""The functions and models that judge completions, from the options that name them. How they are called: `rewards/`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.placement import Placement
from jaxrl_lm.process_model import PREFIX, ProcessModel
from jaxrl_lm.reward_model import RewardModel, open_reward_models
from jaxrl_lm.rewards import RewardFunction, resolve_all, resolve_steps
from jaxrl_lm.sharding import Plan

MODELS = (RewardModel, ProcessModel)


def _names(given: tuple[str, ...], rewards: Sequence[RewardFunction]) -> tuple[str, ...]:
    """The reward option that a run is resumed by: as given, or the names of functions that the caller passed."""
    return given if len(given) == len(rewards) else tuple(function.name for function in rewards)


class Rewards(NamedTuple):
    train: tuple[RewardFunction, ...]
    evaluate: tuple[RewardFunction, ...]
    steps: RewardFunction | None  # of the steps of a completion
    nbytes: int  # of the models among them


def open_rewards(
    config: GRPOConfig, reward_functions: Sequence[Callable[..., Any]] | None, placement: Placement
) -> tuple[GRPOConfig, Rewards]:
    """The functions that the options name, or the caller's, and the config with their names.

    Models among them lie where reward_placement says. Raises ValueError where there are none and it says something.
    """
    where = {"plan": placement.plan(config.reward_placement), "hosted": config.reward_placement == "host"}
    given, eval_given = open_reward_models(
        reward_functions if reward_functions is not None else config.reward,
        config.eval_reward_functions,
        dtype=config.dtype,
        **where,
    )
    rewards = resolve_all(given, config.reward_weights)
    config = dataclasses.replace(config, reward=_names(config.reward, rewards))
    scorer = _process_model(config, **where)
    steps = None if config.step_reward is None else resolve_steps(scorer or config.step_reward)
    models = {id(one): one.nbytes for one in (*given, *eval_given, scorer) if isinstance(one, MODELS)}
    if config.reward_placement != "mesh" and not models:
        raise ValueError(
            f"reward_placement={config.reward_placement!r} has no effect: no reward_model: or prm: is among the rewards; "
            "leave it out"
        )
    return config, Rewards(rewards, resolve_all(eval_given) if eval_given else rewards, steps, sum(models.values()))


def _process_model(config: GRPOConfig, *, plan: Plan, hosted: bool) -> Callable[..., Any] | None:
    if config.step_reward is None or not config.step_reward.startswith(PREFIX):
        return None
    return ProcessModel(config.step_reward, plan=plan, dtype=config.dtype, hosted=hosted)
