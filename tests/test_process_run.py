"""Runs with rewards of steps: every credit in the group method and in PPO, resumed, cut, chosen from, and failing."""

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny_run

from jaxrl_lm.checkpoint import Checkpoints
from jaxrl_lm.inference import restore_policy
from jaxrl_lm.models import load
from jaxrl_lm.prepare import build_plan
from jaxrl_lm.rewards import RewardError

SMALL = {
    "mesh": {"fsdp": 4, "tensor": 2},
    "prompts_per_step": 4,
    "num_generations": 4,
    "num_iterations": 1,
    "minibatch_completions": None,
    "prompt_buckets": (16,),
    "eval_dataset": {},
    "reward": ("tiny_run:digits",),
    "reward_weights": (),
    "true_reward": None,
    "beta": None,
    "probe_prompts": 0,
    "max_steps": 1,
    "eval_steps": 0,
    "save_steps": 0,
    "step_reward": "test_process_run:signs",
}
SIGNS = {"+": 0.5} | {digit: 1.0 - int(digit) / 10 for digit in "0123456789"}
CALLS = []  # completions of each call of `signs`; a test's way into a running step


def signs(*, completions, answer):
    """Every digit and plus is a step (no token has two of them); rows with odd answers have none."""
    CALLS.append(completions)
    return [signs_of(text) if total % 2 == 0 else None for text, total in zip(completions, answer, strict=True)]


def signs_of(text):
    return [(place + 1, SIGNS[c]) for place, c in enumerate(text) if c in SIGNS]


def beyond(*, completions):
    """Chances that are none, from the second call on."""
    CALLS.append(completions)
    return [[(1, 1.0 + (len(CALLS) > 1))] if text else [] for text in completions]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    with tiny_run.compile_cache(directory / "cache"):
        yield tiny_run.save_model(directory / "model"), tiny_run.write_data(directory)


@pytest.fixture
def run(files, tmp_path):
    """run(name of the config class, **options): the Run."""
    CALLS.clear()

    def call(config="GRPOConfig", *, directory="run", **changes):
        return tiny_run.run(tiny_run.options(*files, tmp_path / directory, **SMALL | changes), config)[0]

    return call


def table(run, step=1):
    return pq.read_table(run.directory / "completions" / f"step_{step:06d}.parquet").to_pylist()


def normal(values, inside=None):
    """Group normalisation over the rows inside, in float64."""
    inside = np.ones(len(values), bool) if inside is None else inside
    out = np.zeros(len(values))
    for group in np.arange(len(values)).reshape(-1, 4):
        rows = group[inside[group]]
        if len(rows) > 1 and np.ptp(values[rows]) > 0:
            out[rows] = (values[rows] - values[rows].mean()) / (values[rows].std(ddof=1) + 1e-6)
    return out


def numbers(run, how):
    """By row: the reward of the outcome, one number of its steps (0 without any), whether it has some."""
    rows = table(run)
    answers = {row["prompt"]: eval(row["prompt"][:-1]) for row in rows}
    steps = [
        [value for _, value in signs_of(row["completion"])] if answers[row["prompt"]] % 2 == 0 else [] for row in rows
    ]
    reduced = np.array([how(values) if values else 0.0 for values in steps])
    return np.array([row["digits"] for row in rows]), reduced, np.array([bool(values) for values in steps])


REDUCE = {"mean": np.mean, "min": np.min, "product": np.prod, "last": lambda x: x[-1]}


@pytest.mark.parametrize("how", ["min", "product"])
def test_a_group_compares_outcomes_and_steps(run, how):
    found = run(step_credit=how, step_weight=0.5, outcome_weight=2.0)
    outcome, steps, some = numbers(found, REDUCE[how])
    assert some.any()
    assert not some.all()
    expected = 2.0 * normal(outcome) + 0.5 * normal(steps, some)
    np.testing.assert_allclose([row["advantage"] for row in table(found)], expected, atol=1e-4)
    (completions,) = CALLS
    assert completions == [row["completion"] for row in table(found)]
    values = found.metrics[0]
    assert values["grad_norm"] > 0
    assert values["steps/mean_reward"] == pytest.approx(
        np.mean([value for text, s in zip(completions, some, strict=True) if s for _, value in signs_of(text)])
    )
    assert {"steps/mean_count", "steps/count_reward_correlation", "steps/wrong_step_share_of_right"} < values.keys()


def test_rloo_adds_the_steps_to_the_return(run):
    found = run("RLOOConfig", num_generations=4, step_credit="mean", step_weight=0.5)
    outcome, steps, _ = numbers(found, np.mean)
    returns = (outcome + 0.5 * steps).reshape(-1, 4)
    expected = returns - (returns.sum(1, keepdims=True) - returns) / 3
    np.testing.assert_allclose([row["advantage"] for row in table(found)], expected.reshape(-1), atol=1e-4)


@pytest.fixture(scope="module")
def plain_ppo(files, tmp_path_factory):
    """The advantages of a step of PPO without rewards of steps, and its completions."""
    changes = SMALL | {"num_generations": 4, "step_reward": None}
    options = tiny_run.options(*files, tmp_path_factory.mktemp("plain") / "run", **changes)
    return table(tiny_run.run(options, "PPOConfig")[0])


@pytest.mark.parametrize(
    ("how", "guard"), [("sum-to-go", {"step_shaping": True, "gamma": 0.9}), ("last", {})], ids=["shaped", "last"]
)
def test_ppo_learns_values_of_outcome_and_steps(run, plain_ppo, how, guard):
    found = run("PPOConfig", num_generations=4, step_credit=how, **guard)
    assert [row["completion"] for row in table(found)] == [row["completion"] for row in plain_ppo]
    values = found.metrics[0]
    assert values["grad_norm"] > 0
    assert np.isfinite(values["value_loss"])
    gap = np.abs(np.subtract([row["advantage"] for row in table(found)], [row["advantage"] for row in plain_ppo]))
    assert gap.max() > 0.01


def test_steps_that_never_apply_change_nothing(run, tmp_path):
    """All answers are odd."""
    rows = [{"prompt": f"{n}+{n + 1}=", "answer": 2 * n + 1, "operands": [n, n + 1]} for n in range(8)]
    path = tiny_run.write_rows(tmp_path / "odd.jsonl", rows)
    found = run(dataset=path)
    plain = run(dataset=path, directory="plain", step_reward=None)
    for mine, theirs in zip(table(found), table(plain), strict=True):
        assert mine == theirs
    assert found.metrics[0]["steps/abstained_share"] == 1.0
    assert np.isnan(found.metrics[0]["steps/mean_count"])


EVERYTHING = {
    "oversample": 2,
    "replay_groups": 1,
    "dynamic_sampling": True,
    "actions": "ngram",
    "ngram": 3,
    "num_iterations": 2,
    "step_normalise": True,
    "reward": ("tiny_run:plus",),
}


def test_a_run_that_chooses_its_rows_scores_those_and_goes_on_bit_for_bit(run):
    straight = run(directory="straight", max_steps=3, **EVERYTHING)
    calls = list(CALLS)
    assert [len(completions) for completions in calls] == [len(table(straight, step)) for step in (1, 2, 3)]
    assert calls[2] == [row["completion"] for row in table(straight, 3)]
    assert any(values["replay/groups"] for values in straight.metrics)
    run(directory="parts", max_steps=1, **EVERYTHING)
    resumed = run(directory="parts", max_steps=3, **EVERYTHING)
    assert tiny_run.bits(resumed.state) == tiny_run.bits(straight.state)
    for mine, whole in zip(resumed.metrics, straight.metrics[1:], strict=True):
        for name in (name for name in mine if name.startswith("steps/")):
            np.testing.assert_equal(mine[name], whole[name], err_msg=name)


def test_microbatches_change_nothing(run):
    assert_same(run(num_iterations=2), run(num_iterations=2, microbatch_completions=4, directory="cut"))


def assert_same(whole, cut):
    assert whole.state.params.keys() == cut.state.params.keys()
    for a, b in zip(*(jax.tree.leaves(one.state.params) for one in (whole, cut)), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


# --- an implicit process reward model ---------------------------------------------------------------------------------

IMPLICIT = {"step_reward": None, "implicit_prm": 0.1, "reward": ("test_process_run:begins_low",)}


def begins_low(*, completions):
    """Right where the first character is a digit below 5, or no digit."""
    return [float(text[:1] < "5") for text in completions]


def test_an_implicit_model_learns_from_outcomes_beside_an_adapter(run, files):
    options = IMPLICIT | {"lora_rank": 2, "step_normalise": True}
    found = run(max_steps=2, **options)
    plain = run(directory="plain", lora_rank=2, **IMPLICIT | {"implicit_prm": None})
    # It begins as its reference: it pays nothing, and is as wrong as a coin.
    assert table(found, 1) == table(plain, 1)
    first, second = found.metrics
    assert first["implicit_prm/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert first["loss"] - plain.metrics[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert second["implicit_prm/loss"] != pytest.approx(np.log(2), abs=1e-3)
    _, start, _ = load(files[0])
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), found.state.params["prm"], start)
    assert all(jax.tree.leaves(moved))
    again = run(directory="again", num_iterations=4, **options)  # the mean of four updates by one batch
    assert again.metrics[0]["implicit_prm/loss"] < np.log(2) - 0.03
    assert 0.5 < again.metrics[0]["implicit_prm/accuracy"] <= 1
    restored = restore_policy(found.directory, build_plan({"fsdp": -1}))
    assert tiny_run.bits(jax.device_get(restored.adapter.params)) == tiny_run.bits(found.state.params["policy"])


def test_policy_critic_and_implicit_model_go_on_bit_for_bit_and_microbatches_change_nothing(run):
    options = IMPLICIT | {"num_generations": 4, "num_iterations": 2, "step_credit": "mean", "max_steps": 2}
    straight = run("PPOConfig", directory="straight", **options)
    run("PPOConfig", directory="parts", **options | {"max_steps": 1})
    resumed = run("PPOConfig", directory="parts", **options)
    assert tiny_run.bits(resumed.state) == tiny_run.bits(straight.state)
    assert set(straight.state.params) == {"policy", "critic", "prm"}
    assert_same(straight, run("PPOConfig", directory="cut", microbatch_completions=4, **options))


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_step_reward_that_fails_ends_the_run_and_keeps_the_steps_before(run, tmp_path):
    with pytest.raises(RewardError, match=r"step_reward 'beyond' returned step 0 with value 2.0 .*\[0, 1\]"):
        run(step_reward="test_process_run:beyond", step_credit="product", max_steps=3)
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [1]
    CALLS.clear()
    found = run(directory="sums", step_reward="test_process_run:beyond", max_steps=2)  # where they are no chances
    assert found.metrics[1]["steps/mean_reward"] == 2.0
    rows = tiny_run.write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}="} for n in range(8)])
    with pytest.raises(RewardError, match="step_reward 'lab_step_rewards' needs the column 'operands'"):
        run(directory="lacks", dataset=rows, step_reward="jaxrl_lm.lab.task:lab_step_rewards")


def test_the_checker_of_the_lab_scores_steps(run):
    found = run(step_reward="jaxrl_lm.lab.task:lab_step_rewards", max_steps=2)
    assert all(values["steps/mean_reward"] == values["steps/mean_reward"] for values in found.metrics)
    assert 0 <= found.metrics[-1]["steps/mean_reward"] <= 1
