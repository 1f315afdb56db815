"""Beside `fit_steps.py` the only file that calls jax.jit: what is compiled, with which layouts, and what is donated.

`compile_steps` binds the pure functions of generate, score, credit, batch and update to a model, a mesh and the static
options, and gives one record of compiled functions. Each compiles once a bucket of prompt lengths.
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
from jaxrl_lm.batch import BatchRule, Coefficients, Rated
from jaxrl_lm.config import SamplingConfig
from jaxrl_lm.credit import Credit, CreditRule, Outcomes
from jaxrl_lm.distributed import place
from jaxrl_lm.generate import generate, prepare_decode
from jaxrl_lm.models import (
    LoraConfig,
    Model,
    attach,
    classifier_specs,
    critic_specs,
    decode_specs,
    lora_specs,
    row_scores,
    stacked,
    token_logits,
    trunk_model,
    value_specs,
)
from jaxrl_lm.moments import is_tiles, layout_of
from jaxrl_lm.score import score, values
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import (
    CriticBatch,
    ImplicitBatch,
    Params,
    PolicyBatch,
    Requests,
    Rollout,
    Scores,
    TrainState,
)
from jaxrl_lm.update import Objective, adapted, cut, update

BATCH = 1 << 30  # the purpose of keys that batches are built with; the others stand in rollout/sampler.py


@dataclasses.dataclass(frozen=True)
class Steps:
    """Compiled functions. Arrays come and go with their rows split over the mesh's batch axes.

    `policy` is the tree that is trained: all weights, or the adapter, then `base` holds the weights under it.
    """

    plan: Plan
    abstract_state: TrainState  # shapes, dtypes and shardings: the target of a restore
    init: Callable[..., TrainState]  # (params by name, key); the params are donated
    prepare_decode: Callable[..., Params]  # (policy, base)
    row_keys: Callable[..., jax.Array]  # (key, purpose, step) -> [N]
    generate: Callable[..., Rollout]  # (decode params, requests, stops)
    score: Callable[..., Scores]  # (policy, base, tokens, segment_ids, temperature, start)
    values: Callable[..., jax.Array]  # (params by name, base, tokens, segment_ids, start)
    implicit: Callable[..., Any]  # (process reward model, its reference, rollout, start): rewards, ref log-probs
    credit: Callable[..., Credit]  # (returns, valid, rollout, current, ref, kl_coefficient, values, greedy_returns,
    # step_rewards, step_ends)
    minibatch: Callable[..., Any]  # (rated, coefficients, key, number, rows, rule)
    update: Callable[..., Any]  # (state, frozen, batch)
    follow: Callable[..., Params]  # (reference, policy, ema): the moved reference, whose old one is donated

    def place(self, tree: Any) -> Any:
        """Host arrays on the mesh, rows split; scalars on every device."""
        put = lambda x: place(x, self.plan.rows if jnp.ndim(x) else self.plan.replicated)
        return jax.tree.map(put, tree)


def score_rows(
    policy, base, tokens, segment_ids, temperature, start: int, *, model: Model, lora, chunk: int, size: int
) -> Scores:
    """Scores of many rows, `size` rows at a time, so that scoring needs no more memory than an update's forward pass."""
    params = whole(policy, base, lora)
    one = lambda part: score(params, *part[:2], model=model, temperature=part[2], chunk=chunk, start=start)
    return _by_rows(one, (tokens, segment_ids, temperature), size)


def value_rows(
    params, base, tokens, segment_ids, start: int, *, model: Model, lora, shared: bool, size: int
) -> Float[Array, "N T"]:
    """Values of many rows, `size` rows at a time: of the critic, or of its head on the policy."""
    head = params["critic"]["head"]
    if shared:
        trunk = whole(params["policy"], base, lora)
    else:
        trunk, model = params["critic"]["trunk"], trunk_model(model)
    one = lambda part: values(head, trunk, *part, model=model, start=start)
    return _by_rows(one, (tokens, segment_ids), size)


def implicit_rows(
    prm: Params, reference: Params, rollout: Rollout, start: int, *, model: Model, beta: float, chunk: int, size: int
) -> tuple[Float[Array, "N T"], Float[Array, "N T"]]:
    """What an implicit process reward model pays each action token, and the log-probs of the model it started from."""
    ones = jnp.ones(rollout.tokens.shape[:1], jnp.float32)
    given = (rollout.tokens, rollout.segment_ids, ones, start)
    of = lambda params: score_rows(params, None, *given, model=model, lora=None, chunk=chunk, size=size).logprobs
    ref = of(reference)
    return algos.implicit_process_rewards(of(prm), ref, rollout.action_mask, beta=beta), ref


def _by_rows(function: Callable[[Any], Any], arrays: tuple, size: int) -> Any:
    shape = arrays[0].shape
    out = jax.lax.map(function, cut(arrays, shape[0] // size))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(shape), out)


def credit_rows(
    returns: Float[Array, "N"],
    valid: Bool[Array, "N"],
    rollout: Rollout,
    current: Float[Array, "N T"] | None,
    ref: Float[Array, "N T"] | None,
    kl_coefficient: Float[Array, ""],
    values: Float[Array, "N T"] | None,
    greedy_returns: Float[Array, "N"] | None,
    step_rewards: Float[Array, "N T"] | None = None,
    step_ends: Bool[Array, "N T"] | None = None,
    *,
    rule: CreditRule,
    estimator: str,
) -> Credit:
    """Credit of a rollout; with `ref` the KL to it is paid in the reward."""
    mask = rollout.action_mask
    kl = None if ref is None else algos.kl_estimate(current, ref, mask, estimator=estimator)
    policy = (mask, rollout.logprobs, rollout.turn_ids)
    return rule(Outcomes(returns, valid, *policy, kl, kl_coefficient, values, greedy_returns, step_rewards, step_ends))


def minibatch_rows(
    rated: Rated, coefficients: Coefficients, key, number: Int32[Array, ""], rows: Int32[Array, "B"], rule: BatchRule
) -> PolicyBatch | CriticBatch | ImplicitBatch:
    """The batch of update `number` of the run, which no other one shares its key with."""
    key = jax.random.fold_in(jax.random.fold_in(key, BATCH), number)
    batch = (rule if rated.values is None else rule.critic)(rated, coefficients, key, rows)
    return batch if rated.implicit is None else rule.implicit(rated, batch, rows)


def row_keys(key: jax.Array, purpose: Int32[Array, ""], step: Int32[Array, ""], *, rows: int) -> jax.Array:
    """A key a row, [rows], of (seed, purpose, step, row): never drawn twice."""
    key = jax.random.fold_in(jax.random.fold_in(key, purpose), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows, dtype=jnp.int32))


def follow(reference: Params, policy: Params, ema: Float[Array, ""]) -> Params:
    """ema · reference + (1 − ema) · policy, in the weights' dtype."""
    return jax.tree.map(lambda r, p: (ema * r + (1.0 - ema) * p).astype(r.dtype), reference, policy)


def trained_specs(
    model: Model, *, lora: LoraConfig | None = None, critic: str = "none", prm: bool = False
) -> dict[str, Any]:
    """The declarations of all weights that are trained, by the name of their tree. `prm`: an implicit process reward
    model among them."""
    specs = {"policy": model.specs if lora is None else lora_specs(model, lora)}
    if prm:
        specs["prm"] = model.specs
    if critic == "none":
        return specs
    return specs | {"critic": {"head": value_specs(model.config)} if critic == "shared" else critic_specs(model)}


def state_shardings(
    specs: dict[str, Any], plan: Plan, tx: optax.GradientTransformation, dtype: str, *, reference: bool = False
) -> tuple[TrainState, TrainState]:
    """Shapes with layouts of the whole training state, which a checkpoint is restored into, and the layouts; from the
    declarations of what is trained (`trained_specs`) alone.

    `reference`: the state holds a reference that moves, in the form of the policy's tree.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    is_spec = lambda node: hasattr(node, "axes")
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(dtype)), specs, is_leaf=is_spec)
    layouts = {name: plan.tree(tree) for name, tree in specs.items()}
    opt_state = jax.eval_shape(tx.init, params)
    opt_layouts = optax.tree.map_params(
        tx, layout_of, opt_state, layouts, transform_non_params=lambda _: plan.replicated, is_leaf=is_tiles
    )
    extra, extra_layout = {"lr_scale": jax.ShapeDtypeStruct((), jnp.float32)}, {"lr_scale": plan.replicated}
    if reference:
        extra["reference"], extra_layout["reference"] = params["policy"], layouts["policy"]
    step = jax.ShapeDtypeStruct((), jnp.int32)
    placed = TrainState(plan.replicated, layouts, opt_layouts, plan.replicated, extra_layout)
    with_layout = lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
    return jax.tree.map(with_layout, TrainState(step, params, opt_state, key, extra), placed), placed


def start(
    params: dict[str, Params], key: jax.Array, *, tx: optax.GradientTransformation, reference: bool
) -> TrainState:
    """The state before the first step; with a reference that moves it is a copy of the policy."""
    extra = {"lr_scale": jnp.ones((), jnp.float32)}
    if reference:
        extra["reference"] = jax.tree.map(jnp.copy, params["policy"])
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), key, extra)


def lay_out(policy: Params, base: Params | None, *, model: Model, lora: LoraConfig | None) -> Params:
    """The policy's weights as decoding reads them."""
    return prepare_decode(whole(policy, base, lora), model=model)


def whole(policy: Params, base: Params | None, lora: LoraConfig | None) -> Params:
    """All weights of a policy: those that are trained, or those below with the adapter on them."""
    return policy if lora is None else attach(base, policy, lora)


def compile_steps(
    model: Model,
    plan: Plan,
    *,
    objective: Objective | None,  # None: no update is asked for
    tx: optax.GradientTransformation,
    param_dtype: str = "float32",
    rows: int,
    sampling: SamplingConfig | None = None,
    credit: CreditRule | None = None,
    microbatches: int = 1,
    score_chunk: int = 2048,
    score_rows_at_once: int | None = None,
    kl_estimator: str = "k1",
    lora: LoraConfig | None = None,
    critic: str = "none",
    implicit_prm: float | None = None,
    reference: bool = False,
) -> Steps:
    """Binds everything static and names every layout; nothing is compiled before its first call.

    `rows` is the number of completions a step; `reference`: the state holds a reference that moves. Raises ValueError
    if rows do not divide over the mesh. Scoring runs over `score_rows_at_once` rows at a time (None: all).
    """
    if rows % plan.batch_ways:
        raise ValueError(f"{rows} rows do not divide over the {plan.batch_ways} devices of the mesh's batch axes")
    if sampling is not None and rows % plan.for_decode().batch_ways:
        raise ValueError(
            f"{rows} rows do not divide over the {plan.for_decode().batch_ways} devices that generation splits them over: "
            "it has no use for columns, and rows take the mesh's axis sequence too"
        )
    size = score_rows_at_once or rows
    if rows % size:
        raise ValueError(f"score_rows_at_once={score_rows_at_once} does not divide {rows} rows")
    specs = trained_specs(model, lora=lora, critic=critic, prm=implicit_prm is not None)
    abstract, layouts = state_shardings(specs, plan, tx, param_dtype, reference=reference)
    policy, every, split = layouts.params["policy"], plan.replicated, plan.rows
    base = None if lora is None else plan.tree(model.specs)

    decode_layout = plan.for_decode().tree(decode_specs(model.config))
    bind = functools.partial
    if lora is not None and objective is not None:
        objective = adapted(objective, lora)
    return Steps(
        plan=plan,
        abstract_state=abstract,
        init=jax.jit(
            bind(start, tx=tx, reference=reference),
            in_shardings=(layouts.params, every),
            out_shardings=layouts,
            donate_argnums=0,
        ),
        prepare_decode=jax.jit(
            bind(lay_out, model=model, lora=lora),
            in_shardings=(policy, base),
            out_shardings=decode_layout,
        ),
        row_keys=jax.jit(bind(row_keys, rows=rows), out_shardings=split),
        generate=jax.jit(
            bind(generate, model=model.for_decode(), sampling=sampling),
            in_shardings=(decode_layout, Requests(split, split, split, split, split, policy_step=every), every),
            out_shardings=split,
        ),
        **_scoring(
            model,
            plan,
            layouts.params,
            base,
            lora=lora,
            chunk=score_chunk,
            size=size,
            shared=critic == "shared",
            beta=implicit_prm,
        ),
        credit=jax.jit(bind(credit_rows, rule=credit, estimator=kl_estimator), out_shardings=split),
        minibatch=jax.jit(minibatch_rows, static_argnums=5, out_shardings=split),
        update=jax.jit(
            bind(update, objective=objective, tx=tx, model=model, microbatches=microbatches),
            in_shardings=(layouts, None, split),
            out_shardings=(layouts, every),
            donate_argnums=0,
        ),
        follow=jax.jit(follow, in_shardings=(policy, policy, every), out_shardings=policy, donate_argnums=0),
    )


def _scoring(
    model: Model,
    plan: Plan,
    params: dict[str, Any],
    base: Any,
    *,
    lora: LoraConfig | None,
    chunk: int,
    size: int,
    shared: bool,
    beta: float | None,
) -> dict[str, Callable[..., Any]]:
    """What scores rows, by its name in `Steps`; `params` and `base` are layouts."""
    bind, split = functools.partial, plan.rows
    return {
        "score": jax.jit(
            bind(score_rows, model=model, lora=lora, chunk=chunk, size=size),
            static_argnums=5,
            in_shardings=(params["policy"], base, split, split, split),
            out_shardings=split,
        ),
        "values": jax.jit(
            bind(value_rows, model=model, lora=lora, shared=shared, size=size),
            static_argnums=4,
            in_shardings=(params, base, split, split),
            out_shardings=split,
        ),
        "implicit": jax.jit(
            bind(implicit_rows, model=model, beta=beta, chunk=chunk, size=size),
            static_argnums=3,
            in_shardings=(plan.tree(model.specs), plan.tree(model.specs), split),
            out_shardings=split,
        ),
    }


def compile_row_scores(model: Model, plan: Plan, *, members: int = 1) -> Callable[..., jax.Array]:
    """(weights of K reward models, stacked; tokens, segment_ids) -> scores [K, N], on every device.

    Compiles once a shape.
    """
    return jax.jit(
        functools.partial(member_scores, model=model),
        in_shardings=(plan.tree(stacked(critic_specs(model), members)), plan.rows, plan.rows),
        out_shardings=plan.replicated,
    )


def member_scores(
    members: dict[str, Params], tokens: Int32[Array, "N T"], segment_ids: Int32[Array, "N T"], *, model: Model
) -> Float[Array, "K N"]:
    """`row_scores` of each of K stacked reward models."""
    return jax.vmap(lambda one: row_scores(one, tokens, segment_ids, model=model))(members)


def compile_token_scores(
    model: Model, plan: Plan, *, labels: int = 2, bias: bool = True
) -> Callable[..., Float[Array, "N T"]]:
    """(a process reward model's weights, tokens, segment_ids, step_ends) -> `step_chances`, on every device.

    `labels` and `bias` are its head's. Compiles once a shape.
    """
    return jax.jit(
        functools.partial(step_chances, model=model),
        in_shardings=(plan.tree(classifier_specs(model, labels=labels, bias=bias)), *[plan.rows] * 3),
        out_shardings=plan.replicated,
    )


def step_chances(
    classifier: dict[str, Params],
    tokens: Int32[Array, "N T"],
    segment_ids: Int32[Array, "N T"],
    step_ends: Bool[Array, "N T"],
    *,
    model: Model,
) -> Float[Array, "N T"]:
    """`algos.process_scores` of the head at every token; NaN where a logit is not finite, which σ would make a 0 or 1."""
    logits = algos.reward_losses.binary_logits(token_logits(classifier, tokens, segment_ids, model=model))
    return jnp.where(step_ends & ~jnp.isfinite(logits), jnp.nan, algos.process_scores(logits, step_ends))
