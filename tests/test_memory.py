"""Memory that runs out in a run's own words, what a plan says of each model, and activations in the host's memory."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from jax.sharding import NamedSharding, PartitionSpec
from test_plan import MESSAGES, TINY, needs_tpu_compiler

from jaxrl_lm import GRPOConfig, SFTConfig, cli, train_sft
from jaxrl_lm.fit import fit
from jaxrl_lm.lab.task import demonstration_rows, make_problems
from jaxrl_lm.memory import GIB, OutOfMemory, explained, out_of_memory_message, read_shortage, remedies
from jaxrl_lm.models import build
from jaxrl_lm.plan import run_plan
from jaxrl_lm.plan_changes import changes
from jaxrl_lm.plan_config import PlanConfig, open_model_config
from jaxrl_lm.plan_estimate import parameters
from jaxrl_lm.plan_memory import model_memory, savings
from jaxrl_lm.plan_report import out_of_memory
from jaxrl_lm.plan_steps import PlannedStep, trace_steps, weights_of
from jaxrl_lm.plan_table import memory_lines, to_json, to_text
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.topologies import parse_topology, topology_devices

pytestmark = pytest.mark.usefixtures("cached")


# --- messages ---------------------------------------------------------------------------------------------------------

RECORDED = {
    # of the TPU compiler (libtpu 0.0.42, v5e), of XLA's CPU and GPU clients, and of the TPU runtime
    "compiler": (MESSAGES["temporaries"], 18.10 * GIB, 15.75 * GIB),
    "compiler, with a table": (MESSAGES["table"], 20.5 * GIB, 15.75 * GIB),
    "cpu": ("RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.", 2.0**46, None),
    "gpu": ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.", 4770354232.0, None),
    "buffer": (
        "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 4.39G. That was not possible. "
        "There are 2.30G free.; (0x0x0_HBM0)",
        4.39 * GIB,
        2.30 * GIB,
    ),
    "program": (
        "RESOURCE_EXHAUSTED: Error loading program: Attempting to reserve 7.04G at the bottom of memory. That was not "
        "possible. There are 6.90G free, 0B reserved, and 6.90G reservable.",
        7.04 * GIB,
        6.90 * GIB,
    ),
}


@pytest.mark.parametrize("kind", RECORDED)
def test_the_numbers_of_a_message_are_read(kind):
    message, needed, available = RECORDED[kind]
    short = read_shortage(message)
    assert short.needed == pytest.approx(needed)
    assert short.available == (None if available is None else pytest.approx(available))
    assert read_shortage("INTERNAL: no") is None


@needs_tpu_compiler
def test_the_numbers_of_this_compiler_s_own_message_are_read():
    device = jax.sharding.SingleDeviceSharding(topology_devices(parse_topology("v5e:2x2"))[0])
    shape = jax.ShapeDtypeStruct((49152, 49152), jnp.float32, sharding=device)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        jax.jit(jnp.add).lower(shape, shape).compile()
    short = read_shortage(str(caught.value))
    assert short.available == 15.75 * GIB
    assert short.needed == 27 * GIB  # two arguments and a result of 9 GiB; there is nothing else
    step = PlannedStep("add", lambda: None, {"x": shape, "y": shape}, {}, 1)
    report = out_of_memory(step, str(caught.value), parse_topology("v5e:2x2"), seconds=1.0)
    assert (report.used, report.arguments) == (27 * GIB, 18 * GIB)


def config(**changed):
    return GRPOConfig(**{"model": "m", "dataset": "d", "output_dir": "runs/a"} | changed)


def test_the_message_names_arrays_and_what_to_change():
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    arrays = {"params": {"policy": {"embed": {"table": jax.ShapeDtypeStruct((1 << 28,), jnp.float32, sharding=split)}}}}
    text = out_of_memory_message("step 3, update", MESSAGES["table"], arrays, config(microbatch_completions=8))
    first, *rest = text.splitlines()
    assert first == (
        "step 3, update: the devices' memory does not suffice: 20.50 GiB at once, 15.75 GiB available; the run's own "
        "arrays take 0.50 GiB of each device"
    )
    assert rest[0] == "  0.50 GiB  params.policy.embed.table  float32[134217728]"
    assert rest[1] == "  8.00 GiB  temporary of jit(update)/dot_general  bf16[16,8,4096,128]"
    assert rest[2] == (
        "Change one of: a smaller microbatch_completions (now 8); remat full; a mesh with more devices on fsdp or tensor; "
        "moments_dtype bfloat16 or int8; param_dtype bfloat16; `jaxrl-lm plan --config runs/a/config.toml --topology …` "
        "tries such changes"
    )


def test_what_is_changed_already_is_not_proposed():
    given = config(remat="full", moments_dtype="bfloat16", param_dtype="bfloat16")
    assert remedies(given, "update")[:4] == [
        "a smaller microbatch_completions (now the whole batch)",
        "remat offload",
        "a mesh with more devices on fsdp or tensor",
        "moments_dtype int8",
    ]
    assert not any("param_dtype" in one for one in remedies(given, "update"))
    assert remedies(given, "generate")[0] == "fewer prompts_per_step, or a shorter max_completion_length"
    assert remedies(config(), "start")[0] == "a mesh with more devices on fsdp or tensor"
    given = SFTConfig(model="m", dataset="d", output_dir="o", microbatch_rows=2)
    assert remedies(given, "update")[0] == "a smaller microbatch_rows (now 2)"
    assert not any("jaxrl-lm plan" in one for one in remedies(given, "update"))


TOO_LARGE = 1 << 44  # float32 numbers: 64 TiB, beyond any machine's memory; nothing is touched


def test_a_real_allocation_that_fails_is_told():
    arrays = lambda: {"params": {"w": jnp.ones((256, 4))}}
    with (
        pytest.raises(
            OutOfMemory, match=r"step 1, score: .* 65536.00 GiB at once; the run's own .* 0.00 GiB"
        ) as caught,
        explained(lambda: "step 1, score", arrays, config()),
    ):
        jax.block_until_ready(jax.jit(lambda: jnp.zeros((TOO_LARGE,), jnp.float32))())
    assert "params.w  float32[256, 4]" in str(caught.value)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_other_errors_pass():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^INTERNAL"), explained(lambda: "", dict, config()):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")
    with pytest.raises(KeyError), explained(lambda: "", dict, config()):
        raise KeyError("x")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny")


def too_large(*_):
    jax.block_until_ready(jax.jit(lambda: jnp.zeros((TOO_LARGE,), jnp.float32))())


def test_a_run_whose_memory_runs_out_ends_with_one_message(model, tmp_path, monkeypatch, capsys):
    """Of `jaxrl-lm sft`, in the middle of its first step; no page of XLA, no traceback."""
    rows = demonstration_rows(make_problems(8, seed=0, digits=2), seed=0, skip=0.3)
    given = {"model": model, "output_dir": str(tmp_path / "run"), "mesh": {"data": 8}, "rows_per_step": 8}
    given |= {"eval_steps": 0, "max_steps": 1}
    cramped = lambda setup: fit(setup._replace(steps=dataclasses.replace(setup.steps, update=too_large)))
    monkeypatch.setattr("jaxrl_lm.sft.fit", cramped)
    with pytest.raises(OutOfMemory, match=r"step 1, update: .* 65536.00 GiB") as caught:
        train_sft(SFTConfig(dataset="rows", **given), dataset=rows)
    assert "GiB  params.policy.layers.mlp." in str(caught.value)
    data = tiny_run.write_rows(tmp_path / "rows.jsonl", rows)
    flags = [part for name, value in given.items() if name != "mesh" for part in (f"--{name}", str(value))]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["sft", *flags, "--mesh.data", "8", "--dataset", data])
    said = capsys.readouterr().err
    assert "jaxrl-lm sft: error: step 1, update: the devices' memory does not suffice" in said
    assert "Traceback" not in said


def test_a_run_of_reinforcement_learning_says_which_part(model, tmp_path, monkeypatch):
    data = tiny_run.write_data(tmp_path)
    given = tiny_run.options(model, data, tmp_path / "run", mesh={"data": 8}, probe_prompts=0, eval_steps=0)
    monkeypatch.setattr("jaxrl_lm.learn._score", too_large)
    with pytest.raises(OutOfMemory, match="step 1, score: the devices' memory does not suffice") as caught:
        tiny_run.run(given | {"prompts_per_step": 8})
    assert "GiB  params.policy." in str(caught.value)
    assert f"jaxrl-lm plan --config {tmp_path / 'run'}/config.toml" in str(caught.value)


# --- what a plan says of each model -----------------------------------------------------------------------------------

OPTIONS = {"topology": "v5e:2x2", "prompts_per_step": 4, "num_generations": 2, "max_prompt_length": 16}
OPTIONS |= {"max_completion_length": 24, "microbatch_completions": 4, "mesh": {"fsdp": 2, "tensor": 2}}


@pytest.fixture
def tiny(tmp_path):
    """Options of a plan of a tiny model, by changes."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return lambda **changed: PlanConfig(**{"model": str(path), **OPTIONS, **changed})


@pytest.fixture(scope="module")
def four():
    return Plan(make_mesh({"fsdp": 2, "tensor": 2}, devices=jax.devices()[:4]))


NORMS = 7 * 128  # stand whole on every device
MATRICES = 2 * 512 * 128 + 3 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
SPLIT = MATRICES // 4 + NORMS
TRUNK = (MATRICES - 512 * 128) // 4 + NORMS  # without the table of outputs
ADAPTER = 3 * 16 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 256)) // 2  # one of a factor's axes is split in two


def bytes_of(config, plan):
    parts = model_memory(config, open_model_config(config.model), plan)
    assert len({(part.model, part.part) for part in parts}) == len(parts)
    return {(part.model, part.part): part.bytes for part in parts}


def test_the_bytes_of_each_model_are_those_computed_by_hand(tiny, four):
    assert parameters(open_model_config(tiny().model)) == MATRICES + NORMS
    found = bytes_of(tiny(critic="separate", preset="ppo", beta=0.1, microbatch_completions=None), four)
    assert found == {
        ("policy", "weights"): 4 * SPLIT,
        ("policy", "moments"): 8 * SPLIT,
        ("policy", "gradients"): 4 * SPLIT,
        ("critic", "weights"): 4 * (TRUNK + 128),  # and a head
        ("critic", "moments"): 8 * (TRUNK + 128),
        ("critic", "gradients"): 4 * (TRUNK + 128),
        ("reference", "weights"): 4 * SPLIT,
        ("decode", "weights"): 2 * (MATRICES // 2 + NORMS),
    }
    small = bytes_of(tiny(param_dtype="bfloat16", moments_dtype="bfloat16"), four)
    assert small == {
        ("policy", "weights"): 2 * SPLIT,
        ("policy", "moments"): 4 * SPLIT,
        ("policy", "gradients"): (2 + 4) * SPLIT,  # of one microbatch, and their sum in float32
        ("decode", "weights"): 2 * (MATRICES // 2 + NORMS),
    }
    assert bytes_of(tiny(param_dtype="bfloat16"), four)["policy", "moments"] == 8 * SPLIT  # float32 is said
    adapter = bytes_of(tiny(lora_rank=16, beta=0.1), four)
    assert adapter["policy", "weights"] == adapter["reference", "weights"] == 4 * ADAPTER
    assert adapter["base", "weights"] == 4 * SPLIT


def test_a_reward_model_is_counted_once_and_stands_beside_every_step(tiny, four, tmp_path):
    raw = {**TINY, "architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (tmp_path / "rm").mkdir()
    (tmp_path / "rm" / "config.json").write_text(json.dumps(raw))
    option = f"reward_model:{tmp_path / 'rm'}"
    config = tiny(reward=(f"{option}?sigmoid=true", "length", f"{option}?sigmoid=true"))
    own = 2 * (TRUNK + 128)
    assert bytes_of(config, four)[f"{option}?sigmoid=true", "weights"] == own
    for step in trace_steps(config, open_model_config(config.model), four).values():
        assert f"{option}?sigmoid=true" in step.beside


def test_savings_are_those_computed_by_hand(tiny, four):
    config = tiny(critic="separate", preset="ppo", beta=0.1)
    found = {one.change: one for one in savings(config, open_model_config(config.model), four)}
    words = [
        "no critic (an algorithm without values)",
        "the reference shared with the policy through LoRA (lora_rank 16)",
        "beta 0 (no reference)",
        "moments_dtype bfloat16",
    ]
    critic, lora, beta, moments = (found[name] for name in words)
    assert (critic.held, critic.gradients) == (12 * (TRUNK + 128), 8 * (TRUNK + 128))
    assert lora.held == (4 + 8 + 4) * SPLIT - ((4 + 8 + 4) * ADAPTER + 4 * SPLIT)
    assert lora.gradients == 8 * (SPLIT - ADAPTER)
    assert (beta.held, beta.gradients) == (4 * SPLIT, 0.0)
    assert (moments.held, moments.gradients) == (4 * (SPLIT + TRUNK + 128), 0.0)
    assert moments.held < found["moments_dtype int8"].held < 6 * (SPLIT + TRUNK + 128)
    none = {one.change for one in savings(tiny(moments_dtype="bfloat16"), open_model_config(config.model), four)}
    assert none <= {"moments_dtype int8"}
    kept = savings(tiny(beta=0.1, target_kl=0.1), open_model_config(config.model), four)
    assert "beta 0 (no reference)" not in {one.change for one in kept}  # it is measured against


def test_a_plan_prints_the_models_and_the_savings(tiny, capsys):
    config = tiny(topology="gpu:H100x4", beta=0.1)
    report = run_plan(config, say=lambda _: None)
    text = to_text(report)
    assert "policy: weights 0.00, moments 0.00, gradients 0.00" in text
    assert "beta 0 (no reference) would save 0.00" in text
    written = json.loads(json.dumps(to_json(report)))
    assert {"model": "policy", "part": "weights", "bytes": 4.0 * SPLIT, "place": "mesh"} in written["memory"]
    saved = {one["change"]: one for one in written["savings"]}
    assert saved["beta 0 (no reference)"]["options"]["beta"] == 0.0
    assert saved["beta 0 (no reference)"]["held"] == 4.0 * SPLIT
    large = [type(part)(part.model, part.part, part.bytes * 1e5) for part in report["memory"]]
    assert f"  reference: weights {4e5 * SPLIT / GIB:.2f}" in memory_lines(large, [])


def test_smaller_moments_are_tried_before_smaller_weights(tiny):
    model, topology = open_model_config(tiny().model), parse_topology("v5e:2x2")
    found = changes(tiny(), model, topology, ("update",))
    names = [next(iter(change.items())) for change in found]
    assert names.index(("moments_dtype", "bfloat16")) < names.index(("param_dtype", "bfloat16"))
    small = changes(tiny(moments_dtype="bfloat16"), model, topology, ("update",))
    assert {"moments_dtype": "bfloat16"} not in small


# --- remat offload ----------------------------------------------------------------------------------------------------


def gradient_of(config, plan=None):
    model = build(config, plan=plan)

    def loss(params, tokens):
        return score(params, tokens, jnp.ones_like(tokens), model=model).logprobs.sum()

    return jax.jit(jax.grad(loss))


@pytest.mark.parametrize("sharded", [False, True])
def test_offloaded_activations_change_no_gradient(tiny_config, sharded):
    plan = Plan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2})) if sharded else None
    model = build(tiny_config, plan=plan)
    params, tokens = model.init(jax.random.key(0)), jnp.arange(1, 49).reshape(4, 12)
    found = {
        remat: gradient_of(dataclasses.replace(tiny_config, remat=remat), plan)(params, tokens)
        for remat in ("none", "offload")
    }
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(found["none"]))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * largest)
    jax.tree.map(close, found["offload"], found["none"])


@needs_tpu_compiler
def test_a_tpu_keeps_the_layers_inputs_on_its_host(tiny_config):
    """Compiled for v5e:2x2: as many bytes are on the host as the layers' inputs have, and the device has not them too."""
    plan = Plan(make_mesh({"fsdp": 4}, devices=topology_devices(parse_topology("v5e:2x2"))))
    layers, rows, columns, width = 16, 32, 128, 512
    sizes = {"hidden_size": width, "num_layers": layers, "dtype": "bfloat16", "qkv_bias": False, "qk_norm": False}
    model = build(dataclasses.replace(tiny_config, **sizes, remat="offload"), plan=plan)
    tokens = jax.ShapeDtypeStruct((rows, columns), jnp.int32, sharding=plan.rows)

    def states(params, tokens):
        return model.hidden(params, tokens, tokens, jnp.ones_like(tokens)).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(states)).trace(weights_of(model.specs, plan, "float32"), tokens)
    found = traced.lower().compile().memory_analysis()
    inputs = layers * rows // 4 * columns * width * 2  # bfloat16
    assert found.host_temp_size_in_bytes == inputs
    assert found.temp_size_in_bytes < inputs
