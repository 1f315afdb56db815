"""From the returns of sampled rows to an advantage for every token: the choice of an estimator, on arrays.

The estimators are `algos.advantages` and `algos.returns`; a caller's own function stands in for them. What follows, the
weights of the terms, is `batch.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrl_lm import algos, masked

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


class Credit(NamedTuple):
    advantages: Float[Array, "N T"]
    targets: Float[Array, "N T"] | None  # what the values should have been
    learns: Bool[Array, "N"]  # valid, and not filtered out
    kl: Float[Array, "N"] | None  # of each completion, where it was paid in the reward


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
    own: Callable[..., jax.Array] | None = None  # (returns, *, group_size, valid) -> [N]

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
        returns = outcomes.returns if kl is None else outcomes.returns - outcomes.kl_coefficient * kl
        rows = self._per_row(returns, outcomes)
        return Credit(jnp.where(mask, rows[:, None], 0.0), None, learns, kl)

    def _kept(self, outcomes: Outcomes) -> Bool[Array, "N"]:
        if self.drop == "none":
            return outcomes.valid
        if self.drop == "wrong":
            return outcomes.returns >= 0.5
        return algos.mixed_groups(outcomes.returns, group_size=self.group_size, valid=outcomes.valid, drop=self.drop)

    def _shaped(self, outcomes: Outcomes) -> Float[Array, "N"]:
        """Returns with what length and rarity add or take."""
        returns, lengths = outcomes.returns, outcomes.mask.sum(1)
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

    def _per_token(self, outcomes: Outcomes, mask: Bool[Array, "N T"]):
        """The return is paid on the last token, the KL where it arises."""
        rewards = algos.token_rewards(outcomes.returns, mask)
        if outcomes.kl is not None:
            rewards = rewards - outcomes.kl_coefficient * masked.select(outcomes.kl, mask)
        ids = action_ids(mask, outcomes.turn_ids, actions=self.actions, n=self.ngram)
        options = {"discount": self.discount, "discount_per": self.discount_per, "action_ids": ids}
        if self.advantage == "batch":
            togo = algos.returns_to_go(rewards, mask, **options)
            return algos.batch_whitened_advantages(togo, mask), None
        advantages, targets = algos.gae(rewards, outcomes.values, mask, lam=self.lam, **options)
        return masked.whiten(advantages, mask), targets
