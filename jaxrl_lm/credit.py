"""From the returns of sampled rows, and rewards of their steps, to an advantage for every token: the choice of an
estimator, on arrays.

The estimators are `algos.advantages` and `algos.returns`; a caller's own function stands in for them. What follows, the
weights of the terms, is `batch.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrl_lm import algos, masked
from jaxrl_lm.algos.process import completion_credit

Actions = Literal["token", "ngram", "turn", "sequence"]


class Outcomes(NamedTuple):
    """What is known of sampled rows before they are learned from."""

    returns: Float[Array, "N"]
    valid: Bool[Array, "N"]  # False: the row has no return
    mask: Bool[Array, "N T"]
    logprobs: Float[Array, "N T"]  # of the sampler
    turn_ids: Int32[Array, "N T"]
    kl: Float[Array, "N T"] | None = (
        None  # estimate of KL(pi ‖ reference) at each token, where it is paid in the reward
    )
    kl_coefficient: Float[Array, ""] | None = None
    values: Float[Array, "N T"] | None = None  # of the state before each token
    greedy_returns: Float[Array, "N"] | None = None  # of the greedy answer to the row's prompt
    step_rewards: Float[Array, "N T"] | None = None  # read at the ends of steps
    step_ends: Bool[Array, "N T"] | None = None
    lengths: Int32[Array, "N"] | None = None  # of the completions, tokens forced into them too; None: those of the mask


class Credit(NamedTuple):
    advantages: Float[Array, "N T"]
    targets: Float[Array, "N T"] | None  # what the values should have been
    learns: Bool[Array, "N"]  # valid, and not filtered out
    kl: Float[Array, "N"] | None  # of each completion, where it was paid in the reward


def _less(returns: Float[Array, "N"], kl: Float[Array, "N"] | None, outcomes: Outcomes) -> Float[Array, "N"]:
    """The returns without what the KL costs."""
    return returns if kl is None else returns - outcomes.kl_coefficient * kl


def action_ids(mask: Bool[Array, "N T"], turn_ids: Int32[Array, "N T"], *, actions: Actions, n: int = 1):
    """The ids [N T] of the actions that tokens are grouped into; None where each token is its own."""
    if actions == "token":
        return None
    if actions == "ngram":
        return algos.ngram_actions(mask, n=n)
    return turn_ids if actions == "turn" else algos.sequence_ids(mask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CreditRule:
    """An advantage estimator with its options; its call is pure. Names as in `algos.Preset` and the config."""

    advantage: str = "group"
    group_size: int
    scale: str = "group"
    baseline: float = 0.0
    drop: str = "none"
    outlier_limit: float | None = None
    overlong_buffer: int = 0
    max_length: int | None = None
    length_penalty: float = 0.0
    unlikeliness: float = 0.0
    pass_k: int = 1
    discount: float = 1.0
    lam: float = 0.95
    discount_per: str = "action"
    actions: Actions = "token"
    ngram: int = 1
    step_credit: str = "sum-to-go"
    step_weight: float = 1.0
    outcome_weight: float = 1.0  # read beside step rewards
    step_normalise: bool = False
    step_shaping: bool = False
    own: Callable[..., jax.Array] | None = None  # (returns, *, group_size, valid) -> [N]

    @property
    def reads_lengths(self) -> bool:
        """Whether the lengths of completions change their returns."""
        return bool(self.overlong_buffer or self.length_penalty)

    def __call__(self, outcomes: Outcomes) -> Credit:
        """Advantages [N T], 0 off the mask and in rows that do not learn."""
        if self.outlier_limit is not None:
            outlying = algos.outlier_rows(outcomes.returns, limit=self.outlier_limit, valid=outcomes.valid)
            outcomes = outcomes._replace(valid=outcomes.valid & ~outlying)
        # Filters judge the raw returns: shaped ones are never equal.
        learns = outcomes.valid & self._kept(outcomes)
        outcomes = outcomes._replace(returns=self._shaped(outcomes))
        kl = None if outcomes.kl is None else masked.sum(outcomes.kl, outcomes.mask, 1)
        mask = outcomes.mask & learns[:, None]
        if self.own is None and self.advantage in ("batch", "gae"):
            advantages, targets = self._per_token(outcomes, mask)
            return Credit(advantages, targets, learns, kl)
        if self.own is None and self.advantage == "group" and outcomes.step_rewards is not None:
            return Credit(self._in_group(_less(outcomes.returns, kl, outcomes), outcomes, mask), None, learns, kl)
        rows = self._per_row(_less(self._with_steps(outcomes, outcomes.mask), kl, outcomes), outcomes)
        return Credit(jnp.where(mask, rows[:, None], 0.0), None, learns, kl)

    def _kept(self, outcomes: Outcomes) -> Bool[Array, "N"]:
        if self.drop == "none":
            return outcomes.valid
        if self.drop == "wrong":
            return outcomes.returns >= 0.5
        return algos.mixed_groups(outcomes.returns, group_size=self.group_size, valid=outcomes.valid, drop=self.drop)

    def _shaped(self, outcomes: Outcomes) -> Float[Array, "N"]:
        """Returns with what length and rarity add or take."""
        returns = outcomes.returns
        lengths = outcomes.mask.sum(1) if outcomes.lengths is None else outcomes.lengths
        group = {"group_size": self.group_size, "valid": outcomes.valid}
        if self.unlikeliness:
            sums = masked.sum(outcomes.logprobs, outcomes.mask, 1)
            returns = algos.unlikeliness_rewards(returns, sums, beta=self.unlikeliness, **group)
        if self.overlong_buffer:
            returns = returns + algos.overlong_penalty(lengths, max_length=self.max_length, cache=self.overlong_buffer)
        if self.length_penalty:
            returns = returns + self.length_penalty * algos.length_penalty(outcomes.returns, lengths, **group)
        return returns

    def _per_row(self, returns: Float[Array, "N"], outcomes: Outcomes) -> Float[Array, "N"]:
        valid, group = outcomes.valid, self.group_size
        if self.own is not None:
            return self.own(returns, group_size=group, valid=valid)
        if self.advantage == "group":
            return algos.group_advantages(returns, group_size=group, scale=self.scale, valid=valid)
        if self.advantage == "leave-one-out":
            return algos.leave_one_out_advantages(returns, group_size=group, valid=valid)
        if self.advantage == "greedy":
            return algos.greedy_baseline_advantages(returns, outcomes.greedy_returns, valid=valid)
        if self.advantage == "constant":
            return algos.constant_baseline_advantages(returns, baseline=self.baseline, valid=valid)
        if self.advantage == "max-rl":
            return algos.max_rl_advantages(returns, group_size=group, valid=valid)
        if self.advantage == "pass-at-k":
            return algos.pass_at_k_advantages(returns, group_size=group, k=self.pass_k, valid=valid)
        if self.advantage == "accepted":
            return algos.accepted_advantages(returns, valid=valid)
        raise ValueError(f"advantage={self.advantage!r} is unknown")

    def _with_steps(self, outcomes: Outcomes, mask: Bool[Array, "N T"]) -> Float[Array, "N"]:
        """outcome_weight · return + step_weight · one number from the row's steps (not of sum-to-go)."""
        if outcomes.step_rewards is None:
            return outcomes.returns
        steps = completion_credit(outcomes.step_rewards, outcomes.step_ends & mask, self.step_credit)
        return self.outcome_weight * outcomes.returns + self.step_weight * steps

    def _in_group(self, returns: Float[Array, "N"], outcomes: Outcomes, mask) -> Float[Array, "N T"]:
        """Outcome and steps normalised within the group; an action gets what its first token does."""
        found = algos.process_advantages(
            outcomes.step_rewards,
            outcomes.step_ends,
            returns,
            outcomes.mask,
            group_size=self.group_size,
            scale=self.scale,
            credit=self.step_credit,
            step_mean=self.step_normalise,
            outcome_weight=self.outcome_weight,
            step_weight=self.step_weight,
            valid=outcomes.valid,
        )
        ids = action_ids(mask, outcomes.turn_ids, actions=self.actions, n=self.ngram)
        return algos.from_start(found, mask, ids)

    def _rewards(self, outcomes: Outcomes, mask: Bool[Array, "N T"], options: dict[str, Any]) -> Float[Array, "N T"]:
        """The return is paid on the last token, a step's reward on the step's last one, the KL where it arises."""
        rewards = algos.token_rewards(outcomes.returns, mask)
        if outcomes.step_rewards is not None and self.step_credit == "sum-to-go":
            paid = self._paid_steps(outcomes.step_rewards, outcomes.step_ends & mask, mask, options)
            rewards = self.outcome_weight * rewards + self.step_weight * paid
        elif outcomes.step_rewards is not None:
            rewards = algos.token_rewards(self._with_steps(outcomes, mask), mask)
        if outcomes.kl is not None:
            rewards = rewards - outcomes.kl_coefficient * masked.select(outcomes.kl, mask)
        return rewards

    def _paid_steps(self, steps, ends, mask, options: dict[str, Any]) -> Float[Array, "N T"]:
        """What the steps are paid: their rewards, or what a guard makes of them."""
        if self.step_normalise:
            return algos.normalise_step_rewards(steps, ends, mask)
        if self.step_shaping:
            return algos.potential_shaping(algos.step_potentials(steps, ends, mask), mask, **options)
        return masked.select(steps, ends)

    def _per_token(self, outcomes: Outcomes, mask: Bool[Array, "N T"]):
        """Advantages and targets of estimators that read a reward at each token."""
        ids = action_ids(mask, outcomes.turn_ids, actions=self.actions, n=self.ngram)
        options = {"discount": self.discount, "discount_per": self.discount_per, "action_ids": ids}
        rewards = self._rewards(outcomes, mask, options)
        if self.advantage == "batch":
            togo = algos.returns_to_go(rewards, mask, **options)
            return algos.batch_whitened_advantages(togo, mask), None
        advantages, targets = algos.gae(rewards, outcomes.values, mask, lam=self.lam, **options)
        return masked.whiten(advantages, mask), targets
