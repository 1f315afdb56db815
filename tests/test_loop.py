"""Whole runs of a tiny model: what they write, what they compile, and what stops, kills and failures leave."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny_run

from jaxrl_lm import GRPOConfig, learn, loop
from jaxrl_lm.checkpoint import Checkpoints
from jaxrl_lm.data import batch_indices
from jaxrl_lm.inference import restore_policy
from jaxrl_lm.options import ConfigError, to_toml
from jaxrl_lm.prepare import build_plan, prepare
from jaxrl_lm.rewards import RewardError

pytestmark = pytest.mark.usefixtures("cached")

CLOCKS = ("time", "step_time", "tokens_per_second")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_run.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def options(model, data, tmp_path):
    """Options of the run of five steps, with changes."""
    return lambda **changes: tiny_run.options(model, data, tmp_path / "run", **changes)


class Straight:
    """The run of ten steps without an interruption, and what was compiled in each of them."""

    def __init__(self, options):
        self.compiled, self.steps = [], []  # names in order; the length of the list after each step
        step = loop._step

        def counted(*arguments):
            out = step(*arguments)
            self.steps.append(len(self.compiled))
            return out

        def listen(event, seconds, *, fun_name="", **_):
            if event == "/jax/core/compile/backend_compile_duration":
                self.compiled.append(fun_name)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loop, "_step", counted)
                self.run, self.printed = tiny_run.run(options)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        self.directory = self.run.directory
        self.setup = prepare(GRPOConfig(**options))

    def state(self, directory, step):
        """What a run's checkpoint of a step holds."""
        with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
            return checkpoints.restore(self.setup.steps.abstract_state, step=step)[0]


@pytest.fixture(scope="module")
def straight(model, data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("straight") / "run"
    jax.clear_caches()  # compilations are counted, and another file of this process may have made the same ones
    return Straight(tiny_run.options(model, data, directory, max_steps=10, save_steps=5))


def rows(directory):
    """The rows of metrics.jsonl without the measured times, and without the evaluation that a shorter run ends with."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    left_out = lambda row: CLOCKS if row["step"] % 5 == 0 else (*CLOCKS, "eval")
    return [{name: value for name, value in row.items() if name.split("/")[0] not in left_out(row)} for row in lines]


def table(directory, step):
    return pq.read_table(directory / "completions" / f"step_{step:06d}.parquet").to_pylist()


def assert_equals_straight(directory, straight, state, steps=5):
    """Metrics, completions, evaluations and the whole state after some steps, bit for bit."""
    assert rows(directory) == rows(straight.directory)[: steps + 1]
    assert len(list((directory / "completions").iterdir())) == steps
    for step in range(1, steps + 1):
        assert table(directory, step) == table(straight.directory, step)
    for name in ("test/step_000000.jsonl", "ood/step_000000.jsonl", "test/step_000005.jsonl", "ood/step_000005.jsonl"):
        if int(name[-12:-6]) <= steps:
            assert (directory / "eval" / name).read_text() == (straight.directory / "eval" / name).read_text()
    if steps == 5:
        expected = tiny_run.bits(straight.state(straight.directory, 5))
        assert tiny_run.bits(state) == expected
        assert tiny_run.bits(straight.state(directory, 5)) == expected


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_writes_its_directory(straight):
    run, directory = straight.run, straight.directory
    assert (run.step, run.stopped, int(run.state.step)) == (10, None, 40)  # four updates a step
    digits = [row["rewards/digits/mean"] for row in run.metrics]
    assert np.mean(digits[5:]) > np.mean(digits[:5]) + 0.05
    assert sorted(path.name for path in directory.iterdir()) == [
        "checkpoints",
        "completions",
        "config.toml",
        "eval",
        "metrics.jsonl",
        "probe.json",
    ]
    assert (directory / "config.toml").read_text() == to_toml(straight.setup.config)
    logged = rows(directory)
    assert [row["step"] for row in logged] == list(range(11))
    assert [row["step"] for row in logged if "eval/test/pass@1" in row] == [0, 5, 10]
    assert [row["step"] for row in logged if "eval/ood/greedy_accuracy" in row] == [0, 5, 10]
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [5, 10]
    assert tiny_run.bits(straight.state(directory, 10)) == tiny_run.bits(run.state)
    assert "2 declared prompt bucket(s) [8, 16] + 8 new tokens" in straight.printed
    assert "16 training prompts, mesh {'data': 2, 'fsdp': 2, 'sequence': 1, 'tensor': 2}" in straight.printed
    probe = json.loads((directory / "probe.json").read_text())
    assert (probe["prompts"], probe["num_generations"]) == (8, 4)
    assert f"probe of 8 training prompts: pass@1 {probe['pass@1']:.3f}" in straight.printed


def test_metrics_have_their_names_and_are_those_of_the_completions(straight):
    parts = ("weights", "generate", "reward", "score", "update")
    names = {
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        *(f"rewards/{name}/{what}" for name in ("digits", "shortness", "plus") for what in ("mean", "std")),
        "reward_gap",
        "kl",
        "entropy",
        *(f"clip_ratio/{side}_mean" for side in ("low", "high", "region")),
        *(f"completions/{name}" for name in ("mean_length", "min_length", "max_length", "mean_terminated_length")),
        "completions/clipped_ratio",
        *(f"sampling/logp_difference/{what}" for what in ("mean", "max")),
        *(f"sampling/importance_ratio/{what}" for what in ("min", "mean", "max")),
        "grad_norm",
        "learning_rate",
        "loss",
        "num_tokens",
        *(f"tokens_per_second/{name}" for name in ("generate", "train")),
        "step_time",
        *(f"time/{name}" for name in (*parts, "checkpoint")),
    }
    total = 0
    for values in straight.run.metrics:
        assert not names - values.keys()
        completions = table(straight.directory, values["step"])
        lengths = np.array([len(row["turn_ids"]) for row in completions])
        assert values["completions/mean_length"] == lengths.mean()
        assert values["completions/clipped_ratio"] == np.mean([row["truncated"] for row in completions])
        for name in ("digits", "plus"):
            assert values[f"rewards/{name}/mean"] == pytest.approx(np.mean([row[name] for row in completions]))
        total += lengths.sum() + sum(len(row["prompt"]) for row in completions)  # a token a character
        assert values["num_tokens"] == total
        assert values["sampling/logp_difference/max"] < 1e-5
        assert values["learning_rate"] == pytest.approx(1e-2)
        assert values["step_time"] == pytest.approx(sum(values[f"time/{name}"] for name in parts))


def test_returns_and_advantages_are_the_weighted_rewards_of_the_table(straight):
    """Weights 1, ½ and 0; `shortness` is async and abstains on odd answers."""
    abstained = []
    for values in straight.run.metrics:
        completions = table(straight.directory, values["step"])
        returns = []
        for row in completions:
            abstained.append(row["shortness"] is None)
            assert row["digits"] == pytest.approx(sum(c.isdigit() for c in row["completion"]) / 12)
            returns.append(row["digits"] + (0.0 if row["shortness"] is None else 0.5 * row["shortness"]))
        assert values["reward"] == pytest.approx(np.mean(returns))
        assert values["reward_gap"] == pytest.approx(np.mean(returns) - np.mean([row["plus"] for row in completions]))
        for start in range(0, 16, 4):
            group = np.array(returns[start : start + 4])
            assert len({row["prompt"] for row in completions[start : start + 4]}) == 1
            expected = (group - group.mean()) / (group.std(ddof=1) + 1e-6) if np.ptp(group) else np.zeros(4)
            got = [row["advantage"] for row in completions[start : start + 4]]
            np.testing.assert_allclose(got, expected, atol=1e-4)
    assert 0.2 < np.mean(abstained) < 0.8


def test_completion_tables_name_the_turn_and_the_weights_that_sampled(straight):
    for step in range(1, 11):
        for row in table(straight.directory, step):
            assert row["turn_ids"] == [1] * len(row["turn_ids"])
            assert row["policy_step"] == [4 * (step - 1)] * len(row["turn_ids"])
            assert 1 <= len(row["turn_ids"]) <= 8


def test_prompts_come_in_the_order_of_seed_and_epoch(straight, data):
    prompts = [json.loads(line)["prompt"] for line in Path(data["train"]).read_text().splitlines()]
    for step in range(1, 11):
        order = batch_indices(16, seed=0, position=4 * (step - 1), count=4)
        assert [row["prompt"] for row in table(straight.directory, step)[::4]] == [prompts[i] for i in order]


# --- compilation ------------------------------------------------------------------------------------------------------


def test_each_step_compiles_once_a_bucket_and_evaluation_adds_none(straight):
    lengths = [max(len(row["prompt"]) for row in table(straight.directory, step)) for step in range(1, 11)]
    both = next(n for n, length in enumerate(lengths) if length > 8)
    assert min(lengths) <= 8
    assert 0 < both < 4, "the second bucket must come into use after the first step and before the evaluation at step 5"
    counts = Counter(straight.compiled)
    by_bucket = ("generate", "update", "minibatch_rows", "score_rows", "credit_rows")
    buckets = {name: counts[f"jit({name})"] for name in by_bucket}
    assert buckets == dict.fromkeys(buckets, 2)
    once = {name: counts[f"jit({name})"] for name in ("start", "lay_out", "row_keys")}
    assert once == dict.fromkeys(once, 1)
    # After the first step only what takes the second bucket is compiled, then nothing but Orbax's slices of the shards
    # that the first checkpoint (after step 5) writes.
    later = straight.compiled[straight.steps[0] : straight.steps[both]]
    assert sorted(set(later)) == sorted(f"jit({name})" for name in buckets)
    assert straight.steps[both] == straight.steps[4]
    assert set(straight.compiled[straight.steps[4] : straight.steps[5]]) <= {"jit(slice)"}
    assert straight.steps[5] == len(straight.compiled)


# --- stopping and going on --------------------------------------------------------------------------------------------


def test_three_steps_then_two_more_equal_five(straight, options):
    first, printed = tiny_run.run(options(max_steps=3))
    directory = first.directory
    assert first.step == 3
    assert "resumed" not in printed
    assert_equals_straight(directory, straight, first.state, steps=3)

    second, printed = tiny_run.run(options())
    assert "resumed from step 3" in printed
    assert "resumed with max_steps: 3 -> 5" in printed
    assert [row["step"] for row in second.metrics] == [4, 5]
    assert_equals_straight(directory, straight, second.state)

    third, printed = tiny_run.run(options())  # nothing is left to do
    assert (third.step, third.metrics) == (5, [])
    assert_equals_straight(directory, straight, third.state)


class Killed(NamedTuple):
    """What is left of a process that ended with SIGKILL."""

    directory: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def killed(straight, model, data, tmp_path_factory):
    """Two processes with two runs each: terminated at step 2 and killed before its first commit; a full disk at step 2,
    gone on with and killed while the checkpoint of step 3 was written.

    The seventh call of the reward is that of step 2: two are the probe's, three those of the evaluations.
    """
    base = tmp_path_factory.mktemp("killed")
    config = base / "grpo.toml"
    config.write_text(to_toml(GRPOConfig(**tiny_run.options(model, data, "elsewhere", max_steps=50))))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tiny_run.REPOSITORY), os.environ.get("PYTHONPATH")])),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, tiny_run.__file__, str(config), "7"]
    processes = [
        subprocess.Popen(command + names, env=environment, **pipes) for names in (["terminated", "new"], ["full"])
    ]
    try:
        found = [(*process.communicate(timeout=400), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for _, stderr, code in found:
        assert code == -signal.SIGKILL, stderr
    terminated, full = ((stdout, stderr) for stdout, stderr, _ in found)
    outputs = {"terminated": terminated, "new": terminated, "full": full}
    return {name: Killed(base / name, *output) for name, output in outputs.items()}


def test_a_full_disk_and_sigkill_while_a_checkpoint_is_written(killed, straight, model, data):
    directory, stdout, stderr = killed["full"]
    assert "EXIT 2" in stdout
    assert "jaxrl-lm grpo: error: " in stderr
    assert "the checkpoint of step 2 could not be saved (File too large); the checkpoint of step 1 is whole" in stderr
    assert "resumed from step 1" in stdout
    assert list((directory / "checkpoints").glob("3*"))  # its writing had begun
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        latest = checkpoints.latest()
    assert latest in (2, 3, 4)
    run, printed = tiny_run.run(tiny_run.options(model, data, directory))
    assert f"resumed from step {latest}" in printed
    assert_equals_straight(directory, straight, run.state)


def test_sigkill_before_the_first_commit_restarts_cleanly(killed, straight, model, data):
    directory = killed["new"].directory
    assert [path.name[:2] for path in (directory / "checkpoints").iterdir()] == ["1."]  # begun, and not there
    assert [row["step"] for row in rows(directory)] == [0, 1]
    run, printed = tiny_run.run(tiny_run.options(model, data, directory, max_steps=2))
    assert "resumed" not in printed
    assert_equals_straight(directory, straight, run.state, steps=2)


def test_sigterm_saves_and_exits_with_0_and_options_may_change(killed, straight, model, data):
    directory, stdout, _ = killed["terminated"]
    assert "EXIT 0" in stdout
    assert "SIGTERM: saved step 2; the same command goes on from there" in stdout
    assert [row["step"] for row in rows(directory)] == [0, 1, 2]
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest() == 2
    before = (directory / "config.toml").read_text()
    with pytest.raises(ValueError, match="the training rows are not those that this run was started with"):
        tiny_run.run(tiny_run.options(model, data, directory), dataset=tiny_run.problems("train", 16, seed=1))
    with pytest.raises(ConfigError) as error:
        tiny_run.run(tiny_run.options(model, data, directory, learning_rate=1e-3, save_steps=2))
    assert "learning_rate: 0.01 -> 0.001 (not allowed)" in str(error.value)
    assert "save_steps: 1 -> 2 (allowed)" in str(error.value)
    assert "another output_dir" in str(error.value)
    assert (directory / "config.toml").read_text() == before
    run, printed = tiny_run.run(tiny_run.options(model, data, directory, save_steps=2, logging_steps=3))
    assert "resumed with save_steps: 1 -> 2" in printed
    assert "resumed with logging_steps: 1 -> 3" in printed
    assert "resumed from step 2" in printed
    assert_equals_straight(directory, straight, run.state)


def test_a_checkpoint_of_another_model_is_refused(straight, model, data, tmp_path):
    """The model's directory was overwritten by a narrower one, or another model is named."""
    shutil.copytree(straight.directory, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    aside = shutil.move(model, tmp_path / "aside")
    try:
        tiny_run.save_model(model, hidden_size=16)
        with pytest.raises(ValueError, match="holds another model or optimiser") as error:
            tiny_run.run(tiny_run.options(model, data, tmp_path / "run", max_steps=12))
        assert "params.policy.embed.table: checkpoint float32[24, 32], this run float32[24, 16]" in str(error.value)
    finally:
        shutil.rmtree(model)
        shutil.move(aside, model)
    other = tiny_run.save_model(tmp_path / "other", hidden_size=16)
    with pytest.raises(ConfigError, match=r"model: .* \(not allowed\)"):
        tiny_run.run(tiny_run.options(other, data, tmp_path / "run", max_steps=12))
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_the_best_checkpoint_is_kept_beside_the_last(options):
    changes = {"eval_steps": 1, "save_steps": 0, "save_total_limit": 1, "probe_prompts": 0, "max_steps": 4}
    with pytest.raises(ValueError, match=r"best_metric='eval/test/accuracy' is no metric .* eval/test/pass@1"):
        tiny_run.run(options(best_metric="eval/test/accuracy", **changes))
    metric = "eval/test/entropy"
    run, _ = tiny_run.run(options(best_metric=metric, **changes))
    values = {row["step"]: row[metric] for row in run.metrics}
    best = max(values, key=values.get)
    assert best < 4, values
    with Checkpoints(run.directory / "checkpoints", best_metric=metric, read_only=True) as checkpoints:
        assert checkpoints.steps() == [best, 4]
        assert checkpoints.best() == best
    plan = build_plan({"fsdp": -1})
    policies = [restore_policy(run.directory, plan, **which).params for which in ({"best": True}, {"step": best}, {})]
    assert tiny_run.bits(policies[0]) == tiny_run.bits(policies[1])
    assert tiny_run.bits(policies[2]) == tiny_run.bits(run.state.params["policy"])


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_non_finite_loss_stops_with_the_step_and_keeps_the_batch(options):
    """Three rewards of 3e38 in a group overflow its mean in float32 at step 2."""
    digits = []

    def huge(**columns):
        values = tiny_run.digits(**columns)
        digits.append(0)
        return [3e38 if n % 4 else 0.0 for n in range(len(values))] if len(digits) == 2 else values

    huge.__name__ = "digits"
    changes = {"reward": (), "eval_steps": 0, "probe_prompts": 0, "eval_dataset": {}}
    functions = [huge, tiny_run.shortness, tiny_run.plus]
    with pytest.raises(learn.NonFiniteError) as error:
        tiny_run.run(options(**changes), reward_functions=functions)
    directory = Path(options()["output_dir"])
    path = directory / "nonfinite_step_000002.npz"
    assert str(error.value).startswith("step 2, update 1: the loss or its gradient is not finite")
    assert str(path) in str(error.value)
    with np.load(path) as batch:
        assert batch["tokens"].shape == batch["advantages"].shape
        assert np.isnan(batch["advantages"]).any()
        assert not np.isnan(batch["sampler_logprobs"]).any()
    assert [row["step"] for row in rows(directory)] == [1]
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [1]


def raising(rows):
    raise KeyError("no ground truth")


@pytest.mark.parametrize(
    ("bad", "step", "message"),
    [
        (raising, 2, r"reward 'own' raised KeyError: 'no ground truth' on row 0 \(prompt '"),
        (
            lambda rows: [0.0] * (rows - 1),
            1,
            r"reward 'own' returned 15 values for 16 completions; first row: row 0 \(",
        ),
        (
            lambda rows: [0.0, 0.0, float("nan")] + [0.0] * (rows - 3),
            1,
            r"reward 'own' returned nan for row 2 \(prompt",
        ),
    ],
)
def test_a_bad_reward_stops_the_run_with_its_name_and_row_and_loses_no_step(bad, step, message, options):
    calls = []

    def own(*, completions, **columns):
        calls.append(0)
        return bad(len(completions)) if len(calls) >= step else tiny_run.digits(completions=completions)

    changes = {"reward": (), "reward_weights": (), "true_reward": None, "eval_steps": 0, "probe_prompts": 0}
    with pytest.raises(RewardError, match=message):
        tiny_run.run(options(eval_dataset={}, save_steps=0, **changes), reward_functions=[own])
    directory = Path(options()["output_dir"])
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == list(range(1, step))
    assert [row["step"] for row in rows(directory)] == list(range(1, step))


# --- the algorithm's options ------------------------------------------------------------------------------------------


def test_microbatches_do_not_change_the_result(straight, options):
    quiet = {"eval_steps": 0, "probe_prompts": 0, "eval_dataset": {}}
    run, _ = tiny_run.run(options(microbatch_completions=4, max_steps=2, prompt_buckets=(16,), **quiet))
    for mine, whole in zip(run.metrics, straight.run.metrics[:2], strict=True):
        names = [name for name in mine if name.split("/")[0] not in CLOCKS]
        assert {"loss", "kl", "entropy", "grad_norm", "clip_ratio/region_mean"} < set(names)
        for name in names:
            assert mine[name] == pytest.approx(whole[name], rel=1e-4, abs=2e-5, nan_ok=True), name


def live_tables(shape=(24, 32)):
    """How many float32 arrays have the shape of the embedding table."""
    gc.collect()
    return sum(array.shape == shape and array.dtype == np.float32 for array in jax.live_arrays())


@pytest.mark.parametrize(("beta", "copies"), [(0.0, 4), (0.5, 5)])  # weights, two moments, decoding; a reference
def test_a_reference_is_in_memory_only_where_there_is_a_kl(beta, copies, options):
    """The KL in the reward: where that is 0, at step 2, advantages come from the KL alone."""
    quiet = {"eval_steps": 0, "probe_prompts": 0, "eval_dataset": {}, "reward": (), "prompt_buckets": (16,)}
    single = {"num_iterations": 1, "minibatch_completions": None, "reward_weights": (), "true_reward": None}
    before, seen = live_tables(), []

    def once(**columns):
        seen.append(live_tables() - before)
        return [value if len(seen) == 1 else 0.0 for value in tiny_run.digits(**columns)]

    run, _ = tiny_run.run(
        options(beta=beta, kl_in="reward", scale_rewards="none", max_steps=2, **quiet, **single),
        reward_functions=[once],
    )
    assert seen == [copies, copies]
    advantages = [np.array([row["advantage"] for row in table(run.directory, step)]) for step in (1, 2)]
    assert np.abs(advantages[0]).max() > 1e-2
    if not beta:
        assert "kl" not in run.metrics[0]
        assert not advantages[1].any()
        return
    first, second = (row["kl"] for row in run.metrics)
    assert abs(first) < 1e-5  # the policy is the reference
    assert abs(second) > 1e-3
    # −β times each completion's KL, less the group's mean.
    assert np.abs(advantages[1]).max() > 1e-3
    np.testing.assert_allclose(advantages[1].reshape(4, 4).sum(1), 0.0, atol=1e-5)
