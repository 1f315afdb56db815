"""Objectives: a frozen, hashable record whose call is pure. They run the model (`score`) and use the parts of `algos`.

objective(params, frozen, batch, *, model) -> (sum of weighted terms, metrics that add). Write your own as a plain
function of the same form: see examples/compose_your_own.py.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_lm import algos
from jaxrl_lm.metrics import Metrics, Sum, max_of, mean_of, min_of
from jaxrl_lm.models import Model
from jaxrl_lm.score import score
from jaxrl_lm.types import Frozen, Params, PolicyBatch, SFTBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """The clipped surrogate, and β times a KL estimate where β > 0.

    L = Σ_t w_t [ surrogate_t + β k_t ], the weights w from `algos.token_weights` of the global batch.
    """

    completion_columns: int  # the last columns; scores of the prompt are not computed
    clip_low: float = 0.2
    clip_high: float = 0.2
    delta: float | None = None
    level: str = "token"
    beta: float = 0.0  # of the KL in the loss
    kl_estimator: str = "k3"
    score_chunk: int = 2048

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: PolicyBatch, *, model: Model):
        """Returns (loss, metrics); the batch's weights decide which tokens count."""
        scores = score(
            params["policy"],
            batch.tokens,
            batch.segment_ids,
            model=model,
            temperature=batch.temperature,
            chunk=self.score_chunk,
            start=batch.tokens.shape[1] - self.completion_columns,
        )
        mask = batch.action_mask & (batch.weights > 0)
        # Without recomputed log-probs this is the batch's only update: the old policy is the current one.
        old = jax.lax.stop_gradient(scores.logprobs) if batch.old_logprobs is None else batch.old_logprobs
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        losses = algos.clipped_surrogate(
            scores.logprobs, old, batch.advantages, mask, delta=self.delta, level=self.level, **clip
        )
        metrics = policy_metrics(scores.logprobs, scores.entropy, old, batch, mask, level=self.level, **clip)
        if batch.ref_logprobs is not None:
            kl = algos.kl_estimate(scores.logprobs, batch.ref_logprobs, mask, estimator=self.kl_estimator)
            metrics["kl"] = mean_of(jax.lax.stop_gradient(kl), mask)
            losses = losses + self.beta * kl
        return jnp.sum(batch.weights * losses), metrics


def policy_metrics(
    logprobs, entropy, old, batch: PolicyBatch, mask, *, level: str, clip_low: float, clip_high: float
) -> Metrics:
    """Entropy, clip fractions, and the gap between what the sampler and the scorer say of the same tokens."""
    logprobs, entropy = jax.lax.stop_gradient((logprobs, entropy))
    ratio = algos.importance_ratio(logprobs, old, mask, level=level)
    clipped = algos.clip_metrics(ratio, batch.advantages, mask, clip_low=clip_low, clip_high=clip_high)
    gap = jnp.abs(jnp.where(mask, old - batch.sampler_logprobs, 0.0))
    sampler_ratio = algos.importance_ratio(old, batch.sampler_logprobs, mask)
    return {
        "entropy": mean_of(entropy, mask),
        **{name: mean_of(where.astype(jnp.float32), mask) for name, where in clipped.items()},
        "sampling/logp_difference/mean": mean_of(gap, mask),
        "sampling/logp_difference/max": max_of(gap, mask),
        "sampling/importance_ratio/mean": mean_of(sampler_ratio, mask),
        "sampling/importance_ratio/min": min_of(sampler_ratio, mask),
        "sampling/importance_ratio/max": max_of(sampler_ratio, mask),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTObjective:
    """Cross-entropy: −Σ_t w_t log pi(token_t), the weights on the completions."""

    score_chunk: int = 2048

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: SFTBatch, *, model: Model):
        """Returns (loss, metrics); the metrics are the mean entropy and the number of tokens."""
        scores = score(params["policy"], batch.tokens, batch.segment_ids, model=model, chunk=self.score_chunk)
        mask = batch.weights > 0
        loss = -jnp.sum(batch.weights * jnp.where(mask, scores.logprobs, 0.0))
        return loss, {
            "entropy": mean_of(jax.lax.stop_gradient(scores.entropy), mask),
            "num_tokens": Sum(jnp.sum(mask, dtype=jnp.float32)),
        }
