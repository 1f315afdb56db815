"""Plans of runs whose generation has devices of its own: what is held on which, the weights' way between, what is not."""

import dataclasses
import json
import math
import types

import jax
import jax.numpy as jnp
import pytest
from test_plan import OPTIONS, TINY, needs_tpu_compiler

from jaxrl_lm.memory import device_bytes
from jaxrl_lm.models import build
from jaxrl_lm.placement import Placement, weights_moved
from jaxrl_lm.plan import compile_steps_for, run_plan, stand_in_notes
from jaxrl_lm.plan_changes import changes
from jaxrl_lm.plan_config import PlanConfig, open_model_config
from jaxrl_lm.plan_estimate import choose_mesh, parameters, step_memory
from jaxrl_lm.plan_memory import model_memory, savings
from jaxrl_lm.plan_places import (
    Place,
    link_rates,
    links_between,
    mesh_sizes,
    places_of,
    plans_of,
    stand_in,
    weights_transfer,
)
from jaxrl_lm.plan_steps import trace_steps, with_machine_defaults
from jaxrl_lm.plan_table import to_json, to_text
from jaxrl_lm.topologies import parse_topology, topology_devices

# The tiny model's weights: two tables, and a layer's q, k, v, o, gate, up and down; norms stand whole everywhere.
MATRICES = 2 * 512 * 128 + 3 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
NORMS = 7 * 128
TRAIN = MATRICES // 4 + NORMS  # numbers on a device of fsdp 2 × tensor 2
APART = MATRICES // 2 + NORMS  # and on one of data 2 × tensor 2, where data splits no weights
MESHES = {"mesh": {"fsdp": 2, "tensor": 2}, "rollout_mesh": {"data": 2, "tensor": 2}}
THERE = {"beta": 0.1, "reference_placement": "rollout_mesh"}


@pytest.fixture
def tiny(tmp_path):
    """Options of a plan of a tiny model on two meshes of four devices, by changes."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return lambda **changed: PlanConfig(**{"model": str(path), **OPTIONS, **MESHES, **changed})


def plans(config):
    """Both plans, on this machine's devices."""
    places = {"mesh": Place(None, jax.devices()[:4]), "rollout_mesh": Place(None, jax.devices()[4:8])}
    return plans_of(config, mesh_sizes(config, parse_topology("gpu:H100x8")), places)


def steps_of(config):
    return trace_steps(config, open_model_config(config.model), *plans(config))


def size(trees):
    return {name: device_bytes(tree) for name, tree in trees.items() if jax.tree.leaves(tree)}


# --- memory, by hand --------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 8, 16 + 24


def test_each_mesh_holds_what_runs_there_and_nothing_else(tiny):
    assert parameters(open_model_config(tiny().model)) == MATRICES + NORMS
    steps = steps_of(tiny())
    assert {name: step.mesh for name, step in steps.items()} == {
        "prepare_decode": "mesh", "generate": "rollout_mesh", "score": "mesh", "update": "mesh",
    }  # fmt: skip
    # Generation: the weights that it reads and its requests. No training state, of which there is none on its devices.
    assert set(steps["generate"].arguments) == {"decode", "requests"}
    assert size(steps["generate"].arguments)["decode"] == 2 * APART
    assert steps["generate"].beside == {}
    # Training: no weights of generation and no caches, but its state, and the completions once there are any.
    state = {"opt_state": 8 * TRAIN + 2 * 4, "extra": 4}
    rollout = size(steps["update"].beside)["rollout"]
    assert rollout == ROWS // 2 * (COLUMNS * (5 * 4 + 1) + 1)  # tokens and four like them, a mask, one flag a row
    assert size(steps["prepare_decode"].arguments) == {"params.policy": 4 * TRAIN}
    assert size(steps["prepare_decode"].beside) == state
    assert size(steps["score"].arguments) == {"params.policy": 4 * TRAIN}
    assert size(steps["score"].beside) == state | {"rollout": rollout}
    assert size(steps["update"].beside) == {"rollout": rollout}
    batch = size(steps["update"].arguments)["batch"]
    assert size(steps["update"].arguments) == {"params.policy": 4 * TRAIN, "batch": batch} | state


def test_a_reference_on_the_rollout_mesh_is_no_more_on_the_other(tiny):
    near, far = steps_of(tiny(beta=0.1)), steps_of(tiny(**THERE))
    for name in ("prepare_decode", "score", "update"):
        held = size(near[name].beside)
        assert held.pop("frozen.reference") == 4 * TRAIN
        assert size(far[name].beside) == held, name
    assert near["generate"].beside == {}
    assert size(far["generate"].beside) == {"frozen.reference": 4 * APART}
    assert size(far["score_reference"].arguments) == {"frozen.reference": 4 * APART}
    assert far["score_reference"].beside == {}  # the weights of generation are gone
    assert "score_reference" not in near
    assert (near["score"].runs, far["score"].runs, far["score_reference"].runs) == (1, 0, 1)
    again = steps_of(tiny(**THERE, old_logprobs="recompute"))
    assert (again["score"].runs, again["score_reference"].runs) == (1, 1)


def test_reward_models_are_where_their_option_says(tiny):
    reward = "reward_model:qwen3-0.6b"
    own = {
        place: steps_of(tiny(reward=(reward,), reward_placement=place)) for place in ("mesh", "rollout_mesh", "host")
    }
    on = lambda place: {name for name, step in own[place].items() if reward in step.beside}
    assert on("mesh") == {"prepare_decode", "score", "update"}
    assert on("rollout_mesh") == {"generate"}
    assert on("host") == set()
    bytes_ = lambda place, step: size(own[place][step].beside)[reward]
    assert bytes_("rollout_mesh", "generate") > 1.9 * bytes_("mesh", "update")  # over tensor alone


@pytest.mark.parametrize(
    "options", [THERE, THERE | {"preset": "ppo", "critic": "separate", "critic_placement": "host"}]
)
def test_every_array_of_a_step_lies_on_the_devices_of_its_mesh(tiny, options):
    where = {"mesh": set(jax.devices()[:4]), "rollout_mesh": set(jax.devices()[4:8])}
    for name, step in steps_of(tiny(**options)).items():
        arrays = [leaf for leaf in jax.tree.leaves((step.arguments, step.beside)) if leaf.sharding is not None]
        assert len(arrays) > 10
        assert {frozenset(leaf.sharding.device_set) for leaf in arrays} == {frozenset(where[step.mesh])}, name


def test_what_is_planned_is_what_a_run_compiles(tiny):
    """The weights leave training as they lie there; a reference is scored from its own devices."""
    config = tiny(**THERE)
    steps, train = steps_of(config), plans(config)[0]
    laid = steps["prepare_decode"].trace().lower().compile()
    assert {layout.device_set == set(train.mesh.devices.flat) for layout in jax.tree.leaves(laid.output_shardings)} == {
        True
    }
    assert laid.memory_analysis().output_size_in_bytes == pytest.approx(2 * TRAIN, rel=0.02)  # no device has more
    arguments = laid.memory_analysis().argument_size_in_bytes
    assert arguments == pytest.approx(4 * TRAIN, rel=0.02)
    scored = steps["score_reference"].trace().lower().compile().memory_analysis().argument_size_in_bytes
    assert scored == pytest.approx(4 * APART, rel=0.02)


def test_the_models_are_listed_with_their_place(tiny):
    config = tiny(**THERE, optimizer_placement="host")
    model = open_model_config(config.model)
    parts = {(one.model, one.part): (one.bytes, one.place) for one in model_memory(config, model, *plans(config))}
    assert parts["reference", "weights"] == (4 * APART, "rollout_mesh")
    assert parts["decode", "weights"] == (2 * APART, "rollout_mesh")
    assert parts["policy", "weights"] == (4 * TRAIN, "mesh")
    assert parts["policy", "moments"] == (8 * TRAIN, "host")
    saved = {one.change: one for one in savings(config, model, *plans(config))}
    none = saved["beta 0 (no reference)"]
    assert (none.held, none.rollout_held) == (0.0, 4 * APART)
    assert none.options["reference_placement"] == "mesh"  # a place of nothing would be refused
    steps_of(dataclasses.replace(config, **none.options))
    assert saved["moments_dtype bfloat16"].held == 0.0  # those in host memory take none of the devices'


# --- from one mesh to the other ---------------------------------------------------------------------------------------


def test_the_weights_on_their_way_are_counted_as_a_run_counts_them(tiny):
    config, topology = tiny(), parse_topology("gpu:H100x8")
    model, (train, rollout) = open_model_config(config.model), plans(config)
    found = weights_transfer(config, model, train, rollout, topology)
    assert (found.weights, found.received) == (2 * (MATRICES + NORMS), 4 * 2 * APART)
    moved = weights_moved(build(with_machine_defaults(config, model), plan=train), Placement(train, rollout))
    assert moved == (found.weights, found.received)
    assert found.seconds == pytest.approx(2 * APART / 450e9)  # what a device takes in; four send the rest
    wide = weights_transfer(config, model, train, rollout, parse_topology("gpu:H100x16"))
    assert wide.seconds == pytest.approx(2 * (MATRICES + NORMS) / (4 * 50e9))  # over the network


def test_neighbours_of_two_parts_of_a_torus():
    grid = lambda *sizes: [tuple(place) for place in jnp.stack(jnp.indices(sizes), -1).reshape(-1, len(sizes)).tolist()]
    rows = grid(4, 4, 1)
    assert links_between(rows[:8], rows[8:]) == 8  # four to the next row, and four around
    assert links_between(rows[:4], rows[4:]) == 8
    assert links_between([(0, 0, 0), (1, 0, 0)], [(0, 1, 0), (1, 1, 0)]) == 2  # of two, the next is also the one around
    assert links_between(grid(2, 1, 1)[:1], grid(2, 1, 1)[1:]) == 1


@needs_tpu_compiler
def test_the_links_of_a_slice_bound_the_time():
    assert link_rates(parse_topology("v5e:4x4"), 8) == (8 * 45e9, 4 * 45e9)
    assert link_rates(parse_topology("v5p:4x4x8"), 64) == (2 * 16 * 90e9, 6 * 90e9)


# --- estimates and choices --------------------------------------------------------------------------------------------


def test_an_estimate_has_each_step_on_its_mesh(tiny):
    config = tiny(topology="gpu:H100x8", max_steps=10, **THERE)
    report = run_plan(config, say=lambda _: None)
    steps = {step.name: step for step in report["steps"]}
    assert [(name, step.mesh) for name, step in steps.items()] == [
        ("prepare_decode", "mesh"), ("generate", "rollout_mesh"), ("score", "mesh"), ("score_reference", "rollout_mesh"),
        ("update", "mesh"),
    ]  # fmt: skip
    weights, model = MATRICES + NORMS, open_model_config(config.model)
    here, alone = (step_memory(config, model, mesh) for mesh in (config.mesh, config.rollout_mesh))
    assert steps["generate"].arguments == 2 * weights / 2
    assert steps["generate"].temporaries == alone["generate"][1]
    assert steps["generate"].beside == 4 * weights / 2  # the reference
    assert steps["score_reference"].used == 4 * weights / 2 + alone["score"][1]
    assert steps["update"].used == sum(here["update"])
    assert steps["prepare_decode"].temporaries == 2 * 2 * weights / 4  # as it lies in training
    assert steps["prepare_decode"].beside == 8 * weights / 4
    near = step_memory(dataclasses.replace(config, reference_placement="mesh"), model, config.mesh, config.rollout_mesh)
    assert near["generate"][2] == 0.0
    assert near["update"][0] - steps["update"].arguments == 4 * weights / 4
    # Steps come one after the other, the weights' way between them; every device is paid for.
    seconds = sum(step.runs * step.roofline for step in steps.values()) + report["transfer"].seconds
    assert report["run"]["step_seconds"] == pytest.approx(seconds, rel=1e-12)
    assert report["run"]["device_hours"] == pytest.approx(seconds * 10 * 8 / 3600)
    written = json.loads(json.dumps(to_json(report)))
    assert written["rollout_mesh"] == {"data": 2, "tensor": 2}
    assert {step["name"]: step["mesh"] for step in written["steps"]}["score_reference"] == "rollout_mesh"
    assert written["transfer"]["received"] == 4 * 2 * APART
    text = to_text(report)
    assert "generate on rollout_mesh: fits" in text
    assert "reference: weights 0.00 on rollout_mesh" in text
    assert "weights of generation from mesh to rollout_mesh" in text


def test_the_chosen_mesh_leaves_the_rollout_mesh_its_devices():
    config = PlanConfig(
        model="llama-3.1-8b", topology="v5e:8x8", prompts_per_step=48, rollout_mesh={"data": 8, "tensor": 2}
    )
    config = dataclasses.replace(config, microbatch_completions=48, max_completion_length=1024)
    mesh = choose_mesh(config, open_model_config(config.model), parse_topology(config.topology))
    assert math.prod(mesh.values()) == 48


def test_suggestions_keep_to_the_devices_of_each_mesh(tiny):
    config, topology = tiny(mesh={"fsdp": 4}, rollout_mesh={"fsdp": 4}), parse_topology("v5e:2x4")
    model = open_model_config(config.model)
    for_update = changes(config, model, topology, ("update", "score"))
    assert {"mesh": {"fsdp": 2, "tensor": 2}, "microbatch_completions": 2} in for_update
    assert not any("rollout_mesh" in change or "decode_sharding_rules" in change for change in for_update)
    for_generation = changes(config, model, topology, ("generate",))
    assert for_generation == [
        {"rollout_mesh": {"fsdp": 2, "tensor": 2}}, {"decode_sharding_rules": {"mlp": "tensor+fsdp"}},
        {"kv_cache_dtype": "int8"},
    ]  # fmt: skip
    # Where the reference scores there too, a pass has a row for each of the devices of both.
    both = tiny(mesh={"fsdp": 2, "tensor": 2}, rollout_mesh={"fsdp": 4}, microbatch_completions=None, **THERE)
    assert changes(both, model, topology, ("score_reference",))[0] == {"microbatch_completions": 4}
    assert changes(both, model, topology, ("generate", "score_reference"))[-1] == {"param_dtype": "bfloat16"}


def test_what_does_not_fit_on_each_mesh_comes_with_its_own_change():
    config = PlanConfig(
        model="llama-3.1-70b", topology="gpu:H100x128", mesh={"fsdp": 64}, rollout_mesh={"data": 64},
        prompts_per_step=64, max_completion_length=2048,
    )  # fmt: skip
    report = run_plan(config, say=lambda _: None)
    assert {step.mesh for step in report["steps"] if not step.fits} == {"mesh", "rollout_mesh"}
    better = config
    for one in report["suggestions"]:
        if one["fits"]:
            better = dataclasses.replace(better, **one["options"])
    assert "rollout_mesh" in report["suggestions"][-1]["options"]
    assert run_plan(better, say=lambda _: None)["fits"]


# --- bad input --------------------------------------------------------------------------------------------------------

WRONG = {
    "sum": (
        {"rollout_mesh": {"data": 2}},
        "gpu:H100x8: mesh=.* and rollout_mesh=.* they have 4 and 2 devices",
    ),
    "axis": ({"rollout_mesh": {"data": 2, "lines": 2}}, "gpu:H100x8: rollout_mesh=.*unknown axis 'lines'"),
    "free": ({"mesh": {"fsdp": -1}, "rollout_mesh": {"data": -1}}, "at most one of the two may have an axis of -1"),
    "chosen": ({"mesh": {}, "rollout_mesh": {"data": 8}}, "0 of the 8 devices are left for mesh"),
    "nowhere": ({"rollout_mesh": {}, **THERE}, "reference_placement='rollout_mesh': no rollout_mesh is given"),
    "nothing": ({"reference_placement": "rollout_mesh"}, "has no effect: no reference is kept"),
    "rewards": ({"reward_placement": "rollout_mesh"}, "reward_placement='rollout_mesh' has no effect"),
    "prompts": (
        {"mesh": {"fsdp": 2}, "rollout_mesh": {"data": 6}},
        "prompts_per_step=4 is not divisible by the 6 devices",
    ),
    "rule": ({"decode_sharding_rules": {"mlp": "lines"}}, "decode_sharding_rules.mlp='lines'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named(tiny, case):
    changed, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        run_plan(tiny(**{"topology": "gpu:H100x8"} | changed), say=lambda _: None)


@needs_tpu_compiler
def test_parts_that_are_no_boxes_are_refused_with_the_sizes_that_would_do(tiny):
    with pytest.raises(
        ValueError, match=r"v5e:4x4: .* the first 4 devices .* no two boxes of the torus: give mesh 8 devices"
    ):
        run_plan(tiny(topology="v5e:4x4", rollout_mesh={"data": -1}, prompts_per_step=12), say=lambda _: None)
    fits = tiny(topology="v5p:4x4x4", mesh={"fsdp": -1}, rollout_mesh={"data": 16})
    assert {name: len(place.devices) for name, place in places_of(fits, parse_topology("v5p:4x4x4")).items()} == {
        "mesh": 48, "rollout_mesh": 16,
    }  # fmt: skip


# --- compiled for TPUs ------------------------------------------------------------------------------------------------


@needs_tpu_compiler
def test_a_part_that_is_refused_is_compiled_for_a_slice_of_its_shape():
    part = lambda name, count: Place(parse_topology(name), topology_devices(parse_topology(name))[:count])
    found = {of: stand_in(part(*of)) for of in (("v5e:8x8", 32), ("v5p:4x4x8", 48), ("v5e:2x4", 4))}
    assert [place.topology.name for place in found.values()] == ["v5e:8x4", "v5p:4x4x3", "v5e:2x2"]
    assert all(place.whole and len(place.devices) == count for (_, count), place in found.items())
    row = [types.SimpleNamespace(coords=(n, 0, 0)) for n in range(3)]
    with pytest.raises(
        ValueError, match="refuses programs for 3 of the devices of v5e:4x4, and knows no v5e slice of 3"
    ):
        stand_in(Place(parse_topology("v5e:4x4"), row))


@needs_tpu_compiler
def test_a_run_on_two_meshes_is_compiled_for_a_tpu(tiny):
    config = tiny(topology="v5e:2x2", mesh={"fsdp": 2}, rollout_mesh={"tensor": 2}, score_chunk=32, **THERE)
    said = []
    report = run_plan(config, say=said.append)
    steps = {step.name: step for step in report["steps"]}
    assert report["fits"]
    assert sum("compiling for 2 devices of v5e:2x2" in line for line in said) == 5
    assert {step.compiled_for for step in steps.values()} == {"v5e:2x2"}
    half = MATRICES // 2 + NORMS
    by_hand = {"generate": 2 * half, "score_reference": 4 * half, "update": 12 * half, "score": 4 * half}
    for name, ours in by_hand.items():
        assert ours <= steps[name].arguments <= 2 * ours, name  # the compiler fills up tiles of 8 × 128
    assert (steps["generate"].beside, steps["score_reference"].beside) == (4 * half, 0.0)
    assert steps["generate"].flops_ratio == pytest.approx(1.0, abs=0.25)
    assert {devices for step in steps.values() for _, devices, *_ in step.collectives} == {2}
    links = 2  # between two rows of two
    assert report["transfer"].seconds == pytest.approx(2 * (MATRICES + NORMS) / (links * 45e9))


@needs_tpu_compiler
def test_where_the_compiler_has_no_programs_for_a_part_another_slice_stands_in(tiny):
    config = tiny(topology="v5e:4x8", mesh={"fsdp": 16}, rollout_mesh={"data": 16}, prompts_per_step=16)
    config, said = dataclasses.replace(config, microbatch_completions=16), []
    (score,) = compile_steps_for(
        config, open_model_config(config.model), parse_topology("v5e:4x8"), say=said.append, only=("score",)
    )
    assert (score.mesh, score.compiled_for, score.fits) == ("mesh", "v5e:4x4", True)
    assert "mesh: the compiler refuses programs for this part of v5e:4x8; compiling for v5e:4x4" in said
    (note,) = stand_in_notes([score], parse_topology("v5e:4x8"))
    assert note.startswith("mesh: the TPU compiler refuses programs for these devices of v5e:4x8; compiled for v5e:4x4")
    assert stand_in_notes([score], parse_topology("v5e:4x4")) == []
