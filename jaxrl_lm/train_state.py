"""The training state: what is trained of a run, how it lies on a mesh, how it begins, and a reference that follows it.

Layouts come from the declarations of the weights alone, so that a checkpoint is restored, and a plan made, without any.
Compiled in `steps.py` and `fit_steps.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxrl_lm.models import LoraConfig, Model, critic_specs, lora_specs, value_specs
from jaxrl_lm.moments import is_tiles, layout_of
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import Params, TrainState


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
    opt_layouts = like_moments(tx, opt_state, layouts, plan.replicated)
    extra, extra_layout = {"lr_scale": jax.ShapeDtypeStruct((), jnp.float32)}, {"lr_scale": plan.replicated}
    if reference:
        extra["reference"], extra_layout["reference"] = params["policy"], layouts["policy"]
    step = jax.ShapeDtypeStruct((), jnp.int32)
    placed = TrainState(plan.replicated, layouts, opt_layouts, plan.replicated, extra_layout)
    with_layout = lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
    return jax.tree.map(with_layout, TrainState(step, params, opt_state, key, extra), placed), placed


def like_moments(tx: optax.GradientTransformation, opt_state: Any, layouts: dict[str, Any], every: Any) -> Any:
    """The layouts of the optimiser's state: those of the parameters, for all else `every`."""
    return optax.tree.map_params(
        tx, layout_of, opt_state, layouts, transform_non_params=lambda _: every, is_leaf=is_tiles
    )


def start(
    params: dict[str, Params], key: jax.Array, *, tx: optax.GradientTransformation, reference: bool
) -> TrainState:
    """The state before the first step; with a reference that moves it is a copy of the policy."""
    extra = {"lr_scale": jnp.ones((), jnp.float32)}
    if reference:
        extra["reference"] = jax.tree.map(jnp.copy, params["policy"])
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), key, extra)


def follow(reference: Params, policy: Params, ema: Float[Array, ""]) -> Params:
    """ema · reference + (1 − ema) · policy, in the weights' dtype."""
    return jax.tree.map(lambda r, p: (ema * r + (1.0 - ema) * p).astype(r.dtype), reference, policy)
