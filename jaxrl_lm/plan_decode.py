"""What the compiler makes of decoding and of the update: what is donated in place, what the loop copies and gathers.

`check_steps` compiles `prepare_decode`, the decode loop with a donated state, and `update` for the devices of a plan, and
reads the compiler's own memory analysis and program. A benchmark prints it: `benchmarks/compiled.py`.
"""

import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import hlo, hlo_loops
from jaxrl_lm.decode_steps import compile_decode, state_layouts
from jaxrl_lm.generate import begin
from jaxrl_lm.hlo import Collective
from jaxrl_lm.hlo_loops import Copy
from jaxrl_lm.memory import device_bytes
from jaxrl_lm.models import Model, ModelConfig, build
from jaxrl_lm.plan_config import PlanConfig
from jaxrl_lm.plan_places import mesh_sizes, places_of, plans_of
from jaxrl_lm.plan_steps import PlannedStep, planned_sampling, trace_steps, with_machine_defaults
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.sharding import Plan
from jaxrl_lm.topologies import parse_topology

STEPS = ("prepare_decode", "decode", "update")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one step; bytes of one device."""

    name: str
    arguments: float
    outputs: float
    aliased: float  # outputs in the place of donated arguments
    temporaries: float
    donated: float  # of the arguments that are given up: the state
    cache: float  # of these: keys and values
    weights: float  # that the step reads
    whole: float  # the same weights, all devices together
    copies: tuple[Copy, ...]  # of decode, each pass: of arrays of at least an eighth of a layer's cache
    collectives: tuple[Collective, ...]  # of decode each pass; of update in all
    loops: tuple[int | None, ...]  # of decode: iterations of the loops within a pass
    traffic: float  # from and to main memory; of decode each pass, with a full cache, of the others in all
    least: float  # that a pass of decode has to read: weights once, the cache once
    counted: float  # the compiler's "bytes accessed": every loop's body once, the chip's own memory too
    seconds: float  # of compiling

    @property
    def gathers(self) -> list[Collective]:
        """All-gathers, the largest first."""
        return sorted((one for one in self.collectives if one.kind == "all-gather"), key=lambda one: -one.bytes)

    @property
    def moved(self) -> list[Copy]:
        """Copies that a pass could do without: all but what is brought to the chip's memory, as it is, to be read there."""
        return [one for one in self.copies if one.kind != "fetch"]


def check_steps(config: PlanConfig, model_config: ModelConfig, *, only: tuple[str, ...] = STEPS) -> dict[str, Compiled]:
    """These steps of the run that the config describes, compiled for its topology, by name.

    Raises ValueError for an unknown step or a topology without a compiler, and as a plan does.
    """
    unknown = [name for name in only if name not in STEPS]
    if unknown:
        raise ValueError(f"step {unknown[0]!r} is unknown: {', '.join(STEPS)}")
    topology = parse_topology(config.topology)
    if not topology.compiled:
        raise ValueError(f"topology {config.topology!r} has no compiler here: name a TPU slice, such as v5e:2x4")
    plan, rollout = plans_of(config, mesh_sizes(config, topology), places_of(config, topology))
    steps = trace_steps(config, model_config, plan, rollout)
    model = planned_model(config, model_config, plan)
    found = {}
    for name in only:
        found[name] = _decode(config, model, steps["generate"]) if name == "decode" else _whole(steps[name])
    return found


def planned_model(config: PlanConfig, model_config: ModelConfig, plan: Plan) -> Model:
    """The model as the run would have it on this mesh, laid out for decoding."""
    return build(with_machine_defaults(config, model_config, plan), plan=plan).for_decode()


def decode_state(model: Model, sampling: SamplingConfig, step: PlannedStep) -> Any:
    """Shapes with layouts of the state that decoding starts from; `step` is the run's generation."""
    begins = functools.partial(begin, model=model, sampling=sampling)
    state = jax.eval_shape(begins, step.arguments["decode"], step.arguments["requests"])
    layouts = state_layouts(state, model.plan)
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, layouts)


def _decode(config: PlanConfig, model: Model, step: PlannedStep) -> Compiled:
    params, requests, sampling = step.arguments["decode"], step.arguments["requests"], planned_sampling(config)
    state = decode_state(model, sampling, step)
    layouts = state_layouts(state, model.plan)
    until = jax.ShapeDtypeStruct((), jnp.int32, sharding=model.plan.replicated)
    lowered = compile_decode(layouts, model=model, sampling=sampling).lower(params, requests, state, None, until)
    read = params if model.config.tie_embeddings else {name: x for name, x in params.items() if name != "embed"}
    cache = device_bytes(state.cache.layers)
    layer = cache / model.config.num_layers
    return _compiled("decode", lowered, donated=state, weights=read, cache=cache, copied=layer / 8)


def _whole(step: PlannedStep) -> Compiled:
    """A step that is compiled as a run does."""
    state = {name: tree for name, tree in step.arguments.items() if name.startswith(("params.", "opt_state", "extra"))}
    donated = state if step.name == "update" else {}
    return _compiled(step.name, step.trace().lower(), donated=donated, weights=step.arguments["params.policy"])


def _compiled(
    name: str, lowered: Any, *, donated: Any, weights: Any, cache: float = 0.0, copied: float = 0.0
) -> Compiled:
    """What the compiler says of a step. `copied`: the bytes from which on a copy in its main loop counts; 0: it has none."""
    begin = time.perf_counter()
    program = lowered.compile()
    seconds, memory = time.perf_counter() - begin, program.memory_analysis()
    module, inner, copies = hlo.parse(program.as_text()), (), []
    if copied:
        main, found = hlo_loops.main_loop(module), hlo_loops.loops(module)
        inner = tuple(one.trips for one in found if one.outer == main.name)
        module = hlo_loops.iteration(module, main)
        copies = hlo_loops.copies(module, least=copied)
    return Compiled(
        name=name,
        arguments=float(memory.argument_size_in_bytes),
        outputs=float(memory.output_size_in_bytes),
        aliased=float(memory.alias_size_in_bytes),
        temporaries=float(memory.temp_size_in_bytes),
        donated=device_bytes(donated),
        cache=cache,
        weights=device_bytes(weights),
        whole=float(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(weights))),
        copies=tuple(copies),
        collectives=tuple(hlo.collectives(module)),
        loops=inner,
        traffic=hlo.memory_traffic(module),
        least=device_bytes(weights) + cache if copied else 0.0,
        counted=float((program.cost_analysis() or {}).get("bytes accessed", 0.0)),
        seconds=seconds,
    )
