"""Objectives of training on what is given: comparisons, judged completions, labels. Batches: `fit_batches.py`.

As in `objectives.py`, where SFTObjective stands: objective(params, frozen, batch, *, model) -> (sum of weighted terms,
metrics that add). The losses themselves are `algos`. What has weight 0 is read by no loss and no metric.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxrl_lm import algos, masked
from jaxrl_lm.algos.f_divergence import Divergence
from jaxrl_lm.algos.preference_variants import Options
from jaxrl_lm.algos.reward_losses import binary_logits
from jaxrl_lm.metrics import Metrics, mean_of
from jaxrl_lm.models import Model, row_scores, token_logits, trunk_model
from jaxrl_lm.score import score
from jaxrl_lm.types import ComparisonBatch, Frozen, LabelledBatch, Params, PreferenceBatch, UnpairedBatch

AVERAGED = ("simpo", "orpo")  # their implicit reward is β times the mean log-prob of a token


def _rows(x: Shaped[Array, "N 2 T"]) -> Shaped[Array, "M T"]:
    """The sides of all pairs as rows, a pair's two next to each other."""
    return x.reshape(-1, x.shape[-1])


def _weighted(weights: Float[Array, "*s"], terms: Float[Array, "*s"]) -> Float[Array, ""]:
    """Σ weight · term over what has a weight."""
    return jnp.sum(weights * jnp.where(weights > 0, terms, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceObjective:
    """Losses on pairs: Σ_n w_n Σ_parts weight · loss_n, by the names and options of `algos.dpo_loss`.

    ("inpo", weight) stands alone, with eta and tau (`algos.inpo_loss`). aot and aot_unpaired compare a pair with the
    others of its microbatch, so that they alone depend on how the batch is cut.

    Raises ValueError for inpo beside another part or without eta and tau, these without it, and as `algos.mpo_loss`.
    """

    parts: tuple[tuple[str, float], ...] = (("sigmoid", 1.0),)
    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence: Divergence = "reverse_kl"
    f_alpha: float = 0.5
    length_alpha: float = 0.0
    ld_alpha: float | None = None
    gamma: float = 0.5
    discopop_tau: float = 0.05
    eta: float | None = None
    tau: float | None = None
    score_chunk: int = 2048
    start: int = 1  # columns before it are a prompt's, and are not scored

    def __post_init__(self):
        inpo, given = self._inpo, self.eta is not None and self.tau is not None
        if inpo and len(self.parts) > 1:
            raise ValueError(f"parts={self.parts!r}: inpo stands alone")
        if inpo != given or (self.eta is None) != (self.tau is None):
            raise ValueError(f"eta={self.eta}, tau={self.tau}: both belong to inpo, parts={self.parts!r}")

    @property
    def _inpo(self) -> bool:
        return any(name == "inpo" for name, _ in self.parts)

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: PreferenceBatch, *, model: Model):
        """Returns (loss, metrics)."""
        options = {"model": model, "chunk": self.score_chunk, "start": self.start}
        scores = score(params["policy"], _rows(batch.tokens), _rows(batch.segment_ids), **options)
        logprobs, entropy = (x.reshape(batch.tokens.shape) for x in scores)
        mask = batch.action_mask & (batch.weights > 0)[:, None, None]
        loss = _weighted(batch.weights, self.losses(logprobs, batch, mask))
        logprobs, entropy = jax.lax.stop_gradient((logprobs, entropy))
        average = all(name in (*AVERAGED, "sft") for name, _ in self.parts)
        found = algos.preference_metrics(
            logprobs, batch.ref_logprobs, mask, beta=self.beta, ld_alpha=self.ld_alpha, average=average
        )
        return loss, found | {"entropy": mean_of(entropy[:, 0], mask[:, 0])}

    def losses(self, logprobs: Float[Array, "N 2 T"], batch: PreferenceBatch, mask) -> Float[Array, "N"]:
        """The loss of each pair; options at their defaults are not passed on, since a variant refuses foreign ones."""
        if self._inpo:
            if batch.ref_logprobs is None or batch.old_logprobs is None:
                raise ValueError("inpo reads the log-probs of the reference and of the policy that sampled the pairs")
            weight, strength = self.parts[0][1], {"eta": self.eta, "tau": self.tau}
            return weight * algos.inpo_loss(logprobs, batch.ref_logprobs, batch.old_logprobs, mask, **strength)
        defaults = Options._field_defaults
        own = {name: getattr(self, name) for name in defaults if hasattr(self, name)}
        options = {name: value for name, value in own.items() if value != defaults[name]}
        for name in ("reward_shift", "sft_length"):
            value = getattr(batch, name)
            if value is not None:
                options[name] = value[0]  # the same in every row
        return algos.mpo_loss(logprobs, batch.ref_logprobs, mask, parts=self.parts, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnpairedObjective:
    """KTO: Σ_n w_n loss_n, `algos.kto_loss`, with the KL of the batch."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    score_chunk: int = 2048
    start: int = 1

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: UnpairedBatch, *, model: Model):
        """Returns (loss, metrics); chosen means desirable, rejected undesirable."""
        options = {"model": model, "chunk": self.score_chunk, "start": self.start}
        logprobs = score(params["policy"], batch.tokens, batch.segment_ids, **options).logprobs
        valid = batch.weights > 0
        mask = batch.action_mask & valid[:, None]
        strengths = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
        losses = algos.kto_loss(
            logprobs, batch.ref_logprobs, mask, batch.labels, batch.kl[0], beta=self.beta, **strengths
        )
        logps = masked.sum(jax.lax.stop_gradient(logprobs), mask, axis=1)
        rewards = self.beta * (logps - masked.sum(batch.ref_logprobs, mask, axis=1))
        metrics = {"kl": mean_of(batch.kl, valid)}
        for name, rows in (("chosen", valid & batch.labels), ("rejected", valid & ~batch.labels)):
            metrics[f"rewards/{name}"] = mean_of(rewards, rows)
            metrics[f"logps/{name}"] = mean_of(logps, rows)
        return _weighted(batch.weights, losses), metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonObjective:
    """A reward model from comparisons: Σ_n w_n loss_n, `algos.reward_model_loss`.

    members > 1: every leaf of params["reward"] holds that many models on a leading axis, and the loss is the sum of
    theirs, so that each learns as if it were alone.
    """

    center: float = 0.0
    label_smoothing: float = 0.0
    members: int = 1

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: ComparisonBatch, *, model: Model):
        """Returns (loss, metrics); the metrics are those of the mean score over the members."""
        tokens, segment_ids, valid = _rows(batch.tokens), _rows(batch.segment_ids), batch.weights > 0

        def one(reward: Params) -> tuple[Float[Array, "N"], Float[Array, "N 2"]]:
            scores = row_scores(reward, tokens, segment_ids, model=trunk_model(model)).reshape(-1, 2)
            options = {"margin": batch.margin, "center": self.center, "label_smoothing": self.label_smoothing}
            return algos.reward_model_loss(scores, valid=valid, **options), scores

        if self.members == 1:
            losses, scores = one(params["reward"])
            return _weighted(batch.weights, losses), self.metrics(jax.lax.stop_gradient(scores), batch)
        losses, every = jax.vmap(one)(params["reward"])
        every = jax.lax.stop_gradient(every)
        apart = masked.std(every, jnp.ones(every.shape, bool), axis=0)
        metrics = self.metrics(jnp.mean(every, axis=0), batch)
        metrics["ensemble_std"] = mean_of(apart, jnp.broadcast_to(valid[:, None], apart.shape))
        return _weighted(batch.weights, jnp.sum(losses, axis=0)), metrics

    def metrics(self, scores: Float[Array, "N 2"], batch: ComparisonBatch) -> Metrics:
        """Accuracy, margin, mean score; how far scores follow the number of tokens, and how honest their chances are."""
        valid, lengths = batch.weights > 0, jnp.sum(batch.segment_ids > 0, axis=2)
        sides = jnp.broadcast_to(valid[:, None], scores.shape)
        return {
            **algos.reward_model_metrics(scores, valid=valid),
            "length_reward_correlation": algos.length_reward_moments(scores, lengths, sides),
            "calibration_error": algos.pair_calibration(scores, valid=valid),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledObjective:
    """A reward model from labels at tokens: Σ_t w_t cross-entropy with the label, which may be soft.

    An outcome model's head has one label, the logit of "right"; a process model's two, wrong and right.
    """

    kind: Literal["outcome", "process"] = "outcome"

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: LabelledBatch, *, model: Model):
        """Returns (loss, metrics). Raises ValueError where the head has another number of labels."""
        reward, mask = params["reward"], batch.weights > 0
        labels, found = {"outcome": 1, "process": 2}[self.kind], reward["head"]["kernel"].shape[-1]
        if found != labels:
            raise ValueError(f"kind={self.kind!r} reads a head with {labels} label(s); this one has {found}")
        logits = binary_logits(token_logits(reward, batch.tokens, batch.segment_ids, model=trunk_model(model)))
        loss = _weighted(batch.weights, algos.binary_cross_entropy(logits, batch.labels, mask))
        logits = jax.lax.stop_gradient(logits)
        chances = jax.nn.sigmoid(masked.select(logits, mask))
        metrics = algos.label_metrics(logits, batch.labels, mask)
        return loss, {**metrics, "calibration_error": algos.calibration(chances, batch.labels, mask)}
