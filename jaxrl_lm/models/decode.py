"""The decoder as generation reads it: fused weights, one cache a layer, every row at a place of its own.

`prefill` computes prompts once, `extend` goes on from any cache by one or more tokens a row. A cache's column is a position,
so that a row's numbers do not depend on where it stands, on its neighbours, or on how long these are. The same layers for
training: `decoder.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrl_lm.models.config import ModelConfig
from jaxrl_lm.models.decoder import Model, decoder_specs, visible
from jaxrl_lm.models.layers import (
    MASKED,
    PAIRS,
    ParamSpec,
    attend,
    attend_in_parts,
    fold,
    normalised,
    rope_frequencies,
    turned,
)
from jaxrl_lm.types import Params

BLOCK = 128  # columns of a cache that attention reads at once


class Cache(NamedTuple):
    """Keys and values of W rows; column s holds position s, and the first `lengths` columns are filled."""

    layers: tuple[tuple[Float[Array, "W c S K"], Float[Array, "W c S K"]], ...]
    lengths: Int32[Array, "W"]


def room_for(columns: int) -> int:
    """How many columns a cache of so many has: whole blocks where there is more than one."""
    return columns if columns <= BLOCK else -(-columns // BLOCK) * BLOCK


# --- weights ----------------------------------------------------------------------------------------------------------


def fuse_layers(params: Params, *, model: Model) -> Params:
    """The same weights as `prefill` and `extend` read them: the layers a tuple, what reads one input in one matrix.

    qkv is [D, c, g + 2, K]: of each of the c key heads its g query heads, its key and its value, so that a mesh axis over
    heads splits it; gate_up is [D, 2, F]. Attached adapters are merged.
    """
    one = lambda number: _fused(fold(jax.tree.map(lambda leaf: leaf[number], params["layers"])), model.config)
    return {**params, "layers": tuple(one(number) for number in range(model.config.num_layers))}


def _fused(layer: Params, config: ModelConfig) -> Params:
    attn, mlp = layer["attn"], layer["mlp"]
    heads = lambda name, kind: attn[name][kind].reshape(
        *attn[name][kind].shape[:-1], config.num_kv_heads, -1, config.head_dim
    )
    side_by_side = lambda kind: jnp.concatenate([heads(f"{name}_proj", kind) for name in "qkv"], axis=-2)
    both = lambda kind: jnp.stack([mlp[name][kind] for name in ("gate_proj", "up_proj")], axis=-2)
    kinds = lambda node: ("kernel", "bias") if "bias" in node else ("kernel",)
    return {
        "input_norm": layer["input_norm"],
        "qkv": {kind: side_by_side(kind) for kind in kinds(attn["q_proj"])},
        **{name: attn[name] for name in ("q_norm", "k_norm") if name in attn},
        "o": attn["o_proj"],
        "post_norm": layer["post_norm"],
        "gate_up": {kind: both(kind) for kind in kinds(mlp["gate_proj"])},
        "down": mlp["down_proj"],
    }


def decode_specs(config: ModelConfig) -> dict[str, Any]:
    """The declarations of the weights that `fuse_layers` gives."""
    specs = decoder_specs(config)
    layer = jax.tree.map(lambda spec: ParamSpec(spec.shape[1:], spec.axes[1:], spec.init), specs["layers"])
    attn, mlp = layer["attn"], layer["mlp"]
    group = config.num_heads // config.num_kv_heads + 2

    def joined(parts: dict[str, ParamSpec], shape: tuple[int, ...], axes: tuple[str | None, ...]):
        one = lambda spec: ParamSpec((*spec.shape[:-1], *shape), (*spec.axes[:-1], *axes), spec.init)
        return {kind: one(spec) for kind, spec in parts.items()}

    fused = {
        "input_norm": layer["input_norm"],
        "qkv": joined(attn["q_proj"], (config.num_kv_heads, group, config.head_dim), ("kv_heads", None, None)),
        **{name: attn[name] for name in ("q_norm", "k_norm") if name in attn},
        "o": attn["o_proj"],
        "post_norm": layer["post_norm"],
        "gate_up": joined(mlp["gate_proj"], (2, config.intermediate_size), (None, "mlp")),
        "down": mlp["down_proj"],
    }
    return {**{name: tree for name, tree in specs.items() if name != "layers"}, "layers": (fused,) * config.num_layers}


# --- the forward pass -------------------------------------------------------------------------------------------------

Attention = Callable[..., Float[Array, "W T h"]]  # of queries [W T h K], keys and values [W c S K]
Store = Callable[..., Float[Array, "W c S K"]]  # of a layer's old keys or values and the new ones [W c T K]


def prefill(params: Params, tokens: Int32[Array, "P T"], lengths: Int32[Array, "P"], *, model: Model) -> Cache:
    """A cache of T columns of right-padded prompts, of whose tokens the first `lengths` count."""
    columns = tokens.shape[1]
    places = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), tokens.shape)
    segments = (places < lengths[:, None]).astype(jnp.int32)
    sees = lambda *queries: visible(*queries, places, segments, model.config.sliding_window)
    parts = -(-columns * columns // PAIRS)
    if parts == 1:
        attention = lambda q, k, v: attend(q, k, v, sees(places, segments))
    else:
        attention = lambda q, k, v: attend_in_parts(q, k, v, sees, (places, segments), parts=parts)
    empty = ((None, None),) * model.config.num_layers
    _, layers = _run(params, tokens, places, empty, model, attention, lambda old, new: new)
    return Cache(layers, lengths)


def extend(
    params: Params, tokens: Int32[Array, "W T"], cache: Cache, *, model: Model, count: Int32[Array, "W"] | None = None
) -> tuple[Float[Array, "W T D"], Cache]:
    """Hidden states of the next T tokens of each row after the last norm, and the cache with the first `count` of them.

    Each row's tokens stand at its own places from its length up. None: all T count. Of the tokens from `count` up nothing
    stays; their states are not to be read. There must be room for T more columns in each row.
    """
    columns = tokens.shape[1]
    places = cache.lengths[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]
    filled = jnp.max(cache.lengths) + columns
    attention = lambda q, k, v: attend_filled(q, k, v, places, filled, model.config.sliding_window)

    def store(old, new):
        one = lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
        return jax.vmap(one)(old, new.astype(old.dtype), cache.lengths)

    hidden, layers = _run(params, tokens, places, cache.layers, model, attention, store)
    return hidden, Cache(layers, cache.lengths + (columns if count is None else count))


def _run(params: Params, tokens, places, caches, model: Model, attention: Attention, store: Store):
    """Hidden states after the last norm, and each layer's keys and values as `store` leaves them."""
    config = model.config
    cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(config.dtype), tree)
    angles = places[:, :, None].astype(jnp.float32) * rope_frequencies(config).astype("float32")[None, None]
    cos, sin = (function(angles)[:, :, None] for function in (jnp.cos, jnp.sin))
    norm = lambda x, node: normalised(x, node["scale"], config.rms_norm_eps)
    x = model.look_up(cast(params["embed"])["table"], tokens)
    layers = []
    for weights, (old_k, old_v) in zip(params["layers"], caches, strict=True):
        weights = cast(weights)
        qkv = _linear("wtd,dcgk->wtcgk", norm(x, weights["input_norm"]), weights["qkv"])
        q, k, v = qkv[..., :-2, :].reshape(*x.shape[:2], -1, config.head_dim), qkv[..., -2, :], qkv[..., -1, :]
        if config.qk_norm:
            q, k = norm(q, weights["q_norm"]), norm(k, weights["k_norm"])
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (model.constrain_kv(store(old, new.swapaxes(1, 2))) for old, new in ((old_k, k), (old_v, v)))
        x = x + _linear("wth,hd->wtd", attention(q, k, v), weights["o"])
        gate, up = jnp.moveaxis(_linear("wtd,dnf->wtnf", norm(x, weights["post_norm"]), weights["gate_up"]), 2, 0)
        x = model.constrain(x + _linear("wtf,fd->wtd", jax.nn.silu(gate) * up, weights["down"]))
        layers.append((k, v))
    return norm(x, cast(params["final_norm"])), tuple(layers)


def _linear(form: str, x, weights: Params):
    out = jnp.einsum(form, x, weights["kernel"])
    return out + jnp.broadcast_to(weights["bias"], out.shape) if "bias" in weights else out


def attend_filled(
    q: Float[Array, "W T h K"],
    k: Float[Array, "W c S K"],
    v: Float[Array, "W c S K"],
    places: Int32[Array, "W T"],
    filled: Int32[Array, ""],
    window: int | None,
) -> Float[Array, "W T hK"]:
    """`attend` of tokens at these places of caches of which no row has more than `filled` columns.

    Blocks of columns are read one after another, as far as any row is filled, with the running maximum and sum of the
    softmax (Milakov and Gimelshein, 2018): a block that a row does not see changes none of its bits. Raises ValueError
    for a cache that is not in whole blocks.
    """

    def sees(start, size) -> Bool[Array, "W T B"]:
        gap = places[:, :, None] - (start + jnp.arange(size, dtype=jnp.int32))[None, None]
        return (gap >= 0) if window is None else (gap >= 0) & (gap < window)

    rows, columns, heads, width = q.shape
    room = k.shape[2]
    if room <= BLOCK:
        return attend(q, k, v, sees(0, room))
    if room % BLOCK:
        raise ValueError(f"a cache of {room} columns is not in whole blocks of {BLOCK}: make it by room_for")
    q = q.reshape(rows, columns, k.shape[1], heads // k.shape[1], width)

    def block(number, carry):
        best, total, out = carry
        start = number * BLOCK
        here = [jax.lax.dynamic_slice_in_dim(x, start, BLOCK, axis=2) for x in (k, v)]
        logits = jnp.einsum("wtcgk,wcsk->wcgts", q, here[0], preferred_element_type=jnp.float32) * width**-0.5
        logits = jnp.where(sees(start, BLOCK)[:, None, None], logits, MASKED)
        higher = jnp.maximum(best, jnp.max(logits, axis=-1))
        weights, old = jnp.exp(logits - higher[..., None]), jnp.exp(best - higher)
        added = jnp.einsum(
            "wcgts,wcsk->wcgtk", weights.astype(v.dtype), here[1], preferred_element_type=jnp.float32
        )
        return higher, total * old + jnp.sum(weights, axis=-1), out * old[..., None] + added

    shape = (rows, k.shape[1], heads // k.shape[1], columns)
    start = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, width), jnp.float32)
    _, total, out = jax.lax.fori_loop(0, (filled + BLOCK - 1) // BLOCK, block, start)
    out = (out / total[..., None]).astype(v.dtype)
    return jnp.moveaxis(out, 3, 1).reshape(rows, columns, heads * width)
