"""The engine as the TPU compiler makes it, for chips that are not here: donated state, loops that copy and gather nothing;
the kernel that writes the cache, and what reads loops from a program's text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_plan import needs_tpu_compiler

from jaxrl_lm import hlo, hlo_loops
from jaxrl_lm.models import ModelConfig
from jaxrl_lm.models.cache_write import narrow, turned, write_columns, write_few_columns
from jaxrl_lm.plan_config import PlanConfig
from jaxrl_lm.plan_decode import check_steps
from jaxrl_lm.sharding import Plan, make_mesh

WIDE = ModelConfig(
    family="llama", vocab_size=32768, hidden_size=2048, intermediate_size=4096, num_layers=2, num_heads=16,
    num_kv_heads=8, head_dim=128, tie_embeddings=False,
)  # fmt: skip
NARROW = dataclasses.replace(WIDE, num_heads=32, head_dim=64, tie_embeddings=True)


def options(topology, mesh, **changed):
    given = {"prompts_per_step": 32, "num_generations": 8, "max_prompt_length": 1024, "max_completion_length": 1024}
    return PlanConfig(model="", topology=topology, mesh=mesh, microbatch_completions=8, **given | changed)


# --- the kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "columns"),
    [
        ((5, 2, 8, 256), 3, "float32", 1),
        ((5, 2, 8, 24), 3, "bfloat16", 1),  # one tile
        ((5, 1, 256, 8), 2, "bfloat16", 1),
        ((5, 2, 40, 8), 2, "int8", 1),  # no whole tiles
        ((5, 2, 8, 256), 3, "int8", 5),
        ((5, 2, 40, 8), 2, "float32", 3),  # no whole tiles
        ((5, 2, 64, 8), 2, "bfloat16", 16),
    ],
)
def test_the_kernel_writes_what_xla_writes(shape, axis, dtype, columns):
    """Every bit, also of columns in two tiles; a start outside included, which both take as the nearest inside."""
    random = np.random.default_rng(0)
    one = tuple(columns if place == axis else size for place, size in enumerate(shape))
    cache = jnp.asarray(random.integers(-99, 99, shape), dtype)
    new = jnp.asarray(random.integers(-99, 99, one), dtype)
    starts = jnp.asarray([0, 7, shape[axis] - 1, shape[axis] + 9, {2: 30, 3: 126}[axis]], jnp.int32)
    found = write_few_columns(cache, new, starts, axis=axis, interpret=True)
    np.testing.assert_array_equal(found, write_columns(cache, new, starts, axis=axis))


def test_only_a_tpu_has_narrow_values_lie_with_their_columns_last():
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1, 64, 256), (2, 1, 256, 64), (2, 1, 256, 128))
    ]
    assert narrow(shapes, None) == [False, False, False]  # here
    assert narrow(shapes, Plan(make_mesh({"tensor": 2}, devices=jax.devices()[:2]))) == [False, False, False]
    assert narrow(shapes, on_tpu({"tensor": 4})) == [False, True, False]
    values = jnp.arange(24).reshape(1, 2, 3, 4)
    assert turned([values], [True])[0].shape == (1, 2, 4, 3)
    assert turned([values], [False])[0] is values


def on_tpu(mesh):
    from jaxrl_lm.topologies import parse_topology, topology_devices

    return Plan(make_mesh(mesh, devices=topology_devices(parse_topology("v5e:2x2"))))


# --- logits that are drawn from ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "rows", "axes"),
    [
        (2048, 8, (("data", "fsdp"), "tensor")),  # whole blocks on each device
        (4 * 160, 8, (("fsdp", "tensor"), None)),
        (4 * 160, 6, (("data", "fsdp"), "tensor")),  # rows that do not divide
        (4 * 96, 8, (("data", "fsdp"), "tensor")),  # less than a block
    ],
)
def test_rows_take_the_axes_of_a_vocabulary_that_is_split_within_a_block(vocabulary, rows, axes):
    plan = Plan(make_mesh({"fsdp": 2, "tensor": 4})).for_decode().for_logits()
    draws = plan.for_draws((rows, vocabulary))
    spec = draws.sharding(("batch", "vocab"), (8, 2048)).spec
    assert (draws is plan) == (axes[1] == "tensor")
    assert tuple(spec) == (("fsdp", "tensor"), None) if axes[1] is None else tuple(spec) == ("fsdp", "tensor")


# --- reading loops ----------------------------------------------------------------------------------------------------

TEXT = """HloModule m

%inner_body (p.1: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  %x.1 = f32[4,8]{1,0} get-tuple-element(%p.1), index=1
  %copy.1 = f32[4,8]{0,1} copy(%x.1), metadata={op_name="a/turn"}
}

%fused (q: f32[16,8]) -> f32[8,16] {
  %q = f32[16,8]{1,0} parameter(0)
  ROOT %t = f32[8,16]{1,0} transpose(%q), dimensions={1,0}
}

%body (p.2: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p.2 = (s32[], f32[16,8]{1,0}) parameter(0)
  %x.2 = f32[16,8]{1,0} get-tuple-element(%p.2), index=1
  %fusion.1 = f32[8,16]{1,0} fusion(%x.2), kind=kLoop, calls=%fused
  %copy-start.1 = (f32[16,8]{1,0:T(8,128)S(1)}, f32[16,8]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x.2)
  %copy-start.2 = (f32[16,8]{0,1:T(8,128)S(1)}, f32[16,8]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x.2)
  %copy-start.3 = (f32[16,8]{1,0:T(8,128)}, f32[16,8]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%x.2)
  %while.2 = (s32[], f32[4,8]{1,0}) while(%p.2), condition=%c, body=%inner_body, known_trip_count={"n":"3"}
}

%c (p.3: (s32[], f32[4,8])) -> pred[] {
  ROOT %p.3 = pred[] parameter(0)
}

ENTRY %main (a: f32[16,8]) -> f32[16,8] {
  %a = f32[16,8]{1,0} parameter(0)
  %copy.9 = f32[16,8]{0,1} copy(%a)
  %while.1 = (s32[], f32[16,8]{1,0}) while(%a), condition=%c, body=%body, known_trip_count={"n":"5"}
}
"""


def test_loops_and_the_copies_in_them_are_read_from_a_text():
    module = hlo.parse(TEXT)
    first, second = hlo_loops.loops(module)
    assert (first.name, first.body, first.trips, first.outer) == ("while.1", "body", 5, None)
    assert (second.name, second.body, second.trips, second.outer) == ("while.2", "inner_body", 3, "while.1")
    assert hlo_loops.main_loop(module) == first
    inside = hlo_loops.copies(hlo_loops.iteration(module, first), least=0.0)
    kinds = sorted((one.kind, one.bytes, one.runs) for one in inside)
    assert kinds == [("copy", 128.0, 3.0), ("copy", 512.0, 1.0), ("evict", 512.0, 1.0), ("fetch", 512.0, 1.0),
                     ("transpose", 512.0, 1.0)]  # fmt: skip
    assert len(hlo_loops.copies(hlo_loops.iteration(module, first), least=200.0)) == 4
    assert sum(one.runs for one in hlo_loops.copies(module, least=0.0)) == 1 + 5 * (4 + 3)
    with pytest.raises(ValueError, match="no loop"):
        hlo_loops.main_loop(hlo_loops.iteration(module, second))


def test_a_kernel_moves_what_it_says():
    text = TEXT.replace(
        "%copy.9 = f32[16,8]{0,1} copy(%a)",
        '%copy.9 = f32[16,8]{0,1} custom-call(%a), custom_call_target="k", backend_config={"bytes_accessed":"77"}',
    )
    assert hlo.memory_traffic(hlo.parse(text)) == hlo.memory_traffic(hlo.parse(TEXT)) - 2 * 512 + 77


def test_an_operand_that_is_read_by_other_tiles_moves_as_what_is_read_of_it():
    """As the TPU compiler writes a product of a block of int8."""
    text = """HloModule m

%again (p: s8[64,2048]) -> s8[64,2048] {
  %p = s8[64,2048]{1,0:T(32,128)(4,1)} parameter(0)
  ROOT %c = s8[64,2048]{1,0:T(8,128)(4,1)} copy(%p)
}

%product (q: s8[64,2048], i: s32[]) -> f32[64,128] {
  %q = s8[64,2048]{1,0:T(32,128)(4,1)} parameter(0)
  %i = s32[] parameter(1)
  %f = s8[64,2048]{1,0:T(8,128)(4,1)} fusion(%q), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%again
  %z = s32[] constant(0)
  %d = s8[64,128]{1,0:T(8,128)(4,1)} dynamic-slice(%f, %z, %i), dynamic_slice_sizes={64,128}
  ROOT %n = f32[64,128]{1,0:T(8,128)} convert(%d)
}

ENTRY %main (a: s8[64,2048], i: s32[]) -> f32[64,128] {
  %a = s8[64,2048]{1,0:T(32,128)(4,1)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %r = f32[64,128]{1,0:T(8,128)} fusion(%a, %i), kind=kLoop, calls=%product
}
"""
    assert hlo.memory_traffic(hlo.parse(text)) - 4 == 64 * 128 + 4 * 64 * 128  # but for the number of the block
    moves = text.replace("output_to_operand_aliasing={{}: (0, {})}, ", "")  # a copy that is none of these reads all
    assert hlo.memory_traffic(hlo.parse(moves)) - 4 == 64 * 2048 + 4 * 64 * 128
    # Handed on by a fusion within: whoever has it may read all.
    line = next(line for line in text.splitlines() if "%f =" in line)
    handed = (
        f"%handed (q: s8[64,2048]) -> s8[64,2048] {{\n  %q = s8[64,2048]{{1,0}} parameter(0)\n  ROOT{line[1:]}\n}}\n\n"
    )
    outer = line.split("output_to")[0] + "calls=%handed"
    whole = text.replace(line, outer).replace("%product (", handed + "%product (")
    assert hlo.memory_traffic(hlo.parse(whole)) - 4 == 64 * 2048 + 4 * 64 * 128


# --- compiled ---------------------------------------------------------------------------------------------------------

# The model, where, the options, and what a pass may move for each byte of weights and cache. On a v5p, whose chip memory is
# smaller, the results of attention's blocks go through main memory.
DECODED = {
    "128 wide, tensor": (WIDE, "v5e:2x4", {"tensor": 8}, {}, 1.2),
    "64 wide, tensor, slots": (NARROW, "v5e:2x4", {"tensor": 8}, {"decode_slots": 128}, 1.2),
    "64 wide, fsdp": (NARROW, "v5e:2x4", {"fsdp": 8}, {}, 1.2),
    "64 wide, tensor, int8": (NARROW, "v5e:2x4", {"tensor": 8}, {"kv_cache_dtype": "int8"}, 1.25),
    "64 wide, v5p, slots": (NARROW, "v5p:2x2x1", {"fsdp": 2, "tensor": 2}, {"decode_slots": 128}, 1.4),
}


@needs_tpu_compiler
@pytest.mark.parametrize("name", DECODED)
def test_the_decode_loop_reads_weights_and_cache_and_moves_little_else(name):
    """The state stays where it is, the loop copies no part of a cache and gathers no weights, and a pass reads weights and
    cache once."""
    model, topology, mesh, changed, most = DECODED[name]
    found = check_steps(options(topology, mesh, **changed), model, only=("decode",))["decode"]
    assert found.cache <= found.donated <= found.aliased
    assert found.outputs - found.aliased < 1e4
    assert not found.moved
    assert all(one.bytes < found.weights / 100 for one in found.gathers)
    # A loop over blocks a layer, and that which fills slots; none over the rows, for writing a column of each.
    assert found.loops == ((16, 16, None) if "decode_slots" in changed else (16, 16))
    assert found.least <= 1.01 * found.traffic
    assert found.traffic <= most * found.least


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("shape", "axis", "dtypes"),
    [
        ((16, 32, 128, 256), 3, ("int8", "bfloat16")),
        ((16, 32, 256, 128), 2, ("int8", "bfloat16")),
        ((16, 32, 256, 64), 2, ("int8", "bfloat16")),  # narrow
        ((16, 32, 1, 256), 3, ("float32", "float32")),  # an int8 cache's scales
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [1, 16])
def test_the_kernel_writes_a_donated_cache_of_many_heads_outside_of_a_loop(shape, axis, dtypes, columns):
    """As an observation is appended: nothing is copied."""
    dtype = dtypes[columns > 1]
    plan = on_tpu({"fsdp": 4})
    new = tuple(columns if place == axis else size for place, size in enumerate(shape))
    at = lambda shape, dtype: jax.ShapeDtypeStruct(
        shape, dtype, sharding=plan.sharding(("batch",), shape[:1], "a cache")
    )
    write = jax.jit(functools.partial(write_columns, axis=axis, plan=plan), donate_argnums=0)
    memory = write.lower(at(shape, dtype), at(new, dtype), at(shape[:1], "int32")).compile().memory_analysis()
    assert memory.alias_size_in_bytes == memory.output_size_in_bytes == np.prod(shape) * jnp.dtype(dtype).itemsize / 4
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes / 4


@needs_tpu_compiler
def test_columns_of_guesses_are_written_in_place_too():
    """Five columns a row of numbers and scales, by the kernel: no loop over rows, and no copy of a cache."""
    changed = {"kv_cache_dtype": "int8", "decode_slots": 128, "num_speculative_tokens": 4}
    found = check_steps(options("v5e:2x4", {"tensor": 8}, **changed), WIDE, only=("decode",))["decode"]
    assert found.cache <= found.donated <= found.aliased
    assert not [one for one in found.moved if "2176" in one.shape]  # columns: the logits are copied, no cache is
    assert found.loops == (17, 17, None)
    assert found.traffic <= 1.3 * found.least


@needs_tpu_compiler
def test_draws_from_a_vocabulary_that_is_split_within_a_block_gather_no_logits():
    """Llama's 128256 tokens over 8 devices: each number of the logits moves once."""
    model = dataclasses.replace(NARROW, vocab_size=128256, num_layers=1)
    found = check_steps(options("v5e:2x4", {"tensor": 8}), model, only=("decode",))["decode"]
    logits = 256 * 128256 * 4
    assert sum(one.bytes for one in found.gathers) < logits / 1000
    assert [one.bytes for one in found.collectives if one.kind == "all-to-all"] == [logits / 8]


@needs_tpu_compiler
def test_the_update_keeps_its_state_in_place_and_generation_gathers_weights_before_its_loop():
    lengths = {"max_prompt_length": 64, "max_completion_length": 64}
    config = options("v5e:2x4", {"fsdp": 8}, prompts_per_step=8, num_generations=2, score_chunk=512, **lengths)
    model = dataclasses.replace(WIDE, hidden_size=1024, intermediate_size=2048, num_heads=8, num_kv_heads=4)
    found = check_steps(config, dataclasses.replace(model, vocab_size=8192), only=("prepare_decode", "update"))
    laid, update = found["prepare_decode"], found["update"]
    assert laid.gathers or any(one.kind == "all-to-all" for one in laid.collectives)
    assert update.donated <= update.aliased
    assert update.outputs - update.aliased < 1e5
    # Weights are gathered a layer or a table at a time: never all of them at once.
    assert max(one.bytes for one in update.gathers) < update.whole / 3
    assert {one.kind for one in update.collectives} >= {"all-gather"}


def test_a_step_or_a_topology_that_is_not_compiled_is_named():
    with pytest.raises(ValueError, match="step 'decoed' is unknown: prepare_decode, decode, update"):
        check_steps(options("v5e:2x4", {"tensor": 8}), WIDE, only=("decoed",))
    with pytest.raises(ValueError, match="has no compiler here"):
        check_steps(options("gpu:H100x8", {"tensor": 8}), WIDE)
