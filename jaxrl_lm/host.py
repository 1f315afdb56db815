"""What a run knows beside its arrays: which prompts come next, coefficients that move, groups kept for replay.

It is saved as JSON with each checkpoint, so that a resumed run goes on as if it had not stopped.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_lm import algos
from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.rollout import CategoryBandit, Curriculum, Earlier, Replay, Shuffled, SolveRates, categories_of

MOVING = ("tokens", "calls", "updates", "kl_coef", "entropy_coef", "entropy_bonus", "lr_scale", "scored", "spent")
PARTS = (*MOVING, "prompts", "rates", "replay", "earlier")


@dataclasses.dataclass
class Host:
    """Mutable, and changed by the loop alone."""

    prompts: Shuffled | Curriculum | CategoryBandit
    rates: SolveRates  # of every prompt seen, whatever chooses them
    replay: Replay | None
    kl_coef: float
    entropy_coef: float
    entropy_bonus: float  # the coefficient in force: 0 while the entropy is above its target
    lr_scale: float = 1.0
    scored: bool = False  # the gap to the sampler was too large: batches are scored, and corrected
    spent: str | None = None  # why the run has ended before its last step
    tokens: int = 0  # sampled so far, with their prompts
    calls: int = 0  # of the sampler; no two calls share a key
    updates: int = 0  # minibatches built so far
    earlier: Earlier | None = None  # completions that speculation guesses from

    def state(self) -> dict[str, Any]:
        """A JSON table."""
        return self.snapshot()()

    def snapshot(self, names: Sequence[str] = PARTS) -> Callable[[], dict[str, Any]]:
        """What makes a JSON table of these parts as they are now, also when they have moved on: completions and groups are
        packed when it is called, and until then only referred to."""
        parts = {name: self._part(name) for name in names}
        return lambda: {name: part() for name, part in parts.items()}

    def _part(self, name: str) -> Callable[[], Any]:
        part = getattr(self, name)
        own = name == "rates" and getattr(self.prompts, "table", None) is part  # the curriculum saves it
        if name in ("replay", "earlier") and part is not None:
            return part.snapshot()
        value = None if own else part.state() if name in ("prompts", "rates") else part
        return lambda: value

    def load(self, state: Mapping[str, Any], *, rows: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from a saved table. Raises ValueError where it is of another dataset."""
        for name in MOVING:
            setattr(self, name, state[name])
        self.prompts.load(state["prompts"])
        if state["rates"] is not None:
            self.rates.load(state["rates"])
        if self.replay is not None:
            self.replay.load(state["replay"], rows=rows)
        if self.earlier is not None:
            self.earlier.load(state["earlier"])

    def adapt(self, config: GRPOConfig, *, kl: float, entropy: float, completions: int) -> None:
        """Moves the coefficients after a step that saw this KL (nats a completion) and entropy (nats a token)."""
        if config.target_kl is not None and math.isfinite(kl):
            moved = algos.adaptive_coefficient(
                self.kl_coef, kl, target=config.target_kl, horizon=config.kl_horizon, steps=completions
            )
            self.kl_coef = float(moved)
        if config.target_entropy is not None and math.isfinite(entropy):
            moved, now = algos.adaptive_entropy_coefficient(
                self.entropy_coef,
                entropy,
                target=config.target_entropy,
                step=config.entropy_coef_step,
                maximum=config.entropy_coef_max,
            )
            self.entropy_coef, self.entropy_bonus = float(moved), float(now)


def make_host(config: GRPOConfig, rows: Sequence[Mapping[str, Any]], beta: float) -> Host:
    """The state before the first step. Raises ValueError for a row without the category that a bandit needs."""
    count, seed = len(rows), config.seed
    if config.prompt_sampling == "curriculum":
        prompts = Curriculum(count, seed)
    elif config.prompt_sampling == "bandit":
        prompts = CategoryBandit(categories_of(rows, config.category_column), seed)
    else:
        prompts = Shuffled(count, seed)
    return Host(
        prompts=prompts,
        rates=prompts.table if isinstance(prompts, Curriculum) else SolveRates(count),
        replay=Replay(config.replay_size, config.replay_max_age) if config.replay_groups else None,
        kl_coef=beta,
        entropy_coef=config.entropy_coef,
        entropy_bonus=config.entropy_coef,
        earlier=Earlier() if config.num_speculative_tokens and config.speculative_source == "last_epoch" else None,
    )
