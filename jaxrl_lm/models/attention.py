"""Attention of whole rows by the platform's kernel, behind one interface: scoring, the update and a prompt's prefill.

`layers.attend` and `attend_in_parts` ("xla") run everywhere. Here are what they are all tested against ("reference"), the
TPU's kernel ("splash") and the GPU's ("cudnn"), and the choice between them. Whatever computes it, a token sees those of
its segment, up to itself, within the window; padding, segment 0, sees nothing, and nothing sees it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_lm.models.config import ModelConfig
from jaxrl_lm.models.layers import MASKED
from jaxrl_lm.sharding import Plan, platform_of

COLUMNS = {"splash": 128, "cudnn": 64}  # of a device, in whole numbers of which a kernel has them
BLOCKS = (512, 256, 128)  # of columns that splash computes at once, the largest that divides a device's
NARROW = 64  # heads below this width fill too little of a TPU's 128 lanes to be worth a kernel
WIDEST = 256  # of a head
INTERPRET = False  # runs splash on a CPU, slowly: for tests

Attend = Callable[[Float[Array, "N T h k"], Float[Array, "N c S k"], Float[Array, "N c S k"]], Float[Array, "N T hk"]]


def choose(asked: str, config: ModelConfig, *, platform: str, plan: Plan | None = None) -> str:
    """The implementation that the option asks for, on cpu, gpu or tpu.

    auto: splash on a TPU where the model and the mesh allow it, xla elsewhere; never cudnn, which must be asked for.
    Raises ValueError that names the option where this model, mesh or platform cannot have what is asked for.
    """
    if asked == "auto":
        fits = config.head_dim >= NARROW and obstacle("splash", config, plan) is None
        return "splash" if platform == "tpu" and fits else "xla"
    for name, there in (("splash", "tpu"), ("cudnn", "gpu")):
        if asked == name and platform != there:
            raise ValueError(
                f"attention_implementation={asked!r} is a kernel of a {there.upper()}, and this runs on a "
                f"{platform.upper()}: take auto or xla"
            )
    found = obstacle(asked, config, plan)
    if found is not None:
        raise ValueError(f"attention_implementation={asked!r}: {found}; take auto or xla")
    return asked


def obstacle(name: str, config: ModelConfig, plan: Plan | None) -> str | None:
    """Why an implementation cannot compute this model's attention on this mesh; None: it can."""
    if name not in COLUMNS:
        return None
    plans = () if plan is None else (plan, plan.for_decode())  # a prefill lies as generation does
    if any(one.axes("heads") != one.axes("kv_heads") for one in plans):
        return "it needs heads and kv_heads on the same mesh axes (sharding_rules, decode_sharding_rules)"
    if name == "splash":
        return None if config.head_dim <= WIDEST else f"head_dim={config.head_dim} is above {WIDEST}"
    if config.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16, not in dtype={config.dtype}"
    if config.head_dim % 8 or config.head_dim > WIDEST:
        return f"head_dim={config.head_dim} is not a multiple of 8 up to {WIDEST} (up to 128 before Hopper)"
    return None


def attention_of(
    config: ModelConfig,
    plan: Plan | None,
    segment_ids: Int[Array, "N S"],
    sees: Callable[..., Bool[Array, "N T S"]],
    queries: tuple[Shaped[Array, "N T"], ...],
) -> Attend:
    """attention(q, k, v) of a row's tokens by the config's implementation, which is not xla.

    `sees(*queries)` is the mask. splash makes its own from segments and columns: positions must rise by 1 within a segment,
    whose tokens stand next to each other. Raises ValueError as `choose`, by the plan's devices.
    """
    name = config.attention_implementation
    platform = platform_of(plan)
    if not INTERPRET and platform is not None:
        choose(name, config, platform=platform, plan=plan)
    if name == "splash":
        return lambda q, k, v: splash(q, k, v, segment_ids, window=config.sliding_window, plan=plan)
    mask = sees(*queries)
    if name == "cudnn":
        return lambda q, k, v: cudnn(q, k, v, mask, plan=plan)
    return lambda q, k, v: reference(q, k, v, mask)


def reference(
    q: Float[Array, "N T h k"],
    k: Float[Array, "N c S k"],
    v: Float[Array, "N c S k"],
    mask: Bool[Array, "N T S"],
) -> Float[Array, "N T hk"]:
    """Softmax over the whole mask in float32, key heads repeated; 0 where nothing is seen. For tests and comparisons."""
    (rows, columns, heads, width), dtype = q.shape, q.dtype
    q, k, v = (x.astype(jnp.float32) for x in (q.swapaxes(1, 2), k, v))
    k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    logits = jnp.einsum("nhtk,nhsk->nhts", q, k, precision="highest") * width**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], logits, MASKED), axis=-1)
    weights = jnp.where(mask[:, None], weights, 0.0)
    out = jnp.einsum("nhts,nhsk->nthk", weights, v, precision="highest")
    return out.reshape(rows, columns, heads * width).astype(dtype)


def splash(
    q: Float[Array, "N T h k"],
    k: Float[Array, "N c T k"],
    v: Float[Array, "N c T k"],
    segment_ids: Int[Array, "N T"],
    *,
    window: int | None,
    plan: Plan | None = None,
) -> Float[Array, "N T hk"]:
    """JAX's Pallas kernel for TPUs: the softmax runs over blocks of columns, and those that none sees are passed over.

    On a mesh each device has its rows, heads and columns, and the keys and values of all columns. 0 on padding.
    """
    rows, columns, heads, width = q.shape
    ways = lambda axis: 1 if plan is None else plan.ways(axis)
    own = -(-columns // (ways("columns") * COLUMNS["splash"])) * COLUMNS["splash"]
    whole = own * ways("columns")
    q = (q.astype(jnp.float32) * width**-0.5).astype(q.dtype)  # the kernel does not scale
    q, k, v = (_filled(x, whole, 2) for x in (q.swapaxes(1, 2), k, v))
    segments = _filled(segment_ids, whole, 1)
    kernel = _kernel(whole, heads // ways("heads"), next(size for size in BLOCKS if own % size == 0), window, plan)

    def of_a_device(kernel, q, k, v, q_segments, k_segments):
        one = lambda q, k, v, *segments: kernel(q, k, v, segment_ids=splash_kernel.SegmentIds(*segments))
        return jax.vmap(one)(q, k, v, q_segments, k_segments)

    given = (kernel, q, k, v, segments, segments)
    if plan is None:
        out = of_a_device(*given)
    else:
        lies = lambda x, *axes: plan.sharding(axes, x.shape, "attention")
        q_lies, k_lies = lies(q, "batch", "heads", "columns", None), lies(k, "batch", "kv_heads", None, None)
        blocks = kernel.manual_sharding_spec(plan.sharding((None, "columns"), (1, whole), "attention"))
        segments_lie = lies(segments, "batch", "columns").spec, lies(segments, "batch", None).spec
        specs = (blocks, q_lies.spec, k_lies.spec, k_lies.spec, *segments_lie)
        split = jax.shard_map(of_a_device, mesh=plan.mesh, in_specs=specs, out_specs=q_lies.spec, check_vma=False)
        out = split(*given)
    out = jnp.where(segments[:, None, :, None] > 0, out, 0)  # there padding has seen padding
    return out.swapaxes(1, 2)[:, :columns].reshape(rows, columns, heads * width)


def _kernel(columns: int, heads: int, block: int, window: int | None, plan: Plan | None):
    """The kernel of rows of so many columns, with so many heads a device."""
    shape = (columns, columns)
    mask = splash_mask.CausalMask(shape) if window is None else splash_mask.LocalMask(shape, (window - 1, 0), 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block)
    return splash_kernel.make_splash_mha(
        splash_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_kernel.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1 if plan is None else plan.ways("columns"),
        interpret=INTERPRET,
    )


def _filled(x: Shaped[Array, "..."], size: int, axis: int) -> Shaped[Array, "..."]:
    """With zeros up to this size of an axis."""
    return jnp.pad(x, [(0, size - x.shape[axis] if one == axis else 0) for one in range(x.ndim)])


def cudnn(
    q: Float[Array, "N T h k"],
    k: Float[Array, "N c S k"],
    v: Float[Array, "N c S k"],
    mask: Bool[Array, "N T S"],
    *,
    plan: Plan | None = None,
) -> Float[Array, "N T hk"]:
    """cuDNN's fused attention through JAX; 0 where nothing is seen.

    It knows segments by a mask alone, which JAX makes a bias of: [T S] numbers a row, of all its heads, and as many for a
    gradient that nobody reads. A token that sees nothing would be a softmax of nothing: it is let see everything.
    """
    rows, columns, heads, width = q.shape
    ways = 1 if plan is None else plan.ways("columns")
    room = lambda size, ways=1: -(-size // (ways * COLUMNS["cudnn"])) * ways * COLUMNS["cudnn"]
    mask = _filled(_filled(mask, room(columns, ways), 1), room(k.shape[2]), 2)
    q, k, v = _filled(q, mask.shape[1], 1), *(_filled(x.swapaxes(1, 2), mask.shape[2], 1) for x in (k, v))
    some = jnp.any(mask, axis=-1)
    mask = (mask | ~some[:, :, None])[:, None]

    def of_a_device(q, k, v, mask):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")

    if plan is None:
        out = of_a_device(q, k, v, mask)
    else:
        lies = lambda x, *axes: plan.sharding(axes, x.shape, "attention").spec
        q_spec, k_spec = lies(q, "batch", "columns", "heads", None), lies(k, "batch", None, "kv_heads", None)
        specs = (q_spec, k_spec, k_spec, lies(mask, "batch", None, "columns", None))
        out = jax.shard_map(of_a_device, mesh=plan.mesh, in_specs=specs, out_specs=q_spec, check_vma=False)(
            q, k, v, mask
        )
    out = jnp.where(some[:, :, None, None], out, 0)
    return out[:, :columns].reshape(rows, columns, heads * width)
