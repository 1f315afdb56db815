"""One optimiser step over microbatches.

A loss is a sum of weighted terms whose weights come from the whole batch, so gradients and metrics of microbatches only
add: the result does not depend on how the batch is cut.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_lm.metrics import Max, Mean, Metrics, Sum, merge
from jaxrl_lm.models import LoraConfig, Model, attach
from jaxrl_lm.types import Frozen, Params, TrainState

# objective(params, frozen, batch, model=model) -> the sum of weighted terms, and metrics that add
Objective = Callable[..., tuple[jax.Array, Metrics]]


def cut(batch: Any, parts: int) -> Any:
    """The batch as [parts, N / parts, …]; every part takes rows from every device. Raises ValueError where it cannot."""

    def one(x):
        if x.shape[0] % parts:
            raise ValueError(f"a batch of {x.shape[0]} rows does not divide into {parts} microbatches")
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(one, batch)


def gradients(
    params: dict[str, Params], frozen: Frozen, batch: Any, *, objective: Objective, model: Model, microbatches: int
) -> tuple[dict[str, Params], Metrics]:
    """The gradient of the objective over the whole batch, in the parameters' dtype or float32, and the merged metrics."""

    def one(part):
        (loss, metrics), grads = jax.value_and_grad(lambda p: objective(p, frozen, part, model=model), has_aux=True)(
            params
        )
        return grads, {**metrics, "loss": Sum(loss)}

    if microbatches == 1:
        return one(batch)
    zero = lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))

    def add(total, part):
        grads, metrics = one(part)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), metrics

    # The model stands once in the program: metrics come out stacked and are merged in a loop of their own.
    grads, stacked = jax.lax.scan(add, jax.tree.map(zero, params), cut(batch, microbatches))
    first, rest = (jax.tree.map(lambda x, part=part: x[part], stacked) for part in (0, slice(1, None)))
    metrics, _ = jax.lax.scan(lambda total, part: (merge(total, part), None), first, rest)
    return grads, metrics


def adapted(objective: Objective, lora: LoraConfig) -> Objective:
    """The objective on the whole policy, as a function of its adapter: it need not know that there is one."""

    def call(params: dict[str, Params], frozen: Frozen, batch: Any, *, model: Model):
        whole = attach(frozen.base, params["policy"], lora)
        return objective({**params, "policy": whole}, frozen, batch, model=model)

    return call


def update(
    state: TrainState,
    frozen: Frozen,
    batch: Any,
    *,
    objective: Objective,
    tx: optax.GradientTransformation,
    model: Model,
    microbatches: int = 1,
) -> tuple[TrainState, Metrics]:
    """The state after one optimiser step, and the step's metrics.

    With a non-finite loss or gradient the state comes back as it was, and the metric `nonfinite` is 1: the caller stops.
    """
    grads, metrics = gradients(state.params, frozen, batch, objective=objective, model=model, microbatches=microbatches)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"].total)

    def apply(_):
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        if "lr_scale" in state.extra:  # what a budget has left of the learning rate
            updates = jax.tree.map(lambda u: (state.extra["lr_scale"] * u).astype(u.dtype), updates)
        return optax.apply_updates(state.params, updates), opt_state

    params, opt_state = jax.lax.cond(finite, apply, lambda _: (state.params, state.opt_state), None)
    state = state._replace(step=state.step + finite.astype(state.step.dtype), params=params, opt_state=opt_state)
    one = jnp.ones((), jnp.float32)
    return state, {**metrics, "grad_norm": Mean(norm, one), "nonfinite": Max(1.0 - finite.astype(jnp.float32))}
