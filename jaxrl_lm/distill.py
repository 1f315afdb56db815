"""On-policy distillation: the divergence between a student and a teacher at every token of the student's own samples.

The teacher reads the student's tokens, so it must have the same vocabulary (`check_same_vocabulary`); it may be of
another family and size. The divergence is exact, over the whole vocabulary, and the logits of a batch never exist:
see `score.by_columns`.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxrl_lm.metrics import mean_of
from jaxrl_lm.models import Model
from jaxrl_lm.score import by_columns, place_columns, states_before
from jaxrl_lm.types import Frozen, Layout, Params, PolicyBatch
from jaxrl_lm.update import Objective

Direction = Literal["reverse", "forward", "jsd"]


def _kl(p: Float[Array, "*n V"], q: Float[Array, "*n V"]) -> Float[Array, "*n"]:
    """KL(p ‖ q) of two log-distributions.

    The masses, whose difference sums to 0, make every term at least 0 and its derivative p (log p − log q) in log p, which
    is exactly 0 where the two agree.
    """
    return jnp.sum(jnp.exp(p) * (p - q) - jnp.exp(p) + jnp.exp(q), axis=-1)


def _mixture(p: Float[Array, "*n V"], q: Float[Array, "*n V"], share: float) -> Float[Array, "*n V"]:
    """log(share e^p + (1 − share) e^q); exactly p where p = q."""
    lower, upper = jnp.minimum(p, q), jnp.maximum(p, q)
    return upper + jnp.log1p(jnp.where(p < q, share, 1.0 - share) * jnp.expm1(lower - upper))


def divergence(
    student: Float[Array, "*n V"],
    teacher: Float[Array, "*n W"],
    *,
    direction: Direction = "reverse",
    temperature: float = 1.0,
    beta: float = 0.5,
) -> Float[Array, "*n"]:
    """How far a student is from a teacher, from their logits; at least 0, no gradient to the teacher.

    π = softmax(logits / temperature) of both. reverse: KL(π_student ‖ π_teacher), which seeks modes; forward:
    KL(π_teacher ‖ π_student), which covers them; jsd: β KL(π_teacher ‖ m) + (1 − β) KL(π_student ‖ m) with
    m = β π_teacher + (1 − β) π_student, near β · forward for a small β and near (1 − β) · reverse for one near 1.
    Source: GKD (Agarwal et al., 2024), whose β of 0 and 1 stand for forward and reverse; reverse on the student's samples:
    MiniLLM (Gu et al., 2024). Departs from both: no policy gradient for the tokens that a token leads to.

    Of vocabularies that differ in size (padding of a table beyond the tokenizer's tokens) the shared tokens are read.
    Raises ValueError for an unknown direction, a temperature of 0 or below, or a beta of jsd outside (0, 1).
    """
    if direction not in get_args(Direction):
        raise ValueError(f"direction={direction!r} is unknown: use {', '.join(get_args(Direction))}")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: above 0")
    if direction == "jsd" and not 0 < beta < 1:
        raise ValueError(f"beta={beta}: above 0 and below 1; its limits are the directions forward and reverse")
    shared = min(student.shape[-1], teacher.shape[-1])
    log_softmax = lambda x: jax.nn.log_softmax(x[..., :shared] / temperature, axis=-1)
    student, teacher = log_softmax(student), jax.lax.stop_gradient(log_softmax(teacher))
    if direction == "reverse":
        return _kl(student, teacher)
    if direction == "forward":
        return _kl(teacher, student)
    # The derivative of the divergence in m is 0 at the mixture: none is lost by holding it.
    mixture = jax.lax.stop_gradient(_mixture(teacher, student, beta))
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)


def token_divergence(
    params: Params,
    teacher_params: Params,
    tokens: Int32[Array, "N T"] | Layout,
    segment_ids: Int32[Array, "N T"] | None,
    *,
    model: Model,
    teacher_model: Model,
    direction: Direction = "reverse",
    temperature: float = 1.0,
    beta: float = 0.5,
    chunk: int = 2048,
    start: int = 1,
) -> Float[Array, "N T"]:
    """`divergence` of the distributions of tokens[n, t] given tokens[n, :t], at column t; 0 where `score` is 0.

    The gradient flows to `params` only. `chunk` is the number of tokens whose logits, of both models, exist at once.
    Raises ValueError as `divergence`, and if start is not in [1, T).
    """
    before, real = states_before(params, tokens, segment_ids, model=model, start=start)
    teacher, _ = states_before(teacher_params, tokens, segment_ids, model=teacher_model, start=start)

    def one(before: Float[Array, "M t D"], teacher: Float[Array, "M t E"]) -> Float[Array, "M t"]:
        logits, target = model.unembed(params, before), teacher_model.unembed(teacher_params, teacher)
        return divergence(logits, target, direction=direction, temperature=temperature, beta=beta)

    layout = tokens if isinstance(tokens, Layout) else None
    skip = None if layout is None else real
    return place_columns(by_columns(one, before, teacher, chunk=chunk, plan=model.plan, real=skip), real, start, layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillObjective:
    """coef · Σ_t w_t divergence_t on the student's own samples, and the loss of `policy` where one is given.

    The batch is the RL loop's; its advantages are read by `policy` alone. The teacher's weights are `frozen.teacher`.
    """

    teacher_model: Model
    completion_columns: int  # the last columns; the prompt is not compared
    coef: float = 1.0
    direction: Direction = "reverse"
    temperature: float = 1.0
    beta: float = 0.5
    score_chunk: int = 2048
    policy: Objective | None = None

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: PolicyBatch, *, model: Model):
        """Returns (loss, metrics). Raises ValueError without the teacher's weights."""
        if frozen.teacher is None:
            raise ValueError("distillation needs the teacher's weights: give Frozen(teacher=…)")
        apart = token_divergence(
            params["policy"],
            frozen.teacher,
            *batch.packed_rows,
            model=model,
            teacher_model=self.teacher_model,
            direction=self.direction,
            temperature=self.temperature,
            beta=self.beta,
            chunk=self.score_chunk,
            start=batch.tokens.shape[1] - self.completion_columns,
        )
        mask = batch.action_mask & batch.valid[:, None]
        loss = self.coef * jnp.sum(batch.weights * jnp.where(mask, apart, 0.0))
        metrics = {"distill/kl": mean_of(jax.lax.stop_gradient(apart), mask)}
        if self.policy is None:
            return loss, metrics
        policy_loss, found = self.policy(params, frozen, batch, model=model)
        return policy_loss + loss, found | metrics


def check_same_vocabulary(tokenizer: Any, teacher_tokenizer: Any) -> None:
    """Raises ValueError, naming the first token that differs, unless every id means the same token to both."""
    ours, theirs = ({number: token for token, number in t.get_vocab().items()} for t in (tokenizer, teacher_tokenizer))
    for number in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(number), theirs.get(number)
        if mine != other:
            raise ValueError(
                f"token {number} is {mine!r} to the policy's tokenizer and {other!r} to this model's, which would read the "
                "policy's tokens as other words; take a model of the same tokenizer"
            )
