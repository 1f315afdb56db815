"""Objectives: a frozen, hashable record whose call is pure. They run the model (`score`) and use the parts of `algos`.

objective(params, frozen, batch, *, model) -> (sum of weighted terms, metrics that add). Write your own as a plain
function of the same form: see examples/compose_your_own.py.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_lm import algos
from jaxrl_lm.metrics import Metrics, Sum, covariance_of, max_of, mean_of, min_of
from jaxrl_lm.models import Model, trunk_model
from jaxrl_lm.score import score, score_with_values, values
from jaxrl_lm.types import CriticBatch, Frozen, ImplicitBatch, Params, PolicyBatch, SFTBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """A surrogate, and where the batch has weights for them a KL, an entropy bonus, a KL to the old policy.

    L = Σ_t [ w_t surrogate_t + w_kl_t k_t − w_entropy_t H_t + w_old_t k3(π_old ‖ π)_t ], all weights from `batch.py`.
    """

    completion_columns: int  # the last columns; scores of the prompt are not computed
    surrogate: algos.Surrogate = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    delta: float | None = None
    log_ratio_clip: float | None = None
    level: str = "token"
    gate_positive: float = 1.0
    gate_negative: float = 1.05
    max_drift: float | None = None
    old_is_sampler: bool = False  # then the sampler is compared with the current policy
    kl_estimator: str = "k3"
    kl_importance: bool = False
    score_chunk: int = 2048

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: PolicyBatch, *, model: Model):
        """Returns (loss, metrics)."""
        scores = score(
            params["policy"],
            *batch.packed_rows,
            model=model,
            temperature=batch.temperature,
            chunk=self.score_chunk,
            start=batch.tokens.shape[1] - self.completion_columns,
        )
        return self.loss(scores, batch)

    def loss(self, scores, batch: PolicyBatch):
        """The loss and its metrics from the scores of the current policy."""
        mask = batch.action_mask & batch.valid[:, None]
        # Without old log-probs this is the batch's only update: the old policy is the current one.
        old = jax.lax.stop_gradient(scores.logprobs) if batch.old_logprobs is None else batch.old_logprobs
        terms = batch.weights * self.surrogate_loss(scores.logprobs, old, batch, mask)
        metrics = self.metrics(*jax.lax.stop_gradient((scores.logprobs, scores.entropy)), old, batch, mask)
        if batch.kl_weights is not None:
            kl = algos.kl_estimate(scores.logprobs, batch.ref_logprobs, mask, estimator=self.kl_estimator)
            if self.kl_importance:
                kl = algos.importance_ratio(scores.logprobs, old, mask) * kl
            metrics["kl"] = mean_of(jax.lax.stop_gradient(kl), mask)
            terms = terms + batch.kl_weights * kl
        if batch.entropy_weights is not None:
            terms = terms - batch.entropy_weights * jnp.where(mask, scores.entropy, 0.0)
        if batch.old_kl_weights is not None:
            terms = terms + batch.old_kl_weights * algos.kl_estimate(old, scores.logprobs, mask, estimator="k3")
        return jnp.sum(terms), metrics

    def surrogate_loss(self, logprobs, old, batch: PolicyBatch, mask):
        """The chosen surrogate at each token, 0 in drifted sequences."""
        if self.max_drift is not None:
            mask = algos.drift_mask(logprobs, batch.sampler_logprobs, batch.advantages, mask, limit=self.max_drift)
        ratio = {"level": self.level, "action_ids": batch.action_ids, "log_ratio_clip": self.log_ratio_clip}
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        if self.surrogate == "policy-gradient":
            ids = batch.action_ids if self.level == "action" else None
            return algos.policy_gradient(logprobs, batch.advantages, mask, action_ids=ids)
        if self.surrogate == "clipped-weight":
            return algos.clipped_weight_surrogate(logprobs, old, batch.advantages, mask, **clip, **ratio)
        if self.surrogate == "soft-gate":
            gates = {"temperature_positive": self.gate_positive, "temperature_negative": self.gate_negative}
            return algos.soft_gate_surrogate(logprobs, old, batch.advantages, mask, **gates, **ratio)
        bounds = {"dual_clip": self.dual_clip, "delta": self.delta}
        return algos.clipped_surrogate(logprobs, old, batch.advantages, mask, **clip, **bounds, **ratio)

    def metrics(self, logprobs, entropy, old, batch: PolicyBatch, mask) -> Metrics:
        """Entropy, clip fractions, how far the policy has moved, and the gap between sampler and scorer."""
        ratio = algos.importance_ratio(
            logprobs, old, mask, level=self.level, action_ids=batch.action_ids, log_ratio_clip=self.log_ratio_clip
        )
        clipped = algos.clip_metrics(ratio, batch.advantages, mask, clip_low=self.clip_low, clip_high=self.clip_high)
        moved = algos.kl_estimate(old, logprobs, mask, estimator="k3")  # sampled from old: KL(old ‖ current)
        per_row = jnp.sum(moved, 1) / jnp.maximum(jnp.sum(mask, 1), 1)
        scored = logprobs if self.old_is_sampler else old
        gap = jnp.abs(jnp.where(mask, scored - batch.sampler_logprobs, 0.0))
        sampler_ratio = algos.importance_ratio(scored, batch.sampler_logprobs, mask)
        return {
            "entropy": mean_of(entropy, mask),
            "entropy_covariance": covariance_of(logprobs, batch.advantages, mask),
            **{name: mean_of(where.astype(jnp.float32), mask) for name, where in clipped.items()},
            "approx_kl": mean_of(moved, mask),
            "approx_kl/max": max_of(per_row, mask.any(1)),
            "sampling/logp_difference/mean": mean_of(gap, mask),
            "sampling/logp_difference/max": max_of(gap, mask),
            "sampling/importance_ratio/mean": mean_of(sampler_ratio, mask),
            "sampling/importance_ratio/min": min_of(sampler_ratio, mask),
            "sampling/importance_ratio/max": max_of(sampler_ratio, mask),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticObjective:
    """The policy's loss and the critic's: L + vf_coef Σ_t w_value_t value_loss_t (PPO, Schulman et al., 2017, eq. 9)."""

    policy: PolicyObjective
    vf_coef: float = 0.1
    clip: float | None = 0.2
    shared: bool = False  # the critic is a head on the policy's hidden states

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: CriticBatch, *, model: Model):
        """Returns (loss, metrics)."""
        rows, start = batch.policy, batch.policy.tokens.shape[1] - self.policy.completion_columns
        mask = rows.action_mask & rows.valid[:, None]
        if self.shared:
            scores, predicted = score_with_values(
                params["policy"],
                params["critic"]["head"],
                *rows.packed_rows,
                model=model,
                temperature=rows.temperature,
                chunk=self.policy.score_chunk,
                start=start,
            )
            loss, metrics = self.policy.loss(scores, rows)
        else:
            loss, metrics = self.policy(params, frozen, rows, model=model)
            critic = params["critic"]
            predicted = values(
                critic["head"], critic["trunk"], *rows.packed_rows, model=trunk_model(model), start=start
            )
        terms = algos.value_loss(predicted, batch.old_values, batch.returns, mask, clip=self.clip)
        value_loss = jnp.sum(batch.value_weights * terms)
        metrics["value_loss"] = Sum(jax.lax.stop_gradient(value_loss))
        return loss + self.vf_coef * value_loss, metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImplicitObjective:
    """The loss of the policy, or of policy and critic, and that of an implicit process reward model φ:

    L + coef Σ_n w_n BCE(σ(β Σ_t (log π_φ − log π_ref)), label_n). Source: PRIME (Cui et al., 2025).
    """

    policy: PolicyObjective | CriticObjective
    completion_columns: int
    beta: float
    coef: float = 1.0
    score_chunk: int = 2048

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: ImplicitBatch, *, model: Model):
        """Returns (loss, metrics)."""
        loss, metrics = self.policy(params, frozen, batch.policy, model=model)
        rows = batch.policy.policy if isinstance(batch.policy, CriticBatch) else batch.policy
        start = rows.tokens.shape[1] - self.completion_columns
        scores = score(params["prm"], *rows.packed_rows, model=model, chunk=self.score_chunk, start=start)
        logits = algos.implicit_outcome_logits(scores.logprobs, batch.ref_logprobs, rows.action_mask, beta=self.beta)
        counted = batch.weights > 0
        prm_loss = jnp.sum(batch.weights * algos.binary_cross_entropy(logits, batch.labels, counted))
        right = (logits > 0) == (batch.labels > 0.5)
        metrics["implicit_prm/loss"] = Sum(jax.lax.stop_gradient(prm_loss))
        metrics["implicit_prm/accuracy"] = mean_of(right.astype(jnp.float32), counted)
        return loss + self.coef * prm_loss, metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTObjective:
    """Cross-entropy: −Σ_t w_t log pi(token_t), the weights on the completions."""

    score_chunk: int = 2048
    start: int = 1  # no token before this column has a weight

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: SFTBatch, *, model: Model):
        """Returns (loss, metrics); the metrics are the mean entropy and the number of trained tokens."""
        scores = score(
            params["policy"], batch.tokens, batch.segment_ids, model=model, chunk=self.score_chunk, start=self.start
        )
        mask = batch.weights > 0
        loss = -jnp.sum(batch.weights * jnp.where(mask, scores.logprobs, 0.0))
        return loss, {
            "entropy": mean_of(jax.lax.stop_gradient(scores.entropy), mask),
            "trained_tokens": Sum(jnp.sum(mask, dtype=jnp.float32)),
        }
