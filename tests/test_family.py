"""Runs of the policy-gradient family through the one loop: what the options do to prompts, advantages and weights."""

import json
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny_run

import jaxrl_lm
from jaxrl_lm.config import ExportConfig, GRPOConfig
from jaxrl_lm.data import batch_indices
from jaxrl_lm.inference import restore_policy, run_export
from jaxrl_lm.models import load, read_adapter
from jaxrl_lm.prepare import build_plan

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
    "max_steps": 2,
    "eval_steps": 0,
    "save_steps": 0,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    with tiny_run.compile_cache(directory / "cache"):
        yield tiny_run.save_model(directory / "model"), tiny_run.write_data(directory), directory


@pytest.fixture
def run(files, tmp_path):
    """run(name of the config class, **options): the Run and what it printed."""
    model, data, _ = files

    def call(
        config="GRPOConfig", *, directory="run", reward_functions=None, objective=None, advantages=None, **changes
    ):
        options = tiny_run.options(model, data, tmp_path / directory, **SMALL | changes)
        if reward_functions is not None:
            options["reward"] = ()
        own = {"reward_functions": reward_functions, "objective": objective, "advantages": advantages}
        return tiny_run.run(options, config, **own)

    return call


def table(run, step):
    return pq.read_table(run.directory / "completions" / f"step_{step:06d}.parquet").to_pylist()


def groups(run, step, name, size=4):
    return np.array([row[name] for row in table(run, step)]).reshape(-1, size)


def test_rloo_compares_with_the_others_of_the_group(run):
    found, _ = run("RLOOConfig", max_steps=1, num_generations=4)
    rewards, advantages = groups(found, 1, "digits"), groups(found, 1, "advantage")
    others = (rewards.sum(1, keepdims=True) - rewards) / 3
    np.testing.assert_allclose(advantages, rewards - others, atol=1e-5)  # the KL is 0: the policy is the reference
    assert abs(found.metrics[0]["kl"]) < 1e-5
    assert found.metrics[0]["sqrt_kl"] < 1e-2


def test_remax_compares_with_the_greedy_answer(run):
    asked = []

    def reward(*, prompts, completions, **_):
        asked.append(dict(zip(prompts, completions, strict=True)))
        return tiny_run.digits(completions=completions)

    found, _ = run(preset="remax", max_steps=1, reward_functions=[reward])
    _, greedy = asked  # one answer a prompt
    assert len(greedy) == 4
    rewards, advantages = groups(found, 1, "reward"), groups(found, 1, "advantage")
    baseline = [tiny_run.digits(completions=[greedy[row["prompt"]]])[0] for row in table(found, 1)[::4]]
    np.testing.assert_allclose(rewards - advantages, np.repeat(baseline, 4).reshape(4, 4), atol=1e-6)
    assert np.ptp(baseline) > 0 or np.ptp(rewards) > 0


def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(run, files):
    def reward(*, prompts, completions, group_ids, **_):
        """Every other group of a call has equal rewards."""
        values = tiny_run.digits(completions=completions)
        return [0.5 if group % 2 else value for value, group in zip(values, group_ids, strict=True)]

    found, _ = run(preset="dapo", overlong_buffer=4, reward_functions=[reward])
    for step, values in enumerate(found.metrics, start=1):
        assert values["dynamic_sampling/batches"] == 2
        assert values["dynamic_sampling/missing_groups"] == 0
        assert (np.ptp(groups(found, step, "reward"), axis=1) > 0).all()
        assert len(table(found, step)) == 16
    # Two batches a step: the prompts of the second step are the ninth and later ones of the order.
    order = batch_indices(16, seed=0, position=8, count=4)
    rows = [json.loads(line)["prompt"] for line in Path(files[1]["train"]).read_text().splitlines()]
    assert table(found, 2)[0]["prompt"] == rows[order[0]]


def test_a_batch_that_stays_short_trains_on_what_there_is(run):
    def reward(*, completions, group_ids, **_):
        values = tiny_run.digits(completions=completions)
        return [value if group == 0 else 0.5 for value, group in zip(values, group_ids, strict=True)]

    found, _ = run(preset="dapo", dynamic_sampling_batches=2, max_steps=1, reward_functions=[reward])
    assert found.metrics[0]["dynamic_sampling/missing_groups"] == 2
    assert len(table(found, 1)) == 8
    assert np.isfinite(found.metrics[0]["loss"])
    assert found.metrics[0]["grad_norm"] > 0
    # In minibatches of one group the empty ones are no optimiser steps.
    cut, _ = run(
        preset="dapo",
        dynamic_sampling_batches=2,
        minibatch_completions=4,
        mesh={"fsdp": 4, "tensor": 2},
        max_steps=1,
        directory="cut",
        reward_functions=[reward],
    )
    assert cut.metrics[0]["updates"] == 2
    assert int(cut.state.step) == 2


def test_ppo_learns_values_and_warms_its_critic_up(run, files):
    found, _ = run(
        "PPOConfig", num_iterations=2, critic_warmup_steps=1, max_steps=1, num_generations=1, prompts_per_step=16
    )
    assert found.state.params.keys() == {"policy", "critic"}
    _, start, _ = load(files[0])
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), found.state.params["policy"], start)
    assert all(jax.tree.leaves(same))  # only the critic has learned
    assert np.abs(found.state.params["critic"]["head"]["kernel"]).max() > 0
    values = found.metrics[0]
    assert values["value_loss"] > 0
    assert values["explained_variance"] <= 1
    assert values["updates"] == 2


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_ppo_moves_the_policy_too(run, files, critic):
    found, _ = run("PPOConfig", critic=critic, num_iterations=1, num_generations=2)
    _, start, _ = load(files[0])
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), found.state.params["policy"], start)
    assert all(jax.tree.leaves(moved))
    assert {"objective/kl", "objective/rlhf_reward", "objective/scores"} < found.metrics[-1].keys()
    assert ("trunk" in found.state.params["critic"]) == (critic == "separate")


def test_lora_trains_the_adapter_alone_and_exports_it(run, files, tmp_path):
    model, _, _ = files
    found, printed = run(lora_rank=2, lora_alpha=4.0, beta=0.1, max_steps=2, save_steps=1)
    assert "on 0.0 M parameters" in printed
    adapter = found.state.params["policy"]
    assert {str(path[-1].key) for path, _ in jax.tree_util.tree_leaves_with_path(adapter)} == {"lora_a", "lora_b"}
    assert abs(found.metrics[0]["kl"]) < 1e-6  # the fresh adapter is the base, which is the reference
    assert abs(found.metrics[1]["kl"]) > 1e-6
    base, params, _ = load(model)
    run_export(ExportConfig(run=str(found.directory), directory=str(tmp_path / "adapter"), adapter=True))
    config, read = read_adapter(tmp_path / "adapter", base)
    assert (config.rank, config.alpha) == (2, 4.0)
    assert tiny_run.bits(read) == tiny_run.bits(adapter)
    run_export(ExportConfig(run=str(found.directory), directory=str(tmp_path / "merged")))
    _, merged, _ = load(str(tmp_path / "merged"))
    assert not np.array_equal(
        merged["layers"]["attn"]["q_proj"]["kernel"], params["layers"]["attn"]["q_proj"]["kernel"]
    )
    assert np.array_equal(merged["embed"]["table"], params["embed"]["table"])
    again = restore_policy(found.directory, build_plan({"fsdp": -1}))
    assert tiny_run.bits(jax.device_get(again.params)) == tiny_run.bits(merged)


EVERYTHING = {
    "prompt_sampling": "curriculum",
    "oversample": 2,
    "replay_groups": 1,
    "replay_max_age": 8,
    "actions": "ngram",
    "ngram": 3,
    "token_scale": "entropy",
    "beta": 0.01,
    "target_kl": 0.1,
    "kl_token_power": 0.5,
    "reference_ema": 0.9,
    "entropy_coef": 0.01,
    "target_entropy": 2.7,
    "top_entropy_share": 0.8,
    "entropy_clip": "clip_cov",
    "cov_share": 0.2,
    "cov_low": 0.0,
    "max_drift": 0.5,
    "length_penalty": 0.1,
    "unlikeliness": 0.2,
    "max_approx_kl": 1e-6,
    "num_iterations": 3,
    "reward": ("tiny_run:plus",),
}


def test_a_run_with_everything_goes_on_bit_for_bit(run):
    """Curriculum, replay, a reference that follows, coefficients that move: all of it comes back on resume."""
    straight, _ = run(directory="straight", max_steps=4, **EVERYTHING)
    run(directory="parts", max_steps=2, **EVERYTHING)
    resumed, printed = run(directory="parts", max_steps=4, **EVERYTHING)
    assert "resumed from step 2" in printed
    assert tiny_run.bits(resumed.state) == tiny_run.bits(straight.state)
    clocks = ("time/", "step_time", "tokens_per_second/")
    for mine, whole in zip(resumed.metrics, straight.metrics[2:], strict=True):
        for name, value in mine.items():
            if not name.startswith(clocks):
                np.testing.assert_equal(value, whole[name], err_msg=name)
    last = straight.metrics[-1]
    assert last["updates"] == 2  # the policy has moved at the second update, which ends the batch
    assert last["kl_coef"] != 0.01
    assert last["replay/groups"] == 1.0
    assert 0 <= last["never_solved_share"] <= 1
    assert {"solve_rate/0", "advantage_share/100", "advantage_share_unscaled/0-25", "distinct_answers"} < last.keys()


def test_a_kl_budget_stops_the_run(run):
    found, printed = run(kl_budget=1e-4, max_steps=4)
    assert found.stopped.startswith("kl_budget=0.0001 is spent")
    assert found.step == 2  # at step 1 the policy is still the initial one
    assert "the run ends here" in printed
    assert found.metrics[-1]["sqrt_kl"] ** 2 > 1e-4


def test_a_kl_budget_halves_the_learning_rate(run):
    found, printed = run(kl_budget=1e-4, kl_budget_action="halve", max_steps=3)
    assert found.step == 3
    assert [values["learning_rate"] for values in found.metrics] == pytest.approx([1e-2, 1e-2, 5e-3])
    assert "the learning rate is halved" in printed
    assert float(found.state.extra["lr_scale"]) in (0.5, 0.25)


def test_a_sampler_that_drifts_is_scored_from_then_on(run):
    found, printed = run(max_sampler_gap=0.0, max_steps=2)
    assert "sampler and scorer differ by" in printed
    assert "sampler_correction=token_truncate" in printed
    assert found.metrics[1]["time/score"] > 0
    assert found.metrics[1]["clip_ratio/region_mean"] == 0  # the first update of a batch, in either mode
    assert abs(found.metrics[1]["approx_kl"]) < 1e-9


def test_seeds_are_runs_of_their_own(run, files, tmp_path):
    model, data, _ = files
    options = tiny_run.options(model, data, tmp_path / "seeds", **SMALL | {"seed": 3, "seeds": 2, "max_steps": 1})
    found = jaxrl_lm.train_seeds(GRPOConfig(**options))
    alone = [run(directory=f"alone_{seed}", seed=seed, max_steps=1)[0] for seed in (3, 4)]
    assert found["reward"].values == tuple(one.metrics[0]["reward"] for one in alone)
    assert found["grad_norm"].values == tuple(one.metrics[0]["grad_norm"] for one in alone)
    assert found["reward"].mean == pytest.approx(np.mean(found["reward"].values))
    # Student's t of one degree of freedom: 12.7062 standard errors.
    spread = abs(np.diff(found["reward"].values)[0]) / 2
    assert found["reward"].half == pytest.approx(12.7062 * spread, rel=1e-4)
    assert json.loads((tmp_path / "seeds" / "seeds.json").read_text())["reward"]["mean"] == found["reward"].mean
    assert (tmp_path / "seeds" / "seed_4" / "checkpoints").is_dir()


def test_train_refuses_several_seeds(run):
    with pytest.raises(ValueError, match="seeds=2: train makes one run"):
        run(seeds=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "ppo"}, "advantage='gae' with critic='none'"),
        ({"replay_groups": 1, "old_logprobs": "sampler"}, "replay_groups: old rows need a ratio"),
        ({"preset": "gpg", "replay_groups": 1, "sampler_correction": "none"}, "needs a sampler_correction"),
        (
            {"preset": "raft", "overlong_buffer": 2},
            "overlong_buffer changes the rewards that advantage='accepted' judges",
        ),
        ({"advantage": "max-rl", "beta": 0.1, "kl_in": "reward"}, "kl_in='reward' changes the rewards"),
        ({"preset": "raft", "multi_objective_aggregation": "normalize_then_sum"}, "leaves no reward that is right"),
        ({"oversample": 2, "num_generations": 1, "advantage": "constant"}, "train on the best of several completions"),
        ({"beta": 0.1, "reference_ema": 0.9, "param_dtype": "bfloat16"}, "small steps round to nothing"),
        ({"preset": "rloo", "scale_rewards": "batch"}, "scale_rewards='batch' has no effect"),
        ({"advantage_baseline": 0.5}, "advantage_baseline=0.5 has no effect"),
        ({"critic_model": "/nonexistent"}, "critic_model='/nonexistent' has no effect"),
        ({"kl_estimator": "k3"}, "kl_estimator='k3' has no effect"),
        ({"gamma": 0.9}, "gamma=0.9 has no effect"),
        ({"dual_clip": 0.5}, r"dual_clip=0.5: must be in \(1, inf\]"),
        ({"token_scale_alpha": 1.5}, r"token_scale_alpha=1.5: must be in"),
        ({"cov_low": 6.0}, "cov_low=6.0 is above cov_high=5.0"),
        ({"num_generations": 0}, "num_generations=0: must be at least 1"),
        ({"surrogate": "soft-gate", "delta": 2.0}, "delta has no effect on surrogate='soft-gate'"),
        ({"entropy_clip": "kl_cov"}, "with one update it is 0"),
        ({"target_kl": 0.1, "beta": 0.1, "kl_horizon": 2.0}, "kl_horizon=2.0: must be at least a fifth"),
        ({"critic": "shared"}, "advantage='group' with critic='shared'"),
        ({"advantage": "pass-at-k", "pass_k": 5}, "pass_k=5: must be from 1 to num_generations=4"),
        ({"preset": "gpg", "num_iterations": 2}, "surrogate='policy-gradient' has no ratio"),
        ({"importance_sampling_level": "action"}, "needs actions larger than tokens"),
        ({"target_kl": 0.1}, "target_kl moves beta, which is 0"),
        ({"reference_ema": 0.9}, "move a reference that beta=0 does not keep"),
        ({"beta": 0.1, "reference_ema": 0.9, "reference_reset_steps": 2}, "are both given"),
        ({"beta": 0.1, "reference_ema": 0.9, "kl_budget": 1.0}, "measured from the initial policy"),
        ({"reference_ema": 1.5, "beta": 0.1}, r"reference_ema=1.5: must be in \(0, 1\]"),
        ({"overlong_buffer": 8}, "overlong_buffer=8: must be below max_completion_length=8"),
        ({"replay_groups": 4}, "replay_groups=4: must be below prompts_per_step=4"),
        ({"token_scale": "planning"}, "token_scale='planning' needs planning_tokens"),
        ({"num_generations": 1, "drop": "equal", "advantage": "constant"}, "compares completions of one prompt"),
        ({"prompt_sampling": "bandit"}, "category_column='category': row 0 has no such value"),
        ({"lora_rank": 2, "lora_targets": ("query",)}, "lora targets"),
        ({"entropy_coef": 0.2, "target_entropy": 1.0}, "entropy_coef=0.2 is above entropy_coef_max=0.1"),
    ],
)
def test_options_that_contradict_each_other(run, changes, message):
    with pytest.raises(ValueError, match=message):
        run(**changes)


def test_a_mesh_does_not_change_ppo(run):
    """Whitening, value weights and denominators are those of the global batch, however its rows are split."""
    options = {
        "prompts_per_step": 8,
        "num_generations": 2,
        "num_iterations": 2,
        "minibatch_completions": 8,
        "max_steps": 1,
    }
    meshes = {"rows": {"data": 8}, "both": {"fsdp": 4, "tensor": 2}}
    first, second = (
        run("PPOConfig", directory=name, mesh=mesh, **options)[0].metrics[0] for name, mesh in meshes.items()
    )
    for name in ("loss", "value_loss", "kl", "grad_norm", "entropy", "approx_kl", "explained_variance", "reward"):
        assert first[name] == pytest.approx(second[name], rel=1e-3, abs=1e-5), name


def test_what_is_right_does_not_depend_on_the_scaling_of_rewards(run):
    def right(*, completions, **_):
        return [1.0] * len(completions)

    for aggregation in ("sum_then_normalize", "normalize_then_sum"):
        found, _ = run(
            reward_functions=[right], multi_objective_aggregation=aggregation, max_steps=1, directory=aggregation
        )
        assert found.metrics[0]["solve_rate/100"] == 1.0
        assert found.metrics[0]["never_solved_share"] == 0.0


def test_a_step_without_any_row_that_learns_changes_nothing(run, files):
    def right(*, completions, **_):
        return [1.0] * len(completions)

    found, _ = run(preset="gpg", reward_functions=[right], max_steps=1, kl_budget=1.0)
    _, start, _ = load(files[0])
    assert found.metrics[0]["updates"] == 0
    assert int(found.state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found.state.params["policy"]), start)


def test_groups_of_equal_rewards_are_no_rows_that_are_skipped(run, files):
    """Their advantages are 0; each has its optimiser step, its tokens are counted, and other terms learn from it."""

    def reward(*, completions, **_):
        return [0.5] * len(completions)

    changes = {"reward_functions": [reward], "max_steps": 1, "minibatch_completions": 4, "num_iterations": 1}
    found, _ = run(entropy_coef=0.1, **changes)
    values, rows = found.metrics[0], table(found, 1)
    assert values["frac_reward_zero_std"] == 1.0
    assert not groups(found, 1, "advantage").any()
    assert len(rows) == 16
    assert values["updates"] == int(found.state.step) == 4
    assert values["num_tokens"] == sum(len(row["prompt"]) + len(row["turn_ids"]) for row in rows)
    assert values["grad_norm"] > 0
    dropped, _ = run(entropy_coef=0.1, drop="equal", directory="dropped", **changes)  # where it is asked for
    assert dropped.metrics[0]["updates"] == int(dropped.state.step) == 0


def test_the_gap_to_the_sampler_is_that_of_the_first_update(run):
    """Later ones have moved away from the weights that sampled."""
    found, printed = run(old_logprobs="sampler", num_iterations=4, top_entropy_share=0.9, max_steps=1)
    assert found.metrics[0]["approx_kl/last"] > 1e-3
    assert found.metrics[0]["sampling/logp_difference/max"] < 1e-4
    assert "sampler and scorer differ" not in printed


@pytest.mark.parametrize("missing", ["max_approx_kl", "kl_budget"])
def test_an_objective_of_ones_own_must_log_what_a_limit_reads(run, missing):
    def objective(params, frozen, batch, *, model):
        return jax.numpy.sum(params["policy"]["embed"]["table"]) * 1e-3, {}

    with pytest.raises(ValueError, match=f"{missing} needs the metric"):
        run(objective=objective, max_steps=1, **{missing: 0.1})


def test_advantages_of_ones_own_have_no_critic(run):
    with pytest.raises(ValueError, match="critic: its values belong to advantage gae"):
        run("PPOConfig", advantages=lambda returns, **_: returns)


def test_a_reference_that_is_reset_is_the_policy_of_the_step_before(run):
    """So the KL of a step's own samples is 0 before its first update, however far the policy has gone."""
    found, _ = run(beta=0.1, reference_reset_steps=1, max_steps=3)
    assert all(abs(values["kl"]) < 1e-5 for values in found.metrics)
    assert tiny_run.bits(found.state.extra["reference"]) == tiny_run.bits(found.state.params["policy"])
    kept, _ = run(beta=0.1, max_steps=3, directory="kept")
    assert abs(kept.metrics[-1]["kl"]) > 1e-4


def test_a_bandit_draws_the_category_that_has_advantages(run, files, tmp_path):
    """Rewards of one category never differ: after a while its prompts are the minority."""
    rows = [json.loads(line) for line in Path(files[1]["train"]).read_text().splitlines()]
    rows = [{**row, "category": "dull" if number % 2 else "alive"} for number, row in enumerate(rows)]
    dataset = tiny_run.write_rows(tmp_path / "rows.jsonl", rows)

    def reward(*, completions, category, **_):
        values = tiny_run.digits(completions=completions)
        return [4 * value if kind == "alive" else 0.5 for value, kind in zip(values, category, strict=True)]

    found, _ = run(
        prompt_sampling="bandit", dataset=dataset, reward_functions=[reward], max_steps=8, learning_rate=1e-6
    )
    kinds = {row["prompt"]: row["category"] for row in rows}
    drawn = [kinds[row["prompt"]] for step in range(2, 9) for row in table(found, step)[::4]]
    assert drawn.count("alive") > drawn.count("dull")
