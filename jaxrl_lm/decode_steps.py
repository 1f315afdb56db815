"""The decode loop as a compiled step of its own, whose state is given up for the next one: what `generate` has inside.

One of the files with jax.jit, beside `steps.py`; there `generate` is compiled whole.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_lm.config import SamplingConfig
from jaxrl_lm.generate import DecodeState, decode
from jaxrl_lm.models import Model
from jaxrl_lm.sharding import Plan


def state_layouts(state: DecodeState, plan: Plan) -> Any:
    """The layouts of a state, of arrays or of shapes: rows and slots over the batch axes, caches by their heads too."""

    def one(path, x):
        if not x.ndim:
            return plan.replicated
        heads = ("kv_heads",) if x.ndim == 4 else ()  # of what has rows first
        return plan.sharding(("batch", *heads, *(None,) * (x.ndim - 1 - len(heads))), x.shape, f"state{path}")

    return jax.tree.map_with_path(one, state)


def compile_decode(layouts: Any, *, model: Model, sampling: SamplingConfig) -> Callable[..., DecodeState]:
    """(decode params, requests, state, stops, until) -> state, of `decode`; the state that it starts from is donated.

    `model` is laid out for decoding (`Model.for_decode`); `layouts` are `state_layouts`.
    """
    return jax.jit(functools.partial(decode, model=model, sampling=sampling), donate_argnums=2, out_shardings=layouts)
