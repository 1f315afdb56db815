"""Models of a run on other devices or in host memory: the same run, and every array where its option says."""

import dataclasses
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.parquet as pq
import pytest
import tiny_run

import jaxrl_lm.sharding.mesh
from jaxrl_lm import placement as placing
from jaxrl_lm.config import GRPOConfig, PPOConfig
from jaxrl_lm.loop import run as run_prepared
from jaxrl_lm.memory import device_bytes
from jaxrl_lm.models import LoraConfig, ModelConfig, init_lora, load, lora_specs, save_reward_model
from jaxrl_lm.models.heads import critic
from jaxrl_lm.placement import Placement, open_placement, size, split_devices, weights_moved
from jaxrl_lm.plan_config import PlanConfig
from jaxrl_lm.plan_estimate import step_memory
from jaxrl_lm.plan_steps import trace_steps
from jaxrl_lm.prepare import prepare
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.sharding import HOST, Plan, build_plan, keep, make_mesh, move, moved_bytes, on_host
from jaxrl_lm.steps import compile_steps

TRAIN, OTHERS = frozenset(range(4)), frozenset(range(4, 8))
APART = {"mesh": {"fsdp": 4}, "rollout_mesh": {"tensor": 2, "data": 2}}
WIDTH = 32  # of the policy; the reward model has another

COMMON = {
    "mesh": {"fsdp": 4},
    "eval_dataset": {},
    "prompt_buckets": (16,),
    "probe_prompts": 0,
    "eval_steps": 0,
    "true_reward": None,
    "reward_weights": (),
    "dtype": "float32",
    "learning_rate": 1e-3,
    "num_iterations": 1,
    "completions_steps": 1,
    "max_steps": 3,
}
GRPO = COMMON | {"reward": ("tiny_run:digits",), "eval_steps": 3, "stop": ("+",)}
PPO = COMMON | {"prompts_per_step": 16, "num_generations": 1, "max_steps": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    with tiny_run.compile_cache(directory / "cache"):
        model, params, tokenizer = load(tiny_run.save_model(directory / "start", seed=2, hidden_size=48, num_layers=1))
        trunk, found = critic(model, params)
        found["head"] = {"kernel": jax.random.normal(jax.random.key(3), found["head"]["kernel"].shape)}
        save_reward_model(directory / "reward", trunk, found, tokenizer)
        yield tiny_run.save_model(directory / "model", num_layers=1), tiny_run.write_data(directory), directory


def config_of(files, kind, name, **changes):
    model, data, directory = files
    if kind is GRPOConfig:
        own = GRPO | {"eval_dataset": {"test": data["test"]}}
    else:
        own = PPO | {"reward": (f"reward_model:{directory / 'reward'}",)}
    return kind(**tiny_run.options(model, data, directory / name, **own | changes))


class Seen:
    """A run whose compiled steps say where their arguments lie."""

    def __init__(self, config, capsys):
        gc.collect()
        self.before = jax.live_arrays()  # held, so that none of their ids is used again
        self.places = {}  # by step and argument: the sets of (devices, memory) of arrays
        self.matrices = {}  # tables of the policy's shape on training devices, by memory, at each step
        setup = prepare(config)
        self.table = (setup.model.config.vocab_size, WIDTH)
        self.rewards = {"reward": [where(one.function._weights) for one in setup.rewards if models(one)]}
        names = ("generate", "score", "score_reference", "values", "update")
        steps = dataclasses.replace(setup.steps, **{name: self._watched(setup.steps, name) for name in names})
        setup = setup._replace(steps=steps, sampler=dataclasses.replace(setup.sampler, steps=steps))
        self.run = run_prepared(setup)
        self.notes = capsys.readouterr().out
        self.state = self.run.state

    def _watched(self, steps, name):
        def call(*arguments):
            found = self.places.setdefault(name, {})
            for number, argument in enumerate(arguments):
                found.setdefault(number, set()).update(where(argument))
            known = set(map(id, self.before))
            live = [x for x in jax.live_arrays() if id(x) not in known and x.shape == self.table]
            tables = [x for x in live if ids(x) <= TRAIN]
            there = [x.sharding.memory_kind for x in tables]
            self.matrices[name] = {kind: there.count(kind) for kind in set(there)}
            return getattr(steps, name)(*arguments)

        return call

    def tokens(self, step):
        rows = pq.read_table(self.run.directory / "completions" / f"step_{step:06d}.parquet").to_pylist()
        return [(row["prompt"], row["completion"], len(row["turn_ids"])) for row in rows], [
            row["advantage"] for row in rows
        ]


def models(one):
    return hasattr(one.function, "_weights")


def ids(x):
    return frozenset(device.id for device in x.sharding.device_set)


def where(tree):
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return {(ids(x), x.sharding.memory_kind) for x in arrays}


def same_runs(seen, base, steps):
    """Tokens are equal, all numbers within 1e-5 of their size."""
    for found, expected in zip(seen.run.metrics, [base.run.metrics[step - 1] for step in steps], strict=True):
        mine, theirs = seen.tokens(found["step"]), base.tokens(found["step"])
        assert mine[0] == theirs[0]
        np.testing.assert_allclose(mine[1], theirs[1], rtol=1e-5, atol=1e-6)
        names = [name for name in expected if not name.startswith(("time", "step_time", "tokens_per_second"))]
        assert len(names) > 30
        for name in names:
            if ("/max" in name and "logp_difference" in name) or "logp_difference" in name:
                assert found[name] < 1e-5  # rounding itself
                continue
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert seen.run.step == steps[-1]


def same_states(one, other):
    for found, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if not jax.dtypes.issubdtype(found.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def on_mesh(files):
    """base(kind): the run with everything on a mesh of the first four devices, as the only ones that there are."""
    runs = {}

    def base(kind, capsys):
        if kind not in runs:
            with pytest.MonkeyPatch.context() as patch:
                four = types.SimpleNamespace(devices=lambda: jax.devices()[:4])
                patch.setattr(jaxrl_lm.sharding.mesh, "jax", four)
                runs[kind] = Seen(config_of(files, kind, f"base_{kind.__name__}"), capsys)
        return runs[kind]

    return base


DEVICE = "device"


def test_grpo_with_generation_and_reference_elsewhere_is_the_same_run(files, on_mesh, capsys):
    base = on_mesh(GRPOConfig, capsys)
    assert base.matrices["generate"] == {DEVICE: 5}  # policy, two moments, reference, the weights that generation reads
    assert base.places["generate"][0] == {(TRAIN, DEVICE)}

    far = Seen(config_of(files, GRPOConfig, "grpo", **APART, reference_placement="rollout_mesh", max_steps=2), capsys)
    same_runs(far, base, (1, 2))
    assert far.places["generate"][0] == far.places["generate"][1] == {(OTHERS, DEVICE)}
    assert far.places["score_reference"][0] == {(OTHERS, DEVICE)}
    assert far.places["score_reference"][2] == {(TRAIN, DEVICE)}  # rows, which it moves there and back
    for number in (0, 2):
        assert far.places["update"][number] == {(TRAIN, DEVICE)}
    assert far.places["update"][1] == set()  # no reference on devices that an update knows nothing of
    assert far.matrices["generate"] == {DEVICE: 3}  # policy and moments
    assert "time/move" not in far.run.metrics[0]
    assert min(found["time/weights"] for found in far.run.metrics) > 0

    # The same run goes on with other placements, from its checkpoint.
    hosted = {"reference_placement": "host", "optimizer_placement": "host"}
    rest = Seen(config_of(files, GRPOConfig, "grpo", **APART, **hosted), capsys)
    assert "resumed from step 2" in rest.notes
    assert "reference_placement: 'rollout_mesh' -> 'host'" in rest.notes
    same_runs(rest, base, (3,))
    assert rest.places["score_reference"][0] == {(TRAIN, HOST)}
    assert rest.places["update"][0] == {(TRAIN, DEVICE)}
    assert rest.matrices["generate"] == rest.matrices["score"] == {DEVICE: 1, HOST: 3}
    assert rest.matrices["update"] == {DEVICE: 3, HOST: 1}
    assert where(rest.state.params) == {(TRAIN, DEVICE)}
    assert where(rest.state.opt_state) == {(TRAIN, DEVICE), (TRAIN, HOST)}  # the count of updates stays
    assert rest.run.metrics[0]["time/move"] > 0
    same_states(rest.state, base.state)

    # And back: everything on the devices of training, from what was saved out of host memory.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxrl_lm.sharding.mesh, "jax", types.SimpleNamespace(devices=lambda: jax.devices()[:4]))
        again = Seen(config_of(files, GRPOConfig, "grpo"), capsys)
    same_states(again.state, rest.state)
    assert where(again.state) == {(TRAIN, DEVICE)}


def test_ppo_with_reward_model_and_critic_elsewhere_is_the_same_run(files, on_mesh, capsys):
    base = on_mesh(PPOConfig, capsys)
    assert base.matrices["generate"] == {DEVICE: 8}  # policy and critic with moments, reference, generation's weights
    assert base.rewards["reward"] == [{(TRAIN, DEVICE)}]

    elsewhere = {"reward_placement": "rollout_mesh", "critic_placement": "host", "max_steps": 1}
    far = Seen(config_of(files, PPOConfig, "ppo", **APART, **elsewhere), capsys)
    same_runs(far, base, (1,))
    assert far.rewards["reward"] == [{(OTHERS, DEVICE)}]
    assert far.places["values"][0] == {(TRAIN, DEVICE), (TRAIN, HOST)}  # which fetches the critic
    assert far.places["update"][0] == {(TRAIN, DEVICE)}
    # The policy and its moments, and the reference; the critic and its own.
    assert far.matrices["generate"] == far.matrices["score"] == {DEVICE: 4, HOST: 3}
    assert far.matrices["update"] == {DEVICE: 7}
    assert where(far.state.params["critic"]) == {(TRAIN, HOST)}
    assert where(far.state.params["policy"]) == {(TRAIN, DEVICE)}

    elsewhere = {"reward_placement": "host", "reference_placement": "rollout_mesh", "optimizer_placement": "host"}
    rest = Seen(config_of(files, PPOConfig, "ppo", **APART, **elsewhere), capsys)
    same_runs(rest, base, (2,))
    assert rest.rewards["reward"] == [{(TRAIN, HOST)}]
    assert rest.matrices["generate"] == {DEVICE: 2, HOST: 4}
    same_states(rest.state, base.state)


def test_a_run_says_what_it_holds_where_and_what_a_step_moves(files):
    """Numbers by hand: one layer of width 32, 2 heads of 16, an MLP of 64, a tied table."""
    config = config_of(files, PPOConfig, "notes", **APART, reward_placement="host", critic_placement="host")
    setup = prepare(config)
    rows = setup.model.config.vocab_size
    block = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    policy = 4 * (rows * 32 + block + 32)
    critic = policy + 4 * 32
    held, moved = setup.notes[-2:]
    assert f"policy {size(policy)} on mesh" in held
    assert f"critic {size(critic)} in host memory" in held
    assert f"optimiser state {size(2 * critic)} in host memory" in held
    assert f"weights of generation {size(policy)} on rollout_mesh" in held
    assert "reward models" in held
    # What is split over tensor goes to two of the four devices in halves, norms to each whole.
    norms = 4 * (2 * 32 + 32)
    assert f"over all devices: {size(2 * (policy - norms) + 4 * norms)} of weights into generation's layout" in moved
    critic_norms = norms + 4 * 32  # and the head: whole on each device
    received = critic - critic_norms + 4 * critic_norms
    assert f"{size(received)} of the critic from host memory to score" in moved
    assert f"{size(3 * received)} of training state from host memory and as much back" in moved


def test_bytes_that_devices_receive():
    rows, columns = build_plan({"fsdp": 4}, devices=jax.devices()[:4]), build_plan(**apart())
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    split, whole = rows.sharding(("embed", None), (8, 8)), rows.replicated
    halves = columns.sharding((None, "mlp"), (8, 8))
    assert moved_bytes(x, split, split) == 0
    assert moved_bytes(x, whole, split) == 0  # each has its part already
    assert moved_bytes(x, split, whole) == 4 * (256 - 64)
    assert moved_bytes(x, split, halves) == 4 * 128
    assert moved_bytes(x, on_host(split), split) == 256
    assert moved_bytes([x, x], [split, split], [whole, halves]) == 768 + 512


def apart(sizes=None):
    return {"mesh": sizes or {"tensor": 2, "data": 2}, "devices": jax.devices()[4:]}


def test_the_weights_of_generation_on_the_same_devices_are_counted_too(files):
    """Table and kernels lie in quarters, and come whole to each device; norms are there."""
    model = load(files[0])[0]
    plan = build_plan({"fsdp": 4}, devices=jax.devices()[:4])
    weights, received = weights_moved(model, Placement(plan, plan))
    norms = 4 * (2 * 32 + 32)
    assert received == 4 * (weights - norms) * 3 // 4


# --- moves ------------------------------------------------------------------------------------------------------------

AXES = (None, "embed", "mlp", "batch")
MESHES = ({"fsdp": 4}, {"tensor": 2, "data": 2}, {"data": 3, "tensor": 2}, {})


@pytest.fixture
def no_host_copies(monkeypatch):
    """What goes through a numpy array of the whole raises."""

    def refused(self):
        raise AssertionError("gathered on the host")

    monkeypatch.setattr(type(jnp.zeros(1)), "_value", property(refused))


def layouts(sizes, devices, shape):
    """Every way of splitting an array of this shape that a plan gives."""
    plan = Plan(make_mesh(sizes, devices=devices))
    found = {}
    for axes in [(a, b, c) for a in AXES for b in AXES for c in AXES]:
        used = [name for axis in axes if axis for name in plan.axes(axis)]
        if len(set(used)) == len(used):
            layout = plan.sharding(axes, shape)
            found.setdefault(tuple(layout.devices_indices_map(shape).items()).__repr__(), layout)
    return list(found.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_arrays_come_whole_to_other_devices_without_the_host(dtype, no_host_copies):
    shape, count, devices = (12, 12, 24), 0, jax.devices()
    rng = np.random.default_rng(0)
    values = rng.normal(size=shape) > 0 if dtype == "bool" else rng.integers(-99, 99, shape)
    values = values.astype(jnp.dtype(dtype))
    for here in MESHES:
        used = int(np.prod(list(here.values())))
        for there in MESHES:
            other = int(np.prod(list(there.values())))
            if used + other > 8:
                continue
            sources = layouts(here, devices[:used], shape)
            targets = layouts(there, devices[8 - other :], shape)
            for number in range(0, max(len(sources), len(targets)), 2) if dtype == "float32" else (1,):
                source, target = sources[number % len(sources)], targets[-1 - number % len(targets)]
                x = jax.device_put(values, source)
                found = move({"x": x}, {"x": target})["x"]
                assert found.sharding == target
                for shard in found.addressable_shards:  # whole arrays cannot be read here
                    np.testing.assert_array_equal(read(shard.data), values[shard.index])
                assert not x.is_deleted()
                count += 1
    assert count >= 9


def read(x):
    """A part's values, past the property that is refused."""
    return np.from_dlpack(x.astype(jnp.float32))


def test_plain_device_put_would_gather_on_the_host(no_host_copies):
    """The control of the test above."""
    source = layouts({"fsdp": 4}, jax.devices()[:4], (12, 12, 24))[-1]
    target = layouts({"tensor": 2, "data": 2}, jax.devices()[4:], (12, 12, 24))[-1]
    x = jax.device_put(np.zeros((12, 12, 24)), source)
    with pytest.raises(AssertionError, match="gathered on the host"):
        jax.block_until_ready(jax.device_put(x, target))


def test_scalars_and_keys_move_too():
    plan, other = build_plan({"fsdp": 4}, devices=jax.devices()[:4]), build_plan(**apart())
    keys = jax.device_put(jax.random.split(jax.random.key(1), 8), plan.rows)
    found = move((keys, jax.device_put(jnp.float32(3), plan.replicated)), (other.rows, other.replicated))
    assert found[0].sharding == other.rows
    assert found[1].sharding == other.replicated
    np.testing.assert_array_equal(jax.random.key_data(found[0]), jax.random.key_data(keys))
    assert float(found[1]) == 3


def test_host_memory_keeps_the_layout_and_gives_back_the_same_bits():
    plan = build_plan({"fsdp": 4}, devices=jax.devices()[:4])
    layout = plan.sharding(("embed", None), (8, 8))
    values, stays = np.arange(64, dtype=np.float32).reshape(8, 8), plan.replicated
    there = jax.device_put(values, layout)
    small = jax.device_put(jnp.float32(1), stays)
    hosted, same = move((there, small), (on_host(layout), stays), delete=True)
    assert there.is_deleted()
    assert same is small
    assert hosted.sharding == layout.with_memory_kind(HOST)
    assert hosted.sharding.shard_shape((8, 8)) == (2, 8)
    back = move(hosted, layout)
    assert back.sharding.memory_kind == "device"
    assert not hosted.is_deleted()
    np.testing.assert_array_equal(back, values)


def test_a_kept_copy_outlives_what_it_is_of():
    layout = build_plan({"fsdp": 8}).rows
    for target in (layout, on_host(layout)):
        x = jax.device_put(np.arange(8.0, dtype=np.float32), layout)
        copy = keep(x, target)
        x.delete()
        assert copy.sharding == target
        np.testing.assert_array_equal(copy, np.arange(8.0))


def test_weights_under_an_adapter_leave_training_as_they_lie_there(files, monkeypatch):
    """Merged, cast, and on each device of training no more than its part; what generation gets is what it gets there."""
    plan, other = build_plan({"fsdp": 4}, devices=jax.devices()[:4]), build_plan(**apart())
    model, params, _ = load(files[0], plan=plan, compute_dtype="bfloat16")
    lora = LoraConfig(rank=2, alpha=4.0)
    fresh = init_lora(jax.random.key(1), model, lora, "float32")
    filled = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1, leaf.dtype) + leaf, fresh)
    adapter = jax.device_put(filled, plan.tree(lora_specs(model, lora)))
    sampling = SamplingConfig(max_new_tokens=2, eos_token_ids=(0,), pad_token_id=0)
    given = {"objective": None, "tx": optax.identity(), "rows": 8, "sampling": sampling, "lora": lora}
    here = compile_steps(model, plan, **given).prepare_decode(adapter, params)
    left = []
    monkeypatch.setattr("jaxrl_lm.steps.move", lambda tree, layouts: left.append(tree) or move(tree, layouts))
    there = compile_steps(model, plan, **given, placement=Placement(plan, other)).prepare_decode(adapter, params)
    for leaf in jax.tree.leaves(left):
        assert leaf.dtype == jnp.bfloat16
        assert leaf.ndim == 1 or leaf.addressable_shards[0].data.size == leaf.size // 4
    for one, expected in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        assert ids(one) == OTHERS
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(expected, np.float32))
    assert there["layers"][0]["gate_up"]["kernel"].sharding.shard_shape((2, 64, 32)) == (2, 32, 32)


# --- errors -----------------------------------------------------------------------------------------------------------


def options(kind=GRPOConfig, **changes):
    return kind(model="m", dataset="d", output_dir="o", reward=("r",), **changes)


@pytest.mark.parametrize(
    ("mesh", "rollout", "devices"),
    [
        ({"fsdp": 4}, {"tensor": 2, "data": 2}, 4),
        ({"fsdp": -1}, {"tensor": 2}, 6),
        ({"fsdp": -1, "tensor": 3}, {"data": 2}, 6),
        ({"fsdp": 2}, {"data": -1, "tensor": 3}, 2),
        ({"fsdp": 1}, {"data": -1}, 1),
    ],
)
def test_the_first_devices_train(mesh, rollout, devices):
    config = options(mesh=mesh, rollout_mesh=rollout)
    assert split_devices(config, 8) == devices
    found = open_placement(config)
    assert [device.id for device in found.train.mesh.devices.flat] == list(range(devices))
    assert [device.id for device in found.rollout.mesh.devices.flat] == list(range(devices, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": {"fsdp": 4}, "rollout_mesh": {"data": 2}}, "they have 4 and 2 devices, and there are 8"),
        ({"mesh": {"fsdp": 8}, "rollout_mesh": {"data": 2}}, "mesh={'fsdp': 8} and rollout_mesh={'data': 2}"),
        ({"mesh": {"fsdp": -1}, "rollout_mesh": {"data": -1}}, "at most one of the two may have an axis of -1"),
        ({"mesh": {"fsdp": -1}, "rollout_mesh": {"data": 8}}, "0 of the 8 devices are left for mesh"),
        ({"mesh": {"fsdp": -1, "tensor": 4}, "rollout_mesh": {"data": 2}}, "6 of the 8 devices are left for mesh"),
        ({"mesh": {"fsdp": 6}, "rollout_mesh": {"data": -1, "tensor": 4}}, "2 of the 8 devices are left for rollout"),
        ({"mesh": {"fsdp": 4}, "rollout_mesh": {"width": 4}}, "rollout_mesh=.*unknown axis 'width'"),
        ({"mesh": {"fsdp": 9}, "rollout_mesh": {"data": -1}}, "-1 of the 8 devices are left for rollout_mesh"),
        ({"reference_placement": "rollout_mesh"}, "reference_placement='rollout_mesh': no rollout_mesh is given"),
        ({"reward_placement": "rollout_mesh"}, "reward_placement='rollout_mesh': no rollout_mesh is given"),
    ],
)
def test_devices_that_do_not_add_up(changes, message):
    with pytest.raises(ValueError, match=message):
        open_placement(options(**changes))


@pytest.mark.parametrize("name", ["reference_placement", "reward_placement", "critic_placement", "optimizer_placement"])
def test_devices_without_host_memory(monkeypatch, name):
    monkeypatch.setattr(placing, "has_host_memory", lambda device: False)
    with pytest.raises(ValueError, match=f"{name}='host': JAX reaches no pinned host memory of cpu devices"):
        open_placement(options(**{name: "host"}))
    assert open_placement(options()).reward == "mesh"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (GRPOConfig, {"reference_placement": "host"}, "reference_placement='host' has no effect: no reference is kept"),
        (GRPOConfig, {"critic_placement": "host"}, "critic_placement='host' has no effect on critic='none'"),
        (PPOConfig, {"critic": "shared", "critic_placement": "host"}, "no effect on critic='shared'"),
        (
            GRPOConfig,
            {"beta": 0.1, "reference_ema": 0.9, "reference_placement": "host"},
            "a reference that moves .* is a part of the training state",
        ),
        (
            GRPOConfig,
            {"beta": 0.1, "lora_rank": 4, "reference_placement": "host"},
            "reference_placement='host' has no effect under lora_rank",
        ),
        (
            GRPOConfig,
            {"mix": {"dpo": 1.0}, "mix_dataset": {"dpo": "rows"}, "reference_placement": "host"},
            "the stream dpo of mix reads the reference",
        ),
        (
            GRPOConfig,
            {"mesh": {"tensor": 4}, "rollout_mesh": {"data": 4}, "prompts_per_step": 6},
            "prompts_per_step=6 is not divisible by the 4 devices of the data and fsdp axes of rollout_mesh",
        ),
        (
            GRPOConfig,
            {
                "beta": 0.1,
                "mesh": {"tensor": 4},
                "rollout_mesh": {"data": 4},
                "microbatch_completions": 2,
                "reference_placement": "rollout_mesh",
            },
            "microbatch_completions=2 is not divisible by the 4 devices",
        ),
        (GRPOConfig, {"reward_placement": "host"}, "reward_placement='host' has no effect: no reward_model: or prm:"),
    ],
)
def test_options_that_nothing_reads_or_that_do_not_divide(files, kind, changes, message):
    own = {"reward": ("tiny_run:digits",), "beta": None} | ({"num_generations": 1} if kind is PPOConfig else {})
    with pytest.raises(ValueError, match=message):
        prepare(config_of(files, kind, "refused", **{"mesh": {"fsdp": 4, "tensor": 2}, **own, **changes}))


def test_heads_are_not_cut_on_the_rollout_mesh(files):
    with pytest.raises(ValueError, match="tensor=4"):
        prepare(config_of(files, GRPOConfig, "refused", mesh={"fsdp": 4}, rollout_mesh={"tensor": 4}))


# --- the plan ---------------------------------------------------------------------------------------------------------

SHAPE = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16
)
PLANNED = {
    "model": "m",
    "topology": "v5e:2x2",
    "mesh": {"fsdp": 4},
    "preset": "ppo",
    "critic": "separate",
    "prompts_per_step": 8,
    "num_generations": 1,
    "max_prompt_length": 8,
    "max_completion_length": 8,
    "dtype": "float32",
}


def test_a_plan_counts_no_model_in_host_memory_between_its_uses():
    plan = build_plan({"fsdp": 4}, devices=jax.devices()[:4])
    hosted = {f"{name}_placement": "host" for name in ("reference", "critic", "optimizer")}
    held = lambda step: sum(map(device_bytes, step.beside.values()))
    full = trace_steps(PlanConfig(**PLANNED), SHAPE, plan)
    less = trace_steps(PlanConfig(**PLANNED, **hosted), SHAPE, plan)
    policy = device_bytes(full["update"].arguments["params.policy"])
    critic = device_bytes(full["update"].arguments["params.critic"])
    moments = device_bytes(full["update"].arguments["opt_state"])
    assert held(full["generate"]) - held(less["generate"]) == policy + critic + moments  # the reference is a policy
    assert held(full["score"]) - held(less["score"]) == critic + moments  # the reference is there to score
    assert held(full["values"]) - held(less["values"]) == policy + moments
    assert held(full["update"]) - held(less["update"]) == policy  # the reference, which only scoring reads
    assert "frozen.reference" not in less["update"].beside
    assert less["update"].arguments["opt_state"] == full["update"].arguments["opt_state"]


def test_an_estimate_counts_no_model_in_host_memory_between_its_uses():
    estimates = lambda **options: step_memory(PlanConfig(**PLANNED, **options), SHAPE, {"fsdp": 4})
    full = estimates()
    held = full["prepare_decode"][0]  # of one copy of the policy
    for option, saved in (("reference", 1), ("critic", 3), ("optimizer", 4)):
        less = estimates(**{f"{option}_placement": "host"})
        assert full["generate"][2] - less["generate"][2] == pytest.approx(saved * held)
        assert full["score"][2] - less["score"][2] == pytest.approx((saved if option != "reference" else 0) * held)
    both = estimates(critic_placement="host", optimizer_placement="host")
    assert full["generate"][2] - both["generate"][2] == pytest.approx(5 * held)
