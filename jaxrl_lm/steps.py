"""The only file that calls jax.jit: what is compiled, with which layouts, and what is donated.

`compile_steps` binds the pure functions of generate, score, update and algos to a model, a mesh and the static options,
and gives one record of compiled functions. Each compiles once a bucket of prompt lengths.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32

from jaxrl_lm import algos
from jaxrl_lm.config import SamplingConfig
from jaxrl_lm.generate import generate, prepare_decode
from jaxrl_lm.models import Model, decode_specs
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import Params, PolicyBatch, Requests, Rollout, Scores, SFTBatch, TrainState
from jaxrl_lm.update import Objective, cut, update


@dataclasses.dataclass(frozen=True)
class Steps:
    """Compiled functions. Arrays come and go with their rows split over the mesh's batch axes."""

    plan: Plan
    abstract_state: TrainState  # shapes, dtypes and shardings: the target of a restore
    init: Callable[..., TrainState]  # (params, key); the params are donated
    prepare_decode: Callable[..., Params]  # (params)
    row_keys: Callable[..., jax.Array]  # (key, purpose, step) -> [N]
    generate: Callable[..., Rollout]  # (decode params, requests, stops)
    score: Callable[..., Any]  # (params, tokens, segment_ids, temperature)
    kl_sums: Callable[..., jax.Array]  # (logprobs, ref_logprobs, mask) -> [N], for a KL in the reward
    advantages: Callable[..., jax.Array] | None  # (returns, valid=...)
    minibatch: Callable[..., PolicyBatch]  # (rollout, temperature, advantages, valid, old, ref, rows)
    sft_batch: Callable[..., SFTBatch]  # (tokens, segment_ids, mask)
    update: Callable[..., Any]  # (state, frozen, batch)

    def place(self, tree: Any) -> Any:
        """Host arrays on the mesh, rows split; scalars on every device."""
        put = lambda x: jax.device_put(x, self.plan.rows if jnp.ndim(x) else self.plan.replicated)
        return jax.tree.map(put, tree)


def take_minibatch(
    rollout: Rollout,
    temperature: Float[Array, "N"],
    advantages: Float[Array, "N"],
    valid: Bool[Array, "N"],
    old_logprobs: Float[Array, "N T"] | None,
    ref_logprobs: Float[Array, "N T"] | None,
    rows: Int32[Array, "B"],
    *,
    over: str,
    length: int,
    mask_truncated: bool,
) -> PolicyBatch:
    """The batch of one optimiser step: some rows of a rollout, with the weights of exactly these rows."""
    take = lambda x: None if x is None else x[rows]
    mask, truncated, learns = rollout.action_mask[rows], rollout.truncated[rows], valid[rows]
    if mask_truncated:
        learns = learns & ~truncated
    return PolicyBatch(
        tokens=take(rollout.tokens),
        segment_ids=take(rollout.segment_ids),
        action_mask=mask,
        weights=algos.token_weights(mask, over=over, length=length, valid=learns),
        temperature=take(temperature),
        old_logprobs=take(old_logprobs),
        sampler_logprobs=take(rollout.logprobs),
        advantages=jnp.where(mask, advantages[rows][:, None], 0.0),
        ref_logprobs=take(ref_logprobs),
        truncated=truncated,
        valid=learns,
    )


def score_rows(params, tokens, segment_ids, temperature, start: int, *, model: Model, chunk: int, size: int) -> Scores:
    """Scores of many rows, `size` rows at a time, so that scoring needs no more memory than an update's forward pass."""
    parts = cut((tokens, segment_ids, temperature), tokens.shape[0] // size)
    one = lambda part: score(params, *part[:2], model=model, temperature=part[2], chunk=chunk, start=start)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(tokens.shape), jax.lax.map(one, parts))


def kl_sums(
    logprobs: Float[Array, "N T"], ref_logprobs: Float[Array, "N T"], mask: Bool[Array, "N T"], *, estimator: str
) -> Float[Array, "N"]:
    """A completion's KL: the sum of its tokens' estimates."""
    return algos.kl_estimate(logprobs, ref_logprobs, mask, estimator=estimator).sum(1)


def row_keys(key: jax.Array, purpose: Int32[Array, ""], step: Int32[Array, ""], *, rows: int) -> jax.Array:
    """A key a row, [rows], of (seed, purpose, step, row): never drawn twice."""
    key = jax.random.fold_in(jax.random.fold_in(key, purpose), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows, dtype=jnp.int32))


def state_shardings(
    model: Model, plan: Plan, tx: optax.GradientTransformation, dtype: str
) -> tuple[TrainState, TrainState]:
    """Shapes and layouts of the whole training state, from the weights' declarations alone."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = {"policy": jax.eval_shape(lambda k: model.init(k, dtype), key)}
    layouts = {"policy": plan.tree(model.specs)}
    opt_state = jax.eval_shape(tx.init, params)
    opt_layouts = optax.tree.map_params(
        tx, lambda _, layout: layout, opt_state, layouts, transform_non_params=lambda _: plan.replicated
    )
    step = jax.ShapeDtypeStruct((), jnp.int32)
    abstract = TrainState(step, params, opt_state, key, {})
    return abstract, TrainState(plan.replicated, layouts, opt_layouts, plan.replicated, {})


def compile_steps(
    model: Model,
    plan: Plan,
    *,
    objective: Objective | None,  # None: no update is asked for
    tx: optax.GradientTransformation,
    param_dtype: str = "float32",
    rows: int,
    sampling: SamplingConfig | None = None,
    advantages: Callable[..., jax.Array] | None = None,
    over: str = "token-mean",
    mask_truncated: bool = False,
    microbatches: int = 1,
    score_chunk: int = 2048,
    score_rows_at_once: int | None = None,
    kl_estimator: str = "k1",
) -> Steps:
    """Binds everything static and names every layout; nothing is compiled before its first call.

    `rows` is the number of completions a step; `advantages(returns, valid=...)` gives one a row. Raises ValueError if
    rows do not divide over the mesh. Scoring runs over `score_rows_at_once` rows at a time (None: all).
    """
    if rows % plan.batch_ways:
        raise ValueError(f"{rows} rows do not divide over the {plan.batch_ways} devices of the mesh's batch axes")
    if score_rows_at_once is not None and rows % score_rows_at_once:
        raise ValueError(f"score_rows_at_once={score_rows_at_once} does not divide {rows} rows")
    abstract, layouts = state_shardings(model, plan, tx, param_dtype)
    policy, every, split = layouts.params["policy"], plan.replicated, plan.rows

    def start(params: Params, key: jax.Array) -> TrainState:
        params = {"policy": params}
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), key, {})

    decode_layout = plan.for_decode().tree(decode_specs(model.config))
    with_layout = lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
    length = sampling.max_new_tokens if sampling else None
    bind = functools.partial
    return Steps(
        plan=plan,
        abstract_state=jax.tree.map(with_layout, abstract, layouts),
        init=jax.jit(start, in_shardings=(policy, every), out_shardings=layouts, donate_argnums=0),
        prepare_decode=jax.jit(bind(prepare_decode, model=model), in_shardings=(policy,), out_shardings=decode_layout),
        row_keys=jax.jit(bind(row_keys, rows=rows), out_shardings=split),
        generate=jax.jit(
            bind(generate, model=model, sampling=sampling),
            in_shardings=(decode_layout, Requests(split, split, split, split, split, policy_step=every), every),
            out_shardings=split,
        ),
        score=jax.jit(
            bind(score_rows, model=model, chunk=score_chunk, size=score_rows_at_once or rows),
            static_argnums=4,
            in_shardings=(policy, split, split, split),
            out_shardings=split,
        ),
        kl_sums=jax.jit(bind(kl_sums, estimator=kl_estimator), out_shardings=split),
        advantages=jax.jit(advantages, out_shardings=split) if advantages else None,
        minibatch=jax.jit(
            bind(take_minibatch, over=over, length=length, mask_truncated=mask_truncated), out_shardings=split
        ),
        sft_batch=jax.jit(
            lambda tokens, segment_ids, mask: SFTBatch(tokens, segment_ids, algos.token_weights(mask, over=over)),
            out_shardings=split,
        ),
        update=jax.jit(
            bind(update, objective=objective, tx=tx, model=model, microbatches=microbatches),
            in_shardings=(layouts, None, split),
            out_shardings=(layouts, every),
            donate_argnums=0,
        ),
    )
