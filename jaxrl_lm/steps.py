"""What is compiled of a policy-gradient run, with which layouts, and what is donated. Only here, in `fit_steps.py` and, for
moves between processes, in `sharding/across.py` stands jax.jit.

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
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int32

from jaxrl_lm.batch import BatchRule, Coefficients, Rated
from jaxrl_lm.chunks import Chunks, advance, begin
from jaxrl_lm.credit import Credit, CreditRule
from jaxrl_lm.distributed import place
from jaxrl_lm.generate import collect, generate, prepare_decode
from jaxrl_lm.models import LoraConfig, Model, classifier_specs, critic_specs, decode_specs, stacked
from jaxrl_lm.placement import Placement
from jaxrl_lm.rows import (
    credit_rows,
    implicit_rows,
    in_parts,
    member_scores,
    score_rows,
    step_chances,
    value_rows,
    whole,
)
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.sharding import Plan, move, on_host
from jaxrl_lm.train_state import follow, like_moments, start, state_shardings, trained_specs
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
from jaxrl_lm.update import Objective, adapted, update

BATCH = 1 << 30  # the purpose of keys that batches are built with; the others stand in rollout/sampler.py


@dataclasses.dataclass(frozen=True)
class Steps:
    """Compiled functions. Arrays come and go with their rows split over the mesh's batch axes, those of `generate` over
    the batch axes of its own mesh, where it has one.

    `policy` is the tree that is trained: all weights, or the adapter, then `base` holds the weights under it.
    """

    plan: Plan
    placement: Placement
    abstract_state: TrainState  # shapes, dtypes and shardings: the target of a restore
    rest: TrainState  # layouts of the state between a step's updates and those of the next
    reference: Any  # layouts of a frozen reference
    init: Callable[..., TrainState]  # (params by name, key); the params are donated
    lay_out: Callable[..., Params]  # what prepare_decode compiles: all of it where generation has no devices of its own
    prepare_decode: Callable[..., Params]  # (policy, base)
    row_keys: Callable[..., jax.Array]  # (key, purpose, step) -> [N]
    generate: Callable[..., Rollout]  # (decode params, requests, stops)
    score: Callable[..., Scores]  # (policy, base, tokens, segment_ids, temperature, start); or a Layout and None
    score_reference: Callable[..., Scores]  # the same of a frozen reference, wherever it lies
    score_compared: Callable[
        ..., Scores
    ]  # what score_reference compiles; its arguments lie on the devices of the reference
    values: Callable[..., jax.Array]  # (params by name, base, tokens, segment_ids, start)
    implicit: Callable[..., Any]  # (process reward model, its reference, rollout, start): rewards, ref log-probs
    credit: Callable[..., Credit]  # (returns, valid, rollout, current, ref, kl_coefficient, values, greedy_returns,
    # step_rewards, step_ends)
    minibatch: Callable[..., Any]  # (rated, coefficients, key, number, rows, rule)
    update: Callable[..., Any]  # (state, frozen, batch)
    follow: Callable[..., Params]  # (reference, policy, ema): the moved reference, whose old one is donated
    chunks: Chunks | None  # generate in chunks

    def place(self, tree: Any) -> Any:
        """Host arrays on the mesh, rows split; scalars on every device."""
        return self._put(tree, self.plan)

    def place_rollout(self, tree: Any) -> Any:
        """The same on the mesh of generation."""
        return self._put(tree, self.placement.rollout)

    def _put(self, tree: Any, plan: Plan) -> Any:
        def one(x):
            layout = plan.rows if jnp.ndim(x) else plan.replicated
            on_mesh = isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)
            there = on_mesh and (self.placement.apart or x.sharding.is_equivalent_to(layout, x.ndim))
            return move(x, layout) if there else place(x, layout)

        return jax.tree.map(one, tree)

    def at_rest(self, state: TrainState) -> TrainState:
        """The state as it lies between updates; what that moves to host memory is deleted where it was."""
        return move(state, self.rest, delete=True) if self.placement.moves_state else state

    def on_devices(self, state: TrainState) -> TrainState:
        """The state as updates take it; what that brings from host memory is deleted there."""
        if not self.placement.moves_state:
            return state
        return move(state, jax.tree.map(lambda x: x.sharding, self.abstract_state), delete=True)


def minibatch_rows(
    rated: Rated,
    coefficients: Coefficients,
    key,
    number: Int32[Array, ""],
    rows: Int32[Array, "B"],
    rule: BatchRule,
    *,
    parts: int = 1,
    together: int = 1,
) -> PolicyBatch | CriticBatch | ImplicitBatch:
    """The batch of update `number` of the run, which no other one shares its key with; neighbours of `together` rows are in
    one of its `parts` microbatches."""
    key = jax.random.fold_in(jax.random.fold_in(key, BATCH), number)
    batch = (rule if rated.values is None else rule.critic)(rated, coefficients, key, rows)
    return in_parts(batch if rated.implicit is None else rule.implicit(rated, batch, rows), parts, together)


def row_keys(key: jax.Array, purpose: Int32[Array, ""], step: Int32[Array, ""], *, rows: int) -> jax.Array:
    """A key a row, [rows], of (seed, purpose, step, row): never drawn twice."""
    key = jax.random.fold_in(jax.random.fold_in(key, purpose), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows, dtype=jnp.int32))


def lay_out(policy: Params, base: Params | None, *, model: Model, lora: LoraConfig | None) -> Params:
    """The policy's weights as decoding reads them."""
    return prepare_decode(whole(policy, base, lora), model=model)


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
    placement: Placement | None = None,
    decode_chunk: int | None = None,
    together: int = 1,
) -> Steps:
    """Binds everything static and names every layout; nothing is compiled before its first call.

    `rows` is the number of completions a step; `reference`: the state holds a reference that moves; `placement`: what
    lies elsewhere than on the plan's devices; `decode_chunk`: passes of a chunk of decoding (None: there are none).
    Raises ValueError if rows do not divide over the mesh. Scoring runs over `score_rows_at_once` rows at a time (None:
    all). `together`: so many neighbours are always in one microbatch, which a layout that shares their prompt asks for.
    """
    placement, size = placement or Placement(plan, plan), score_rows_at_once or rows
    _check_rows(rows, placement, samples=sampling is not None, size=size)
    specs = trained_specs(model, lora=lora, critic=critic, prm=implicit_prm is not None)
    abstract, layouts = state_shardings(specs, plan, tx, param_dtype, reference=reference)
    policy, every, split = layouts.params["policy"], plan.replicated, plan.rows
    base = None if lora is None else plan.tree(model.specs)
    at_rest, moments = placement.rest(layouts.params)
    bind = functools.partial
    if lora is not None and objective is not None:
        objective = adapted(objective, lora)
    return Steps(
        plan=plan,
        placement=placement,
        abstract_state=abstract,
        rest=layouts._replace(params=at_rest, opt_state=like_moments(tx, abstract.opt_state, moments, every)),
        reference=reference_layout(model, placement, policy),
        init=jax.jit(
            bind(start, tx=tx, reference=reference),
            in_shardings=(layouts.params, every),
            out_shardings=layouts,
            donate_argnums=0,
        ),
        **_generation(model, placement, policy, base, lora=lora, sampling=sampling, rows=rows, passes=decode_chunk),
        **_scoring(
            model,
            placement,
            layouts.params,
            base,
            lora=lora,
            chunk=score_chunk,
            size=size,
            shared=critic == "shared",
            beta=implicit_prm,
            together=together,
        ),
        credit=jax.jit(bind(credit_rows, rule=credit, estimator=kl_estimator), out_shardings=split),
        minibatch=jax.jit(
            bind(minibatch_rows, parts=microbatches, together=together), static_argnums=5, out_shardings=split
        ),
        update=jax.jit(
            bind(update, objective=objective, tx=tx, model=model, microbatches=microbatches),
            in_shardings=(layouts, None, split),
            out_shardings=(layouts, every),
            donate_argnums=0,
        ),
        follow=jax.jit(follow, in_shardings=(policy, policy, every), out_shardings=policy, donate_argnums=0),
    )


def _check_rows(rows: int, placement: Placement, *, samples: bool, size: int) -> None:
    ways, over = placement.train.batch_ways, placement.rollout.for_decode().batch_ways
    if rows % ways:
        raise ValueError(f"{rows} rows do not divide over the {ways} devices of the mesh's batch axes")
    if samples and rows % over:
        raise ValueError(
            f"{rows} rows do not divide over the {over} devices that generation splits them over: it has no use for "
            "columns, and rows take the mesh's axis sequence too"
        )
    if rows % size:
        raise ValueError(f"score_rows_at_once={size} does not divide {rows} rows")


def reference_layout(model: Model, placement: Placement, policy: Any) -> Any:
    """The layouts of a frozen reference: the policy's, in host memory, or on generation's devices."""
    if placement.reference == "rollout_mesh":
        return placement.rollout.tree(model.specs)
    return on_host(policy) if placement.reference == "host" else policy


def _generation(
    model: Model,
    placement: Placement,
    policy: Any,
    base: Any,
    *,
    lora: LoraConfig | None,
    sampling: Any,
    rows: int,
    passes: int | None,
) -> dict[str, Any]:
    """What samples, by its name in `Steps`; `policy` and `base` are layouts.

    Weights for devices of their own are cast as they lie in training, so that none of it has more than its part of them.
    """
    bind, rollout, specs = functools.partial, placement.rollout, decode_specs(model.config)
    sampled = placement.on_rollout(model).for_decode()  # first, for it says which heads the mesh would cut
    read, split, every = rollout.for_decode().tree(specs), rollout.rows, rollout.replicated
    laid = jax.jit(
        bind(lay_out, model=model, lora=lora),
        in_shardings=(policy, base),
        out_shardings=placement.train.tree(specs) if placement.apart else read,
    )
    requests = Requests(split, split, split, split, split, policy_step=every, drafts=split)
    parts = {"model": sampled, "sampling": sampling}
    return {
        "lay_out": laid,
        "prepare_decode": (lambda policy, base: move(laid(policy, base), read)) if placement.apart else laid,
        "row_keys": jax.jit(bind(row_keys, rows=rows), out_shardings=placement.train.rows),
        "generate": jax.jit(
            bind(generate, **parts),
            in_shardings=(read, requests, every),
            out_shardings=split,
        ),
        "chunks": None
        if passes is None
        else Chunks(
            # The state has the layout that `chunks.py` gives it inside.
            begin=jax.jit(bind(begin, **parts), in_shardings=(read, requests)),
            advance=jax.jit(
                bind(advance, passes=passes, **parts), in_shardings=(read, requests, None, every), donate_argnums=2
            ),
            finish=jax.jit(bind(collect, sampling=sampling), in_shardings=(None, requests), out_shardings=split),
        ),
    }


def _score_reference(compared: Callable[..., Scores], placement: Placement, policy: Any) -> Callable[..., Scores]:
    """The compiled scores of a reference, of arguments from where they lie to where the policy's scores are."""
    if placement.reference == "host":
        return lambda reference, *rest: compared(move(reference, policy), *rest)
    if placement.reference == "mesh":
        return compared
    plan, back = placement.rollout, placement.train.rows

    def on_rollout(reference, base, tokens, segment_ids, temperature, start: int) -> Scores:
        there = [move(x, plan.rows) for x in (tokens, segment_ids, temperature)]
        return Scores(*(move(x, back) for x in compared(reference, base, *there, start)))

    return on_rollout


def _scoring(
    model: Model,
    placement: Placement,
    params: dict[str, Any],
    base: Any,
    *,
    lora: LoraConfig | None,
    chunk: int,
    size: int,
    shared: bool,
    beta: float | None,
    together: int,
) -> dict[str, Callable[..., Any]]:
    """What scores rows, by its name in `Steps`; `params` and `base` are layouts."""
    bind, plan, split = functools.partial, placement.train, placement.train.rows
    how = {"size": size, "together": together}

    def scores(model: Model, plan: Plan, policy: Any) -> Callable[..., Scores]:
        return jax.jit(
            bind(score_rows, model=model, lora=lora, chunk=chunk, **how),
            static_argnums=5,
            in_shardings=(policy, base, plan.rows, plan.rows, plan.rows),
            out_shardings=plan.rows,
        )

    values = jax.jit(
        bind(value_rows, model=model, lora=lora, shared=shared, **how),
        static_argnums=4,
        in_shardings=(params, base, split, split),
        out_shardings=split,
    )
    near = compared = scores(model, plan, params["policy"])
    if placement.reference == "rollout_mesh":
        compared = scores(placement.on_rollout(model), placement.rollout, placement.rollout.tree(model.specs))
    return {
        "score": near,
        "score_compared": compared,
        "score_reference": _score_reference(compared, placement, params["policy"]),
        "values": (lambda given, *rest: values(move(given, params), *rest)) if placement.critic == "host" else values,
        "implicit": jax.jit(
            bind(implicit_rows, model=model, beta=beta, chunk=chunk, **how),
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
