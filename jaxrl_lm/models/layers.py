"""The modules of a decoder layer, in Flax NNX, each weight declared once: shape, logical axes, initialiser.

A module is built with declarations (`ParamSpec`) in place of arrays; `decoder.py` splits it into a graph and a dict of
declarations, and merges real arrays into the graph while tracing. So the specs, the initial values, the shardings, the
checkpoint's target and the import table all come from the same line.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_lm.models.config import LinearRope, Llama3Rope, ModelConfig
from jaxrl_lm.types import Params

MASKED = -1e30  # finite, so that a row that sees nothing gets a uniform softmax and a finite gradient


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What there is to know about a weight before it exists."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical, see sharding/rules.py
    init: str  # normal, ones, zeros, fan_in (uniform within ±1/√inputs)


def declare(shape: tuple[int, ...], axes: tuple[str | None, ...], init: str = "normal") -> nnx.Param:
    return nnx.Param(ParamSpec(shape, axes, init))


PRODUCT = "product"  # of a linear layer with its kernel, by the name that remat's "dots" keeps it


class Linear(nnx.Module):
    """x @ kernel + bias; kernel [in, out]. With an adapter also + (x @ lora_a) @ lora_b, see `lora.py`."""

    alone = False  # on one device

    def __init__(self, inputs: int, outputs: int, axes: tuple[str, str], bias: bool = False):
        self.kernel = declare((inputs, outputs), axes)
        self.bias = declare((outputs,), axes[1:], "zeros") if bias else None

    def adapt(self, rank: int) -> None:
        """Declares the two factors of an adapter."""
        spec = self.kernel.get_value()
        self.lora_a = declare((spec.shape[0], rank), (spec.axes[0], "rank"), "fan_in")
        self.lora_b = declare((rank, spec.shape[1]), ("rank", spec.axes[1]), "zeros")

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        out = checkpoint_name(self._product(x), PRODUCT)
        if hasattr(self, "lora_a"):
            out = out + (x @ self.lora_a[...]) @ self.lora_b[...]
        return out if self.bias is None else out + jnp.broadcast_to(self.bias[...], out.shape)

    def _product(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        kernel = self.kernel[...]
        if not self.alone:  # rows and columns are split over axes of their own
            return x @ kernel
        # As one matrix: the kernel's gradient is then a plain product too, which XLA's CPU backend reads as it lies.
        return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[1])


def fold(params: Params) -> Params:
    """The plain weights: each attached adapter's product added to its kernel, in float32, and cast back."""
    if "lora_a" in params:
        a, b = (params[name].astype(jnp.float32) for name in ("lora_a", "lora_b"))
        kernel = params["kernel"]
        added = kernel.astype(jnp.float32) + jnp.matmul(a, b, precision="highest")
        kept = {name: leaf for name, leaf in params.items() if name not in ("lora_a", "lora_b")}
        return kept | {"kernel": added.astype(kernel.dtype)}
    return {name: fold(node) if isinstance(node, dict) else node for name, node in params.items()}


class RMSNorm(nnx.Module):
    """x / sqrt(mean x² + eps) · scale, in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float):
        self.scale = declare((width,), ("norm",), "ones")
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return x32.astype(x.dtype) * jnp.broadcast_to(self.scale[...], x.shape)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position, [head_dim / 2] (Su et al., 2021; Llama 3.1's scaling as in its reference code)."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if isinstance(scaling, LinearRope):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3Rope):
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(ramp, 0.0, 1.0)
        return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor
    return frequencies


def rotate(x: Float[Array, "N T h k"], angles: Float[Array, "N T half"]) -> Float[Array, "N T h k"]:
    """Rotary embedding on the two halves of each head, as Hugging Face stores it; in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(
    q: Float[Array, "N T h k"],
    k: Float[Array, "N c S k"],
    v: Float[Array, "N c S k"],
    mask: Bool[Array, "N T S"],
) -> Float[Array, "N T hk"]:
    """Grouped-query attention; softmax in float32. h query heads share c key heads."""
    rows, columns, heads, width = q.shape
    # Heads before columns: turned here once, not by each of the products and their gradients.
    q = jnp.moveaxis(q.reshape(rows, columns, k.shape[1], heads // k.shape[1], width), 1, 3)
    logits = jnp.einsum("ncgtk,ncsk->ncgts", q, k, preferred_element_type=jnp.float32) * width**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, MASKED), axis=-1)
    out = jnp.einsum("ncgts,ncsk->ncgtk", weights.astype(v.dtype), v)
    return jnp.moveaxis(out, 3, 1).reshape(rows, columns, heads * width)


PAIRS = 1 << 22  # of a query and a key, of one head and row on a device, whose attention weights exist at once


def attend_in_parts(
    q: Float[Array, "N T h k"],
    k: Float[Array, "N c S k"],
    v: Float[Array, "N c S k"],
    sees: Callable[..., Bool[Array, "N B S"]],
    queries: tuple[Shaped[Array, "N T"], ...],
    *,
    parts: int,
) -> Float[Array, "N T hk"]:
    """`attend` of T / parts columns at a time, with the mask `sees(*queries)` of these columns.

    The weights of a part are computed again in the backward pass: neither they nor the mask ever stand whole, so that
    memory grows with T and not with its square. Each part takes columns from every device.
    """
    rows, columns = q.shape[:2]

    def cut(x):
        x = jnp.pad(x, [(0, -columns % parts if axis == 1 else 0) for axis in range(x.ndim)])
        return jnp.moveaxis(x.reshape(rows, -1, parts, *x.shape[2:]), 2, 0)

    one = lambda part: attend(part[0], k, v, sees(*part[1:]))
    out = jax.lax.map(jax.checkpoint(one), jax.tree.map(cut, (q, *queries)))
    return jnp.moveaxis(out, 0, 2).reshape(rows, -1, out.shape[-1])[:, :columns]


def block_attention(
    sees: Callable[..., Bool[Array, "N B S"]],
    queries: tuple[Shaped[Array, "N T"], ...],
    keys: tuple[Shaped[Array, "N T"], ...],
    reads: Int[Array, "N Q M"],
) -> Callable[..., Float[Array, "N T hk"]]:
    """`attend` as a function of q, k and v that computes Q blocks of T / Q columns, each with the M blocks of keys that
    `reads` names (−1: none), and the mask `sees(*queries, *keys)` of these.

    `keys` are facts about columns that make one unseen where they are 0. Beyond `PAIRS` the weights are of a few blocks at a
    time, and computed again in the backward pass.
    """
    (rows, blocks, most), columns = reads.shape, queries[0].shape[1]
    width = columns // blocks
    split = lambda x: jnp.moveaxis(x.reshape(rows, blocks, width, *x.shape[2:]), 1, 0)
    take = jax.vmap(lambda x, at: x[jnp.maximum(at, 0)])  # of each row

    def mask_of(at: Int[Array, "N M"], *queries: Shaped[Array, "N B"]) -> Bool[Array, "N B S"]:
        there = lambda x: jnp.where(at[:, :, None] >= 0, take(x.reshape(rows, blocks, width), at), 0).reshape(rows, -1)
        return sees(*queries, *map(there, keys))

    def one(q, k, v, at, mask):
        part = lambda x: take(jnp.moveaxis(x.reshape(rows, -1, blocks, width, x.shape[-1]), 2, 1), at)
        whole = lambda x: jnp.moveaxis(part(x), 1, 2).reshape(rows, -1, most * width, x.shape[-1])
        return attend(q, whole(k), whole(v), mask)

    asked = (jnp.moveaxis(reads, 1, 0), *map(split, queries))
    at_once = PAIRS // (width * most * width)
    masks = jax.vmap(mask_of)(*asked) if at_once >= blocks else None

    def attention(q, k, v):
        if masks is not None:
            out = jax.vmap(one, (0, None, None, 0, 0))(split(q), k, v, asked[0], masks)
        else:
            some = jax.checkpoint(lambda part: one(part[0], k, v, part[1], mask_of(*part[1:])))
            out = jax.lax.map(some, (split(q), *asked), batch_size=max(1, at_once))
        return jnp.moveaxis(out, 0, 1).reshape(rows, columns, -1)

    return attention


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig):
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, width, ("embed", "heads"), config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_width, ("embed", "kv_heads"), config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_width, ("embed", "kv_heads"), config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, ("heads", "embed"), config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.head_dim = config.head_dim

    def __call__(self, x, angles, attention, gather):
        """The output. `gather` gets the keys, and values, of all columns; `attention` is `attend` with its mask."""
        split = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles), rotate(k, angles)
        k, v = gather(k.swapaxes(1, 2)), gather(v.swapaxes(1, 2))
        return self.o_proj(attention(q, k, v))


class MLP(nnx.Module):
    """down(silu(gate x) · up x) (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig):
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(size, inner, ("embed", "mlp"), config.mlp_bias)
        self.up_proj = Linear(size, inner, ("embed", "mlp"), config.mlp_bias)
        self.down_proj = Linear(inner, size, ("mlp", "embed"), config.mlp_bias)

    def __call__(self, x: Float[Array, "N T d"]) -> Float[Array, "N T d"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def __call__(self, x, angles, attention, gather):
        x = x + self.attn(self.input_norm(x), angles, attention, gather)
        return x + self.mlp(self.post_norm(x))


class Table(nnx.Module):
    """An embedding or output table [V, D]."""

    def __init__(self, config: ModelConfig):
        self.table = declare((config.vocab_size, config.hidden_size), ("vocab", "vocab_embed"))


class Ends(nnx.Module):
    """What stands before and after the layers."""

    alone = False  # on one device

    def __init__(self, config: ModelConfig):
        self.embed = Table(config)
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else Table(config)

    def unembed(self, hidden: Float[Array, "... d"]) -> Float[Array, "... V"]:
        table = (self.embed if self.lm_head is None else self.lm_head).table[...]
        if self.alone and jax.default_backend() == "cpu":
            # Turned apart from the product: in its gradient the table is then turned, and not the logits.
            turned = jax.lax.optimization_barrier(table.T)
            flat = hidden.reshape(-1, hidden.shape[-1])
            logits = jnp.matmul(flat, turned, preferred_element_type=jnp.float32)
            return logits.reshape(*hidden.shape[:-1], -1)
        return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
