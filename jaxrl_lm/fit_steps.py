"""What is compiled for training on given rows, as `steps.py` does for a policy-gradient run.

`compile_fit` binds an objective, the function that makes its batch, and the scorer of the policy and its reference to a
model and a mesh. Each compiles once a shape of rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int32

from jaxrl_lm.distributed import place
from jaxrl_lm.fit_batches import preference_batch, sft_batch
from jaxrl_lm.metrics import Mean, Metrics, merge
from jaxrl_lm.models import LoraConfig, Model
from jaxrl_lm.rows import whole
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan
from jaxrl_lm.train_state import follow, start, state_shardings
from jaxrl_lm.types import Frozen, Params, TrainState
from jaxrl_lm.update import Objective, adapted, cut, update


@dataclasses.dataclass(frozen=True)
class FitSteps:
    """Compiled functions. Arrays come and go with their rows split over the mesh's batch axes."""

    plan: Plan
    abstract_state: TrainState  # shapes, dtypes and shardings: the target of a restore
    init: Callable[..., TrainState]  # (params by name, key); the params are donated
    batch: Callable[..., Any]  # what the objective reads, with its weights
    score: Callable[..., jax.Array]  # (policy, base, tokens [N S T], segment_ids, start) -> log-probs [N S T]
    score_base: Callable[..., jax.Array]  # the same of whole weights, such as a reference: (params, tokens, …)
    update: Callable[..., Any]  # (state, frozen, batch)
    follow: Callable[..., Params]  # (reference, policy, ema): the moved reference, whose old one is donated
    measure: Callable[..., Metrics]  # (params by name, frozen, batch): the objective's metrics, nothing is changed

    def place(self, tree: Any) -> Any:
        """Host arrays on the mesh, rows split; scalars on every device."""
        put = lambda x: place(x, self.plan.rows if jnp.ndim(x) else self.plan.replicated)
        return jax.tree.map(put, tree)


@dataclasses.dataclass(frozen=True)
class StreamSteps:
    """What batches of given rows are made with inside of reinforcement learning (`mix.py`)."""

    plan: Plan
    sft: Callable[..., Any]  # (tokens, segment_ids, mask)
    pairs: Callable[..., Any]  # (tokens, segment_ids, mask, valid, ref_logprobs)
    score_base: Callable[..., jax.Array]  # (params, tokens [N S T], segment_ids, start)

    def place(self, tree: Any) -> Any:
        """Host arrays on the mesh, rows split."""
        return jax.tree.map(lambda x: place(x, self.plan.rows), tree)


def compile_streams(model: Model, plan: Plan, *, score_chunk: int, microbatches: int) -> StreamSteps:
    """Binds model and mesh; nothing is compiled before its first call."""
    split = plan.rows
    return StreamSteps(
        plan=plan,
        sft=jax.jit(sft_batch, out_shardings=split),
        pairs=jax.jit(preference_batch, out_shardings=split),
        score_base=_compile_score_base(model, plan, score_chunk, microbatches),
    )


def _compile_score_base(model: Model, plan: Plan, score_chunk: int, microbatches: int) -> Callable[..., jax.Array]:
    """(whole weights, tokens [N S T], segment_ids, start) -> log-probs [N S T]."""

    def score_base(params, tokens, segment_ids, start):
        options = {"model": model, "lora": None, "chunk": score_chunk, "microbatches": microbatches}
        return score_sides(params, None, tokens, segment_ids, start, **options)

    layouts = (plan.tree(model.specs), plan.rows, plan.rows)
    return jax.jit(score_base, static_argnums=3, in_shardings=layouts, out_shardings=plan.rows)


def score_sides(
    params: Params, base: Params | None, tokens: Int32[Array, "N S T"], segment_ids: Int32[Array, "N S T"], start: int,
    *, model: Model, lora: LoraConfig | None, chunk: int, microbatches: int,
) -> Float[Array, "N S T"]:  # fmt: skip
    """log pi of every token of all sides of a row, no more rows at a time than in an update."""
    policy = whole(params, base, lora)

    def one(part):
        flat = [x.reshape(-1, x.shape[-1]) for x in part]
        return score(policy, *flat, model=model, chunk=chunk, start=start).logprobs.reshape(part[0].shape)

    out = jax.lax.map(one, cut((tokens, segment_ids), microbatches))
    return out.swapaxes(0, 1).reshape(tokens.shape)


def measure(
    params: dict[str, Params], frozen: Frozen, batch: Any, *, objective: Objective, model: Model, microbatches: int,
    by_rows: bool,
) -> Metrics:  # fmt: skip
    """The objective's metrics and its loss as a mean over what has a weight, so that batches of a set merge.

    `by_rows`: each row has the same weight, whatever it holds; else each token, or each pair.
    """
    weighted = batch.weights > 0
    count = jnp.sum(weighted.any(-1) if by_rows and weighted.ndim > 1 else weighted, dtype=jnp.float32)

    def one(part):
        loss, metrics = objective(params, frozen, part, model=model)
        share = 1.0 / microbatches  # of the count: the parts' losses add
        return {**metrics, "loss": Mean(loss * count, count * share)}

    if microbatches == 1:
        return one(batch)
    stacked = jax.lax.map(one, cut(batch, microbatches))
    first, rest = (jax.tree.map(lambda x, part=part: x[part], stacked) for part in (0, slice(1, None)))
    return jax.lax.scan(lambda total, part: (merge(total, part), None), first, rest)[0]


def compile_fit(
    model: Model,
    plan: Plan,
    *,
    specs: dict[str, Any],
    objective: Objective,
    make_batch: Callable[..., Any],
    tx: optax.GradientTransformation,
    param_dtype: str,
    microbatches: int,
    score_chunk: int,
    lora: LoraConfig | None = None,
    reference: bool = False,
    by_rows: bool = False,
) -> FitSteps:
    """Binds everything static and names every layout.

    `specs`: the declarations of what is trained, by name; `reference`: the state holds a reference that moves;
    `by_rows`: see `measure`.
    """
    abstract, layouts = state_shardings(specs, plan, tx, param_dtype, reference=reference)
    every, split = plan.replicated, plan.rows
    base = None if lora is None else plan.tree(model.specs)
    bind = functools.partial
    if lora is not None:
        objective = adapted(objective, lora)
    return FitSteps(
        plan=plan,
        abstract_state=abstract,
        init=jax.jit(
            bind(start, tx=tx, reference=reference),
            in_shardings=(layouts.params, every),
            out_shardings=layouts,
            donate_argnums=0,
        ),
        batch=jax.jit(make_batch, out_shardings=split),
        score=jax.jit(
            bind(score_sides, model=model, lora=lora, chunk=score_chunk, microbatches=microbatches),
            static_argnums=4,
            in_shardings=(layouts.params.get("policy"), base, split, split),
            out_shardings=split,
        ),
        score_base=_compile_score_base(model, plan, score_chunk, microbatches),
        update=jax.jit(
            bind(update, objective=objective, tx=tx, model=model, microbatches=microbatches),
            in_shardings=(layouts, None, split),
            out_shardings=(layouts, every),
            donate_argnums=0,
        ),
        follow=jax.jit(follow, out_shardings=layouts.params.get("policy"), donate_argnums=0),
        measure=jax.jit(
            bind(measure, objective=objective, model=model, microbatches=microbatches, by_rows=by_rows),
            in_shardings=(layouts.params, None, split),
            out_shardings=every,
        ),
    )
