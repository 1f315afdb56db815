"""The optimiser as an optax chain: clip by global norm, AdamW with decay on matrices only, a schedule."""

from typing import Any

import jax
import optax

from jaxrl_lm.moments import scale_by_stored_adam

SCHEDULES = ("constant", "linear", "cosine")


def make_schedule(name: str, peak: float, *, total_steps: int, warmup_steps: int = 0) -> optax.Schedule:
    """Learning rate by optimiser step: a linear warm-up to the peak, then constant, or linear or cosine down to 0.

    Raises ValueError for an unknown name or a warm-up as long as the run.
    """
    if name not in SCHEDULES:
        raise ValueError(f"lr_scheduler={name!r} is unknown: use {', '.join(SCHEDULES)}")
    if warmup_steps >= total_steps and warmup_steps:
        raise ValueError(f"warmup_steps={warmup_steps} leaves nothing of the run's {total_steps} optimiser steps")
    rest = max(total_steps - warmup_steps, 1)
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
    }[name]()
    if not warmup_steps:
        return after
    # The first step already moves: step s of the warm-up has (s + 1) / warmup_steps of the peak.
    warmup = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after], [warmup_steps])


def decay_mask(params):
    """True for weights that decay: kernels and tables, not norms and biases."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in ("kernel", "table"), params)


def make_optimizer(
    schedule: optax.Schedule,
    *,
    max_grad_norm: float,
    weight_decay: float,
    b1: float,
    b2: float,
    eps: float,
    stacked: bool = False,
    moments_dtype: str = "float32",
) -> optax.GradientTransformation:
    """Clipping by global norm (0: none), then AdamW (Loshchilov and Hutter, 2019), its moments stored as `moments.py` does.

    `stacked`: the leaves' first axis is that of an ensemble's members, each of which is clipped by its own norm.
    """
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    if stacked:
        clip = _each_member(clip)
    adamw = optax.chain(
        scale_by_stored_adam(b1=b1, b2=b2, eps=eps, dtype=moments_dtype),
        optax.add_decayed_weights(weight_decay, decay_mask),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.chain(clip, adamw)


def _each_member(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation without state, of each member alone."""
    update = lambda updates, state, params=None: (jax.vmap(lambda one: transform.update(one, state)[0])(updates), state)
    return optax.GradientTransformation(transform.init, update)


def optimizer_of(config: Any, *, total_steps: int) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """The schedule and the optimiser that a config's options describe."""
    schedule = make_schedule(
        config.lr_scheduler, config.learning_rate, total_steps=total_steps, warmup_steps=config.warmup_steps
    )
    tx = make_optimizer(
        schedule,
        max_grad_norm=config.max_grad_norm,
        weight_decay=config.weight_decay,
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        stacked=getattr(config, "members", 1) > 1,
        moments_dtype=config.moments_dtype,
    )
    return schedule, tx
