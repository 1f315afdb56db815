"""A plan's numbers against hand-computed ones, its reading of compiled programs, its mistakes, and compiled plans."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxrl_lm import cli, hlo, plan_decode
from jaxrl_lm.flops import count_flops
from jaxrl_lm.memory import device_bytes
from jaxrl_lm.models import build
from jaxrl_lm.plan import compile_steps_for, run_plan, suggest
from jaxrl_lm.plan_changes import changes
from jaxrl_lm.plan_config import SHIPPED, PlanConfig, open_model_config, shipped_models
from jaxrl_lm.plan_estimate import candidate_meshes, choose_mesh, parameters, step_flops, step_memory
from jaxrl_lm.plan_memory import model_memory
from jaxrl_lm.plan_places import mesh_sizes, plans_of
from jaxrl_lm.plan_report import network_seconds, out_of_memory
from jaxrl_lm.plan_steps import PlannedStep, planned_sampling, trace_steps
from jaxrl_lm.plan_table import to_json, to_text
from jaxrl_lm.sharding import AXES, RULES, Plan, make_mesh
from jaxrl_lm.topologies import GIB, TPUS, parse_topology, topology_devices

TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
OPTIONS = {"topology": "v5e:2x2", "prompts_per_step": 4, "num_generations": 2, "max_prompt_length": 16}
OPTIONS |= {"max_completion_length": 24, "microbatch_completions": 4}


@pytest.fixture
def tiny(tmp_path):
    """Options of a plan of a tiny model, by changes."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return lambda **changed: PlanConfig(**{"model": str(path), **OPTIONS, **changed})


def four_devices(fsdp=2, tensor=2):
    return Plan(make_mesh({"fsdp": fsdp, "tensor": tensor}, devices=jax.devices()[:4]))


# --- parameters and FLOPs ---------------------------------------------------------------------------------------------

# Counted by hand: tables, and a layer's q, k, v, o, gate, up, down and norms, from the numbers of the models' papers.
COUNTS = {
    "llama-3.1-8b": 2 * 128256 * 4096 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) + 4096,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_parameters_of_a_shipped_config_are_those_of_the_model(name):
    assert parameters(open_model_config(name)) == COUNTS[name]


def test_every_shipped_config_is_small_and_reads():
    for name in shipped_models():
        assert open_model_config(name).num_layers > 0
        assert (SHIPPED / f"{name}.json").stat().st_size < 2000


def test_flops_count_each_run_of_a_loop_and_what_is_computed_again():
    x, w = jnp.ones((2, 4)), jnp.ones((4, 4))
    one = 2 * 2 * 4 * 4

    def loop(x, w):
        step = jax.checkpoint(lambda c, _: (jnp.sin(jnp.sin(c @ w) @ w), None))
        return jax.lax.scan(step, x, None, length=5)[0].sum()

    assert count_flops(jax.make_jaxpr(loop)(x, w)) == 5 * 2 * one
    assert count_flops(jax.make_jaxpr(jax.grad(loop, 1))(x, w)) == 5 * 2 * one * 4
    until = jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ w, x))(x)
    assert count_flops(until, while_trips=(7,)) == 7 * one
    with pytest.raises(ValueError, match="while_trips"):
        count_flops(until)
    either = jax.make_jaxpr(lambda x: jax.lax.cond(x.sum() > 0, lambda c: c @ w @ w, lambda c: c @ w, x))(x)
    assert count_flops(either) == 2 * one


@pytest.mark.parametrize("remat", ["full", "none"])
def test_the_flops_of_our_steps_are_those_counted_by_hand(tiny, remat):
    """Of the traced steps, by formula, and written out here for the tiny model."""
    config = tiny(remat=remat, mesh={"fsdp": 2, "tensor": 2})
    model = open_model_config(config.model)
    found = step_flops(config, model)
    for name, step in trace_steps(config, model, four_devices()).items():
        if name != "prepare_decode":
            counted = count_flops(step.trace().jaxpr, while_trips=(config.max_completion_length, 1))
            assert counted == pytest.approx(found[name], rel=1e-12), name
    rows, columns, layers, width = 8, 40, 3, 128
    weights = 2 * width * 128 + 2 * width * 64 + 3 * width * 256
    layer = 2 * columns * weights + 4 * 4 * 32 * columns**2
    assert found["score"] == rows * layers * layer + 2 * rows * 24 * width * 512
    prompt = 4 * layers * (2 * 16 * weights + 4 * 4 * 32 * 16**2)
    token = 8 * layers * (2 * weights + 4 * 4 * 32 * columns)
    assert found["generate"] == prompt + 24 * token + 24 * 2 * 8 * width * 512


def test_the_memory_of_arguments_is_that_of_the_layouts(tiny):
    config = tiny(mesh={"fsdp": 2, "tensor": 2}, beta=0.1)
    model = open_model_config(config.model)
    steps = trace_steps(config, model, four_devices())
    weights = parameters(model)
    norms = 7 * 128  # stand whole on every device
    split = (weights - norms) / 4 + norms
    assert device_bytes(steps["update"].arguments["params.policy"]) == 4 * split
    assert device_bytes(steps["update"].arguments["opt_state"]) == 8 * split + 2 * 4  # and two counters
    assert device_bytes(steps["update"].beside["frozen.reference"]) == 4 * split  # scored before, and still there
    assert device_bytes(steps["generate"].arguments["decode"]) == 2 * ((weights - norms) / 2 + norms)
    assert device_bytes(steps["generate"].beside["params.policy"]) == 4 * split
    estimated = step_memory(config, model, config.mesh)
    assert estimated["update"][0] == pytest.approx(16 * split, rel=0.02)  # the reference among them
    assert steps["score"].runs == 1  # of the reference
    assert trace_steps(tiny(mesh=config.mesh), model, four_devices())["score"].runs == 0


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1},
        {"beta": 0.1, "lora_rank": 8},
        {"critic": "separate", "preset": "ppo", "implicit_prm": 0.1},
        {"critic": "shared", "preset": "ppo"},
    ],
    ids=lambda options: " ".join(options),
)
def test_what_a_plan_calls_arguments_a_program_has(tiny, options):
    """What jit drops because nothing reads it stands beside the program, and is counted there."""
    config = tiny(mesh={"fsdp": 2, "tensor": 2}, **options)
    for name, step in trace_steps(config, open_model_config(config.model), four_devices()).items():
        if name in ("score", "values", "implicit", "update"):
            compiled = step.trace().lower().compile().memory_analysis().argument_size_in_bytes
            ours = sum(map(device_bytes, step.arguments.values()))
            assert compiled == pytest.approx(ours, rel=0.02), name  # tokens and the like are not among ours


def test_a_critic_and_an_implicit_model_are_planned(tiny):
    steps = trace_steps(
        tiny(mesh={"fsdp": 2, "tensor": 2}, critic="separate", preset="ppo"),
        open_model_config(tiny().model),
        four_devices(),
    )
    assert list(steps) == ["prepare_decode", "generate", "score", "values", "update"]
    assert {"params.policy", "params.critic"} <= set(steps["update"].arguments)


# --- compiled programs ------------------------------------------------------------------------------------------------

PROGRAM = """HloModule jit_f, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%start (p.1: bf16[4,8]) -> (bf16[4,8], bf16[16,8]) {
  %p.1 = bf16[4,8]{1,0} parameter(0)
  %all-gather.1 = bf16[16,8]{1,0} all-gather(%p.1), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %t = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) tuple(%p.1, %all-gather.1)
}

%done (p.2: bf16[4,8]) -> bf16[16,8] {
  %p.2 = bf16[4,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[16,8]{1,0} all-gather(%p.2), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
}

%all-reduce-scatter (p.3: f32[16,8]) -> f32[4,8] {
  %p.3 = f32[16,8]{1,0} parameter(0)
  %all-reduce.1 = f32[16,8]{1,0} all-reduce(%p.3), channel_id=9, replica_groups=[2,4]<=[8], to_apply=%sum
  ROOT %s = f32[4,8]{1,0} slice(%all-reduce.1), slice={[0:4], [0:8]}
}

%layer (p.4: f32[10,4,8], p.5: s32[]) -> f32[4,8] {
  %p.4 = f32[10,4,8]{2,1,0} parameter(0)
  %p.5 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %ds = f32[1,4,8]{2,1,0} dynamic-slice(%p.4, %p.5, %zero, %zero), dynamic_slice_sizes={1,4,8}
  ROOT %b = f32[4,8]{1,0} bitcast(%ds)
}

%inner_body (q: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %q = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x.1 = bf16[4,8]{1,0} get-tuple-element(%q), index=1
  %cp = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} collective-permute(%x.1), channel_id=11, source_target_pairs={{0,1},{1,0}}
  %async.2 = bf16[16,8]{1,0:T(8,128)(2,1)S(1)} fusion(%x.1), kind=kCustom, calls=%done
  ROOT %r = (s32[], bf16[4,8]{1,0}) tuple(%q, %cp)
}

%inner_condition (q.1: (s32[], bf16[4,8])) -> pred[] {
  %q.1 = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %always = pred[] constant(true)
}

%body (w: (s32[], f32[10,4,8], bf16[4,8])) -> (s32[], f32[10,4,8], bf16[4,8]) {
  %w = (s32[], f32[10,4,8]{2,1,0}, /*index=2*/bf16[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%w), index=0
  %stack = f32[10,4,8]{2,1,0} get-tuple-element(%w), index=1
  %x = bf16[4,8]{1,0} get-tuple-element(%w), index=2
  %one = f32[4,8]{1,0} fusion(%stack, %i), kind=kLoop, calls=%layer, metadata={op_name="jit(f)/while/body/take"}
  %begun = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) fusion(%x), kind=kCustom, calls=%start, metadata={op_name="jit(f)/g"}
  %loop = (s32[], bf16[4,8]{1,0}) while(%w), condition=%inner_condition, body=%inner_body, TRIPS
  %ended = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%done
  ROOT %out = (s32[], f32[10,4,8]{2,1,0}, bf16[4,8]{1,0}) tuple(%i, %stack, %x)
}

%condition (w.1: (s32[], f32[10,4,8], bf16[4,8])) -> pred[] {
  %w.1 = (s32[], f32[10,4,8]{2,1,0}, bf16[4,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%w.1), index=0
  %ten = s32[] constant(10)
  ROOT %lt = pred[] compare(%i.1, %ten), direction=LT
}

ENTRY %main (a.1: (s32[], f32[10,4,8], bf16[4,8]), g: f32[16,8]) -> f32[4,8] {
  %a.1 = (s32[], f32[10,4,8]{2,1,0}, bf16[4,8]{1,0}) parameter(0)
  %g = f32[16,8]{1,0} parameter(1)
  %scan = (s32[], f32[10,4,8]{2,1,0}, bf16[4,8]{1,0}) while(%a.1), condition=%condition, body=%body
  %ar = (f32[]{:T(128)}, f32[2,8]{1,0}) all-reduce(%g, %g), channel_id=13, GROUPS, to_apply=%sum
  ROOT %rs = f32[4,8]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"3"}}').replace(
    "GROUPS", "replica_groups=mesh['a'=2,'b'=4] {'b'}"
)


def test_a_program_says_how_often_each_loop_runs():
    module = hlo.parse(PROGRAM)
    counts, unknown = hlo.runs(module)
    assert module.entry == "main"
    assert (counts["body"], counts["inner_body"], counts["layer"], counts["start"]) == (10, 30, 10, 10)
    assert not unknown
    silent = hlo.parse(PROGRAM.replace('backend_config={"known_trip_count":{"n":"3"}}', 'metadata={op_name="ring"}'))
    counts, unknown = hlo.runs(silent)
    assert counts["inner_body"] == 10
    assert unknown == ["ring"]
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("nothing")


def test_collectives_count_once_a_run_of_where_they_start():
    found = {one.kind: one for one in hlo.collectives(hlo.parse(PROGRAM))}
    assert set(found) == {"all-gather", "all-reduce", "reduce-scatter", "collective-permute"}
    gather = found["all-gather"]  # one channel, written three times, once of them in the inner loop
    assert (gather.bytes, gather.devices, gather.runs) == (16 * 8 * 2, 4, 10)
    assert (found["reduce-scatter"].bytes, found["reduce-scatter"].devices) == (16 * 8 * 4, 4)
    assert (found["all-reduce"].bytes, found["all-reduce"].devices) == (4 + 2 * 8 * 4, 4)
    permute = found["collective-permute"]
    assert (permute.bytes, permute.runs) == (4 * 8 * 2, 30)


GROUPS = [
    ("replica_groups={{0,4},{1,5}}", 2),
    ("replica_groups=[16,4]<=[8,2,4]T(1,0,2)", 4),
    ("replica_groups=mesh['a'=8,'b'=2,'c'=4] {'a','c'}", 32),
    ("replica_groups=mesh['a'=8,'b'=8], device_ids=([8,8]T(1,0)) {'a'}", 8),
    ("replica_groups=mesh['a'=8] {'a':(1)2}", 2),
]


@pytest.mark.parametrize(("written", "size"), GROUPS, ids=[written for written, _ in GROUPS])
def test_a_group_of_a_collective_is_read_in_each_of_its_forms(written, size):
    line = f"  %g = f32[64]{{0}} all-gather(%p), channel_id=1, {written}, dimensions={{0}}"
    text = f"ENTRY %e (p: f32[2]) -> f32[64] {{\n  %p = f32[2]{{0}} parameter(0)\n{line}\n}}"
    assert [one.devices for one in hlo.collectives(hlo.parse(text))] == [size]


def test_traffic_counts_the_slice_that_a_loop_reads_and_no_on_chip_memory():
    module = hlo.parse(PROGRAM)
    layer = 10 * (4 * 8 * 4 + 4 + 4 * 8 * 4 + 9)  # a slice, the counter, what is made of it; a comparison
    only = "\n".join(line for line in PROGRAM.splitlines() if not line.startswith(("  %begun", "  %loop", "  %ended")))
    only = only.replace("  %ar =", "  %unused = f32[] constant(0)\n  %ar.1 =")
    rest = hlo.memory_traffic(hlo.parse(only)) - layer
    assert rest == 2 * 16 * 8 * 4 + (4 + 2 * 8 * 4) + 4 * 8 * 4  # all-reduce of two arrays, and the scatter's result
    assert hlo.memory_traffic(module) > layer + rest
    update = """ENTRY %e (p: f32[100,8], u: f32[1,8], i: s32[]) -> f32[100,8] {
  %p = f32[100,8]{1,0} parameter(0)
  %u = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %dus = f32[100,8]{1,0} dynamic-update-slice(%p, %u, %i, %i)
}"""
    assert hlo.memory_traffic(hlo.parse(update)) == 2 * 8 * 4
    attention = """%handed (p.1: f32[100,8]) -> f32[800] {
  %p.1 = f32[100,8]{1,0} parameter(0)
  ROOT %b = f32[800]{0} bitcast(%p.1)
}

%cache (p.2: f32[100,8], u.2: f32[1,8], i.2: s32[], w: f32[100,8]) -> (f32[100,8], f32[8]) {
  %p.2 = f32[100,8]{1,0} parameter(0)
  %u.2 = f32[1,8]{1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  %w = f32[100,8]{1,0} parameter(3)
  %dus = f32[100,8]{1,0} dynamic-update-slice(%p.2, %u.2, %i.2, %i.2)
  %flat = f32[800]{0} fusion(%w), kind=kLoop, calls=%handed
  %dot = f32[8]{0} convolution(%dus, %flat), dim_labels=bf_io->bf
  ROOT %both = (f32[100,8]{1,0}, f32[8]{0}) tuple(%dus, %dot)
}

ENTRY %e (p: f32[100,8], u: f32[1,8], i: s32[], v: f32[100,8]) -> (f32[100,8], f32[8]) {
  %p = f32[100,8]{1,0} parameter(0)
  %u = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %v = f32[100,8]{1,0} parameter(3)
  ROOT %f = (f32[100,8]{1,0}, f32[8]{0}) fusion(%p, %u, %i, %v), kind=kOutput, calls=%cache
}"""
    read, written = 2 * 100 * 8 * 4 + 8 * 4 + 4, 8 * 4 + 8 * 4  # the cache and the weights whole, the new row alone
    assert hlo.memory_traffic(hlo.parse(attention)) == read + written


def test_buffers_are_named_by_shape_and_origin():
    buffers = hlo.largest_buffers(hlo.parse(PROGRAM), count=2)
    assert [(one.shape, one.bytes, one.count) for one in buffers] == [("bf16[16,8]", 256.0, 1)] * 2
    assert {one.op_name for one in buffers} == {"jit(f)/g", ""}


def test_our_own_compiled_loop_is_read(tiny):
    """A program of this machine's compiler: eight devices, a scan of five steps with one sum over them."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    split = jax.sharding.NamedSharding(mesh, spec(None, "fsdp"))
    whole = jax.sharding.NamedSharding(mesh, spec())

    def run(x, w):
        step = lambda c, _: (jax.lax.with_sharding_constraint(jnp.tanh(c @ w), split), None)
        return jax.lax.scan(step, x, None, length=5)[0]

    compiled = (
        jax.jit(run, in_shardings=(split, whole), out_shardings=split)
        .lower(jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32))
        .compile()
    )
    found = hlo.collectives(hlo.parse(compiled.as_text()))
    assert {(one.devices, one.runs) for one in found} == {(8, 5.0)}


# --- times, memory reports, choices -----------------------------------------------------------------------------------


def test_collectives_take_the_time_of_their_rings():
    chip = TPUS["v5e"]
    of = lambda kind, n: network_seconds([hlo.Collective(kind, 9e10, n, 2.0, "")], chip)
    assert of("all-gather", 4) == pytest.approx(2 * 0.75)
    assert of("all-reduce", 4) == pytest.approx(4 * 0.75)
    assert of("reduce-scatter", 8) == pytest.approx(2 * 0.875)
    assert of("collective-permute", 2) == pytest.approx(2 * 2.0)
    gpu = parse_topology("gpu:H100x64").chip
    slow = network_seconds([hlo.Collective("all-gather", 5e10, 16, 1.0, "")], gpu)
    assert slow == pytest.approx(15 / 16)  # beyond a machine's eight, over the network


MESSAGES = {
    "temporaries": "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(18.10G) exceeds available HBM (15.75G).",
    "table": """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 20.5G of 15.75G hbm. Exceeded hbm capacity by 4.75G.

  Largest program allocations in hbm:

  1. Size: 8.00G
     Operator: op_name="jit(update)/while/body/dot_general" source_file="a.py" source_line=3
     Shape: bf16[16,8,4096,128]{3,2,1,0:T(8,128)(2,1)}
     Unpadded size: 8.00G
     XLA label: fusion
""",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_an_out_of_memory_message_becomes_a_report(kind):
    weights = {"table": jax.ShapeDtypeStruct((1 << 28,), jnp.float32)}
    step = PlannedStep("update", lambda: None, {"params.policy": weights}, {}, 1)
    report = out_of_memory(step, MESSAGES[kind], parse_topology("v5e:2x2"), seconds=1.0)
    assert not report.fits
    assert report.available == 15.75 * GIB
    assert report.used == pytest.approx({"temporaries": 18.1, "table": 20.5}[kind] * GIB)
    assert ("params.policy.table", "float32[268435456]", float(GIB)) in report.largest
    if kind == "table":
        assert report.largest[0] == ("temporary of jit(update)/dot_general", "bf16[16,8,4096,128]", 8.0 * GIB)
    with pytest.raises(ValueError, match="update does not compile for v5e:2x2: INTERNAL: no"):
        out_of_memory(step, "INTERNAL: no\nand a page of it", parse_topology("v5e:2x2"), seconds=1.0)


def test_the_mesh_is_the_least_tensor_axis_that_fits():
    options = {"topology": "v5e:8x8", "prompts_per_step": 64, "microbatch_completions": 64}
    config = PlanConfig(model="", max_prompt_length=1024, max_completion_length=3072, **options)
    topology = parse_topology("v5e:8x8")
    assert choose_mesh(config, open_model_config("qwen3-0.6b"), topology) == {"fsdp": 64, "tensor": 1}
    assert choose_mesh(config, open_model_config("llama-3.1-8b"), topology)["tensor"] >= 2  # 16 GB of weights to read
    with pytest.raises(ValueError, match="no mesh of fsdp × tensor fits 64 devices: prompts_per_step=4"):
        choose_mesh(
            dataclasses.replace(config, prompts_per_step=4, num_generations=16, microbatch_completions=4),
            open_model_config("qwen2.5-7b"),
            topology,
        )


def test_a_vocabulary_that_the_devices_do_not_divide_leaves_some_to_data():
    options = {"prompts_per_step": 512, "microbatch_completions": 512, "max_completion_length": 64}
    config, model = PlanConfig(model="", topology="", **options), open_model_config("llama-3.1-405b")
    assert model.vocab_size % 512  # 256 · 501
    meshes = candidate_meshes(config, model, 512)
    assert meshes[0] == {"data": 2, "fsdp": 256, "tensor": 1}
    assert meshes[-1] == {"data": 2, "fsdp": 32, "tensor": 8}
    for mesh in meshes:
        described = AbstractMesh((mesh["data"], mesh["fsdp"], 1, mesh["tensor"]), AXES, axis_types=(AxisType.Auto,) * 4)
        Plan(described).tree(build(model).specs)  # raises where something does not divide


def test_rules_of_the_run_are_those_of_its_plan(tiny):
    """What generation reads: of 4 devices each has 1/4 of the feed-forward weights, and not 1/2."""
    config = tiny(mesh={"fsdp": 2, "tensor": 2}, topology="v5e:2x2")
    model, topology = open_model_config(config.model), parse_topology("v5e:2x2")
    read = lambda config: next(
        part.bytes
        for part in model_memory(config, model, *plans_of(config, mesh_sizes(config, topology)))
        if part.model == "decode"
    )
    ruled = dataclasses.replace(config, decode_sharding_rules={"mlp": "tensor+fsdp"})
    inner = 3 * 3 * 128 * 256 * 2  # layers, matrices, their sizes, bytes
    assert read(config) - read(ruled) == inner / 2 - inner / 4
    further = [{"decode_sharding_rules": {"mlp": "tensor+fsdp"}}, {"kv_cache_dtype": "int8"}]
    assert changes(config, model, topology, ("generate",))[-5:-3] == further
    with pytest.raises(ValueError, match="sharding_rules is not known to an estimate for gpu:H100x8"):
        run_plan(tiny(topology="gpu:H100x8", sharding_rules={"embed": "none"}), say=lambda _: None)


def test_an_estimate_knows_that_columns_are_split():
    config, model = PlanConfig(model="", topology="", microbatch_completions=8), open_model_config("llama-3.1-8b")
    config = dataclasses.replace(config, max_prompt_length=1024, max_completion_length=31744, num_generations=8)
    whole, split = (step_memory(config, model, {"fsdp": 8, "sequence": ways}) for ways in (1, 8))
    for name in ("score", "update"):
        assert split[name][0] == whole[name][0] / 8, name
        assert sum(split[name]) < sum(whole[name]) / 4, name
    assert split["generate"][0] == whole["generate"][0]  # weights are whole there
    assert split["generate"][1] < whole["generate"][1] / 4


def test_what_does_not_fit_is_changed_where_it_costs_least_first(tiny):
    config = tiny(mesh={"fsdp": 2, "tensor": 2}, microbatch_completions=None, remat="dots")
    model, topology = open_model_config(config.model), parse_topology("v5e:2x2")
    first, *others = changes(config, model, topology, ("update",))
    assert first == {"microbatch_completions": 2}
    assert others[0] == {"remat": "full"}
    assert others[-1] == {"param_dtype": "bfloat16"}
    wide = changes(tiny(mesh={"fsdp": 4}), model, topology, ("generate",))
    assert wide[0] == {"mesh": {"fsdp": 2, "tensor": 2}}


def test_a_plan_for_gpus_says_that_it_is_an_estimate(capsys):
    given = {"model": "llama-3.1-8b", "topology": "gpu:H100x64", "prompts_per_step": 32, "max_steps": 10}
    flags = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    cli.main(["plan", *flags, "--json", "true", "--max_completion_length", "1024"])
    report = json.loads(capsys.readouterr().out)
    assert not report["compiled"]
    assert any("ESTIMATE" in note for note in report["notes"])
    assert report["parameters"] == COUNTS["llama-3.1-8b"]
    numbers = report["run"]
    by_step = {step["name"]: step for step in report["steps"]}
    assert by_step["generate"]["limit"] == "HBM"
    seconds = sum(step["runs"] * step["roofline"] for step in report["steps"])
    assert numbers["step_seconds"] == pytest.approx(seconds)
    assert numbers["tokens_per_second"] == pytest.approx(256 * 1024 / seconds)
    assert numbers["device_hours"] == pytest.approx(seconds * 10 * 64 / 3600)


def test_what_does_not_fit_on_gpus_comes_with_a_change_that_does():
    config = PlanConfig(
        model="llama-3.1-70b",
        topology="gpu:H100x64",
        prompts_per_step=64,
        max_completion_length=2048,
        mesh={"fsdp": -1},
    )
    report = run_plan(config, say=lambda _: None)
    assert not report["fits"]
    assert report["run"] is None
    assert report["suggestions"][-1]["fits"]
    text = to_text(report)
    assert "DOES NOT FIT" in text
    assert f"tried {report['suggestions'][-1]['change']}: fits" in text
    better = dataclasses.replace(config, **report["suggestions"][-1]["options"])
    failed = [step.name for step in report["steps"] if not step.fits]
    after = {step.name: step for step in run_plan(better, say=lambda _: None)["steps"]}
    assert all(after[name].fits for name in failed)


# --- bad input --------------------------------------------------------------------------------------------------------

WRONG = {
    "kind": ({"topology": "v9z:2x2"}, "topology 'v9z:2x2' is unknown"),
    "dimensions": ({"topology": "v5p:8x8"}, "a v5p slice has 3 dimensions"),
    "nothing": ({"topology": "v5e:0x8"}, "a v5e slice has 2 dimensions"),
    "gpu": ({"topology": "gpu:P4x8"}, "gpu:H100x64"),
    "mesh": (
        {"topology": "gpu:H100x8", "mesh": {"fsdp": 3}},
        "gpu:H100x8: mesh={'fsdp': 3} does not multiply to the 8 devices",
    ),
    "two free": ({"topology": "gpu:H100x8", "mesh": {"fsdp": -1, "tensor": -1}}, "at most one of them is -1"),
    "model": ({"model": "lama-3.1-8b", "topology": "gpu:H100x8"}, "the nearest shipped one is 'llama-3.1-8b'"),
    "lag": ({"topology": "gpu:H100x8", "max_off_policy_steps": 1}, "max_off_policy_steps is not planned"),
    "teacher": ({"topology": "gpu:H100x8", "teacher": "qwen3-8b"}, "teacher is not planned"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named(tiny, case):
    changed, message = WRONG[case]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_plan(tiny(**changed), say=lambda _: None)


DRAWN = [
    {"forced_tokens": (0, 1)},
    {"allowed_token_ids": (0, 2), "min_new_tokens": 3},
    {"kv_cache_dtype": "int8", "repetition_penalty": 1.1, "decode_slots": 4},
    {"num_speculative_tokens": 3, "top_k": 5},
]


@pytest.mark.parametrize("changed", DRAWN, ids=str)
def test_the_decode_loop_that_is_looked_at_is_that_of_the_run(changed, tiny):
    """Its state is what generation of the plan starts its loop from, options of drawing and of the cache included."""
    config, plan = tiny(**changed), four_devices()
    model_config = open_model_config(config.model)
    step = trace_steps(config, model_config, plan)["generate"]
    model = plan_decode.planned_model(config, model_config, plan)
    state = plan_decode.decode_state(model, planned_sampling(config), step)
    carried = [x.aval.shape for x in main_carry(step.trace().jaxpr)]
    for x in jax.tree.leaves(
        state._replace(prefixes=(), next=(), order=(), total=())
    ):  # which a loop may read and not write
        assert x.shape in carried, x
        carried.remove(x.shape)


def main_carry(jaxpr):
    """What the decode loop carries: the loop with the most arrays."""
    loops = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "while":
                loops.append(equation.outvars)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(inner, "jaxpr"):
                    visit(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    visit(inner)

    visit(jaxpr.jaxpr)
    return max(loops, key=len)


def test_the_decode_loop_that_is_looked_at_attends_as_the_mesh_allows(tiny):
    """Splash needs heads and their keys on the same axes."""
    wide = dataclasses.replace(open_model_config(tiny().model), head_dim=64)
    mesh = AbstractMesh((1, 2, 1, 2), AXES, axis_types=(AxisType.Auto,) * 4)  # of the devices of the topology
    plans = (Plan(mesh), Plan(mesh, rules=tuple((RULES | {"kv_heads": None}).items())))
    found = [plan_decode.planned_model(tiny(), wide, plan).config.attention_implementation for plan in plans]
    assert found == ["splash", "xla"]


def test_a_plan_with_guesses_says_that_none_comes_true(tiny):
    changed = {"topology": "gpu:H100x4", "mesh": {"fsdp": 2, "tensor": 2}}
    notes = run_plan(tiny(num_speculative_tokens=3, **changed), say=lambda _: None)["notes"]
    assert any(
        "num_speculative_tokens=3: the time of generate is that of a pass for each token" in note for note in notes
    )
    assert not any("speculative" in note for note in run_plan(tiny(**changed), say=lambda _: None)["notes"])


def test_sizes_that_do_not_divide_are_named(tiny):
    model = open_model_config(tiny().model)
    with pytest.raises(ValueError, match="num_kv_heads=2"):
        trace_steps(tiny(), model, four_devices(fsdp=1, tensor=4))
    with pytest.raises(ValueError, match="prompts_per_step=2 is not divisible by the 4 devices"):
        trace_steps(tiny(prompts_per_step=2, num_generations=4), model, four_devices(fsdp=4, tensor=1))


# --- compiled for a TPU that nobody owns ------------------------------------------------------------------------------

needs_tpu_compiler = pytest.mark.skipif(sys.platform != "linux", reason="libtpu is there for Linux alone")


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("name", "mesh", "prompts"),
    [("v5e:2x2", {"fsdp": 2, "tensor": 2}, 4), ("v5e:4x4", {"data": 2, "fsdp": 4, "tensor": 2}, 8)],
)
def test_a_tiny_plan_is_compiled_for_a_tpu(tiny, name, mesh, prompts):
    config = tiny(topology=name, mesh=mesh, prompts_per_step=prompts, microbatch_completions=8, score_chunk=32)
    said = []
    report = run_plan(config, say=said.append)
    steps = {step.name: step for step in report["steps"]}
    assert list(steps) == ["prepare_decode", "generate", "score", "update"]
    assert report["fits"]
    assert sum(f"compiling for {name}" in line for line in said) == 4
    plan = Plan(make_mesh(mesh, devices=topology_devices(parse_topology(name))))
    planned = trace_steps(config, open_model_config(config.model), plan)
    for name, step in steps.items():
        assert step.error is None
        assert not step.uncounted_loops
        ours = sum(map(device_bytes, planned[name].arguments.values()))
        assert ours <= step.arguments <= 2 * ours, name  # the compiler fills up tiles of 8 × 128
    assert steps["generate"].flops_ratio == pytest.approx(1.0, abs=0.25)
    gathered = [size for kind, _, _, size in steps["generate"].collectives if kind == "all-gather"]
    assert sum(gathered) < 4 * parameters(open_model_config(config.model)) * config.max_completion_length
    assert any(kind in ("all-gather", "collective-permute") for kind, *_ in steps["update"].collectives)
    json.dumps(to_json(report))


@needs_tpu_compiler
def test_what_the_tpu_compiler_has_no_memory_for_is_a_report(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"hidden_size": 4096, "head_dim": 1024, "intermediate_size": 65536}))
    config = PlanConfig(
        model=str(path), topology="v5e:2x2", mesh={"fsdp": 4}, prompts_per_step=256, num_generations=8,
        max_prompt_length=2048, max_completion_length=2048, max_suggestions=0,
    )  # fmt: skip
    report = run_plan(config, say=lambda _: None)
    assert not report["fits"]
    assert any(step.error for step in report["steps"])
    assert "DOES NOT FIT" in to_text(report)


@needs_tpu_compiler
def test_what_does_not_fit_is_tried_with_changes_by_compiling(tmp_path):
    """64 rows of 1024 columns on a device leave no room for their states in the feed-forward part; 16 do."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"intermediate_size": 65536, "num_hidden_layers": 1}))
    config = PlanConfig(
        model=str(path), topology="v5e:2x2", mesh={"fsdp": 4}, prompts_per_step=64, num_generations=4,
        max_prompt_length=1000, max_completion_length=24, max_suggestions=3,
    )  # fmt: skip
    given, said = (open_model_config(config.model), parse_topology("v5e:2x2")), []
    steps = compile_steps_for(config, *given, say=said.append, only=("score",))
    assert [(step.name, step.fits) for step in steps] == [("score", False)]
    (tried,) = suggest(config, *given, steps, say=said.append)
    assert tried["fits"]
    assert tried["change"] == "--microbatch_completions 64"
    assert tried["result"].startswith("fits: score")
    assert [line for line in said if "trying" in line] == ["does not fit: trying --microbatch_completions 64"]


@needs_tpu_compiler
def test_a_slice_that_does_not_exist_is_named(tiny):
    with pytest.raises(ValueError, match="the TPU compiler knows no such slice"):
        run_plan(tiny(topology="v5e:3x3", mesh={"fsdp": 9}), say=lambda _: None)
