"""Adam's moments in less memory: bfloat16, or 8-bit numbers in blocks (Dettmers et al., 2022) through qwix.

Adam itself is optax's and computes in float32; here is how its state is stored between steps. Both forms round the second
moment by chance: with b2 = 0.999 a step changes it by 0.1 %, less than half of a bfloat16's last place, so that rounding to
the nearest would never move it. The chances come from the count of steps and the parameter's place alone: a resumed or
sharded run draws the same. Measured errors: docs/scale_memory.md. Next to read: `optim.py`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxrl_lm.sharding import divided

TILE, LEAST_TILE = 128, 16  # numbers that share a scale
SMALL = 4096  # elements of an array that stays float32, as norms and biases do
BITS = 254  # steps between the lowest and the highest of 8-bit levels around 0


class Tiles(NamedTuple):
    """A first moment: 8-bit numbers that lie as the parameter does, and a scale a tile."""

    values: Any
    scale: Any


class LogTiles(NamedTuple):
    """A second moment: its logarithm as 8-bit numbers, with a scale and the middle of each tile's range."""

    values: Any
    scale: Any
    middle: Any


def scale_by_stored_adam(*, b1: float, b2: float, eps: float, dtype: str) -> optax.GradientTransformation:
    """optax's scale_by_adam, whose moments are stored as `dtype` says: float32, bfloat16 or int8.

    Raises ImportError for int8 without qwix, ValueError for another name.
    """
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    if dtype not in ("float32", "bfloat16", "int8"):
        raise ValueError(f"moments_dtype={dtype!r} is unknown: use float32, bfloat16 or int8")
    if dtype == "int8":
        _qwix()
    floor = max((0.01 * eps) ** 2, 1e-30)

    def pack(state: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        mu, nu = (optax.tree.cast(tree, "float32") for tree in (state.mu, state.nu))
        if dtype == "float32":
            return state._replace(mu=mu, nu=nu)
        key = jax.random.fold_in(jax.random.key(0), state.count)
        if dtype == "bfloat16":
            return state._replace(mu=optax.tree.cast(mu, "bfloat16"), nu=_each(_to_bfloat16, key, nu))
        both = _each(lambda key, m, n, path: _to_tiles(key, m, n, path, floor), key, mu, nu)
        return state._replace(mu=_part(mu, both, 0), nu=_part(mu, both, 1))

    def init(params: Any) -> optax.ScaleByAdamState:
        return pack(adam.init(params))

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        updates, state = adam.update(optax.tree.cast(updates, "float32"), _unpack(state), params)
        return updates, pack(state)

    return optax.GradientTransformation(init, update)


def _each(function: Callable[..., Any], key: jax.Array, tree: Any, *rest: Any) -> Any:
    """function(a key of its own, leaf, *leaves of the rest, path) of every leaf."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    others = [structure.flatten_up_to(other) for other in rest]
    found = [
        function(jax.random.fold_in(key, number), leaf, *(other[number] for other in others), path)
        for number, (path, leaf) in enumerate(leaves)
    ]
    return structure.unflatten(found)


def _part(tree: Any, pairs: Any, which: int) -> Any:
    return jax.tree.map(lambda _, pair: pair[which], tree, pairs)


def is_tiles(node: Any) -> bool:
    return isinstance(node, Tiles | LogTiles)


def layout_of(moment: Any, layout: NamedSharding) -> Any:
    """The layout of a stored moment: that of its parameter; a tile's scale lies with the tile where tiles are not cut."""
    if not is_tiles(moment):
        return layout
    return type(moment)(layout, *[divided(layout, moment.scale.shape)] * (len(moment) - 1))


def moment_bytes(dtype: str) -> float:
    """Bytes of both moments of one number of a large matrix."""
    return {"float32": 8.0, "bfloat16": 4.0, "int8": 2.0 + 3 * 4 / TILE}[dtype]


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def _to_bfloat16(key: jax.Array, x: jax.Array, _path: Any) -> jax.Array:
    """x up or down to a neighbour in bfloat16 by chance, so that the mean is x."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    cut = jax.lax.shift_left(jax.lax.shift_right_logical(bits, jnp.uint32(16)), jnp.uint32(16))
    return jax.lax.bitcast_convert_type(cut, jnp.float32).astype(jnp.bfloat16)


# --- 8 bits -----------------------------------------------------------------------------------------------------------


def _qwix() -> Any:
    try:
        import qwix
    except ImportError as error:
        raise ImportError("moments_dtype='int8' needs qwix: pip install 'jaxrl-lm[8bit]', or use bfloat16") from error
    return qwix


def _tiling(path: Any, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(axis, numbers of a tile) of a large matrix: the axis with the largest tiles, the last of several; else None."""
    if math.prod(shape) < SMALL or getattr(path[-1], "key", None) in ("scale", "bias"):
        return None
    tile, axis = max((math.gcd(size, TILE), axis) for axis, size in enumerate(shape))
    return (axis, tile) if tile >= LEAST_TILE else None


def _over(function: Callable[..., jax.Array], x: jax.Array, axis: int, tile: int) -> jax.Array:
    """A reduction of every tile."""
    return function(x.reshape(*x.shape[:axis], -1, tile, *x.shape[axis + 1 :]), axis=axis + 1)


def _quantize(x: jax.Array, axis: int, tile: int) -> Any:
    others = [other for other in range(x.ndim) if other != axis]
    # qwix sets the largest number to 127.5, which no level is; here it is 127, so that levels stay where they are.
    method = f"absmax,{127.5 / (BITS / 2)}"
    return _qwix().quantize(x, jnp.int8, channelwise_axes=others, tiled_axes={axis: tile}, calibration_method=method)


def _to_tiles(key: jax.Array, mu: jax.Array, nu: jax.Array, path: Any, floor: float) -> tuple[Any, Any]:
    """Both moments of one parameter as 8-bit numbers.

    Departs from the paper's code: the second moment is stored as its logarithm, so that a small one beside a large one has
    the same relative error and none becomes 0, by which a step would be divided; `floor` is far below eps². The first is
    stored in units of the root of the second, whose multiples Adam's steps are, so that it need not share the range of
    its neighbours' gradients.
    """
    tiling = _tiling(path, mu.shape)
    if tiling is None:
        return mu, nu
    axis, tile = tiling
    spread = lambda x: jnp.repeat(x, tile, axis)
    log = jnp.log(jnp.maximum(nu, floor))
    low, high = _over(jnp.min, log, axis, tile), _over(jnp.max, log, axis, tile)
    middle, step = (low + high) / 2, spread(jnp.maximum((high - low) / BITS, 1e-6))
    place = (log - spread(middle)) / step
    below = jnp.floor(place)
    up = jnp.expm1((place - below) * step) / jnp.expm1(step)  # the chance by which the mean of nu, not of log, is exact
    levels = below + (jax.random.uniform(jax.random.fold_in(key, 1), mu.shape) < up)
    second = _quantize(jnp.clip(levels, -BITS / 2, BITS / 2) * step, axis, tile)
    second = LogTiles(second.qvalue, second.scale, middle)
    ratio = mu / jnp.sqrt(_nu_of(second))
    step = spread(jnp.maximum(_over(jnp.max, jnp.abs(ratio), axis, tile) / (BITS / 2), 1e-30))
    levels = jnp.floor(ratio / step + jax.random.uniform(jax.random.fold_in(key, 2), mu.shape))
    first = _quantize(jnp.clip(levels, -BITS / 2, BITS / 2) * step, axis, tile)
    return Tiles(first.qvalue, first.scale), second


def _numbers(tiles: Tiles | LogTiles) -> jax.Array:
    qwix = _qwix()
    return qwix.dequantize(qwix.QArray(tiles.values, tiles.scale))


def _nu_of(tiles: LogTiles) -> jax.Array:
    sizes = zip(tiles.values.shape, tiles.scale.shape, strict=True)
    axis, tile = next((axis, size // tiled) for axis, (size, tiled) in enumerate(sizes) if size != tiled)
    return jnp.exp(_numbers(tiles) + jnp.repeat(tiles.middle, tile, axis))


def _unpack(state: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
    """The state in float32."""
    plain = lambda x: x.astype(jnp.float32)
    nu = jax.tree.map(lambda n: _nu_of(n) if is_tiles(n) else plain(n), state.nu, is_leaf=is_tiles)
    first = lambda m, n: _numbers(m) * jnp.sqrt(n) if is_tiles(m) else plain(m)
    return state._replace(mu=jax.tree.map(first, state.mu, nu, is_leaf=is_tiles), nu=nu)
