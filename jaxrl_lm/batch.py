"""The batch of one optimiser step: rows of a rollout, with the weight of every term of the loss.

Weights come first: they are computed here from exactly the rows of the step, before it is cut into microbatches, so that
everything afterwards is a plain sum. Advantages: `credit.py`; the terms themselves: `objectives.py`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from jaxrl_lm import algos
from jaxrl_lm.credit import Actions, Credit, action_ids
from jaxrl_lm.types import CriticBatch, ImplicitBatch, PolicyBatch, Rollout, Scores


class Coefficients(NamedTuple):
    """Arrays, because they may move during a run."""

    kl: Float[Array, ""]
    entropy: Float[Array, ""]
    policy: Float[Array, ""]  # 0 while only the critic learns


class Implicit(NamedTuple):
    """What an implicit process reward model is trained by."""

    ref_logprobs: Float[Array, "N T"]  # of the model that it started from
    outcomes: Float[Array, "N"]  # rewards, right from ½ up
    valid: Bool[Array, "N"]  # False: the row has no outcome


class Rated(NamedTuple):
    """A rollout and all that the loss needs to know of it."""

    rollout: Rollout
    temperature: Float[Array, "N"]
    credit: Credit
    old: Scores | None  # of the policy that the updates start from; None: it was not scored
    values: Float[Array, "N T"] | None
    ref_logprobs: Float[Array, "N T"] | None  # None: no KL in the loss
    implicit: Implicit | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRule:
    """How weights come about; options as in the config. Everything but the reduction needs `old`."""

    group_size: int = 1
    over: str = "token-mean"
    length: int | None = None
    mask_truncated: bool = False
    keep_old: bool = False  # several updates: the ratio is to the scored policy, or to the sampler's where not scored
    sampler_ratio: bool = False  # to the sampler's also where other weights read the scored policy
    actions: Actions = "token"
    ngram: int = 1
    sampler_correction: str = "none"
    correction_cap: float | None = 2.0
    correction_floor: float = 0.0
    token_scale: str = "none"
    scale_alpha: float = 0.4
    scale_kappa: float = 2.0
    scale_token_ids: tuple[int, ...] = ()
    kl_power: float = 0.0
    entropy_bonus: bool = False
    top_entropy_share: float = 1.0
    entropy_clip: str = "none"
    cov_share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    kl_cov_coef: float = 1.0

    @property
    def needs_old(self) -> bool:
        """Whether the batch cannot be built without the scoring pass."""
        return (self.sampler_correction, self.token_scale, self.entropy_clip) != ("none",) * 3 or (
            self.top_entropy_share < 1.0
        )

    def __call__(
        self, rated: Rated, coefficients: Coefficients, key: Key[Array, ""], rows: Int32[Array, "B"]
    ) -> PolicyBatch:
        """The batch of these rows."""
        take = lambda tree: jax.tree.map(lambda x: x[rows], tree)
        rollout, old = take(rated.rollout), take(rated.old)
        learns = rated.credit.learns[rows] & ~rollout.truncated if self.mask_truncated else rated.credit.learns[rows]
        mask = rollout.action_mask & learns[:, None]
        ids = action_ids(mask, rollout.turn_ids, actions=self.actions, n=self.ngram)
        # Every term of the policy waits while only the critic learns.
        base = coefficients.policy * algos.token_weights(mask, over=self.over, length=self.length, action_ids=ids)
        advantages = jnp.where(mask, rated.credit.advantages[rows], 0.0)
        weights, cov = self._policy_weights(base, mask, rollout, old, advantages, key)
        ref = take(rated.ref_logprobs)
        kept = None
        if self.keep_old:
            kept = rollout.logprobs if old is None or self.sampler_ratio else old.logprobs
        return PolicyBatch(
            tokens=rollout.tokens,
            segment_ids=rollout.segment_ids,
            action_mask=rollout.action_mask,
            weights=weights,
            temperature=rated.temperature[rows],
            old_logprobs=kept,
            sampler_logprobs=rollout.logprobs,
            advantages=self._scaled(advantages, mask, rollout, old),
            ref_logprobs=ref,
            truncated=rollout.truncated,
            valid=learns,
            kl_weights=None if ref is None else coefficients.kl * base * self._kl_scale(ref, mask),
            entropy_weights=coefficients.entropy * base if self.entropy_bonus else None,
            old_kl_weights=None if cov is None else self.kl_cov_coef * jnp.where(cov, base, 0.0),
            action_ids=ids,
        )

    def critic(
        self, rated: Rated, coefficients: Coefficients, key: Key[Array, ""], rows: Int32[Array, "B"]
    ) -> CriticBatch:
        """The same, with the values and their targets."""
        policy = self(rated, coefficients, key, rows)
        mask = policy.action_mask & policy.valid[:, None]
        states = algos.action_starts(mask, policy.action_ids)  # a value belongs to the state before an action
        targets = jnp.where(mask, rated.credit.targets[rows], 0.0)
        return CriticBatch(policy, rated.values[rows], targets, algos.token_weights(states))

    def implicit(self, rated: Rated, policy: PolicyBatch | CriticBatch, rows: Int32[Array, "B"]) -> ImplicitBatch:
        """The batch with the outcomes of its rows, also of those that the policy does not learn from."""
        ref, outcomes, valid = (x[rows] for x in rated.implicit)
        valid = valid & jnp.any(rated.rollout.action_mask[rows], axis=1)
        weights = valid / jnp.maximum(jnp.sum(valid), 1)
        return ImplicitBatch(policy, ref, jnp.where(valid, outcomes >= 0.5, 0.0).astype(jnp.float32), weights)

    def _policy_weights(self, base, mask, rollout: Rollout, old: Scores | None, advantages, key):
        """Weights of the policy's term, and where a KL to the old policy is asked for."""
        weights, cov = base, None
        if self.sampler_correction != "none":
            sampled = rollout.logprobs if rollout.behaviour_logprobs is None else rollout.behaviour_logprobs
            weights = weights * algos.sampler_correction(
                old.logprobs,
                sampled,
                mask,
                mode=self.sampler_correction,
                cap=self.correction_cap,
                floor=self.correction_floor,
            )
        if self.top_entropy_share < 1.0:
            top = algos.top_entropy_mask(old.entropy, mask, share=self.top_entropy_share)
            weights = jnp.where(top, weights, 0.0)
        if self.entropy_clip == "clip_cov":
            detached = algos.clip_cov_mask(
                old.logprobs, advantages, mask, key, low=self.cov_low, high=self.cov_high, share=self.cov_share
            )
            weights = jnp.where(detached, 0.0, weights)
        elif self.entropy_clip == "kl_cov":
            cov = algos.kl_cov_mask(old.logprobs, advantages, mask, share=self.cov_share)
        return weights, cov

    def _scaled(self, advantages, mask, rollout: Rollout, old: Scores | None) -> Float[Array, "N T"]:
        """Advantages times the token scale."""
        if self.token_scale == "none":
            return advantages
        if self.token_scale == "entropy_shaped":
            return advantages * algos.entropy_shaped_scale(
                old.entropy, advantages, mask, alpha=self.scale_alpha, kappa=self.scale_kappa
            )
        if self.token_scale == "entropy":
            scale = algos.gtpo_scale(old.entropy, advantages, mask, group_size=self.group_size, share=self.scale_alpha)
        elif self.token_scale == "low_probability":
            scale = algos.low_probability_scale(old.logprobs, mask, alpha=self.scale_alpha)
        else:
            scale = algos.planning_token_scale(
                rollout.tokens, mask, token_ids=self.scale_token_ids, weight=self.scale_kappa
            )
        return advantages * algos.normalise_scale(scale, mask)

    def _kl_scale(self, ref_logprobs, mask) -> Float[Array, "N T"]:
        if not self.kl_power:
            return mask.astype(jnp.float32)
        return algos.critical_kl_weight(ref_logprobs, mask, power=self.kl_power)
