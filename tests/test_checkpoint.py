"""Checkpoints: bit-exact onto any mesh, what is kept, and what a kill, a full disk or another model leave."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrl_lm.checkpoint import CheckpointError, Checkpoints, rewind
from jaxrl_lm.types import TrainState

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def make_state(seed: int = 0, width: int = 8) -> TrainState:
    keys = jax.random.split(jax.random.key(seed), 3)
    policy = {
        "embed": {"table": jax.random.normal(keys[0], (16, width))},
        "half": jax.random.normal(keys[1], (8, width)).astype(jnp.bfloat16),
        "odd": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45], jnp.float32),
    }
    params = {"policy": policy}
    extra = {"count": jnp.arange(5, dtype=jnp.int32), "keys": jax.random.split(keys[2], 8)}
    return TrainState(jnp.asarray(seed, jnp.int32), params, TX.init(params), jax.random.key(seed + 7), extra)


def abstract(state: TrainState, place=None) -> TrainState:
    place = place or (lambda leaf: SingleDeviceSharding(jax.devices()[0]))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place(leaf)), state)


def raw(leaf) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.atleast_1d(np.asarray(leaf)).view(np.uint8)


def assert_same_bits(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_array_equal(raw(one), raw(other))


def test_round_trip_is_bit_exact_and_brings_the_host_table(tmp_path):
    state, host = make_state(), {"position": 2**40, "config": {"reward": ["a"], "mesh": {"fsdp": -1}, "beta": 0.1}}
    with Checkpoints(tmp_path / "c", keep_last=2) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.save(3, state, host)
        checkpoints.wait()
        assert not checkpoints.save(3, make_state(1), {})  # a step is saved once
    with Checkpoints(tmp_path / "c", keep_last=2) as checkpoints:
        assert checkpoints.latest() == 3
        restored, table = checkpoints.restore(abstract(state))
        assert checkpoints.restore_host() == host
    assert table == host
    assert_same_bits(restored, state)
    assert int(jax.random.randint(restored.key, (), 0, 2**30)) == int(jax.random.randint(state.key, (), 0, 2**30))


def test_one_device_to_eight_and_back(tmp_path):
    state = make_state()
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(leaf):
        split = leaf.ndim and leaf.shape[0] % 8 == 0
        return NamedSharding(mesh, PartitionSpec("fsdp") if split else PartitionSpec())

    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        wide, _ = checkpoints.restore(abstract(state, place))
        table = wide.params["policy"]["embed"]["table"]
        assert table.sharding == NamedSharding(mesh, PartitionSpec("fsdp"))
        assert len(table.addressable_shards) == 8
        assert table.addressable_shards[0].data.shape == (2, 8)
        assert_same_bits(wide, state)
        checkpoints.save(2, wide, {})
        checkpoints.wait()
        narrow, _ = checkpoints.restore(abstract(state), step=2)
    assert_same_bits(narrow, state)


def test_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    bump = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state = TrainState(jnp.int32(0), {"policy": {"w": jnp.zeros((8, 1 << 18))}}, (), jax.random.key(0), {})
    target = abstract(state)
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        for step in range(3):
            checkpoints.save(step, state, {})
            state = state._replace(params=bump(state.params))
            state = state._replace(params=bump(state.params))
            checkpoints.wait()
            restored, _ = checkpoints.restore(target)
            weight = np.asarray(restored.params["policy"]["w"])
            assert weight.min() == weight.max() == 2 * step


def test_keeps_the_last_and_the_best(tmp_path):
    state = TrainState(jnp.int32(0), {"policy": {"w": jnp.ones(2)}}, (), jax.random.key(0), {})
    scores = [0.1, 0.9, 0.3, None, float("nan"), 0.2]
    with Checkpoints(tmp_path, keep_last=2, best_metric="eval/x") as checkpoints:
        for step, score in enumerate(scores[:5]):
            checkpoints.save(step, state, {}, metrics=None if score is None else {"eval/x": score, "loss": 1.0})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3, 4]
    with Checkpoints(tmp_path, keep_last=2, best_metric="eval/x") as checkpoints:  # the best is known after a restart
        assert checkpoints.best() == 1
        checkpoints.save(5, state, {}, metrics={"eval/x": 0.2})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 4, 5]
        checkpoints.save(6, state, {}, metrics={"eval/x": 0.95})
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best()) == ([5, 6], 6)
    with pytest.raises(ValueError, match="save_total_limit=0"):
        Checkpoints(tmp_path, keep_last=0)


def test_a_half_deleted_old_checkpoint_is_no_obstacle(tmp_path):
    """As a kill in the middle of removing step 1 leaves it."""
    state = TrainState(jnp.int32(0), {"policy": {"w": jnp.ones(2)}}, (), jax.random.key(0), {})
    with Checkpoints(tmp_path, keep_last=2, best_metric="x") as checkpoints:
        checkpoints.save(1, state, {}, metrics={"x": 1.0})
        checkpoints.save(2, state, {}, metrics={"x": 2.0})
    shutil.rmtree(tmp_path / "1" / "state")
    (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()
    with Checkpoints(tmp_path, keep_last=1, best_metric="x") as checkpoints:
        assert checkpoints.latest() == 2
        assert_same_bits(checkpoints.restore(abstract(state))[0], state)
        checkpoints.save(3, state, {}, metrics={"x": 1.5})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]


def test_another_model_is_refused_by_parameter(tmp_path):
    state = make_state(width=8)
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        with pytest.raises(ValueError, match="another model") as error:
            checkpoints.restore(abstract(make_state(width=12)))
        first = str(error.value).splitlines()[1]
        assert first == "  params.policy.embed.table: checkpoint float32[16, 8], this run float32[16, 12]"
        assert "and 1 more" in str(error.value)  # 2 parameters, and two moments of each
        smaller = state._replace(params={"policy": {"embed": state.params["policy"]["embed"], "new": jnp.ones(3)}})
        with pytest.raises(ValueError, match=r"policy.half: checkpoint bfloat16\[8, 8\], this run has none") as error:
            checkpoints.restore(abstract(smaller))
        assert "params.policy.new: checkpoint has none, this run float32[3]" in str(error.value)
        cast = state._replace(step=state.step.astype(jnp.float32))
        with pytest.raises(ValueError, match=r"step: checkpoint int32\[\], this run float32\[\]"):
            checkpoints.restore(abstract(cast))
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; there are \[1\]"):
            checkpoints.restore(abstract(state), step=5)
        assert_same_bits(checkpoints.restore(abstract(state))[0], state)


def test_read_only_leaves_a_save_under_way_alone(tmp_path):
    state = make_state()
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, state, {"a": 1})
    under_way = (tmp_path / "1").rename(tmp_path / "2.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path, read_only=True) as reader:
        assert reader.latest() is None
        with pytest.raises(CheckpointError, match="opened for reading, step 3"):
            reader.save(3, state, {})
    assert under_way.exists()
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(3, state, {})
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        Checkpoints(tmp_path / "none", read_only=True)


WRITER = """
import sys, os, json, resource, signal
import jax, jax.numpy as jnp
from jaxrl_lm.checkpoint import Checkpoints, CheckpointError
from jaxrl_lm.types import TrainState

def make(step, megabytes):
    keys = jax.random.split(jax.random.key(step), megabytes)  # random bits, which do not compress
    leaves = {str(i): jax.random.uniform(key, (1 << 18,)) for i, key in enumerate(keys)}
    return TrainState(jnp.int32(step), {"policy": leaves}, (), jax.random.key(step), {})

def say(text):
    print(text, flush=True)
"""


def run_writer(directory, body):
    code = WRITER + f"directory = {str(directory)!r}\n" + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def big_state(step: int, megabytes: int) -> TrainState:
    keys = jax.random.split(jax.random.key(step), megabytes)  # random bits, which do not compress
    leaves = {str(i): jax.random.uniform(key, (1 << 18,)) for i, key in enumerate(keys)}
    return TrainState(jnp.int32(step), {"policy": leaves}, (), jax.random.key(step), {})


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.08])
def test_sigkill_while_saving_leaves_the_one_before(tmp_path, delay):
    """The process dies by its own SIGKILL, `delay` seconds after save() of step 2 returned, with step 1 committed."""
    body = f"""
    import threading, time
    checkpoints = Checkpoints(directory, keep_last=1)
    checkpoints.save(1, make(1, 32), {{"position": 1}})
    checkpoints.wait()
    state = make(2, 32)
    jax.block_until_ready(state.params)
    checkpoints.save(2, state, {{"position": 2}})
    time.sleep({delay})
    os.kill(os.getpid(), signal.SIGKILL)
    """
    process = run_writer(tmp_path, body)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, stderr
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        latest = checkpoints.latest()
        assert latest in (1, 2)
        if delay == 0.0:
            assert latest == 1
        expected = big_state(latest, 32)
        state, host = checkpoints.restore(abstract(expected))
        assert host == {"position": latest}
        assert_same_bits(state, expected)
        checkpoints.save(3, expected, {})
    assert [path.name for path in tmp_path.iterdir()] == ["3"]  # the half-written one is gone


def test_sigkill_before_the_first_commit_leaves_nothing(tmp_path):
    body = """
    checkpoints = Checkpoints(directory, keep_last=1)
    checkpoints.save(1, make(1, 32), {})
    os.kill(os.getpid(), signal.SIGKILL)
    """
    process = run_writer(tmp_path, body)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, stderr
    assert list(tmp_path.iterdir())  # it had begun
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(1, big_state(1, 1), {})
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_full_disk_is_reported_and_the_one_before_stays(tmp_path):
    """Files may not grow beyond 1 MiB from step 2 on: what the writer sees is a failing write."""
    body = """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpoints = Checkpoints(directory, keep_last=1)
    checkpoints.save(1, make(1, 8), {"position": 1})
    checkpoints.wait()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for attempt in (checkpoints.wait, lambda: checkpoints.save(3, make(3, 8), {})):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
        raised = None
        try:
            checkpoints.save(2, make(2, 8), {"position": 2})
            attempt()
        except CheckpointError as error:
            raised = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        say(json.dumps([raised, checkpoints.steps()]))
    checkpoints.save(4, make(4, 8), {"position": 4})
    checkpoints.wait()
    say(json.dumps([None, checkpoints.steps()]))
    checkpoints.close()
    """
    process = run_writer(tmp_path, body)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    *failed, good = [json.loads(line) for line in stdout.splitlines()]
    assert len(failed) == 2
    for message, steps in failed:
        assert steps == [1]
        assert message.startswith(f"{tmp_path}: the checkpoint of step 2 could not be saved (File too large); ")
        assert "step 1 is whole" in message
    assert good == [None, [4]]
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        assert checkpoints.latest() == 4
        assert_same_bits(checkpoints.restore(abstract(big_state(4, 8)))[0], big_state(4, 8))


def test_rewind_cuts_what_came_after_the_step(tmp_path):
    rows = [json.dumps({"step": step, "time": 1.5, "loss": None}) for step in (1, 2, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 2, "lo')
    (tmp_path / "completions").mkdir()
    for step in (2, 3, 10):
        (tmp_path / "completions" / f"step_{step:06d}.parquet").write_text("")
    rewind(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(row + "\n" for row in rows[:3])
    assert [path.name for path in (tmp_path / "completions").iterdir()] == ["step_000002.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["completions", "metrics.jsonl"]
    rewind(tmp_path, 0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_rewind_of_an_empty_directory_and_of_a_broken_file(tmp_path):
    rewind(tmp_path, 0)
    assert not list(tmp_path.iterdir())
    text = '{"step": 1}\nnonsense\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1: no row of metrics"):
        rewind(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == text
