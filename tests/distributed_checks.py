"""What each of two processes checks of `jaxrl_lm.distributed`, and how one that fails takes the other along.

python tests/distributed_checks.py ADDRESS PROCESS FILES OUTPUT_DIR
"""

import json
import sys
from pathlib import Path
from unittest import mock

import distributed_rows
import distributed_runs
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_lm import GRPOConfig, distributed, launch
from jaxrl_lm.checkpoint import Checkpoints
from jaxrl_lm.loop import _start, train
from jaxrl_lm.prepare import prepare
from jaxrl_lm.sharding import Plan, make_mesh, move


class RowError(ValueError):
    pass


def error_of(function):
    try:
        function()
    except (ValueError, OSError) as error:
        return error
    raise AssertionError("nothing was raised")


def check_arrays(me):
    plan, x = Plan(make_mesh({"fsdp": 2, "tensor": 2})), np.arange(24, dtype=np.float32).reshape(8, 3)
    placed = distributed.place(x, plan.rows)
    mine = sorted({(shard.index[0].start or 0, shard.data.shape) for shard in placed.addressable_shards})
    assert mine == [(4 * me, (4, 3))], mine  # half of the rows, whole on the two devices of this process
    assert not placed.is_fully_addressable
    whole = distributed.gather({"rows": placed, "local": jax.numpy.ones(2), "host": x, "none": None})
    np.testing.assert_array_equal(whole["rows"], x)
    np.testing.assert_array_equal(whole["local"], [1.0, 1.0])
    assert whole["host"] is x
    assert whole["none"] is None
    for value in (np.float32(0.5), jax.numpy.arange(3), placed):
        everywhere = distributed.place(value, plan.replicated)
        np.testing.assert_array_equal(distributed.gather(everywhere), distributed.gather(value))
    keys = distributed.place(jax.random.split(jax.random.key(7), 4), plan.rows)
    np.testing.assert_array_equal(
        distributed.gather(jax.random.key_data(keys)), jax.random.key_data(jax.random.split(jax.random.key(7), 4))
    )


def check_arrays_apart(me):
    """Arrays on devices of one process alone: what is not there is known all the same, to the last bit."""
    first, second = jax.devices()[:2], jax.devices()[2:]
    one, other = Plan(make_mesh({"fsdp": 2}, devices=first)), Plan(make_mesh({"tensor": 2}, devices=second))
    bits = np.arange(24, dtype=np.uint32).reshape(8, 3) * 0x9E3779B1
    bits[0] = 0x7FC12345, 0x80000000, 0xFF800000  # a NaN with a message, minus zero, minus infinity
    values = [bits.view(np.float32), bits, bits % 2 == 0, bits.view(jnp.bfloat16), bits.view(np.int8), np.float32(-0.0)]
    rows = [x.reshape(8, -1) if np.ndim(x) else x for x in values]
    placed = [distributed.place(x, one.rows if np.ndim(x) else one.replicated) for x in rows]
    layouts = [other.sharding(("mlp", None), x.shape) if np.ndim(x) else other.replicated for x in rows]
    moved = move(placed, layouts)
    assert [len(x.addressable_shards) for x in placed] == [(2, 0)[me]] * len(rows)
    assert [len(x.addressable_shards) for x in moved] == [(0, 2)[me]] * len(rows)
    for x, near, far, layout in zip(rows, placed, moved, layouts, strict=True):
        assert far.sharding == layout
        assert far.dtype == x.dtype
        for shard in far.addressable_shards:
            assert np.asarray(shard.data).tobytes() == x[shard.index].tobytes(), x.dtype
        for found in distributed.gather({"one": near, "other": [far]}), {"one": x, "other": [distributed.gather(far)]}:
            assert found["one"].dtype == found["other"][0].dtype == x.dtype
            assert found["one"].shape == found["other"][0].shape == x.shape
            assert found["one"].tobytes() == found["other"][0].tobytes() == x.tobytes()
    keys = jax.random.split(jax.random.key(7), 4)
    there = move(move(distributed.place(keys, one.rows), other.rows), one.replicated)
    assert there.sharding.is_equivalent_to(one.replicated, 1)
    np.testing.assert_array_equal(distributed.gather(jax.random.key_data(there)), jax.random.key_data(keys))


def check_words(me):
    long = "ü" * (5000 * me)  # messages of different sizes, beyond the smallest
    value = {"process": me, "numbers": [0.1 + me, float("nan"), 1e-308], "text": long}
    found = distributed.gather_objects(value)
    assert [one["process"] for one in found] == [0, 1]
    assert found[1]["text"] == "ü" * 5000
    assert found[1]["numbers"][0] == 1.1
    assert np.isnan(found[0]["numbers"][1])
    assert distributed.agree(me) == 0
    assert distributed.any_of(me == 1)
    assert not distributed.any_of(False)
    assert distributed.share(5) == (range(0, 2), range(2, 5))[me]
    assert distributed.share(1) == (range(0, 0), range(0, 1))[me]
    assert distributed.spread(5, lambda rows: [row * row for row in rows]) == [0, 1, 4, 9, 16]
    calls = []
    distributed.first_only(lambda: calls.append(1))
    assert len(calls) == (1, 0)[me] == (1 if distributed.writes() else 0)


def check_rounds(me):
    """More than a message may hold, and nothing at all."""
    small = mock.patch.object(distributed, "_LARGEST", 1 << 12)  # 2048 bytes of each process
    with (
        small,
        mock.patch.object(multihost_utils, "process_allgather", wraps=multihost_utils.process_allgather) as told,
    ):
        for sizes in ((0, 0), (1, 0), (2048, 2049), (4096, 5000)):
            made = [np.random.default_rng(index).bytes(size) for index, size in enumerate(sizes)]
            assert distributed.gather_bytes(made[me]) == made, sizes
        messages = [call.args[0] for call in told.call_args_list]
        assert [len(one) for one in messages if one.dtype == np.uint8] == [1024, 2048, 1024, 2048, 2048, 1024]
        for name in ("chats", "outcomes"):
            found, _ = distributed_rows.encode(distributed_rows.CASES[name])
            with mock.patch.object(distributed, "_LARGEST", 1 << 26):
                assert distributed_rows.encode(distributed_rows.CASES[name])[0] == found, name
    rows = distributed_rows.PLAIN
    for own, message in (
        (rows[: 3 + me], "data: processes 1 have number of rows = 4, and process 0 has 3: start every process"),
        (distributed_rows.changed(rows, row_2={"number": me}), "data: processes 1 have digest of rows = "),
    ):
        assert distributed_rows.encode((distributed_rows.encode_prompts, own, distributed_rows.prompts))[0].startswith(
            message
        )


def check_rows(me, expected):
    """Examples and errors are those of one process, and each tokenises its own rows."""
    assert expected.keys() == distributed_rows.CASES.keys() | distributed_rows.ERRORS.keys()
    for name, case in (distributed_rows.CASES | distributed_rows.ERRORS).items():
        found, texts = distributed_rows.encode(case)
        assert found == expected[name][0], (name, found, expected[name][0])
        first, second = distributed.gather_objects(texts)
        if name in distributed_rows.ERRORS:
            assert name in found, found
            continue
        if name == "steps":  # the separator
            assert first[:1] == second[:1] == [";"]
            second = second[1:]
        assert first + second == expected[name][1], name
        assert second
        assert first or name == "one prompt", name


def check_errors(me):
    def fails(rows):
        if 3 in rows:
            raise RowError("row 3 is bad")
        return list(rows)

    error = error_of(lambda: distributed.spread(4, fails, raises=RowError))
    assert type(error) is RowError, error
    assert str(error) == "process 1: row 3 is bad", error

    def full():
        raise OSError("disk full")

    assert "disk full" in str(error_of(lambda: distributed.first_only(full)))
    error = error_of(lambda: distributed.check_same({"a": "1", "b": str(me)}, what="facts"))
    assert str(error).startswith("facts: processes 1 have b = 1, and process 0 has 0"), error


def check_apart(files, output, kind, me):
    """A run with generation on devices of its own: who has which parts of the state, and what it would go on from."""
    config = distributed_runs.apart(files, output, kind)
    state = train(config).state
    parts = {len(leaf.addressable_shards) for leaf in jax.tree.leaves(state)}
    assert parts == {{"whole": (2, 0), "divided": (2, 1)}[kind][me]}, parts
    with Checkpoints(Path(config.output_dir) / "checkpoints") as checkpoints:
        _, host, found, _, done, _ = _start(prepare(config), checkpoints)
    assert (done, host.updates) == (1, 2)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        one, other = (
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (one, other)
        )
        np.testing.assert_array_equal(*distributed.gather((one, other)))


def main(address, process, files, output_dir):
    jax.config.update("jax_num_cpu_devices", 2)
    me = int(process)
    launch.start(coordinator_address=address, num_processes=2, process_id=me, start_timeout=100, heartbeat_timeout=100)
    with launch.ending_together("checks"):
        check_arrays(me)
        check_arrays_apart(me)
        check_words(me)
        check_errors(me)
        check_rounds(me)
        check_rows(me, json.loads(Path(output_dir, "rows.json").read_text()))
        options = {"model": f"{files}/tiny", "dataset": f"{files}/train.jsonl", "reward": ("arithmetic",)}
        options["output_dir"] = f"{output_dir}/never"
        error = error_of(lambda: prepare(GRPOConfig(**options, learning_rate=(1e-3, 5e-1)[me])))
        assert "processes 1 have learning_rate = 0.5, and process 0 has 0.001" in str(error), error
        print("all checks passed", flush=True)
        distributed_runs.make(Path(files), Path(output_dir))
        for kind in distributed_runs.APART:
            check_apart(Path(files), Path(output_dir), kind, me)
        print("all runs ended", flush=True)
        if me == 1:
            raise ValueError("a row that only process 1 has")
        distributed.agree(None)  # process 1 never comes


if __name__ == "__main__":
    main(*sys.argv[1:])
