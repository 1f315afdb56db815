"""The decoder as generation reads it: fused weights, one cache a layer, every row at a place of its own.

`prefill` computes prompts once, `extend` goes on from any cache by one or more tokens a row. A cache's column is a position,
so that a row's numbers do not depend on where it stands, on its neighbours, or on how long these are. The same layers for
training: `decoder.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrl_lm.models.attention import attention_of
from jaxrl_lm.models.config import ModelConfig
from jaxrl_lm.models.decoder import Model, decoder_specs, visible
from jaxrl_lm.models.kv_cache import Cache, Keys, Values, block, dot_keys, put, queries_for, read_values, stored
from jaxrl_lm.models.layers import (
    MASKED,
    PAIRS,
    ParamSpec,
    attend,
    attend_in_parts,
    fold,
    rope_frequencies,
)
from jaxrl_lm.types import Params

BLOCK = 128  # columns of a cache that attention reads at once


def room_for(columns: int) -> int:
    """How many columns a cache of so many has: whole blocks where there is more than one."""
    return columns if columns <= BLOCK else -(-columns // BLOCK) * BLOCK


# --- weights ----------------------------------------------------------------------------------------------------------


def fuse_layers(params: Params, *, model: Model) -> Params:
    """The same weights as `prefill` and `extend` read them: the layers a tuple, what reads one input in one matrix.

    Matrices are [outputs, inputs]. qkv is [c, g + 2, K, D]: of each of the c key heads its g query heads, its key and its
    value, so that a mesh axis over heads splits it; gate_up is [2, F, D]. Attached adapters are merged.
    """
    one = lambda number: _fused(fold(jax.tree.map(lambda leaf: leaf[number], params["layers"])), model.config)
    return {**params, "layers": tuple(one(number) for number in range(model.config.num_layers))}


def _fused(layer: Params, config: ModelConfig) -> Params:
    attn, mlp = layer["attn"], layer["mlp"]
    heads = lambda x: x.reshape(config.num_kv_heads, -1, config.head_dim, *x.shape[1:])
    qkv = [_by_output(attn[f"{name}_proj"]) for name in "qkv"]
    gate_up = [_by_output(mlp[name]) for name in ("gate_proj", "up_proj")]
    return {
        "input_norm": layer["input_norm"],
        "qkv": {kind: jnp.concatenate([heads(one[kind]) for one in qkv], axis=1) for kind in qkv[0]},
        **{name: attn[name] for name in ("q_norm", "k_norm") if name in attn},
        "o": _by_output(attn["o_proj"]),
        "post_norm": layer["post_norm"],
        "gate_up": {kind: jnp.stack([one[kind] for one in gate_up]) for kind in gate_up[0]},
        "down": _by_output(mlp["down_proj"]),
    }


def _by_output(linear: Params) -> Params:
    return {kind: leaf.T if kind == "kernel" else leaf for kind, leaf in linear.items()}


def decode_specs(config: ModelConfig) -> dict[str, Any]:
    """The declarations of the weights that `fuse_layers` gives."""
    specs = decoder_specs(config)
    layer = jax.tree.map(lambda spec: ParamSpec(spec.shape[1:], spec.axes[1:], spec.init), specs["layers"])
    attn, mlp = layer["attn"], layer["mlp"]
    group = config.num_heads // config.num_kv_heads + 2

    def laid(linear: dict[str, ParamSpec], shape: tuple[int, ...] = (), axes: tuple[str | None, ...] = ()):
        """Outputs first, and their axis in several where a shape is given."""

        def one(spec: ParamSpec) -> ParamSpec:
            out, into = spec.shape[-1:], spec.shape[:-1]
            return ParamSpec((*(shape or out), *into), (*(axes or spec.axes[-1:]), *spec.axes[:-1]), spec.init)

        return {kind: one(spec) for kind, spec in linear.items()}

    fused = {
        "input_norm": layer["input_norm"],
        "qkv": laid(attn["q_proj"], (config.num_kv_heads, group, config.head_dim), ("kv_heads", None, None)),
        **{name: attn[name] for name in ("q_norm", "k_norm") if name in attn},
        "o": laid(attn["o_proj"]),
        "post_norm": layer["post_norm"],
        "gate_up": laid(mlp["gate_proj"], (2, config.intermediate_size), (None, "mlp")),
        "down": laid(mlp["down_proj"]),
    }
    return {**{name: tree for name, tree in specs.items() if name != "layers"}, "layers": (fused,) * config.num_layers}


# --- the forward pass -------------------------------------------------------------------------------------------------

# What of a layer differs: of its old keys and values, and new queries [W T h K], keys and values [W c T K], what the queries
# read [W T hK], and the keys and values that the cache has then.
Mixer = Callable[..., tuple[Float[Array, "W T hK"], tuple[Any, Any]]]


def prefill(
    params: Params,
    tokens: Int32[Array, "P T"],
    lengths: Int32[Array, "P"],
    *,
    model: Model,
    kv_cache_dtype: str | None = None,
) -> Cache:
    """A cache of T columns of right-padded prompts, of whose tokens the first `lengths` count.

    What an int8 cache holds is rounded after the prompt has been read. Raises ValueError for another `kv_cache_dtype`.
    """
    columns = tokens.shape[1]
    places = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), tokens.shape)
    segments = (places < lengths[:, None]).astype(jnp.int32)
    sees = lambda *queries: visible(*queries, places, segments, model.config.sliding_window)
    parts = -(-columns * columns // PAIRS)

    def mix(_, q, k, v):
        if model.config.attention_implementation != "xla":
            out = attention_of(model.config, model.plan, segments, sees, (places, segments))(q, k, v)
        elif parts == 1:
            out = attend(q, k, v, sees(places, segments))
        else:
            out = attend_in_parts(q, k, v, sees, (places, segments), parts=parts)
        return out, jax.tree.map(model.constrain_kv, stored(k.swapaxes(2, 3), v, kv_cache_dtype))

    empty = (None,) * model.config.num_layers
    _, layers = _run(params, tokens, places, empty, model, mix)
    return Cache(layers, lengths)


def extend(
    params: Params,
    tokens: Int32[Array, "W T"],
    cache: Cache,
    *,
    model: Model,
    count: Int32[Array, "W"] | None = None,
    looped: bool = False,
) -> tuple[Float[Array, "D W T"], Cache]:
    """Hidden states of the next T tokens of each row after the last norm, and the cache with the first `count` of them.

    Each row's tokens stand at its own places from its length up. None: all T count. Of the tokens from `count` up nothing
    stays; their states are not to be read. There must be room for T more columns in each row.

    What attention reads follows from the rows of which a token counts alone. `looped`: within a loop over the cache.
    """
    columns = tokens.shape[1]
    places = cache.lengths[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]
    window = model.config.sliding_window
    first, filled = columns_seen(cache.lengths, columns, window, count)

    def mix(old, q, k, v):
        new = put(old, k.swapaxes(2, 3), v, cache.lengths, model.plan, looped)
        k, v = jax.tree.map(model.constrain_kv, new)
        return attend_filled(q, k, v, places, filled, window, first), (k, v)

    hidden, layers = _run(params, tokens, places, cache.layers, model, mix)
    return hidden, Cache(layers, cache.lengths + (columns if count is None else count))


def _run(params: Params, tokens, places, caches, model: Model, mix: Mixer):
    """Hidden states [D W T] after the last norm, and each layer's keys and values as `mix` leaves them.

    Features come first and rows last: on a CPU the products with few rows are faster so.
    """
    config = model.config
    cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(config.dtype), tree)
    frequencies = rope_frequencies(config).astype("float32")[:, None, None]
    angles = places.astype(jnp.float32)[None] * frequencies
    cos, sin = jnp.cos(angles)[None, None], jnp.sin(angles)[None, None]  # [1 1 K/2 W T]
    norm = lambda x, node, axis=0: _normalised(x, node["scale"], config.rms_norm_eps, axis)
    x = model.constrain_features(jnp.moveaxis(model.look_up(cast(params["embed"])["table"], tokens), 2, 0))
    layers = []
    for weights, old in zip(params["layers"], caches, strict=True):
        weights = cast(weights)
        qkv = _linear("cgkd,dwt->cgkwt", weights["qkv"], norm(x, weights["input_norm"]))
        q, k, v = qkv[:, :-2], qkv[:, -2:-1], qkv[:, -1:]
        if config.qk_norm:
            q, k = norm(q, weights["q_norm"], 2), norm(k, weights["k_norm"], 2)
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        q = jnp.einsum("cgkwt->wtcgk", q).reshape(*tokens.shape, -1, config.head_dim)
        read, kv = mix(old, q, *(jnp.einsum("ckwt->wctk", new[:, 0]) for new in (k, v)))
        x = x + _linear("dh,wth->dwt", weights["o"], read)
        gate, up = _linear("nfd,dwt->nfwt", weights["gate_up"], norm(x, weights["post_norm"]))
        x = model.constrain_features(x + _linear("df,fwt->dwt", weights["down"], jax.nn.silu(gate) * up))
        layers.append(kv)
    return norm(x, cast(params["final_norm"])), tuple(layers)


def _linear(form: str, weights: Params, x):
    out = jnp.einsum(form, weights["kernel"], x)
    if "bias" not in weights:
        return out
    bias = weights["bias"]
    return out + jnp.broadcast_to(bias.reshape(*bias.shape, *(1,) * (out.ndim - bias.ndim)), out.shape)


def _normalised(x, scale, eps: float, axis: int):
    """`layers.normalised` along this axis."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axis, keepdims=True) + eps)
    return x32.astype(x.dtype) * jnp.broadcast_to(scale.reshape(-1, *(1,) * (x.ndim - axis - 1)), x.shape)


def _turned(x, cos, sin):
    """`layers.rotate` along axis 2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=2)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2).astype(x.dtype)


def next_logits(params: Params, hidden: Float[Array, "D W"], *, model: Model) -> Float[Array, "W V"]:
    """Float32 logits of the next token of each row, each device with its own part of the vocabulary."""
    table = params["embed" if model.config.tie_embeddings else "lm_head"]["table"].astype(hidden.dtype)
    plan = None if model.plan is None else model.plan.for_logits()
    if plan is not None:
        table, hidden = plan.constrain(table, ("vocab", "vocab_embed")), plan.constrain(hidden, (None, "batch"))
    logits = jnp.einsum("vd,dw->vw", table, hidden, preferred_element_type=jnp.float32)
    # XLA would turn the product round instead of the logits; on a CPU it is slower so, and has none for bfloat16.
    logits = jax.lax.optimization_barrier(logits).T
    if plan is None:
        return logits
    logits, draws = plan.constrain(logits, ("batch", "vocab")), plan.for_draws(logits.shape)
    return logits if draws is plan else draws.constrain(logits, ("batch", None))


def columns_seen(
    lengths: Int32[Array, "W"], columns: int, window: int | None, count: Int32[Array, "W"] | None = None
) -> tuple[Int32[Array, ""] | int, Int32[Array, ""]]:
    """The first column that the next tokens of any row see, and the one after the last.

    Rows of which no token counts see none: one that has ended long ago holds up no window, and lengthens no other's way.
    """
    lengths, alive = (lengths, True) if count is None else (jnp.where(count > 0, lengths, 0), count > 0)
    filled = jnp.max(lengths) + columns
    if window is None:
        return 0, filled
    oldest = jnp.min(lengths, initial=jnp.iinfo(jnp.int32).max, where=alive)
    return jnp.clip(oldest - window + 1, 0, filled - 1), filled


def attend_filled(
    q: Float[Array, "W T h K"],
    k: Keys,
    v: Values,
    places: Int32[Array, "W T"],
    filled: Int32[Array, ""],
    window: int | None,
    first: Int32[Array, ""] | int = 0,
) -> Float[Array, "W T hK"]:
    """`attend` of tokens at these places of caches of which no row sees a column outside of [first, filled).

    Blocks that hold these are read one after another, with the running maximum and sum of the softmax (Milakov and
    Gimelshein, 2018): a block that a row does not see changes none of its bits. Raises ValueError for a cache that is not
    in whole blocks.
    """

    def sees(start, size) -> Bool[Array, "W T B"]:
        gap = places[:, :, None] - (start + jnp.arange(size, dtype=jnp.int32))[None, None]
        return (gap >= 0) if window is None else (gap >= 0) & (gap < window)

    rows, columns, heads, width = q.shape
    room, groups = k.shape[3], k.shape[1]
    q = queries_for(jnp.moveaxis(q.reshape(rows, columns, groups, heads // groups, width), 1, 3), k)

    def logits(k, start):
        return jnp.where(sees(start, k.shape[3])[:, None, None], dot_keys(q, k) * width**-0.5, MASKED)

    if room <= BLOCK:
        out = read_values(jax.nn.softmax(logits(k, 0), axis=-1), v, q.dtype).astype(q.dtype)
        return jnp.moveaxis(out, 3, 1).reshape(rows, columns, heads * width)
    if room % BLOCK:
        raise ValueError(f"a cache of {room} columns is not in whole blocks of {BLOCK}: make it by room_for")

    def one(carry):
        number, best, total, out = carry
        start = number * BLOCK
        here = block(k, v, start, BLOCK)
        found = logits(here[0], start)
        higher = jnp.maximum(best, jnp.max(found, axis=-1))
        weights, old = jnp.exp(found - higher[..., None]), jnp.exp(best - higher)
        total = total * old + jnp.sum(weights, axis=-1)
        return number + 1, higher, total, out * old[..., None] + read_values(weights, here[1], q.dtype)

    shape = (rows, groups, heads // groups, columns)
    nothing = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    start = jnp.asarray(first // BLOCK, jnp.int32), *nothing, jnp.zeros((*shape, width), jnp.float32)
    needed = (filled + BLOCK - 1) // BLOCK
    _, _, total, out = jax.lax.while_loop(lambda c: (c[0] < room // BLOCK) & (c[0] < needed), one, start)
    out = (out / total[..., None]).astype(q.dtype)
    return jnp.moveaxis(out, 3, 1).reshape(rows, columns, heads * width)
