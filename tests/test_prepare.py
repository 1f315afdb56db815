"""What a run is put together from: presets resolved, notes, and every mistake met before anything is written."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_run

from jaxrl_lm import GRPOConfig, algos
from jaxrl_lm.checks import LEAST, check, resolve_algorithm, updates_per_step
from jaxrl_lm.lab.task import lab_step_rewards
from jaxrl_lm.prepare import prepare
from jaxrl_lm.prompt_sets import fingerprint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_run.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def options(model, data, tmp_path):
    return lambda **changes: GRPOConfig(**tiny_run.options(model, data, tmp_path / "run", **changes))


@pytest.fixture
def refused(options, tmp_path):
    """Asserts that options are refused with a message, and that nothing has been written."""

    def assert_refused(message, *, error=ValueError, dataset=None, functions=None, own=None, **changes):
        with pytest.raises(error, match=message):
            prepare(options(**changes), reward_functions=functions, dataset=dataset, **own or {})
        assert not (tmp_path / "run").exists()

    return assert_refused


# --- the algorithm ----------------------------------------------------------------------------------------------------

PLAIN = {
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.05,
    "sampler_correction": "token_truncate",  # several updates a batch: old log-probs are recomputed
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"loss_agg_mode": "token-mean"}),  # TRL's default loss_type, dapo
        ({"loss_type": "grpo"}, {"loss_agg_mode": "seq-mean-token-mean"}),
        ({"loss_type": "bnpo"}, {"loss_agg_mode": "token-mean"}),
        ({"loss_type": "dr_grpo"}, {"loss_agg_mode": "seq-mean-token-sum-norm"}),  # the reduction alone
        ({"preset": "grpo"}, {"loss_agg_mode": "seq-mean-token-mean"}),
        ({"preset": "dr_grpo"}, {"loss_agg_mode": "seq-mean-token-sum-norm", "scale_rewards": "none"}),
        ({"preset": "dapo"}, {"loss_agg_mode": "token-mean", "epsilon_high": 0.28, "dynamic_sampling": True}),
        # Options given beside them win.
        ({"preset": "dapo", "epsilon": 0.1, "dynamic_sampling": False},
         {"loss_agg_mode": "token-mean", "epsilon": 0.1, "epsilon_high": 0.28}),
        ({"num_iterations": 1, "minibatch_completions": None},
         {"loss_agg_mode": "token-mean", "sampler_correction": "none"}),
        ({"preset": "rloo", "beta": None}, {"advantage": "leave-one-out", "importance_sampling_level": "sequence-sum",
         "loss_agg_mode": "seq-mean-token-mean", "beta": 0.05, "kl_in": "reward"}),
        ({"actions": "ngram"}, {"loss_agg_mode": "token-mean", "importance_sampling_level": "action"}),
        ({"preset": "grpo", "epsilon": 0.1}, {"loss_agg_mode": "seq-mean-token-mean", "epsilon": 0.1, "epsilon_high": 0.1}),
        ({"epsilon": 0.1}, {"loss_agg_mode": "token-mean", "epsilon": 0.1, "epsilon_high": 0.1}),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, {"loss_agg_mode": "token-mean", "epsilon": 0.1, "epsilon_high": 0.3}),
        ({"epsilon_high": 0.3}, {"loss_agg_mode": "token-mean", "epsilon_high": 0.3}),
        ({"preset": "dr_grpo", "scale_rewards": "group"}, {"loss_agg_mode": "seq-mean-token-sum-norm"}),
        ({"preset": "grpo", "loss_type": "dr_grpo"}, {"loss_agg_mode": "seq-mean-token-sum-norm"}),
        ({"preset": "grpo", "loss_agg_mode": "seq-mean-token-sum"}, {"loss_agg_mode": "seq-mean-token-sum"}),
        ({"loss_type": "grpo", "loss_agg_mode": "token-mean"}, {"loss_agg_mode": "token-mean"}),
        ({"scale_rewards": "batch", "importance_sampling_level": "sequence"},
         {"loss_agg_mode": "token-mean", "scale_rewards": "batch", "importance_sampling_level": "sequence"}),
    ],
)  # fmt: skip
def test_what_presets_and_options_resolve_to(given, expected, options):
    assert resolve_algorithm(options(**given)) == algos.Preset(**PLAIN | expected)


def test_updates_per_step(options):
    assert updates_per_step(options()) == 4  # two passes over two minibatches of 8
    assert updates_per_step(options(num_iterations=1, minibatch_completions=None)) == 1
    assert updates_per_step(options(num_iterations=3, minibatch_completions=4)) == 12


# --- options ----------------------------------------------------------------------------------------------------------

STEPS = {"step_reward": "jaxrl_lm.lab.task:lab_step_rewards"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generations": 1}, "num_generations=1: GRPO compares completions of one prompt: use 2 or more"),
        ({"minibatch_completions": 12}, r"minibatch_completions=12 does not divide .* prompts_per_step × .* = 16"),
        ({"minibatch_completions": 2}, "minibatch_completions=2 is not a multiple of num_generations=4"),
        ({"microbatch_completions": 3}, "microbatch_completions=3 does not divide minibatch_completions=8"),
        ({"microbatch_completions": 2}, "microbatch_completions=2 is not divisible by the 4 devices"),
        ({"prompts_per_step": 6, "minibatch_completions": 8}, "prompts_per_step=6 is not divisible by the 4 devices"),
        ({"mesh": {"fsdp": 3}}, "mesh={'fsdp': 3} does not multiply to the 8 devices"),
        ({"mesh": {"fdsp": 8}}, "mesh: unknown axis 'fdsp'; the axes are data, fsdp, sequence, tensor"),
        ({"mesh": {"tensor": 8}}, "mesh: tensor=8 does not divide the model's num_heads=2"),
        ({"preset": "gpro"}, "preset='gpro' is unknown: use reinforce, reinforce_pp, rloo, "),
        ({"loss_type": "dpo"}, "loss_type='dpo' is unknown: use dapo, bnpo, grpo, dr_grpo"),
        ({"kl_estimator": "k1"}, "kl_estimator='k1' as a loss has an expected gradient of 0"),
        ({"reward": (), "reward_weights": ()}, "reward: no reward function is given"),
        ({"reward_weights": (1.0, 2.0)}, "reward_weights has 2 values for 3 reward functions"),
        ({"reward_weights": (0.0, 0.0, 0.0)}, "reward_weights: every weight is 0, nothing would be trained"),
        ({"reward_weights": (1.0, 1.0, float("inf"))}, "every weight must be finite"),
        ({"reward": ("digits",), "reward_weights": ()}, "reward='digits' is unknown; did you mean"),
        ({"reward": ("tiny_run:digit",), "reward_weights": ()}, "did you mean 'digits'"),
        ({"true_reward": "truth"}, "true_reward='truth' is none of the reward functions"),
        ({"temperature": 0.0}, "temperature=0.0: training samples, so it must be above 0"),
        ({"num_epochs": 1.0}, "max_steps and num_epochs are both given"),
        ({"best_metric": "eval/test/pass@1", "eval_steps": 0}, "best_metric='eval/test/pass@1' needs an eval_dataset"),
        ({"top_k": 0}, "top_k=0: must be at least 1"),
        ({"top_p": 1.5}, r"top_p=1.5: must be in \(0, 1\]"),
        ({"stop": ("",)}, "stop"),
        ({"lr_scheduler": "cosine", "warmup_steps": 20}, "warmup_steps=20 leaves nothing of the run's 20 optimiser steps"),
        ({"prompt_buckets": (8,)}, r"prompt_buckets=\(8,\): none holds a prompt of 14 tokens; add a longer one"),
        ({"max_prompt_length": 3}, "dataset: no prompt is left: all 16 have more than max_prompt_length=3 tokens"),
        ({"long_prompts": "error", "max_prompt_length": 10}, "dataset: row 15: the prompt has 14 tokens, more than max_p"),
        ({"prompt_template": "no place"}, "prompt_template='no place' holds {prompt} 0 times"),
        ({"step_reward": "steps"}, "step_reward='steps' is unknown: give package.module:function"),
        ({"step_credit": "min"}, "step_credit='min' has no effect without step_reward or implicit_prm: give step_reward,"),
        ({"step_normalise": True}, "step_normalise=True has no effect without step_reward"),
        ({"outcome_weight": 0.5}, "outcome_weight=0.5 has no effect without step_reward"),
        ({**STEPS, "outcome_weight": 0.0, "step_weight": 0.0}, "are both 0: nothing would be trained"),
        ({**STEPS, "preset": "rloo"}, "step_credit='sum-to-go' gives each token its own credit, and advantage='leave-one"),
        ({**STEPS, "preset": "remax", "num_iterations": 1, "minibatch_completions": None}, "advantage='greedy' compares"),
        ({**STEPS, "advantage": "max-rl", "step_credit": "min"}, "step_reward changes the rewards that advantage='max-rl'"),
        ({**STEPS, "step_credit": "mean", "step_normalise": True}, "step_credit='mean' is no sum: leave one of them out"),
        ({**STEPS, "step_credit": "last", "step_shaping": True}, "step_shaping guards the sums of step_credit='sum-to-go'"),
        ({**STEPS, "step_shaping": True}, "step_shaping .* advantage='group' normalises each: use advantage gae or batch"),
        ({**STEPS, "advantage": "batch", "step_shaping": True, "step_normalise": True}, "choose one of them"),
        ({"implicit_prm_coef": 2.0}, "implicit_prm_coef=2.0 has no effect without implicit_prm: give implicit_prm, or"),
        ({**STEPS, "implicit_prm_model": "m"}, "implicit_prm_model='m' has no effect without implicit_prm"),
        ({**STEPS, "implicit_prm": 0.05}, "step_reward and implicit_prm are both given: steps have one reward"),
        ({"implicit_prm": 0.05, "step_credit": "product"}, "step_credit='product' multiplies chances"),
        ({"implicit_prm": 0.05, "advantage": "batch", "step_shaping": True}, "what implicit_prm pays are such differences"),
        ({"implicit_prm": 0.05, "preset": "rloo"}, "step_credit='sum-to-go' gives each token its own credit"),
        ({"implicit_prm": 0.05, "advantage": "accepted"}, "implicit_prm changes the rewards that advantage='accepted'"),
        ({"implicit_prm": 0.0}, "implicit_prm=0.0"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(changes, message, refused):
    refused(message, **changes)


@pytest.mark.parametrize("name", LEAST)
def test_numbers_have_a_least_value(name, options):
    config = options()
    object.__setattr__(config, name, LEAST[name] - 1)  # whole numbers for floats too
    with pytest.raises(ValueError, match=f"^{name}={LEAST[name] - 1}: must be at least {LEAST[name]}$"):
        check(config, 4)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kl_in", "rewards", "kl_in = 'rewards': expected one of 'loss', 'reward'"),
        ("loss_agg_mode", "mean", "loss_agg_mode = 'mean': expected one of 'token-mean', 'seq-mean-token-mean'"),
        ("long_prompts", "cut", "long_prompts = 'cut': expected one of 'drop', 'keep_start', 'keep_end', 'error'"),
        ("max_steps", 2.5, "max_steps = 2.5: expected an integer"),
        ("reward", "digits", "reward = 'digits': expected a list of strings"),
    ],
)
def test_values_that_python_code_gives_are_checked_as_those_of_files_are(name, value, message, options):
    config = options()
    object.__setattr__(config, name, value)  # past the shape checks of the test session
    with pytest.raises(ValueError, match=message):
        prepare(config)


def test_own_parts_leave_no_option_without_effect(refused):
    own = {"objective": lambda params, frozen, batch, *, model: None}
    refused("epsilon has no effect beside an objective function of your own: leave it out", own=own, epsilon=0.1)
    refused("implicit_prm: its loss is added to the run's own", own=own, implicit_prm=0.05)
    own = {"advantages": lambda returns, *, group_size, valid: returns}
    refused("an advantages function of your own one number a completion: use mean, min, product", own=own, **STEPS)
    refused("scale_rewards has no effect beside an advantages function", own=own, scale_rewards="none")


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        ([], ValueError, "dataset: list holds no rows"),
        ([{"prompt": "1+1="}, {"question": "2+2="}], ValueError, "dataset: row 1 has no 'prompt'"),
        ([{"prompt": "1+1="}, {"prompt": ""}], ValueError, "dataset: row 1: the prompt is empty"),
        ([{"prompt": 7}], ValueError, "dataset: row 0: 'prompt' is 7"),
        ([{"prompt": [{"role": "user", "content": "1+1="}]}], ValueError, "row 0: the prompt is a chat.*no chat template"),
        ([{"prompt": "1+1=", "reward": "length"}], ValueError, "dataset: row 0: its column 'reward' names 'length'"),
        ("missing.jsonl", FileNotFoundError, "dataset: there is no file or directory 'missing.jsonl'"),
    ],
)  # fmt: skip
def test_bad_datasets(dataset, error, message, refused):
    refused(message, dataset=dataset, error=error, eval_dataset={}, best_metric=None)


def test_bad_evaluation_sets_are_named(refused, tmp_path):
    empty = tiny_run.write_rows(tmp_path / "empty.jsonl", [])
    refused("eval_dataset 'hard': .*empty.jsonl' holds no rows", eval_dataset={"hard": empty})
    routed = tiny_run.write_rows(tmp_path / "routed.jsonl", [{"prompt": "1+1=", "reward": "length"}])
    refused("eval_dataset 'hard': row 0: its column 'reward' names 'length'", eval_dataset={"hard": routed})


def test_long_prompts_are_dropped_or_cut_and_said(options):
    dropped = prepare(options(max_prompt_length=10))
    assert len(dropped.prompts.ids) == 15
    assert "dataset: 1 prompts dropped and 0 cut, longer than max_prompt_length=10" in dropped.notes
    cut = prepare(options(max_prompt_length=10, long_prompts="keep_end"))
    assert cut.tokenizer.decode(cut.prompts.ids[15]) == "1+1+1+1+1="
    assert "dataset: 0 prompts dropped and 1 cut, longer than max_prompt_length=10" in cut.notes
    assert not any("dropped" in note for note in prepare(options()).notes)


def test_buckets_are_said_and_made_up_where_none_are_given(options):
    setup = prepare(options(prompt_buckets=(24, 8)))
    assert setup.sampler.buckets == (8, 24)
    assert any(note.startswith("2 declared prompt bucket(s) [8, 24] + 8 new tokens") for note in setup.notes)
    setup = prepare(options(prompt_buckets=()))
    assert setup.sampler.buckets == (16,)
    assert any(note.startswith("1 declared prompt bucket(s) [16]") for note in setup.notes)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"max_steps": 7}, 7),
        ({"max_steps": None}, 100),
        ({"max_steps": None, "num_epochs": 2.5}, 10),
        ({"max_steps": None, "num_epochs": 0.0}, 1),
    ],
)
def test_length_of_a_run(changes, steps, options):
    assert prepare(options(**changes)).total_steps == steps  # 16 prompts, 4 a step


def test_rewards_of_steps_are_a_function_or_a_process_reward_model(options, monkeypatch):
    assert prepare(options()).step_reward is None
    setup = prepare(options(**STEPS))
    assert (setup.step_reward.name, setup.step_reward.function) == ("lab_step_rewards", lab_step_rewards)
    made = []

    class ProcessModel:
        def __init__(self, option, *, plan, dtype, hosted):
            made.append((option, plan.batch_ways, dtype, hosted))

        def __call__(self, prompts, completions):
            return [[] for _ in completions]

    monkeypatch.setattr("jaxrl_lm.judges.ProcessModel", ProcessModel)
    setup = prepare(options(step_reward="prm:somewhere?name=mine", dtype="float32"))
    assert made == [("prm:somewhere?name=mine", 4, "float32", False)]
    assert isinstance(setup.step_reward.function, ProcessModel)


def test_functions_of_the_caller_go_by_their_names(options):
    setup = prepare(options(reward=(), reward_weights=(), true_reward=None), reward_functions=[tiny_run.digits])
    assert setup.config.reward == ("digits",)
    assert [(function.name, function.weight) for function in setup.rewards] == [("digits", 1.0)]


def test_the_fingerprint_is_that_of_prompts_and_their_columns(options):
    rows = tiny_run.problems("train", 8)
    made = lambda rows: fingerprint(prepare(options(eval_dataset={}), dataset=rows).prompts)
    assert made(rows) == made([dict(reversed(row.items())) for row in rows])  # the order of columns is none
    assert len({made(rows), made(rows[::-1]), made(rows[1:]), made([{**rows[0], "answer": 1}, *rows[1:]])}) == 4


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(model, tmp_path):
    return Path(shutil.copytree(model, tmp_path / "model"))


def edit(path, **changes):
    table = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (table | changes).items() if value is not None}))


def test_no_end_of_sequence_token_is_known(copied, refused):
    edit(copied / "tokenizer_config.json", eos_token=None)
    for name in ("config.json", "generation_config.json"):
        edit(copied / name, eos_token_id=None)
    refused("no end-of-sequence token is known: set eos_token_id in generation_config.json", model=str(copied))


def test_a_vocabulary_larger_than_the_tokenizer_is_padding_and_said(options, tmp_path):
    setup = prepare(options(model=tiny_run.save_model(tmp_path / "padded", vocab_size=32)))
    assert "8 rows of the embedding have no token (padding); one that is sampled decodes to nothing" in setup.notes
    assert not any("padding" in note for note in prepare(options()).notes)


def test_a_tokenizer_larger_than_the_vocabulary(copied, refused):
    tokens = json.loads((copied / "tokenizer.json").read_text())
    tokens["model"]["vocab"]["<extra>"] = 24
    (copied / "tokenizer.json").write_text(json.dumps(tokens))
    refused("the tokenizer has 25 tokens, the embedding only 24 rows; they do not belong together", model=str(copied))


def test_a_truncated_safetensors_file(copied, refused):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(f"{path}", model=str(copied))


def test_no_such_model(refused, tmp_path):
    refused("no such file or directory", error=FileNotFoundError, model=str(tmp_path / "nowhere"))


def test_a_chat_template_makes_chats_of_prompts(options, tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    model = tiny_run.save_model(tmp_path / "chat", chat_template=template)
    rows = [{"prompt": [{"role": "user", "content": "1+1"}]}]
    setup = prepare(options(model=model, eval_dataset={}), dataset=rows)
    assert setup.prompts.texts == ["1+1="]
