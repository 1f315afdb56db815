"""Several processes on this machine make the run of one; what cannot start, fails or disagrees ends with a message.

Processes have 2 CPU devices each and gloo between them; this session, with some of its 8 devices, is the one process.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import distributed_rows
import distributed_runs
import jax
import numpy as np
import pyarrow.parquet
import pytest
import run_processes
import tiny_run

from jaxrl_lm import GRPOConfig, cli, distributed, launch, placement, prepare, train
from jaxrl_lm.checkpoint import Checkpoints
from jaxrl_lm.options import to_toml
from jaxrl_lm.report import Reporter, load_metrics
from jaxrl_lm.sharding import Plan, make_mesh

TIMEOUT = 240  # seconds, of processes that end by themselves much earlier
SMALL = {
    "mesh": {"fsdp": 2, "tensor": 2},  # fsdp lies between the processes
    "eval_dataset": {},
    "eval_steps": 0,
    "probe_prompts": 0,
    "prompt_buckets": (16,),
    "beta": 0.0,
    "num_iterations": 1,
    "minibatch_completions": None,
    "max_steps": 6,
    "save_total_limit": 6,
}
UNEQUAL = ("time", "step_time", "tokens_per_second")  # metrics of the clock


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    directory = tmp_path_factory.mktemp("xla")
    with tiny_run.compile_cache(directory):
        yield directory


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    tiny_run.write_rows(directory / "held.jsonl", distributed_runs.sums(8, 2))
    return distributed_runs.save(directory)


@pytest.fixture(scope="module")
def options(files):
    return lambda directory, **changes: tiny_run.options(*files, directory, **(SMALL | changes))


def write_config(path, options):
    path.write_text(to_toml(GRPOConfig(**options)))
    return ["grpo", "--config", str(path)]


def metrics(directory):
    rows = load_metrics(directory / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(UNEQUAL)} for row in rows]


def table(directory, step):
    return pyarrow.parquet.read_table(directory / "completions" / f"step_{step:06d}.parquet").to_pylist()


# What is a difference of two nearly equal numbers has an absolute error that float32 sets: log-probs of tokens are sums of
# logits of about 10, so that each is rounded by some of their units in the last place, 10 · 2⁻²³ ≈ 1.2e-6, and the gap
# between sampler and scorer, which is nothing but such roundings, by as much. Losses are sums of advantages that cancel.
ROUNDING = {"sampling/logp_difference": 8 * 10 * float(np.finfo(np.float32).eps)}
CANCELLED = 1e-6


def assert_close(found, expected):
    """Within 1e-5 relative, or where numbers have cancelled within the rounding of what they were made of."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            least = ROUNDING.get(name.rpartition("/")[0], CANCELLED)
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=least, nan_ok=True), (one["step"], name)


@contextlib.contextmanager
def first_devices(count):
    """Plans are made on the session's first devices meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (prepare, placement):
            patch.setattr(module, "build_plan", lambda mesh, **_: Plan(make_mesh(mesh, devices=jax.devices()[:count])))
        yield


@pytest.fixture(scope="module")
def on_devices(options):
    """A run of this session on its first devices."""

    def run(count, directory, **changes):
        with first_devices(count):
            return tiny_run.run(options(directory, **changes))

    return run


@pytest.fixture(scope="module")
def pair(options, cache, tmp_path_factory):
    """Two steps of two processes, of which one gets SIGTERM in the second: the run directory and how they ended."""
    base = tmp_path_factory.mktemp("pair")
    command = write_config(base / "run.toml", options(base / "run"))
    given = {"devices": 2, "cache": cache, "kill": (1, 2, "SIGTERM"), "timeout": TIMEOUT}
    return base / "run", run_processes.together(command, processes=2, **given)


@pytest.fixture(scope="module")
def killed(pair, options, cache, tmp_path_factory):
    """The same run goes on in two processes, of which one is killed in step 4, when the checkpoint of step 3 is written."""
    base = tmp_path_factory.mktemp("killed")
    shutil.copytree(pair[0], base / "run")
    command = [*write_config(base / "run.toml", options(base / "run")), "--heartbeat_timeout", "10"]
    kill = (1, 2, "SIGKILL", base / "run" / "checkpoints" / "3")
    given = {"devices": 2, "cache": cache, "kill": kill, "timeout": TIMEOUT}
    return base / "run", run_processes.together(command, processes=2, **given)


# --- the same numbers -------------------------------------------------------------------------------------------------


def test_two_processes_sample_the_tokens_and_log_the_metrics_of_one(pair, on_devices, tmp_path):
    directory, ended = pair
    assert [one.code for one in ended] == [0, 0], ended
    on_devices(4, tmp_path / "run", max_steps=2)
    for step in (1, 2):
        found, expected = table(directory, step), table(tmp_path / "run", step)
        assert len(found) == 16
        for name in ("prompt", "completion", "digits", "shortness", "plus", "truncated", "policy_step"):
            assert [row[name] for row in found] == [row[name] for row in expected], name
        advantages = [[row["advantage"] for row in rows] for rows in (found, expected)]
        np.testing.assert_allclose(*advantages, rtol=1e-5, atol=1e-7)
    assert any(row["grad_norm"] > 0 for row in metrics(directory))
    assert_close(metrics(directory), metrics(tmp_path / "run"))


def test_each_process_judges_its_own_rows_and_one_of_them_writes(pair):
    directory, ended = pair
    for one in ended:
        assert [line for line in one.errors.splitlines() if line.startswith("judged")] == ["judged 8", "judged 8"]
    assert "step 2/6" in ended[0].output
    assert f"{directory}: step 2" in ended[0].output
    assert "step" not in ended[1].output
    assert [row["step"] for row in metrics(directory)] == [1, 2]
    saved = tomllib.loads(
        (directory / "config.toml").read_text()
    )  # how processes found each other is no part of the run
    assert not {"coordinator_address", "num_processes", "process_id"} & saved.keys()
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [1, 2]


def test_sigterm_to_one_process_ends_both_with_a_checkpoint(pair):
    """Exit codes are asserted above; `killed` goes on from here."""
    directory, ended = pair
    assert "a signal to another process: saved step 2; the same command goes on from there" in ended[0].output
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest() == 2


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_killed_process_ends_the_other_and_leaves_the_checkpoint(killed):
    directory, (survivor, victim) = killed
    assert victim.code == -9
    assert survivor.code not in (0, None)  # not killed by the test: it ended by itself
    assert "resumed from step 2" in survivor.output
    told = ("stopped sending heartbeats", "another process has ended")
    assert any(text in survivor.errors for text in told), survivor.errors
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest() == 3


MESHES = {1: {}, 2: {"fsdp": 2}, 8: {"data": 2, "fsdp": 2, "tensor": 2}}


def test_a_run_of_two_processes_goes_on_in_one_with_1_2_and_8_devices(killed, on_devices, tmp_path):
    steps, completions = {}, {}
    for devices, mesh in MESHES.items():
        directory = tmp_path / str(devices)
        shutil.copytree(killed[0], directory)
        run, printed = on_devices(devices, directory, mesh=mesh, max_steps=4)
        assert "resumed from step 3" in printed
        assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(run.state)} == {devices}
        assert [row["step"] for row in metrics(directory)] == [1, 2, 3, 4]
        assert_close(metrics(directory)[:3], metrics(killed[0])[:3])
        steps[devices] = metrics(directory)[3:]
        completions[devices] = [row["completion"] for row in table(directory, 4)]
    for devices in (2, 8):
        assert completions[devices] == completions[1], devices
        assert_close(steps[devices], steps[1])


@pytest.fixture(scope="module")
def checked(files, cache, tmp_path_factory):
    """What two processes of distributed_checks.py wrote, and how they ended: process 1 fails while process 0 waits."""
    address, output = f"127.0.0.1:{run_processes.free_port()}", tmp_path_factory.mktemp("checked")
    distributed_rows.save(output / "rows.json")
    commands = [[address, str(process), str(Path(files[0]).parent), str(output)] for process in (0, 1)]
    started = run_processes.start_script("distributed_checks.py", commands, cache=cache)
    return output, run_processes.finish(started, TIMEOUT)


def test_processes_share_arrays_words_and_errors_and_end_together(checked):
    """The checks themselves are those of distributed_checks.py."""
    output, (first, second) = checked
    for one in (first, second):
        assert "all checks passed" in one.output, one.errors
        assert "all runs ended" in one.output, one.errors
    assert second.code == 2
    assert "checks: process 1: error: a row that only process 1 has" in second.errors
    assert first.code == 1
    assert "a row that only process 1 has" in first.errors
    assert not (output / "never").exists()


def test_other_kinds_of_runs_log_the_metrics_of_one_process(checked, files, tmp_path):
    """Demonstrations, pairs, an ensemble of reward models; a reward model and rewards of steps in a run, an evaluation."""
    with first_devices(4):
        distributed_runs.make(Path(files[0]).parent, tmp_path)
    for kind in distributed_runs.NAMES:
        found, expected = metrics(checked[0] / kind), metrics(tmp_path / kind)
        assert any(row.get("grad_norm", 0.0) > 0 for row in expected), kind
        assert_close(found, expected)
    for kind in ("steps", "prm"):
        assert [row["completion"] for row in table(checked[0] / kind, 1)] == [
            row["completion"] for row in table(tmp_path / kind, 1)
        ]
        assert metrics(tmp_path / kind)[0]["steps/mean_count"] > 0
    found, expected = (json.loads((base / "eval" / "metrics.json").read_text()) for base in (checked[0], tmp_path))
    assert found == pytest.approx(expected, rel=1e-5, abs=CANCELLED)


@pytest.mark.parametrize("kind", distributed_runs.APART)
def test_generation_on_devices_of_its_own_is_the_run_of_one_process(checked, files, tmp_path, monkeypatch, kind):
    """With the same meshes. What the two processes go on from is checked by them."""
    monkeypatch.setattr(placement, "jax", SimpleNamespace(**vars(jax) | {"devices": lambda: jax.devices()[:4]}))
    train(distributed_runs.apart(Path(files[0]).parent, tmp_path, kind))
    found, expected = metrics(checked[0] / kind), metrics(tmp_path / kind)
    assert [row["step"] for row in found] == ([0, 1] if kind == "whole" else [1])
    assert expected[-1]["grad_norm"] > 0
    assert expected[-1]["kl"] > 0
    assert_close(found, expected)
    rows, others = table(checked[0] / kind, 1), table(tmp_path / kind, 1)
    assert [row["completion"] for row in rows] == [row["completion"] for row in others]


# --- the start --------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch):
    """An environment without a cluster."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "KUBERNETES_", "JOB_COMPLETION", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_coordinator_that_is_not_there_is_named_within_the_timeout(alone, options, tmp_path, capsys):
    address = f"127.0.0.1:{run_processes.free_port()}"
    command = write_config(tmp_path / "run.toml", options(tmp_path / "run"))
    began = time.monotonic()
    command += ["--coordinator_address", address, "--num_processes", "2", "--process_id", "1", "--start_timeout", "1"]
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    assert end.value.code == 2
    assert 0.9 < time.monotonic() - began < 30
    message = capsys.readouterr().err
    assert f"the coordinator at {address} could not be reached within start_timeout=1 seconds" in message
    assert not (tmp_path / "run").exists()
    assert not jax.distributed.is_initialized()


def test_a_coordinator_that_comes_late_is_waited_for():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    cluster = launch.Cluster(f"127.0.0.1:{listener.getsockname()[1]}", 2, 1)
    threading.Timer(0.5, listener.listen).start()
    began = time.monotonic()
    launch._reach(cluster, 20)
    assert 0.4 < time.monotonic() - began < 15
    listener.close()


def find(*given):
    return launch.find_cluster(*given, start_timeout=1)


def test_a_cluster_is_found_by_options_and_by_the_environment(alone):
    assert find(None, None, None) is None
    assert find("host:1", 2, 1) == launch.Cluster("host:1", 2, 1)
    alone.setenv("PMI_SIZE", "4")
    alone.setenv("PMI_RANK", "3")
    assert find(None, None, None) is None  # nobody says where the first process is
    assert find("host:1", None, None) == launch.Cluster("host:1", 4, 3)
    alone.setenv("JAX_COORDINATOR_ADDRESS", "other:2")
    assert find(None, None, None) == launch.Cluster("other:2", 4, 3)
    alone.delenv("JAX_COORDINATOR_ADDRESS")
    slurm = {"JOB_ID": "4097", "STEP_NODELIST": "node[007-009]", "NTASKS": "3", "PROCID": "2", "LOCALID": "0"}
    for name, value in slurm.items():
        alone.setenv(f"SLURM_{name}", value)
    found = find(None, None, None)
    assert (found.coordinator_address, found.num_processes, found.process_id) == ("node007:61441", 3, 2)
    assert find(None, 1, None) is None  # asked to run alone
    assert find("host:1", 5, 4)[:3] == ("host:1", 5, 4)  # options win
    alone.setenv("SLURM_NTASKS", "1")
    assert find(None, None, None) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host:1", None, None), "num_processes, process_id: not given, and not found"),
        ((None, 2, 0), "coordinator_address: not given"),
        (("host:1", 2, None), "process_id: not given"),
    ],
)
def test_incomplete_settings_are_refused(alone, given, message):
    with pytest.raises(ValueError, match=message):
        find(*given)


def test_a_pod_of_an_indexed_job_does_not_run_alone_in_silence(alone):
    alone.setenv("JOB_COMPLETION_INDEX", "1")
    with pytest.raises(ValueError, match=r"package kubernetes.*num_processes=1 runs alone"):
        find(None, None, None)
    assert find(None, 1, None) is None


def test_processes_of_open_mpi_5_need_an_address_and_nothing_else(alone):
    for name, value in {"SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        alone.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(ValueError, match=r"give coordinator_address; num_processes=1 runs alone"):
        find(None, None, None)
    with pytest.raises(ValueError, match="coordinator_address: not given"):
        find(None, 4, 3)
    assert find("host:1", None, None) == launch.Cluster("host:1", 4, 3)
    assert find(None, 1, None) is None


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (("host", 2, 0), "coordinator_address='host': give host:port"),
        ((":80", 2, 0), "give host:port"),
        (("host:x", 2, 0), "give host:port"),
        (("host:1", 0, 0), "num_processes=0: must be at least 1"),
        (("host:1", 2, 2), "process_id=2: must be from 0 to 1"),
        (("host:1", 2, -1), "process_id=-1"),
    ],
)
def test_impossible_settings_are_refused(cluster, message):
    with pytest.raises(ValueError, match=message):
        launch.check_cluster(launch.Cluster(*cluster))


@pytest.mark.parametrize("name", ["start_timeout", "heartbeat_timeout"])
def test_times_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1 second"):
        launch.start(**{name: 0})


def test_options_of_processes_that_nobody_started_are_refused(options, tmp_path):
    for given in ({"num_processes": 2}, {"coordinator_address": "host:1"}):
        with pytest.raises(ValueError, match=r"the run has 1 process.*jaxrl_lm\.launch\.start"):
            prepare.prepare(GRPOConfig(**options(tmp_path / "run", **given)))


def test_a_command_of_one_process_refuses_several(files, capsys):
    command = ["generate", "--model", files[0], "--prompt", "1+1=", "--num_processes", "2"]
    with pytest.raises(SystemExit):
        cli.main(command)
    assert "generate runs in one process" in capsys.readouterr().err


# --- one process ------------------------------------------------------------------------------------------------------


def test_alone_everything_is_the_plain_thing(tmp_path):
    assert not distributed.several()
    assert distributed.writes()
    assert launch.start(num_processes=1) == 1
    assert distributed.share(5) == range(5)
    assert distributed.gather_objects({"a": 1}) == [{"a": 1}]
    assert distributed.agree(object) is object
    assert distributed.any_of(True)
    assert not distributed.any_of(False)
    with pytest.raises(KeyError):  # an error is the function's own, whatever its kind
        distributed.spread(2, lambda rows: {}[0])
    with pytest.raises(OSError, match="full"):
        distributed.first_only(lambda: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(ValueError, match="out"), launch.ending_together():
        raise ValueError("out")
    distributed.check_shared(tmp_path)
    with pytest.raises(ValueError, match="file system that all hosts share"):
        distributed.check_shared(tmp_path / "absent")


def test_a_reporter_of_another_process_writes_nothing(tmp_path, capsys):
    with Reporter(tmp_path / "run", total_steps=1, report_to=("tensorboard",), writes=False) as report:
        report.message("hello")
        report.log(1, {"loss": 1.0})
        report.completions(1, [{"prompt": "a", "completion": "b", "turn_ids": [0], "policy_step": [0]}])
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""
