"""A decoder as pure functions of a nested dict of arrays: `Model.init`, `.hidden`, `.unembed`.

The layers of the tree are stacked on a leading axis and scanned. Generation has the same layers in a form of its own, with
a cache: `decode.py`. Reading and writing checkpoints of other libraries: `hf.py`, `gguf.py`.
"""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_lm.models.attention import COLUMNS, attention_of
from jaxrl_lm.models.config import LoraConfig, ModelConfig
from jaxrl_lm.models.layers import (
    PAIRS,
    PRODUCT,
    Block,
    Ends,
    Linear,
    ParamSpec,
    attend,
    attend_in_parts,
    block_attention,
    rope_frequencies,
)
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import Params

LAYER_INPUT = "layer_input"  # the residual stream, by the name that `_remat` moves it by


Adapted = tuple[tuple[tuple[str, ...], int], ...]  # path and rank of each linear layer that has an adapter


@functools.cache
def _graph(config: ModelConfig, module: type, adapted: Adapted = ()) -> tuple[nnx.GraphDef, dict]:
    instance = module(config)
    for path, rank in adapted:
        functools.reduce(getattr, path, instance).adapt(rank)
    graph, state = nnx.split(instance)
    return graph, nnx.to_pure_dict(state)


def _adapted(params: Params, path: tuple[str, ...] = ()) -> Adapted:
    """Where these weights hold adapters. The tree says it, so that one Model serves base, adapted and merged weights."""
    if "lora_a" in params:
        return ((path, params["lora_a"].shape[-1]),)
    nodes = ((name, node) for name, node in sorted(params.items()) if isinstance(node, dict))
    return tuple(found for name, node in nodes for found in _adapted(node, (*path, name)))


def _merge(config: ModelConfig, module: type, params: Params, *, alone: bool) -> Any:
    """The NNX module with these arrays as its weights, `alone` on one device; only while tracing."""
    graph, specs = _graph(config, module, _adapted(params))
    merged = nnx.merge(graph, nnx.State({name: params[name] for name in specs}))
    merged.set_attributes(alone=alone)
    return merged


def decoder_specs(config: ModelConfig, lora: LoraConfig | None = None) -> dict[str, Any]:
    """The declaration of every weight: a nested dict of ParamSpec, the layers stacked; with lora the adapter's too."""
    stack = lambda spec: ParamSpec((config.num_layers, *spec.shape), ("layers", *spec.axes), spec.init)
    adapted = () if lora is None else tuple((path, lora.rank) for path in _targeted(config, lora))
    layers = jax.tree.map(stack, _graph(config, Block, adapted)[1])
    return {**_graph(config, Ends)[1], "layers": layers}


def _targeted(config: ModelConfig, lora: LoraConfig) -> list[tuple[str, ...]]:
    """Paths of the targeted linear layers within a block: those called q_proj and so on."""
    modules = nnx.iter_modules(Block(config))
    return [
        path for path, node in modules if isinstance(node, Linear) and path[-1].removesuffix("_proj") in lora.targets
    ]


def positions(segment_ids: Int[Array, "N T"]) -> Int[Array, "N T"]:
    """Each token's place in its segment, from 0; 0 on padding. A segment's tokens stand next to each other."""
    columns = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    starts = jax.lax.cummax(jnp.where(segment_ids != previous, columns, 0), axis=1)
    return jnp.where(segment_ids > 0, columns - starts, 0).astype(jnp.int32)


def visible(
    q_positions: Int[Array, "N T"],
    q_segments: Int[Array, "N T"],
    k_positions: Int[Array, "N S"],
    k_segments: Int[Array, "N S"],
    window: int | None,
    k_until: Int[Array, "N S"] | None = None,
) -> Bool[Array, "N T S"]:
    """Which columns a token attends to: those of its segment, up to itself, within the window.

    With `k_until` a column is seen by the segments from its own to that one, which continue it: a tree whose segments are
    numbered in depth-first order, such as a prompt and its completions. Positions go on from the segment that is continued.
    """
    gap = q_positions[:, :, None] - k_positions[:, None, :]
    if k_until is None:
        same = (q_segments[:, :, None] == k_segments[:, None, :]) & (q_segments[:, :, None] > 0)
    else:
        continues = q_segments[:, :, None] <= k_until[:, None, :]
        same = (k_segments[:, None, :] > 0) & (k_segments[:, None, :] <= q_segments[:, :, None]) & continues
    seen = same & (gap >= 0)
    return seen & (gap < window) if window is not None else seen


def initial(specs: dict[str, Any], key: Shaped[Array, ""], std: float, dtype: str) -> Params:
    """Fresh values of declared weights, each drawn with a key of its own path."""

    def one(path, spec):
        if spec.init in ("ones", "zeros"):
            return (jnp.ones if spec.init == "ones" else jnp.zeros)(spec.shape, dtype)
        own = jax.random.fold_in(key, zlib.crc32(".".join(str(part.key) for part in path).encode()))
        if spec.init == "fan_in":
            bound = spec.shape[-2] ** -0.5
            return jax.random.uniform(own, spec.shape, jnp.float32, -bound, bound).astype(dtype)
        return (jax.random.normal(own, spec.shape, jnp.float32) * std).astype(dtype)

    return jax.tree.map_with_path(one, specs)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model without its weights: hashable, so that compiled steps take it as a static part."""

    config: ModelConfig
    plan: Plan | None = None  # fixes the layout of activations on a mesh

    @property
    def specs(self) -> dict[str, Any]:
        """The declaration of every weight, in the shape of the parameters."""
        return decoder_specs(self.config)

    @property
    def alone(self) -> bool:
        """Whether one device has all of it."""
        return self.plan is None or self.plan.mesh.size == 1

    def init(self, key: Shaped[Array, ""], dtype: str = "float32") -> Params:
        """Fresh parameters: normal with the config's initializer_range, norms 1, biases 0; a key a path."""

        return initial(self.specs, key, self.config.initializer_range, dtype)

    def constrain_kv(self, x: Shaped[Array, "N c _ _"]) -> Shaped[Array, "N c _ _"]:
        """Keys or values laid out on the mesh, heads as their projections."""
        return x if self.plan is None else self.plan.constrain(x, ("batch", "kv_heads", None, None))

    def _gather_kv(self, x: Float[Array, "N c S K"]) -> Float[Array, "N c S K"]:
        """Keys or values of all columns, on each of the devices that columns are split over."""
        return x if self.plan is None or self.plan.ways("columns") == 1 else self.constrain_kv(x)

    def look_up(self, table: Float[Array, "V D"], tokens: Int[Array, "N T"]) -> Float[Array, "N T D"]:
        """Rows of the table, by way of the layouts of `Plan.for_lookup`."""
        if self.plan is None:
            return table[tokens]
        first, *rest = self.plan.for_lookup()
        x = first.constrain(table, ("vocab", "vocab_embed"))[first.constrain(tokens, ("batch", "columns"))]
        for plan in (first, *rest):
            x = plan.constrain(x, ("batch", "columns", "vocab_embed"))
        return x

    def for_decode(self) -> "Model":
        """The same model laid out as generation is."""
        return self if self.plan is None else dataclasses.replace(self, plan=self.plan.for_decode())

    def for_prompts(self) -> "Model":
        """The same model laid out as a prefill is."""
        return self if self.plan is None else dataclasses.replace(self, plan=self.plan.for_prompts())

    def constrain(self, x: Shaped[Array, "N T ..."]) -> Shaped[Array, "N T ..."]:
        return x if self.plan is None else self.plan.constrain(x, ("batch", "columns", *(None,) * (x.ndim - 2)))

    def constrain_features(self, x: Shaped[Array, "D W T"]) -> Shaped[Array, "D W T"]:
        """The residual stream of generation, features first, laid out on the mesh."""
        return x if self.plan is None else self.plan.constrain(x, (None, "batch", "columns"))

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "N T"],
        positions: Int[Array, "N T"],
        segment_ids: Int[Array, "N T"],
        until: Int[Array, "N T"] | None = None,
        reads: Int[Array, "N Q M"] | None = None,
    ) -> Float[Array, "N T D"]:
        """Hidden states after the last norm. A token sees those of its segment, up to itself; with `until` also those of
        the segments that it continues, see `visible`. `reads` names for each of Q blocks of columns the M blocks that hold
        all that its tokens see, so that attention computes no others.

        Params and activations are cast to the config's dtype. Where the plan splits columns, each device has its own and
        gathers the keys and values of all.
        """
        columns = tokens.shape[1]
        ways = 1 if self.plan is None else self.plan.ways("columns")
        # Rows packed by a layout have a visibility of their own, which the platforms' kernels do not know.
        kernel = self.config.attention_implementation if until is None and reads is None else "xla"
        if reads is not None:
            parts = 1
        else:
            parts = -(-columns * columns // (PAIRS * ways)) if kernel == "xla" else COLUMNS.get(kernel, 1)
        room = ((0, 0), (0, -columns % (parts * ways)))
        tokens, positions, segment_ids = (jnp.pad(x, room) for x in (tokens, positions, segment_ids))
        until = None if until is None else jnp.pad(until, room)
        dtype = jnp.dtype(self.config.dtype)
        cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
        ends = _merge(
            self.config, Ends, cast({name: leaf for name, leaf in params.items() if name != "layers"}), alone=self.alone
        )
        x = self.look_up(ends.embed.table[...], tokens)
        k_positions, k_segments = positions, segment_ids
        positions, segment_ids = self.constrain(positions), self.constrain(segment_ids)
        angles = positions[:, :, None].astype(jnp.float32) * rope_frequencies(self.config).astype("float32")[None, None]
        sees = lambda *queries: visible(*queries, k_positions, k_segments, self.config.sliding_window, until)
        queries = (positions, segment_ids)
        if reads is not None:
            keys = (k_positions, k_segments) if until is None else (k_positions, k_segments, until)
            sees = lambda *given: visible(*given[:4], self.config.sliding_window, *given[4:])
            attention = block_attention(sees, queries, keys, reads)
        elif kernel != "xla":
            attention = attention_of(self.config, self.plan, k_segments, sees, queries)
        elif parts == 1:
            attention = functools.partial(attend, mask=sees(*queries))
        else:
            attention = functools.partial(attend_in_parts, sees=sees, queries=queries, parts=parts)

        def layer(x, weights):
            x = checkpoint_name(x, LAYER_INPUT)
            x = _merge(self.config, Block, cast(weights), alone=self.alone)(x, angles, attention, self._gather_kv)
            return self.constrain(x), None

        x, _ = jax.lax.scan(_remat(layer, self.config.remat), x, params["layers"])
        return ends.final_norm(x)[:, :columns]

    def unembed(self, params: Params, hidden: Float[Array, "*n D"]) -> Float[Array, "*n V"]:
        """Float32 logits of hidden states, each device with its own part of the vocabulary."""
        cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(hidden.dtype), tree)
        split = cast({name: leaf for name, leaf in params.items() if name != "layers"})
        if self.plan is None or hidden.ndim not in (2, 3):
            return _merge(self.config, Ends, split, alone=self.alone).unembed(hidden)
        plan, axes = self.plan.for_logits(), ("batch", "columns")[: hidden.ndim - 1]
        # The table's gradient too: where it is tied, XLA would give it the layout of the look-up's, and gather logits.
        name = "embed" if self.config.tie_embeddings else "lm_head"
        split[name] = {"table": plan.constrain(split[name]["table"], ("vocab", "vocab_embed"))}
        logits = _merge(self.config, Ends, split, alone=self.alone).unembed(plan.constrain(hidden, (*axes, None)))
        return plan.constrain(logits, (*axes, "vocab"))


def _remat(layer, policy: str):
    if policy == "none":
        return layer
    policies = jax.checkpoint_policies
    saveable = {
        "full": None,  # the layer's input alone is kept, and everything in it is computed again
        "dots": policies.save_only_these_names(PRODUCT),
        "offload": policies.save_and_offload_only_these_names(  # as full, with that input in the host's memory
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    return jax.checkpoint(layer, policy=saveable[policy])


def build(config: ModelConfig, *, plan: Plan | None = None) -> Model:
    """The model of a config, laid out by a plan if one is given.

    Raises ValueError where the mesh would split inside of a head.
    """
    if plan is not None:
        for name, axis in (("num_heads", "heads"), ("num_kv_heads", "kv_heads")):
            if getattr(config, name) % plan.ways(axis):
                sizes = "×".join(f"{one}={plan.mesh.shape[one]}" for one in plan.axes(axis))
                raise ValueError(f"mesh: {sizes} does not divide the model's {name}={getattr(config, name)}")
    return Model(config, plan)
