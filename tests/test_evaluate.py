"""Held-out evaluation and the probe: their numbers for planted outcomes, and that what evaluates never trains."""

import math

import numpy as np
import pytest
import tiny_run

from jaxrl_lm import GRPOConfig
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.evaluate import evaluate, probe, probe_message
from jaxrl_lm.prepare import prepare
from jaxrl_lm.rewards import RewardFunction
from jaxrl_lm.rollout import EVAL

pytestmark = pytest.mark.usefixtures("cached")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    return tiny_run.save_model(directory / "tiny"), tiny_run.write_data(directory)


@pytest.fixture(scope="module")
def setup(files, tmp_path_factory):
    """A run before its first step: four prompts a call, four samples a prompt; six test prompts."""
    model, data = files
    options = tiny_run.options(model, data, tmp_path_factory.mktemp("run") / "run")
    return prepare(GRPOConfig(**options))


@pytest.fixture(scope="module")
def weights(setup):
    import jax

    key = jax.device_put(jax.random.key(0), setup.steps.plan.replicated)
    state = setup.steps.init(setup.params, key)
    return setup.steps.prepare_decode(state.params["policy"], None), state.key


def planted(outcomes):
    """A reward that gives a prompt's completions these values, one after the other, call after call."""
    left = {prompt: list(values) for prompt, values in outcomes.items()}

    def reward(*, prompts, **_):
        return [left[prompt].pop(0) for prompt in prompts]

    return RewardFunction("planted", reward), left


def run_evaluate(setup, weights, functions, **changes):
    options = {"temperature": 1.0, "samples": 8, "limit": 100, "policy_step": 0, "name": "test"}
    return evaluate(setup.sampler, *weights, setup.eval_sets["test"], functions, **options | changes)


def prompts_of(rows):
    return [row["prompt"] for row in rows]


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_pass_at_k_and_greedy_accuracy_of_planted_outcomes(setup, weights):
    """Eight samples are asked for beside the greedy one; three calls of four give eleven. 0.5 is right, 0.49 is not."""
    correct = [0, 1, 3, 11, 5, 2]
    greedy = [1, 0, 0, 0, 0, 1]
    outcomes = {}
    for prompt, c, first in zip(prompts_of(setup.eval_sets["test"].rows), correct, greedy, strict=True):
        samples = np.random.default_rng(c).permutation([0.5] * c + [0.49] * (11 - c)).tolist()
        outcomes[prompt] = [0.5 * first, *samples]
    function, left = planted(outcomes)
    found = run_evaluate(setup, weights, (function,))
    assert not any(left.values())  # every one of them was asked for
    assert found.metrics["eval/test/greedy_accuracy"] == pytest.approx(2 / 6)
    assert found.metrics["eval/test/pass@1"] == pytest.approx(np.mean(correct) / 11)
    for k in (1, 2, 4, 8):
        expected = np.mean([1 - math.comb(11 - c, k) / math.comb(11, k) for c in correct])
        assert found.metrics[f"eval/test/pass@{k}"] == pytest.approx(expected)
    assert "eval/test/pass@16" not in found.metrics
    assert [record["samples"] for record in found.records] == [11] * 6
    assert [record["correct"] for record in found.records] == correct
    assert [record["greedy"] for record in found.records] == [bool(first) for first in greedy]
    sampled = [value for values in outcomes.values() for value in values[1:]]
    assert found.metrics["eval/test/rewards/planted/mean"] == pytest.approx(np.mean(sampled))


@pytest.mark.parametrize(("greedy", "sampled"), [(1.0, 0.0), (0.0, 1.0)])
def test_greedy_and_sampled_answers_are_never_mixed(setup, weights, greedy, sampled):
    prompts = prompts_of(setup.eval_sets["test"].rows)
    function, _ = planted({prompt: [greedy] + [sampled] * 3 for prompt in prompts})
    metrics = run_evaluate(setup, weights, (function,), samples=3).metrics
    assert metrics["eval/test/greedy_accuracy"] == greedy
    assert metrics["eval/test/pass@1"] == metrics["eval/test/pass@2"] == sampled


def test_abstentions_count_for_nothing_and_the_next_function_judges(setup, weights):
    """The first prompt is judged by the second function, the second one by none; the third has one sample less."""
    prompts = prompts_of(setup.eval_sets["test"].rows)[:3]
    first, _ = planted({prompts[0]: [None] * 4, prompts[1]: [None] * 4, prompts[2]: [1.0, None, 1.0, 0.0]})
    second, _ = planted({prompts[0]: [0.0, 1.0, 1.0, 0.0], prompts[1]: [None] * 4, prompts[2]: [0.0, None, 0.0, 0.0]})
    found = run_evaluate(setup, weights, (first, second._replace(name="second")), samples=3, limit=3)
    assert [(record["samples"], record["correct"]) for record in found.records] == [(3, 2), (0, 0), (2, 1)]
    assert [record["greedy"] for record in found.records] == [False, None, True]
    assert found.metrics["eval/test/greedy_accuracy"] == 0.5
    assert found.metrics["eval/test/pass@1"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found.metrics["eval/test/pass@2"] == 1.0  # of two samples of which one is right, and of three with two right
    assert "eval/test/pass@4" not in found.metrics
    assert found.metrics["eval/test/rewards/planted/mean"] == 0.5
    assert found.metrics["eval/test/rewards/second/mean"] == pytest.approx(2 / 5)


def test_the_same_weights_give_the_same_evaluation_whatever_the_step(setup, weights):
    one = run_evaluate(setup, weights, setup.eval_rewards, policy_step=0)
    assert one == run_evaluate(setup, weights, setup.eval_rewards, policy_step=7)
    assert [record["prompt"] for record in one.records] == setup.eval_sets["test"].texts
    other = run_evaluate(setup, weights, setup.eval_rewards, purpose=EVAL + 1)  # the second set has keys of its own
    assert other.metrics["eval/test/entropy"] != one.metrics["eval/test/entropy"]
    greedy = [record["greedy_completion"] for record in one.records]
    assert greedy == [record["greedy_completion"] for record in other.records]


def test_greedy_completions_lengths_and_entropy_are_those_of_the_sampler(setup, weights):
    found = run_evaluate(setup, weights, setup.eval_rewards, samples=3)
    prompts = setup.eval_sets["test"]
    texts, lengths, cut, logprobs = [], [], [], []
    for block, indices in enumerate(([0, 1, 2, 3], [4, 5])):
        arguments = (*weights, prompts, indices)
        options = {"purpose": EVAL, "step": block, "policy_step": 0}
        sampled = setup.sampler(*arguments, temperature=0.0, **options)
        assert sampled.texts == [text for text in sampled.texts[::4] for _ in range(4)]  # one answer a prompt
        texts += sampled.texts[::4]
        sampled = setup.sampler(*arguments, temperature=1.0, **options)
        rest = np.arange(sampled.count) % 4 != 0
        lengths += [len(ids) for ids, chosen in zip(sampled.completion_ids, rest, strict=True) if chosen]
        cut += sampled.truncated[rest].tolist()
        logprobs += sampled.logprob_sums[rest].tolist()
    assert [record["greedy_completion"] for record in found.records] == texts
    assert found.metrics["eval/test/mean_length"] == np.mean(lengths)
    assert found.metrics["eval/test/clipped_ratio"] == np.mean(cut)
    assert found.metrics["eval/test/entropy"] == pytest.approx(-sum(logprobs) / sum(lengths), rel=1e-6)


def test_limit_takes_the_first_prompts(setup, weights):
    found = run_evaluate(setup, weights, setup.eval_rewards, samples=3, limit=5)
    assert [record["prompt"] for record in found.records] == setup.eval_sets["test"].texts[:5]


def test_a_prompt_that_is_trained_on_is_refused(files, tmp_path):
    model, data = files
    held = [*tiny_run.problems("test", 3), tiny_run.problems("train", 2)[1]]
    sets = {"test": data["test"], "leaked": tiny_run.write_rows(tmp_path / "leaked.jsonl", held)}
    with pytest.raises(ValueError, match=r"eval_dataset 'leaked': 1 of its 4 prompts .* \(the first is row 3\)"):
        prepare(GRPOConfig(**tiny_run.options(model, data, tmp_path / "run", eval_dataset=sets)))


def test_evaluation_has_its_own_rewards_and_several_sets(files, tmp_path):
    model, data = files
    options = tiny_run.options(model, data, tmp_path, eval_reward_functions=("jaxrl_lm.lab.task:lab_answer",))
    setup = prepare(GRPOConfig(**options))
    assert [function.name for function in setup.eval_rewards] == ["lab_answer"]
    assert [function.name for function in setup.rewards] == ["digits", "shortness", "plus"]
    assert {name: len(prompts.ids) for name, prompts in setup.eval_sets.items()} == {"test": 6, "ood": 3}


# --- the probe --------------------------------------------------------------------------------------------------------


def run_probe(setup, weights, outcomes, limit=8):
    function, _ = planted(dict(zip(prompts_of(setup.prompts.rows), outcomes, strict=False)))
    return probe(setup.sampler, *weights, setup.prompts, (function,), temperature=1.0, limit=limit)


def solved(*counts):
    return [[1.0] * count + [0.0] * (4 - count) for count in counts]


def test_the_probe_counts_groups_without_an_advantage(setup, weights):
    found = run_probe(setup, weights, solved(0, 0, 4, 1, 2, 3, 4, 0))
    p = 14 / 32
    assert found == {
        "prompts": 8,
        "num_generations": 4,
        "pass@1": p,
        "pass@4": 5 / 8,
        "all_wrong": 3 / 8,
        "all_right": 2 / 8,
        "same_outcome": 5 / 8,
        "expected_same_outcome": pytest.approx((1 - p) ** 4 + p**4),
    }
    message = probe_message(found)
    assert message.startswith(
        "probe of 8 training prompts: pass@1 0.438, pass@4 0.625; 62% of groups all wrong (38%) or all right (25%); "
        "14% if prompts were equally hard"
    )
    for remedy in ("WARNING", "easier prompts", "larger num_generations", "supervised start"):
        assert remedy in message


def test_half_of_the_groups_is_no_reason_for_a_warning(setup, weights):
    found = run_probe(setup, weights, solved(0, 4, 1, 2, 3, 4, 0, 1))
    assert found["same_outcome"] == 0.5
    assert "WARNING" not in probe_message(found)


def test_the_probe_leaves_out_prompts_that_cannot_be_judged(setup, weights):
    outcomes = [*solved(4, 1), [None] * 4, [1.0, None, 1.0, 1.0]]
    found = run_probe(setup, weights, outcomes, limit=4)
    assert (found["prompts"], found["pass@1"], found["same_outcome"]) == (2, 5 / 8, 0.5)
    with pytest.raises(ValueError, match="probe: every reward function abstained on all of 4 prompts"):
        run_probe(setup, weights, [[None] * 4] * 4, limit=4)


def test_a_probe_of_fewer_prompts_than_a_call_takes(setup, weights):
    few = EncodedPrompts(*(part[:2] if isinstance(part, list) else part for part in setup.prompts))
    function, left = planted(dict(zip(prompts_of(few.rows), solved(4, 0), strict=True)))
    found = probe(setup.sampler, *weights, few, (function,), temperature=1.0, limit=64)
    assert (found["prompts"], found["pass@1"], found["same_outcome"]) == (2, 0.5, 1.0)
    assert not any(left.values())
