"""A plan by arithmetic alone: for GPUs, and to choose a mesh before anything is compiled.

Arguments, optimiser state and caches are counted exactly; temporaries, traffic and collectives by the formulas below,
which know neither fusion nor scheduling. Compiled numbers: `plan_report.py`.
"""

import dataclasses
import math

import jax

from jaxrl_lm.checks import needs_reference, old_logprobs_of, updates_per_step
from jaxrl_lm.hlo import Collective
from jaxrl_lm.models import BLOCK, ModelConfig, decoder_specs, room_for
from jaxrl_lm.models.layers import PAIRS
from jaxrl_lm.moments import moment_bytes
from jaxrl_lm.plan_config import PlanConfig
from jaxrl_lm.plan_places import mesh_sizes
from jaxrl_lm.plan_report import StepReport, network_seconds, summed
from jaxrl_lm.plan_steps import ROLLOUT_STEPS, blocks_read, decode_passes
from jaxrl_lm.topologies import Chip, Topology

_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


def parameters(model: ModelConfig) -> int:
    """Weights of the model, by its declarations."""
    leaves = jax.tree.leaves(decoder_specs(model), is_leaf=lambda node: hasattr(node, "axes"))
    return sum(math.prod(spec.shape) for spec in leaves)


@dataclasses.dataclass(frozen=True)
class Work:
    """Sizes that every formula uses."""

    model: ModelConfig
    rows: int
    prompts: int
    prompt: int  # columns
    new: int
    chunk: int  # tokens whose logits exist at once
    micro: int  # rows of one forward and backward pass
    slots: int  # rows that are decoded at once
    decode_passes: int  # forward passes of decoding
    blocks: float  # of a slot's cache that one reads

    @property
    def read_columns(self) -> float:
        """Columns of these blocks."""
        return self.blocks * min(BLOCK, self.prompt + self.new)

    @property
    def linear(self) -> int:
        """Weights of a layer's matrices: q, k, v, o, gate, up, down."""
        m = self.model
        return m.hidden_size * (2 * (m.num_heads + m.num_kv_heads) * m.head_dim + 3 * m.intermediate_size)

    def layers_flops(self, rows: int, queries: int, keys: int | float) -> float:
        """2 · weights a token, and 4 · heads · width for each pair of a query and a key, masked ones too."""
        m = self.model
        pairs = 4.0 * m.num_heads * m.head_dim * queries * keys
        return float(m.num_layers * rows) * (2.0 * queries * self.linear + pairs)

    def head_flops(self, rows: int, columns: int) -> float:
        return 2.0 * rows * columns * self.model.hidden_size * self.model.vocab_size

    def scored_columns(self, rows: int) -> int:
        """Columns of the completion, filled up to whole chunks."""
        width = min(self.new, max(1, self.chunk // rows))
        return -(-self.new // width) * width


def work_of(config: PlanConfig, model: ModelConfig) -> Work:
    rows = config.prompts_per_step * config.num_generations
    micro = config.microbatch_completions or config.minibatch_completions or rows
    lengths = (config.max_prompt_length, config.max_completion_length)
    slots = min(config.decode_slots or rows, rows)
    return Work(
        model,
        rows,
        config.prompts_per_step,
        *lengths,
        config.score_chunk,
        micro,
        slots,
        decode_passes(config),
        blocks_read(config, model.sliding_window),
    )


def cache_bytes(config: PlanConfig, model: ModelConfig) -> float:
    """Of a token's keys and values in all layers; int8 ones with a float32 scale a head."""
    width = _ITEM[config.dtype or "bfloat16"] * model.head_dim
    head = width if config.kv_cache_dtype is None else model.head_dim + 4
    return 2.0 * model.num_layers * model.num_kv_heads * head


def step_flops(config: PlanConfig, model: ModelConfig) -> dict[str, float]:
    """FLOPs of matrix products by step, over all devices, all completions at full length.

    update: forward, backward (twice that), and what is computed again: of the head everything, of the layers by remat
    everything but the last product (full), attention's squares (dots) or nothing (none).
    """
    work, columns = work_of(config, model), config.max_prompt_length + config.max_completion_length
    layers = work.layers_flops(work.rows, columns, columns)
    head = work.head_flops(work.rows, work.scored_columns(work.micro))
    decode = work.decode_passes * work.layers_flops(work.slots, 1, work.read_columns)
    prefill = work.layers_flops(work.prompts, work.prompt, work.prompt)
    m, tokens = model, float(work.rows * columns)
    down = 2.0 * tokens * m.num_layers * m.hidden_size * m.intermediate_size  # its output is in no gradient
    pairs = 4.0 * tokens * m.num_layers * m.num_heads * m.head_dim * columns
    again = {"none": 0.0, "dots": pairs}.get(config.remat or "full", layers - down)
    updates = updates_per_step(config)
    share = config.num_iterations / updates
    return {
        "generate": prefill + decode + work.head_flops(work.slots, work.decode_passes),
        "score": layers + head,
        "update": share * (3.0 * layers + again + 4.0 * head),
    }


def step_memory(
    config: PlanConfig, model: ModelConfig, mesh: dict[str, int], rollout_mesh: dict[str, int] | None = None
) -> dict[str, tuple[float, float, float]]:
    """(arguments, temporaries, held beside) in bytes of one device of the mesh that runs the step, by step."""
    found = _memory_on(config, model, mesh)
    if not rollout_mesh:
        return found
    there, apart = _memory_on(config, model, rollout_mesh), config.reference_placement == "rollout_mesh"
    ways = math.prod(mesh.get(name, 1) for name in ("fsdp", "sequence", "tensor"))
    decode = parameters(model) * _ITEM[config.dtype or "bfloat16"] / ways  # cast as the weights lie in training
    held, forward, _ = there["score"]
    weights, _, rest = found["prepare_decode"]
    return {
        "prepare_decode": (weights, 2.0 * decode, rest),
        "generate": (*there["generate"][:2], held if apart else 0.0),
        "score": found["score"],
        **({"score_reference": (held, forward, 0.0)} if apart else {}),
        "update": found["update"],
    }


def _memory_on(config: PlanConfig, model: ModelConfig, mesh: dict[str, int]) -> dict[str, tuple[float, float, float]]:
    """The same where one mesh runs every step. A reference on another mesh is not counted."""
    work, weights = work_of(config, model), parameters(model)
    tensor, batch = mesh.get("tensor", 1), mesh.get("data", 1) * mesh.get("fsdp", 1)
    sequence = mesh.get("sequence", 1)
    model_ways = tensor * mesh.get("fsdp", 1) * sequence
    held, moments = (
        weights * size / model_ways for size in (_ITEM[config.param_dtype], moment_bytes(config.moments_dtype))
    )
    state = (held + moments) * (2 if config.critic == "separate" else 1)
    reference = held if needs_reference(config) and config.reference_placement != "rollout_mesh" else 0.0
    # Between the steps that read them: what is in host memory is not there.
    critic = config.critic == "separate" and config.critic_placement == "mesh"
    rest = (held + (0 if config.optimizer_placement == "host" else moments)) * (2 if critic else 1)
    resting = 0.0 if config.reference_placement == "host" else reference
    width = _ITEM[config.dtype or "bfloat16"]
    decode = weights * width / tensor
    m, columns = model, work.prompt + work.new
    own = columns / sequence
    token = cache_bytes(config, m) / tensor
    cache = token * (work.slots / batch / sequence * room_for(columns) + work.prompts / batch * work.prompt)
    prefill = (work.prompts / batch) * (m.num_heads / tensor) * min(work.prompt**2, PAIRS) * 6.0
    micro = max(work.micro / batch, 1.0)
    attention = micro * (m.num_heads / tensor) * min(own * columns, PAIRS) * 6.0
    logits = 2.0 * 4.0 * max(work.chunk, work.micro) * m.vocab_size / model_ways
    inner = micro * own * (3.0 * m.intermediate_size / tensor + 4.0 * m.hidden_size) * width
    layer = 2.0 * work.linear * width / tensor
    forward = attention + logits + inner + layer
    saved = 0.0 if config.remat == "offload" else m.num_layers * micro * own * m.hidden_size * width
    if config.remat == "none":
        saved += m.num_layers * (attention + inner)
    # XLA has the stack that the layers' inputs are saved in twice, while it is filled and while it is read.
    gradients = held * (2.0 if work.micro < (config.minibatch_completions or work.rows) else 1.0)
    return {
        "prepare_decode": (held, 2.0 * decode, rest - held + resting),  # stacked as they were, and apart
        "generate": (decode, cache + prefill, rest + resting),
        "score": (held, forward, rest - held + reference),
        "update": (state + resting, 1.5 * forward + 2.0 * saved + gradients, 0.0),
    }


def estimate(config: PlanConfig, model: ModelConfig, topology: Topology) -> list[StepReport]:
    """Every step's numbers without a compiler, marked so by `error`-free reports that have no compile time.

    Raises ValueError for rules of a run's own, which the formulas do not know, and as `mesh_sizes`.
    """
    for name in ("sharding_preset", "sharding_rules", "decode_sharding_rules"):
        if getattr(config, name):
            raise ValueError(f"plan: {name} is not known to an estimate for {topology.name}: leave it out")
    sizes = mesh_sizes(config, topology)
    apart = config.reference_placement == "rollout_mesh"
    recomputes, compares = int(old_logprobs_of(config) == "recompute"), int(needs_reference(config))
    runs = {"prepare_decode": 1, "generate": 1, "score": recomputes + (0 if apart else compares)}
    runs |= {"score_reference": compares, "update": updates_per_step(config)}
    flops, found = step_flops(config, model), []
    for name, memory in step_memory(config, model, *sizes).items():
        far, formula = bool(sizes.rollout_mesh) and name in ROLLOUT_STEPS, name.removesuffix("_reference")
        mesh = sizes.rollout_mesh if far else sizes.mesh
        traffic = step_traffic(config, model, mesh)[formula]
        wires = step_collectives(config, model, mesh)[formula]
        if name == "prepare_decode" and sizes.rollout_mesh:
            traffic, wires = 2.0 * memory[0] + 0.5 * memory[1], []  # nothing is gathered: it is moved piece by piece
        own = flops.get(formula, 0.0) / math.prod(mesh.values())
        found.append(_estimated(name, runs[name], memory, own, traffic, wires, topology.chip, far=far))
    return found


def _estimated(
    name: str,
    runs: int,
    memory: tuple[float, float, float],
    flops: float,
    traffic: float,
    wires: list[Collective],
    chip: Chip,
    *,
    far: bool,
) -> StepReport:
    """The report of one step. `far`: it runs on the rollout mesh."""
    arguments, temporaries, beside = memory
    return StepReport(
        name=name,
        runs=runs,
        fits=sum(memory) <= chip.hbm,
        used=sum(memory),
        available=chip.hbm,
        arguments=arguments,
        temporaries=temporaries,
        beside=beside,
        collectives=summed(wires),
        flops=flops,
        traffic=traffic,
        seconds={
            "compute": flops / chip.flops,
            "HBM": traffic / chip.hbm_bandwidth,
            "network": network_seconds(wires, chip),
        },
        mesh="rollout_mesh" if far else "mesh",
    )


def step_traffic(config: PlanConfig, model: ModelConfig, mesh: dict[str, int]) -> dict[str, float]:
    """Bytes from and to a device's memory by step: weights once a pass, the cache once a token, attention's squares."""
    work, weights = work_of(config, model), parameters(model)
    tensor, batch = mesh.get("tensor", 1), mesh.get("data", 1) * mesh.get("fsdp", 1)
    width, m, columns = _ITEM[config.dtype or "bfloat16"], model, work.prompt + work.new
    sequence = mesh.get("sequence", 1)
    ways = tensor * mesh.get("fsdp", 1) * sequence
    held, moments = weights * _ITEM[config.param_dtype] / ways, weights * moment_bytes(config.moments_dtype) / ways
    token = cache_bytes(config, m) / tensor
    cache = token * work.slots / batch / sequence * work.read_columns
    squares = 4.0 * 4.0 * m.num_layers * (work.rows / batch) * (m.num_heads / tensor) * columns**2 / sequence
    passes = work.rows / work.micro
    update_passes = passes * config.num_iterations / updates_per_step(config)
    return {
        "prepare_decode": 2.0 * held + weights * width / tensor,
        "generate": work.decode_passes * (weights * width / tensor + cache),
        "score": passes * weights * width / tensor + squares,
        "update": 3.0 * (update_passes * weights * width / tensor + squares * update_passes / passes)
        + 3.0 * held
        + 2.0 * moments,
    }


def step_collectives(config: PlanConfig, model: ModelConfig, mesh: dict[str, int]) -> dict[str, list[Collective]]:
    """Collectives by step: weights gathered over fsdp and sequence a pass, gradients scattered back, activations summed
    over tensor. Keys and values that cross sequence are few beside them and left out.
    """
    work, weights = work_of(config, model), parameters(model)
    tensor, sequence, data = (mesh.get(name, 1) for name in ("tensor", "sequence", "data"))
    batch = data * mesh.get("fsdp", 1)
    fsdp = mesh.get("fsdp", 1) * sequence
    width, columns = _ITEM[config.dtype or "bfloat16"], work.prompt + work.new
    passes = work.rows / work.micro
    update_passes = passes * config.num_iterations / updates_per_step(config)
    micro = max(work.micro / batch, 1.0)
    whole = weights * width / tensor
    sums = 2.0 * model.num_layers  # after attention and after the feed-forward part
    activations = lambda rows, tokens: rows * tokens * model.hidden_size * float(width)

    def of(gathers: float, scatters: float, reduces: float, size: float, name: str) -> list[Collective]:
        found = []
        if fsdp > 1 and gathers:
            found.append(Collective("all-gather", whole, fsdp, gathers, name))
        if fsdp > 1 and scatters:
            found.append(Collective("reduce-scatter", 2.0 * whole, fsdp, scatters, name))
        if data > 1 and scatters:
            found.append(Collective("all-reduce", 2.0 * whole / fsdp, data, scatters, name))
        if tensor > 1 and reduces:
            found.append(Collective("all-reduce", size, tensor, reduces, name))
        return found

    token = activations(work.slots / (data * fsdp), 1)
    passed = activations(micro, columns / sequence)
    return {
        "prepare_decode": of(1.0, 0.0, 0.0, 0.0, "weights"),
        "generate": of(0.0, 0.0, sums * work.decode_passes, token, "a token"),
        "score": of(passes, 0.0, sums * passes, passed, "a pass"),
        "update": of(3.0 * update_passes, update_passes, 3.0 * sums * update_passes, passed, "a pass"),
    }


def candidate_meshes(config: PlanConfig, model: ModelConfig, devices: int) -> list[dict[str, int]]:
    """Meshes of data, fsdp and tensor that divide rows, prompts, microbatches and the model, the least tensor axis first.

    fsdp is as large as the widths and the vocabulary allow; data takes what is left.
    """
    work, found, tensor = work_of(config, model), [], 1
    sizes = (work.rows, work.prompts, work.micro, config.minibatch_completions or work.rows)
    while tensor <= devices:
        ways, split = devices // tensor, (model.num_heads, model.num_kv_heads, model.intermediate_size)
        divides = devices % tensor == 0 and all(size % ways == 0 for size in sizes)
        if divides and all(size % tensor == 0 for size in split):
            fits = lambda fsdp, ways=ways, tensor=tensor: (
                ways % fsdp == 0 and model.hidden_size % fsdp == 0 and model.vocab_size % (fsdp * tensor) == 0
            )
            fsdp = max((fsdp for fsdp in range(1, ways + 1) if fits(fsdp)), default=0)
            if fsdp:
                found.append(({"data": ways // fsdp} if fsdp < ways else {}) | {"fsdp": fsdp, "tensor": tensor})
        tensor *= 2
    return found


def choose_mesh(config: PlanConfig, model: ModelConfig, topology: Topology) -> dict[str, int]:
    """The candidate with the least tensor axis on the devices of training that fits by estimate, with a tenth to spare;
    else the last. Where generation has its own mesh, what runs there is not asked.

    Raises ValueError where there is no candidate.
    """
    sizes = mesh_sizes(dataclasses.replace(config, mesh={"fsdp": -1}), topology)
    meshes, work = candidate_meshes(config, model, sizes.training), work_of(config, model)
    if not meshes:
        raise ValueError(
            f"no mesh of fsdp × tensor fits {sizes.training} devices: prompts_per_step={work.prompts} and "
            f"microbatch_completions={work.micro} must be multiples of fsdp, num_kv_heads={model.num_kv_heads} of tensor; "
            "raise prompts_per_step, or give --mesh with a data axis"
        )
    far = ROLLOUT_STEPS if sizes.rollout_mesh else ()
    for mesh in meshes:
        memory = step_memory(config, model, mesh, sizes.rollout_mesh)
        if all(sum(parts) <= 0.9 * topology.chip.hbm for name, parts in memory.items() if name not in far):
            return mesh
    return meshes[-1]
